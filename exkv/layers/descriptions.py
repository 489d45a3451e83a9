"""Descriptions: values that state what a module computes, which is all that a bound run
(``exkv.models.bound_run``) needs to know.

A function registered by :func:`describes` for a module type describes instances of exactly this
type. Subclasses are not described, since they may compute something else, nor are instances with
their own replaced method, a hook, or a parameter of an unknown kind. Such modules run through their
``forward``.

Norms with and without ``offset`` differ in more than their weights: with it, the factor is 1 +
weight and applied in float32, before rounding (Gemma); without it, the normed value is rounded
first (Llama).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from exkv import sim
from exkv.devices import rounded
from exkv.ops.attention import AttentionParams
from exkv.weights import Size, WeightFormat
from exkv.weights.floats import FLOATS

from .linear import Embedding, ExactLinear, Linear, Matrix, PlainModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over as many values as its weight has: the hidden state, all heads of a token, or one
    head. RMS norm, or layer norm if ``centered``, which may have a bias."""

    weight: Tensor
    eps: float
    offset: bool
    centered: bool = False
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A matrix in its weight format; ``size`` is (out, in)."""

    format: WeightFormat
    tensors: Mapping[str, Tensor]
    size: Size

    def rows(self, begin: int, end: int) -> Weight:
        """A view of a range of the matrix's rows.

        Raises:
            NotDescribed: the format can't be sliced at these rows.
        """
        tensors = self.format.part(self.tensors, begin, end)
        if tensors is None:
            raise NotDescribed(f"rows {begin} to {end} of weights in {self.format.name}")
        return Weight(format=self.format, tensors=tensors, size=(end - begin, self.size[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """A low-rank change B A of a matrix: a (rank, in), b (out, rank), scale included. For an
    embedding table, a is (vocabulary, rank), and b (hidden, rank)."""

    a: Tensor
    b: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both on a device."""
        return rounded(self.a.nbytes) + rounded(self.b.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLowRank:
    """A low-rank change for rows [first, last) of a call; for all rows if ``last`` is None."""

    low_rank: LowRank
    first: int = 0
    last: int | None = None

    def rows(self, x: Tensor) -> Tensor:
        """A view of these rows of x (B, ...)."""
        return x if self.last is None else x[self.first : self.last]

    def outputs(self, begin: int, end: int) -> RowsLowRank:
        """The change restricted to these outputs."""
        return replace(self, low_rank=replace(self.low_rank, b=self.low_rank.b[begin:end]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer: weight (out, in), all of a matrix or a range of its rows; bias (out,);
    low-rank changes for rows with adapters; and a factor of all that."""

    weight: Weight
    bias: Tensor | None
    low_rank: tuple[RowsLowRank, ...] = ()
    scale: float = 1.0

    def split(self, *sizes: int) -> list[Projection]:
        """Split the outputs into groups of these sizes, which share the matrix."""
        ends = list(accumulate(sizes))
        weights = [self.weight.rows(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        changes = [
            tuple(each.outputs(end - size, end) for each in self.low_rank)
            for size, end in zip(sizes, ends, strict=True)
        ]
        parts = zip(weights, biases, changes, strict=True)
        return [
            Projection(weight=w, bias=bias, low_rank=added, scale=self.scale)
            for w, bias, added in parts
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Projections of the normed input, optional norms of queries and keys, rotary positions,
    attention (``params``: scale, window, chunk, soft cap, rotary table, sinks), and the output
    projection. The first ``interleaved`` features of heads are rotated in interleaved pairs.

    Attributes:
        gated: whether each head's queries are followed by gates, whose sigmoids multiply
            attention's output.
        gates: a projection to gates instead, one for each head or for each of its features.
        soft_plus: whether their activation is softplus; a sigmoid if not.
        normed_rotated: whether the norms come after the rotation.
        query_factors: the rotary table whose factors multiply queries.
        input_scale: factor of the input.
    """

    query: Projection
    key: Projection
    value: Projection
    output: Projection
    query_norm: Norm | None
    key_norm: Norm | None
    head_dim: int
    interleaved: int
    params: AttentionParams
    gated: bool = False
    gates: Projection | None = None
    soft_plus: bool = False
    normed_rotated: bool = False
    query_factors: str | None = None
    input_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentBlock:
    """Attention over latent vectors (``exkv.layers.latent``). Queries come from the normed output
    of ``query_down``, or from the input if that is None; ``latent`` makes what is stored, before
    its norm. ``key_up`` and ``value_up`` have one matrix per head. ``query_factors``: see
    :class:`AttentionBlock`."""

    query: Projection
    latent: Projection
    output: Projection
    query_down: Projection | None
    query_norm: Norm | None
    latent_norm: Norm
    key_up: tuple[Weight, ...]
    value_up: tuple[Weight, ...]
    rotated: int
    interleaved: int
    params: AttentionParams
    query_factors: str | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Projections with one input each; queries' low-rank ones last, if there are any."""
        parts = (self.query, self.latent, self.output)
        return parts if self.query_down is None else (*parts, self.query_down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A causal convolution of each channel: weight (channels, 1, taps), bias (channels,)."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """A slice of a projection's outputs, by its index: ``count`` heads of ``size``, ``step``
    apart."""

    projection: int
    size: int
    offset: int = 0
    step: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a selective scan makes of the convolution's outputs: ``low`` gives steps' low ranks,
    what is written to states and what is read from them, side by side, each normed by one of
    ``norms``; ``steps`` makes steps of the first."""

    low: Projection
    norms: tuple[Norm, Norm, Norm]
    steps: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """What a layer with a state does after its convolution: ``gated_delta``, ``ssd`` or
    ``selective_scan``, and a gated norm of its outputs.

    Attributes:
        rule: "delta", "ssd" or "scan".
        groups: heads of keys; in state space duality, groups of heads with one norm each.
        step, beta: the outputs from which they are computed.
        step_bias: (heads,), or (all channels of keys,) where each has a step.
        rates: (heads,), or (channels, N) of a scan, logarithms.
        skip: factor (heads,) or (channels,) of the inputs that are added to the output; None for
            none.
        norm: None for a gate without one.
        gating: how norm and gate follow each other: "norm_then_gate", with the norm's outputs
            rounded first; "gate_then_norm" or "normed_and_gated", rounded once; or "gate".
        selection: of a scan.
        sigmoid: whether the gate's activation is a sigmoid; SiLU if not.
        order: heads of a group, if the output projection takes the first head of all groups first.
        limits: of steps.
    """

    rule: str
    rates: Tensor
    skip: Tensor | None
    norm: Norm | None
    gating: str
    groups: int = 1
    step: Outputs | None = None
    beta: Outputs | None = None
    step_bias: Tensor | None = None
    selection: Selection | None = None
    sigmoid: bool = False
    order: int = 1
    largest_beta: float = 1.0
    limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBlock:
    """A layer with a state in place of attention: projections, a causal convolution with SiLU and a
    recurrence, or a convolution alone, optionally between products; and the output projection.

    Attributes:
        inputs: the projections before the convolution.
        sources: for each, the earlier one whose outputs it takes, or -1 for the layer's input.
        mixed: the outputs that the convolution runs over, side by side.
        times: the outputs that ``mixed`` is first multiplied by.
        gate: the outputs that gate the layer's output.
        input_scale: factor of the layer's input.
    """

    inputs: tuple[Projection, ...]
    sources: tuple[int, ...]
    mixed: tuple[Outputs, ...]
    gate: Outputs
    convolution: Convolution
    output: Projection
    times: Outputs | None = None
    recurrence: Recurrence | None = None
    input_scale: float = 1.0

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The input projections, those of a selection, and the output projection."""
        of = None if self.recurrence is None else self.recurrence.selection
        return (*self.inputs, *(() if of is None else (of.low, of.steps)), self.output)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Norms of a selection, or that of the output, if there is one."""
        of = self.recurrence
        if of is None:
            return ()
        return tuple(filter(None, (of.norm,))) if of.selection is None else of.selection.norms

    @property
    def numbers(self) -> tuple[Weight | Tensor, ...]:
        """Parameters of the recurrence that may be in float32 in a model of another dtype."""
        if self.recurrence is None:
            return ()
        return tuple(parameters_in((self.recurrence.step_bias, self.recurrence.rates)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedBlock:
    """down(act(gate(x)) * up(x)); ``act`` by config.json's name. With a ``limit``, it is
    down(clamped_swiglu(gate(x), up(x))) instead (``exkv.ops.activations``)."""

    gate: Projection
    up: Projection
    down: Projection
    act: str
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def projections(self) -> tuple[Projection, ...]:
        """In the order in which they compute."""
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBlock:
    """down(act(up(x))); ``act`` by config.json's name."""

    up: Projection
    down: Projection
    act: str

    @property
    def projections(self) -> tuple[Projection, ...]:
        """In the order in which they compute."""
        return self.up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBlock:
    """A mixture of experts, plus a shared one that all tokens take, or None; its output is
    multiplied by the sigmoid of a gate's, if there is one. ``router`` has what ``route_experts``
    takes after the logits, which ``gate`` makes, and their ``correction``, float32 (experts,). The
    gate may be in float32, and then computes logits in it.

    Attributes:
        weighs_inputs: whether a token's weight multiplies an expert's input, not its output.
        before, after: projections of the experts' input, and of their sum; None for neither.
        on_host: experts in host memory while all else is on a card.
    """

    router: tuple[int | bool | float, ...]
    gate: Projection
    correction: Tensor | None
    experts: tuple[GatedBlock | PlainBlock, ...]
    shared: GatedBlock | PlainBlock | None = None
    shared_gate: Projection | None = None
    weighs_inputs: bool = False
    before: Projection | None = None
    after: Projection | None = None
    on_host: tuple[int, ...] = ()

    @property
    def projections(self) -> list[Projection]:
        """The router's gate; the projections of each expert but those on the host, the shared one
        last; its gate; those before and after experts."""
        here = [each for i, each in enumerate(self.experts) if i not in self.on_host]
        blocks = here if self.shared is None else [*here, self.shared]
        parts = [part for each in blocks for part in each.projections]
        others = (self.shared_gate, self.before, self.after)
        return [self.gate, *parts, *filter(None, others)]

    @property
    def exact(self) -> tuple[Weight | Tensor, ...]:
        """Parameters of the router, which may be in float32 in a model of another dtype."""
        return tuple(parameters_in((self.gate, self.correction)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """x + residual * after_attention(attention(before_attention(x))), then the same with the MLP
    and its norms; None stands for no norm, no attention or no MLP. A layer with a state has its
    block in attention's place, or ``beside`` it: their outputs are then added. If ``parallel``, the
    MLP runs beside attention instead of after it: its input is before_mlp(x), or attention's input
    if that is None. Attention or an MLP without a description is kept as a module."""

    attention: AttentionBlock | LatentBlock | StateBlock | nn.Module | None
    mlp: GatedBlock | PlainBlock | ExpertsBlock | nn.Module | None
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    residual: float = 1.0
    parallel: bool = False
    beside: StateBlock | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """Rows of a table (vocabulary, hidden), times a factor."""

    weight: Weight
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsHead:
    """The final norm, the projection to logits, times a factor, and c * tanh(logits / c) with a
    soft cap c."""

    norm: Norm
    projection: Projection
    softcap: float | None
    scale: float = 1.0


class NotDescribed(Exception):
    """A module's type has no description, or the instance deviates from it."""


Description = TypeVar("Description")

_describers: dict[type, Callable[[Any], Any]] = {}
#: Each type's methods when it was registered, to notice replacements.
_methods: dict[type, Mapping[str, object]] = {}


def describes(
    kind: type[PlainModule],
) -> Callable[[Callable[[Any], Description]], Callable[[Any], Description]]:
    """Register the decorated function as the description of instances of exactly this type."""

    def register(describer: Callable[[Any], Description]) -> Callable[[Any], Description]:
        _describers[kind] = describer
        _methods[kind] = _methods_of(kind)
        return describer

    return register


def describe(module: nn.Module) -> Any:
    """Describe what the module computes.

    Raises:
        NotDescribed: see :class:`NotDescribed`.
    """
    describer = _describers.get(type(module))
    if describer is None or not is_unchanged(module):
        raise NotDescribed(type(module).__name__)
    return describer(module)


def try_describe(module: nn.Module) -> Any | None:
    """As :func:`describe`; None if there is no description."""
    try:
        return describe(module)
    except NotDescribed:
        return None


def is_unchanged(module: nn.Module) -> bool:
    """Whether a call of the module runs exactly what its type was registered with."""
    assert isinstance(module, PlainModule)
    kind: type = type(module)
    hooked = module._forward_hooks or module._forward_pre_hooks
    if not module.watched or hooked or vars(module).keys() & _names_of_methods(kind):
        return False
    return _methods_of(kind) == _methods[kind]


def parameter(module: nn.Module, name: str) -> Tensor:
    """A parameter that is a plain tensor.

    Raises:
        NotDescribed: it is not, e.g. of a subclass with its own computation.
    """
    found = module._parameters[name]  # as nn.Module stores it: see PlainModule
    plain = type(found) in (nn.Parameter, Tensor)
    if found is None or not plain or found.layout != torch.strided:
        raise NotDescribed(f"{type(module).__name__}.{name} is a {type(found).__name__}")
    return found


def parameters_in(value: object) -> Iterator[Tensor | Weight]:
    """Yield all matrices and other tensors of a description."""
    if isinstance(value, (Tensor, Weight)):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from parameters_in(each)
    elif is_dataclass(value):
        for each in fields(value):
            yield from parameters_in(getattr(value, each.name))


def native_matrices(*weights: Weight) -> tuple[list[Tensor], list[int]]:
    """Tensors and layouts, as the ops of bound runs take them."""
    tensors = [weight.tensors[name] for weight in weights for name in weight.format.names]
    layouts = [weight.format.native(weight.size) or () for weight in weights]
    return tensors, [number for layout in layouts for number in layout]


def is_usable(value: Weight | Tensor, *dtypes: torch.dtype, devices: Sequence[str]) -> bool:
    """Whether it is in the memory of such a device and has one of these dtypes, or its format
    computes in any."""
    if isinstance(value, Weight):
        tensors, computes_in = list(value.tensors.values()), value.format.arithmetic
    else:
        tensors, computes_in = [value], value.dtype
    placed = (each.device.type in devices and each.is_contiguous() for each in tensors)
    return computes_in in (None, *dtypes) and all(placed) and not any(map(sim.is_dry, tensors))


def _methods_of(kind: type) -> dict[str, object]:
    own = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    return {
        name: value
        for base in reversed(own)
        for name, value in vars(base).items()
        if _is_method(value)
    }


@cache
def _names_of_methods(kind: type) -> frozenset[str]:
    """Names of instance attributes that would shadow a method."""
    names = {
        name for base in kind.__mro__ for name, value in vars(base).items() if _is_method(value)
    }
    return frozenset(names | {"_compiled_call_impl"})


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, property)


def weight_of(matrix: Matrix) -> Weight:
    """Describe a matrix; raise NotDescribed if native code doesn't know its format."""
    format = matrix.format
    if format.native(matrix.size) is None:
        raise NotDescribed(f"weights in {format.name}")
    tensors = {name: parameter(matrix, name) for name in format.names}
    return Weight(format=format, tensors=tensors, size=matrix.size)


@describes(Linear)
def _linear(linear: Linear) -> Projection:
    bias = None if linear._parameters["bias"] is None else parameter(linear, "bias")
    return Projection(weight=weight_of(linear), bias=bias)


@describes(ExactLinear)
def _exact(linear: ExactLinear) -> Projection:
    if linear.format is not FLOATS[torch.float32]:
        raise NotDescribed(f"a float32 layer of weights in {linear.format.name}")
    return _linear(linear)


@describes(Embedding)
def _embedding(embedding: Embedding) -> EmbeddingTable:
    if embedding.format.transform:
        raise NotDescribed(f"a table in {embedding.format.name}")
    return EmbeddingTable(weight=weight_of(embedding), scale=embedding.multiplier)
