"""What llama.cpp's converter does to a checkpoint: names of tensors, and what is done to them.

GGUF calls a tensor ``blk.3.attn_q.weight`` where Hugging Face's checkpoints have
``model.layers.3.self_attn.q_proj.weight``. A :class:`GGUFFamily` says so for one architecture, as a
part of its ``Family``, and ``gguf.py`` goes by it.
"""

from __future__ import annotations

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
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")
#: Files from before April 2024 have a tensor for each expert.
_EXPERT = re.compile(r"(ffn_[a-z]+)\.(0|[1-9]\d{0,3})")
_END = re.compile(r"(.+)\.(weight|bias)")

#: Values as a config.json has them -> what only the architecture knows to add.
Additions = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How a GGUF file has one architecture.

    Attributes:
        architecture: what ``general.architecture`` calls it.
        names: of a layer's parts, where they are not the usual ones or beside them; ``{}`` stands
            for an expert's number, and the tensor holds all experts.
        interleaved: the rows of queries and keys lie as pairs to be rotated, and not as halves.
        norm_offset: what was added to the weights of norms.
        metadata: metadata -> keys of config.json, beside those of every architecture.
        additions: what else there is to say.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    metadata: Mapping[str, str] = field(default_factory=dict)
    additions: Additions = lambda values: {}

    def checkpoint_name(self, name: str) -> str | None:
        """Hugging Face's name for a tensor, with ``{}`` for an expert; None for one that no
        checkpoint has."""
        if match := _BLOCK.fullmatch(name):
            layer, part, kind = match.groups()
            known = self._in_layer(part)
            return None if known is None else f"model.layers.{int(layer)}.{known}.{kind}"
        if match := _END.fullmatch(name):
            known = _ENDS.get(match[1])
            return None if known is None else f"{known}.{match[2]}"
        return None

    def _in_layer(self, part: str) -> str | None:
        """Hugging Face's name for a layer's part."""
        if match := _EXPERT.fullmatch(part):
            stacked = self.names.get(f"{match[1]}_exps")
            return None if stacked is None else stacked.replace("{}", match[2])
        return {**_LAYER, **self.names}.get(part)
