"""Shorten calls of exkv's ops in a dry run so that they show a reference's peak with less work.

References go over blocks of queries and tiles of keys in turn, and the tenth shows a dry run
nothing that the second did not. Some temporaries depend on the contents of tensors, which a dry run
doesn't know; the worst case then stands for all. References know none of this.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from exkv.ops import REFERENCES, weight_groups
from exkv.ops.attention import KEY_TILE, QUERY_BLOCK, is_flash, is_fresh, query_block
from exkv.ops.registry import computes_on
from exkv.ops.weight_groups import BLOCK, CHUNK, Groups
from exkv.weights.tiles import tile_of

#: An op's arguments by name, complete.
Call = dict[str, Any]


def named_arguments(name: str, args: tuple) -> Call:
    """The arguments of a call of ``exkv::<name>``, including defaults."""
    names, defaults = _parameters(name)
    return dict(zip(names, (*args, *defaults[len(args) :]), strict=True))


@functools.cache
def _parameters(name: str) -> tuple[tuple[str, ...], tuple]:
    """The names of an op's arguments, and their defaults."""
    parameters = inspect.signature(REFERENCES[name]).parameters
    return tuple(parameters), tuple(each.default for each in parameters.values())


def _last_queries(call: Call, block: int = QUERY_BLOCK) -> Call:
    """The last three blocks of queries: the second of them is full, and runs beside what the one
    before it left. (``past_lens`` would have to move by what is left out, if it held numbers.)"""
    q = call["q"]
    first = max(-(-q.shape[1] // block) - 3, 0) * block
    return {"q": q[:, first:]} if first else {}


def _last_queries_unless_fresh(call: Call) -> Call:
    rule = [call[name] for name in ("kv_len", "ragged", "window", "softcap")]
    if is_fresh(call["q"].shape[1], *rule) or is_flash(call["q"], call["k"], *rule):
        return {}  # such a call has no blocks
    return _last_queries(call, query_block(call["q"].shape[2], call["k"].shape[2]))


def _few_tiles(call: Call) -> Call:
    """Two full tiles of keys and the remainder: after the second, every tile repeats the first."""
    kv_len = call["kv_len"]
    return {"kv_len": min(kv_len, 2 * KEY_TILE + kv_len % KEY_TILE)}


def _last_queries_over_few_tiles(call: Call) -> Call:
    return _last_queries(call) | _few_tiles(call)


def _last_queries_since(call: Call) -> Call:
    shorter = _last_queries_over_few_tiles(call)
    if "q" in shorter:
        shorter["since"] = call["since"][:, -shorter["q"].shape[1] :]
    return shorter


def _without_padding(call: Call) -> Call:
    """Every token is written, which takes the most memory."""
    return {"new_lens": None}


def _two_tiles_of_weights(call: Call) -> Call:
    """The second tile of rows is made when only the results of the first are left."""
    x = call["x"]
    return {"outputs": min(call["outputs"], 2 * tile_of(x.shape[-1], computes_on(x)))}


def _two_tiles_of_groups(call: Call) -> Call:
    """Likewise for a matrix whose tensors carry its number of rows."""
    groups, (codes, *others) = Groups(*call["layout"]), call["tensors"]
    rows = 2 * weight_groups.tile_of(codes.shape[1] * CHUNK, computes_on(codes))
    bias = call["bias"]
    end = len(others) - groups.ordered  # the order belongs to inputs
    cut = [codes[: rows // BLOCK], *(part[:rows] for part in others[:end]), *others[end:]]
    return {"tensors": cut, "bias": None if bias is None else bias[:rows]}


#: Op name -> changes to a call's arguments with which the reference's temporaries peak as high with
#: less work, or as high as they can for any contents of the tensors.
SHORTER: dict[str, Callable[[Call], Call]] = {
    "append_kv": _without_padding,
    "attention": _last_queries_unless_fresh,
    "attention_int8": _last_queries_over_few_tiles,
    "attention_part": _last_queries_over_few_tiles,
    "attention_part_since": _last_queries_since,
    "linear_groups": _two_tiles_of_groups,
    "linear_group_tiles": _two_tiles_of_groups,
    "linear_packed": _two_tiles_of_weights,
    "linear_tiles": _two_tiles_of_weights,
}

#: Ops that read tensor contents on the host; their fakes return the worst case.
READING = {"read_tally"}
