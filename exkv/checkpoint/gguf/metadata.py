"""Convert the metadata of a GGUF file to a config.json, so that both go through the same checks."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..families import Family
from ..files import quoted
from ..value_checks import is_int
from .contents import GGUFContents
from .names import GGUFFamily
from .tensors import ROPE_TENSORS, layers_of, packed_types

logger = logging.getLogger(__name__)

#: Metadata under the architecture's name -> key of config.json.
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "interleave_moe_layer_step": "decoder_sparse_step",
}
#: Settings of mixtures of experts.
_OF_EXPERTS = frozenset(key for own, key in KEYS.items() if "expert" in own) | {
    *("first_k_dense_replace", "decoder_sparse_step")
}
#: Required metadata, without defaults.
_NEEDED = tuple(KEYS)[:5]
#: Tokens that end an answer in known models, whatever the metadata says.
_ENDS = frozenset(
    [
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
        *("<|end_of_text|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ]
)
#: If a vocabulary has both of a pair, "<|end|>" ends only one message of an answer that may have
#: several (gpt-oss's analysis comes before its answer).
_ENDS_OF_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_values(contents: GGUFContents) -> dict[str, Any]:
    """The contents of a config.json for this model.

    Raises:
        CheckpointError: unknown architecture.
        ValueError: a key is missing or not supported; names it.
    """
    name, family, gguf = contents.family()
    _warn_of_assumed(contents, gguf)
    _warn_of_doubts(contents, gguf)
    missing = [key for key in _NEEDED if contents.own(key) is None]
    if missing:
        lacking = ", ".join(f"{contents.architecture}.{key}" for key in missing)
        raise ValueError(f"the metadata lacks {lacking}")
    keys = {**KEYS, **gguf.metadata}
    values = {key: _plain(contents.own(own)) for own, key in keys.items() if _has(contents, own)}
    unknown = _OF_EXPERTS - _settings(family)
    values = {key: value for key, value in values.items() if key not in unknown}
    values["num_hidden_layers"] = layers_of(contents)
    values |= {"architectures": [name], "model_type": family.model_type}
    values["vocab_size"] = _vocab_size(contents)
    values["tie_word_embeddings"] = "output.weight" not in contents.tensors
    values |= _by_tensors(contents, family, gguf)
    values["torch_dtype"] = _dtype(contents)
    values |= _tokens(contents.metadata) | _windows(contents)
    if "head_dim" not in values and is_int(values["num_attention_heads"]):
        values["head_dim"] = values["hidden_size"] // max(values["num_attention_heads"], 1)
    values |= _rope(contents, values)
    values |= gguf.additions(values)
    types = packed_types(contents)
    if types:
        values["quantization_config"] = {"quant_method": "gguf", "types": types}
    return values


def _has(contents: GGUFContents, own: str) -> bool:
    return contents.own(own) is not None


def _warn_of_assumed(contents: GGUFContents, gguf: GGUFFamily) -> None:
    """Warn about missing metadata, and what is assumed instead."""
    for key, taken in gguf.assumed.items():
        if not _has(contents, key):
            logger.warning(
                "%s: the metadata lacks %s.%s: %s",
                contents.path,
                contents.architecture,
                key,
                taken,
            )


def _by_tensors(contents: GGUFContents, family: Family, gguf: GGUFFamily) -> dict[str, Any]:
    """Settings that follow from which tensors exist, mostly in the first layer."""
    parts = {
        "attention_bias": ("attn_q.bias", "attn_qkv.bias", "attn_output.bias"),
        "mlp_bias": ("ffn_down.bias",),
        "use_qk_norm": ("attn_q_norm.weight",),
    }
    known = {*family.reads, *_settings(family)}
    found: dict[str, Any] = {
        key: any(f"blk.0.{part}" in contents.tensors for part in each)
        for key, each in parts.items()
        if key in known
    }
    if "mamba_rms_norm" in known:
        found["mamba_rms_norm"] = "blk.0.ssm_norm.weight" in contents.tensors
    if "attention_k_eq_v" in known:
        made = [part.removesuffix("attn_k.weight") for part in contents.tensors]
        made = [part for part in made if f"{part}attn_k.weight" in contents.tensors]
        found["attention_k_eq_v"] = any(f"{x}attn_v.weight" not in contents.tensors for x in made)
    if "lm_head_bias" in known:
        found["lm_head_bias"] = "output.bias" in contents.tensors
    for name, key in gguf.sizes.items():
        if name in contents.tensors:
            found[key] = contents.tensors[name].tensor.shape[0]
    layers = layers_of(contents)
    if not is_int(layers) or layers >= len(contents.tensors):
        return found
    if "mlp_layer_types" in known:
        routers = (f"blk.{layer}.ffn_gate_inp.weight" for layer in range(layers))
        kinds = {True: "sparse", False: "dense"}
        found["mlp_layer_types"] = [kinds[name in contents.tensors] for name in routers]
    for key, part in gguf.periods.items():
        found |= _period(contents, key, part, layers)
    return found


def _period(contents: GGUFContents, key: str, part: str, layers: int) -> dict[str, int]:
    """Period and first layer of layers with a part: ``KEY_period``, ``KEY_offset``."""
    have = [i for i in range(layers) if f"blk.{i}.{part}" in contents.tensors]
    offset = have[0] if have else layers
    period = have[1] - offset if len(have) > 1 else max(layers, offset + 1)
    if have != [*range(offset, layers, period)] or offset >= period:
        raise ValueError(
            f"layers {', '.join(map(str, have))} have {part}, which is not every {period}th layer"
        )
    return {f"{key}_period": period, f"{key}_offset": offset}


def _warn_of_doubts(contents: GGUFContents, gguf: GGUFFamily) -> None:
    """Warn about what the file of a model with this name can't state."""
    name = contents.metadata.get("general.name")
    for pattern, unsaid in gguf.doubts.items():
        if isinstance(name, str) and re.search(pattern, name.lower()):
            logger.warning("%s: general.name is %s: %s", contents.path, quoted(name), unsaid)


def _settings(family: Family) -> set[str]:
    """The settings that only this architecture has."""
    kind = family.specific
    return set() if kind is None else {field.name for field in fields(kind)} - family.ignores


def _plain(value: Any) -> Any:
    """A 32-bit number with its original decimal digits: 1e-05, not 9.99999974e-06; a list of equal
    integers, one for each layer, as one integer."""
    if isinstance(value, list) and value and all(is_int(x) and x == value[0] for x in value):
        return value[0]
    if not isinstance(value, float):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if _rounded(short) == value:
            return short
    return value


def _rounded(value: float) -> float:
    """Round to 32 bits."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return value


def _vocab_size(contents: GGUFContents) -> int:
    placed = contents.tensors.get("token_embd.weight")
    if placed is None or len(placed.tensor.shape) != 2:
        raise ValueError("the tensor token_embd.weight, with a row for each token, is missing")
    return placed.tensor.shape[0]


def _dtype(contents: GGUFContents) -> str:
    """Dtype to compute in: that of the matrices if most are floats, else bfloat16."""
    sizes: dict[str, int] = {}
    for placed in contents.tensors.values():
        tensor = placed.tensor
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    return _DTYPES.get(max(sizes, key=sizes.__getitem__, default=""), "bfloat16")


def _windows(contents: GGUFContents) -> dict[str, Any]:
    """The window, and which layers have it if stated."""
    window = contents.own("attention.sliding_window")
    pattern = contents.own("attention.sliding_window_pattern")
    found: dict[str, Any] = {} if window is None else {"sliding_window": window or None}
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        found["layer_types"] = [kinds.get(bool(each)) for each in pattern]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern
    return found


def _rope(contents: GGUFContents, values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions: the rotated part of a head, and the scaling of frequencies."""
    found: dict[str, Any] = {}
    rotated, head = contents.own("rope.dimension_count"), values.get("head_dim")
    if is_int(rotated) and isinstance(head, int) and head > 0:
        found["partial_rotary_factor"] = rotated / head
    scaling = _scaling(contents)
    if scaling:
        found["rope_scaling"] = scaling
    return found


def _scaling(contents: GGUFContents) -> dict[str, Any]:
    every, long, short = (
        contents.floats(name) if name in contents.tensors else None for name in ROPE_TENSORS
    )
    kind = contents.own("rope.scaling.type")
    if kind is None and contents.own("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": _plain(contents.own("rope.scale_linear"))}
    stated = {key: _plain(contents.own(f"rope.scaling.{key}")) for key in SCALING}
    if long is not None or short is not None:
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": stated["original_context_length"],
            "attention_factor": stated["attn_factor"],
        }
    if every is not None and kind in (None, "none"):
        return {"rope_type": "factors", "factor": 1.0, "factors": every}
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn") or every is not None:
        beside = " beside rope_freqs.weight" if every is not None else ""
        raise ValueError(
            f"{contents.architecture}.rope.scaling.type {kind!r}{beside} is not supported; exkv "
            f"knows none, linear, yarn"
        )
    scaling = {key: stated[own] for own, key in SCALING.items() if stated[own] is not None}
    if kind == "linear":
        return {"rope_type": "linear", "factor": scaling.get("factor")}
    return {**scaling, "rope_type": "yarn"}


#: Metadata under rope.scaling -> key of config.json's rope_scaling.
SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attn_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": token_id(metadata, "bos"),
        "pad_token_id": token_id(metadata, "padding"),
        "eos_token_id": list(end_ids(metadata)),
    }


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of a token that the metadata names; -1, as 32 bits, means none."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if is_int(value) and value not in (-1, 2**32 - 1) else None


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of tokens that end an answer: those that the metadata names, and known spellings of
    ends of turns, since a file names at most one of them."""
    named = [token_id(metadata, name) for name in ("eos", "eot", "eom")]
    found = [token for token in named if token is not None]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        there = _ENDS.intersection(token for token in tokens if isinstance(token, str))
        if any(pair <= there for pair in _ENDS_OF_MESSAGES):
            there -= {"<|end|>"}
            found = [token for token in found if tokens[token : token + 1] != ["<|end|>"]]
        found += [index for index, token in enumerate(tokens) if token in there]
    return tuple(dict.fromkeys(found))
