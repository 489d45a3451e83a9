"""Imports go downward only: each part of exkv is on a floor and knows only those below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: From the ground up. Parts of one floor don't know each other. A part is a module or a package
#: of exkv; inside a package everyone may import everyone.
FLOORS = (
    ("exkv_ext", "errors", "sizes", "epochs", "version", "caching_allocator", "host_memory"),
    ("overhead", "sim_clock"),
    ("devices", "sim", "checkpoint"),
    ("ops", "batch", "text"),
    ("weights", "sampling"),
    ("layers", "cache"),
    ("models",),
    ("planning", "generation"),
    ("loading", "decode"),
    ("model",),
    ("serve", "cluster"),
    # The public names of exkv/__init__.py, which only users import.
    ("exkv",),
    ("compat", "integrations"),
    # It plans with transformers what exkv doesn't run.
    ("cli",),
    ("__main__", "examples"),
)
FLOOR_OF = {part: number for number, floor in enumerate(FLOORS) for part in floor}


def part_of(module: str) -> str:
    """The part that a dotted module name belongs to: exkv.cache.int8 -> cache."""
    names = module.split(".")
    return names[1] if names[0] == "exkv" and len(names) > 1 else names[0]


def exists(root: Path, module: str) -> bool:
    path = root / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


class Imports(ast.NodeVisitor):
    """Every import of one file, in functions too, as dotted names; ``typing`` holds those under
    ``if TYPE_CHECKING``, which bind nothing at run time."""

    def __init__(self, root: Path, module: str, is_package: bool) -> None:
        self.root = root
        self.package = module.split(".") if is_package else module.split(".")[:-1]
        self.runtime: list[tuple[int, str]] = []
        self.typing: list[tuple[int, str]] = []
        self._names = self.runtime

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            self._names = self.typing
            for child in node.body:
                self.visit(child)
            self._names = self.runtime
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._names += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) + 1 - node.level] if node.level else []
        source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            submodule = f"{source}.{alias.name}"
            self._names.append((node.lineno, submodule if exists(self.root, submodule) else source))


def violations(root: Path) -> Iterator[str]:
    """One sentence for every import that breaks the rule."""
    files = [f for top in ("exkv", "exkv_ext", "examples") for f in (root / top).rglob("*.py")]
    for file in sorted(files):
        where = file.relative_to(root)
        module = ".".join(where.with_suffix("").parts).removesuffix(".__init__")
        if module == "exkv":
            continue  # shows the public names of every floor
        part = part_of(module)
        if part not in FLOOR_OF:
            yield f"{where}: {part!r} is on no floor yet; add it to FLOORS in {__file__}."
            continue
        imports = Imports(root, module, file.name == "__init__.py")
        imports.visit(ast.parse(file.read_text()))
        for line, name in imports.runtime + imports.typing:
            if name.split(".")[0] not in ("exkv", "exkv_ext"):
                continue
            if not exists(root, name):
                yield f"{where}:{line}: {name} doesn't exist."
        for line, name in imports.runtime:
            if name.split(".")[0] not in ("exkv", "exkv_ext") or part_of(name) == part:
                continue
            if FLOOR_OF.get(part_of(name), -1) >= FLOOR_OF[part]:
                yield f"{where}:{line}: {part} may not import {name}, which isn't below it."


def test_imports_go_downward():
    assert list(violations(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("exkv/cache/base.py", "from exkv.models import x", "cache may not import exkv.models"),
        ("exkv/cache/base.py", "from ..layers import x", "cache may not import exkv.layers"),
        ("exkv/cache/base.py", "from exkv import layers", "cache may not import exkv.layers"),
        ("exkv/cache/base.py", "import exkv.layers.norm", "cache may not import exkv.layers.norm"),
        ("exkv/cache/base.py", "def f():\n    import exkv.models", "base.py:2: cache may not"),
        (
            "exkv/checkpoint/model_config.py",
            "from exkv import Model",
            "checkpoint may not import exkv,",
        ),
        ("exkv_ext/__init__.py", "import exkv.ops", "exkv_ext may not import exkv.ops"),
        ("exkv/novelty.py", "", "'novelty' is on no floor yet; add it to FLOORS"),
        ("exkv/cache/base.py", "import exkv.nowhere", "exkv.nowhere doesn't exist"),
    ],
)
def test_a_breach_is_found(tmp_path, file, line, complaint):
    for path in ("layers/norm.py", "models/__init__.py", "ops/__init__.py", "cache/__init__.py"):
        (tmp_path / "exkv" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "exkv" / path).touch()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line)
    (found,) = violations(tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    "line",
    [
        "from exkv.errors import x",
        "from . import int8",
        "from .int8 import x",
        "import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from exkv.models import Model",
    ],
)
def test_an_import_downward_or_at_home_is_fine(tmp_path, line):
    for path in ("errors.py", "models/__init__.py", "cache/int8.py"):
        (tmp_path / "exkv" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "exkv" / path).touch()
    (tmp_path / "exkv" / "cache" / "base.py").write_text(line)
    assert list(violations(tmp_path)) == []
