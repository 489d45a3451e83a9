"""Who uses a cache: one at a time, so that two streams or threads never mix their tokens.

A caller that works with a cache over several calls takes a lease, and acts in its name for as long
as each call lasts. Whoever else would change the cache meanwhile gets a ``CacheUseError`` that says
who has it. What takes the storage away all the same (``Model.unload``) revokes the lease, and its
holder learns of that from the next call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from exkv.errors import CacheUseError

if TYPE_CHECKING:
    from .base import KVCache

P = ParamSpec("P")
R = TypeVar("R")
CacheT = TypeVar("CacheT", bound="KVCache")


class Lease:
    """The right to change a cache, until :meth:`release`; a context manager for each call.

    >>> lease = cache.lease("Generator.stream")  # CacheUseError where somebody else has it
    >>> try:
    ...     while going:
    ...         with lease:  # this thread acts for the lease; never around a yield
    ...             logits = model.forward(ids, cache)
    ...         yield piece
    ... finally:
    ...     lease.release()

    Attributes:
        user: whose it is, as error messages name it.
        revoked_by: what took the storage away; None as long as the lease is good.
        released: whether its user has no right to the cache any more.
    """

    def __init__(self, desk: Desk, user: str) -> None:
        self.user = user
        self.revoked_by: str | None = None
        self.released = False
        self._desk = desk
        self._depth = 0

    def check(self) -> None:
        """CacheUseError where the lease was revoked or released."""
        if self.released:
            raise CacheUseError(
                f"{self.user} is closed and has released {self._desk.name}: make a new one"
            )
        if self.revoked_by is not None:
            raise CacheUseError(
                f"{self.revoked_by} freed {self._desk.name} while {self.user} was using it: load "
                "the model again, and begin anew"
            )

    def __enter__(self) -> Lease:
        self.check()
        self._desk.enter(self)
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._desk.leave()

    def release(self) -> None:
        """Let the next user have the cache; a second time changes nothing."""
        self.released = True
        self._desk.give_back(self)


class Leased:
    """Whoever works with a ``cache`` over several calls, with a lease or without one."""

    cache: KVCache
    _lease: Lease | None = None

    @contextmanager
    def leased(self, user: str) -> Iterator[None]:
        """The cache is this user's for the length of a ``with`` block.

        Raises:
            CacheUseError: somebody else has it; and of each call within, where it was freed.
        """
        self._lease = self.cache.lease(user)
        try:
            yield
        finally:
            self._lease.release()
            self._lease = None

    def using(self) -> AbstractContextManager[object]:
        """In the name of the lease, if there is one."""
        return self._lease or nullcontext()


class Desk:
    """Where a cache's lease is taken and given back.

    Args:
        name: of the cache, in error messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._acting: tuple[int, Lease] | None = None  # a thread, and for which lease it acts

    def take(self, user: str) -> Lease:
        """The lease, for this user.

        Raises:
            CacheUseError: somebody has it.
        """
        with self._lock:
            if self._lease is not None or self._acting is not None:
                raise self._refusal(user)
            self._lease = Lease(self, user)
            return self._lease

    def give_back(self, lease: Lease) -> None:
        """Nobody has it then."""
        with self._lock:
            if self._lease is lease:
                self._lease = None

    def enter(self, lease: Lease) -> None:
        """This thread acts for the lease from now on.

        Raises:
            CacheUseError: another thread does.
        """
        with self._lock:
            if self._elsewhere():
                raise self._refusal(lease.user)
            self._acting = threading.get_ident(), lease

    def leave(self) -> None:
        self._acting = None

    @contextmanager
    def use(self, user: str) -> Iterator[None]:
        """One call that changes the cache: in the name of the lease for which this thread acts, or
        else with a lease for as long as the call lasts."""
        acting = self._acting
        if acting is not None and acting[0] == threading.get_ident():
            acting[1].check()
            yield
            return
        lease = self.take(user)
        try:
            with lease:
                yield
        finally:
            lease.release()

    def check_quiet(self, user: str) -> None:
        """CacheUseError where another thread is changing the cache at this moment. Between two
        calls of its user, anybody may read it."""
        if self._elsewhere():
            raise self._refusal(user)

    def revoke(self, by: str) -> None:
        """Take the lease from whoever has it.

        Raises:
            CacheUseError: another thread is in the middle of a call.
        """
        with self._lock:
            if self._elsewhere():
                raise self._refusal(by)
            if self._lease is not None:
                self._lease.revoked_by = by
                self._lease = None

    def _elsewhere(self) -> bool:
        acting = self._acting
        return acting is not None and acting[0] != threading.get_ident()

    def _refusal(self, user: str) -> CacheUseError:
        holder = self._lease or (self._acting and self._acting[1])
        return CacheUseError(
            f"{user} wants {self.name}, which {holder.user if holder else 'another'} is using: a "
            "cache has one user at a time. Let that one finish, or close() it if it is a stream, "
            "or build a second cache"
        )


def changes_cache(
    method: Callable[Concatenate[CacheT, P], R],
) -> Callable[Concatenate[CacheT, P], R]:
    """A method of a cache that its user alone may call."""

    @functools.wraps(method)
    def guarded(self: CacheT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._desk.use(f"cache.{method.__name__}"):
            return method(self, *args, **kwargs)

    return guarded


def mirrored(
    method: Callable[Concatenate[CacheT, P], R],
) -> Callable[Concatenate[CacheT, P], R]:
    """A method of a cache that every process calls which holds a part of its layers."""

    @functools.wraps(method)
    def call(self: CacheT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        own: Callable[[], R] = functools.partial(method, self, *args, **kwargs)
        if self.mirror is None:
            return own()
        return cast(R, self.mirror(self, method.__name__, args, kwargs, own))

    return call


def reads_cache(
    method: Callable[Concatenate[CacheT, P], R],
) -> Callable[Concatenate[CacheT, P], R]:
    """A method of a cache that anybody may call while no other thread changes it."""

    @functools.wraps(method)
    def guarded(self: CacheT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._desk.check_quiet(f"cache.{method.__name__}")
        return method(self, *args, **kwargs)

    return guarded
