"""The tokenizer and chat template of a GGUF file.

The metadata lists tokens with scores (``llama``: sentencepiece) or with merges (``gpt2``:
byte-level BPE, whose ``pre`` names the pre-tokenizer; ``gemma4``: BPE of characters). They are
converted for the original library, sentencepiece or tokenizers, so that text is tokenized as the
original does it; ``vocabulary.py`` wraps both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exkv.checkpoint import GGUFContents
from exkv.checkpoint.files import quoted
from exkv.checkpoint.gguf.metadata import end_ids, token_id

from .chat_template import ChatTemplate
from .vocabulary import (
    SentencePieceVocabulary,
    Settings,
    TokenizersVocabulary,
    Vocabulary,
    named_errors,
)

KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
#: Names in tokenizer_config.json -> those of the metadata.
NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # as ggml spells it
    "cls_token": "cls",
}
#: Values of token_type, as in sentencepiece.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a text is split before BPE merges.

    Attributes:
        patterns: applied in order; each splits the pieces so far into matches and the rest.
        ignore_merges: whether a word that is itself a token skips the merges.
        add_bos: whether BOS begins a text if the metadata doesn't say.
        nfc: whether text is normalized to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def splitter(self) -> Any:
        """The library's pre-tokenizer, whose pieces are of characters that stand for bytes."""
        from tokenizers import Regex
        from tokenizers import pre_tokenizers as pre

        cuts = [pre.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre.Sequence([*cuts, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SLASHES = r"[\r\n/]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _rest(tail: str) -> str:
    """Punctuation with what may follow it, and spaces."""
    return rf"| ?[^\s\p{{L}}\p{{N}}]+{tail}|\s*[\r\n]+|\s+(?!\S)|\s+"


def _digits(most: str, tail: str = r"[\r\n]*") -> str:
    """Words, and numbers of up to ``most`` digits, as in Llama 3 and Qwen."""
    return rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{most}{_rest(tail)}"


def _cased(ending: str, digits: str) -> str:
    """Words that are also split before a capital, as in GPT-4o and Tekken."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{_UPPER}*{_LOWER}+{ending}|{first}{_UPPER}+{_LOWER}*{ending}|\p{{N}}{digits}"
        rf"{_rest(_SLASHES)}"
    )


#: Cased letters as listed by DeepSeek LLM's tokenizer: without a few scripts and mathematical
#: alphabets.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^"
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001df1e]]"
)
_HAN = "\u4e00-\u9fa5"
_EAST_ASIAN = f"[{_HAN}\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_MARKS = r"\s?[!-/:-~" "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GPT4O = _cased(f"{_SHORT}?", "{1,3}")

#: Kimi K2 and Linear: runs of Han characters, and GPT-4o's rule for words without them.
_KIMI = (
    rf"\p{{Han}}+|{_cased(f'{_SHORT}?', '{1,3}')}".replace(_UPPER, f"[{_UPPER}&&[^\\p{{Han}}]]")
    .replace(_LOWER, f"[{_LOWER}&&[^\\p{{Han}}]]")
    .replace(_SLASHES, r"[\r\n]*")
)
#: Numbers in groups of three digits, counted from their end.
_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
#: Scripts without spaces between words, as AFMoE's tokenizer lists them.
_UNSPACED = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_PHRASES = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_LING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
#: Spaces in runs of powers of two.
_RUNS = "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s"

#: Pre-tokenizers, and their names in ``tokenizer.ggml.pre`` (llama.cpp's src/llama-vocab.cpp).
RULES = (
    (
        PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "default",
    ),
    (
        PreTokenizer(patterns=(_digits("{1,3}"),), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (PreTokenizer(patterns=(_digits("{1,3}"),)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer(patterns=(_digits("{1,3}"),), ignore_merges=True), "glm4 glm5"),
    (PreTokenizer(patterns=(_digits(""),), nfc=True), "qwen2 deepseek-r1-qwen"),
    (PreTokenizer(patterns=(_digits(""),)), "stablelm2 megrez hunyuan solar-open grok-2 kormo"),
    (PreTokenizer(patterns=(_MARKED,)), "qwen35"),
    (PreTokenizer(patterns=(r"\p{N}{1,3}", _digits("+")), ignore_merges=True), "minicpm5"),
    (PreTokenizer(patterns=(_cased("", ""),), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer(patterns=(_GPT4O,)), "gpt-4o llama4 kanana2 minimax-m2"),
    (
        PreTokenizer(patterns=(_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
    ),
    (
        PreTokenizer(patterns=(r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (
        PreTokenizer(
            patterns=(
                *(r"[\r\n]", rf"\s?{_CASED}+", _DEEPSEEK_MARKS, r"\s+$"),
                *(_EAST_ASIAN, r"\p{N}+"),
            )
        ),
        "deepseek-llm",
    ),
    (
        PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
        "deepseek-coder",
    ),
    (
        PreTokenizer(patterns=(r"\p{N}{1,3}", f"[{_HAN}\u3040-\u30ff]+", _DEEPSEEK3)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    (PreTokenizer(patterns=(_digits("", tail=""),)), "seed-coder"),
    (PreTokenizer(patterns=(_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer(patterns=(_BLOOM, r"\p{N}")), "viking"),
    (PreTokenizer(patterns=(_KIMI,)), "kimi-k2"),
    (PreTokenizer(patterns=(_THOUSANDS, _UNSPACED, _DEEPSEEK3)), "afmoe"),
    (PreTokenizer(patterns=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)), "tiny_aya cohere2moe"),
    (PreTokenizer(patterns=(_PHRASES,)), "exaone-moe"),
    (PreTokenizer(patterns=(_LING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer(patterns=(r"[^\n]+|\n+", _digits(""))), "laguna"),
    (PreTokenizer(patterns=(_digits("{1,3}").removesuffix(r"|\s+(?!\S)|\s+") + _RUNS,)), "jais-2"),
)
#: Name -> rule.
PRE_TOKENIZERS = {name: rule for rule, names in RULES for name in names.split()}


def read_gguf_tokenizer(file: Path) -> tuple[Settings, Vocabulary, dict[str, ChatTemplate]]:
    """Read the settings, vocabulary and chat templates of a GGUF file.

    Raises:
        ValueError: the file has no tokenizer, an unknown kind, or contradicts itself; names the
            file and the key.
        CheckpointError: the file is damaged.
    """
    contents = GGUFContents(file)
    words = _TokenTable(file, contents.metadata)
    kinds: dict[Any, Callable[[_TokenTable, Settings], Vocabulary]]
    kinds = {"llama": _sentencepiece, "gpt2": _byte_level, "gemma4": _of_characters}
    kind = contents.metadata.get(f"{KEY}model")
    if not isinstance(kind, str) or kind not in kinds:
        raise words.bad("model", f"exkv knows {', '.join(kinds)}")
    rows = contents.tensors.get("token_embd.weight")
    vocab_size = len(words.tokens) if rows is None else rows.tensor.shape[0]
    if vocab_size < len(words.tokens):
        raise ValueError(
            f"{file}: {KEY}tokens has {len(words.tokens)} tokens, but the model {vocab_size}: "
            "convert it again"
        )
    settings = _settings(words, kind, vocab_size)
    return settings, kinds[kind](words, settings), dict(_templates(file, contents.metadata))


class _TokenTable:
    """The validated tokens and their metadata.

    Attributes:
        metadata: the file's.
        tokens: their strings.
        types: their types, see the constants above.
    """

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file, self.metadata = file, metadata
        self.tokens = list(self._list("tokens", str))
        if not self.tokens:
            raise self.bad("tokens", "a tokenizer needs tokens")
        self.types = self._beside("token_type", int) or [1] * len(self.tokens)
        if not all(0 < type <= BYTE for type in self.types):
            raise ValueError(f"{file}: {KEY}token_type has numbers outside of 1 to {BYTE}")

    def bad(self, key: str, needed: str) -> ValueError:
        value = quoted(self.metadata.get(KEY + key))
        return ValueError(f"{self.file}: {KEY}{key} is {value}; {needed}")

    def get(self, key: str) -> Any:
        return self.metadata.get(KEY + key)

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.bad(key, "it must be true or false")
        return value

    def named(self, key: str) -> int | None:
        """The id of a special token in the metadata."""
        value = token_id(self.metadata, key)
        if value is not None and not 0 <= value < len(self.tokens):
            raise self.bad(f"{key}_token_id", f"there are {len(self.tokens)} tokens")
        return value

    def scores(self) -> list[float]:
        """The score of each token."""
        found = self._beside("scores", float)
        if found is None:
            raise self.bad("scores", "this kind of tokenizer needs scores: convert the model again")
        return found

    def merges(self) -> Iterator[tuple[str, str]]:
        """Merged pairs of tokens, by priority."""
        for index, merge in enumerate(self._list("merges", str)):
            left, _, right = merge.partition(" ")
            if not left or not right:
                raise ValueError(
                    f"{self.file}: {KEY}merges[{index}] is {quoted(merge)}, which isn't a pair"
                )
            yield left, right

    def of_type(self, *types: int) -> Iterator[str]:
        return (token for token, type in zip(self.tokens, self.types, strict=True) if type in types)

    def _list(self, key: str, kind: type) -> Any:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.bad(key, f"it must be a list of {kind.__name__}")
        return value

    def _beside(self, key: str, kind: type) -> Any:
        """A list with an entry for each token; None if the key is missing."""
        if self.get(key) is None:
            return None
        value = self._list(key, kind)
        if len(value) != len(self.tokens):
            raise ValueError(
                f"{self.file}: {KEY}{key} has {len(value)} entries, but there are "
                f"{len(self.tokens)} tokens: convert the model again"
            )
        return value


def _settings(words: _TokenTable, kind: str, vocab_size: int) -> Settings:
    ids = {name: words.named(key) for name, key in NAMED.items()}
    pre = PRE_TOKENIZERS.get(words.get("pre") or "default")
    add_bos = words.flag("add_bos_token")
    if add_bos is None:
        add_bos = kind != "gpt2" or (pre is not None and pre.add_bos)
    tokenizer = {
        "add_bos_token": add_bos,
        "add_eos_token": words.flag("add_eos_token") or False,
        "add_prefix_space": words.flag("add_space_prefix"),
        "legacy": True,  # text after a control token also gets a leading space
    }
    return Settings(
        tokenizer=tokenizer,
        model={"vocab_size": vocab_size},
        named={name: None if i is None else words.tokens[i] for name, i in ids.items()},
        extra=(),
        added=(),
        eos_ids=tuple(i for i in end_ids(words.metadata) if i < len(words.tokens)),
    )


def _templates(file: Path, metadata: Mapping[str, Any]) -> Iterator[tuple[str, ChatTemplate]]:
    """The chat template as "default", and others by name."""
    for key, value in metadata.items():
        name = "default" if key == TEMPLATE else key.removeprefix(f"{TEMPLATE}.")
        if name == key or not key.startswith(TEMPLATE):
            continue
        if not isinstance(value, str):
            raise ValueError(f"{file}: {key} must be a text, not {quoted(value)}")
        yield name, ChatTemplate(value, file)


# BPE --------------------------------------------------------------------------------------------


def _byte_level(words: _TokenTable, settings: Settings) -> Vocabulary:
    from tokenizers import Tokenizer, decoders, models, normalizers

    rule = _rule(words)
    merges = list(words.merges())
    with named_errors(words.file, "cannot be read as a tokenizer"):
        bpe = models.BPE(_ids(words), merges, ignore_merges=rule.ignore_merges)
        tokenizer = Tokenizer(bpe)
        tokenizer.pre_tokenizer = rule.splitter()
        tokenizer.normalizer = normalizers.NFC() if rule.nfc else None
        tokenizer.decoder = decoders.ByteLevel()
        return _with_added(tokenizer, words, settings)


def _of_characters(words: _TokenTable, settings: Settings) -> Vocabulary:
    """BPE whose merges run over the whole text, with ``\u2581`` for spaces; characters that aren't
    tokens become bytes (transformers' ``GemmaTokenizer``)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = list(words.merges())
    unknown = settings.named["unk_token"]
    with named_errors(words.file, "cannot be read as a tokenizer"):
        bpe = models.BPE(_ids(words), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(bpe)
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return _with_added(tokenizer, words, settings)


def _with_added(tokenizer: Any, words: _TokenTable, settings: Settings) -> Vocabulary:
    """Add tokens that are matched literally, and those around a text."""
    from tokenizers import processors

    tokenizer.add_tokens(list(_added(words)))
    around = {token: tokenizer.token_to_id(token) for token in _around(settings) if token}
    if around:
        single = [token or "$A" for token in _around(settings)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(around.items())
        )
    return TokenizersVocabulary(words.file, settings, lambda: tokenizer)


def _rule(words: _TokenTable) -> PreTokenizer:
    name = words.get("pre")
    if name is not None and name not in PRE_TOKENIZERS:
        raise words.bad("pre", f"exkv knows {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name or "default"]


def _ids(words: _TokenTable) -> dict[str, int]:
    """Token -> id; ValueError for duplicates."""
    spelt = [token or f"[EMPTY_{index}]" for index, token in enumerate(words.tokens)]
    ids = {token: index for index, token in enumerate(spelt)}
    if len(ids) < len(spelt):
        index = next(i for i, token in enumerate(spelt) if ids[token] != i)
        raise ValueError(
            f"{words.file}: {KEY}tokens has {quoted(spelt[index])} twice, as {index} and "
            f"{ids[spelt[index]]}: convert the model again"
        )
    return ids


def _added(words: _TokenTable) -> Iterator[Any]:
    """Tokens that are matched literally in a text."""
    from tokenizers import AddedToken

    for token in filter(None, words.of_type(CONTROL, UNKNOWN)):
        yield AddedToken(token, special=True, normalized=False)
    for token in filter(None, words.of_type(USER_DEFINED)):
        yield AddedToken(token, special=False, normalized=False)


def _around(settings: Settings) -> list[str | None]:
    """The tokens around a text, with None for the text itself."""
    bos = settings.named["bos_token"] if settings.flag("add_bos_token") else None
    eos = settings.named["eos_token"] if settings.flag("add_eos_token") else None
    return [*filter(None, [bos]), None, *filter(None, [eos])]


# sentencepiece ----------------------------------------------------------------------------------


def _sentencepiece(words: _TokenTable, settings: Settings) -> Vocabulary:
    return SentencePieceVocabulary(words.file, settings, _model_proto(words))


def _model_proto(words: _TokenTable) -> bytes:
    """Serialize a ModelProto (sentencepiece_model.proto): the tokens (1), trainer_spec (2) for BPE,
    and normalizer_spec (3), which only adds a leading space."""
    scores = words.scores()
    pieces = b"".join(
        _field(1, _field(1, token.encode()) + _float(2, score) + _number(3, type))
        for token, score, type in zip(words.tokens, scores, _piece_types(words), strict=True)
    )
    trainer = _number(3, 2) + _number(35, int(BYTE in words.types))
    for number, key in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        token = words.named(key)
        if token is not None:
            trainer += _number(number, token) + _field(number + 5, words.tokens[token].encode())
    normalizer = _field(1, b"identity") + _number(3, 1) + _number(4, 0) + _number(5, 1)
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _piece_types(words: _TokenTable) -> list[int]:
    """The types with the single unknown token that the library requires: the one in the metadata.
    Others, with which some files pad a vocabulary, become unused tokens."""
    types = list(words.types)
    unknown = words.named("unknown")
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    types = [UNUSED if type == UNKNOWN else type for type in types]
    if unknown is not None:
        types[unknown] = UNKNOWN
    return types


def _varint(value: int) -> bytes:
    """Encode a protobuf varint: seven bits per byte, lowest first."""
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)
