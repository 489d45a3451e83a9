"""Run code on tensors that have a device and a shape but no memory, and count what it would take.

While a ``DryRun`` is active, every new tensor is a ``ShapeTensor``, every op computes shapes only,
and the storages that come and go on one device type are counted as its allocator would.
(``FakeTensorMode`` is torch's own such mode, but it imports torch's compiler, which takes a second;
and plain ``meta`` tensors don't say which device they are on, so that attention would take another
path than on the device.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from exkv.devices import rounded
from exkv.ops import REFERENCES, has_kernel
from exkv.ops.registry import FAKES

from .kernel_uses import kernel_use
from .live_storages import LiveStorages, Trace
from .op_calls import READING, SHORTER, Call, named_arguments
from .shapes import result_of

T = TypeVar("T")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class ShapeTensor(torch.Tensor):
    """A tensor that has a device but no memory.

    Attributes:
        meta: a ``meta`` tensor with its shape and storage.
        stands_for: the device type being planned for, where this tensor's own type replaces it.
        _is_param: how nn.Parameter marks tensors of subclasses.
    """

    meta: torch.Tensor
    stands_for: str | None = None
    _is_param: bool = False

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> ShapeTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made.meta = meta
        return made

    def __init__(self, meta: torch.Tensor, device: torch.device) -> None:
        super().__init__()

    # In torch.Tensor's own stubs, these two are untyped C++ functions.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise RuntimeError(f"{func} was called on a tensor of a dry run that has ended")


class DryRun(LiveStorages, TorchDispatchMode):
    """Count the bytes of storages on one device type, and their peak.

    Args:
        device_type: of the storages to count.
        kernels: the device type whose native kernels are assumed; None for the same.

    Attributes:
        device: a device of that type.
        current, peak: bytes, each storage rounded as allocators do.
        inputs: the number of requests before the unit's input is made.
    """

    def __init__(self, device_type: str, kernels: str | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.kernels = kernels or device_type
        self.inputs = 0
        self.device = torch.device("cpu" if device_type == "cpu" else f"{device_type}:0")

    @classmethod
    def planned_on(cls, device_type: str) -> DryRun:
        """A run for a device type that this build of torch may not support."""
        return cls(predicted_on(device_type), kernels=device_type)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, torch imports its compiler to keep this mode from being compiled."""
        return False

    def standing_for(self, meta: torch.Tensor, device: torch.device | None = None) -> ShapeTensor:
        """A tensor on ``device`` (default: the run's) that isn't counted yet.

        Args:
            meta: has its shape and storage.
        """
        made = ShapeTensor(meta, device or self.device)
        if made.device.type == self.device_type:
            made.stands_for = self.kernels
        return made

    def parameters(self, shapes: Mapping[str, torch.Tensor]) -> dict[str, ShapeTensor]:
        """Parameters of these shapes, on this run's device."""
        made = {name: self.standing_for(meta) for name, meta in shapes.items()}
        for parameter in made.values():
            parameter._is_param = True
        return made

    def restart(self, held: object) -> None:
        """Start counting anew with these tensors, and those that are made from now on."""
        self.forget_all()
        for tensor in _tensors(held):
            if isinstance(tensor, ShapeTensor):
                self._follow(tensor)
        self.inputs = len(self.trace)

    def measured(self, call: Callable[[], T]) -> tuple[T, int, Trace]:
        """Make a call -> its result, its peak bytes beyond those live before it, and its
        allocation requests."""
        before, begun, events = self.peak, self.current, len(self.trace)
        self.peak = begun
        out = call()
        taken = self.peak - begun
        self.peak = max(before, self.peak)
        return out, taken, self.trace[events:]

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "exkv":
            with self:  # so that the ops it decomposes into are counted
                return self._own_op(func.name().removeprefix("exkv::"), args)
        # SDPA, for one, decomposes into other ops, and converts its mask.
        if func.namespace == "aten" and (key := _composite_key(func)) is not None:
            with self:
                return func._op_dk(key, *args, **kwargs)
        return self._shapes(func, args, kwargs)

    # One of exkv's ops --------------------------------------------------------------------

    def _own_op(self, name: str, args: tuple) -> Any:
        """Count an exkv op as the kernel, or else the reference, serves it."""
        call = named_arguments(name, args)
        if not has_kernel(name, self.kernels):
            return self._reference(name, call)
        use = kernel_use(name, self.kernels, call)
        out = FAKES[name](*call.values()) if use.takes else self._reference(name, call)
        self.pass_through(rounded(use.scratch))  # beside the results
        return out

    def _reference(self, name: str, call: Call) -> Any:
        """The reference's results, from a reduced call that shows its peak with as little work as
        possible."""
        if name in READING:
            return FAKES[name](*call.values())
        changes = SHORTER[name](call) if name in SHORTER else {}
        if not changes:
            return REFERENCES[name](**call)
        before, self.peak = self.peak, self.current
        events = len(self.trace)
        out = REFERENCES[name](**call | changes)
        peak, shorter = self.peak, self.current
        del out
        del self.trace[events:]
        self.peak = before
        out = FAKES[name](*call.values())
        # The reference holds all its results at its peak.
        self.pass_through(peak - shorter)
        return out

    # One op -------------------------------------------------------------------------------

    def _shapes(self, func: OpOverload, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The op's results, computed from shapes alone."""
        given = {id(meta): (tensor, meta) for tensor, meta in _with_metas((args, kwargs))}
        metas = {id(tensor): meta for tensor, meta in given.values()}
        device = kwargs.get("device")
        where = _device_of(tensor for tensor, _ in given.values()) if device is None else device
        known = {meta.untyped_storage()._cdata for _, meta in given.values()}

        def result(meta: torch.Tensor) -> torch.Tensor:
            if id(meta) in given:  # an argument, written in place
                return given[id(meta)][0]
            made = self.standing_for(meta, torch.device(where))
            if meta.untyped_storage()._cdata not in known:
                self._follow(made)
            return made

        to_meta = {"device": torch.device("meta")} if device is not None else {}
        pinned = {"pin_memory": False} if kwargs.get("pin_memory") else {}
        swap = functools.partial(_mapped, lambda tensor: metas[id(tensor)])
        keywords = {name: swap(value) for name, value in kwargs.items()} | to_meta | pinned
        return _mapped(result, result_of(func, swap(args), keywords))

    def _follow(self, tensor: ShapeTensor) -> None:
        """Count the tensor's storage until it is freed."""
        if tensor.device.type == self.device_type:
            self.follow(tensor.meta.untyped_storage())


@functools.cache
def _composite_key(op: OpOverload) -> torch._C.DispatchKey | None:
    """The dispatch key under which the op decomposes into others; None if it is one kernel."""
    if op is torch.ops.aten._safe_softmax.default:  # SDPA's, which marks the scores that are -inf
        return torch._C.DispatchKey.CompositeExplicitAutograd
    return _COMPOSITE if op.has_kernel_for_dispatch_key(_COMPOSITE) else None


def _tensors(values: object) -> Iterator[torch.Tensor]:
    """Tensors in an op's arguments or results, through lists, tuples and dictionaries."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same structure with ``change`` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, item) for item in value)
    return value


def _with_metas(values: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor and its shape on ``meta``; of a real tensor, too, only the shape is read."""
    for tensor in _tensors(values):
        if isinstance(tensor, ShapeTensor):
            yield tensor, tensor.meta
        else:
            size, stride = tensor.size(), tensor.stride()
            yield tensor, torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


def _device_of(tensors: Iterator[torch.Tensor]) -> torch.device:
    """Where an op on these computes: host scalars and indices follow the device."""
    found = torch.device("cpu")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return tensor.device
    return found


def predicted_on(device_type: str) -> str:
    """The device type to predict on. A torch built without CUDA can't index tensors on it, not even
    shapes; the prediction then uses host tensors, which take the same path through exkv's own
    ops."""
    built = {"cuda": torch.version.cuda or torch.version.hip, "xpu": torch.version.xpu}
    return device_type if built.get(device_type, True) else "cpu"
