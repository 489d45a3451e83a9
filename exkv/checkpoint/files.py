"""Read small files of a model's folder whole, within limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Largest file that is read whole, in bytes: a JSON vocabulary has some ten million.
MAX_BYTES = 1 << 28
#: Characters of a message about a file, and of a value quoted in one.
_MESSAGE, _VALUE = 400, 80


def read_file(file: Path, error: type[ValueError] = ValueError) -> bytes:
    """All bytes of a file.

    Raises FileNotFoundError if there is none, and ``error`` if it isn't a regular file, or has more
    than :data:`MAX_BYTES`.
    """
    if not file.is_file():
        if file.exists():
            raise error(f"{file} is not a regular file")
        raise FileNotFoundError(f"{file} is missing")
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise error(f"{file} has {size} bytes, and files of its kind have at most {MAX_BYTES}")
    return file.read_bytes()


def parse_json_object(
    data: bytes, what: object, error: type[ValueError] = ValueError, *, repeats: bool = False
) -> dict[str, Any]:
    """Parse `data` as one JSON object with valid Unicode strings; `what` names it in errors.

    Args:
        repeats: whether keys may be repeated, so that the last one counts.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs) and not repeats:
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ValueError(f"the key {quoted(key)} occurs twice")
                seen.add(key)
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
        if b"\\ud" in data or b"\\uD" in data:  # an escape may leave half of a character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as bad:
        raise error(f"{what} is not UTF-8 text at byte {bad.start}; download it again") from None
    except UnicodeEncodeError:
        raise error(
            f"{what} holds a lone surrogate (\\ud800 to \\udfff), which is not valid Unicode"
        ) from None
    except RecursionError:
        raise error(f"{what} is not usable: its JSON is nested too deeply") from None
    except ValueError as bad:  # JSONDecodeError says line and column; also numbers without end
        raise error(f"{what} is not valid JSON: {shortened(str(bad))}; download it again") from None
    if not isinstance(value, dict):
        raise error(f"{what} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json_object(file: Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """The object in a file; raises as :func:`read_file` and :func:`parse_json_object` do."""
    return parse_json_object(read_file(file, error), file, error)


def quoted(value: Any) -> str:
    """A value from a file, shortened for a message: hostile ones may be long."""
    text = repr(value)
    return text if len(text) <= _VALUE else f"{text[: _VALUE - 3]}..."


def shortened(message: str) -> str:
    """A message that may quote a file's contents, cut in the middle to a few lines."""
    if len(message) <= _MESSAGE:
        return message
    return f"{message[: _MESSAGE - 150]} ... {message[-140:]}"
