"""gpt-oss with its experts in MXFP4, against transformers, which dequantizes them."""

from __future__ import annotations

import json

import torch
from on_cpu import on_cpu
from packers.mxfp4 import pack
from safetensors.torch import load_file, save_file
from tiny import TINY, reference, save
from transformers import AutoModelForCausalLM, Mxfp4Config

from exkv import Cache


@torch.no_grad()
def test_experts_in_mxfp4_give_transformers_logits(tmp_path):
    folder = save(reference(TINY["GptOssForCausalLM"]()), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        packed, _ = pack(tensors.pop(name).mT)
        tensors |= {f"{name}_{part}": values.contiguous() for part, values in packed.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))

    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    ours = on_cpu(folder, dtype=torch.float32)
    experts = ours.units[1].module.mlp.experts[0]
    assert {experts.w1.format.name, experts.w2.format.name} == {"mxfp4"}
    ids = torch.randint(3, 320, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    assert (ours.forward(ids, Cache(ours, 64)) - expected).abs().max() < 1e-4 * expected.abs().max()
