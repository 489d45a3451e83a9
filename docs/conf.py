"""How Sphinx builds these pages: ``make docs`` runs it with warnings as errors."""

import ast
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from exkv import sampling
from exkv.version import __version__

project = "exkv"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"exkv {version}"
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
napoleon_use_ivar = True
myst_heading_anchors = 3


class ReadingOrder(Directive):
    """A table of source files: name, lines, and the first sentence of the docstring."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        table = [".. list-table::", "   :header-rows: 1", "   :widths: 30 8 62", ""]
        table += ["   * - file", "     - lines", "     - what for"]
        for name in self.content:
            file = Path(__file__).parents[1] / name
            if not file.is_file():
                raise self.error(f"{name} does not exist")
            text = file.read_text()
            first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
            sentence = " ".join(first.split()).split(". ")[0].rstrip(".") + "."
            count = len(text.splitlines())
            table += [f"   * - ``{name}``", f"     - {count}", f"     - {sentence}"]
        parent = nodes.Element()
        self.state.nested_parse(StringList(table, source="reading-order"), 0, parent)
        return parent.children


class SamplerSteps(Directive):
    """A table of a vocabulary of the sampler, ``EXLLAMAV2`` or ``HUGGING_FACE``: its fields in the
    order in which the steps run, what they do and may be, and the source."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        table = [".. list-table::", "   :header-rows: 1", "   :widths: 22 54 24", ""]
        table += ["   * - field", "     - what it does, and may be", "     - source"]
        for row in getattr(sampling, self.arguments[0]):
            for name, setting in row.settings.items():
                said = f"{setting.does}; {row.bounds[name].words}".replace("*", r"\*")
                table += [f"   * - ``{name}``", f"     - {said}", f"     - {row.step.source}"]
        parent = nodes.Element()
        self.state.nested_parse(StringList(table, source="sampler-steps"), 0, parent)
        return parent.children


def add_exllamav2_names(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the tables behind the page's text: 38 kB that follow from the code."""
    if page == "exllamav2-names":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "compat"))
        import exllamav2_names

        source[0] += "\n" + exllamav2_names.tables()


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_exllamav2_names)
    app.add_directive("reading-order", ReadingOrder)
    app.add_directive("sampler-steps", SamplerSteps)
