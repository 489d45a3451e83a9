"""Tensors of a checkpoint that no part of the model reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

#: What tensors may lie in a layer and change nothing: rotary frequencies and lightning attention's
#: decays, which follow from the config; GPT-NeoX's masks; scales of activations, keys and values,
#: which stay floats here; what packers of weights note down, which their config says too; and the
#: copies of the model's table and head beside an MTP head.
_HARMLESS = re.compile(
    r".*\.(rotary_emb\.\w+|attention\.(masked_)?bias|weight_shape|weight_format"
    r"|slope_rate|(query|key|diagonal)_decay"
    r"|(input|output|activation|[qkv])_(scale|global_scale|zero_point)"
    r"|packing|unpack_view_dtype|view_as_float|quant_(scale|zero)|compute_dtype|offload_meta"
    r"|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero)"
    r"|.*\.\d+\.(embed_tokens|shared_head\.head)\.\w+"
    r"|(.*\.)?(lm_head|embed_out)\.weight"  # the same as the embedding, or it were read
)
_LAYER = re.compile(r"(.*?\.\d+)\..*")


def unread(stored: Iterable[str], expected: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Tensors that nothing reads and that aren't known to be harmless, and of each, whether it is
    a part of a layer or module that runs, which without it is another one."""
    known = set(expected)
    places = {place for name in known for place in _places(name)}
    for name in stored:
        if name not in known and not _HARMLESS.fullmatch(name):
            yield name, not places.isdisjoint(_places(name))


def _places(name: str) -> Iterator[str]:
    """The module of a tensor, and the layer."""
    if "." in name:
        yield name.rpartition(".")[0]
    if match := _LAYER.fullmatch(name):
        yield match[1]
