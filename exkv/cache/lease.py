"""Exclusive use of a cache: one user at a time, so that two streams or threads never mix their
tokens.

A caller that works with a cache over several calls takes a lease, and enters it for each call.
Anyone else who would change the cache meanwhile gets a ``CacheUseError`` that names the holder. If
the storage is freed all the same (``Model.unload``), the lease is revoked, and its holder's next
call raises.
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

    >>> lease = cache.lease("Generator.stream")  # CacheUseError if it is in use
    >>> try:
    ...     while going:
    ...         with lease:  # this thread acts under the lease; never around a yield
    ...             logits = model.forward(ids, cache)
    ...         yield piece
    ... finally:
    ...     lease.release()

    Attributes:
        user: the holder, as error messages name it.
        revoked_by: what freed the storage; None while the lease is valid.
        released: whether the holder has given it back.
    """

    def __init__(self, leases: Leases, user: str) -> None:
        self.user = user
        self.revoked_by: str | None = None
        self.released = False
        self._leases = leases
        self._depth = 0

    def check(self) -> None:
        """Raise CacheUseError if the lease was revoked or released."""
        if self.released:
            raise CacheUseError(
                f"{self.user} is closed and has released {self._leases.name}: make a new one"
            )
        if self.revoked_by is not None:
            raise CacheUseError(
                f"{self.revoked_by} freed {self._leases.name} while {self.user} was using it: load "
                "the model again, and start over"
            )

    def __enter__(self) -> Lease:
        self.check()
        self._leases.enter(self)
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._leases.leave()

    def release(self) -> None:
        """Release the cache for the next user; idempotent."""
        self.released = True
        self._leases.release(self)


class Leased:
    """A user of a ``cache`` over several calls, with or without a lease."""

    cache: KVCache
    _lease: Lease | None = None

    @contextmanager
    def leased(self, user: str) -> Iterator[None]:
        """Hold a lease on the cache for a ``with`` block.

        Raises:
            CacheUseError: it is in use; and from each call within, if it was freed.
        """
        self._lease = self.cache.lease(user)
        try:
            yield
        finally:
            self._lease.release()
            self._lease = None

    def using(self) -> AbstractContextManager[object]:
        """Act under the lease, if there is one."""
        return self._lease or nullcontext()


class Leases:
    """Grants and revokes the lease of one cache.

    Args:
        name: of the cache, in error messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Condition()  # notified when a call ends
        self._lease: Lease | None = None
        self._acting: tuple[int, Lease] | None = None  # thread id, its lease

    def take(self, user: str) -> Lease:
        """Grant the lease to this user.

        Raises:
            CacheUseError: the cache is in use.
        """
        with self._lock:
            if self._lease is not None or self._acting is not None:
                raise self._refusal(user)
            self._lease = Lease(self, user)
            return self._lease

    def release(self, lease: Lease) -> None:
        """Release the lease, if it is the current one."""
        with self._lock:
            if self._lease is lease:
                self._lease = None

    def enter(self, lease: Lease) -> None:
        """Let this thread act under the lease.

        Raises:
            CacheUseError: another thread does.
        """
        with self._lock:
            if self._elsewhere():
                raise self._refusal(lease.user)
            self._acting = threading.get_ident(), lease

    def leave(self) -> None:
        with self._lock:
            self._acting = None
            self._lock.notify_all()

    @contextmanager
    def use(self, user: str) -> Iterator[None]:
        """Guard one call that changes the cache: under the lease that this thread has entered, or
        under a lease of its own."""
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

    def check_idle(self, user: str) -> None:
        """Raise CacheUseError if another thread is changing the cache right now. Between two calls
        of its holder, anyone may read it."""
        if self._elsewhere():
            raise self._refusal(user)

    def revoke(self, by: str, *, wait: bool = False) -> None:
        """Revoke the current lease.

        Args:
            wait: until another thread's call has ended; no later one begins meanwhile.

        Raises:
            CacheUseError: another thread is in the middle of a call, without ``wait``.
        """
        with self._lock:
            if self._elsewhere() and not wait:
                raise self._refusal(by)
            if self._lease is not None:
                self._lease.revoked_by = by
                self._lease = None
            self._lock.wait_for(lambda: not self._elsewhere())

    def _elsewhere(self) -> bool:
        acting = self._acting
        return acting is not None and acting[0] != threading.get_ident()

    def _refusal(self, user: str) -> CacheUseError:
        holder = self._lease or (self._acting and self._acting[1])
        return CacheUseError(
            f"{user} wants {self.name}, which {holder.user if holder else 'another'} is using: a "
            "cache has one user at a time. Wait for it to finish, or close() it if it is a stream, "
            "or build a second cache"
        )


def changes_cache(
    method: Callable[Concatenate[CacheT, P], R],
) -> Callable[Concatenate[CacheT, P], R]:
    """Decorate a cache method that only the cache's user may call."""

    @functools.wraps(method)
    def guarded(self: CacheT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._leases.use(f"cache.{method.__name__}"):
            return method(self, *args, **kwargs)

    return guarded


def mirrored(method: Callable[Concatenate[CacheT, P], R]) -> Callable[Concatenate[CacheT, P], R]:
    """Decorate a cache method that must run in every process that holds layers of the cache."""

    @functools.wraps(method)
    def call(self: CacheT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        own: Callable[[], R] = functools.partial(method, self, *args, **kwargs)
        if self.mirror is None:
            return own()
        return cast(R, self.mirror(self, method.__name__, args, kwargs, own))

    return call


def reads_cache(method: Callable[Concatenate[CacheT, P], R]) -> Callable[Concatenate[CacheT, P], R]:
    """Decorate a cache method that anyone may call while no other thread changes the cache."""

    @functools.wraps(method)
    def guarded(self: CacheT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._leases.check_idle(f"cache.{method.__name__}")
        return method(self, *args, **kwargs)

    return guarded
