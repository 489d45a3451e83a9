"""Writes GGUF files as llama.cpp's converter does, with the ``gguf`` package: its names, its
quantization; the order of rows, norms and experts as llama.cpp's own converter has them
(``conversion/`` in llama.cpp, July 2026)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exkv.checkpoint import GGUFContents

from .blocks import random_blocks

gguf = pytest.importorskip("gguf", reason="of the test extra, which `make test` installs")

#: Tensor's GGUF name and its values -> the type to store it in; None for float32.
TypeOf = Callable[[str, np.ndarray], Any]
#: What is tested in files that the converter does not write: packed, damaged, as of its past.
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Glm4MoeForCausalLM": "glm4moe",
    "GptOssForCausalLM": "gpt-oss",
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
}
#: Whether what makes keys and values of latent vectors is written as two matrices for each head, as
#: since April 2025, and the lengths of all heads beside those of the one that llama.cpp stores.
SPLITS = True
#: What it writes of configs that have one of these fields.
_FIELDS = {
    "add_layer_norm_rms_eps": ("rms_norm_eps",),
    "add_expert_count": ("num_local_experts", "n_routed_experts"),
    "add_expert_used_count": ("num_experts_per_tok",),
    "add_expert_feed_forward_length": ("moe_intermediate_size",),
    "add_expert_shared_count": ("n_shared_experts",),
    "add_expert_group_count": ("n_group",),
    "add_expert_group_used_count": ("topk_group",),
    "add_expert_weights_scale": ("routed_scaling_factor",),
    "add_leading_dense_block_count": ("first_k_dense_replace",),
    "add_nextn_predict_layers": ("num_nextn_predict_layers",),
}


def floats(name: str, values: np.ndarray) -> Any:
    """Every tensor in float32."""
    return None


def in_types(*names: str) -> TypeOf:
    """Matrices in these types, by turns; a tensor whose rows are no blocks in Q8_0."""
    turns = iter(names * 1000)

    def choose(name: str, values: np.ndarray) -> Any:
        if values.ndim < 2 or "gate_inp" in name:
            return None
        type = gguf.GGMLQuantizationType[next(turns)]
        fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[type][0] == 0
        return type if fits else gguf.GGMLQuantizationType.Q8_0

    return choose


def write_gguf(
    file: Path,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    type_of: TypeOf = floats,
    tokenizer: Callable[[Any], None] = lambda writer: None,
    experts_apart: bool = False,
    as_floats: bool = False,
) -> dict[str, torch.Tensor]:
    """Write a model of transformers to a file; what its tensors stand for, by their own names.

    Args:
        config: transformers', with ``architectures``.
        tensors: as transformers saves them.
        tokenizer: writes one.
        experts_apart: a tensor for each expert, as files were until April 2024.
        as_floats: write the floats that packed blocks stand for.
    """
    (name,) = config.architectures
    writer = gguf.GGUFWriter(file, ARCHITECTURES[name])
    _write_metadata(writer, config)
    tokenizer(writer)
    converted = dict(_converted(name, config, tensors))
    plain: dict[str, np.ndarray] = {}
    for key, values in (_apart(converted) if experts_apart else converted).items():
        type = type_of(key, values)
        if type is None:
            writer.add_tensor(key, values)
            plain[key] = values
            continue
        packed = quantize(values, type)
        plain[key] = gguf.dequantize(packed, type).reshape(values.shape)
        if as_floats:
            writer.add_tensor(key, plain[key])
        else:
            writer.add_tensor(key, packed, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(_restored(name, config, tensors, _stacked(plain)))


def rewrite(
    file: Path,
    out: Path,
    metadata: Mapping[str, Any],
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict,
) -> None:
    """Write a file of floats again, with other metadata and tensors."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            of_items = field.types[-1] if len(field.types) > 1 else None
            value = metadata.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], sub_type=of_items)
    tensors = {each.name: np.array(each.data) for each in reader.tensors}
    for name, values in change(tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_floats(file: Path, out: Path) -> None:
    """Write a file again with what its blocks stand for, as float32."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            of_items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_items)
    for each in reader.tensors:
        writer.add_tensor(each.name, gguf.dequantize(each.data, each.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _apart(stacked: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of all experts as one for each."""
    return {
        key.replace("_exps", f".{i}"): values
        for key, all_of_them in stacked.items()
        for i, values in enumerate(all_of_them if "_exps" in key else [all_of_them])
    }


def _stacked(plain: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same the other way."""
    made: dict[str, Any] = {}
    for key, values in plain.items():
        expert = re.fullmatch(r"(.*\.ffn_\w+)\.\d+(\.weight)", key)
        if expert:
            made.setdefault(f"{expert[1]}_exps{expert[2]}", []).append(values)
        else:
            made[key] = values
    return {key: np.stack(v) if isinstance(v, list) else v for key, v in made.items()}


def dequantized(
    file: Path, config: Any, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a file's tensors stand for, by the names that transformers has for these. (Where they
    lie our own header says: the package takes three seconds over a vocabulary.)"""
    data = np.fromfile(file, np.uint8)
    plain = {}
    for name, placed in GGUFContents(file).tensors.items():
        stored = placed.tensor
        packed = data[stored.offset : stored.offset + stored.nbytes].reshape(stored.shape[0], -1)
        plain[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType[stored.type.name])
    return dict(_restored(config.architectures[0], config, tensors, plain))


def quantize(values: np.ndarray, type: Any) -> np.ndarray:
    """Packed blocks; of types that the package only reads, random ones of a fitting scale."""
    try:
        return gguf.quantize(values, type)
    except NotImplementedError:
        generator = torch.Generator().manual_seed(values.size)
        *rows, inputs = values.shape
        size = math.prod(rows), inputs
        blocks = random_blocks(type.name, size, values.std() / 3000, generator)
        return blocks.view(*rows, -1).numpy()


def _write_metadata(writer: Any, config: Any) -> None:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    nextn = getattr(config, "num_nextn_predict_layers", 0)
    writer.add_block_count(config.num_hidden_layers + nextn)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    if hasattr(config, "kv_lora_rank"):
        _write_latent(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(width)
        writer.add_value_length(width)
    for method, names in _FIELDS.items():
        values = [getattr(config, name, None) for name in names]
        value = next((value for value in values if value is not None), None)
        if value is not None:
            getattr(writer, method)(value)
    if hasattr(config, "n_group"):
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if "GptOss" in config.architectures[0]:
        writer.add_sliding_window(config.sliding_window)
    _write_rope(writer, config, width)


def _write_latent(writer: Any, config: Any) -> None:
    """Heads as llama.cpp stores them, one of the latent vector and the rotated key; and as they
    are."""
    writer.add_head_count_kv(1 if SPLITS else config.num_attention_heads)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    keys = config.qk_nope_head_dim + config.qk_rope_head_dim
    if SPLITS:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_key_length(keys)
        writer.add_value_length(config.v_head_dim)
    softmax = config.model_type == "deepseek_v2"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)


def _write_rope(writer: Any, config: Any, width: int) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1)))
    kind = rope.get("rope_type")
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mscale_all_dim" in rope:  # a tenth of it, as llama.cpp's converter has it
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _converted(name: str, config: Any, tensors: Mapping[str, torch.Tensor]):
    """GGUF name, values."""
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == ARCHITECTURES[name])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers + 1)  # and an MTP head
    experts: dict[str, dict[int, np.ndarray]] = {}
    for key, tensor in _one_by_one(tensors):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if SPLITS and key.endswith("kv_b_proj.weight"):
            keys, values = _of_heads(config, tensor.float())
            for part, matrices in (("k_b_proj", keys), ("v_b_proj", values)):
                own = key.replace("kv_b_proj", part)
                yield names.get_name(own, try_suffixes=(".weight",)), matrices.contiguous().numpy()
            continue
        values = _changed(name, config, key, tensor.float()).numpy()
        if match := re.search(r"\.experts\.(\d+)\.(w\d|\w+_proj)", key):
            stacked = key.replace(f"experts.{match[1]}.", "experts.")
            experts.setdefault(stacked, {})[int(match[1])] = values
            continue
        yield names.get_name(key, try_suffixes=(".weight", ".bias")), values
    for key, each in experts.items():
        stacked = np.stack([each[i] for i in sorted(each)])
        yield names.get_name(key, try_suffixes=(".weight",)), stacked


def _of_heads(config: Any, kv_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each head's matrix of keys, by rows of the latent vector, and that of values."""
    sizes = config.qk_nope_head_dim, config.v_head_dim
    keys, values = kv_b.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return keys.transpose(1, 2), values


def _one_by_one(tensors: Mapping[str, torch.Tensor]):
    """Tensors that transformers saves together apart, under names that the package's map knows:
    gpt-oss's gates and ups. Parameters that end in no ``.weight`` get an ending."""
    for key, tensor in tensors.items():
        part = key.rpartition(".")[2]
        if part == "sinks":
            yield f"{key}.weight", tensor
        elif part == "e_score_correction_bias":
            yield key.replace("_bias", ".bias"), tensor
        elif key.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            kind = "bias" if part.endswith("bias") else "weight"
            whole = tensor if kind == "bias" else tensor.transpose(1, 2)
            for index, name in enumerate(("gate_proj", "up_proj")):
                yield key.replace(part, f"{name}.{kind}"), whole[:, index::2].contiguous()
        elif key.endswith("experts.down_proj"):
            yield f"{key}.weight", tensor.transpose(1, 2).contiguous()
        elif key.endswith("experts.down_proj_bias"):
            yield key.replace("_bias", ".bias"), tensor
        else:
            yield key, tensor


def _changed(name: str, config: Any, key: str, values: torch.Tensor) -> torch.Tensor:
    heads = _paired_heads(name, config, key)
    if heads is None:
        return values
    # Row i of a head's first half, then row i of its second half, and so on.
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _paired_heads(name: str, config: Any, key: str) -> int | None:
    if ARCHITECTURES[name] != "llama":  # whose rows of queries and keys are put into pairs
        return None
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(key.split(".")[-2])


def _restored(
    name: str, config: Any, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, np.ndarray]
):
    """The tensors' own names, and what the file has for them."""
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == ARCHITECTURES[name])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers + 1)  # and an MTP head
    for key, tensor in tensors.items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            key_in_file, stored = "token_embd.weight", plain["token_embd.weight"]
        elif match := re.search(r"\.experts\.(\d+)\.(w\d|\w+_proj)", key):
            stacked = key.replace(f"experts.{match[1]}.", "experts.")
            key_in_file = names.get_name(stacked, try_suffixes=(".weight",))
            stored = plain[key_in_file][int(match[1])]
        else:
            key_in_file = names.get_name(key, try_suffixes=(".weight", ".bias"))
            stored = plain.get(key_in_file)
        if stored is None:  # of several that lie together
            continue
        values = torch.from_numpy(np.ascontiguousarray(stored)).view(tensor.shape)
        heads = _paired_heads(name, config, key)
        if heads is not None:
            values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        yield key, values
