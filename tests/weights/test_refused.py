"""Quantized checkpoints that are damaged or contradict their settings: the error names file, tensor
and number, and says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from packers import write
from packers.compressed import group
from packers.torchao import INT4, INT8
from packers.torchao import settings as torchao
from safetensors.torch import load_file, save_file
from test_checkpoints import RECIPES
from tiny import llama, reference

from exkv import Model
from exkv.weights import METHODS

LAYER = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Callable[[str], tuple[dict[str, Any], Tensors]]:
    """Recipe -> the config and the tensors of its folder."""
    theirs = reference(llama(num_hidden_layers=1))
    tensors = {name: value.clone() for name, value in theirs.state_dict().items()}
    config = {**theirs.config.to_dict(), "dtype": "float32"}

    def make(name: str) -> tuple[dict[str, Any], Tensors]:
        folder = tmp_path_factory.mktemp("sound")
        write(folder, config, tensors, RECIPES[name])
        text = (folder / "config.json").read_text()
        return json.loads(text), load_file(folder / "model.safetensors")

    return make


def load(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    Model(folder).load(devices=["cpu"])


def put(part: str, change: Callable[[torch.Tensor], torch.Tensor]):
    """Replace one of LAYER's tensors."""

    def damage(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{part}"] = change(tensors[f"{LAYER}.{part}"])

    return damage


def at(index: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Set a value at an index."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


def of_bytes(change: Callable[[torch.Tensor], torch.Tensor]):
    """Apply the change to the tensor's bytes."""
    return lambda tensor: change(tensor.view(torch.uint8)).view(tensor.dtype)


def rewritten(old: bytes, new: bytes) -> Callable[[torch.Tensor], torch.Tensor]:
    """Other text of the same length in bytes."""
    return lambda tensor: torch.tensor(
        list(bytes(tensor.tolist()).replace(old, new)), dtype=torch.uint8
    )


def drop(part: str):
    return lambda tensors: tensors.pop(f"{LAYER}.{part}")


#: Recipe, damage, and the words of the message.
DAMAGED = {
    "fp8 nan scale": (
        "fp8 blocks",
        put("weight_scale_inv", at(1, torch.nan)),
        rf"model.safetensors: {LAYER}: .* of 14 weight_scale_inv are not finite.*number 2.*again",
    ),
    "fp8 scale of another shape": (
        "fp8 blocks",
        put("weight_scale_inv", lambda t: t[:, :1]),
        rf"{LAYER}.weight_scale_inv in model.safetensors is \[7, 1\], expected \[7, 2\]",
    ),
    "fp8 scale missing": (
        "fp8 blocks",
        drop("weight_scale_inv"),
        rf"{LAYER}.weight' holds torch.float8_e4m3fn, and must hold one of: float32",
    ),
    "fp8 scale of integers": (
        "fp8 matrix",
        put("weight_scale", lambda t: t.int()),
        rf"{LAYER}.weight_scale' holds torch.int32, and must hold one of: float32",
    ),
    "fp8 two scales": (
        "fp8 matrix",
        lambda tensors: tensors.update({f"{LAYER}.weight_scale_inv": torch.ones(1)}),
        f"{LAYER} has both weight_scale_inv and weight_scale",
    ),
    "fbgemm nan scale": (
        "fbgemm",
        put("weight_scale", at(1, torch.nan)),
        f"{LAYER}: 1 of 224 weight_scale are not finite; the first is number 1, nan",
    ),
    "mxfp4 no number": (
        "mxfp4",
        put("scales", at((2, 1), 255)),
        rf"model.safetensors: {LAYER}: 1 of 896 scales are above 252.* is number 9, 255: .*again",
    ),
    "mxfp4 infinite": ("mxfp4", put("scales", at((2, 1), 253)), "of 896 scales .* number 9, 253:"),
    "nvfp4 nan scale": (
        "compressed nvfp4",
        put("weight_scale", of_bytes(at((2, 1), 255))),
        rf"{LAYER}: 1 of 1792 weight_scale are not finite; the first is number 17, nan: .*again",
    ),
    "nvfp4 without a factor": (
        "compressed nvfp4",
        put("weight_global_scale", at(0, 0)),
        rf"{LAYER}: 1 of 1 weight_global_scale are 0 or not finite",
    ),
    "modelopt infinite factor": (
        "modelopt nvfp4",
        put("weight_scale_2", at((), torch.inf)),
        rf"{LAYER}: 1 of 1 weight_scale_2 are not finite; the first is number 0, inf: .*again",
    ),
    "modelopt factor missing": (
        "modelopt nvfp4",
        drop("weight_scale_2"),
        f"{LAYER}.weight_scale_2 is missing",
    ),
    "mxfp4 blocks of another shape": (
        "mxfp4",
        put("blocks", lambda t: t[:, 1:]),
        rf"{LAYER}.blocks in model.safetensors is \[224, 3, 16\], expected \[224, 4, 16\]",
    ),
    "mxfp4 scales missing": ("mxfp4", drop("scales"), f"{LAYER}.scales is missing"),
    "gptq group out of range": (
        "gptq 4 act-order v2",
        put("g_idx", at(5, 99)),
        rf"model.safetensors: {LAYER}: g_idx puts input . into group ., but groups have 32 "
        "inputs each, from 0 to 3.*again",
    ),
    "gptq negative group": (
        "gptq 4 act-order v2",
        put("g_idx", at(5, -1)),
        rf"{LAYER}: g_idx puts input 5 into group -1",
    ),
    "gptq groups that nobody announced": (
        "gptq 4",
        put("g_idx", lambda t: t.flip(0)),
        f"{LAYER}: g_idx sorts the inputs, and .* says desc_act false: they contradict",
    ),
    "gptq zero points": (
        "gptq 4",
        put("qzeros", at((0, 0), 0)),
        rf"{LAYER}: 8 of 896 zero points are not 8, which sym means for 4 bits and "
        "checkpoint_format 'gptq'; the first is number 0, 1: .*contradict",
    ),
    "gptq infinite scale": (
        "gptq 3",
        put("scales", at((1, 2), torch.inf)),
        rf"{LAYER}: 1 of 448 scales are not finite; the first is number 5, inf",
    ),
    "gptq weights missing": (
        "gptq 4",
        drop("qweight"),
        f"{LAYER}.qweight is missing",
    ),
    "gptq of other bits": (
        "gptq 4",
        put("qweight", lambda t: t[:-1]),
        rf"{LAYER}.qweight in model.safetensors is \[15, 224\], expected \[16, 224\]",
    ),
    "gptq of floats": (
        "gptq 4",
        put("qweight", lambda t: t.float()),
        rf"{LAYER}.qweight' holds torch.float32, and must hold one of: int32",
    ),
    "awq scale": (
        "awq rows",
        put("scales", at((0, 3), torch.nan)),
        rf"{LAYER}: 1 of 224 scales are not finite; the first is number 3, nan",
    ),
    "awq zeros of another shape": (
        "awq rows",
        put("qzeros", lambda t: t[:0]),
        rf"{LAYER}.qzeros in model.safetensors is \[0, 28\], expected \[1, 28\]",
    ),
    "exl2 order": (
        "exl2",
        put("q_invperm", at(7, 128)),
        rf"model.safetensors: {LAYER}: q_invperm is not a permutation of the 128 inputs, .*again",
    ),
    "exl2 bits": (
        "exl2",
        put("q_groups", at(0, 7)),
        rf"{LAYER}.q_groups must be pairs of descending bits, of 8, 6, 5, 4, 3, 2, and .*\[7, 0, ",
    ),
    "exl2 rising bits": ("exl2", put("q_groups", at(6, 8)), f"{LAYER}.q_groups must be pairs"),
    "exl2 first rows": ("exl2", put("q_groups", at(3, 99)), "ascending from 0"),
    "exl2 half a pair": ("exl2", put("q_groups", lambda t: t[:-1]), "q_groups must be pairs"),
    "exl2 no groups": ("exl2", put("q_groups", lambda t: t[:0]), r"ascending from 0, not \[\]"),
    "exl2 rows": (
        "exl2",
        put("q_weight", lambda t: t[:-1]),
        f"{LAYER}.q_groups has groups of different sizes, or not 128 inputs",
    ),
    "exl2 scale": (
        "exl2",
        put("q_scale_max", at(1, torch.nan)),
        f"{LAYER}: 1 of 4 q_scale_max are not finite; the first is number 1, nan",
    ),
    "exl2 weights missing": ("exl2", drop("q_weight"), f"{LAYER}.weight is missing"),
    "exl3 scale": (
        "exl3",
        put("svh", at(1, torch.inf)),
        f"{LAYER}: 1 of 256 svh are not finite; the first is number 1, inf",
    ),
    "exl3 factor": (
        "exl3",
        put("mul1", lambda t: t + 2),
        f"{LAYER}: mul1 is 0x83dcd12f, and exkv knows only 0x83dcd12d",
    ),
    "exl3 bits": (
        "exl3",
        put("trellis", lambda t: t[..., :-1]),
        rf"{LAYER}.trellis is \[8, 16, 39\], of 2.4375 bits a weight, with the codebook mul1; exkv",
    ),
    "exl3 halves": ("exl3", drop("mul1"), "of 2.5 bits a weight, with the codebook 3inst; exkv"),
    "exl3 rows": (
        "exl3",
        put("trellis", lambda t: t[:, :8]),
        rf"{LAYER}.trellis in model.safetensors is \[8, 8, 40\], expected \[8, 16, 40\]",
    ),
    "hqq bits": (
        "hqq 4",
        put("nbits", lambda t: t - 1),
        rf"{LAYER}: the scalars beside W_q are .'nbits': 3, .*shapes mean .'nbits': 4, .*again",
    ),
    "hqq axis": ("hqq 4", put("axis", lambda t: t - 1), "'axis': 0}.*'axis': 1}: download"),
    "hqq code": (
        "hqq 5 rows",
        put("W_q", at((3, 4), 32)),
        f"{LAYER}: W_q has the code 32, above the 31 of 5 bits: download",
    ),
    "hqq zero": (
        "hqq 2",
        put("zero", at((5, 0), torch.inf)),
        f"{LAYER}: 1 of 896 zero are not finite; the first is number 5, inf",
    ),
    "hqq rows": (
        "hqq 4",
        put("W_q", lambda t: t[:-1]),
        rf"{LAYER}.W_q in model.safetensors is \[447, 32\], expected \[448, 32\]",
    ),
    "hqq no scales": ("hqq 4", drop("scale"), f"{LAYER}.scale is missing"),
    "torchao bits": (
        "torchao int4",
        put("_weight_qdata", at((5, 6), 8)),
        f"{LAYER}: qdata ranges from -8 to 8, and 4 bits only from -8 to 7: download",
    ),
    "torchao zero": (
        "torchao int8",
        put("_weight_zero_point", at((5, 0), 1)),
        f"{LAYER}: 1 of 224 zero points are not 0, and config.json says that .* symmetric",
    ),
    "torchao scale": (
        "torchao int8",
        put("_weight_scale", at((5, 0), torch.nan)),
        f"{LAYER}: 1 of 224 scale are not finite; the first is number 5, nan",
    ),
    "torchao rows": (
        "torchao fp8",
        put("_weight_scale", lambda t: t[:-1]),
        rf"{LAYER}._weight_scale in model.safetensors is \[223, 1\], expected \[224, 1\]",
    ),
    "nf4 state": (
        "nf4 nested",
        put("weight.quant_state.bitsandbytes__nf4", at(0, 0)),
        rf"model.safetensors: {LAYER}: weight.quant_state.bitsandbytes__nf4 is not valid JSON",
    ),
    "nf4 block": (
        "nf4",
        put(
            "weight.quant_state.bitsandbytes__nf4",
            rewritten(b'"blocksize": 64', b'"blocksize": 32'),
        ),
        rf"{LAYER}: weight.quant_state.* has blocksize 32, but the number of absmax means 64",
    ),
    "nf4 shape": (
        "nf4",
        put("weight.quant_state.bitsandbytes__nf4", rewritten(b"[224, 128]", b"[224, 129]")),
        rf"{LAYER}: weight.quant_state.* has shape \[224, 129\], which the stored weights don.t",
    ),
    "nf4 absmax": (
        "nf4 nested",
        put("weight.nested_absmax", at(0, torch.inf)),
        rf"{LAYER}: 1 of 2 nested_absmax are not finite; the first is number 0, inf",
    ),
    "nf4 number of absmax": (
        "nf4",
        put("weight.absmax", lambda t: t[:-1]),
        rf"{LAYER}.weight.absmax in model.safetensors is \[447\], expected \[448\]",
    ),
    "int8 scale": ("int8", put("SCB", at(2, torch.nan)), f"{LAYER}: 1 of 224 SCB are not"),
    "compressed group": (
        "compressed 4 act-order",
        put("weight_g_idx", at(0, 4)),
        rf"{LAYER}: weight_g_idx puts input .* groups have 32 inputs each, from 0 to 3",
    ),
    "compressed integers": (
        "compressed naive",
        put("weight", at((0, 0), 8)),
        rf"{LAYER}: weight has integers from -8 to 8, which don.t fit 4 bits",
    ),
    "compressed scale": (
        "compressed int8",
        put("weight_scale", at(3, -torch.inf)),
        f"{LAYER}: 1 of 224 weight_scale are not finite; the first is number 3, -inf",
    ),
}
#: Recipe, changed settings, and the words of the message.
UNSOUND = {
    "fp8 fmt": ("fp8 blocks", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported.*one of 'e4m3'"),
    "fp8 block": ("fp8 blocks", {"weight_block_size": [0, 8]}, r"weight_block_size \[0, 8\].*two"),
    "fp8 unknown": ("fp8 blocks", {"rotate": 3}, "'rotate' .3. is not known; known are: activat"),
    "fp8 list": ("fp8 blocks", {"ignored_layers": "lm_head"}, "ignored_layers 'lm_head'.*names"),
    "fp8 contradiction": (
        "fp8 blocks",
        {"ignored_layers": ["model.layers.0.mlp"]},
        "'model.layers.0.mlp' is not quantized, and .*safetensors has .*gate_proj.weight_scale_inv",
    ),
    "fbgemm unknown": ("fbgemm", {"rotate": 3}, "'rotate' .3. is not known; known are: activat"),
    "mxfp4 unknown": ("mxfp4", {"rotate": 3}, "'rotate' .3. is not known; known are: dequantize"),
    "mxfp4 list": ("mxfp4", {"modules_to_not_convert": 3}, "modules_to_not_convert 3.*names"),
    "modelopt algorithm": (
        "modelopt nvfp4",
        {"quant_algo": "NVFP4_SVD"},
        "quant_algo 'NVFP4_SVD' is not supported, it must be one of NVFP4, ",
    ),
    "modelopt algorithm of a layer": (
        "modelopt mixed",
        {"quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "W8A16"}}},
        "quantized_layers.model.layers.0.mlp.up_proj: quant_algo 'W8A16' is not supported",
    ),
    "modelopt layers": ("modelopt mixed", {"quantized_layers": {"a": 3}}, "layers: a 3 .* object"),
    "modelopt unknown": ("modelopt fp8", {"rotate": 3}, "'rotate' .3. is not known; known are"),
    "gptq bits": ("gptq 4", {"bits": 5}, "bits 5 is not supported, .* one of 2, 3, 4, 8"),
    "gptq groups": ("gptq 4", {"group_size": 0}, "group_size 0 .* a multiple of 32, or -1"),
    "gptq odd groups": ("gptq 4", {"group_size": 33}, "group_size 33 .* a multiple of 32"),
    "gptq formats": ("gptq 4", {"format": "gptq_v2"}, "'gptq' contradicts format 'gptq_v2'"),
    "gptq planar": ("gptq 4", {"checkpoint_format": "gptq_p"}, "'gptq_p' .* 'gptq', 'gptq_v2'"),
    "gptq marlin": ("gptq 4", {"is_marlin_format": True}, "is_marlin_format True is not"),
    "gptq rule": ("gptq rules", {"dynamic": {"(": {}}}, "dynamic: '.' is not a regular expression"),
    "gptq bits of a rule": ("gptq rules", {"dynamic": {"a": {"bits": 5}}}, "dynamic.a: bits 5"),
    "gptq setting of a rule": ("gptq rules", {"dynamic": {"a": {"bit": 5}}}, "'bit' .* not known"),
    "gptq head": ("gptq rules", {"lm_head": False}, "'lm_head' is not quantized, and .* lm_head"),
    "awq version": ("awq", {"version": "gemv"}, "version 'gemv' is not supported"),
    "awq bits": ("awq", {"bits": 3}, "bits 3 is not supported, it must be one of 4"),
    "awq zeros": ("awq", {"zero_point": False}, "zero_point False is not supported"),
    "awq two sizes": ("awq", {"q_group_size": 128}, "64 contradicts q_group_size 128"),
    "awq list": ("awq", {"modules_to_not_convert": ["q_proj"]}, "'q_proj' is not quantized"),
    "exl2 rank": ("exl2", {"rank": 4}, "the setting 'rank' .4. is not known; known are: bits"),
    "exl3 rank": ("exl3", {"rank": 4}, "the setting 'rank' .4. is not known; known are: bits"),
    "hqq axis": (
        "hqq 4",
        {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 0}}},
        "quant_config.weight_quant_params: axis 0 is not supported, it must be one of 1",
    ),
    "hqq bits": (
        "hqq 4",
        {"quant_config": {"weight_quant_params": {"nbits": 1, "group_size": 32, "axis": 1}}},
        "nbits 1 is not supported, it must be one of 8, 6, 5, 4, 3, 2",
    ),
    "hqq group": (
        "hqq 4",
        {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 24, "axis": 1}}},
        "group_size 24 is not supported, it must be a multiple of 32",
    ),
    "hqq quantized scales": (
        "hqq 4",
        {"quant_config": {"weight_quant_params": {}, "scale_quant_params": {"nbits": 8}}},
        "scale_quant_params .* must be null: exkv reads float scales and zero points only",
    ),
    "hqq kinds": (
        "hqq kinds",
        {"quant_config": {"mlp.up_proj": {"weight_quant_params": {"nbits": 3, "group_size": 32}}}},
        "no entry for self_attn.q_proj, and the checkpoint has .*self_attn.q_proj.W_q",
    ),
    "torchao kind": (
        "torchao int8",
        torchao({"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {}}),
        "default: _type 'Int4WeightOnlyConfig' is not supported, it must be one of 'Int8Weight",
    ),
    "torchao group": (
        "torchao int4",
        torchao(
            {**INT4, "_data": {"granularity": {"_type": "PerGroup", "_data": {"group_size": 8}}}}
        ),
        "granularity._data: group_size 8 is not supported, it must be a multiple of 32",
    ),
    "torchao granularity": (
        "torchao int8",
        torchao({**INT8, "_data": {"granularity": {"_type": "PerTensor", "_data": {}}}}),
        "granularity: _type 'PerTensor' is not supported, it must be one of 'PerRow', 'PerAxis'",
    ),
    "torchao dtype": (
        "torchao int4",
        torchao({**INT4, "_data": {"weight_dtype": {"_type": "torch.dtype", "_data": "int7"}}}),
        "weight_dtype: _data 'int7' is not supported, it must be one of 'int8', 'int6'",
    ),
    "torchao nothing": ("torchao int8", {"quant_type": None}, "quant_type None .* 'default'"),
    "nf4 type": ("nf4", {"bnb_4bit_quant_type": "af4"}, "'af4' .* one of 'nf4', 'fp4'"),
    "nf4 and int8": ("nf4", {"load_in_8bit": True}, "load_in_4bit True .* other than load_in_8b"),
    "nf4 storage": ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "'bfloat16' .* 'uint8'"),
    "compressed format": (
        "compressed 4",
        {"format": "mxfp6-pack-quantized"},
        "format 'mxfp6-pack-quantized' .*one of 'pack-quantized', 'int-quantized'",
    ),
    "compressed type of a format": (
        "compressed 4",
        {"format": "nvfp4-pack-quantized"},
        "config_groups.group_0.weights: type 'int' is not supported, it must be one of 'float'",
    ),
    "compressed nvfp4 groups": (
        "compressed nvfp4",
        {"config_groups": {"g": group(type="float", num_bits=4, group_size=32)}},
        "config_groups.g.weights: group_size 32 is not supported, it must be one of 16",
    ),
    "compressed sparse": (
        "compressed 4",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config .* must be dense, or none",
    ),
    "compressed nothing": ("compressed 4", {"config_groups": {}}, "config_groups {} is not"),
    "compressed bits": (
        "compressed 4",
        {"config_groups": {"g": group(num_bits=7, strategy="channel")}},
        "config_groups.g.weights: num_bits 7 is not supported, it must be one of 2, 3, 4, 5, 6, 8",
    ),
    "compressed groups": (
        "compressed 4",
        {"config_groups": {"g": group(num_bits=4, strategy="group", group_size=0)}},
        "group_size 0 is not supported",
    ),
    "compressed group without a size": (
        "compressed 4",
        {"config_groups": {"g": group(num_bits=4, strategy="group")}},
        "group_size None is not supported, it must be a multiple of 32",
    ),
    "compressed type": (
        "compressed 4",
        {"config_groups": {"g": group(type="float")}},
        "type 'float' is not supported, it must be one of 'int'",
    ),
    "compressed pattern": ("compressed 4", {"ignore": ["re:("]}, "'re:.' is not a regular"),
}


@pytest.mark.parametrize("table", [DAMAGED, UNSOUND], ids=["tensors", "settings"])
def test_every_method_has_checkpoints_that_are_refused(table):
    """Beside GGUF's, which tests/checkpoint/test_gguf_files.py has."""
    methods = {RECIPES[recipe].settings["quant_method"] for recipe, *_ in table.values()}
    assert methods == METHODS.keys() - {None, "on_load", "gguf"}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tensors_are_refused(sound, tmp_path, name):
    recipe, damage, words = DAMAGED[name]
    config, tensors = sound(recipe)
    damage(tensors)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load(tmp_path, config, tensors)


@pytest.mark.parametrize("name", RECIPES)
def test_extra_layer_is_reported_as_missing(sound, tmp_path, name):
    config, tensors = sound(name)
    with pytest.raises(ValueError, match=r"model.layers.1\.\S+ is missing"):
        load(tmp_path, {**config, "num_hidden_layers": 2}, tensors)


@pytest.mark.parametrize("method", [["gptq"], {}, 4, None, True])
def test_non_string_method_is_refused(sound, tmp_path, method):
    config, tensors = sound("gptq 4")
    config["quantization_config"]["quant_method"] = method
    with pytest.raises(ValueError, match=rf"{tmp_path}: .*quant_method .*known are: gptq"):
        load(tmp_path, config, tensors)


@pytest.mark.parametrize("name", ["gptq 4", "awq rows", "compressed nvfp4", "mxfp4", "int8"])
def test_a_size_that_a_format_does_not_have_is_refused_by_layer(sound, tmp_path, name):
    config, tensors = sound(name)
    config["intermediate_size"] = 200 if name != "compressed nvfp4" else 199
    with pytest.raises(
        ValueError, match=rf"{tmp_path}.*: model.layers.0.mlp.\w+_proj: .*(200|199)"
    ):
        load(tmp_path, config, tensors)


@pytest.mark.parametrize("name", UNSOUND)
def test_invalid_settings_are_refused(sound, tmp_path, name):
    recipe, settings, words = UNSOUND[name]
    config, tensors = sound(recipe)
    config["quantization_config"] |= settings
    with pytest.raises(ValueError, match=f"(?s)quantization_config.*{words}"):
        load(tmp_path, config, tensors)
