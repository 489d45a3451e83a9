"""Text to ids and back, compared with transformers and sentencepiece; streaming."""

import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

from exkv.text import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A cache keeps keys and values; a tokenizer keeps words, numbers (1234) and  spaces.",
    "def main():\n    return [x for x in range(10)]\n",
    "Straße, café, naïve; Привет, мир; 你好,世界.",
] * 20

LLAMA3_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
CHATML_TEMPLATE = """{% if tools %}
{{ '<|im_start|>system\n' + (tools | tojson(indent=2)) + '<|im_end|>' }}
{% endif %}
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
{% if message.role == 'ignore' %}{% continue %}{% endif %}
{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}{% endif %}
"""
LLAMA2_TEMPLATE = (
    "{% set ns = namespace(system='') %}"
    "{% if messages[0].role == 'system' %}"
    "{% set ns.system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (ns.system if loop.first else '') "
    "+ message.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be <b>brief</b> & polite. "},
    {"role": "user", "content": "  Hello, café?\n"},
    {"role": "assistant", "content": "Yes, 你好."},
    {"role": "user", "content": "And?", "name": None},
]


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content), "utf-8")


def change_json(file: Path, **changes: object) -> None:
    write_json(file, {**json.loads(file.read_text("utf-8")), **changes})


def special(content: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(content, special=True, normalized=False)


def build_llama3(folder: Path) -> Path:
    """Byte-level BPE with special tokens after the vocabulary, as in Llama 3."""
    tokenizer = tokenizers.Tokenizer(BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    headers = ["<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>"]
    marks = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", *headers]
    tokenizer.add_special_tokens([special(mark) for mark in marks])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
            ),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(mark) for mark in marks]
    write_json(folder / "config.json", {"vocab_size": 512, "eos_token_id": ids[1]})
    write_json(folder / "generation_config.json", {"eos_token_id": [ids[2], ids[1]]})
    named = {"bos_token": bos, "eos_token": "<|eot_id|>", "pad_token": None}
    flags = {"clean_up_tokenization_spaces": True, "chat_template": LLAMA3_TEMPLATE}
    write_json(folder / "tokenizer_config.json", {**named, **flags})
    return folder


def llama2_model() -> BPE:
    """Pieces with visible spaces, and a token for each byte, numbered as in Llama 2."""
    trained = tokenizers.Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trained.train_from_iterator(
        CORPUS[:3], trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in model["vocab"] if piece not in pieces]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    return BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")


def build_llama2(folder: Path, kind: str) -> Path:
    tokenizer = tokenizers.Tokenizer(llama2_model())
    tokenizer.add_special_tokens([special(mark) for mark in ("<unk>", "<s>", "</s>")])
    strip = [decoders.Strip(" ", 1, 0)]
    if kind == "llama2-legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    elif kind == "llama2-bare":  # no space before a text, so none to strip
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        strip = []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    if kind == "metaspace":
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    named = {name: {"content": mark, **token} for name, mark in NAMED_LLAMA2.items()}
    write_json(folder / "special_tokens_map.json", named)
    write_json(folder / "tokenizer_config.json", {"chat_template": LLAMA2_TEMPLATE})
    return folder


NAMED_LLAMA2 = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def build_sentencepiece(folder: Path, **options: object) -> Path:
    model = io.BytesIO()
    defaults = {
        "vocab_size": 450,
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.98,
        "control_symbols": ["<|call|>"],
        "user_defined_symbols": ["<|turn|>"],
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, **{**defaults, **options}
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


JSON_KINDS = ["llama3", "llama2", "llama2-legacy", "llama2-bare", "metaspace"]
KINDS = [*JSON_KINDS, "sentencepiece", "sentencepiece-unigram"]


def build(folder: Path, kind: str) -> Path:
    folder.mkdir(exist_ok=True)
    if kind == "llama3":
        return build_llama3(folder)
    if kind == "sentencepiece":
        return build_sentencepiece(folder)
    if kind == "sentencepiece-unigram":  # sentencepiece's defaults, as in T5
        return build_sentencepiece(
            folder,
            model_type="unigram",
            vocab_size=320,
            remove_extra_whitespaces=True,
            normalization_rule_name="nmt_nfkc",
        )
    return build_llama2(folder, kind)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: build(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def ours(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="session")
def theirs(folders: dict[str, Path]) -> dict[str, PreTrainedTokenizerFast]:
    return {kind: PreTrainedTokenizerFast.from_pretrained(folders[kind]) for kind in JSON_KINDS}


MARKS = ["<s>", "</s>", "<unk>", "<|eot_id|>", "<|begin_of_text|>", "<think>", "<|call|>"]
PIECES = [*MARKS, " ", "  ", "\n", "the", "The fox", "caf\u00e9", "\u4f60\u597d", "1234", "<", "|>"]
PIECES += ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\u00df", "\u2581"]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=8).map("".join)
drawn_ids = st.lists(st.one_of(st.integers(0, 10**6), st.integers(0, 270)), max_size=12)


def within(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [token % tokenizer.vocab_size for token in ids]


# Encoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", JSON_KINDS)
@given(text=texts)
@example(text="")
@example(text="</s> and <s>")
def test_ids_match_transformers(ours, theirs, kind, text):
    tokenizer, oracle = ours[kind], theirs[kind]
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.encode(text, add_bos=False) == oracle.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", JSON_KINDS)
@given(text=texts)
def test_ordinary_text_matches_transformers(ours, theirs, kind, text):
    want = theirs[kind].encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ours[kind].encode(text, add_bos=False, add_special=False) == want


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-unigram"])
@given(text=texts)
def test_ordinary_text_matches_sentencepiece(folders, ours, kind, text):
    model = sentencepiece.SentencePieceProcessor(str(folders[kind] / "tokenizer.model"))
    tokenizer = ours[kind]
    assert tokenizer.encode(text, add_special=False) == [1, *model.encode(text)]
    if not any(mark in text for mark in MARKS):
        assert tokenizer.encode(text, add_bos=False) == model.encode(text)


@pytest.mark.parametrize("legacy", [False, True])
def test_sentencepiece_adds_a_space_after_special_tokens_only_if_legacy(folders, tmp_path, legacy):
    build_sentencepiece(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"legacy": legacy})
    tokenizer = Tokenizer(tmp_path)
    plain = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    dog = plain.encode("dog") if legacy else plain.encode("\ndog")[2:]
    newline = plain.encode("\n")
    assert plain.encode("\ndog")[:2] == newline  # so that [2:] above is "dog"
    the, call = plain.encode("the"), plain.piece_to_id("<|call|>")
    assert tokenizer.encode("the<|call|>dog</s>") == [1, *the, call, *dog, 2]


@given(text=st.lists(st.sampled_from([*MARKS, "the", " ", "dog", "\n"]), max_size=8).map("".join))
@example(text="<s>the dog</s> the")
def test_sentencepiece_with_special_tokens_matches_transformers(sentencepiece_pair, text):
    tokenizer, oracle = sentencepiece_pair
    text = text.lstrip(" ")  # Metaspace and sentencepiece differ in leading spaces
    assert tokenizer.encode(text, add_bos=False) == oracle.encode(text)


@pytest.fixture(scope="session")
def sentencepiece_pair(tmp_path_factory):
    """tokenizer.model, and the same pieces as a tokenizer.json read by transformers."""
    folder = build_sentencepiece(tmp_path_factory.mktemp("pair"), user_defined_symbols=[])
    model = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    merges = [
        (piece[:cut], piece[cut:])  # in the order of ids, which is that of training
        for piece in vocab
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    tokenizer = tokenizers.Tokenizer(
        BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([special(m) for m in ("<unk>", "<s>", "</s>", "<|call|>")])
    return Tokenizer(folder), PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@settings(max_examples=40)
def test_untrusted_text_cannot_forge_special_tokens(ours, kind, text):
    tokenizer = ours[kind]
    ids = tokenizer.encode(text + "".join(MARKS), add_bos=False, add_special=False)
    assert not tokenizer.special_ids.intersection(ids)


def test_user_defined_symbols_can_be_plain_text(tmp_path):
    # sentencepiece always matches its user-defined symbols.
    build_sentencepiece(tmp_path, user_defined_symbols=["<|turn|>", "<|turn|><|turn|>", "|><|"])
    named = ["<|turn|>", "<|turn|><|turn|>", "|><|"]
    write_json(tmp_path / "tokenizer_config.json", {"additional_special_tokens": named})
    tokenizer = Tokenizer(tmp_path)
    text = "the <|turn|><|turn|> dog|><|"
    assert tokenizer.special_ids.intersection(tokenizer.encode(text, add_bos=False))
    ids = tokenizer.encode(text, add_bos=False, add_special=False)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


def test_unavoidable_special_token_is_refused(tmp_path):
    # A Unigram vocabulary matches all of its pieces, "</s>" like "the".
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", -1.0), *((c, -2.0) for c in "</s> the")]
    tokenizer = tokenizers.Tokenizer(Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([special(mark) for mark in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode("the", add_special=False)
    with pytest.raises(ValueError, match="control token '</s>' even as ordinary text"):
        Tokenizer(tmp_path).encode("the</s>", add_special=False)


@pytest.mark.parametrize("kind", ["llama3", "sentencepiece"])
def test_add_bos(ours, kind):
    tokenizer = ours[kind]
    bare = tokenizer.encode("the dog", add_bos=False)
    assert bare[0] != tokenizer.bos_id
    assert tokenizer.encode("the dog", add_bos=True) == [tokenizer.bos_id, *bare]
    assert tokenizer.encode("the dog") == [tokenizer.bos_id, *bare]


def test_ids_with_a_character(ours):
    tokenizer = ours["llama3"]
    found = tokenizer.ids_with("a\n")
    assert tokenizer.special_ids <= found
    for token in set(range(tokenizer.vocab_size)) - tokenizer.special_ids:
        text = tokenizer.bytes_of(token)
        assert (token in found) == (b"a" in text or b"\n" in text)
    assert tokenizer.ids_with("a\n") is found


def test_lists_of_texts_are_encoded(ours):
    tokenizer = ours["llama2"]
    assert tokenizer.encode(["a", "b c"]) == [tokenizer.encode("a"), tokenizer.encode("b c")]


@pytest.mark.parametrize("ending", [[], ["</s>"]])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False, "add_eos_token": True}])
def test_only_the_post_processor_adds_tokens(tmp_path, ending, flags):
    folder = build(tmp_path, "llama2")
    stored = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", *ending], special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    stored.save(str(folder / "tokenizer.json"))
    change_json(folder / "tokenizer_config.json", **flags)
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("the dog") == oracle.encode("the dog")
    dog = oracle.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog", add_bos=True) == [1, *dog]


def test_no_post_processor_adds_no_tokens(tmp_path):
    folder = build(tmp_path, "llama2")
    change_json(folder / "tokenizer.json", post_processor=None)
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("the dog") == tokenizer.encode("the dog", add_bos=False)


def test_sentencepiece_follows_flags(tmp_path):
    build_sentencepiece(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": False, "add_eos_token": True})
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("dog") == [*tokenizer.encode("dog", add_bos=False), 2]


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    folder = build(tmp_path, "llama3")
    before = Tokenizer(folder).encode("the quick brown fox" * 9)
    stored = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(4)
    stored.enable_padding(length=1000)
    stored.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).encode("the quick brown fox" * 9) == before


def test_tokens_of_other_files_are_added(tmp_path):
    folder = build(tmp_path, "llama3")
    free = Tokenizer(folder).vocab_size
    write_json(folder / "added_tokens.json", {"<|tool|>": free})
    entry = {"content": "<|end|>", "special": True}
    change_json(folder / "tokenizer_config.json", added_tokens_decoder={str(free + 1): entry})
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("<|tool|><|end|>", add_bos=False) == [free, free + 1]
    assert tokenizer.decode([free, free + 1]) == "<|tool|>"
    write_json(folder / "added_tokens.json", {"<|tool|>": free + 5})
    with pytest.raises(ValueError, match=rf"gives the id {free + 1}, but its next"):
        Tokenizer(folder)


def test_added_tokens_are_plain_text(tmp_path):
    folder = build(tmp_path, "llama3")
    free = Tokenizer(folder).vocab_size
    write_json(folder / "added_tokens.json", {"\u00e9\u0120": free})  # both stand for bytes in BPE
    assert Tokenizer(folder).decode([free]) == "\u00e9\u0120"


@pytest.mark.parametrize("how", ["named", "flagged"])
def test_token_is_special_if_any_file_says_so(tmp_path, how):
    folder = build(tmp_path, "llama3")
    think = Tokenizer(folder).id_of("<think>")
    entry = {"content": "<think>", "special": True}
    changes = {
        "named": {"eos_token": "<think>"},
        "flagged": {"added_tokens_decoder": {think: entry}},
    }
    change_json(folder / "tokenizer_config.json", **changes[how])
    tokenizer, oracle = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert think in tokenizer.special_ids
    assert tokenizer.decode([think]) == oracle.decode([think], skip_special_tokens=True) == ""
    want = oracle.encode("a<think>", add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.encode("a<think>", add_bos=False, add_special=False) == want


def test_added_tokens_extend_sentencepiece(tmp_path):
    build_sentencepiece(tmp_path)
    entry = {"content": "<|end|>", "special": True, "lstrip": True, "rstrip": True}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {"451": entry}})
    write_json(tmp_path / "added_tokens.json", {"<tool>": 450})
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == 452
    dog = tokenizer.encode("dog", add_bos=False)
    assert tokenizer.encode("dog <|end|> <tool>", add_bos=False) == [*dog, 451, 450]
    assert tokenizer.decode([*dog, 451, 450]) == "dog<tool>"
    assert 451 in tokenizer.special_ids and 450 not in tokenizer.special_ids


def test_many_added_tokens_are_matched_fast(tmp_path):
    """Gemma has 6,000; as groups of a pattern they took 27 ms per character."""
    build_sentencepiece(tmp_path)
    write_json(tmp_path / "added_tokens.json", {f"<unused{n}>": 450 + n for n in range(6000)})
    tokenizer = Tokenizer(tmp_path)
    start = time.process_time()
    assert tokenizer.encode("Every word of it. " * 1000 + "<unused5999>")[-1] == 6449
    assert time.process_time() - start < 5


@pytest.mark.parametrize("kind", ["llama3", "sentencepiece"])
def test_invalid_text_is_refused(ours, kind):
    with pytest.raises(TypeError, match="not bytes"):
        ours[kind].encode(b"dog")
    with pytest.raises(ValueError, match="lone surrogate at character 3"):
        ours[kind].encode("dog\ud83d")


# Decoding and streaming ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", JSON_KINDS)
@given(ids=drawn_ids, skip=st.booleans())
def test_decoded_text_matches_transformers(ours, theirs, kind, ids, skip):
    tokenizer = ours[kind]
    ids = within(tokenizer, ids)
    if kind != "llama3":  # there, an invalid byte replaces its whole run, see the next test
        ids = [token for token in ids if not re.match("<0x[89A-F]", tokenizer.piece_of(token))]
    assert tokenizer.decode(ids, skip) == theirs[kind].decode(ids, skip_special_tokens=skip)


def test_invalid_byte_replaces_only_itself(ours):
    for kind in ("llama2", "sentencepiece"):
        tokenizer = ours[kind]
        euro = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "\u20ac".encode()]
        assert tokenizer.decode([*euro, *euro[:2], *euro]) == "\u20ac\ufffd\ufffd\u20ac"


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-unigram"])
@given(ids=drawn_ids)
def test_decoded_text_matches_sentencepiece(folders, ours, kind, ids):
    model = sentencepiece.SentencePieceProcessor(str(folders[kind] / "tokenizer.model"))
    tokenizer = ours[kind]
    # Drop control tokens first: sentencepiece ends a run of bytes at one that it skips.
    ids = [i for i in within(tokenizer, ids) if i not in tokenizer.special_ids]
    assert tokenizer.decode(ids) == model.decode(ids)


# Without lossy kinds: NFKC, or byte tokens without a decoder for them.
LOSSLESS = [kind for kind in KINDS if kind not in ("sentencepiece-unigram", "metaspace")]


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=texts)
def test_text_round_trips(ours, kind, text):
    text = "x" + text  # Metaspace would take a leading space for its own
    ids = ours[kind].encode(text, add_bos=False, add_special=False)
    if kind != "llama3":
        text = text.replace("\u2581", " ")  # a piece's visible space is a space
    assert ours[kind].decode(ids, skip_special=False) == text


@pytest.mark.parametrize("kind", KINDS)
@given(ids=drawn_ids, skip=st.booleans())
@settings(max_examples=200)
def test_streamed_pieces_join_to_the_text(ours, kind, ids, skip):
    tokenizer = ours[kind]
    ids = within(tokenizer, ids)
    stream = tokenizer.stream(skip)
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.flush()]) == tokenizer.decode(ids, skip)
    # Text that was returned stays valid whatever follows.
    for end in range(len(ids)):
        assert tokenizer.decode(ids[:end], skip).startswith("".join(pieces[:end]))


@pytest.mark.parametrize("kind", LOSSLESS)
def test_stream_never_splits_a_character(ours, kind):
    text = "Hi \U0001f44d\U0001f3fd caf\u00e9 \u4f60\u597d \U0001f468\u200d\U0001f469!"
    tokenizer = ours[kind]
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""
    assert "" in pieces[1:]  # some character took several tokens


@pytest.mark.parametrize("kind", ["llama2", "sentencepiece"])
def test_continued_stream_keeps_the_leading_space(ours, kind):
    tokenizer = ours[kind]
    prompt = tokenizer.encode("The quick")
    answer = tokenizer.encode("The quick brown")[len(prompt) :]
    alone, continued = tokenizer.stream(), tokenizer.stream(after=prompt)
    assert "".join(map(alone.push, answer)) == "brown"
    assert "".join(map(continued.push, answer)) == " brown"


def test_flush_returns_an_incomplete_character_and_resets(ours):
    tokenizer = ours["llama2"]
    first, fox = tokenizer.id_of("<0xE2>"), tokenizer.encode("fox", add_bos=False)
    stream = tokenizer.stream()
    assert stream.push(first) == ""
    assert stream.flush() == "\ufffd"
    assert "".join(map(stream.push, fox)) == "fox"


@pytest.mark.parametrize("kind", KINDS)
def test_stream_decodes_each_token_once(ours, kind, monkeypatch):
    tokenizer = ours[kind]
    vocabulary = tokenizer._vocabulary
    asked = []

    def counted(token: int, first: bool) -> bytes:
        asked.append(token)
        return type(vocabulary).bytes_of(vocabulary, token, first)

    monkeypatch.setattr(vocabulary, "bytes_of", counted)
    ids = tokenizer.encode("the fox \U0001f44d " * 200, add_bos=False)
    stream = tokenizer.stream()
    for token in ids:
        stream.push(token)
    assert asked == ids


@pytest.mark.parametrize("kind", ["llama3", "sentencepiece"])
@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_id_outside_of_the_vocabulary_is_named(ours, kind, wrong):
    tokenizer = ours[kind]
    limit = 512 if kind == "llama3" else tokenizer.vocab_size  # config.json has a padded size
    for refuse in (lambda: tokenizer.decode([5, wrong]), lambda: tokenizer.stream().push(wrong)):
        with pytest.raises(ValueError, match=rf"token id {wrong} .*vocab_size is {limit}"):
            refuse()


def test_ids_beyond_the_vocabulary_have_no_text(ours):
    tokenizer = ours["llama3"]
    assert tokenizer.vocab_size < 511
    assert tokenizer.decode([511, *tokenizer.encode("dog"), 511]) == "dog"
    assert tokenizer.piece_of(511) == ""


# Folders -----------------------------------------------------------------------------------------


def test_special_ids_come_from_all_files(ours):
    tokenizer = ours["llama3"]
    eot, end = tokenizer.id_of("<|eot_id|>"), tokenizer.id_of("<|end_of_text|>")
    assert tokenizer.bos_id == tokenizer.id_of("<|begin_of_text|>")
    assert tokenizer.eos_ids == (eot, end)
    assert tokenizer.pad_id is None
    assert {eot, end, tokenizer.bos_id} < tokenizer.special_ids
    assert tokenizer.id_of("<think>") not in tokenizer.special_ids
    assert tokenizer.piece_of(eot) == "<|eot_id|>"
    assert tokenizer.id_of("no such piece") is None


def test_config_json_supplies_missing_ids(tmp_path):
    folder = build(tmp_path, "llama3")
    change_json(folder / "config.json", bos_token_id=7, pad_token_id=8)
    assert Tokenizer(folder).pad_id is None  # an explicit null in tokenizer_config.json
    write_json(folder / "tokenizer_config.json", {})
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (7, 8)


def test_sentencepiece_has_its_own_special_ids(ours):
    tokenizer = ours["sentencepiece"]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), None)
    assert tokenizer.special_ids == {0, 1, 2, tokenizer.id_of("<|call|>")}


def test_tokenizer_json_takes_precedence(tmp_path):
    build_sentencepiece(tmp_path)
    assert Tokenizer(tmp_path).file.name == "tokenizer.model"
    assert Tokenizer(build(tmp_path, "llama3")).file.name == "tokenizer.json"


def test_source_may_be_a_config(folders):
    assert Tokenizer(SimpleNamespace(path=folders["llama3"])).encode("dog")
    assert Tokenizer(str(folders["llama3"])).encode("dog")
    with pytest.raises(ValueError, match="SimpleNamespace has no path"):
        Tokenizer(SimpleNamespace(path=None))


def test_missing_tokenizer_names_the_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"looked for tokenizer.json and tokenizer.model"):
        Tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Tokenizer(tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("config.json", "[]", "must hold a JSON object, not a list"),
        ("added_tokens.json", '{"<a>": "x"}', "added token is malformed"),
        ("tokenizer_config.json", '{"chat_template": [{}]}', "chat_template must be a text"),
    ],
)
def test_broken_file_is_named(tmp_path, name, content, message):
    folder = build(tmp_path, "llama3")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer(folder)
    assert str(folder / name) in str(error.value)


def test_unsupported_decoder_is_refused(tmp_path):
    folder = build(tmp_path, "llama3")
    change_json(
        folder / "tokenizer.json",
        decoder={"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    )
    with pytest.raises(ValueError, match="cannot decode with .'type': 'CTC'"):
        Tokenizer(folder)


def test_tiktoken_file_gets_a_hint(tmp_path):
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="not a sentencepiece model.*tiktoken"):
        Tokenizer(tmp_path)


# Chat templates ------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, [{"name": "look", "about": "caf\u00e9 <b>"}]])
@pytest.mark.parametrize("source", [LLAMA3_TEMPLATE, CHATML_TEMPLATE, LLAMA2_TEMPLATE])
@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_chat_matches_transformers(tmp_path, kind, source, tools, prompt):
    folder = build(tmp_path, kind)
    change_json(folder / "tokenizer_config.json", chat_template=source)
    tokenizer, oracle = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"tools": tools, "add_generation_prompt": prompt}
    want = oracle.apply_chat_template(CHAT, tokenize=False, **options)
    assert tokenizer.apply_chat_template(CHAT, **options) == want
    want_ids = oracle.apply_chat_template(CHAT, return_dict=False, **options)
    assert tokenizer.encode_chat(CHAT, **options) == want_ids


@pytest.mark.parametrize("text", ["It is in", "It is in ", " It\n"])
@pytest.mark.parametrize("source", [LLAMA3_TEMPLATE, CHATML_TEMPLATE, LLAMA2_TEMPLATE])
def test_unfinished_chat_matches_transformers(tmp_path, source, text):
    folder = build(tmp_path, "llama3")
    change_json(folder / "tokenizer_config.json", chat_template=source)
    tokenizer, oracle = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    chat = [*CHAT[:-1], {"role": "assistant", "content": text}]
    if CHAT[-1]["role"] == "user":
        chat.insert(-1, CHAT[-1])
    want = oracle.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert tokenizer.apply_chat_template(chat, continue_final_message=True) == want
    ids = oracle.apply_chat_template(chat, return_dict=False, continue_final_message=True)
    assert tokenizer.encode_chat(chat, continue_final_message=True) == ids


def test_unfinished_chat_needs_a_final_text(tmp_path):
    folder = build(tmp_path, "llama3")
    change_json(folder / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    tokenizer = Tokenizer(folder)
    with pytest.raises(ValueError, match="template leaves out the last message"):
        tokenizer.apply_chat_template(CHAT, continue_final_message=True)
    with pytest.raises(ValueError, match="no text to continue: .'role': 'assistant'"):
        tokenizer.encode_chat([*CHAT, {"role": "assistant"}], continue_final_message=True)


def test_chat_begins_with_one_bos(ours):
    tokenizer = ours["llama3"]
    ids = tokenizer.encode_chat(CHAT)
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id


def test_template_files_take_precedence(tmp_path):
    folder = build(tmp_path, "llama3")
    (folder / "chat_template.jinja").write_text("{{ messages | length }}", "utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools", "utf-8")
    tokenizer = Tokenizer(folder)
    assert tokenizer.apply_chat_template(CHAT) == "4"
    assert tokenizer.apply_chat_template(CHAT, tools=[]) == "tools"
    assert tokenizer.apply_chat_template(CHAT, template="tool_use") == "tools"


def test_named_templates_in_tokenizer_config(tmp_path):
    folder = build(tmp_path, "llama3")
    entry = [{"name": "default", "template": "a"}, {"name": "other", "template": "{{ word }}"}]
    change_json(folder / "tokenizer_config.json", chat_template=entry)
    tokenizer = Tokenizer(folder)
    assert tokenizer.apply_chat_template(CHAT) == "a"
    assert tokenizer.apply_chat_template(CHAT, template="other", word="b") == "b"
    with pytest.raises(ValueError, match="no chat template 'third'; it has default, other"):
        tokenizer.apply_chat_template(CHAT, template="third")


def test_missing_template_names_remedies(ours):
    with pytest.raises(ValueError, match="no chat template .*Write the prompt yourself"):
        ours["sentencepiece"].encode_chat(CHAT)


def render(folder: Path, source: str, messages: list[dict] = CHAT, **variables: object) -> str:
    (folder / "chat_template.jinja").write_text(source, "utf-8")
    return Tokenizer(folder).apply_chat_template(messages, **variables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("templates") / "model", "llama3")


def test_template_can_format_the_date(folder):
    assert re.fullmatch(r"\d{4}-\d\d", render(folder, "{{ strftime_now('%Y-%m') }}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{% do messages.append(1) %}",
        "{{ messages.append(1) }}",
        "{{ namespace(__html__=joiner) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = joiner %}",
        "{{ range(100000000) | list }}",
        "{% include 'tokenizer.json' %}",
    ],
)
def test_template_cannot_leave_the_sandbox(folder, source):
    with pytest.raises(ValueError, match="chat_template.jinja: the chat template failed"):
        render(folder, source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_failing_template_is_named(folder, source, message):
    with pytest.raises(ValueError, match=message) as error:
        render(folder, source)
    assert str(folder / "chat_template.jinja") in str(error.value)


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hello", TypeError, "messages must be a list such as"),
        ([], ValueError, "messages is empty"),
        (["hello"], TypeError, r"messages\[0\] must be a mapping with a role"),
        ([{"content": "hello"}], TypeError, r"messages\[0\] must be a mapping with a role"),
        ([{"role": "user", "content": {1, 2}}], TypeError, r"messages\[0\] is of type set"),
    ],
)
def test_invalid_messages_are_refused(folder, messages, error, message):
    with pytest.raises(error, match=message):
        render(folder, "x", messages)


def test_messages_are_not_modified(folder):
    messages = [{"role": "user", "content": None, "parts": ["a"]}]
    assert (
        render(folder, "{{ messages[0] | tojson }}", messages) == '{"role": "user", "parts": ["a"]}'
    )
    assert messages == [{"role": "user", "content": None, "parts": ["a"]}]


# transformers' interface ---------------------------------------------------------------------


TEXTS = ["the key", "", "the key is in the kitchen, caf\u00e9"]


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}])
@pytest.mark.parametrize("kind", JSON_KINDS)
def test_call_matches_transformers(ours, theirs, kind, options):
    for text in (TEXTS[0], TEXTS):
        found, expected = ours[kind](text, **options), theirs[kind](text, **options)
        assert found["input_ids"] == found.input_ids == expected["input_ids"]
        assert found["attention_mask"] == expected["attention_mask"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options",
    [
        {"padding": True},
        {"padding": "longest", "truncation": True, "max_length": 5},
        {"padding": "max_length", "max_length": 30},
    ],
)
def test_padding_and_truncation_match_transformers(tmp_path, side, options):
    folder = build(tmp_path, "llama3")
    change_json(folder / "tokenizer_config.json", padding_side=side, pad_token="<|eot_id|>")
    expected = PreTrainedTokenizerFast.from_pretrained(folder)(
        TEXTS, return_tensors="pt", **options
    )
    found = Tokenizer(folder)(TEXTS, return_tensors="pt", **options).to("cpu")
    assert torch.equal(found.input_ids, expected["input_ids"])
    assert torch.equal(found.attention_mask, expected["attention_mask"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": True}, "has no pad token"),
        ({"return_tensors": "pt"}, "pass padding=True"),
        ({"return_tensors": "tf"}, "return_tensors is 'tf'"),
        ({"padding": "left"}, "padding is 'left'"),
        ({"truncation": True}, "max_length is missing"),
        ({"max_length": 0}, "max_length is 0"),
    ],
)
def test_invalid_calls_are_refused(ours, options, message):
    with pytest.raises(ValueError, match=message):
        ours["llama2"](TEXTS, **options)


def test_batch_decode_takes_lists_and_tensors(ours, theirs):
    ids = ours["llama3"](TEXTS[::2]).input_ids
    expected = theirs["llama3"].batch_decode(ids, skip_special_tokens=True)
    assert ours["llama3"].batch_decode(ids, skip_special_tokens=True) == expected
    rows = torch.tensor([ids[0], ids[0]])
    found = ours["llama3"].batch_decode(rows, skip_special_tokens=False)
    assert found == theirs["llama3"].batch_decode(rows, skip_special_tokens=False)
    assert ours["llama3"].decode(rows[0], skip_special_tokens=True) == expected[0]
    assert ours["llama3"].decode(ids[0][1]) == theirs["llama3"].decode(ids[0][1])
