"""Every public name of ExLlamaV2 0.3.2, and tables of their replacements.

``python tests/compat/exllamav2_names.py list WHEEL`` reads the published wheel without importing it
(``pip download exllamav2==0.3.2 --no-deps``), and writes the names to the file beside this one;
``... tables`` prints what ``docs/conf.py`` appends to ``docs/exllamav2-names.md`` when
the pages are built, from that file and from exkv.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exkv.compat import exllamav2
from exkv.compat.exllamav2 import generator
from exkv.compat.exllamav2.config import WITHOUT_EFFECT
from exkv.compat.exllamav2.missing import Placeholder, instead_of
from exkv.compat.exllamav2.serving import MODULES

ROOT = Path(__file__).resolve().parents[2]
NAMES = Path(__file__).with_suffix(".json")
DEMO = ROOT / "examples" / "demo-model"
HERE = "the same"


# ExLlamaV2's names ----------------------------------------------------------------------------


def read_wheel(wheel: Path) -> dict[str, dict[str, Any]]:
    """``modules``: dotted module -> its public names; ``classes``: exported class -> its public
    members, with nested classes as ``Class.Nested``."""
    trees = {}
    with zipfile.ZipFile(wheel) as archive:
        for file in sorted(name for name in archive.namelist() if name.endswith(".py")):
            parts = Path(file).with_suffix("").parts
            if parts[0] == "exllamav2":
                module = ".".join(parts).removesuffix(".__init__")
                trees[module] = ast.parse(archive.read(file)), file.endswith("__init__.py")
    modules = {module: sorted(set(public(tree))) for module, (tree, _) in trees.items()}
    exported = {
        alias.name: node.module
        for tree, package in trees.values()
        if package
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for module, (tree, package) in trees.items():
        if package:
            imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
            modules[module] = sorted(
                alias.name
                for node in imports
                for alias in node.names
                if not alias.name.startswith("_")
            )
    classes = {}
    for name, module in exported.items():
        for node in trees[module][0].body if module in trees else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                classes |= dict(members(node, name, classes_of(trees[module][0])))
    return {"modules": {m: names for m, names in modules.items() if names}, "classes": classes}


def public(tree: ast.Module) -> Iterator[str]:
    """Classes, functions and variables of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        else:
            names = assigned(node)
        yield from (name for name in names if not name.startswith("_"))


def assigned(node: ast.AST) -> list[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


def classes_of(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def members(
    node: ast.ClassDef, name: str, beside: dict[str, ast.ClassDef]
) -> Iterator[tuple[str, list[str]]]:
    """Methods, fields and attributes set by the constructor, also of bases in the same module."""
    found: set[str] = set()
    for part in body(node, beside):
        if isinstance(part, ast.ClassDef):
            found.add(part.name)
            yield from members(part, f"{name}.{part.name}", {})
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(part.name)
            found |= set(set_on_self(part)) if part.name == "__init__" else set()
        else:
            found |= set(assigned(part))
    yield name, sorted(each for each in found if not each.startswith("_"))


def body(node: ast.ClassDef, beside: dict[str, ast.ClassDef]) -> Iterator[ast.stmt]:
    """The statements of a class and of its bases in the same module."""
    yield from node.body
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in beside:
            yield from body(beside[base.id], beside)


def set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


# Replacements ---------------------------------------------------------------------------------


def living() -> dict[str, Any]:
    """Class name -> an object of it over the demo model, for each class that exkv has."""
    config = exllamav2.ExLlamaV2Config(DEMO)
    model = exllamav2.ExLlamaV2(config)
    model.load()
    tokenizer = exllamav2.ExLlamaV2Tokenizer(config)
    kinds = (exllamav2.ExLlamaV2Cache, exllamav2.ExLlamaV2Cache_8bit)
    kinds += (exllamav2.ExLlamaV2Cache_Q4, exllamav2.ExLlamaV2Cache_Q6, exllamav2.ExLlamaV2Cache_Q8)
    caches = [kind(model, max_seq_len=64) for kind in kinds]
    generators = [
        kind(model, caches[0], tokenizer)
        for kind in (generator.ExLlamaV2BaseGenerator, generator.ExLlamaV2StreamingGenerator)
    ]
    objects = [config, model, tokenizer, *caches, *generators, exllamav2.Timer()]
    found = {type(each).__name__: each for each in objects}
    found |= dynamic(model, tokenizer)
    found["ExLlamaV2Sampler"] = generator.ExLlamaV2Sampler
    found["ExLlamaV2Sampler.Settings"] = generator.ExLlamaV2Sampler.Settings()
    found["ExLlamaV2CacheBase"] = caches[0]
    return found


def dynamic(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Objects of the dynamic generator, its jobs and its filters, by class name."""
    ids = tokenizer.encode("Anna")

    def in_queue() -> list[Any]:
        cache = exllamav2.ExLlamaV2Cache(model, max_seq_len=256)
        job = generator.ExLlamaV2DynamicJob(ids, 4)
        runs = generator.ExLlamaV2DynamicGenerator(model, cache, tokenizer)
        runs.enqueue(job)
        return [runs, job]

    async def in_a_loop() -> list[Any]:
        cache = exllamav2.ExLlamaV2Cache(model, max_seq_len=256)
        runs = generator.ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)
        job = generator.ExLlamaV2DynamicJobAsync(runs, ids, 4)
        await runs.close()
        return [runs, job]

    filters = [
        generator.filters.ExLlamaV2SelectFilter(model, tokenizer, ["a"]),
        generator.filters.ExLlamaV2PrefixFilter(model, tokenizer, "a"),
    ]
    return {
        type(each).__name__: each for each in [*in_queue(), *asyncio.run(in_a_loop()), *filters]
    }


def where_is_member(living: dict[str, Any], kind: str, name: str) -> str | None:
    """:data:`HERE` or advice for a member; None if there is neither."""
    advice = instead_of(f"{kind}.{name}")
    if kind not in living or not hasattr(living[kind], name):
        return advice
    if kind == "ExLlamaV2Config" and name in WITHOUT_EFFECT:
        return f"without effect: {WITHOUT_EFFECT[name]}"
    return f"must be off: {advice}" if advice and kind.endswith("Settings") else HERE


def where_is(module: str, name: str) -> str | None:
    """:data:`HERE` or advice for a name of a module."""
    there = module.partition(".")[2]
    if there in MODULES:
        ours = importlib.import_module(f"{exllamav2.__name__}.{MODULES[there]}".rstrip("."))
        if name in vars(ours):
            found = vars(ours)[name]
            absent = isinstance(found, type) and issubclass(found, Placeholder)
            return instead_of(name) if absent else HERE
    return instead_of(name) or instead_of(f"{module}.{name}")


def tables() -> str:
    """All names with their replacements, as Markdown."""
    objects, names = living(), json.loads(NAMES.read_text())
    lines = ["## Classes that packages export"]
    for kind, found in sorted(names["classes"].items()):
        lines += ["", f"### {kind}", ""]
        lines += table({name: where_is_member(objects, kind, name) for name in found})
    lines += ["", "## Names in modules"]
    for module, found in sorted(names["modules"].items()):
        lines += ["", f"### {module}", ""]
        lines += table({name: where_is(module, name) for name in found})
    return "\n".join(lines) + "\n"


def table(places: dict[str, str | None]) -> list[str]:
    """One row per replacement, with all its names; unchanged names come first."""
    by_place: dict[str, list[str]] = {}
    for name, place in sorted(places.items(), key=lambda pair: (pair[1] != HERE, pair[0])):
        by_place.setdefault(place or "MISSING", []).append(f"`{name}`")
    rows = [f"| {', '.join(found)} | {place} |" for place, found in by_place.items()]
    return ["| Name | Here |", "|---|---|", *rows] if rows else ["No public names."]


def main(argv: list[str]) -> None:
    if argv[:1] == ["list"]:
        NAMES.write_text(json.dumps(read_wheel(Path(argv[1])), indent=1) + "\n")
    elif argv == ["tables"]:
        print(tables(), end="")
    else:
        sys.exit(f"usage: {Path(__file__).name} list WHEEL | tables")


if __name__ == "__main__":
    main(sys.argv[1:])
