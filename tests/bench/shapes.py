"""Random Llamas to measure: sizes by name, and a checkpoint of one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama's sizes; head_dim is 64 as in TinyLlama and Llama 3.2 1B."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    tied: bool = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, as Hugging Face's checkpoints have them."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (self.intermediate, hidden),
            "mlp.up_proj": (self.intermediate, hidden),
            "mlp.down_proj": (hidden, self.intermediate),
        }
        head = {} if self.tied else {"lm_head.weight": (self.vocab, hidden)}
        return {
            "model.embed_tokens.weight": (self.vocab, hidden),
            **{
                f"model.layers.{index}.{name}.weight": shape
                for index in range(self.layers)
                for name, shape in layer.items()
            },
            "model.norm.weight": (hidden,),
            **head,
        }

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.tensors().values())

    @property
    def read_parameters(self) -> int:
        """Parameters that a decode step reads: all but an embedding table that is no head."""
        return self.parameters - (0 if self.tied else self.vocab * self.hidden)

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": str(dtype).removeprefix("torch."),
        }


SHAPES = {
    "tiny": Shape(vocab=512, hidden=64, intermediate=192, layers=2, heads=2, kv_heads=1),
    "25M": Shape(vocab=16384, hidden=384, intermediate=1024, layers=8, heads=6, kv_heads=2),
    # SmolLM2-135M's own sizes.
    "135M": Shape(
        vocab=49152, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, tied=True
    ),
    "150M": Shape(vocab=32000, hidden=768, intermediate=2048, layers=16, heads=12, kv_heads=4),
    # TinyLlama's own sizes.
    "1.1B": Shape(vocab=32000, hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4),
}


def write_checkpoint(folder: Path, shape: Shape, dtype: torch.dtype, seed: int = 0) -> Path:
    """A random model whose activations neither fade nor grow, so that greedy tokens differ."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.tensors().items():
        tensor = torch.ones(size, dtype=dtype)
        if len(size) == 2:
            spread = 1.0 if "embed" in name else size[1] ** -0.5
            tensor.normal_(0, spread, generator=generator)
        tensors[name] = tensor
    return save_checkpoint(folder, shape.config(dtype), tensors)


def save_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """The two files of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
