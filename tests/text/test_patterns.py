"""Regular expressions of a tokenizer.json: those in use are accepted, those on which the library
backtracks endlessly are refused when the file is opened."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from exkv import Tokenizer
from exkv.text.gguf import PRE_TOKENIZERS

SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
#: Patterns of tokenizers in use, besides those that GGUF files name.
IN_USE = [
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r" {2,}|[^\n]+|[\n]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{SPACES}",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|(?=(\d{3})+(?!\d))",
    *sorted({pattern for rule in PRE_TOKENIZERS.values() for pattern in rule.patterns}),
]
SLOW = [
    "(a+)+$",
    "(?:a|a)*$",
    "((a{1,1000}){1,1000}){1,1000}$",
    r"(\w|\d)*$",
    r"(\s*)*x",
    "x(?=(a+)+b)",
    "(?:[^,]*,?)*;",
    "(?:(?:ab)+|(?:abab)+)*$",
    r"([\p{L}a]|\p{Latin})+!",
    r"(?i)(a|A)+!",
]


def with_pattern(folder, pattern: str, part: str = "pre_tokenizer") -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    if part == "normalizer":
        tokenizer.normalizer = normalizers.Replace(Regex(pattern), "b")
    elif part == "in a sequence":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), split])
    else:
        tokenizer.pre_tokenizer = split
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("pattern", IN_USE)
def test_patterns_in_use_are_accepted(tmp_path, pattern):
    with_pattern(tmp_path, pattern)
    Tokenizer(tmp_path).encode("a" * 500)


@pytest.mark.parametrize("pattern", SLOW)
def test_backtracking_patterns_are_refused(tmp_path, pattern):
    with_pattern(tmp_path, pattern)
    with pytest.raises(ValueError, match=r"tokenizer\.json .*retry-limit"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("part", ["in a sequence", "normalizer"])
def test_backtracking_patterns_are_refused_in_any_part(tmp_path, part):
    with_pattern(tmp_path, "(?:a|a)*$", part)
    with pytest.raises(ValueError, match=r"tokenizer\.json .*retry-limit"):
        Tokenizer(tmp_path)
