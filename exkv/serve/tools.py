"""Tools: how a model is told of them, what it must write to call one, and how calls are read.

A checkpoint's chat template says how its model was taught to call: between ``<tool_call>`` tags
(Hermes, Qwen), as one JSON object (Llama 3), or as a list behind ``[TOOL_CALLS]`` (Mistral). Where
the template takes no tools, a preamble describes them, and calls are as in Hermes. A call that is
asked for is kept by a grammar; one that the model may make is found in its text as it comes.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from exkv.sampling import Grammar
from exkv.text import Tokenizer

Message = Mapping[str, Any]

_PREAMBLE = """You can call functions. Here they are, each as JSON on a line:
{tools}
To call one, write this and nothing else, with its name and its arguments as JSON:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
What it returns comes back between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls.

    Attributes:
        begin, end: around each call, or around their list.
        arguments: the key that they are under.
        listed: whether calls are a JSON list.
        special: whether ``begin`` is a control token, which no text shows.
    """

    begin: str
    end: str
    arguments: str = "arguments"
    listed: bool = False
    special: bool = False


HERMES = CallFormat(begin="<tool_call>", end="</tool_call>")
LLAMA = CallFormat(begin="", end="", arguments="parameters")
MISTRAL = CallFormat(begin="[TOOL_CALLS]", end="", listed=True, special=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a request says of tools.

    Attributes:
        tools: as OpenAI's API and chat templates have them.
        choice: "auto", "required", or the name of one that must be called.
        parallel: whether there may be more than one call.
    """

    tools: tuple[dict[str, Any], ...]
    choice: str
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def grammar(self, form: CallFormat) -> Grammar | None:
        """What must be written; None where nothing must."""
        if self.choice == "auto":
            return None
        wanted = [
            tool["function"]
            for tool in self.tools
            if self.choice in ("required", tool["function"]["name"])
        ]
        call = json.dumps({"anyOf": [_call_schema(each, form) for each in wanted], **_SPACES})
        rules = f"call: %json {call}\n"
        begin, end = "" if form.special else form.begin, form.end
        if form.listed:
            more = ' (", " call)*' if self.parallel else ""
            return Grammar.lark(f'start: "[" call{more} "]"\n{rules}')
        if not begin:
            return Grammar.lark(f"start: call\n{rules}")
        more = ' ("\\n" one)*' if self.parallel else ""
        return Grammar.lark(f'start: one{more}\none: "{begin}\\n" call "\\n{end}"\n{rules}')


_SPACES = {
    "x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
}


def _call_schema(function: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.arguments: parameters},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


# Prompts --------------------------------------------------------------------------------------


def format_of(tokenizer: Tokenizer) -> CallFormat:
    """How this checkpoint's model calls, by its template."""
    source = _template_with_tools(tokenizer)
    if source is None or "<tool_call>" in source:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    return LLAMA if "parameters" in source else HERMES


def _template_with_tools(tokenizer: Tokenizer) -> str | None:
    known = tokenizer.chat_templates
    template = known.get("tool_use") or known.get("default")
    return template.source if template is not None and "tools" in template.source else None


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools | None = None,
    **variables: Any,
) -> list[int]:
    """The ids of a chat's prompt, with tools where there are some, and with variables for which its
    template asks.

    Raises:
        ValueError: the template refuses the messages, or there is none.
    """
    called = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if tools is None and not called:
        return tokenizer.encode_chat(messages, **variables)
    if _template_with_tools(tokenizer) is None:
        return _encoded_plainly(tokenizer, messages, tools, variables)
    messages = [_with_objects(message) for message in messages]
    if tools is not None:
        variables["tools"] = list(tools.tools)
    ids = tokenizer.encode_chat(messages, **variables)
    form = format_of(tokenizer)
    if tools is not None and tools.choice != "auto" and form.special:
        marker = tokenizer.encode(form.begin, add_bos=False)
        ids = [*ids, *marker]
    return ids


def _with_objects(message: Message) -> Message:
    """With arguments as objects, which is what templates write as JSON themselves."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(call: Mapping[str, Any]) -> Any:
    text = call["function"]["arguments"]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _encoded_plainly(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """For a template that takes no tools: they are described before the conversation."""
    plain = [_plain(message) for message in messages]
    if tools is not None:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools.tools)
        preamble = _PREAMBLE.format(tools=lines)
        if plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{preamble}"}
        else:
            plain.insert(0, {"role": "system", "content": preamble})
    try:
        return tokenizer.encode_chat(plain, **variables)
    except ValueError:
        if plain[0]["role"] != "system" or len(plain) < 2 or plain[1]["role"] != "user":
            raise
    first = f"{plain[0]['content']}\n\n{plain[1]['content']}"  # such a template knows no system
    return tokenizer.encode_chat([{"role": "user", "content": first}, *plain[2:]], **variables)


def _plain(message: Message) -> dict[str, Any]:
    """Calls and what they returned, as text."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    parts = [content] if content else []
    for call in message.get("tool_calls", ()):
        written = {"name": call["function"]["name"], "arguments": _arguments(call)}
        parts.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(parts)}


# What comes back ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a piece of text brought: content, the beginning of a call, or more of its arguments."""

    text: str = ""
    call: int | None = None
    name: str = ""
    id: str = ""
    arguments: str = ""


#: Where the reader is: outside of calls, in a call's JSON before its arguments, in these, behind.
_Where = Literal["text", "call", "arguments", "behind"]


class CallReader:
    """Finds calls in a text that comes in pieces. What turns out to be none is content.

    Args:
        names: of the tools; a call of another is content.
        most: calls; what comes after them is dropped.

    Attributes:
        calls: so far.
    """

    def __init__(self, form: CallFormat, names: frozenset[str], most: int | None = None) -> None:
        self.calls = 0
        self._form, self._names, self._most = form, names, most
        self._where: _Where = "text"
        self._held = ""
        self._marked = False
        self._value = JsonValue()
        self._started = False
        self._open = re.compile(
            r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
        )

    def mark(self) -> None:
        """The control token that begins calls came."""
        self._marked = True

    def push(self, text: str) -> list[Delta]:
        """What is certain now."""
        self._held += text
        found: list[Delta] = []
        while (step := self._step()) is not None:
            found += step
        return [delta for delta in found if delta != Delta()]

    def flush(self) -> list[Delta]:
        """What is left at the end."""
        held, self._held = self._held, ""
        if self._where == "call":
            whole = self._whole(held)
            return whole or [Delta(text=self._begin + held)]
        return [Delta(text=held)] if self._where == "text" and held and not self._is_full else []

    @property
    def _begin(self) -> str:
        return "" if self._form.special else self._form.begin

    @property
    def _is_full(self) -> bool:
        return self._most is not None and self.calls >= self._most

    def _step(self) -> list[Delta] | None:
        """One step further; None where more must come first."""
        if not self._held:
            return None
        return {
            "text": self._text,
            "call": self._call,
            "arguments": self._arguments,
            "behind": self._behind,
        }[self._where]()

    def _text(self) -> list[Delta] | None:
        if self._is_full:
            self._held = ""
            return None
        form, held = self._form, self._held
        if form.begin and not form.special:
            at = held.find(form.begin)
            if at >= 0:
                self._held, self._where = held[at + len(form.begin) :], "call"
                self._started = True
                before = held[:at] if self.calls == 0 else held[:at].strip()
                return [Delta(text=before)]
            keep = _overlap(held, form.begin)
            self._held = held[len(held) - keep :]
            given = held[: len(held) - keep]
            if self.calls and not given.strip():
                given = ""
            return [Delta(text=given)] if given else None
        return self._without_tags()

    def _without_tags(self) -> list[Delta] | None:
        """A text that begins with JSON, or behind the control token, is a call."""
        form, held = self._form, self._held
        opening = '[{"name"' if form.listed and not self._marked else "[" if form.listed else "{"
        stripped = held.lstrip()
        if self._started:
            self._held = ""
            return [Delta(text=held)]
        if form.begin and stripped.startswith(form.begin):  # a control token that is spelt out
            self._held, self._marked = stripped[len(form.begin) :], True
            return []
        if form.begin.startswith(stripped):
            return None
        if not opening.startswith(stripped[: len(opening)]):
            self._started, self._held = True, ""
            return [Delta(text=held)]
        if len(stripped) < len(opening):
            return None
        self._started, self._where = True, "call"
        self._held = stripped[1:] if form.listed else stripped
        return []

    def _call(self) -> list[Delta] | None:
        match = self._open.match(self._held)
        if match is not None and match.end() < len(self._held):
            name = json.loads(match[1])
            if name in self._names and self._held[match.end()] == "{":
                self._held, self._where = self._held[match.end() :], "arguments"
                self._value = JsonValue()
                return [self._began(name)]
        value = JsonValue()
        size = value.length(self._held)
        if size is None:
            return None
        held, self._held = self._held, self._held[size:]
        whole = self._whole(held[:size])
        self._where = "behind" if whole else "text"
        return whole or [Delta(text=self._begin + held[:size])]

    def _whole(self, text: str) -> list[Delta]:
        """A call whose parts come in another order, read as a whole; nothing where it is none."""
        try:
            found = json.loads(text)
            name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        if not isinstance(name, str) or name not in self._names:
            return []
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return [self._began(name), Delta(call=self.calls - 1, arguments=written)]

    def _began(self, name: str) -> Delta:
        self.calls += 1
        return Delta(call=self.calls - 1, name=name, id=f"call_{uuid.uuid4().hex[:24]}")

    def _arguments(self) -> list[Delta] | None:
        size = self._value.length(self._held)
        part = self._held if size is None else self._held[:size]
        self._held = self._held[len(part) :]
        if size is not None:
            self._where = "behind"
        return [Delta(call=self.calls - 1, arguments=part)] if part else None

    def _behind(self) -> list[Delta] | None:
        """The rest of a call: its brace, a tag, a comma before the next one."""
        form, held = self._form, self._held.lstrip("} \n\t\r")
        if form.listed:
            if held.startswith(","):
                self._held, self._where = held[1:], "text" if self._is_full else "call"
                return []
            self._held = ""
            return None
        if not held or (form.end.startswith(held) and held != form.end):
            self._held = held
            return None
        self._held, self._where = held.removeprefix(form.end), "text"
        return []


class JsonValue:
    """Finds the end of a JSON object in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def length(self, text: str) -> int | None:
        """Characters of this piece up to the object's end; None if that is still to come."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of the text that begins the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
