"""Quantized weights of every architecture, on load and from checkpoints, beside transformers with
the floats that their codes stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from packers import write, write_config
from packers.bitsandbytes import RECIPES as BITSANDBYTES
from packers.compressed import RECIPES as COMPRESSED
from packers.fp8 import RECIPES as FP8
from packers.fp8 import blocks as fp8_blocks
from packers.hqq import RECIPES as HQQ
from packers.integers import RECIPES as INTEGERS
from packers.modelopt import RECIPES as MODELOPT
from packers.torchao import RECIPES as TORCHAO
from safetensors.torch import load_file, save_file
from tiny import TINY, reference, save, without_towers
from transformers import PreTrainedModel

from exkv import Cache, Model
from exkv.layers.linear import Matrix

Tensors = dict[str, torch.Tensor]

IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(3))
RECIPES = {
    **{**COMPRESSED, **FP8, **INTEGERS, **HQQ, **MODELOPT, **TORCHAO},
    **{f"bnb {name}": recipe for name, recipe in BITSANDBYTES.items()},
}
#: Files with queries, keys and values in one matrix, head by head, and with gate and up in one.
FUSED = ("GPTNeoXForCausalLM", "GraniteMoeHybridForCausalLM")
#: Recipes beside those below, whose formats take rows in ways of their own.
BY_ROWS = (
    *("compressed 4 act-order", "compressed fp8 matrix", "compressed nvfp4", "compressed mxfp4"),
    *("compressed 5 hadamard", "gptq 3", "awq rows", "fp8 matrix", "fp8 blocks ue8m0", "hqq 2"),
    *("modelopt nvfp4", "modelopt fp8 rows", "torchao int4", "torchao fp8"),
    *("bnb nf4", "bnb nf4 nested", "bnb int8"),
)
#: The recipe transforms all inputs but those of ``lm_head``, which this one calls otherwise.
OTHER_HEAD = ("GPTNeoXForCausalLM", "compressed 5 hadamard")
#: Sizes with which matrices that are narrow in TINY have whole groups of inputs.
WIDER = {
    **{"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16, "laurel_rank": 32},
    **{"linear_head_dim": 32, "linear_num_heads": 2, "intermediate_size_mlp": 64},
    **{"shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64},
    **{"shared_intermediate_size": 64, "share_expert_dim": 64},
}
#: What stays in floats in units: tables (but one that is the head too), what weighs experts or
#: hidden states, and the matrices of latent attention's heads.
FLOATS = re.compile(
    r"embed_tokens(_per_layer)?|(mlp|shortcut)\.(gate|shared_expert_gate)|altup\.\w+"
    r"|self_attn\.(key|value)_up"
)
#: What tools quantize in a checkpoint: linear layers of the text's layers, without routers.
LINEAR = re.compile(
    r"(?!.*(vision|visual)).*\.layers\."
    r"(?!.*\.(gate|router|router\.\w+|shared_expert_gate|altup\.\w+)\.weight).*\.weight"
)


@pytest.fixture
def theirs(name) -> PreTrainedModel:
    """transformers' model of an architecture."""
    has = TINY[name]().get_text_config()
    wider = {key: size for key, size in WIDER.items() if getattr(has, key, None)}
    return reference(TINY[name](**wider))


@pytest.fixture
def floats(theirs, tmp_path) -> Path:
    """Its checkpoint."""
    return save(theirs, tmp_path / "floats")


def assert_same_logits(
    model: Model, theirs: PreTrainedModel, folder: Path, tensors: Tensors
) -> None:
    """As transformers' model of a folder whose tensors are replaced: of a prompt, a token alone and
    a few."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with torch.no_grad(), without_towers(theirs.config):
        plain = type(theirs).from_pretrained(folder, dtype=torch.float32).eval()
        expected = plain(IDS).logits
    cache = Cache(model, 64, 2)
    found = torch.cat([model.forward(part, cache) for part in IDS.split([36, 1, 3], 1)], 1)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def put_values(model: Model, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Overwrite a checkpoint's tensors by what the model's integers stand for; their names."""
    changed = set()
    for unit in model.units:
        for source in unit.spec.sources:
            for matrix in source.matrices:
                module = unit.module.get_submodule(matrix.layer)
                if module.format.names == ("weight",):
                    continue
                values = module.format.dequantize(dict(module.named_parameters()), torch.float32)
                name = next(each for each in source.stored if each.startswith(matrix.name))
                place = torch.arange(tensors[name].numel()).view(tensors[name].shape)
                place = place if matrix.rows is None else matrix.rows(place)
                assert place.shape == values.shape
                tensors[name].view(-1)[place.flatten()] = values.flatten()
                changed.add(name)
    return changed


@pytest.mark.sweep(12)
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", TINY)
def test_integers_on_load(weights, theirs, floats):
    model = on_cpu(floats, weights=weights)
    tied = model.units[-1].spec.tied
    for unit in model.units:
        for path, matrix in unit.module.named_modules():
            if isinstance(matrix, Matrix):
                meant = FLOATS.fullmatch(path) and not (tied and path == "embed_tokens")
                kept = bool(meant or matrix.size[1] % 32)
                assert (matrix.format.names == ("weight",)) == kept, path
    stored = load_file(floats / "model.safetensors")
    tensors = {key: value.clone() for key, value in stored.items()}
    for key in put_values(model, tensors):
        error = (tensors[key] - stored[key]).abs().max() / stored[key].abs().max()
        assert 0 < error < {"int8": 0.008, "int4": 0.2}[weights], key
    assert_same_logits(model, theirs, floats, tensors)


def packed(format: str, theirs: PreTrainedModel, floats: Path, folder: Path) -> Tensors:
    """Write a folder of weights in a recipe's format; the floats that they stand for."""
    tensors = load_file(floats / "model.safetensors")
    whole = 1 if format.startswith("fp8") else 32
    outputs = 8 if format.startswith("awq") else 1
    linear = {
        key.removesuffix(".weight")
        for key, tensor in tensors.items()
        if LINEAR.fullmatch(key) and tensor.dim() == 2
        if tensor.shape[0] % outputs == tensor.shape[1] % whole == 0
    }
    recipe = replace(RECIPES[format], takes=linear.__contains__)
    settings = {**theirs.config.to_dict(), "dtype": "float32"}
    plain = write(folder, settings, tensors, recipe)
    changed = [key for key, value in plain.items() if not torch.equal(value, tensors[key])]
    assert len(changed) >= 6
    return plain


@pytest.mark.sweep(18)
@pytest.mark.parametrize("format", ["compressed 4", "gptq 4", "fp8 blocks bf16"])
@pytest.mark.parametrize("name", TINY)
def test_checkpoints(name, format, theirs, floats, tmp_path):
    plain = packed(format, theirs, floats, tmp_path / "packed")
    assert_same_logits(on_cpu(tmp_path / "packed"), theirs, floats, plain)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "name, format", [pair for pair in product(FUSED, BY_ROWS) if pair != OTHER_HEAD]
)
def test_matrices_that_lie_in_one_are_taken_apart(name, format, theirs, floats, tmp_path):
    plain = packed(format, theirs, floats, tmp_path / "packed")
    assert_same_logits(on_cpu(tmp_path / "packed"), theirs, floats, plain)


@pytest.mark.parametrize("name", ["Mistral4ForCausalLM", "Qwen3VLMoeForConditionalGeneration"])
def test_experts_of_8_bit_floats_may_lie_in_one_tensor(name, theirs, floats, tmp_path):
    """As transformers 5 saves them."""
    plain = load_file(floats / "model.safetensors")
    stored = dict(plain)
    for key in [
        key for key in plain if key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        each = [fp8_blocks(expert, 16, 32) for expert in plain[key]]
        stored[key] = torch.stack([tensors["weight"] for tensors, _ in each])
        scales = torch.stack([tensors["weight_scale_inv"] for tensors, _ in each])
        stored[f"{key}_scale_inv"], plain[key] = scales, torch.stack([values for _, values in each])
    assert len(stored) >= len(plain) + 2
    (tmp_path / "packed").mkdir()
    save_file(stored, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    config = {**theirs.config.to_dict(), "dtype": "float32", "quantization_config": settings}
    write_config(tmp_path / "packed", config)
    assert_same_logits(on_cpu(tmp_path / "packed"), theirs, floats, plain)
