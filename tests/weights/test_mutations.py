"""Checkpoints of every format with a few bytes of a tensor changed: refused by the tensor's name,
or the logits are finite; never a silent NaN."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from packers import gguf, write
from safetensors.torch import load_file, save_file
from test_checkpoints import RECIPES
from tiny import llama, reference, save

from exkv import Cache
from exkv.checkpoint import GGUFContents
from exkv.weights.gguf import FORMATS as GGUF

MUTATIONS = 8
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
IDS = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def models() -> dict[bool, torch.nn.Module]:
    """A tiny one, and for GGUF one of sizes that blocks of 256 divide."""
    return {large: reference(llama(**sizes(256 if large else 128))) for large in (False, True)}


def sizes(width: int) -> dict[str, int]:
    return {
        **{"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4},
        "vocab_size": 64,
    }


def write_format(folder: Path, name: str, theirs: torch.nn.Module) -> tuple[Path, Path]:
    """What to load, and its file of weights."""
    tensors = {key: value.clone() for key, value in theirs.state_dict().items()}
    if name in GGUF:
        theirs.config.architectures = ["LlamaForCausalLM"]
        file = folder / "model.gguf"
        gguf.write_gguf(file, theirs.config, tensors, gguf.in_types(name))
        return file, file
    file, config = folder / "model.safetensors", theirs.config.to_dict()
    if name in DTYPES:
        theirs.config.save_pretrained(folder)
        save_file({key: value.to(DTYPES[name]) for key, value in tensors.items()}, file)
    else:
        write(folder, {**config, "dtype": "float32"}, tensors, RECIPES[name])
    return folder, file


def spans(file: Path) -> list[tuple[str, int, int]]:
    """Tensor, its first byte in the file and its bytes."""
    if file.suffix == ".gguf":
        placed = GGUFContents(file).tensors.values()
        return [(each.tensor.name, each.tensor.offset, each.tensor.nbytes) for each in placed]
    end, found = file.stat().st_size, []
    sizes = {name: tensor.nbytes for name, tensor in load_file(file).items()}
    text = file.read_bytes()[: -sum(sizes.values())].decode("utf-8", "replace")
    first = end - sum(sizes.values())
    for name, size in sizes.items():
        offset = int(text.split(f'"{name}":')[1].split('"data_offsets":[')[1].split(",")[0])
        found.append((name, first + offset, size))
    return found


def mutated(file: Path, rng: random.Random) -> Iterator[str]:
    """Changes bytes of one tensor after the other, and changes them back."""
    places = [span for span in spans(file) if span[2]]
    sound = file.read_bytes()
    for _ in range(MUTATIONS):
        name, first, size = rng.choice(places)
        changed = bytearray(sound)
        place = first + rng.randrange(size) // 2 * 2
        for byte in range(place, min(place + rng.choice((1, 2, 4)), first + size)):
            changed[byte] = rng.choice((0x7C, 0x7F, 0xFF, 0xFE, rng.randrange(256)))
        file.write_bytes(changed)
        yield f"{name}: byte {place - first}"
    file.write_bytes(sound)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", [*DTYPES, *RECIPES, *GGUF])
def test_a_mutated_file_is_refused_or_gives_finite_logits(models, tmp_path, name):
    path, file = write_format(tmp_path, name, models[name in GGUF])
    silent = []
    for what in mutated(file, random.Random(name)):
        try:
            model = on_cpu(path, dtype=DTYPES.get(name, torch.float32))
            logits = model.forward(IDS)
        except (ValueError, FloatingPointError) as error:
            assert str(path) in str(error) and re.search(r"model\.|lm_head", str(error)), error
            continue
        if not logits.isfinite().all():
            silent.append(what)
    assert silent == []


@pytest.mark.parametrize("unit", ["model.layers.1", "lm_head"])
def test_overflowing_weights_are_reported_at_the_first_call(tmp_path, unit):
    """The weights are finite, so that loading accepts them."""
    theirs = reference(llama(**{**sizes(64), "num_hidden_layers": 3}))
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.startswith(unit) and weight.dim() == 2:
                weight.fill_(1e38)
    save(theirs, tmp_path)
    model = on_cpu(tmp_path)
    cache = Cache(model, 32)
    for _ in range(2):  # and at the second
        with pytest.raises(FloatingPointError, match=rf"{tmp_path}: .* from {unit} on"):
            model.forward(IDS[:, :4], cache)
        assert cache.seq_lens == [0]
