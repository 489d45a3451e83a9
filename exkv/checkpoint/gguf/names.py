"""What llama.cpp's converter does to a checkpoint: names of tensors, and what is done to them.

GGUF calls a tensor ``blk.3.attn_q.weight`` where Hugging Face's checkpoints have
``model.layers.3.self_attn.q_proj.weight``. A :class:`GGUFFamily` says so for one architecture, as a
part of its ``Family``, and ``gguf.py`` goes by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
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
#: Routed experts, whose matrices checkpoints name like those of an MLP.
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
#: Norms behind attention and MLP, and none before them (OLMo 2).
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")
#: Files from before April 2024 have a tensor for each expert.
_EXPERT = re.compile(r"(ffn_[a-z]+)\.(0|[1-9]\d{0,3})")
_END = re.compile(r"(.+)\.(weight|bias)")


def shared(module: str) -> dict[str, str]:
    """Names of the parts of an expert that all tokens take, which the checkpoint calls
    ``module``."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


#: Values as a config.json has them -> what only the architecture knows to add.
Additions = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How a GGUF file has one architecture.

    Attributes:
        architecture: what ``general.architecture`` calls it.
        names: of a layer's parts, where they are not the usual ones or beside them; ``{}`` stands
            for an expert's number, and the tensor holds all experts. A part with its ``.weight`` or
            ``.bias`` stands for a parameter that checkpoints have under another ending.
        ends: of what is in no layer, likewise.
        dims: parts that are a vector -> the dimensions of the checkpoint's tensor: 2 for a matrix
            of one row. Converters differ in them.
        interleaved: the rows of queries and keys lie as pairs to be rotated, and not as halves.
        norm_offset: what was added to the weights of norms.
        metadata: metadata -> keys of config.json, beside those of every architecture.
        marks: metadata -> whether it says something, or which numbers (0 for none), where several
            architectures have one name.
        assumed: metadata that files may lack -> what is taken for it, for a warning.
        doubts: patterns of a model's lowercase name -> what its file can't say, for a warning.
        additions: what else there is to say.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    metadata: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, bool | tuple[int, ...]] = field(default_factory=dict)
    assumed: Mapping[str, str] = field(default_factory=dict)
    doubts: Mapping[str, str] = field(default_factory=dict)
    additions: Additions = lambda values: {}

    def checkpoint_name(self, name: str) -> str | None:
        """Hugging Face's name for a tensor, with ``{}`` for an expert; None for one that no
        checkpoint has."""
        if match := _BLOCK.fullmatch(name):
            layer, part, kind = match.groups()
            known = self.names.get(f"{part}.{kind}")
            if known is None and (of_part := self._in_layer(part)) is not None:
                known = f"{of_part}.{kind}"
            return None if known is None else f"model.layers.{int(layer)}.{known}"
        if match := _END.fullmatch(name):
            known = {**_ENDS, **self.ends}.get(match[1])
            return None if known is None else f"{known}.{match[2]}"
        return None

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor's shape in a checkpoint, of its name and shape in the file."""
        match = _BLOCK.fullmatch(name)
        dims = self.dims.get(match[2]) if match else None
        return shape if dims is None else (*(1,) * (dims - 1), math.prod(shape))

    def _in_layer(self, part: str) -> str | None:
        """Hugging Face's name for a layer's part."""
        if match := _EXPERT.fullmatch(part):
            stacked = self.names.get(f"{match[1]}_exps")
            return None if stacked is None else stacked.replace("{}", match[2])
        return {**_LAYER, **self.names}.get(part)
