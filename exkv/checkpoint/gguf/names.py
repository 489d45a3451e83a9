"""How llama.cpp's converter renames and changes a checkpoint's tensors.

GGUF has ``blk.3.attn_q.weight`` where Hugging Face's checkpoints have
``model.layers.3.self_attn.q_proj.weight``. A :class:`GGUFFamily` describes this for one
architecture, as part of its ``Family``; ``tensors.py`` follows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..value_checks import is_int

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Routed experts, whose matrices have the names of an MLP's in checkpoints.
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
#: Norms after attention and MLP, and none before them (OLMo 2).
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")
#: Files from before April 2024 have a tensor for each expert.
_EXPERT = re.compile(r"(ffn_[a-z]+)\.(0|[1-9]\d{0,3})")
_ENDING = re.compile(r"(.+)\.(weight|bias)")


def shared(module: str) -> dict[str, str]:
    """Names of the parts of a shared expert, which is ``module`` in the checkpoint."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


def most(stated: Any) -> Any:
    """A number for all layers, which may be stated for each, 0 for layers without."""
    if isinstance(stated, list) and all(map(is_int, stated)):
        return max(stated, default=0)
    return stated


#: A reader of the architecture's metadata by key, and the number of rows of a file's tensor ->
#: index in it of each row of the checkpoint's tensor, int64; None for the same order. ValueError if
#: the metadata doesn't fit.
Rows = Callable[[Callable[[str], Any], int], torch.Tensor | None]


def _thirds(index: int) -> Rows:
    """Rows of queries, keys or values in a fused tensor."""

    def rows(own: Callable[[str], Any], count: int) -> torch.Tensor:
        heads = own("attention.head_count")
        stated = own("attention.head_count_kv") or heads
        of_keys, size = most(stated), own("attention.key_length")
        narrow = own("attention.value_length")
        if is_int(heads) and is_int(size) and is_int(narrow) and narrow != size:
            for each in {of_keys, *(stated if isinstance(stated, list) else ())}:
                sizes = [heads * size, each * size, each * narrow]
                if sum(sizes) == count:  # of keys, where layers differ in them
                    return torch.arange(count).split(sizes)[index]
        if isinstance(heads, list) and is_int(of_keys) and is_int(size) and size:
            heads = count // size - 2 * of_keys  # they differ by layer
        sizes = [heads, of_keys, of_keys]
        if not all(is_int(size) and size > 0 for size in sizes) or count % sum(sizes):
            raise ValueError(f"they are not {sizes!r} heads of queries, keys and values")
        each = count // sum(sizes)
        return torch.arange(count).split([size * each for size in sizes])[index]

    return rows


def part_of(parts: int, index: int) -> Rows:
    """Rows of one of several equal-sized matrices in a fused tensor."""

    def rows(own: Callable[[str], Any], count: int) -> torch.Tensor:
        if count % parts or not count:
            raise ValueError(f"they are not {parts} matrices of equal size")
        return torch.arange(count).chunk(parts)[index]

    return rows


def _inside(outer: Rows, inner: Rows) -> Rows:
    """Select rows among those that ``outer`` selects."""

    def rows(own: Callable[[str], Any], count: int) -> torch.Tensor | None:
        found = outer(own, count)
        order = None if found is None else inner(own, len(found))
        return found if found is None or order is None else found[order]

    return rows


#: Tensors that the converter may fuse -> their parts.
_FUSED: dict[str, dict[str, Rows]] = {
    "attn_qkv": {f"attn_{part}": _thirds(index) for index, part in enumerate("qkv")},
    "ffn_gate_up_exps": {"ffn_gate_exps": part_of(2, 0), "ffn_up_exps": part_of(2, 1)},
}
#: Values of a config.json -> values that the architecture adds.
Additions = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """The form of one architecture in GGUF files.

    Attributes:
        architecture: its ``general.architecture``.
        mixture: that of a mixture of experts, if different.
        names: names of a layer's parts beyond or instead of the usual ones; ``{}`` is an expert's
            number, and the tensor has all experts. A part with ``.weight`` or ``.bias`` is a
            parameter with another ending in checkpoints.
        ends: the same for tensors outside of layers.
        rows: parts whose rows are in another order, or belong to several tensors -> names of these,
            with the rows of each.
        dims: parts (with their ending unless it is ``.weight``) with other dimensions than the
            checkpoint's tensor -> its number of dimensions, of which those before the last are 1:
            2 for a matrix of one row, 1 for a vector. Converters differ in them.
        interleaved: whether the rows of queries and keys are in pairs to be rotated, and not
            halves.
        norm_offset: number that was added to the weights of norms, except ``plain_norms``.
        restore: endings of names in the checkpoint -> function from the file's numbers, float32, to
            the checkpoint's.
        metadata: metadata -> keys of config.json, beyond those of every architecture.
        marks: metadata -> whether it must be true, or which numbers it must have (0 if missing), to
            distinguish architectures of the same name.
        scalars: metadata with a number for each layer, or one for all -> the parameter of a layer
            with this value, and its shape.
        sizes: tensors -> the setting that equals their number of rows.
        periods: prefix of the settings that say which layers have a part -> that part.
        assumed: metadata that files may lack -> what is assumed instead, for a warning.
        doubts: patterns of a model's lowercase name -> what its file can't state, for a warning.
        additions: values that follow from others.
    """

    architecture: str
    mixture: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, Rows]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    restore: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, bool | tuple[int, ...]] = field(default_factory=dict)
    scalars: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    periods: Mapping[str, str] = field(default_factory=dict)
    assumed: Mapping[str, str] = field(default_factory=dict)
    doubts: Mapping[str, str] = field(default_factory=dict)
    additions: Additions = lambda values: {}

    def checkpoint_names(self, name: str) -> Mapping[str, Rows | None]:
        """Hugging Face's names for a tensor, with ``{}`` for an expert -> the rows of each, None
        for all; empty for an unknown tensor."""
        if match := _BLOCK.fullmatch(name):
            layer, part = match.groups()
            found = self._in_layer(part)
            return {f"model.layers.{int(layer)}.{own}": rows for own, rows in found.items()}
        if match := _ENDING.fullmatch(name):
            known = {**ENDS, **self.ends}.get(match[1])
            return {} if known is None else {f"{known}.{match[2]}": None}
        return {}

    def file_names(self, layers: int) -> Iterator[str]:
        """All names of tensors that a file of so many layers may have, those that this architecture
        names itself before the usual ones; fused and old ones aside."""
        parts = dict.fromkeys([*self.rows, *self.names, *LAYER])
        stems = [*dict.fromkeys([*self.ends, *ENDS])]
        stems += [f"blk.{layer}.{part}" for layer in range(layers) for part in parts]
        for stem in stems:
            yield from (stem,) if _ENDING.fullmatch(stem) else (f"{stem}.weight", f"{stem}.bias")

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor's shape in a checkpoint, from its name and shape in the file."""
        match = _BLOCK.fullmatch(name)
        dims = self.dims.get(match[2].removesuffix(".weight")) if match else None
        if dims is None:
            return shape
        if dims == 1:
            return (torch.Size(shape).numel(),)
        long = [size for size in shape if size != 1]
        return (*long[:-1], *(1,) * (dims - len(long)), *long[-1:])

    def restoring(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Function from the file's numbers to those of the checkpoint's tensor ``name``; None if
        they are the same."""
        if self.norm_offset and name.endswith("norm.weight"):
            return None if name.endswith(self.plain_norms) else lambda x: x - self.norm_offset
        return next((undo for end, undo in self.restore.items() if name.endswith(end)), None)

    def _in_layer(self, part: str) -> Mapping[str, Rows | None]:
        """Hugging Face's names for a layer's part, without the layer's name."""
        if part in self.rows:
            return self.rows[part]
        if part in self.names:
            return {self.names[part]: None}
        match = _ENDING.fullmatch(part)
        if match is None:
            return {}
        stem, kind = match.groups()
        if stem in self.rows:
            return {f"{own}.{kind}": rows for own, rows in self.rows[stem].items()}
        names = {**LAYER, **self.names}
        known = names.get(stem)
        if known is None and stem in _FUSED:
            return {
                f"{own}.{kind}": rows if inside is None else _inside(rows, inside)
                for part, rows in _FUSED[stem].items()
                for own, inside in self.rows.get(part, {names.get(part): None}).items()
            }
        if expert := _EXPERT.fullmatch(stem):
            stacked = self.names.get(f"{expert[1]}_exps")
            known = None if stacked is None else stacked.replace("{}", expert[2])
        return {} if known is None else {f"{known}.{kind}": None}
