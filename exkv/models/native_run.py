"""The bound run on the CPU: native code runs all units in one call.

Within a layer it may call back for three things: attention of a cache layer whose tensors are not
in place (``CacheLayer.in_place``), and attention as a whole or an MLP without a description. Layers
with a state advance it in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from exkv import devices
from exkv.batch import Batch, Factors, Lengths, RotaryTables
from exkv.cache import KVCache
from exkv.cache.layer import CacheLayer, InPlace
from exkv.cache.state import StateLayer
from exkv.checkpoint import ExpertsConfig, LinearAttentionConfig, ModelConfig
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
    Projection,
    Recurrence,
    StateBlock,
    Weight,
    parameters_in,
    try_describe,
)
from exkv.ops.activations import is_native
from exkv.ops.attention import AttentionParams
from exkv.ops.bound_run import CENTERED, GATE, HEAD, KEY, OFFSET, OUTPUT, QUERY, VALUE

from .bound_run import MOST_TOKENS, BoundRun, Logits, TokensAsRows
from .units import PlacedUnit


def bind(units: Sequence[PlacedUnit], kept: KVCache, dtype: torch.dtype) -> BoundRun | None:
    """Bind the longest prefix of the units that native code runs; None if it has no decoder
    layer."""
    parts = list(_stretch(units, kept, dtype))
    if not any(isinstance(part, BoundLayer) and part.is_native for part in parts):
        return None
    return NativeRun(parts, dtype)


def most_bytes(config: ModelConfig, dtype: torch.dtype, lengths: Lengths, rank: int = 0) -> int:
    """Upper bound on a CPU run's bytes beyond those of the readable route: buffers between the
    parts of its layers (``Lay`` in ``exkv_ext/cpu/decoder.cpp``) and of its callbacks; ``rank`` is
    the largest rank of adapters."""
    heads = max(map(config.query_heads, range(config.num_hidden_layers)))
    item = dtype.itemsize
    q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    made = 2 * q if isinstance(config.specific, LinearAttentionConfig) else 0  # queries and gates
    if (latent := config.latent) is not None:
        made = heads * latent.qk_head_dim
        q = max(q, heads * latent.v_head_dim, latent.q_lora_rank or 0)
    between = item * (made + 3 * q + 2 * kv) + torch.float32.itemsize * (q + heads)
    between = max(between, 2 * item * config.intermediate_size, _expert_bytes(config, item))
    between = max(between, _state_bytes(config, item))
    between += 3 * item * rank
    asked = item * (2 * q + 2 * kv + 2 * config.hidden_size)
    tokens = min(len(lengths.new) * lengths.chunk, MOST_TOKENS)
    return devices.rounded(tokens * (4 * item * config.hidden_size + between + asked)) + 2 * 1024


def _expert_bytes(config: ModelConfig, item: int) -> int:
    """Bytes per token between the parts of a mixture of experts."""
    if not isinstance(settings := config.specific, ExpertsConfig):
        return 0
    if not (settings.num_experts_per_tok and settings.num_local_experts):
        return 0  # other models of its architecture have some
    taken, inner = settings.num_experts_per_tok, settings.moe_intermediate_size
    inners = taken * (inner or config.intermediate_size) + (settings.shared_inner or 0)
    answers = (taken + 1) * config.hidden_size
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
    return item * (4 * channels + of_heads) + 4 * heads * (keys + 3)


# What is bound --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLayer:
    """A decoder layer with its part of the cache: tensors, or the layer that computes attention by
    a callback, or whose state the run advances."""

    layer: Layer
    store: InPlace | CacheLayer

    @property
    def is_native(self) -> bool:
        """Whether native code runs attention or the MLP."""
        asked = (isinstance(part, nn.Module) for part in (self.layer.attention, self.layer.mlp))
        return not all(asked)


Part: TypeAlias = EmbeddingTable | BoundLayer | LogitsHead


def _stretch(units: Sequence[PlacedUnit], kept: KVCache, dtype: torch.dtype) -> Iterator[Part]:
    device = units[0].device
    for unit in units:
        if unit.device != device or unit.module is None or unit.host_experts:
            return
        part: Any = try_describe(unit.module)
        if not _can_be_bound(part, dtype):
            return
        if isinstance(part, Layer):
            if not _is_native_mlp(part.mlp, dtype):
                part = replace(part, mlp=unit.module.get_submodule("mlp"))
            assert unit.spec.layer is not None
            kept_layer = kept.layers[unit.spec.layer]
            attention, store = part.attention, None
            if isinstance(attention, AttentionBlock | LatentBlock):
                store = None if attention.params.sinks is not None else kept_layer.in_place(dtype)
            asks = isinstance(attention, LatentBlock) and store is None
            if isinstance(attention, StateBlock):
                asks = not _is_native_state(attention, kept_layer, dtype)
            if asks:
                part = replace(part, attention=unit.module.get_submodule("self_attn"))
            part = BoundLayer(layer=part, store=store or kept_layer)
        yield part


def _can_be_bound(part: object, dtype: torch.dtype) -> bool:
    """Whether native code computes what is described."""
    if isinstance(part, Layer):
        whole = not isinstance(part.attention, AttentionBlock)
        if part.parallel and (part.residual != 1 or whole):
            return False
        if isinstance(part.attention, StateBlock):
            part = replace(part, attention=nn.Identity())  # see _is_native_state
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
    rest = [block.projections, block.convolution]
    if block.recurrence is not None:
        skip = block.recurrence.skip
        rest.append(block.recurrence.norm)
        if skip is not None and not _is_usable(skip, torch.float32):
            return False
    return all(_is_usable(each, dtype) for part in rest for each in parameters_in(part))


def _is_native_mlp(mlp: object, dtype: torch.dtype) -> bool:
    """Whether native code computes this MLP."""
    if isinstance(mlp, GatedBlock):
        return is_native(mlp.act)
    if not isinstance(mlp, ExpertsBlock):
        return False
    if not is_native(mlp.experts[0].act) or any(each.low_rank for each in mlp.projections):
        return False
    if not all(_is_usable(each, dtype, torch.float32) for each in mlp.exact):
        return False
    rest = (mlp.experts, mlp.shared, mlp.shared_gate)
    return all(_is_usable(each, dtype) for each in parameters_in(rest))


def _is_usable(value: Weight | torch.Tensor, *dtypes: torch.dtype) -> bool:
    """Whether it is on the host and has one of these dtypes, or its format computes in any."""
    if isinstance(value, Weight):
        tensors, computes_in = list(value.tensors.values()), value.format.arithmetic
    else:
        tensors, computes_in = [value], value.dtype
    placed = (tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    return computes_in in (None, *dtypes) and all(placed)


# The run --------------------------------------------------------------------------------------


class _Handle:
    """A native run, released with its last reference, so that a current call ends first."""

    def __init__(self, like: torch.Tensor, hidden: int) -> None:
        self.tensor = torch.ops.exkv.new_run(like, hidden)
        weakref.finalize(self, _release, self.tensor).atexit = False


def _release(run: torch.Tensor) -> None:
    """Release outside of any dispatch mode, under which the garbage collector may call this."""
    with _disable_current_modes():
        torch.ops.exkv.release_run.default(run)


class NativeRun:
    """A run on the CPU, by the ops of ``exkv.ops.bound_run``."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        layers = [part for part in parts if isinstance(part, BoundLayer)]
        self.count = len(parts)
        stores = [part.store for part in layers]
        self._one_by_one = any(isinstance(store, InPlace) and store.ring for store in stores)
        self._in_place = all(isinstance(store, InPlace) for store in stores)
        self._states = [
            part.store
            for part in layers
            if isinstance(part.layer.attention, StateBlock) and isinstance(part.store, StateLayer)
        ]
        blocks = (part.layer.attention for part in layers)
        self._tables = list(
            dict.fromkeys(
                each.params.rotary
                for each in blocks
                if isinstance(each, AttentionBlock | LatentBlock)
            )
        )
        self._dtype = dtype
        self._head = parts[-1] if isinstance(parts[-1], LogitsHead) else None
        self._questions: list[Question] = []
        like, hidden = torch.empty(0, dtype=dtype), _hidden_size(layers)
        self._handle: _Handle | None = _Handle(like, hidden)
        for part in parts:
            self._add(self._handle.tensor, part)
        self._most_tokens = int(self._handle.tensor[1])

    def _add(self, run: torch.Tensor, part: Part) -> None:
        if isinstance(part, EmbeddingTable):
            torch.ops.exkv.add_embedding(run, *_matrices(part.weight), part.scale)
        elif isinstance(part, LogitsHead):
            norm, weight = part.norm, _matrices(part.projection.weight)
            first = (norm.weight, norm.bias, norm.eps, _kind(norm))
            torch.ops.exkv.add_head(run, *first, *weight, part.projection.bias)
            _add_low_rank(run, HEAD, part.projection)
        else:
            self._add_layer(run, part.layer, part.store)

    def _add_layer(self, run: torch.Tensor, layer: Layer, store: InPlace | CacheLayer) -> None:
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
        elif not isinstance(store, InPlace) and not isinstance(attention, StateBlock):
            of = attention if isinstance(attention, nn.Module) else (params, head_dim)
            self._questions.append(_attention_callback(store, of))
        act = "silu"  # unused
        if isinstance(mlp, GatedBlock):
            projections += [mlp.gate, mlp.up, mlp.down]
            act = mlp.act
        elif isinstance(mlp, nn.Module):
            self._questions.append(lambda given, batch: mlp(*given).contiguous())
        torch.ops.exkv.add_layer(
            run,
            *_norms(*norms),
            *_matrices(*(projection.weight for projection in projections)),
            [projection.bias for projection in projections],
            *(head_dim, act, interleaved, layer.residual, layer.parallel, rotary),
            *(params.scale, window, params.softcap),
            *places,
            isinstance(attention, AttentionBlock) and attention.gated,
        )
        if isinstance(attention, StateBlock):
            assert isinstance(store, StateLayer), "see _stretch"
            _add_mixer(run, attention, store)
        if isinstance(attention, LatentBlock):
            assert isinstance(store, InPlace), "see _stretch"
            _add_latent(run, attention, store, self._tables.index(attention.params.rotary))
        if isinstance(mlp, ExpertsBlock):
            _add_experts(run, mlp)
        of_attention = isinstance(attention, AttentionBlock)
        for index, projection in enumerate(projections, 0 if of_attention else GATE):
            _add_low_rank(run, index, projection)

    def takes(self, lengths: Lengths, logits: Logits) -> bool:
        if self._one_by_one and lengths.chunk > 1:
            return False
        if self._states and lengths.snapshot_at:
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
        return self._in_place and not self._questions and not self._one_by_one

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
        if questions:
            batch = Batch.on(x.device, lengths, rotary, self._dtype)
            for at, question in enumerate(questions, 1):
                space, *given = found
                answer = question(given, batch)
                found = run(*arguments, space, answer, at, lengths.pages)
        (out,) = found
        return out if self._head is None or logits == Logits.NONE else _scaled(out, self._head)

    def release(self) -> None:
        self._handle, self._questions, self._head, self._states = None, [], None, []


def _scaled(logits: torch.Tensor, head: LogitsHead) -> torch.Tensor:
    """Scale and soft-cap logits in place."""
    if head.scale != 1:
        logits.mul_(head.scale)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits


#: A callback of a run: tensors -> the tensor that it continues with.
Question: TypeAlias = Callable[[list[torch.Tensor], Batch], torch.Tensor]


def _attention_callback(
    store: CacheLayer, attention: nn.Module | tuple[AttentionParams, int]
) -> Question:
    """A callback for attention as a whole, or with these parameters over heads of a size."""
    if isinstance(attention, nn.Module):
        return lambda given, batch: attention(*given, batch, store).contiguous()
    params, head_dim = attention

    def attend(given: list[torch.Tensor], batch: Batch) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in given)
        return store.attend(q, k, v, batch, params).flatten(2).contiguous()

    return attend


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
    raise AssertionError("bind requires a native layer")


def _add_mixer(run: torch.Tensor, block: StateBlock, state: StateLayer) -> None:
    """Add the layer with a state to the last added layer, in attention's place."""
    states = state.in_rows()
    of = block.recurrence
    made = (None, None) if of is None else (of.step, of.beta)
    named = (block.times, block.gate, *made)
    torch.ops.exkv.add_mixer(
        run,
        "conv" if of is None else of.rule,
        *_matrices(*(projection.weight for projection in block.projections)),
        [projection.bias for projection in block.projections],
        *(
            list(block.sources),
            [n for each in (*named, *block.mixed) for n in _output_numbers(each)],
        ),
        *(block.convolution.weight, block.convolution.bias),
        *_recurrence_arguments(of),
        *(states["conv"], states.get("recurrent")),
    )


def _output_numbers(of: Outputs | None) -> tuple[int, ...]:
    """The numbers as the op takes them, starting with -1 for None."""
    return (-1, 0, 1, 0, 0) if of is None else (
        of.projection, of.offset, of.size, of.step, of.count
    )  # fmt: skip


def _recurrence_arguments(of: Recurrence | None) -> tuple[Any, ...]:
    if of is None:
        return None, None, None, None, 0.0, False, 1, 1, 1.0, 0.0, 0.0
    numbers = (of.step_bias, of.rates, of.skip, of.norm.weight, of.norm.eps)
    return (*numbers, of.sigmoid, of.groups, of.order, of.largest_beta, *of.limits)


def _add_latent(run: torch.Tensor, block: LatentBlock, store: InPlace, rotary: int) -> None:
    """Add the attention of the last added layer, and its adapters."""
    projections, ups = block.projections, (*block.key_up, *block.value_up)
    norms = (block.latent_norm, block.query_norm)
    window = min(filter(None, (block.params.window, store.window)), default=0)
    torch.ops.exkv.add_latent(
        run,
        [None if norm is None else norm.weight for norm in norms],
        [0.0 if norm is None else norm.eps for norm in norms],
        *_matrices(*(projection.weight for projection in projections), *ups),
        [*(projection.bias for projection in projections), *([None] * len(ups))],
        *(len(block.key_up), block.rotated, block.interleaved, rotary, block.params.scale, window),
        *(store.keys, store.key_format, store.ring, store.hadamard, store.paged),
    )
    for index, projection in zip((QUERY, KEY, OUTPUT, VALUE), projections, strict=False):
        _add_low_rank(run, index, projection)


def _add_experts(run: torch.Tensor, block: ExpertsBlock) -> None:
    """Add the experts of the last added layer."""
    projections = block.projections
    torch.ops.exkv.add_experts(
        run,
        *_matrices(*(projection.weight for projection in projections)),
        [projection.bias for projection in projections],
        *(block.correction, block.experts[0].act, len(block.experts), block.shared is not None),
        *block.router,
    )


def _add_low_rank(run: torch.Tensor, index: int, projection: Projection) -> None:
    """Add the adapters of a projection."""
    for each in projection.low_rank:
        last = -1 if each.last is None else each.last
        halves = (each.low_rank.a, each.low_rank.b)
        torch.ops.exkv.add_low_rank(run, index, *halves, each.first, last)


def _matrices(*weights: Weight) -> tuple[list[torch.Tensor], list[int]]:
    """Tensors and layouts, as the ops take them."""
    tensors = [weight.tensors[name] for weight in weights for name in weight.format.names]
    layouts = [weight.format.native(weight.size) or () for weight in weights]
    return tensors, [number for layout in layouts for number in layout]


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
