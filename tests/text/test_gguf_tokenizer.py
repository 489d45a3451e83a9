"""Tokenizers from a GGUF file's metadata: compared with their original libraries, how each
pre-tokenizer splits a text, and refusals."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest
import sentencepiece
import tokenizers
import transformers
from tiny import save_tokenizer
from tokenizers import pre_tokenizers

from exkv import Tokenizer
from exkv.checkpoint import GGUFContents
from exkv.checkpoint.gguf.writing import write_empty
from exkv.text.gguf import PRE_TOKENIZERS
from exkv.text.gguf_words import check_same, tokenizer_metadata

gguf = pytest.importorskip("gguf", reason="of the test extra, which `make test` installs")

TEXTS = ["the key is in the kitchen", "  where\n is it?\t", "\u4f60\u597d \U0001f600 caf\u00e9", ""]
CHAT = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{% endfor %}"


def write(file: Path, model: str, tokens: list[str], **values) -> Path:
    """Write a file with only a vocabulary, like llama.cpp's own test files."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def processor(tmp_path_factory) -> sentencepiece.SentencePieceProcessor:
    folder = save_tokenizer(tmp_path_factory.mktemp("pieces"))
    return sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))


def of_pieces(file: Path, model, **values) -> Path:
    ids = range(model.get_piece_size())
    kinds = {2: model.is_unknown, 3: model.is_control, 6: model.is_byte}
    types = [next((n for n, test in kinds.items() if test(i)), 1) for i in ids]
    return write(
        file,
        "llama",
        [model.id_to_piece(i) for i in ids],
        **{
            "token_scores": [model.get_score(i) for i in ids],
            "token_types": types,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unk_token_id": 0,
            **values,
        },
    )


def test_ids_match_sentencepiece(processor, tmp_path):
    tokenizer = Tokenizer(of_pieces(tmp_path / "m.gguf", processor, chat_template=CHAT))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_bos=False)
        # The trained normalizer drops extra spaces; llama.cpp's files keep them.
        if text.strip() == text and "  " not in text:
            assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("is") == [1, *processor.encode("is")]  # BOS unless the file says no
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (1, (2,), 0)
    said = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert said == "<s>user: hi"
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])[0] == 1


def test_flags_are_followed(processor, tmp_path):
    file = of_pieces(
        tmp_path / "m.gguf",
        processor,
        add_bos_token=False,
        add_eos_token=True,
        add_space_prefix=False,
    )
    tokenizer = Tokenizer(file)
    ids = tokenizer.encode("key")
    assert ids[-1] == 2 and 1 not in ids
    assert not tokenizer.piece_of(ids[0]).startswith("\u2581")


TEXT = "I'LL pay $12345 for HelloWorld \u4e2d\u6587\n\n  ok"
_START = ["I", "'", "LL", " pay", " $"]
_TAIL = [" for", " HelloWorld", " \u4e2d\u6587"]
_CASED = [" for", " Hello", "World", " \u4e2d\u6587", "\n\n", " ", " ok"]
_GPT2_END = [*_TAIL, "\n\n ", " ok"]
_LLAMA_END = [*_TAIL, "\n\n", " ", " ok"]
_SPACED = [" ", "\u4e2d\u6587", "\n\n", " ", " ok"]
_APART = [" ", "\u4e2d\u6587", "\n", "\n", " ", " ok"]
CUTS = {
    "gpt-2": [*_START, "12345", *_GPT2_END],
    "smollm": [*_START, *"12345", *_GPT2_END],
    "llama-bpe": ["I", "'LL", " pay", " $", "123", "45", *_LLAMA_END],
    "qwen2": ["I", "'LL", " pay", " $", *"12345", *_LLAMA_END],
    "tekken": ["I", "'LL", " pay", " $", *"12345", *_CASED],
    "gpt-4o": ["I'LL", " pay", " $", "123", "45", *_CASED],
    "deepseek-llm": ["I", "'", "LL", " pay", " $", "12345", " for", " HelloWorld", *_APART],
    "deepseek-coder": ["I", "'", "LL", " pay", " $", *"12345", " for", " HelloWorld", *_APART],
    "deepseek-v3": ["I", "'LL", " pay", " $", "123", "45", " for", " HelloWorld", *_SPACED],
    "glm4": ["I", "'LL", " pay", " $", "123", "45", *_LLAMA_END],
    "minicpm5": ["I", "'LL", " pay", " $", "123", "45", *_LLAMA_END],
    "seed-coder": ["I", "'LL", " pay", " $", *"12345", *_LLAMA_END],
    "bloom": ["I'LL", " pay", " $12345", *_GPT2_END],
    "viking": ["I'LL", " pay", " $", *"12345", *_GPT2_END],
    "default": ["I", "'", "LL", " pay", " ", "$", "123", "45", *_GPT2_END],
    "falcon": ["I", "'", "LL", " pay", " ", "$", "123", "45", *_GPT2_END],
    "kimi-k2": ["I'LL", " pay", " $", "123", "45", *_CASED[:3], *_SPACED],
    "afmoe": ["I", "'LL", " pay", " $", "12", "345", " for", " HelloWorld", *_SPACED],
    "tiny_aya": ["I'LL", " pay", " $", "12", "345", *_CASED],
    "exaone-moe": ["I", "'LL", " pay", " $", *"12345", "".join(_TAIL), "\n\n", " ", " ok"],
    "bailingmoe": ["I", "'LL", " pay", " $", *"12345", *_LLAMA_END],
    "laguna": ["I", "'LL", " pay", " $", *"12345", *_LLAMA_END],
    "jais-2": ["I", "'LL", " pay", " $", "123", "45", *_LLAMA_END],
}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def of_bytes(file: Path, **values) -> Path:
    """All bytes, two merges, and a control token."""
    merged = ["\u0120t", "\u0120th", "<|im_end|>"]
    types = [1] * (len(ALPHABET) + 2) + [3]
    settings = {"token_types": types, "token_merges": ["\u0120 t", "\u0120t h"], **values}
    return write(file, "gpt2", ALPHABET + merged, **settings)


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizers_split_a_text(tmp_path, pre):
    tokenizer = Tokenizer(of_bytes(tmp_path / "m.gguf", tokenizer_pre=pre))
    library = tokenizer._vocabulary._tokenizer
    cut = library.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in cut] == CUTS[pre]
    ids = tokenizer.encode(TEXT + " the<|im_end|>")
    assert tokenizer.decode(ids, skip_special=False) == TEXT + " the<|im_end|>"
    # " th" is one token; the control token ends answers although no key names it.
    assert [tokenizer.piece_of(i) for i in ids[-3:]] == ["\u0120th", "e", "<|im_end|>"]
    assert tokenizer.eos_ids == (ids[-1],)
    assert PRE_TOKENIZERS[pre].add_bos == (pre in ("llama-bpe", "tekken"))


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("kimi-k2", "K2\u4e2d\u6587abc", ["K", "2", "\u4e2d\u6587", "abc"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("exaone-moe", "hi\n\nyou there !?/", ["hi", "\n\n", "you there", " !?/"]),
        ("laguna", "hi \n x", ["hi", " ", "\n", " x"]),
        ("jais-2", "a" + " " * 11 + "b", ["a", " " * 8, " " * 2, " b"]),
    ],
)
def test_pre_tokenizers_split_special_cases(tmp_path, pre, text, cut):
    tokenizer = Tokenizer(of_bytes(tmp_path / "m.gguf", tokenizer_pre=pre))
    found = tokenizer._vocabulary._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == cut


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"], (0, 1, 3)),  # gpt-oss
        (["<|end|>", "<|endoftext|>", "<|assistant|>"], (0, 1)),  # Phi-3
        (["<eos>", "<turn|>", "<|tool_response>", "<|turn>"], (0, 1, 2)),  # Gemma 4
        (["[BOS]", "[EOS]", "[EOT]", "[start_header_id]"], (1, 2)),  # Kimi
    ],
)
def test_eos_ids_are_recognized_by_spelling(tmp_path, tokens, ends):
    known = [*ALPHABET, "\u0120t"]
    types = [1] * len(known) + [3] * len(tokens)
    file = write(
        tmp_path / "m.gguf",
        "gpt2",
        known + tokens,
        token_types=types,
        token_merges=["\u0120 t"],
    )
    assert Tokenizer(file).eos_ids == tuple(len(known) + index for index in ends)


BAD = {
    "tokenizer.ggml.model is 'bert'; exkv knows llama, gpt2, gemma4": lambda f: write(
        f, "bert", ["a"]
    ),
    "tokenizer.ggml.pre is 'chameleon'; exkv knows default": lambda f: of_bytes(
        f, tokenizer_pre="chameleon"
    ),
    "token_type has 1 entries, but there are 259 tokens": lambda f: of_bytes(f, token_types=[1]),
    "merges.0. is 'x', which isn't a pair": lambda f: of_bytes(f, token_merges=["x"]),
    "cannot be read as a tokenizer": lambda f: of_bytes(f, token_merges=["no such"]),
    "tokens has 'a' twice, as 0 and 1": lambda f: write(
        f, "gpt2", ["a", "a"], token_merges=["a a"]
    ),
    "scores is None; this kind of tokenizer needs scores": lambda f: write(f, "llama", ["a"]),
    "bos_token_id is 7; there are 1 tokens": lambda f: write(f, "llama", ["a"], bos_token_id=7),
    "is not a sentencepiece model": lambda f: write(
        f, "llama", ["a", "a"], token_scores=[0.0, 0.0], token_types=[1, 1]
    ),
    "tokenizer.ggml.tokens is": lambda f: write(f, "llama", []),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_tokenizers_are_refused(tmp_path, message):
    file = BAD[message](tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(file)
    assert str(file) in str(caught.value)


# llama.cpp's own tests ---------------------------------------------------------------------------

needs_golden = pytest.mark.skipif(
    not golden.COMPLETE.exists(), reason="`make test` fetches llama.cpp's golden tokenizations"
)
#: Vocabulary -> its unsupported kind, WordPiece.
REFUSED = {"bert-bge": "bert"}
READ = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm"),
    *("gemma-4", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


@needs_golden
@pytest.mark.parametrize("name", READ)
def test_golden_tokenizations_of_llama_cpp(name):
    tokenizer = Tokenizer(golden.FOLDER / f"{name}.gguf")
    for text, ids in golden.cases(name):
        assert tokenizer.encode(text, add_bos=False) == ids, text


@needs_golden
def test_other_vocabularies_of_llama_cpp_are_refused():
    assert {file.stem for file in golden.FOLDER.glob("*.gguf")} == {*READ, *REFUSED}
    for name, kind in REFUSED.items():
        with pytest.raises(ValueError, match=f"model is '{kind}'; exkv knows llama, gpt2, gemma4"):
            Tokenizer(golden.FOLDER / f"{name}.gguf")


# Written from a folder --------------------------------------------------------------------------


def written(folder: Path, file: Path, vocab_size: int) -> Path:
    metadata = tokenizer_metadata(folder, vocab_size)
    write_empty(file, {"general.architecture": "llama", **metadata}, {})
    return file


@pytest.mark.parametrize(("kind", "pre"), [("GPT2Tokenizer", "gpt-2"), ("Qwen2Tokenizer", "qwen2")])
def test_byte_level_tokenizers_of_folders_are_written(kind, pre, tmp_path):
    bpe = tokenizers.ByteLevelBPETokenizer()
    lines = [*TEXTS, "cafe\u0301 12345 we'LL go, they've gone!!\n\n  \u4f60\u597d"] * 9
    bpe.train_from_iterator(lines, vocab_size=300, show_progress=False, special_tokens=["<end>"])
    bpe.save_model(str(tmp_path))
    files = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    named = {"eos_token": "<end>", "unk_token": "<end>", "chat_template": CHAT}
    theirs = getattr(transformers, kind)(**files, **named)
    theirs.save_pretrained(tmp_path / "folder")
    size = len(theirs) + 3
    file = written(tmp_path / "folder", tmp_path / "m.gguf", size)
    check_same(tmp_path / "folder", file)
    fields = GGUFContents(file).metadata
    assert fields["tokenizer.ggml.pre"] == pre and len(fields["tokenizer.ggml.tokens"]) == size
    found = Tokenizer(file)
    for text in (*lines, f"{lines[-1]}<end>{TEXTS[0]}"):
        assert found.encode(text) == theirs.encode(text), text
    assert found.eos_ids[0] == theirs.eos_token_id  # beside ends that are known by their spelling
    assert found.chat_templates["default"].source == CHAT
    reader = gguf.GGUFReader(file)
    assert reader.fields["tokenizer.ggml.tokens"].contents()[-1] == f"[PAD{size - 1}]"


def test_pieces_of_folders_are_written_unless_their_text_is_normalized(tmp_path):
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    for name, options in (("plain", plain), ("changed", {})):
        folder = tmp_path / name
        folder.mkdir()
        save_tokenizer(folder, user_defined_symbols=["<tool>"], **options)
        file = written(folder, tmp_path / f"{name}.gguf", 330)
        if options:
            check_same(folder, file)
            theirs = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
            for text in (*TEXTS, "where <tool>is it"):
                assert Tokenizer(file).encode(text, add_bos=False) == theirs.encode(text)
            continue
        with pytest.raises(ValueError, match="other tokens.*convert_hf_to_gguf.py"):
            check_same(folder, file)


def test_tokenizers_of_other_kinds_are_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    parts = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    words.decoder = tokenizers.decoders.Sequence(parts)
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="byte-level BPE or the BPE of sentencepiece"):
        tokenizer_metadata(tmp_path, 2)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Digits()
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="as none of the pre-tokenizers"):
        tokenizer_metadata(tmp_path, 2)
