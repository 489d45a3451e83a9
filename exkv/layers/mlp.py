"""MLPs: gated (Shazeer, 2020: SwiGLU and kin), plain, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from exkv import epochs
from exkv.checkpoint import ClampedExpertsConfig, ExpertsConfig, ModelConfig, read_ahead
from exkv.ops.activations import ACTIVATIONS, activated
from exkv.ops.experts import (
    MOST_EXPERTS,
    Routing,
    chooses_on,
    sum_of_choices,
    sum_of_experts,
    takes_whole_calls,
)
from exkv.ops.weight_groups import is_decode_sized
from exkv.weights.floats import FLOATS
from exkv.weights.format import WeightFormat, mixed_experts

from .descriptions import (
    ExpertsBlock,
    GatedBlock,
    NotDescribed,
    PlainBlock,
    Projection,
    describe,
    describes,
    parameter,
    try_describe,
)
from .linear import ExactLinear, Linear, PlainModule, parameters_of, weight
from .low_rank import side_by_side
from .routing import Router
from .split_experts import ExpertStaging, Meanwhile, split_sum


class MLP(PlainModule):
    """``forward(x)``, x (B, T, hidden) -> (B, T, hidden)."""


class GatedMLP(MLP):
    """down(act(gate(x)) * up(x)); x (..., hidden) -> (..., hidden).

    Args:
        inner: intermediate size; None for the config's.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, inner: int | None = None) -> None:
        super().__init__()
        inner = config.intermediate_size if inner is None else inner
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = side_by_side(x, (self.gate_proj, self.up_proj))
        ACTIVATIONS[self.act].gate(gate, up)
        del up  # free it before the next projection
        return self.down_proj(gate)


class FusedGatedMLP(MLP):
    """A gated MLP with gate and up as the two halves of one matrix, as in Phi-3's checkpoints."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate = gate.contiguous()
        ACTIVATIONS[self.act].gate(gate, up)
        return self.down_proj(gate)


class PlainMLP(MLP):
    """down(act(up(x))); x (B, T, hidden) -> (B, T, hidden).

    Args:
        inner: intermediate size; None for the config's.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, inner: int | None = None) -> None:
        super().__init__()
        inner = config.intermediate_size if inner is None else inner
        hidden, bias = config.hidden_size, config.mlp_bias
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(activated(self.up_proj(x), self.act))


class Expert(nn.Module):
    """One expert's weights, under Mixtral's names: w1 is the gate, w3 up, w2 down. ``Experts`` runs
    them."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.w1 = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.w2 = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.w3 = Linear(hidden, inner, bias=bias, dtype=dtype)


class Experts(MLP):
    """A mixture of experts: each token is routed to a few of them, and their outputs are summed,
    weighted by the router; x (B, T, hidden) -> (B, T, hidden).

    Args:
        bias: whether router and experts have biases.
        sigmoid: see :class:`Router`.
        corrected: whether the scores have a correction, used only to choose experts.
        exact: whether the router computes in float32, whatever the model's dtype.
        tolerance: see :class:`Router`.

    Attributes:
        on_host: experts whose weights lie in host memory while all else is on a card.
        staging: the buffers through which these come to the card.
        from_disk: whether experts may have to be read from disk, so that calls read ahead.
        has_op: whether the op ``experts`` computes the same as :meth:`output`.
    """

    on_host: frozenset[int] = frozenset()
    staging: ExpertStaging | None = None
    from_disk: bool = False
    has_op: bool = True

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        sigmoid: bool = False,
        corrected: bool = False,
        exact: bool = False,
        tolerance: float | None = None,
    ) -> None:
        super().__init__()
        settings, hidden = config.settings(ExpertsConfig), config.hidden_size
        count, self.act = settings.num_local_experts, config.hidden_act
        self.router = Router.of(settings, sigmoid=sigmoid, tolerance=tolerance)
        inner = settings.moe_intermediate_size or config.intermediate_size
        made = ExactLinear if exact else Linear
        self.gate, self.dtype = made(hidden, count, bias=bias, dtype=dtype), dtype
        self.correction = weight(count, dtype=torch.float32) if corrected else None
        self.experts = nn.ModuleList(Expert(hidden, inner, dtype, bias=bias) for _ in range(count))
        #: How many tokens chose each of the router's outputs: int64, on the host if some experts
        #: lie there, else beside the router; None while nobody counts.
        self.counts: Tensor | None = None

    @property
    def count(self) -> int:
        """Experts to choose from."""
        return len(self.experts)

    @property
    def chooses_on_device(self) -> bool:
        """Whether experts of up to ``MOST_CHOOSING`` tokens are chosen without the host."""
        if self.on_host or self.from_disk or not (self.bare and self.gate.bare):
            return False
        device = next(self.experts.parameters()).device
        return self.are_chosen(device, self.dtype, 1)

    def are_chosen(self, device: torch.device, dtype: torch.dtype, tokens: int) -> bool:
        """Whether kernels choose among all experts' matrices for so many tokens of this dtype."""
        if not chooses_on(device, tokens):
            return False
        key, found = (epochs.current(), device, dtype), self.__dict__.get("_are_chosen")
        if found is None or found[0] != key:
            found = self.__dict__["_are_chosen"] = key, self._may_be_chosen(device, dtype)
        return found[1]

    def _may_be_chosen(self, device: torch.device, dtype: torch.dtype) -> bool:
        own = type(self).output is not Experts.output  # another form, which the choice doesn't have
        if own or len(self.experts) > MOST_EXPERTS:
            return False
        for linears in zip(*self.matrices(), strict=True):  # all gates, all ups, all downs
            first = linears[0]
            if not first.format.chooses(first.size, dtype):
                return False
            codes = first.format is not FLOATS.get(dtype)
            if not chooses_on(device, 1, codes=codes):
                return False
            if not all(_is_like(each, first) for each in linears):
                return False
        return True

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (B * T, hidden)
        return self.run(tokens, self.counted(self.route(tokens))).view_as(x)

    def route(self, x: Tensor) -> Routing:
        """Choose the experts of each token of x (N, hidden)."""
        return self.router.route(self.gate(x), self.correction)

    def counted(self, routing: Routing) -> Routing:
        """Count the routing's tokens, without synchronization, and return it; if some experts are
        on the host, :func:`split_sum` counts."""
        if self.counts is not None and not self.on_host:
            ids = routing.chosen.flatten()
            self.counts.scatter_add_(0, ids, ids.new_ones(()).expand_as(ids))
        return routing

    def beside(self, x: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        """The output plus what all tokens take, computed while the host runs its experts.

        Args:
            shared: from x to a tensor like it.
        """
        tokens = x.flatten(0, 1)
        if not (self.on_host and is_decode_sized(tokens)):
            return shared(x).add_(Experts.forward(self, x))
        meanwhile = Meanwhile(lambda: shared(x))
        routed = self.run(tokens, self.route(tokens), meanwhile).view_as(x)
        return meanwhile.result().add_(routed)

    def run(self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> Tensor:
        """x (N, hidden) -> (N, hidden).

        Args:
            meanwhile: computed at the same time.
        """
        return self.sum(x, routing, meanwhile)

    def sum(self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> Tensor:
        """The weighted sum of the chosen experts' outputs, wherever their weights lie."""
        if self.on_host:
            return split_sum(self, x, routing, meanwhile)
        if self.from_disk:
            self.read_ahead(routing.chosen.unique().tolist())
        return self.sum_of(range(self.count), x, routing)

    def sum_of(self, experts: Sequence[int], x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum over some experts, on the device of x; the routing holds their positions
        among ``experts``."""
        if self.are_chosen(x.device, x.dtype, len(x)):
            parts = zip(*self.matrices(experts), strict=True)
            gate, up, down = (partial(products_of_chosen, linears) for linears in parts)
            return sum_of_choices(x, routing, (gate, up, down), self.combined)
        if self.has_op and (routing.counts is None or takes_whole_calls(x)):
            formats = self.formats() if len(experts) < self.count else None
            return run_experts(x, routing, self.matrices(experts), self.act, formats)

        def run(place: int, inputs: Tensor) -> Tensor:
            return self.output(self.expert(experts[place]), inputs)

        return sum_of_experts(x, routing, len(experts), run)

    def output(self, expert: nn.Module | None, inputs: Tensor) -> Tensor:
        """One expert's output for its inputs (n, hidden)."""
        assert isinstance(expert, Expert)
        return expert.w2(self.combined(expert.w1(inputs), expert.w3(inputs)))

    def combined(self, gate: Tensor, up: Tensor) -> Tensor:
        """A down's input from the outputs of a gate and an up, which may be overwritten."""
        ACTIVATIONS[self.act].gate(gate, up)
        return gate

    def read_ahead(self, experts: Iterable[int]) -> None:
        """Start reading what is on disk of these experts, in the order in which they compute."""
        for module in map(self.expert, experts):
            if module is not None:
                read_ahead(module.parameters())

    def expert(self, index: int) -> nn.Module | None:
        """One expert's weights; None for one without any."""
        return self.experts[index]

    def matrices(self, experts: Iterable[int] | None = None) -> list[tuple[Linear, Linear, Linear]]:
        """Gate, up and down of each of these experts; None for all."""
        chosen = range(len(self.experts)) if experts is None else experts
        found = cast(list[Expert], [self.experts[expert] for expert in chosen])
        return [(expert.w1, expert.w3, expert.w2) for expert in found]

    def describe_experts(self) -> tuple[GatedBlock, ...]:
        """Gate, up and down of each expert.

        Raises:
            NotDescribed: one has none, or computes something else.
        """
        if not self.has_op:
            raise NotDescribed(f"experts of {type(self).__name__}")
        return tuple(_gated(map(describe, each), self.act) for each in self.matrices())

    def formats(self) -> list[WeightFormat]:
        """Distinct formats of all experts' matrices."""
        found = self.__dict__.get("_formats")
        if found is None or found[0] != epochs.current():
            each = {part.format.name: part.format for expert in self.matrices() for part in expert}
            found = self.__dict__["_formats"] = epochs.current(), list(each.values())
        return found[1]


class SharedExperts(Experts):
    """Experts plus one shared by all tokens.

    Args:
        gated: whether its output is multiplied by the sigmoid of a gate of its own (Qwen, 2024:
            Qwen1.5-MoE).
        options: see :class:`Experts`.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, gated: bool = False, **options: bool
    ) -> None:
        super().__init__(config, dtype, **options)
        inner = config.settings(ExpertsConfig).shared_inner
        self.shared_expert = GatedMLP(config, dtype, inner)
        self.shared_expert_gate = (
            Linear(config.hidden_size, 1, bias=False, dtype=dtype) if gated else None
        )

    @property
    def chooses_on_device(self) -> bool:
        beside = filter(None, (self.shared_expert, self.shared_expert_gate))
        return super().chooses_on_device and None not in map(try_describe, beside)

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(x, self.shared)

    def shared(self, x: Tensor) -> Tensor:
        """The shared expert's output for x (B, T, hidden)."""
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(x)
            torch.ops.exkv.sigmoid_(gate)
            shared.mul_(gate)
        return shared


class ClampedExperts(Experts):
    """Experts with biases and a clamped gate, see :func:`clamped_swiglu_` (gpt-oss)."""

    has_op = False

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, bias=True)
        settings = config.settings(ClampedExpertsConfig)
        self.alpha, self.limit = settings.swiglu_alpha, settings.swiglu_limit

    def combined(self, gate: Tensor, up: Tensor) -> Tensor:
        torch.ops.exkv.clamped_swiglu_(gate, up, self.alpha, self.limit)
        return gate

    def describe_experts(self) -> tuple[GatedBlock, ...]:
        blocks = (_gated(map(describe, each), self.act) for each in self.matrices())
        return tuple(replace(each, alpha=self.alpha, limit=self.limit) for each in blocks)


def routed_experts(config: ModelConfig, dtype: torch.dtype, **options: bool) -> Experts:
    """Experts, with a shared one if the config has one."""
    shared = config.settings(ExpertsConfig).shared_inner
    return (SharedExperts if shared else Experts)(config, dtype, **options)


def mixture_or_mlp(
    config: ModelConfig,
    dtype: torch.dtype,
    layer: int,
    experts: Callable[[ModelConfig, torch.dtype], MLP],
) -> MLP:
    """The experts, or a gated MLP in a dense layer."""
    dense = config.settings(ExpertsConfig).is_dense(layer)
    return GatedMLP(config, dtype) if dense else experts(config, dtype)


def run_experts(
    x: Tensor,
    routing: Routing,
    matrices: Sequence[Sequence[Linear]],
    act: str,
    formats: Sequence[WeightFormat] | None = None,
) -> Tensor:
    """Run the op ``experts``, or run module by module if one has hooks.

    Args:
        matrices: gate, up and down of each expert.
        formats: used to choose kernels, where experts other than these have some, too.
    """
    flat = [part for expert in matrices for part in expert]
    if any(part._forward_pre_hooks or part._forward_hooks for part in flat):

        def run(expert: int, inputs: Tensor) -> Tensor:
            return gated(matrices[expert], inputs, act)

        return sum_of_experts(x, routing, len(matrices), run)
    format, inner = flat[0].format, flat[0].size[0]
    if any(part.format is not format for part in flat) or len(formats or ()) > 1:
        pairs = [(part.format, parameters_of(part)) for part in flat]
        return mixed_experts(x, routing, pairs, inner, act, formats)
    tensors = [[parameters_of(part) for part in expert] for expert in matrices]
    return format.experts(x, routing, tensors, inner, act)


def _is_like(linear: Linear, first: Linear) -> bool:
    """Whether a linear layer is a matrix like the first one's, without hooks or changes."""
    parameters, names = linear._parameters, (*first.format.names, "bias")
    found = [each for name in names if (each := parameters.get(name)) is not None]
    has_bias = first._parameters["bias"] is not None
    return (
        (type(linear) is Linear and linear.bare)
        and (linear.format == first.format and linear.size == first.size)
        and len(found) == len(first.format.names) + has_bias
        and all(type(each) is nn.Parameter and each.is_contiguous() for each in found)
    )


def products_of_chosen(linears: Sequence[Linear], x: Tensor, chosen: Tensor) -> Tensor:
    """x (N, in), or (N, K, in) with one for each choice, times those of these layers, which are
    alike, that ``chosen``, int64 (N, K), names -> (N, K, out)."""
    each, first = [parameters_of(linear) for linear in linears], linears[0]
    biases = [parameters["bias"] for parameters in each if parameters["bias"] is not None]
    return first.format.chosen(x, chosen, first.size, each, biases)


def gated(matrices: Sequence[Linear], inputs: Tensor, act: str) -> Tensor:
    """down(act(gate(inputs)) * up(inputs)) with ``matrices`` gate, up and down."""
    gate, up, down = matrices
    inner = gate(inputs)
    ACTIVATIONS[act].gate(inner, up(inputs))
    return down(inner)


def mixtures(module: nn.Module) -> Iterator[Experts]:
    """The mixtures of experts in a layer."""
    return (part for part in module.modules() if isinstance(part, Experts))


def lay_on_host(
    module: nn.Module, experts: frozenset[int], staging: ExpertStaging | None = None
) -> None:
    """Set which routed experts' weights lie in host memory, and how they are sent; None restores
    the default."""
    for mixture in mixtures(module):
        mixture.on_host = experts
        mixture.staging = staging or mixture.staging


@describes(GatedMLP)
def _separate(mlp: GatedMLP) -> GatedBlock:
    return _gated(map(describe, (mlp.gate_proj, mlp.up_proj, mlp.down_proj)), mlp.act)


@describes(Experts)
def _experts(mlp: Experts) -> ExpertsBlock:
    return experts_block(mlp, mlp.describe_experts())


@describes(ClampedExperts)
def _clamped(mlp: ClampedExperts) -> ExpertsBlock:
    return _experts(mlp)


def experts_block(mlp: Experts, experts: Sequence[GatedBlock | PlainBlock]) -> ExpertsBlock:
    """Describe a mixture of these experts, without a shared one."""
    if mlp.router.tolerance is not None:
        raise NotDescribed("experts by SparseMixer")
    if mlp.on_host and not all(isinstance(each, GatedBlock) for each in experts):
        raise NotDescribed("experts without a gate in host memory")
    if mlp.from_disk and not mlp.on_host:
        raise NotDescribed("experts that are read from disk")
    if mlp.counts is not None and not mlp.on_host:
        raise NotDescribed("experts that are counted")
    return ExpertsBlock(
        router=mlp.router.numbers,
        gate=describe(mlp.gate),
        correction=None if mlp.correction is None else parameter(mlp, "correction"),
        experts=tuple(experts),
        on_host=tuple(sorted(mlp.on_host)),
    )


def _gated(parts: Iterable[Projection], act: str) -> GatedBlock:
    gate, up, down = parts
    return GatedBlock(gate=gate, up=up, down=down, act=act)


@describes(SharedExperts)
def describe_shared(mlp: SharedExperts) -> ExpertsBlock:
    """A mixture of gated experts, with a shared one."""
    gate = mlp.shared_expert_gate
    return replace(
        _experts(mlp),
        shared=describe(mlp.shared_expert),
        shared_gate=None if gate is None else describe(gate),
    )


@describes(FusedGatedMLP)
def _fused(mlp: FusedGatedMLP) -> GatedBlock:
    both = describe(mlp.gate_up_proj)
    gate, up = both.split(mlp.down_proj.size[1], mlp.down_proj.size[1])
    return GatedBlock(gate=gate, up=up, down=describe(mlp.down_proj), act=mlp.act)


@describes(PlainMLP)
def _plain(mlp: PlainMLP) -> PlainBlock:
    return PlainBlock(up=describe(mlp.up_proj), down=describe(mlp.down_proj), act=mlp.act)
