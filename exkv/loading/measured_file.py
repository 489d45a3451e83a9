"""A file of figures that were measured once for a checkpoint.

It lies beside the checkpoint, or in the user's cache folder where that can't be written to. Its
figures count for the checkpoint's fingerprint and one version of measuring; figures of another one,
and damaged or incomplete ones, are measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class MeasuredFile:
    """The files that may hold a checkpoint's figures.

    Args:
        path: of the checkpoint, a folder or a file.
        name: of the file, such as "exkv-losses.json".
        version: of the file, and of the method of measuring.
    """

    def __init__(self, path: Path, name: str, fingerprint: str, version: int) -> None:
        self.fingerprint, self.version = fingerprint, version
        kind = name.removeprefix("exkv-").removesuffix(".json")
        beside = (path if path.is_dir() else path.parent) / name
        self.files = (beside, _cache_folder() / f"{kind}-{fingerprint}.json")

    def known(self) -> list[str]:
        """The keys of figures in any of the files."""
        return sorted({key for file in self.files for key in self._measured(file)})

    def read(self, key: str, checked: Callable[[Any], T]) -> T | None:
        """Read the first valid figures; None if there are none.

        Args:
            checked: parses them from JSON values; raises ValueError, or Python's own errors, for
                invalid ones.
        """
        for file in self.files:
            if (values := self._measured(file).get(key)) is not None:
                try:
                    return checked(values)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    logger.warning("%s: %s; measuring anew", file, error)
        return None

    def _measured(self, file: Path) -> dict[str, Any]:
        """A file's figures by key; empty if they are for another checkpoint."""
        try:
            found = json.loads(file.read_bytes())
            if (found["version"], found["fingerprint"]) == (self.version, self.fingerprint):
                return dict(found["measured"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            logger.warning("%s is damaged (%s); measuring anew", file, error)
        return {}

    def write(self, key: str, values: Any) -> None:
        """Store figures beside those of other keys; a disk that can't be written to is no error."""
        for file in self.files:
            kept = {**self._measured(file), key: values}
            whole = {"version": self.version, "fingerprint": self.fingerprint, "measured": kept}
            try:
                _replace(file, json.dumps(whole, indent=1))
                return
            except OSError as error:
                logger.info("%s can't be written: %s", file, error)


def may_be_measured(path: Path, name: str) -> bool:
    """Whether a file may have figures for this checkpoint; only the fingerprint, which takes a
    sample of all tensors, can tell."""
    kind = name.removeprefix("exkv-").removesuffix(".json")
    beside = (path if path.is_dir() else path.parent) / name
    return beside.exists() or any(_cache_folder().glob(f"{kind}-*.json"))


def digest(ids: Sequence[Any]) -> str:
    """A digest of a text's tokens, for keys."""
    return hashlib.blake2b(repr(ids).encode(), digest_size=8).hexdigest()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exkv"


def _replace(file: Path, text: str) -> None:
    """Write a file atomically, whoever else writes it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
