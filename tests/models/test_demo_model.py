"""The demo model in examples/demo-model, its toy world, and the promise that it answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jinja2
import pytest
import sentencepiece
import torch
import toy_world
import train_demo
from safetensors import safe_open
from transformers import LlamaForCausalLM

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo-model"


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())


@pytest.fixture(scope="module")
def tokenizer_config() -> dict:
    return json.loads((FOLDER / "tokenizer_config.json").read_text())


@pytest.fixture(scope="module")
def sp() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "tokenizer.model"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype="auto").eval()


# The model


def test_answers_heldout_questions_up_to_1000_tokens_back(model) -> None:
    verdicts = train_demo.evaluate(FOLDER, n=30, seed=7, model=model)
    assert {v.distance * 5 // 1001 for v in verdicts} == {0, 1, 2, 3, 4}
    assert train_demo.share(verdicts) >= 0.95, train_demo.table(verdicts)


@torch.no_grad()
def test_generates_the_answer_token_by_token(model, sp) -> None:
    messages = [
        {"role": "user", "content": "Anna put the red key in the kitchen. Tom is in the garden."},
        {"role": "assistant", "content": "Okay."},
        {"role": "user", "content": "Where is the key?"},
    ]
    ids = torch.tensor([sp.encode(train_demo.render(messages, generation_prompt=True))])
    out = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert sp.decode(out[0, ids.shape[1] :].tolist()) == "The key is in the kitchen.<|end|>"


def test_teacher_forcing_judges_as_generation_does(model, sp) -> None:
    items = toy_world.heldout(11, 6, max_distance=200)
    chats = [(i.messages, i.answer) for i in items] + [(items[0].messages, "The key is red.")]
    judged = train_demo.answers_right(model, sp, chats)
    for (messages, answer), right in zip(chats, judged, strict=True):
        ids = torch.tensor([sp.encode(train_demo.render(messages, generation_prompt=True))])
        out = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        assert right == (sp.decode(out.tolist()) == answer + "<|end|>")


# The files


def test_weights_are_small_and_match_the_config(config) -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 12 * 2**20
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert {file.get_tensor(name).dtype for name in shapes} == {torch.bfloat16}
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    assert len(layers) == config["num_hidden_layers"]


def test_config_suits_the_caches_and_a_split_over_three_devices(config) -> None:
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] >= 4
    assert config["head_dim"] % 32 == 0
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] == 2048


def test_special_tokens_agree_between_the_files(config, tokenizer_config, sp) -> None:
    added = tokenizer_config["added_tokens_decoder"]
    for i, token in enumerate(train_demo.SPECIAL):
        assert added[str(i)] == added[str(i)] | {"content": token, "special": True}
        assert sp.id_to_piece(i) == token
    assert tokenizer_config["bos_token"] == sp.id_to_piece(config["bos_token_id"])
    assert tokenizer_config["eos_token"] == sp.id_to_piece(config["eos_token_id"])
    assert sp.vocab_size() == config["vocab_size"]


def test_template_marks_are_single_tokens_and_text_survives(tokenizer_config, sp) -> None:
    template = jinja2.Environment().from_string(tokenizer_config["chat_template"])
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "  Hello!\nZoë has 3 kites. "},
        {"role": "assistant", "content": "Okay."},
    ]
    text = template.render(bos_token="<s>", messages=messages, add_generation_prompt=True)
    ids = sp.encode(text)
    assert text.startswith("<s><|system|> You are") and text.endswith("<|end|><|assistant|>")
    assert [i for i in ids if 0 < i < 7] == [1, 3, 6, 4, 6, 5, 6, 5]
    assert sp.decode(ids) == text
    assert sp.unk_id() not in ids


def test_every_word_of_the_world_is_one_token(sp) -> None:
    for word in toy_world.vocabulary():
        assert len(sp.encode(word)) == len(sp.encode(" " + word)) == 1, word


# The toy world


def test_training_documents_never_state_or_answer_heldout_facts() -> None:
    rng = random.Random(5)
    for _ in range(200):
        for question in toy_world.document(rng, 600).questions:
            assert question.fact is None or not question.fact.heldout
    items = toy_world.heldout(5, 100)
    assert all(item.fact.heldout for item in items)


def test_heldout_statements_do_not_occur_in_training_text() -> None:
    rng = random.Random(6)
    text = " ".join(m["content"] for _ in range(300) for m in toy_world.document(rng, 600).messages)
    told = 0
    for obj in toy_world.OBJECTS:
        for room in toy_world.ROOMS:
            stated = f"The {obj} is in the {room}." in text
            assert not (stated and toy_world.is_heldout("place", obj, room))
            told += stated
    assert told > 100


def test_heldout_answers_follow_from_the_chat() -> None:
    for item in toy_world.heldout(3, 200):
        messages, question, answer, distance = item
        assert messages[-1] == {"role": "user", "content": question}
        asked = question.split(". ")[-1]
        before = " ".join(m["content"] for m in messages).removesuffix(asked)
        stated = [
            sentence
            for sentence in before.replace("?", ".").split(".")
            if {item.fact.subject, item.fact.value} <= set(sentence.split())
        ]
        assert stated, (answer, before)
        assert 0 < distance <= 1000


def test_estimated_length_is_the_tokenizers(sp) -> None:
    for item in toy_world.heldout(4, 20):
        text = train_demo.render(item.messages)
        counted = 1 + sum(2 + toy_world.count_tokens(m["content"]) for m in item.messages)
        assert len(sp.encode(text)) == counted


def test_heldout_text_is_long_enough_and_repeatable() -> None:
    text = toy_world.heldout_text(1, 3000)
    assert toy_world.count_tokens(text) >= 3000
    assert text == toy_world.heldout_text(1, 3000) != toy_world.heldout_text(2, 3000)
