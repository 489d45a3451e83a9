"""The two kinds of vocabulary, tokenizer.json and tokenizer.model, behind one interface.

`open_vocabulary` reads a model folder's vocabulary, and the JSON files beside it (`Settings`) for
special tokens and the tokens around a text. Each format is encoded by its own library, `tokenizers`
or `sentencepiece`; exkv adds the bytes of each token. `gguf.py` makes either from a GGUF file's
metadata, and `tokenizer.py` makes a tokenizer from either.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from exkv.checkpoint.files import parse_json_object, quoted, read_file, shortened
from exkv.checkpoint.value_checks import is_int

JSON_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
_SPACE = "\u2581"  # sentencepiece's visible space
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_EACH_BYTE = "exkv.each_byte"  # an error handler, see the end of the file
_MOST_IDS = 1 << 24  # more than any vocabulary has
#: Parts of repetitive texts on which regular expressions with nested repetitions backtrack.
_REPEATED = ["a", "ab", "aab", "A", "1", "a1", " ", "a ", "a,", "\n", "!", "\u00e9", "\u4e2d"]
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizersVocabulary:
    """tokenizer.json, through the `tokenizers` library.

    Args:
        open_tokenizer: makes the library's tokenizer from the file.

    Attributes:
        names: the ids of bos_token and so on.
        prefix, suffix: the ids that the checkpoint puts around a text.
        margin: number of leading spaces that the encoder adds to a text.
    """

    def __init__(self, file: Path, settings: Settings, open_tokenizer: Callable[[], Any]) -> None:
        self.file = file
        with named_errors(file, "cannot be read as a tokenizer"):
            self._tokenizer = open_tokenizer()
            self._add_tokens(settings)
        self.size = max(self._tokenizer.get_vocab(True).values(), default=-1) + 1
        self._added = self._tokenizer.get_added_tokens_decoder()
        found = {name: self.id_of(text) for name, text in settings.named.items() if text}
        self.names = {name: token for name, token in found.items() if token is not None}
        self.special_ids = frozenset(
            {token for token, added in self._added.items() if added.special}
            | set(self.names.values())
            | {token for token in map(self.id_of, settings.extra) if token is not None}
        )
        self.prefix, self.suffix = self._affixes()
        decoder = self._tokenizer.decoder  # its pickled state is JSON
        self._rule = _ByteRule.read(json.loads(decoder.__getstate__()) if decoder else None, file)
        self.margin = self._rule.margin
        self.utf8_errors = "replace" if self._rule.byte_level else _EACH_BYTE
        self._bytes: dict[int, bytes] = {}

    def id_of(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)

    def piece_of(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def encode(self, text: str, add_special: bool) -> list[int]:
        with named_errors(self.file, "cannot encode a text"):
            tokenizer = self._tokenizer if add_special else self._ordinary
            return tokenizer.encode(text, add_special_tokens=False).ids

    def bytes_of(self, token: int, first: bool) -> bytes:
        if first:  # may differ; needed once per text
            return self._rule.apply(self.piece_of(token), token in self._added, True)
        if token not in self._bytes:
            self._bytes[token] = self._rule.apply(self.piece_of(token), token in self._added, False)
        return self._bytes[token]

    @cached_property
    def _ordinary(self) -> Any:
        """A copy that matches no control tokens; toggling one tokenizer would race in threads."""
        twin = type(self._tokenizer).from_str(self._tokenizer.to_str())
        twin.encode_special_tokens = True
        return twin

    def _add_tokens(self, settings: Settings) -> None:
        """Register tokens and special flags that only the other files have."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        is_special = {token.content: token.special for token in added}
        for token in settings.added:
            if token.content in is_special and is_special[token.content] >= token.special:
                continue
            is_new = self.id_of(token.content) is None
            self._register(token)
            if is_new and self.id_of(token.content) != token.id:
                raise ValueError(
                    f"{self.file} lacks the token {quoted(token.content)}, to which another file "
                    f"of the folder gives the id {token.id}, but its next free id is "
                    f"{self.id_of(token.content)}; the files are of different tokenizers"
                )
            is_special[token.content] = token.special
        for text in (*settings.named.values(), *settings.extra):
            if text and not is_special.get(text) and self.id_of(text) is not None:
                self._register(_AddedToken(content=text, id=-1, special=True))
                is_special[text] = True

    def _register(self, token: _AddedToken) -> None:
        import tokenizers

        flags = {name: getattr(token, name) for name in _FLAGS}
        self._tokenizer.add_tokens([tokenizers.AddedToken(token.content, **flags)])

    def _affixes(self) -> tuple[list[int], list[int]]:
        """The ids that the file's post_processor puts before and after a text.

        `add_bos_token` in tokenizer_config.json is ignored, as in transformers 5.
        """
        with named_errors(self.file, "cannot encode a text"):
            bare = self._tokenizer.encode("a", add_special_tokens=False).ids
            full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise ValueError(f"{self.file}: the post_processor changes a text's own ids")


class SentencePieceVocabulary:
    """tokenizer.model, through sentencepiece, with the special tokens of the files beside it.

    sentencepiece never matches control symbols in a text, so the text is split at them, and
    sentencepiece encodes the parts. It adds a leading space to every text; parts after the first
    get none, unless tokenizer_config.json has `legacy: true` (as in transformers).

    Args:
        model: a serialized ModelProto.
    """

    margin = 0  # the leading space belongs to the first piece, see bytes_of
    utf8_errors = _EACH_BYTE

    def __init__(self, file: Path, settings: Settings, model: bytes) -> None:
        self.file = file
        self._begin, self._bare = _open_sentencepiece(file, model)
        if settings.flag("add_prefix_space") is False:
            self._begin = self._bare
        self._middle = self._begin if settings.flag("legacy") else self._bare
        self._has_prefix = self._begin.normalize("a").startswith(_SPACE)
        own_ids = range(self._begin.get_piece_size())
        with named_errors(file, "is not usable as a sentencepiece model"):
            self._pieces = [self._begin.id_to_piece(i) for i in own_ids]
        controls = {i for i in own_ids if self._begin.is_control(i)}
        added = self._overlay(settings.added)
        self.names = self._named(settings)
        self.special_ids = frozenset(
            controls
            | set(self.names.values())
            | {token.id for token in added if token.special}
            | {self._ids[text] for text in settings.extra if text in self._ids}
        )
        self.prefix = (
            self._ids_named("bos_token") if settings.flag("add_bos_token") is not False else []
        )
        self.suffix = self._ids_named("eos_token") if settings.flag("add_eos_token") else []
        by_content = {token.content: token for token in added}
        for token in self.special_ids:
            piece = self._pieces[token]
            by_content.setdefault(piece, _AddedToken(content=piece, id=token, special=True))
        self._all_marks = _Marks(by_content.values())
        self._plain_marks = _Marks(
            token for token in by_content.values() if token.id not in self.special_ids
        )
        self._overlaid = {token.id for token in by_content.values()}
        self._forgeable = self.special_ids - {self.names.get("unk_token")}
        spellings = "|".join(re.escape(self._pieces[token]) for token in self._forgeable)
        # A lookahead, so that overlapping spellings are found.
        self._spellings = re.compile(f"(?={spellings or '(?!)'})")

    @property
    def size(self) -> int:
        return len(self._pieces)

    def id_of(self, piece: str) -> int | None:
        return self._ids.get(piece)

    def piece_of(self, token: int) -> str:
        return self._pieces[token] if token < len(self._pieces) else ""

    def encode(self, text: str, add_special: bool) -> list[int]:
        ids: list[int] = []
        marks = self._all_marks if add_special else self._plain_marks
        for start, part in marks.split(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            model = self._begin if start == 0 else self._middle
            found = model.encode(part)
            if not (add_special or self._forgeable.isdisjoint(found)):
                found = self._encode_cut(part, model)
            ids += found
        return ids

    def _encode_cut(self, text: str, model: Any) -> list[int]:
        """Encode a text that spells special tokens which sentencepiece would match: user-defined
        symbols. Split after its first character, each is plain text."""
        cuts = [match.start() + 1 for match in self._spellings.finditer(text)]
        parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        rest = (self._bare.encode(part) for part in parts[1:])
        return [*model.encode(parts[0]), *chain.from_iterable(rest)]

    def bytes_of(self, token: int, first: bool) -> bytes:
        piece = self.piece_of(token)
        if token in self._overlaid:
            return piece.encode()
        match = _BYTE_PIECE.fullmatch(piece)
        if match:
            return bytes([int(match[1], 16)])
        if first and self._has_prefix:
            piece = piece.removeprefix(_SPACE)
        return piece.replace(_SPACE, " ").encode()

    def _overlay(self, added: Sequence[_AddedToken]) -> list[_AddedToken]:
        """Add tokens to the model's own pieces, or replace some."""
        for token in added:
            if token.id > len(self._pieces) + len(added):
                raise ValueError(
                    f"{self.file} has {len(self._pieces)} pieces, but another file of the folder "
                    f"gives {quoted(token.content)} the id {token.id}; the files are of different "
                    "tokenizers"
                )
            self._pieces += [""] * (token.id + 1 - len(self._pieces))
            self._pieces[token.id] = token.content
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if piece}
        return list(added)

    def _ids_named(self, name: str) -> list[int]:
        return [self.names[name]] if name in self.names else []

    def _named(self, settings: Settings) -> dict[str, int]:
        model = self._begin
        own = {
            "bos_token": model.bos_id(),
            "eos_token": model.eos_id(),
            "pad_token": model.pad_id(),
            "unk_token": model.unk_id(),
        }
        names = {n: i for n, i in own.items() if i >= 0 and n not in settings.named}
        for name, text in settings.named.items():
            if text in self._ids:
                names[name] = self._ids[text]
        return names


Vocabulary: TypeAlias = TokenizersVocabulary | SentencePieceVocabulary


class _Marks:
    """Finds literally spelt tokens in a text, longest first."""

    def __init__(self, tokens: Iterable[_AddedToken]) -> None:
        longest_first = sorted(tokens, key=lambda token: -len(token.content))
        self._ids = {token.content: token.id for token in reversed(longest_first)}
        # A literal alternative is tried only at its first character, a group everywhere, which
        # would be slow: a vocabulary may have thousands.
        self._of_group = [token.id for token in longest_first if not token.is_plain]
        self._pattern = re.compile("|".join(map(_mark_pattern, longest_first)) or "(?!)")

    def split(self, text: str) -> Iterator[tuple[int, str | int]]:
        """Split a text into parts with their offsets: token ids, and the text between."""
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                yield end, text[end : match.start()]
            group = match.lastindex
            found = self._ids[match[0]] if group is None else self._of_group[group - 1]
            yield match.start(), found
            end = match.end()
        if end < len(text):
            yield end, text[end:]


def _mark_pattern(token: _AddedToken) -> str:
    if token.is_plain:
        return re.escape(token.content)
    pattern = f"({re.escape(token.content)})"
    if token.single_word:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return (r"\s*" if token.lstrip else "") + pattern + (r"\s*" if token.rstrip else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByteRule:
    """tokenizer.json's `decoder` as a rule from token to bytes.

    It covers the decoders of published language models: byte-level BPE, and sentencepiece's visible
    spaces and byte tokens with or without a leading space.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    bare_start: str = ""  # a character stripped from the first token
    margin: int = 0

    @classmethod
    def read(cls, decoder: Mapping[str, Any] | None, file: Path) -> _ByteRule:
        """Parse a decoder; ValueError names the file and an unsupported kind."""
        steps = [] if decoder is None else decoder.get("decoders", [decoder])
        found: dict[str, Any] = {"replace": ()}
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    found["byte_level"] = True
                case {"type": "ByteFallback"}:
                    found["byte_fallback"] = True
                case {"type": "Fuse"}:
                    found["fused"] = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    found["replace"] += ((old, new),)
                case {"type": "Metaspace", "replacement": space, "prepend_scheme": scheme}:
                    found["replace"] += ((space, " "),)
                    found["bare_start"] = "" if scheme == "never" else space
                case {"type": "Strip", "content": " ", "start": margin, "stop": 0} if (
                    "fused" in found
                ):
                    found["margin"] = margin
                case _:
                    raise ValueError(f"{file}: exkv cannot decode with {quoted(step)}")
        if not steps or (found.get("byte_level") and len(steps) > 1):
            raise ValueError(f"{file}: exkv cannot decode with {quoted(decoder)}")
        found.pop("fused", None)
        return cls(**found)

    def apply(self, piece: str, is_added: bool, is_first: bool) -> bytes:
        """A token's bytes; added tokens are plain text even in a byte-level vocabulary."""
        if self.byte_level:
            known = not is_added and all(char in _BYTE_OF_CHAR for char in piece)
            return bytes(_BYTE_OF_CHAR[char] for char in piece) if known else piece.encode()
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if is_first and self.bare_start:
            piece = piece.replace(self.bare_start, "")
        for old, new in self.replace:
            piece = piece.replace(old, new)
        return piece.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _AddedToken:
    """A token that is matched literally; field names as in tokenizer_config.json."""

    content: str
    id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.content, str) or not self.content:
            raise ValueError(f"a token's content is {quoted(self.content)}; it must be a text")

    @property
    def is_plain(self) -> bool:
        """Whether it matches wherever it is spelt, without anything around it."""
        return not (self.lstrip or self.rstrip or self.single_word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in the JSON files beside the vocabulary.

    `named` maps "bos_token" and so on to their spelling, None for an explicit null.
    """

    tokenizer: dict[str, Any]
    model: dict[str, Any]
    named: dict[str, str | None]
    extra: tuple[str, ...]
    added: tuple[_AddedToken, ...]
    eos_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> Settings:
        tokenizer = _read_json(folder / "tokenizer_config.json")
        model = _read_json(folder / "config.json")
        # tokenizer_config.json is the newer format, and takes precedence.
        tokens = {**_read_json(folder / "special_tokens_map.json"), **tokenizer}
        extra = [
            *_listed(tokens.get("additional_special_tokens")),
            *_listed(tokens.get("extra_special_tokens")),
        ]
        eos = [
            *_listed(_read_json(folder / "generation_config.json").get("eos_token_id")),
            *_listed(model.get("eos_token_id")),
        ]
        return cls(
            tokenizer=tokenizer,
            model=model,
            named={name: _spelling(tokens[name]) for name in _NAMED if name in tokens},
            extra=tuple(text for text in map(_spelling, extra) if text),
            added=_added_tokens(folder, tokenizer),
            eos_ids=tuple(token for token in eos if is_int(token) and token >= 0),
        )

    def flag(self, name: str) -> bool | None:
        """A flag of tokenizer_config.json; None if it isn't set."""
        return self.tokenizer.get(name)

    @property
    def model_vocab_size(self) -> int:
        size = self.model.get("vocab_size")
        return size if isinstance(size, int) else 0

    def model_id(self, name: str) -> int | None:
        """config.json's id for "bos_token" and so on."""
        token = self.model.get(f"{name}_id")
        return token if isinstance(token, int) and token >= 0 else None


def _added_tokens(folder: Path, tokenizer: Mapping[str, Any]) -> tuple[_AddedToken, ...]:
    """The tokens of added_tokens.json and tokenizer_config.json, by id; the latter win."""
    file = folder / "added_tokens.json"
    found = {}
    try:
        for content, token in _read_json(file).items():
            added = _AddedToken(content=content, id=_token_id(token))
            found[added.id] = added
        file = folder / "tokenizer_config.json"
        for token, entry in (tokenizer.get("added_tokens_decoder") or {}).items():
            flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
            added = _AddedToken(content=entry["content"], id=_token_id(token), **flags)
            found[added.id] = added
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = shortened(repr(error))
        raise ValueError(f"{file}: an added token is malformed: {reason}") from error
    return tuple(found[token] for token in sorted(found))


def _token_id(value: Any) -> int:
    """A token id, from a number or a key in digits; ValueError otherwise."""
    token = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not is_int(token) or not 0 <= token < _MOST_IDS:
        raise ValueError(f"{quoted(value)} is not a token id")
    return token


def open_vocabulary(folder: Path, settings: Settings) -> Vocabulary:
    if (folder / JSON_FILE).exists():
        file = folder / JSON_FILE
        return TokenizersVocabulary(file, settings, lambda: _open_tokenizers(file))
    if (folder / SENTENCEPIECE_FILE).exists():
        file = folder / SENTENCEPIECE_FILE
        return SentencePieceVocabulary(file, settings, read_file(file))
    raise FileNotFoundError(
        f"{folder} has no tokenizer: looked for {JSON_FILE} and {SENTENCEPIECE_FILE}. Download "
        "one of them with the model; from other formats, transformers' AutoTokenizer writes "
        f"{JSON_FILE} with save_pretrained()"
    )


def _open_tokenizers(file: Path) -> Any:
    """Open a tokenizer.json, without the truncation and padding that a training script may have
    left."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_buffer(read_file(file))
    largest = max(tokenizer.get_vocab(True).values(), default=0)
    if largest >= _MOST_IDS:  # the library iterates over all ids below it
        raise ValueError(f"a token has the id {largest}; at most {_MOST_IDS - 1}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_patterns(tokenizer)
    return tokenizer


def _check_patterns(tokenizer: Any) -> None:
    """Make regular expressions fail here if they backtrack endlessly: the library stops a match
    after ten million retries, most of a second, and a text has many matches."""
    for part in _REPEATED:
        text = f"x{part * 64}\0{string.printable}"  # with the characters a match may need
        if tokenizer.normalizer is not None:
            tokenizer.normalizer.normalize_str(text)
        if tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer.pre_tokenize_str(text)


@contextlib.contextmanager
def named_errors(file: Path, problem: str) -> Iterator[None]:
    """Convert a library's errors to ValueErrors that name the file; tokenizers' panics are not
    Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        if str(error).startswith(str(file)):
            raise
        raise ValueError(f"{file} {problem}: {shortened(str(error))}") from error


def _open_sentencepiece(file: Path, model: bytes) -> tuple[Any, Any]:
    """Two processors: the file's own, and one that adds no leading space."""
    from sentencepiece import SentencePieceProcessor

    # In a serialized protobuf the last value of a repeated field wins: this is
    # normalizer_spec (3) { add_dummy_prefix (3): false } of sentencepiece_model.proto.
    without_prefix = b"\x1a\x02\x18\x00"
    try:
        return (
            SentencePieceProcessor(model_proto=model),
            SentencePieceProcessor(model_proto=model + without_prefix),
        )
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(
            f"{file} is not a sentencepiece model ({shortened(str(error))}). If it is tiktoken's, "
            f"as in Llama 3's original folder, use the {JSON_FILE} of the Hugging Face folder"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file, or {} if there is none."""
    return parse_json_object(read_file(file), file, repeats=True) if file.exists() else {}


def _spelling(token: Any) -> str | None:
    """The text of a token given as "</s>", {"content": "</s>", ...}, or null."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _listed(value: Any) -> list[Any]:
    """A list of values, from one value, a list, a mapping's values, or None."""
    if value is None:
        return []
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _char_bytes() -> dict[str, int]:
    """The characters that represent bytes in byte-level BPE (GPT-2): printable bytes represent
    themselves, the others are code points from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _each_byte_error(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD for each invalid byte, as in sentencepiece; Python's "replace" merges some."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


_BYTE_OF_CHAR = _char_bytes()
codecs.register_error(_EACH_BYTE, _each_byte_error)
