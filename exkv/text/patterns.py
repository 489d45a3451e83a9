"""Checks the regular expressions of a tokenizer.json before the library runs them.

The library's engine (Oniguruma) backtracks: where a pattern fails, it tries every other way to
match, so ``(a+)+$`` takes time that doubles with each letter. Here a pattern is converted to its
position automaton (Glushkov 1961), in which the number of ways to match a text is a product of
matrices. A pattern that can match 64 characters in more than a thousand ways is refused; those of
real tokenizers have one or two, or one per character.

This is a heuristic bound, not a proof: the text with the most ways is searched greedily, and a
pattern with few ways still takes quadratic time in a word's length where it fails.
``vocabulary.py`` calls it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np

#: Length of the texts tried, and the most ways in which a pattern may match them.
_LENGTH, _MOST_WAYS = 64, 1000
#: Characters and classes of a pattern with its counted repetitions expanded.
_MOST_POSITIONS = 512
#: A counted repetition of more is treated as unbounded.
_MOST_COPIES = 8
#: Nesting depth of groups, sets and repetitions.
_MOST_NESTED = 50
#: Characters of a pattern, and patterns of a file; more than any real tokenizer has.
_MOST_CHARACTERS, _MOST_PATTERNS = 1 << 13, 100

#: A key "Regex" before a string; it may be written with escapes.
_SPELT_REGEX = "".join(rf"(?:{c}|\\u00{ord(c):02x})" for c in "Regex")
_KEY = re.compile(rf'"{_SPELT_REGEX}"\s*:\s*(?=")')


class UnboundedPattern(ValueError):
    """A pattern that may take unbounded time, or that can't be analyzed."""


def patterns_of(file: bytes) -> Iterator[str]:
    """Extract the regular expressions from a tokenizer.json, without parsing the rest.

    Raises ValueError for one that is not a JSON string.
    """
    text = file.decode("utf-8", "replace")
    for count, match in enumerate(_KEY.finditer(text)):
        if count == _MOST_PATTERNS:
            raise ValueError(f"there are more than {_MOST_PATTERNS} regular expressions")
        yield json.JSONDecoder().raw_decode(text, match.end())[0]


def check_pattern(pattern: str) -> None:
    """Raise UnboundedPattern if a text can be matched in too many ways."""
    if len(pattern) > _MOST_CHARACTERS:
        raise UnboundedPattern(f"it has more than {_MOST_CHARACTERS:,} characters")
    parser = _Parser(pattern)
    for tree in parser.parse():
        if _Automaton(tree).most_ways({*_samples(), *parser.literals}) > _MOST_WAYS:
            raise UnboundedPattern(
                f"it can match {_LENGTH} characters in more than {_MOST_WAYS:,} ways, so a text on "
                "which it fails takes unbounded time: nested repetitions cause that"
            )


# Sets of characters -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chars:
    """A set of characters: those that may be in it, and those that are in it whatever an unknown
    property means (a script's name); and the single character, if it is a literal."""

    may: Callable[[str], bool]
    must: Callable[[str], bool]
    literal: str = ""

    @classmethod
    def of(cls, test: Callable[[str], bool], literal: str = "") -> _Chars:
        return cls(test, test, literal)

    def negated(self) -> _Chars:
        return _Chars(lambda c: not self.must(c), lambda c: not self.may(c))

    @classmethod
    def any_of(cls, several: Sequence[_Chars]) -> _Chars:
        return cls(
            lambda c: any(each.may(c) for each in several),
            lambda c: any(each.must(c) for each in several),
        )

    def met(self, other: _Chars) -> _Chars:
        return _Chars(
            lambda c: self.may(c) and other.may(c), lambda c: self.must(c) and other.must(c)
        )


_ANY = _Chars.of(lambda c: True)
_UNKNOWN = _Chars(lambda c: True, lambda c: False)
_NEWLINES = "\n\v\f\r\x85\u2028\u2029"
_SHORT = {
    "s": _Chars.of(str.isspace),
    "d": _Chars.of(lambda c: unicodedata.category(c) == "Nd"),
    "w": _Chars.of(lambda c: unicodedata.category(c)[0] in "LMN" or c == "_"),
    "h": _Chars.of(lambda c: c in "0123456789abcdefABCDEF"),
    "R": _Chars.of(lambda c: c in _NEWLINES),
    "N": _Chars.of(lambda c: c != "\n"),
    "O": _ANY,
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_CATEGORIES = frozenset(["L", "M", "N", "P", "S", "Z", "C"]) | {
    unicodedata.category(chr(code)) for code in range(0x3100)
}


def _property(name: str) -> _Chars:
    """``\\p{name}``: general categories are known, scripts and others are not."""
    name, negated = name.removeprefix("^"), name.startswith("^")
    found = _UNKNOWN
    if name in _CATEGORIES:
        found = _Chars.of(lambda c: unicodedata.category(c).startswith(name))
    return found.negated() if negated else found


@cache
def _samples() -> tuple[str, ...]:
    """ASCII, and a few characters of each category."""
    seen: dict[str, list[str]] = {}
    for code in range(0x3100):
        seen.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    few = {char for chars in seen.values() for char in chars[-2:]}
    return tuple(sorted({*map(chr, range(128)), *few, *_NEWLINES, "\u4e2d", "\U0001f600"}))


# Parser -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    body: _Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Assertion:
    """Matches the empty string, and may fail."""


_Node: TypeAlias = _Chars | _Sequence | _Either | _Repeat | _Assertion
_NOTHING = _Sequence(())
_COUNTED = re.compile(r"\{(\d*)(,?)(\d*)\}")
_SPELT = re.compile(r"x\{([0-9A-Fa-f]+)\}|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|(0[0-7]{0,2})")
_GROUP = re.compile(
    r"\?(?:(?P<aside>=|!|<=|<!)|#(?P<comment>[^)]*)\)|(?P<plain>:|>|<[^\W\d]\w*>|'[^\W\d]\w*')|"
    r"(?P<flags>[imxadu]*(?:-[imx]+)?)(?P<end>[:)]))"
)


class _Parser:
    """Parses Oniguruma's syntax to trees: the pattern's, and one for each lookaround, which is
    matched by itself. All letters match both cases."""

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.nested = 0
        self.asides: list[_Node] = []
        self.literals: set[str] = set()

    def parse(self) -> list[_Node]:
        tree = self._alternatives()
        if self.at < len(self.text):
            raise UnboundedPattern(f"a ')' at {self.at} closes no group")
        return [tree, *self.asides]

    def _peek(self, ahead: int = 0) -> str:
        return self.text[self.at + ahead : self.at + ahead + 1]

    def _next(self, expected: str = "") -> str:
        """Consume the next character; "" if it isn't one of ``expected``."""
        char = self._peek()
        if expected and char not in expected:
            return ""
        self.at += 1
        if not char:
            raise UnboundedPattern("it ends too early")
        return char

    def _alternatives(self) -> _Node:
        found = [self._sequence()]
        while self._peek() == "|":
            self.at += 1
            found.append(self._sequence())
        return found[0] if len(found) == 1 else _Either(tuple(found))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return _Sequence(tuple(parts))

    def _repeated(self, node: _Node) -> _Node:
        """An atom with its quantifiers."""
        depth = 0
        while char := self._peek():
            counted = _COUNTED.match(self.text, self.at)
            if char in "*+?":
                self.at += 1
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
            elif counted and (counted[1] or counted[3]):
                self.at = counted.end()
                least = int(counted[1] or 0)
                most = least if not counted[2] else int(counted[3]) if counted[3] else None
            else:
                break
            node = _Repeat(node, least, most)
            self._nest(1)
            depth += 1
            # Lazy, or possessive, which only reduces the ways; a count is never possessive.
            follows = self._peek()
            if follows == "?" or (follows == "+" and char in "*+?"):
                self.at += 1
        self._nest(-depth)
        return node

    def _atom(self) -> _Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._set()
        if char == "\\":
            return self._escape()
        if char == ".":
            return _SHORT["N"]
        return _Assertion() if char in "^$" else self._letter(char)

    def _group(self) -> _Node:
        match = _GROUP.match(self.text, self.at)
        if match is None and self._peek() in ("?", "*"):
            raise UnboundedPattern(f"unknown group {self.text[self.at - 1 : self.at + 5]!r}")
        self.at = match.end() if match else self.at
        if match and (match["comment"] is not None or match["end"] == ")"):
            return _NOTHING  # a comment, or flags for what follows
        self._nest(1)
        body = self._alternatives()
        self._nest(-1)
        if not self._next(")"):
            raise UnboundedPattern("a '(' is never closed")
        if match and match["aside"]:
            self.asides.append(body)
            return _Assertion()
        return body

    def _escape(self) -> _Node:
        """An escape outside of a set, which may be an assertion."""
        char = self._peek()
        if char in ("b", "B", "A", "z", "Z", "G", "K", "y", "Y"):
            self.at += 1
            return _NOTHING if char == "K" else _Assertion()
        if char in ("k", "g", "X", "1", "2", "3", "4", "5", "6", "7", "8", "9"):
            raise UnboundedPattern(f"what \\{char} matches depends on the text")
        return self._escaped_chars()

    def _escaped_chars(self) -> _Chars:
        if spelt := _SPELT.match(self.text, self.at):
            self.at = spelt.end()
            code = int(spelt[4], 8) if spelt[4] else int(spelt[1] or spelt[2] or spelt[3], 16)
            return self._letter(chr(min(code, 0x10FFFF)))
        char = self._next()
        if char in ("p", "P") and self._next("{"):
            end = self.text.find("}", self.at)
            name, self.at = self.text[self.at : end], end + 1
            if end < 0:
                raise UnboundedPattern("a \\p{ is never closed")
            return _property(name).negated() if char == "P" else _property(name)
        if char in _SHORT:
            return _SHORT[char]
        if char.lower() in _SHORT and char.isupper():
            return _SHORT[char.lower()].negated()
        return self._letter(_CONTROLS.get(char, char))

    def _letter(self, char: str) -> _Chars:
        both = {char, char.lower(), char.upper()}
        self.literals.add(char)
        return _Chars.of(both.__contains__, char)

    def _set(self) -> _Chars:
        """A set, after its opening bracket."""
        negated = self._peek() == "^"
        self.at += negated
        meets: list[list[_Chars]] = [[]]
        start = self.at
        self._nest(1)
        while self._peek() != "]" or self.at == start:  # a leading ] is a literal
            if self.text.startswith("&&", self.at):
                self.at += 2
                meets.append([])
            else:
                meets[-1].append(self._set_item())
        self._nest(-1)
        self.at += 1
        found = _Chars.any_of(meets[0])
        for others in meets[1:_MOST_NESTED]:
            found = found.met(_Chars.any_of(others))
        return found.negated() if negated else found

    def _nest(self, deeper: int) -> None:
        self.nested += deeper
        if self.nested > _MOST_NESTED:
            raise UnboundedPattern(f"it is nested more than {_MOST_NESTED} deep")

    def _set_item(self) -> _Chars:
        char = self._next()
        if char == "[":
            if self._peek() == ":":
                end = self.text.find(":]", self.at)
                if end > 0:
                    self.at = end + 2
                    return _UNKNOWN
            return self._set()
        found = self._escaped_chars() if char == "\\" else self._letter(char)
        if self._peek() != "-" or self._peek(1) in ("]", ""):
            return found
        self.at += 1
        last = self._escaped_chars() if (char := self._next()) == "\\" else self._letter(char)
        low, high = found.literal, last.literal
        if not low or not high:
            return _UNKNOWN  # a range between classes
        return _Chars.of(lambda c: any(low <= each <= high for each in (c, c.lower(), c.upper())))


# Ways to match a text ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A subpattern: the number of ways to match the empty string, and to begin and to end at each
    position; and whether it can be empty, and the positions where it can end, anywhere in a text
    (an assertion such as ``$`` may fail)."""

    empty: int
    first: Mapping[int, int]
    last: Mapping[int, int]
    surely_empty: bool = False
    sure: frozenset[int] = frozenset()


_NO_PART = _Part(1, {}, {}, surely_empty=True)


class _Automaton:
    """The positions of a pattern, and in how many ways each may follow another."""

    def __init__(self, tree: _Node) -> None:
        self.visited = 0
        self.chars: list[_Chars] = []
        self.follows: Counter[tuple[int, int]] = Counter()
        self.whole = self._part(tree)

    def most_ways(self, samples: Iterable[str]) -> float:
        """The most ways found to match a text of :data:`_LENGTH` characters, from the pattern's
        start or any position, ending where the pattern can't end: elsewhere the engine succeeds and
        doesn't backtrack."""
        size = len(self.chars)
        if size == 0:
            return 1.0
        step = np.zeros((size, size))
        for (before, after), ways in self.follows.items():
            step[before, after] = ways
        step[:, sorted(self.whole.sure)] = 0
        reads = np.unique([[float(c.may(char)) for c in self.chars] for char in samples], axis=0)
        # Greedy by the ways so far, or by the ways to continue.
        followers = step.sum(1)
        return max(self._greedily(step, reads, worth) for worth in (followers * 0 + 1, followers))

    def _greedily(self, step: np.ndarray, reads: np.ndarray, worth: np.ndarray) -> float:
        """:meth:`most_ways` for the text that greedily maximizes the positions' total worth.

        Args:
            step: ways from position to position (P, P).
            reads: positions that match each sample character (C, P).
        """
        size = len(step)
        ways = np.eye(size + 1, size)
        for position, count in self.whole.first.items():
            ways[size, position] = count
        most = 0.0
        for _ in range(_LENGTH):
            ways = ways * reads[((ways * worth) @ reads.T).argmax(1)]
            most = max(most, float(ways.sum(1).max()))
            if most > _MOST_WAYS:
                break
            ways = ways @ step
        return most

    def _part(self, node: _Node) -> _Part:
        self.visited += 1
        if self.visited > _MOST_POSITIONS * 8 or len(self.chars) > _MOST_POSITIONS:
            raise UnboundedPattern(f"it has more than {_MOST_POSITIONS} characters and classes")
        match node:
            case _Chars():
                return self._position(node)
            case _Sequence(parts):
                found = _NO_PART
                for part in parts:
                    found = self._joined(found, self._part(part))
                return found
            case _Either(parts):
                return _either([self._part(part) for part in parts])
            case _Repeat():
                return self._repeated(node)
            case _Assertion():
                return _Part(1, {}, {})

    def _position(self, chars: _Chars) -> _Part:
        self.chars.append(chars)
        here = {len(self.chars) - 1: 1}
        return _Part(0, here, here, sure=frozenset(here))

    def _joined(self, left: _Part, right: _Part) -> _Part:
        """The concatenation."""
        self._follow(left.last, right.first)
        return _Part(
            _few(left.empty * right.empty),
            {**left.first, **_times(right.first, left.empty)},
            {**right.last, **_times(left.last, right.empty)},
            left.surely_empty and right.surely_empty,
            right.sure | left.sure if right.surely_empty else right.sure,
        )

    def _repeated(self, node: _Repeat) -> _Part:
        least, most = node.least, node.most
        if max(least, most or 0) > _MOST_COPIES:
            if self._part(node.body).empty:
                raise UnboundedPattern(f"it repeats a part that can be empty {most or least} times")
            least, most = min(least, 1), None
        found = _NO_PART
        for copy in range(max(least, 1) if most is None else most):
            body = self._part(node.body)
            if copy >= least:
                body = _either([body, _NO_PART])
            if most is None and copy >= least - 1:
                self._follow(body.last, body.first)
            found = self._joined(found, body)
        return found

    def _follow(self, last: Mapping[int, int], first: Mapping[int, int]) -> None:
        for before, ways in last.items():
            for after, others in first.items():
                self.follows[before, after] += _few(ways * others)


def _few(ways: int) -> int:
    """Saturate a count just above the limit."""
    return min(ways, _MOST_WAYS + 1)


def _times(ends: Mapping[int, int], ways: int) -> dict[int, int]:
    return {at: _few(each * ways) for at, each in ends.items()} if ways else {}


def _either(parts: Sequence[_Part]) -> _Part:
    """The alternation."""
    first: Counter[int] = Counter()
    last: Counter[int] = Counter()
    for part in parts:
        first.update(part.first)
        last.update(part.last)
    return _Part(
        _few(sum(part.empty for part in parts)),
        first,
        last,
        any(part.surely_empty for part in parts),
        frozenset().union(*(part.sure for part in parts)),
    )
