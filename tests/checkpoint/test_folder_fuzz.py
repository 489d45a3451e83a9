"""Folders with one damaged file, at random and as in past bugs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import folder_fuzz
import pytest
import sweep
from apart import run_script
from tiny import llama, mixtral, reference, save, save_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from exkv import Model
from exkv import Tokenizer as OurTokenizer
from exkv.checkpoint import CheckpointError

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
#: Folders of each seed; a sweep has more of both.
CASES = sweep.cases(24, 40)
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"


def write_tokenizer_json(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the key is in the kitchen"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(100)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT}
    settings["added_tokens_decoder"] = {"0": {"content": "<s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<s>"}))
    (folder / "added_tokens.json").write_text(json.dumps({"</s>": 1}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """One with a single file of weights and a tokenizer.json, one with shards and a
    tokenizer.model."""
    root = tmp_path_factory.mktemp("whole")
    single = save(reference(llama(**SIZES)), root / "single")
    write_tokenizer_json(single)
    config = mixtral(**SIZES, num_local_experts=2)
    sharded = save(reference(config), root / "sharded", max_shard_size="60KB")
    save_tokenizer(sharded)
    (sharded / "chat_template.jinja").write_text(CHAT)
    (sharded / "added_tokens.json").write_text(json.dumps({"<|end|>": 319}))
    return [single, sharded]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_folder_with_a_spoilt_file_works_or_is_refused_by_name(folders, seed):
    done = run_script(folder_fuzz.__file__, CASES, seed, *folders, OMP_NUM_THREADS="1")
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"cases": CASES, "findings": {}}


SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
SMALL += ["special_tokens_map.json", "added_tokens.json"]


@pytest.mark.parametrize("kind", ["fifo", "folder"])
@pytest.mark.parametrize("name", SMALL)
def test_non_files_are_reported_as_such(folders, tmp_path, name, kind):
    for file in folders[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name) if kind == "fifo" else (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="is not a regular file") as caught:
        OurTokenizer(tmp_path)
        Model(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def change(folder: Path, name: str, edit) -> None:
    value = json.loads((folder / name).read_text())
    edit(value)
    (folder / name).write_text(json.dumps(value))


def copy(source: Path, target: Path) -> Path:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        # It panics in the library, hangs in it, fails when a text is encoded.
        (
            "tokenizer.json",
            lambda v: v["post_processor"]["single"][0]["SpecialToken"].update(id="\x00"),
            "cannot encode a text",
        ),
        ("tokenizer.json", lambda v: v["model"]["vocab"].update({"$": 2**31}), "the id 2147483648"),
        ("tokenizer.json", lambda v: v.update(decoder="x" * 5000), "cannot be read as a tokenizer"),
        ("added_tokens.json", lambda v: v.update({"x": float("inf")}), "inf is not a token id"),
        ("added_tokens.json", lambda v: v.update({"": 7}), "content is ''; it must be a text"),
        (
            "tokenizer_config.json",
            lambda v: v["added_tokens_decoder"].update({"5": {"content": 5}}),
            "content is 5; it must be a text",
        ),
        ("tokenizer_config.json", lambda v: v.update(bos_token="\ud800"), "lone surrogate"),
        ("tokenizer_config.json", lambda v: v.update(chat_template=[7]), "chat_template must be"),
    ],
)
def test_tokenizer_files_that_crash_libraries_are_refused(folders, tmp_path, name, edit, message):
    folder = copy(folders[0], tmp_path)
    change(folder, name, edit)
    with pytest.raises(ValueError, match=message) as caught:
        OurTokenizer(folder)
    assert str(folder / name) in str(caught.value)
    assert len(str(caught.value)) < 700 + len(str(folder))


def test_a_sentencepiece_model_with_broken_utf8_is_refused(folders, tmp_path):
    folder = copy(folders[1], tmp_path)
    file = folder / "tokenizer.model"
    file.write_bytes(file.read_bytes().replace(b"kitchen", b"kit\xff\xfeen"))
    with pytest.raises(ValueError, match="tokenizer.model is not"):
        OurTokenizer(folder)


def test_deep_json_and_a_shard_of_5000_characters_are_refused(folders, tmp_path):
    folder = copy(folders[1], tmp_path)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] = dict.fromkeys(value["weight_map"], "m" * 5000 + ".safetensors")
    index.write_text(json.dumps(value))
    model = Model(folder)
    with pytest.raises(CheckpointError, match="not a plain name") as caught:
        model.load(devices=["cpu"])
    assert len(str(caught.value)) < 700 + len(str(folder))
    index.write_text('{"weight_map":' * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        model.load(devices=["cpu"])
