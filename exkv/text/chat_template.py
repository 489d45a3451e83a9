"""A checkpoint's chat template: it renders messages as the text that the model was trained on.

Templates are downloaded Jinja programs, so they run in jinja2's immutable sandbox and see only
plain data; any failure becomes a ValueError that names the file. The sandbox protects the process,
but doesn't limit time or memory.
The environment is the one that transformers documents for template authors (trimmed blocks,
`raise_exception`, `strftime_now`, `tojson`, loop controls, `{% generation %}`), so that the same
file renders the same text. `tokenizer.py` finds the template and encodes what it renders.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from exkv.checkpoint.files import read_file, shortened

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"


class ChatTemplate:
    """One template, compiled when it is first rendered.

    Args:
        source: the Jinja text.
        file: its source, for error messages.
    """

    def __init__(self, source: str, file: Path) -> None:
        self.source = source
        self.file = file

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render a conversation.

        Args:
            messages: mappings with `role` and `content`; a value of None counts as absent.
            variables: further variables of the template; plain data.

        Raises:
            ValueError: the template does not compile, fails, or refuses (names the file).
            TypeError: messages or variables are not plain data (str, numbers, lists, mappings).
        """
        seen = {name: _plain(value, name) for name, value in variables.items()}
        seen["messages"] = _checked_messages(messages)
        try:
            return self._compiled.render(seen)
        except Exception as error:  # a template can raise anything
            reason = shortened(str(error))
            raise ValueError(f"{self.file}: the chat template failed: {reason}") from error

    def render_unfinished(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Render a conversation up to the end of its last message's text, for an answer that
        continues it. As in transformers, trailing space is dropped if the template trims messages.

        Raises:
            ValueError, TypeError: as :meth:`render` does; also if the last message has no text, or
                the template drops it.
        """
        *others, last = messages
        if not isinstance(text := last.get("content"), str):
            raise ValueError(f"the last message has no text to continue: {last!r:.80}")
        marker = secrets.token_hex(16)
        rendered = self.render([*others, {**last, "content": f"{text}{marker} "}], variables)
        begun, found, rest = rendered.rpartition(marker)
        if not found:
            raise ValueError(f"{self.file}: the chat template leaves out the last message")
        return begun if rest.startswith(" ") else begun.rstrip()

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)


def find_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Name -> template of a model folder; the main one is "default".

    Separate files (as transformers 5 writes them) take precedence over the `chat_template` entry of
    tokenizer_config.json, which is a string or a list of {"name": ..., "template": ...}.
    """
    found = {}
    if (folder / TEMPLATE_FILE).exists():
        found["default"] = folder / TEMPLATE_FILE
    for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        found[file.stem] = file
    if found:
        return {name: ChatTemplate(_read(file), file) for name, file in found.items()}
    file = folder / "tokenizer_config.json"
    entry = tokenizer_config.get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": ChatTemplate(entry, file)}
    try:
        pairs = [(str(each["name"]), each["template"]) for each in entry]
    except (TypeError, KeyError):
        pairs = [("", None)]
    if not all(isinstance(template, str) for _, template in pairs):
        raise ValueError(
            f'{file}: chat_template must be a text, or a list of {{"name": ..., "template": ...}}'
        )
    return {name: ChatTemplate(template, file) for name, template in pairs}


def _read(file: Path) -> str:
    try:
        return read_file(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}], '
            f"not {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise TypeError(f"messages[{index}] must be a mapping with a role, not {message!r}")
    # Chat APIs write content=None beside tool calls; most templates would print it as "None".
    return [
        {k: _plain(v, f"messages[{i}]") for k, v in message.items() if v is not None}
        for i, message in enumerate(messages)
    ]


def _plain(value: Any, where: str) -> Any:
    """Copy a value to JSON's types: the sandbox lets a template call methods of any others."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):  # a subclass, such as an enum, which may have methods
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{where} is of type {type(value).__name__}; a chat template takes only text, numbers, "
        "lists and mappings"
    )


@cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
        namespace=_Namespace,
    )
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text to train on; it has no effect here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses underscored names.

    Jinja calls methods such as `__html__` on values that it prints, outside of the sandbox; a
    template must not define one.
    """

    def __init__(*args: Any, **attributes: Any) -> None:  # self too may be an attribute
        for name in dict(*args[1:], **attributes):
            _refuse_underscored(name)
        jinja2.utils.Namespace.__init__(*args, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscored(name)
        super().__setitem__(name, value)


def _refuse_underscored(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes; jinja2's own filter escapes <, > and &."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
