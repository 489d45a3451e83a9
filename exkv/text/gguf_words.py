"""The tokenizer of a model's folder as metadata of a GGUF file: the inverse of ``gguf.py``.

Byte-level BPE of tokenizer.json, and BPE of tokenizer.model (sentencepiece). How text is split
before merges is compared with the known pre-tokenizers on a text (``SAMPLE``), which also has to
get the same tokens by the metadata as by the folder.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .gguf import BYTE, CONTROL, KEY, NAMED, RULES, TEMPLATE, UNUSED, USER_DEFINED, PreTokenizer
from .tokenizer import Tokenizer
from .vocabulary import JSON_FILE, SENTENCEPIECE_FILE, Settings, read_file

#: Words, contractions, numbers, runs of spaces, punctuation, and scripts that rules treat apart.
SAMPLE = (
    "Hello world!  It's I'LL we've can't 'Tis 3 42 1234567 0x1F 3.14 1,000,000\n\n\t if (a != b) "
    "{\r\n    return x**2 + y_1; // ok?\n  } \u00e9t\u00e9 na\u00efve Stra\u00dfe \u0130stanbul "
    "camelCaseWord HTTPServer \u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 "
    "\u03b1\u03b2\u03b3 "
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\u0645\u0631\u062d\u0628\u0627 \u2026 \u201cquotes\u201d \u2014 e\u0301 "
    "\U0001f600\U0001f1e9\U0001f1ea ---- ==== ``` $100 50% a.b.c/d/e\n\n\n\n      end   "
)
_NORMAL = 1
_BPE = 2


def tokenizer_metadata(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The metadata of a folder's tokenizer and chat templates.

    Args:
        vocab_size: rows of the embedding; tokens that the tokenizer lacks are marked as unused.

    Raises:
        FileNotFoundError: the folder has no tokenizer.
        ValueError: it is of a kind that can't be written.
    """
    tokenizer = Tokenizer(folder)
    if (folder / JSON_FILE).exists():
        found = _byte_level(folder / JSON_FILE)
    else:
        found = _sentencepiece(folder / SENTENCEPIECE_FILE, Settings.read(folder))
    tokens, types = found["tokens"], found["token_type"]
    if len(tokens) > vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {len(tokens)} tokens, and the model {vocab_size}: "
            "download the folder again"
        )
    for token in range(len(tokens), vocab_size):
        tokens.append(f"[PAD{token}]")
        types.append(UNUSED)
    if "scores" in found:
        found["scores"] += [-1000.0] * (vocab_size - len(found["scores"]))
    for name, key in NAMED.items():
        if (special := getattr(tokenizer, f"{name}_id", None)) is not None:
            found[f"{key}_token_id"] = special
    ends = dict.fromkeys([found.get("eos_token_id"), *tokenizer.eos_ids])
    named = zip(("eos", "eot", "eom"), [end for end in ends if end is not None], strict=False)
    found |= {f"{key}_token_id": token for key, token in named}
    around = tokenizer.encode("a")
    found["add_bos_token"] = bool(around) and around[0] == tokenizer.bos_id
    found["add_eos_token"] = len(around) > 1 and around[-1] in tokenizer.eos_ids
    made = {f"{KEY}{key}": value for key, value in found.items()}
    for name, template in tokenizer.chat_templates.items():
        made[TEMPLATE if name == "default" else f"{TEMPLATE}.{name}"] = template.source
    return made


def check_same(folder: Path, file: Path) -> None:
    """ValueError unless a text becomes the same tokens by the file as by the folder."""
    expected, found = (Tokenizer(each) for each in (folder, file))
    if expected.encode(SAMPLE) != found.encode(SAMPLE):
        raise ValueError(
            f"{folder}: exkv can't represent its tokenizer in a GGUF file: a text would become "
            "other tokens. Convert the folder by llama.cpp's convert_hf_to_gguf.py --outtype bf16, "
            "and give the file that it writes"
        )


def _byte_level(file: Path) -> dict[str, Any]:
    """Of a tokenizer.json."""
    from tokenizers import Tokenizer as Original

    values = json.loads(read_file(file))
    model, decoder = values["model"], values.get("decoder") or {}
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(decoder):
        raise ValueError(
            f"{file}: a GGUF file made by exkv has byte-level BPE or the BPE of sentencepiece "
            f"({SENTENCEPIECE_FILE}), and this is another kind. Convert the folder by llama.cpp's "
            "convert_hf_to_gguf.py --outtype bf16, and give the file that it writes"
        )
    original = Original.from_file(str(file))
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    ids = {token: (id, _NORMAL) for token, id in model["vocab"].items()}
    for each in values.get("added_tokens") or ():
        ids[each["content"]] = each["id"], CONTROL if each["special"] else USER_DEFINED
    pre = _named_rule(original, bool(model.get("ignore_merges")), file)
    return {"model": "gpt2", "pre": pre, **_table(ids), "merges": merges}


def _table(ids: Mapping[str, tuple[int, int]]) -> dict[str, list[Any]]:
    """Token -> id and type, as lists by id; ids without a token are marked as unused."""
    size = 1 + max(id for id, _ in ids.values())
    tokens, types = [f"[PAD{id}]" for id in range(size)], [UNUSED] * size
    for token, (id, type) in ids.items():
        tokens[id], types[id] = token, type
    return {"tokens": tokens, "token_type": types}


def _named_rule(original: Any, ignores_merges: bool, file: Path) -> str:
    """The name of the known pre-tokenizer that splits as a tokenizer does."""
    text = original.normalizer.normalize_str(SAMPLE) if original.normalizer else SAMPLE
    pieces = [piece for piece, _ in original.pre_tokenizer.pre_tokenize_str(text)]
    for rule, names in RULES:
        if rule.ignore_merges == ignores_merges and _pieces(rule) == pieces:
            return names.split()[0]
    raise ValueError(
        f"{file}: it splits text as none of the pre-tokenizers that GGUF has names for and exkv "
        "knows. Convert the folder by llama.cpp's convert_hf_to_gguf.py --outtype bf16, and give "
        "the file that it writes"
    )


def _pieces(rule: PreTokenizer) -> list[str]:
    from tokenizers import normalizers

    text = normalizers.NFC().normalize_str(SAMPLE) if rule.nfc else SAMPLE
    return [piece for piece, _ in rule.splitter().pre_tokenize_str(text)]


def _sentencepiece(file: Path, settings: Settings) -> dict[str, Any]:
    """Of a tokenizer.model: a ModelProto (sentencepiece_model.proto)."""
    ids: dict[str, tuple[int, int]] = {}
    scores: list[float] = []
    trainer, normalizer = dict[int, Any](), dict[int, Any]()
    for number, data in _fields(read_file(file)):
        if number == 1:
            piece = dict(_fields(data))
            ids[piece[1].decode()] = len(scores), piece.get(3, _NORMAL)
            scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
        elif number == 2:
            trainer = dict(_fields(data))
        elif number == 3:
            normalizer = dict(_fields(data))
    if trainer.get(3, 1) != _BPE:
        raise ValueError(
            f"{file}: a GGUF file made by exkv has sentencepiece's BPE, and this is another kind. "
            "Convert the folder by llama.cpp's convert_hf_to_gguf.py --outtype bf16, and give the "
            "file that it writes"
        )
    for added in settings.added:
        known = ids.get(added.content, (added.id, _NORMAL))[1]
        if known in (_NORMAL, UNUSED, BYTE):
            ids[added.content] = added.id, CONTROL if added.special else USER_DEFINED
    made = _table(ids)
    scores += [-1000.0] * (len(made["tokens"]) - len(scores))
    prefix = bool(normalizer.get(3, 1))
    return {"model": "llama", **made, "scores": scores, "add_space_prefix": prefix}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: number, and an integer or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            size, at = _varint(data, at)
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
