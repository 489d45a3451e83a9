"""llama.cpp's golden tokenizations: vocabularies as GGUF files (``NAME.gguf``), texts
(``NAME.gguf.inp``), and the ids that these are (``NAME.gguf.out``); and its converter of
checkpoints.

They come with the source package of llama-cpp-python. ``make test`` runs this file, which fetches
that package from PyPI and keeps nothing else of it; nothing is built or installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build/golden"
#: There once all the others are.
COMPLETE = FOLDER / "complete"
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
PREFIX = "ggml-vocab-"
#: The converter, with the ``gguf`` package that it was written for (``gguf-py``).
CONVERTER = FOLDER / "converter"
_CONVERTER = re.compile(r".*/vendor/llama\.cpp/((?:conversion|gguf-py/gguf)/.*\.py)")

#: Before pip keeps a source package it asks the package's build backend what it is called. This
#: stands in for the real one, which pip would fetch first, with CMake.
BACKEND = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, settings=None):
    made = Path(folder, "llama_cpp_python-{VERSION}.dist-info")
    made.mkdir()
    text = "Metadata-Version: 2.1\\nName: {PACKAGE}\\nVersion: {VERSION}\\n"
    (made / "METADATA").write_text(text)
    return made.name
"""


def fetch() -> None:
    """Fill FOLDER.

    Raises:
        subprocess.CalledProcessError: pip has said why it could not.
        ValueError: the package is another than it was.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scikit_build_core").mkdir()
        (folder / "scikit_build_core/build.py").write_text(BACKEND)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        command += ["--no-deps", "--no-binary", PACKAGE, "--no-build-isolation", "-d", name]
        path = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run([*command, f"{PACKAGE}=={VERSION}"], env=environment, check=True)
        unpack(folder / ARCHIVE)


def unpack(archive: Path) -> None:
    """Put the files of every vocabulary that has golden tokenizations into FOLDER, and the
    converter."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{archive.name} has the SHA-256 {found}, expected {SHA256}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member, file in _wanted(tar):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tar.extractfile(member) as source:
                file.write_bytes(source.read())
    COMPLETE.touch()


def _wanted(tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, Path]]:
    """What is kept, and where."""
    members = {member.name: member for member in tar.getmembers()}
    for name, member in members.items():
        if match := _CONVERTER.fullmatch(name):
            yield member, CONVERTER / match[1]
        elif PREFIX in name and name.endswith(".inp"):
            vocabulary = name.removesuffix(".inp")
            for end in ("", ".inp", ".out"):
                own = members[vocabulary + end]
                yield own, FOLDER / own.name.rpartition(PREFIX)[2]


def cases(name: str) -> Iterator[tuple[str, list[int]]]:
    """A vocabulary's texts with their ids."""
    texts = (FOLDER / f"{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (FOLDER / f"{name}.gguf.out").read_text().split("\n")
    assert not any(lines[len(texts) :])  # some files end with a line break
    for text, line in zip(texts, lines[: len(texts)], strict=True):
        yield text, list(map(int, line.split()))


if __name__ == "__main__":
    try:
        fetch()
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        shutil.rmtree(FOLDER, ignore_errors=True)
        by_pip = isinstance(error, subprocess.CalledProcessError)
        reason = "pip could not fetch it, see above" if by_pip else str(error)
        sys.exit(
            f"exkv: no golden tokenizations and no converter of {PACKAGE} {VERSION}: {reason}. "
            f"The tests need it once from PyPI; without a network, put {ARCHIVE} into a folder and "
            "name that in PIP_FIND_LINKS"
        )
