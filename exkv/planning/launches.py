"""Report which devices have no kernels, and what that costs per token: a plan's dry run that counts
ops.

On a GPU each of torch's ops is a launch, which takes microseconds whatever it does; a kernel of
exkv's is one launch in place of all the ops of its reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from exkv.ops import REFERENCES
from exkv.ops.registry import FAKES, HOST
from exkv_ext import Missing, missing

from .dry_run import DryRun, predicted_on
from .model import ModelShape
from .op_calls import READING, Call, named_arguments
from .unit_call import Wanted
from .workspace import Promise, case_of, dry_call

#: Ops that compute nothing, though their schemas don't mark a view.
_FREE = ("aten::_unsafe_view", "aten::empty", "aten::new_empty")


def missing_kernels(
    model: ModelShape, promise: Promise, devices: Iterable[torch.device]
) -> dict[Missing, str]:
    """Why local devices lack kernels -> what that means for a model, in sentences."""
    found: dict[Missing, list[torch.device]] = {}
    for device in devices:
        if (lack := missing(device)) is not None:
            found.setdefault(lack, []).append(device)
    return {lack: _sentences(model, promise, lack, alike) for lack, alike in found.items()}


def _sentences(
    model: ModelShape, promise: Promise, lack: Missing, devices: list[torch.device]
) -> str:
    kind = devices[0].type
    ours, theirs = (
        launches_of_a_token(model, promise, kind, by_kernels=each) for each in (True, False)
    )
    calls = "calls of torch's ops" if kind in HOST else "launches"
    remedy = f" To mend it, type: {lack.remedy}" if lack.remedy else ""
    return (
        f"exkv has no kernels for {', '.join(map(str, devices))}: {lack.why}. PyTorch references "
        f"serve all ops, many times slower: with a full cache a token takes {theirs:,} {calls}, "
        f"compared to about {ours:,} with kernels.{remedy}"
    )


def launches_of_a_token(
    model: ModelShape, promise: Promise, device_type: str, *, by_kernels: bool
) -> int:
    """Launches of a call that adds the last token to each row of a full cache, summed over units.

    Args:
        promise: its first cache is used.
        device_type, by_kernels: as :class:`LaunchCount` takes them.
    """
    cache, lengths = replace(promise, max_input_len=1).worst_calls()[0]
    known: dict[tuple, int] = {}
    total = 0
    for unit in model.units:
        store = cache.layers[unit.spec.layer] if cache and unit.spec.layer is not None else None
        case = case_of(unit, store, lengths)
        if case not in known:
            run = LaunchCount(device_type, by_kernels=by_kernels)
            dry_call(run, model, unit, store, lengths, Wanted(last_id_only=True))
            known[case] = run.launches
        total += known[case]
    return total


class LaunchCount(DryRun):
    """Count ops that compute something.

    Args:
        device_type: of the devices to count for.
        by_kernels: whether one launch serves each of exkv's ops; if not, its reference does.
    """

    def __init__(self, device_type: str, *, by_kernels: bool) -> None:
        super().__init__(predicted_on(device_type), kernels=device_type)
        self.by_kernels = by_kernels
        self.launches = 0

    def restart(self, held: object) -> None:
        super().restart(held)
        self.launches = 0

    def _own_op(self, name: str, args: tuple) -> Any:
        if not self.by_kernels:
            return self._reference(name, named_arguments(name, args))
        self.launches += 1
        return FAKES[name](*args)

    def _reference(self, name: str, call: Call) -> Any:
        return (FAKES if name in READING else REFERENCES)[name](**call)  # the whole call

    def _shapes(self, func: OpOverload, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        self.launches += not (_is_view(func) or func.name().startswith(_FREE))
        return super()._shapes(func, args, kwargs)


def _is_view(op: OpOverload) -> bool:
    """Whether the result shares the argument's memory, and nothing is written."""
    aliases = (returned.alias_info for returned in op._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)
