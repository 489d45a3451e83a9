"""Tensors of a checkpoint that no part of the model reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

#: Tensors of layers without effect: rotary frequencies and lightning attention's decays, which
#: follow from the config; GPT-NeoX's masks; scales of activations, keys and values, which stay
#: floats here; notes of packers, which repeat their config; and copies of the model's table and
#: head beside an MTP head.
_HARMLESS = re.compile(
    r".*\.(rotary_emb\.\w+|attention\.(masked_)?bias|weight_shape|weight_format"
    r"|slope_rate|(query|key|diagonal)_decay"
    r"|(input|output|activation|[qkv])_(scale|global_scale|zero_point)"
    r"|packing|unpack_view_dtype|view_as_float|quant_(scale|zero)|compute_dtype|offload_meta"
    r"|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero)"
    r"|.*\.\d+\.(embed_tokens|shared_head\.head)\.\w+"
    r"|(.*\.)?(lm_head|embed_out)\.weight"  # equal to the embedding, or it would be read
)
_LAYER = re.compile(r"(.*?\.\d+)\..*")


def unread(stored: Iterable[str], expected: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each unread tensor that isn't known to be harmless, and whether it belongs to a layer
    or module that runs, which would then compute something else."""
    known = set(expected)
    places = {place for name in known for place in _places(name)}
    for name in stored:
        if name not in known and not _HARMLESS.fullmatch(name):
            yield name, not places.isdisjoint(_places(name))


def _places(name: str) -> Iterator[str]:
    """Yield a tensor's module and layer."""
    if "." in name:
        yield name.rpartition(".")[0]
    if match := _LAYER.fullmatch(name):
        yield match[1]
