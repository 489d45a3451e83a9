"""llama.cpp as a competitor, where ``pip install llama-cpp-python gguf`` was done (from source;
nothing else needs either): a checkpoint of ours as a GGUF file, and a loop on its C interface."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from exkv.checkpoint.gguf.contents import GGUFContents

from .shapes import Shape

#: What :func:`write_gguf` adds to a checkpoint's folder.
FILE = "model.gguf"
#: The first token that is a word, in a file with words.
FIRST_WORD = 260
#: How keys and values are stored there.
KV_TYPES = ("f16", "q8_0")
#: Tokens of a prompt that are run at once.
PREFILL = 512
#: What C holds pointers to, and Python must not throw away.
_CALLED: list[Any] = []


def is_installed() -> bool:
    return all(map(importlib.util.find_spec, ("llama_cpp", "gguf")))


def version() -> str | None:
    """The version of llama-cpp-python; None if it isn't installed."""
    return importlib.metadata.version("llama_cpp_python") if is_installed() else None


def write_gguf(folder: Path, shape: Shape, words: bool = False, kind: str = "BF16") -> Path:
    """The checkpoint in this folder once more, matrices in this type of ggml's and norms in
    float32; with ``words``, every token has a text, for servers."""
    from packers.gguf import in_types, write_gguf
    from transformers import LlamaConfig

    def add_tokenizer(writer: Any) -> None:
        writer.add_vocab_size(shape.vocab)
        if words:
            _add_words(writer, shape.vocab)
        else:
            writer.add_tokenizer_model("none")

    file, tensors = folder / FILE, load_file(folder / "model.safetensors")
    config = LlamaConfig.from_pretrained(folder)
    write_gguf(file, config, tensors, in_types(kind), add_tokenizer)
    return file


def _add_words(writer: Any, size: int) -> None:
    """Add control tokens, single bytes as GPT-2 spells them, and words that occur in no text."""
    import gguf

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    spelt = {byte: chr(byte) for byte in shown}
    spelt |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokens = ["<unk>", "<s>", "</s>", *(spelt[byte] for byte in range(256)), "ab"]
    tokens += [f"\u0120w{number}" for number in range(FIRST_WORD, size)]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (size - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def quantize(
    folder: Path,
    kind: str,
    source: str = FILE,
    *,
    ends: str | None = None,
    squares: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Quantize a GGUF file of the folder with llama.cpp, to ``Q4_K_M`` for example.

    Args:
        ends: the type of table and head, where it is another.
        squares: mean squares of the inputs, fp32 (in,), by the tensors' names: its imatrix.
    """
    api, made = _silenced(), folder / f"model-{kind}.gguf"
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if ends is not None:
        params.output_tensor_type = params.token_embedding_type = getattr(api, f"GGML_TYPE_{ends}")
    entry, ctypes = api.llama_model_imatrix_data, api.ctypes
    data = [(n.encode(), (ctypes.c_float * len(x))(*x.tolist())) for n, x in squares.items()]
    pointer = ctypes.POINTER(ctypes.c_float)
    entries = [entry(name, ctypes.cast(x, pointer), len(x)) for name, x in data]
    if entries:  # behind them one without a name
        params.imatrix = (entry * (len(entries) + 1))(*entries, entry(None, None, 0))
    names = (str(path).encode() for path in (folder / source, made))
    status = api.llama_model_quantize(*names, ctypes.byref(params))
    if status:
        raise RuntimeError(f"llama_model_quantize to {kind} failed with {status}")
    return made


def bytes_read(file: Path) -> int:
    """Bytes of weights that a step reads: all but an embedding table that is not the head."""
    tensors = {name: placed.tensor.nbytes for name, placed in GGUFContents(file).tensors.items()}
    table = tensors.get("token_embd.weight", 0) if "output.weight" in tensors else 0
    return sum(tensors.values()) - table


class Context:
    """A model and room for sequences, with flash attention. The weights are pages of the file,
    which contexts of one process share.

    Args:
        kv_type: how keys and values are stored, of ``KV_TYPES``.
        unified: one cache for all sequences, whose attention goes over the cells of all.
        batch: tokens of one call.
    """

    def __init__(
        self,
        file: Path,
        *,
        rows: int,
        room: int,
        threads: int,
        kv_type: str = "f16",
        unified: bool = False,
        batch: int = PREFILL,
    ) -> None:
        self.api = api = _silenced()
        self.model = api.llama_model_load_from_file(
            str(file).encode(), api.llama_model_default_params()
        )
        params = api.llama_context_default_params()
        params.n_ctx = rows * (-(-room // 256) * 256)
        params.n_seq_max, params.kv_unified = rows, unified
        params.n_batch, params.n_ubatch = max(batch, rows), min(batch, PREFILL)
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        kind = {"f16": api.GGML_TYPE_F16, "q8_0": api.GGML_TYPE_Q8_0}[kv_type]
        params.type_k = params.type_v = kind
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context of {rows} x {room} tokens in {kv_type}")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(max(batch, rows), 0, 1)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def call(self, entries: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Run (row, place, token, whether its logits are wanted); the likeliest token after each
        whose logits are wanted, with its row."""
        batch, batch.n_tokens = self.batch, len(entries)
        for index, (row, place, token, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, place
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = wanted
        status = self.api.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(entries)} tokens failed with {status}")
        rows = [row for row, _, _, wanted in entries if wanted]
        if not rows:
            self.api.llama_synchronize(self.context)
            return []
        logits = self.api.llama_get_logits(self.context).contents
        size, address = len(rows) * self.vocab_size, self.api.ctypes.addressof(logits)
        array = (self.api.ctypes.c_float * size).from_address(address)
        best = torch.frombuffer(array, dtype=torch.float32).view(len(rows), -1).argmax(-1)
        return list(zip(rows, best.tolist(), strict=True))

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


class LlamaCpp(Context):
    """An ``Engine`` of ``decode.py``. Each sequence has a stream of its own in the cache, which is
    what llama.cpp's header advises where sequences share no long prefix."""

    def __init__(self, file: Path, room: int, rows: int, threads: int, kv_type: str) -> None:
        super().__init__(file, rows=rows, room=room, threads=threads, kv_type=kv_type)
        self.rows, self.length = rows, 0

    def prefill(self, ids: Tensor) -> None:
        self.rewind(0)
        for part in ids[0].split(PREFILL):
            last = len(part) - 1
            self.call([(0, self.length + i, t, i == last) for i, t in enumerate(part.tolist())])
            self.length += len(part)
        for row in range(1, self.rows):  # a copy, between streams
            self.api.llama_memory_seq_cp(self.memory, 0, row, -1, -1)

    def rewind(self, length: int) -> None:
        for row in range(self.rows):
            self.api.llama_memory_seq_rm(self.memory, row, length, -1)
        self.length = length

    def step(self, tokens: list[int]) -> list[int]:
        found = self.call([(row, self.length, token, True) for row, token in enumerate(tokens)])
        self.length += 1
        return [token for _, token in found]


class Slots(Context):
    """Jobs of one context, scheduled as llama.cpp's server does it: every call of the library has
    the newest token of each slot that generates, and of the prompts in their order as much as a
    batch has room for. A beginning that prompts share is run once, and copied by
    ``llama_memory_seq_cp``, which in a ``unified`` cache copies nothing."""

    def __init__(self, file: Path, *, slots: int, batch: int, **options: Any) -> None:
        super().__init__(file, rows=slots, batch=batch, **options)
        self._most = batch

    def run(
        self, prompts: Sequence[Sequence[int]], shared: int, new: int, told: Callable[[int], Any]
    ) -> list[list[int]]:
        """The greedy tokens of each prompt, of which there are no more than slots.

        Args:
            shared: tokens with which all of them begin.
            told: called with a prompt's number for each token that it gets.
        """
        self.api.llama_memory_clear(self.memory, False)
        for start in range(0, shared, self._most):
            end = min(start + self._most, shared)
            self.call([(0, i, prompts[0][i], False) for i in range(start, end)])
        for slot in range(1, len(prompts) if shared else 0):
            self.api.llama_memory_seq_cp(self.memory, 0, slot, -1, -1)
        done, found = [shared] * len(prompts), [list[int]() for _ in prompts]
        while any(len(tokens) < new for tokens in found):
            for slot, token in self.call(self._next(prompts, done, found, new)):
                found[slot].append(token)
                told(slot)
        return found

    def _next(
        self,
        prompts: Sequence[Sequence[int]],
        done: list[int],
        found: Sequence[Sequence[int]],
        new: int,
    ) -> list[tuple[int, int, int, bool]]:
        """Of the next call: slot, position, token, and whether its logits are wanted."""
        entries = []
        for slot, tokens in enumerate(found):
            if tokens and len(tokens) < new:
                entries.append((slot, done[slot], tokens[-1], True))
                done[slot] += 1
        for slot, prompt in enumerate(prompts):
            end = min(len(prompt), done[slot] + self._most - len(entries))
            for at in range(done[slot], end):
                entries.append((slot, at, prompt[at], at == len(prompt) - 1))
            done[slot] = max(done[slot], end)
        return entries


@cache
def _silenced() -> Any:
    """The library, with its log switched off."""
    from llama_cpp import llama_cpp

    silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silence, None)
    llama_cpp.llama_backend_init()
    _CALLED.append(silence)
    return llama_cpp
