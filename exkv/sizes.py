"""Sizes of memory as people write them, with powers of 1024: ``24G``, ``1.5 KiB``."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:I?B)?|B)?", re.IGNORECASE)
#: Which texts are sizes, for messages.
SIZE_FORMS = "sizes look like 24G, 512M, 64K, 1.5G or 1073741824 (bytes), separated by commas"
_MAX_BYTES = 1 << 62
#: Cards alike that one piece may stand for.
MAX_CARDS = 64


def parse_sizes(text: str) -> list[int]:
    """``"24G,512M,1000"`` to bytes. K, M, G and T are powers of 1024.

    Raises:
        ValueError: a piece is not a size, or comes to no whole byte; it names the piece.
    """
    if not text.strip():
        raise ValueError(f"no device sizes in {text!r}: {SIZE_FORMS}")
    return [_parse_size(piece.strip(), text) for piece in text.split(",")]


def parse_cards(text: str) -> list[int]:
    """``"2x24G,8G"`` to bytes: sizes of cards, each with a unit, ``2x`` before one for two alike.

    Raises:
        ValueError: as :func:`parse_sizes`; also too few bytes for a card, for want of a unit.
    """
    cards = []
    for piece in text.split(","):
        count, _, size = piece.strip().rpartition("x")
        nbytes = _parse_size(size.strip(), text)
        if nbytes < 1 << 20 and size.strip().isdigit():
            raise ValueError(f"a card of {size} is one of {nbytes:,} bytes: did you mean {size}G?")
        if count and not (count.isascii() and count.isdigit() and 0 < int(count) <= MAX_CARDS):
            raise ValueError(f"{piece.strip()!r} in {text!r}: write 2x24G for two cards of 24G")
        cards += [nbytes] * int(count or 1)
    return cards


def _parse_size(piece: str, text: str) -> int:
    match = _SIZE.fullmatch(piece)
    if match is None:
        where = "" if piece == text.strip() else f" in {text!r}"
        raise ValueError(f"{piece!r}{where} is not a size: {SIZE_FORMS}")
    number, unit = match.group(1), (match.group(2) or "").upper()
    whole, _, fraction = number.partition(".")
    scaled = int(whole + fraction) * _UNITS[unit]
    nbytes, rest = divmod(scaled, 10 ** len(fraction))
    if rest and unit == "":
        raise ValueError(f"{piece!r} in {text!r} is not a whole number of bytes: {SIZE_FORMS}")
    return checked_bytes(nbytes, piece)


def checked_bytes(nbytes: int, piece: object) -> int:
    """The bytes, if a device can have as many; ``piece`` is how the user wrote them."""
    if nbytes <= 0:
        raise ValueError(f"a device of {piece!r} has no memory: {SIZE_FORMS}")
    if nbytes > _MAX_BYTES:
        raise ValueError(f"a device of {piece!r} has more bytes than an address can count")
    return nbytes


def human(nbytes: int) -> str:
    """Bytes as people write them, binary units: 1536 -> ``1.5 KiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
