"""Checkpoints of every format with some bytes of a tensor changed: refused by name, or the logits
are finite. None answers NaN without a word."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packers import gguf, write
from safetensors.torch import load_file, save_file
from test_checkpoints import RECIPES
from tiny import llama, reference

from exkv import Model
from exkv.checkpoint import GGUFContents
from exkv.weights.gguf import FORMATS as GGUF

MUTATIONS = 16
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
IDS = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def models() -> dict[bool, torch.nn.Module]:
    """A tiny one, and for GGUF one of sizes that blocks of 256 divide."""
    return {large: reference(llama(**sizes(256 if large else 64))) for large in (False, True)}


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


@pytest.mark.parametrize("name", [*DTYPES, *RECIPES, *GGUF])
def test_a_mutated_file_is_refused_or_gives_finite_logits(models, tmp_path, name):
    path, file = write_format(tmp_path, name, models[name in GGUF])
    silent, refused = [], []
    for what in mutated(file, random.Random(name)):
        try:
            model = Model(path, dtype=DTYPES.get(name, torch.float32))
            model.load(devices=["cpu"])
            logits = model.forward(IDS)
        except ValueError as error:
            assert str(file.name) in str(error) or "layer" in str(error), error
            refused.append(str(error))
            continue
        if not logits.isfinite().all():
            silent.append(what)
    print(name, len(refused), [r[-150:] for r in refused[:2]])
    assert silent == []
