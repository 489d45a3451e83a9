"""Proposals by an MTP head over hosts: the driver has every host take part in each step, in which
the hosts of the embedding, the MTP head and the model's head compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from exkv.models.mtp import Drafting

from .errors import WireError, raise_failures

if TYPE_CHECKING:
    from .model import ClusterModel


class HostsDrafting(Drafting):
    """The driver's :class:`Drafting`. If a host dies, the others recover as after any call, and no
    more tokens are proposed."""

    model: ClusterModel

    def step(
        self, tokens: Sequence[int], done: Sequence[int], going: Sequence[int]
    ) -> Tensor | None:
        model, pages = self.model, self.cache.pages
        if pages is not None:
            self.make_room(done, going)
        call = {
            "number": model.number_of(self.cache),
            "pages": None if pages is None else pages.rows[: len(tokens)],
            "begins": not any(done),
            "step": [list(tokens), list(done), list(going)],
        }
        failure: BaseException | None = None
        try:
            model.cluster.tell("draft", **call)
            return super().step(tokens, done, going)
        except WireError as error:
            reason = str(error)
        except BaseException as error:
            reason, failure = "the call failed here", error
        failed = model.recover(reason)
        if failure is not None:
            raise failure
        raise_failures(failed)
        return None
