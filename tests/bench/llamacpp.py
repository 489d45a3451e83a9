"""llama.cpp as a competitor, where ``pip install llama-cpp-python gguf`` was done (from source;
nothing else needs either): a checkpoint of ours as a GGUF file, and a loop on its C interface.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; tensors and keys have those
names that ``gguf`` has for the architecture "llama".
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from .common import Shape

#: How keys and values are stored there.
KV_TYPES = ("f16", "q8_0")
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def is_installed() -> bool:
    return all(map(importlib.util.find_spec, ("llama_cpp", "gguf")))


def write_gguf(folder: Path, shape: Shape) -> Path:
    """The checkpoint in this folder once more, matrices in bf16 and norms in float32."""
    import gguf

    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensor = _turned(name, tensor, shape)
        if tensor.dim() == 1:
            writer.add_tensor(_renamed(name), tensor.float().numpy())
        else:
            bits = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(_renamed(name), bits, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _renamed(name: str) -> str:
    ends = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in ends:
        return ends[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _turned(name: str, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Rotary pairs are neighbours there, and half a head apart here: rows of the matrices of
    queries and keys change places."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    halves = tensor.unflatten(0, (-1, 2, shape.head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


class LlamaCpp:
    """One sequence with flash attention, keys and values as f16 or q8_0; an ``Engine`` of
    ``decode.py``."""

    def __init__(self, file: Path, context: int, threads: int, kv_type: str) -> None:
        from llama_cpp import llama_cpp

        self.api = llama_cpp
        with _quiet():
            llama_cpp.llama_backend_init()
            self.model = llama_cpp.llama_model_load_from_file(
                str(file).encode(), llama_cpp.llama_model_default_params()
            )
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = context
            params.n_threads = params.n_threads_batch = threads
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            kind = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}[kv_type]
            params.type_k = params.type_v = kind
            self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context of {context} tokens in {kv_type}")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def prefill(self, ids: torch.Tensor) -> None:
        self.rewind(0)
        for part in ids[0].split(512):
            self._decode(part.tolist())

    def rewind(self, length: int) -> None:
        memory = self.api.llama_get_memory(self.context)
        self.api.llama_memory_seq_rm(memory, 0, length, -1)

    def step(self, token: int) -> int:
        self._decode([token])
        logits = self.api.llama_get_logits_ith(self.context, -1)
        array = torch.frombuffer(
            (self.api.ctypes.c_float * self.vocab_size).from_address(
                self.api.ctypes.addressof(logits.contents)
            ),
            dtype=torch.float32,
        )
        return int(array.argmax())

    def _decode(self, tokens: list[int]) -> None:
        array = (self.api.llama_token * len(tokens))(*tokens)
        status = self.api.llama_decode(
            self.context, self.api.llama_batch_get_one(array, len(tokens))
        )
        if status:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens failed with {status}")

    def close(self) -> None:
        with _quiet():
            self.api.llama_free(self.context)
            self.api.llama_model_free(self.model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what a C library prints."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
