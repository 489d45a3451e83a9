"""Write a folder of float weights as a GGUF file of the same floats, which ``exkv quantize``
quantizes.

This is the inverse of ``exkv.checkpoint.gguf``: names, row order and metadata. The file is read
back, and the folder is refused unless config, positions, tensors and tokenizer are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exkv.checkpoint import Checkpoint, GGUFContents, ModelConfig
from exkv.checkpoint.families import FAMILIES
from exkv.checkpoint.files import read_json_object
from exkv.checkpoint.gguf.metadata import KEYS, SCALING
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.gguf.tensors import ROPE_TENSORS, GGUFCheckpoint
from exkv.checkpoint.gguf.writing import write_empty
from exkv.checkpoint.rope_config import RopeParameters
from exkv.layers.rope import RotaryTables, rotary_frequencies
from exkv.text.gguf_words import check_same, tokenizer_metadata

#: Types of floats, and llama.cpp's numbers of files of them.
_TYPES = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 32)}
_CONVERT = (
    "Convert the folder by llama.cpp's convert_hf_to_gguf.py --outtype bf16, and give the file "
    "that it writes"
)
#: Architectures of which files are written, as llama.cpp's own converter writes them.
WRITTEN = (
    *("AfmoeForCausalLM", "ArceeForCausalLM", "CohereForCausalLM", "Ernie4_5ForCausalLM"),
    *("Exaone4ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("Glm4ForCausalLM", "GraniteForCausalLM", "Jais2ForCausalLM", "LlamaForCausalLM"),
    *("MistralForCausalLM", "MixtralForCausalLM", "NemotronForCausalLM", "Olmo2ForCausalLM"),
    *("OlmoeForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "SeedOssForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM"),
)
#: Those whose files are another's, if they have nothing that its config can't say.
_WRITTEN_AS = {"MistralForCausalLM": "LlamaForCausalLM"}
#: Fields of a config that may differ from those of the file: positions are compared by themselves.
_APART = {
    *("architecture", "model_type"),
    *("path", "dtype", "quantization", "mtp", "rope_theta", "rope_scaling", "local_rope"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


def write_gguf_floats(config: ModelConfig, checkpoint: Checkpoint, file: Path) -> None:
    """Write the file.

    Args:
        config: of the folder, of float weights.
        file: ends in ``.gguf``.

    Raises:
        ValueError: exkv can't represent the model or its tokenizer in a GGUF file.
    """
    assert config.path is not None
    architecture = _WRITTEN_AS.get(config.architecture, config.architecture)
    gguf = FAMILIES[architecture].gguf
    if gguf is None or config.architecture not in WRITTEN:
        raise ValueError(f"{config.path}: exkv writes no GGUF of {config.architecture}. {_CONVERT}")
    tensors, parts = _tensors(config, checkpoint, gguf)
    extra = {} if (factors := _factors(config)) is None else {ROPE_TENSORS[0]: factors}
    tensors |= {name: ("F32", tuple(each.shape)) for name, each in extra.items()}
    most = max(tensors.values(), key=lambda each: torch.Size(each[1]).numel())[0]
    words = tokenizer_metadata(config.path, config.vocab_size)
    for stated in (False, True):  # which layers slide is stated only where it must be
        metadata = {
            "general.architecture": gguf.architecture,
            "general.name": config.path.name,
            "general.file_type": next(n for name, n in _TYPES.values() if name == most),
            **_metadata(config, gguf, stated),
            **words,
        }
        write_empty(file, metadata, tensors)
        _write(file, extra)
        if not (unlike := _unlike(config, file)):
            break
    else:
        raise ValueError(f"{config.path}: {unlike} in a GGUF file's metadata. {_CONVERT}")
    _fill(checkpoint, file, parts, gguf)
    _check_tensors(checkpoint, file, parts, gguf)
    check_same(config.path, file)


def _tensors(
    config: ModelConfig, checkpoint: Checkpoint, gguf: GGUFFamily
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], set[str]]:
    """The file's tensors, and the names of those of the folder in them."""
    there, taken = set(checkpoint.names()), set[str]()
    if config.tie_word_embeddings:
        there.discard("lm_head.weight")
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in gguf.file_names(config.num_hidden_layers):
        own = [*gguf.checkpoint_names(name)]
        first = [each.format(0) for each in own]
        if not own or not there.issuperset(first) or not taken.isdisjoint(first):
            continue
        shapes = [checkpoint.info(each).shape for each in first]
        shape: tuple[int, ...] = (sum(each[0] for each in shapes), *shapes[0][1:])
        every = set(first)
        if "{}" in own[0]:
            count = next(n for n in range(1, len(there) + 1) if own[0].format(n) not in there)
            every = {each.format(n) for each in own for n in range(count)}
            shape = (count, *shape)
        dtype = checkpoint.info(first[0]).dtype
        plain = len(shapes[0]) < 2 or "gate_inp" in name  # as llama.cpp has norms and routers
        found[name] = ("F32" if plain or dtype not in _TYPES else _TYPES[dtype][0], shape)
        taken |= every
    left = sorted(each for each in there - taken if not each.endswith("inv_freq"))
    if left:
        raise ValueError(
            f"{config.path}: exkv doesn't know what {left[0]} is called in a GGUF file "
            f"({len(left)} tensors have no name there). {_CONVERT}"
        )
    return found, taken


def _metadata(config: ModelConfig, gguf: GGUFFamily, states_windows: bool) -> dict[str, Any]:
    assert config.path is not None
    values = read_json_object(config.path / "config.json")
    found: dict[str, Any] = {"vocab_size": config.vocab_size}
    for own, key in {**KEYS, **gguf.metadata}.items():
        value = values.get(key)
        for source in (config, config.specific):
            value = getattr(source, key, None) if value is None else value
        if isinstance(value, int | float | str):
            found[own] = value
    found["attention.value_length"] = config.head_dim
    found["rope.dimension_count"] = config.rotary_dim
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type in ("linear", "yarn"):
        found["rope.scaling.type"] = scaling.rope_type
        stated = {
            own: getattr(scaling, key) for own, key in SCALING.items() if hasattr(scaling, key)
        }
        found |= {f"rope.scaling.{own}": v for own, v in stated.items() if v is not None}
    if config.sliding_window is not None:
        found["attention.sliding_window"] = config.sliding_window
        if states_windows:
            slides = [kind == "sliding_attention" for kind in config.layer_types]
            found["attention.sliding_window_pattern"] = slides
    if config.local_rope is not None and "rope.freq_base_swa" in gguf.metadata:
        found["rope.freq_base_swa"] = config.local_rope.rope_theta
    floats = ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor", "expert_weights_scale")
    found |= {own: float(found[own]) for own in floats if own in found}
    return {f"{gguf.architecture}.{own}": value for own, value in found.items()}


def _factors(config: ModelConfig) -> torch.Tensor | None:
    """Divisors of the rotary frequencies by Llama 3.1's rule, a tensor in GGUF files."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type not in ("llama3", "factors"):
        return None
    plain = RopeParameters(rope_theta=config.rope_theta)
    (base, _), (scaled, _) = (
        rotary_frequencies(each, config.rotary_dim) for each in (plain, config.rope)
    )
    return base / scaled


def _unlike(config: ModelConfig, file: Path) -> str:
    """How the file's config differs from the folder's, for an error; empty if it doesn't."""
    try:
        found = ModelConfig.from_pretrained(file)
    except ValueError as error:
        return f"its config can't be represented ({error})"
    architecture = _WRITTEN_AS.get(config.architecture, config.architecture)
    if found.architecture != architecture:
        return f"{config.architecture} would be {found.architecture}"
    for each in dataclasses.fields(ModelConfig):
        pair = getattr(config, each.name), getattr(found, each.name)
        if each.name not in _APART and pair[0] != pair[1]:
            return f"{each.name} {pair[0]} of its config would be {pair[1]}"
    for mine, other in zip(
        *(RotaryTables(c).tables.values() for c in (config, found)), strict=True
    ):
        pairs = mine.inverse_frequencies, other.inverse_frequencies
        if mine.magnitude != other.magnitude or not torch.allclose(*pairs, rtol=1e-6):
            return "its rotary positions would be others"
    if not {*config.eos_token_id} <= {*found.eos_token_id}:
        return f"eos_token_id {config.eos_token_id} of its config would be {found.eos_token_id}"
    return ""


def _write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    placed = GGUFContents(file).tensors
    with file.open("r+b") as opened:
        for name, tensor in tensors.items():
            opened.seek(placed[name].tensor.offset)
            opened.write(tensor.contiguous().numpy().tobytes())


def _fill(source: Checkpoint, file: Path, names: set[str], gguf: GGUFFamily) -> None:
    """Write each tensor to its place."""
    places = GGUFCheckpoint(file)
    for name in sorted(names):
        tensor, (whole, order) = source.tensor(name), places.place(name)
        if gguf.restoring(name) is not None:  # a norm
            tensor = tensor.float() + gguf.norm_offset
        row = whole.nbytes // whole.shape[0]
        stored = tensor.to(whole.dtype).contiguous().view(-1).view(torch.uint8).view(-1, row)
        shape = (whole.shape[0], row)
        rows = np.memmap(file, dtype=np.uint8, mode="r+", offset=whole.offset, shape=shape)
        rows[slice(None) if order is None else order.numpy()] = stored.numpy()
        source.unmap()


def _check_tensors(source: Checkpoint, file: Path, names: set[str], gguf: GGUFFamily) -> None:
    """ValueError unless the file has the folder's tensors."""
    with GGUFCheckpoint(file) as written:
        for name in sorted(names):
            expected, found = source.tensor(name).float(), written.tensor(name).float()
            lost = 0.0 if gguf.restoring(name) is None else 1e-6  # of a norm's weights plus 1
            if not torch.allclose(found.view(expected.shape), expected, rtol=0.0, atol=lost):
                raise ValueError(
                    f"{source.folder}: {name} would differ in exkv's GGUF file. {_CONVERT}"
                )
            source.unmap()
            written.unmap()
