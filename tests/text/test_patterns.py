"""Regular expressions of a tokenizer.json: those of tokenizers in use pass, and those that the
library would run for minutes are refused before it sees them."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers
from work import function_calls

from exkv import Tokenizer
from exkv.text.patterns import UnboundedPattern, check_pattern, patterns_of

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
FIRST = r"[^\r\n\p{L}\p{N}]?"
#: As tokenizers in use cut texts.
IN_USE = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": rf"{ENDINGS}|{FIRST}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "Qwen 2": rf"{ENDINGS}|{FIRST}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "tekken": rf"{FIRST}{UPPER}*{LOWER}+|{FIRST}{UPPER}+{LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    "o200k": rf"{FIRST}{UPPER}*{LOWER}+{ENDINGS}?|{FIRST}{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    "Phi": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "Gemma": " ",
    "Gemma 3": r" {2,}|[^\n]+|[\n]+",
    "EXAONE": rf"{FIRST}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{SPACES}",
    "Kimi": rf"[\p{{Han}}]+|{FIRST}[\p{{Lu}}\p{{Lo}}&&[^\p{{Han}}]]*"
    rf"[\p{{Ll}}\p{{Lo}}&&[^\p{{Han}}]]+{ENDINGS}?|{SPACES}",
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
    "Han": "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    "BLOOM": " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",
    "two kinds by turns, each once at least": "(?:[a-z]+[0-9]+)*;",
    "digits from the right": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|(?=(\d{3})+(?!\d))",
}
SLOW = [
    "(a+)+$",
    "(?:a|a)*$",
    "(?:a?){22}$",
    "a*a*a*$",
    "((a{1,1000}){1,1000}){1,1000}$",
    r"(\w|\d)*$",
    r"(\s*)*x",
    "x(?=(a+)+b)",
    "(?:[^,]*,?)*;",
    "(?:(?:ab)+|(?:abab)+)*$",
    r"([\p{L}a]|\p{Latin})+!",
    r"(?i)(a|A)+!",
    r"((?:a|a)*$)?b",
]


@pytest.mark.parametrize("name", IN_USE)
def test_patterns_of_tokenizers_in_use_pass(name):
    Regex(IN_USE[name])  # which the library reads, too
    check_pattern(IN_USE[name])


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_of_many_ways_are_refused(pattern):
    def refused() -> None:
        with pytest.raises(UnboundedPattern, match="ways|can be empty"):
            check_pattern(pattern)

    assert function_calls(refused) < 20_000


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"(a)\1", "depends on the text"),
        ("(" * 60 + ")" * 60, "nested"),
        ("[" * 60 + "a" + "]" * 60, "nested"),
        ("a" + "*" * 200, "nested"),
        ("(" * 40 + ")" + "{8})" * 39 + "{8}", "more than 512"),
        ("a|" * 3000, "more than 512"),
        ("a" * 9000, "characters"),
        ("[a", "ends too early"),
        ("(?<a", "unknown group"),
        ("a)", "closes no group"),
    ],
)
def test_patterns_that_can_not_be_told_are_refused(pattern, said):
    with pytest.raises(UnboundedPattern, match=said):
        check_pattern(pattern)


ATOMS = st.sampled_from(["a", "b", "[ab]", ".", r"\w", "(?:ab)", "[^b]"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(
            inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,30}", "*+", "+?"])
        ).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: f"(?:{'|'.join(each)})"),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.sampled_from(["$", "!", r"(?=c)"]))
@settings(max_examples=150, deadline=None)
def test_what_passes_is_no_trouble_to_the_library(pattern, ending):
    pattern += ending
    try:
        check_pattern(pattern)
    except UnboundedPattern:
        return
    splitting = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in ("a" * 60, "ab" * 30, "b" * 60, "aab" * 20, "abb" * 20):
        splitting.pre_tokenize_str(f"{text}?")  # panics where it gives up


def with_pattern(folder, pattern: str, part: str) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    replace = normalizers.Replace(Regex(pattern), "b")
    if part == "in a sequence":
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(), split])
    if part == "normalizer":
        tokenizer.normalizer = replace
    else:
        tokenizer.pre_tokenizer = split
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("part", ["pre_tokenizer", "in a sequence", "normalizer", "escaped"])
def test_a_tokenizer_with_such_a_pattern_is_refused_by_name(tmp_path, part):
    """Each of these words takes the library a third of a second."""
    with_pattern(tmp_path, "(?:a|a)*$", part)
    if part == "escaped":
        file = tmp_path / "tokenizer.json"
        file.write_text(file.read_text().replace('"Regex"', r'"\u0052egex"'))
    with pytest.raises(ValueError, match=r"tokenizer\.json .*pattern '\(\?:a\|a\)\*\$' is refused"):
        Tokenizer(tmp_path).encode(("a" * 20 + "!") * 100)


def test_patterns_are_found_without_reading_the_rest():
    held = {"a": {"Regex": 'a"\\"b\\'}, "Regex": 3, "vocab": {"x": "Regex"}, "b": [{"Regex": "c"}]}
    assert list(patterns_of(json.dumps(held).encode())) == ['a"\\"b\\', "c"]
    many = json.dumps([{"Regex": "a"}] * 200).encode()
    with pytest.raises(ValueError, match="more than 100 regular expressions"):
        list(patterns_of(many))
