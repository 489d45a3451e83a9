"""The bound run on the CPU: native code runs all units in one call.

Within a layer it may call back for four things: attention of a cache layer whose tensors are not
in place (``CacheLayer.in_place``), attention as a whole or an MLP without a description, and
experts in host memory of a layer on a card. Layers with a state advance it in place.

The only cards with such a run are simulated ones (``exkv.sim``), of which native code takes the
memory as it is; and only where experts are in host memory. All else of a simulated card takes the
readable route, as it does on other cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import nn

from exkv import devices, sim
from exkv.batch import Batch, Factors, Lengths, RotaryTables
from exkv.cache import KVCache
from exkv.cache.layer import CacheLayer, InPlace
from exkv.cache.state import StateLayer
from exkv.checkpoint import ExpertsConfig, LinearAttentionConfig, ModelConfig
from exkv.checkpoint.mamba import MambaConfig
from exkv.layers.descriptions import (
    AttentionBlock,
    EmbeddingTable,
    ExpertsBlock,
    GatedBlock,
    LatentBlock,
    Layer,
    LogitsHead,
    Norm,
    Outputs,
    PlainBlock,
    Projection,
    Recurrence,
    StateBlock,
    Weight,
    is_usable,
    native_matrices,
    parameters_in,
    try_describe,
)
from exkv.layers.host_experts import bind as bind_experts
from exkv.layers.mlp import mixtures
from exkv.ops.activations import is_native
from exkv.ops.attention import AttentionParams
from exkv.ops.bound_run import (
    CENTERED,
    DOWN,
    GATE,
    HEAD,
    KEY,
    OFFSET,
    OUTPUT,
    QUERY,
    UP,
    VALUE,
    RunHandle,
)
from exkv.ops.registry import HOST

from .bound_run import MOST_TOKENS, BoundRun, Logits, TokensAsRows
from .units import PlacedUnit


def bind(units: Sequence[PlacedUnit], kept: KVCache, dtype: torch.dtype) -> BoundRun | None:
    """Bind the longest prefix of the units that native code runs; None if it has no decoder
    layer."""
    device = units[0].device
    assert device is not None
    parts = list(_stretch(units, kept, dtype))
    layers = [part for part in parts if isinstance(part, BoundLayer)]
    simulated = device.type != "cpu"
    if not any(each.on_host if simulated else each.is_native for each in layers):
        return None
    return NativeRun(parts, dtype, device)


def most_bytes(config: ModelConfig, dtype: torch.dtype, lengths: Lengths, rank: int = 0) -> int:
    """Upper bound on a CPU run's bytes beyond those of the readable route: buffers between the
    parts of its layers (``Lay`` in ``exkv_ext/cpu/decoder.cpp``) and of its callbacks; ``rank`` is
    the largest rank of adapters."""
    layers = config.num_hidden_layers
    heads = max(map(config.query_heads, range(layers)))
    item, hidden = dtype.itemsize, config.hidden_size
    q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    made = 2 * q if isinstance(config.specific, LinearAttentionConfig) else q  # queries and gates
    if (latent := config.latent) is not None:
        made = heads * latent.qk_head_dim
        q = max(q, heads * latent.v_head_dim, latent.q_lora_rank or 0)
    between = item * (made + 3 * q + 2 * kv) + torch.float32.itemsize * (q + heads)
    between = max(between, 2 * item * config.intermediate_size, _expert_bytes(config, item))
    between = max(between, _state_bytes(config, item))
    between += 3 * item * rank
    asked = item * (2 * q + 2 * kv + 2 * hidden)
    beside = 2 * item * hidden if any(map(config.state_beside, range(layers))) else 0
    tokens = min(len(lengths.new) * lengths.chunk, MOST_TOKENS)
    of_tokens = tokens * (4 * item * hidden + between + asked + beside)
    return devices.rounded(of_tokens + _scan_rates(config)) + 2 * 1024


def _expert_bytes(config: ModelConfig, item: int) -> int:
    """Bytes per token between the parts of a mixture of experts."""
    if not isinstance(settings := config.specific, ExpertsConfig):
        return 0
    if not (settings.num_experts_per_tok and settings.num_local_experts):
        return 0  # other models of its architecture have some
    taken, inner = settings.num_experts_per_tok, settings.moe_intermediate_size
    inners = taken * (inner or config.intermediate_size) + (settings.shared_inner or 0)
    answers = (taken + 3) * config.hidden_size
    routed = 4 * (settings.num_local_experts + 1) + 12 * taken
    return item * (2 * inners + answers) + routed


def _state_bytes(config: ModelConfig, item: int) -> int:
    """Upper bound on the bytes per token between the parts of a layer with a state (``LayMixer`` in
    ``exkv_ext/cpu/state_mixer.h``): one or two gates, and steps, for each of its channels and
    values."""
    states = map(config.state, range(config.num_hidden_layers))
    kept = {each.name: each.shape for state in states for each in state or ()}
    if "conv" not in kept:
        return 0
    channels, (heads, keys, values) = kept["conv"][-1], (0, 0, 0)
    if len(kept.get("recurrent", ())) == 3:
        heads, keys, values = kept["recurrent"]
    of_heads = heads * (keys + 4 * values + 4) + 2 * values
    if isinstance(config.specific, MambaConfig):  # a scan: steps, twice, and what it selects
        of_heads += 4 * channels + 2 * (config.specific.mamba_dt_rank + 2 * kept["recurrent"][0])
        return item * (4 * channels + of_heads) + 4 * channels
    return item * (4 * channels + of_heads) + 4 * heads * (keys + 3)


def _scan_rates(config: ModelConfig) -> int:
    """Bytes of a scan's rates of decay, for all tokens of a call."""
    specific = config.specific
    return 4 * specific.inner * specific.mamba_d_state if isinstance(specific, MambaConfig) else 0


# What is bound --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLayer:
    """A decoder layer with its part of the cache: tensors, or the layer that computes attention by
    a callback; and the state that the run advances, if it has one."""

    layer: Layer
    store: InPlace | CacheLayer
    state: StateLayer | None = None
    on_host: Question | None = None

    @property
    def is_native(self) -> bool:
        """Whether native code runs attention or the MLP."""
        parts = (self.layer.attention, self.layer.mlp)
        return not all(isinstance(part, nn.Module | None) for part in parts)

    @property
    def attends(self) -> bool:
        """Whether it has keys and values."""
        return not isinstance(self.layer.attention, StateBlock | None)

    @property
    def asks(self) -> tuple[bool, bool]:
        """Whether attention as a whole, and the MLP, are computed by callbacks."""
        attention, mlp = (isinstance(p, nn.Module) for p in (self.layer.attention, self.layer.mlp))
        return attention, mlp

    @property
    def asks_others(self) -> bool:
        """Whether it has any callback but that of experts in host memory."""
        return any(self.asks) or (self.attends and not isinstance(self.store, InPlace))


#: A callback of a run: tensors -> the tensor that it continues with.
Question: TypeAlias = Callable[[list[torch.Tensor], Callable[[], Batch]], torch.Tensor]

Part: TypeAlias = EmbeddingTable | BoundLayer | LogitsHead


def _stretch(units: Sequence[PlacedUnit], kept: KVCache, dtype: torch.dtype) -> Iterator[Part]:
    device = units[0].device
    for unit in units:
        if unit.device != device or unit.module is None:
            return
        part: Any = try_describe(unit.module)
        if not _can_be_bound(part, dtype):
            return
        if isinstance(part, Layer):
            assert unit.spec.layer is not None
            part = _bound(part, unit.module, kept.layers[unit.spec.layer], dtype)
        if part is None:
            return
        on_card = device is not None and device.type != "cpu"
        if on_card and isinstance(part, BoundLayer) and part.asks_others:
            return
        yield part


def _bound(
    layer: Layer, module: nn.Module, kept: CacheLayer, dtype: torch.dtype
) -> BoundLayer | None:
    """The layer, with modules in the places of what native code doesn't compute; None if one can't
    stand there."""
    if layer.mlp is not None and not _is_native_mlp(layer.mlp, dtype):
        layer = replace(layer, mlp=module.get_submodule("mlp"))
    on_host = None
    if isinstance(layer.mlp, ExpertsBlock) and layer.mlp.on_host:
        on_host = _experts_callback(module, layer.mlp, dtype)
        if on_host is None:
            return None
    attention, store, state, asks = layer.attention, None, None, False
    if isinstance(attention, AttentionBlock | LatentBlock):
        store = _store(attention, kept, dtype)
        asks = isinstance(attention, LatentBlock) and store is None
    if isinstance(attention, AttentionBlock) and attention.gates is not None:
        asks = bool(attention.gates.low_rank)
    block, keeper = (attention, kept) if layer.beside is None else (layer.beside, kept.beside)
    if isinstance(block, StateBlock):
        native = keeper is not None and _is_native_state(block, keeper, dtype)
        state = keeper if native and isinstance(keeper, StateLayer) else None
        asks = asks or state is None
    if asks and layer.beside is not None:
        return None
    if asks:
        layer, store = replace(layer, attention=module.get_submodule("self_attn")), None
    return BoundLayer(layer=layer, store=store or kept, state=state, on_host=on_host)


def _store(
    attention: AttentionBlock | LatentBlock, kept: CacheLayer, dtype: torch.dtype
) -> InPlace | None:
    """Tensors over which native code computes this attention."""
    place = kept.in_place(dtype)
    if place is not None and attention.params.chunk and (place.ring or place.window):
        return None
    return place


def _can_be_bound(part: object, dtype: torch.dtype) -> bool:
    """Whether native code computes what is described."""
    if isinstance(part, Layer):
        whole = not isinstance(part.attention, AttentionBlock)
        if part.parallel and (part.residual != 1 or whole):
            return False
        part = replace(part, beside=None)  # see _is_native_state
        if isinstance(part.attention, StateBlock):
            part = replace(part, attention=nn.Identity())  # likewise
        if isinstance(part.mlp, ExpertsBlock):
            part = replace(part, mlp=nn.Identity())  # see _is_native_mlp
    return part is not None and all(_is_usable(each, dtype) for each in parameters_in(part))


def _is_native_state(block: StateBlock, kept: CacheLayer, dtype: torch.dtype) -> bool:
    """Whether native code computes this layer, and advances its state."""
    if type(kept) is not StateLayer or kept.offloaded or not kept.tensors:
        return False
    if any(each.low_rank for each in block.projections):
        return False
    if not all(_is_usable(each, dtype, torch.float32) for each in block.numbers):
        return False
    rest = [block.projections, block.convolution, block.norms]
    skip = None if block.recurrence is None else block.recurrence.skip
    if skip is not None and not _is_usable(skip, torch.float32):
        return False
    return all(_is_usable(each, dtype) for part in rest for each in parameters_in(part))


def _is_native_mlp(mlp: object, dtype: torch.dtype) -> bool:
    """Whether native code computes this MLP."""
    if isinstance(mlp, GatedBlock | PlainBlock):
        return is_native(mlp.act) and not getattr(mlp, "limit", 0)
    if not isinstance(mlp, ExpertsBlock):
        return False
    if not is_native(mlp.experts[0].act) or any(each.low_rank for each in mlp.projections):
        return False
    if not all(_is_usable(each, dtype, torch.float32) for each in mlp.exact):
        return False
    kinds = {type(each) for each in (*mlp.experts, *filter(None, (mlp.shared,)))}
    if len(kinds) > 1:
        return False
    if any(part.low_rank for each in mlp.experts for part in each.projections):
        return False
    rest = (mlp.experts, mlp.shared, mlp.shared_gate, mlp.before, mlp.after)
    return all(_is_usable(each, dtype) for each in parameters_in(rest))


def _is_usable(value: Weight | torch.Tensor, *dtypes: torch.dtype) -> bool:
    return is_usable(value, *dtypes, devices=HOST)


# The run --------------------------------------------------------------------------------------


class NativeRun:
    """A run on the CPU, by the ops of ``exkv.ops.bound_run``."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        layers = [part for part in parts if isinstance(part, BoundLayer)]
        self.count = len(parts)
        stores = [part.store for part in layers if part.attends]
        self._one_by_one = any(isinstance(store, InPlace) and store.ring for store in stores)
        self._states = [part.state for part in layers if part.state is not None]
        self._in_place = all(isinstance(store, InPlace) for store in stores) and not self._states
        found = (part.layer.attention for part in layers)
        blocks = [each for each in found if isinstance(each, AttentionBlock | LatentBlock)]
        named = (name for each in blocks for name in (each.params.rotary, each.query_factors))
        self._tables = [name for name in dict.fromkeys(named) if name is not None]
        self._chunked = [each.params for each in blocks if each.params.chunk]
        self._dtype, self._device = dtype, device
        self._head = parts[-1] if isinstance(parts[-1], LogitsHead) else None
        self._questions: list[Question] = []
        self._handle: RunHandle | None = RunHandle(dtype, _hidden_size(layers))
        self._most_tokens = self._handle.most_tokens
        for part in parts:
            self._add(self._handle.tensor, part)
        on_host = sum(part.on_host is not None for part in layers)
        self._asks_others = len(self._questions) > on_host

    def _add(self, run: torch.Tensor, part: Part) -> None:
        if isinstance(part, EmbeddingTable):
            _add("add_embedding", run, *native_matrices(part.weight), part.scale)
        elif isinstance(part, LogitsHead):
            norm, weight = part.norm, native_matrices(part.projection.weight)
            first = (norm.weight, norm.bias, norm.eps, _kind(norm))
            _add("add_head", run, *first, *weight, part.projection.bias)
            _add_low_rank(run, HEAD, part.projection)
        else:
            self._add_layer(run, part)
            if part.on_host is not None:
                self._questions.append(part.on_host)

    def _add_layer(self, run: torch.Tensor, part: BoundLayer) -> None:
        layer, store = part.layer, part.store
        attention, mlp = layer.attention, layer.mlp
        norms = [layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp]
        projections: list[Projection] = []
        head_dim, interleaved, rotary, params, window = 0, 0, 0, AttentionParams(scale=1.0), 0
        if isinstance(attention, AttentionBlock):
            norms += [attention.query_norm, attention.key_norm]
            projections += [attention.query, attention.key, attention.value, attention.output]
            head_dim, interleaved, params = (
                attention.head_dim,
                attention.interleaved,
                attention.params,
            )
            rotary, window = self._tables.index(params.rotary), params.window
        else:
            norms += [None, None]
        places: tuple[Any, ...] = ([], "", [], "", 0, False, False)
        if isinstance(store, InPlace) and not isinstance(attention, LatentBlock):
            keys, values = (store.keys, store.key_format), (store.values, store.value_format)
            places = (*keys, *values, store.ring, store.hadamard, store.paged)
            window = min(filter(None, (window, store.window)), default=0)
        elif not isinstance(store, InPlace) and part.attends:
            of = attention if isinstance(attention, nn.Module) else (params, head_dim)
            self._questions.append(_attention_callback(store, of))
        act = "silu"  # unused
        indices = list(range(len(projections)))
        if isinstance(mlp, GatedBlock | PlainBlock):
            projections += mlp.projections
            indices += (GATE, UP, DOWN)[-len(mlp.projections) :]
            act = mlp.act
        elif isinstance(mlp, nn.Module):
            self._questions.append(lambda given, _: mlp(*given).contiguous())
        _add(
            "add_layer",
            run,
            *_norms(*norms),
            *native_matrices(*(projection.weight for projection in projections)),
            [projection.bias for projection in projections],
            *(head_dim, act, interleaved, layer.residual, layer.parallel, rotary),
            *(params.scale, window, params.softcap),
            *places,
            isinstance(attention, AttentionBlock) and attention.gated,
        )
        self._add_details(run, layer, [projection.scale for projection in projections])
        mixer = attention if layer.beside is None else layer.beside
        if isinstance(mixer, StateBlock):
            assert part.state is not None, "see _bound"
            _add_mixer(run, mixer, part.state, beside=layer.beside is not None)
        if isinstance(attention, LatentBlock):
            assert isinstance(store, InPlace), "see _bound"
            _add_latent(run, attention, store, self._tables.index(attention.params.rotary))
        if isinstance(mlp, ExpertsBlock):
            _add_experts(run, mlp)
        for index, projection in zip(indices, projections, strict=True):
            _add_low_rank(run, index, projection)

    def _add_details(self, run: torch.Tensor, layer: Layer, factors: list[float]) -> None:
        """Add what few layers have."""
        attention = layer.attention
        missing = (attention is None, layer.mlp is None)
        chunk, sinks, queries = 0, None, None
        norms_rotated, soft_plus, scale = False, False, 1.0
        gates: tuple[Projection, ...] = ()
        if isinstance(attention, AttentionBlock):
            norms_rotated, scale = attention.normed_rotated, attention.input_scale
            chunk, sinks = attention.params.chunk, attention.params.sinks
            gates, soft_plus = tuple(filter(None, (attention.gates,))), attention.soft_plus
        if isinstance(attention, AttentionBlock | LatentBlock):
            queries = attention.query_factors
        which = -1 if queries is None else self._tables.index(queries)
        factors = [] if set(factors) <= {1.0} else factors
        details = (*missing, norms_rotated, which, chunk, sinks)
        rest = (*native_matrices(*(gate.weight for gate in gates)), soft_plus, scale, factors)
        special = (*missing, norms_rotated, which >= 0, chunk, gates, scale != 1, factors)
        if any(special) or sinks is not None:
            _add("add_details", run, *details, *rest)

    def takes(self, lengths: Lengths, logits: Logits) -> bool:
        if self._one_by_one and lengths.chunk > 1:
            return False
        if self._states and lengths.snapshot_at:
            return False
        if any(each.within(lengths, windows=True).chunk for each in self._chunked):
            return False
        tokens = len(lengths.new) * lengths.chunk
        mixed = isinstance(lengths.adapters, tuple)
        if mixed and logits == Logits.EACH and set(lengths.new) != {1}:
            return False  # low-rank parts are per row
        if logits == Logits.EACH and self._has_rows_for_tokens:
            tokens = sum(lengths.new)
        return tokens <= self._most_tokens

    @property
    def _has_rows_for_tokens(self) -> bool:
        """Whether tokens of one sequence can be rows of one call: all are stored before any attends
        to those before it."""
        return self._in_place and not self._asks_others and not self._one_by_one

    def __call__(
        self, x: torch.Tensor, lengths: Lengths, rotary: RotaryTables, logits: Logits
    ) -> torch.Tensor | None:
        factors = rotary(lengths, self._dtype)
        if logits != Logits.EACH or set(lengths.new) == {1}:
            return self._run(x, lengths, rotary, factors, min(logits, Logits.ALL))
        rows = TokensAsRows(lengths)
        if not self._has_rows_for_tokens:
            out = self._run(x, lengths, rotary, factors, Logits.ALL)
            return out if out is None or self._head is None else rows.split(out)
        split = (rows.split(x), rows.lengths, rotary, rows.factors(factors))
        out = self._run(*split, Logits.ALL, rows.row.int())
        return out if out is None or self._head is not None else rows.joined(out)

    def _run(
        self,
        x: torch.Tensor,
        lengths: Lengths,
        rotary: RotaryTables,
        factors: Mapping[str, Factors],
        logits: int,
        store_rows: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Make one call. ``store_rows``: each row's row in the cache; None for the same."""
        handle, questions = self._handle, self._questions
        if handle is None:
            return None
        for state in self._states:
            state.begin(lengths)
        padded = min(lengths.new) < lengths.chunk
        x = devices.move(x, devices.CPU)  # earlier units may be on another device
        arguments = (
            handle.tensor,
            x.contiguous(),
            torch.tensor(lengths.past, dtype=torch.int32),
            torch.tensor(lengths.new, dtype=torch.int32) if padded else None,
            lengths.kv_len,
            [factor for name in self._tables for factor in factors[name]],
            logits,
        )
        run = torch.ops.exkv.bound_run.default
        found = run(*arguments, block_table=lengths.pages, store_rows=store_rows)
        batch = cache(lambda: Batch.on(devices.CPU, lengths, rotary, self._dtype))
        for at, question in enumerate(questions, 1):
            space, *given = found
            answer = question(given, batch)
            found = run(*arguments, space, answer, at, lengths.pages, store_rows)
        (out,) = found
        if self._head is not None and logits != Logits.NONE:
            out = _scaled(out, self._head)
        return devices.move(out, self._device)

    def release(self) -> None:
        self._handle, self._questions, self._head, self._states = None, [], None, []


def _scaled(logits: torch.Tensor, head: LogitsHead) -> torch.Tensor:
    """Scale and soft-cap logits in place."""
    if head.scale != 1:
        logits.mul_(head.scale)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits


def _add(op: str, run: torch.Tensor, *arguments: Any) -> None:
    """Call an op that adds to a run, with tensors of simulated devices as they are in memory."""
    getattr(torch.ops.exkv, op)(run, *map(_in_memory, arguments))


def _in_memory(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_memory(each) for each in value]
    return sim.host_view(value) if isinstance(value, torch.Tensor) else value


def _attention_callback(
    store: CacheLayer, attention: nn.Module | tuple[AttentionParams, int]
) -> Question:
    """A callback for attention as a whole, or with these parameters over heads of a size."""
    if isinstance(attention, nn.Module):
        return lambda given, batch: attention(*given, batch(), store).contiguous()
    params, head_dim = attention

    def attend(given: list[torch.Tensor], batch: Callable[[], Batch]) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in given)
        return store.attend(q, k, v, batch(), params).flatten(2).contiguous()

    return attend


def _experts_callback(
    module: nn.Module, block: ExpertsBlock, dtype: torch.dtype
) -> Question | None:
    """A callback for what experts in host memory add; None if native code can't run them."""
    (mixture,) = mixtures(module)
    taken = block.router[0]
    assert isinstance(taken, int)
    experts = [each for each in block.experts if isinstance(each, GatedBlock)]
    if (bound := bind_experts(experts, block.on_host, dtype, taken)) is None:
        return None

    def answer(given: list[torch.Tensor], _: object) -> torch.Tensor:
        x, chosen, weights = given
        if mixture.from_disk:
            mixture.read_ahead(sorted(mixture.on_host.intersection(chosen.flatten().tolist())))
        return bound.parts(x, chosen, weights, mixture.counts)

    return answer


def _hidden_size(layers: Sequence[BoundLayer]) -> int:
    """Size of the hidden state, from a layer that has a matrix."""
    for part in layers:
        attention, mlp = part.layer.attention, part.layer.mlp
        if isinstance(attention, AttentionBlock):
            return attention.query.weight.size[1]
        if isinstance(attention, StateBlock):
            return attention.output.weight.size[0]
        if isinstance(attention, LatentBlock):
            return attention.latent.weight.size[1]
        if isinstance(mlp, GatedBlock | ExpertsBlock):
            return mlp.gate.weight.size[1]
        if isinstance(mlp, PlainBlock):
            return mlp.up.weight.size[1]
    raise AssertionError("bind requires a native layer")


def _add_mixer(run: torch.Tensor, block: StateBlock, state: StateLayer, *, beside: bool) -> None:
    """Add the layer with a state to the last added layer, in attention's place or ``beside``
    it."""
    states = state.in_rows()
    of = block.recurrence
    made = (None, None) if of is None else (of.step, of.beta)
    named = (block.times, block.gate, *made)
    _add(
        "add_mixer",
        run,
        "conv" if of is None else of.rule,
        *native_matrices(*(projection.weight for projection in block.projections)),
        [projection.bias for projection in block.projections],
        *(
            list(block.sources),
            [n for each in (*named, *block.mixed) for n in _output_numbers(each)],
        ),
        *(block.convolution.weight, block.convolution.bias),
        *_recurrence_arguments(of, block.norms),
        *(states["conv"], states.get("recurrent")),
        [projection.scale for projection in block.projections],
        *(block.input_scale, beside),
    )


def _output_numbers(of: Outputs | None) -> tuple[int, ...]:
    """The numbers as the op takes them, starting with -1 for None."""
    return (-1, 0, 1, 0, 0) if of is None else (
        of.projection, of.offset, of.size, of.step, of.count
    )  # fmt: skip


def _recurrence_arguments(of: Recurrence | None, norms: Sequence[Norm]) -> tuple[Any, ...]:
    if of is None:
        return None, None, None, [], 0.0, "gate", False, 1, 1, 1.0, 0.0, 0.0
    eps = {norm.eps for norm in norms}
    assert len(eps) <= 1, "one for all norms of a layer"
    numbers = (of.step_bias, of.rates, of.skip, [norm.weight for norm in norms])
    how = (max(eps, default=0.0), of.gating, of.sigmoid)
    return (*numbers, *how, of.groups, of.order, of.largest_beta, *of.limits)


def _add_latent(run: torch.Tensor, block: LatentBlock, store: InPlace, rotary: int) -> None:
    """Add the attention of the last added layer, and its adapters."""
    projections, ups = block.projections, (*block.key_up, *block.value_up)
    norms = (block.latent_norm, block.query_norm)
    window = min(filter(None, (block.params.window, store.window)), default=0)
    _add(
        "add_latent",
        run,
        [None if norm is None else norm.weight for norm in norms],
        [0.0 if norm is None else norm.eps for norm in norms],
        *native_matrices(*(projection.weight for projection in projections), *ups),
        [*(projection.bias for projection in projections), *([None] * len(ups))],
        *(len(block.key_up), block.rotated, block.interleaved, rotary, block.params.scale, window),
        *(store.keys, store.key_format, store.ring, store.hadamard, store.paged),
    )
    for index, projection in zip((QUERY, KEY, OUTPUT, VALUE), projections, strict=False):
        _add_low_rank(run, index, projection)


def _add_experts(run: torch.Tensor, block: ExpertsBlock) -> None:
    """Add the experts of the last added layer."""
    projections, first = block.projections, block.experts[0]
    _add(
        "add_experts",
        run,
        *native_matrices(*(projection.weight for projection in projections)),
        [projection.bias for projection in projections],
        *(block.correction, first.act, len(block.experts), block.shared is not None),
        *block.router,
        *(isinstance(first, GatedBlock), block.weighs_inputs, block.before is not None),
        *((first.alpha, first.limit) if isinstance(first, GatedBlock) else (0.0, 0.0)),
        list(block.on_host),
    )


def _add_low_rank(run: torch.Tensor, index: int, projection: Projection) -> None:
    """Add the adapters of a projection."""
    for each in projection.low_rank:
        last = -1 if each.last is None else each.last
        halves = (each.low_rank.a, each.low_rank.b)
        _add("add_low_rank", run, index, *halves, each.first, last)


def _norms(
    *norms: Norm | None,
) -> tuple[list[Any], list[float], list[int], list[torch.Tensor | None]]:
    """Weights, epsilons, kinds and biases, as the op takes them."""
    return (
        [None if norm is None else norm.weight for norm in norms],
        [0.0 if norm is None else norm.eps for norm in norms],
        [0 if norm is None else _kind(norm) for norm in norms],
        [None if norm is None else norm.bias for norm in norms],
    )


def _kind(norm: Norm) -> int:
    return OFFSET * norm.offset + CENTERED * norm.centered
