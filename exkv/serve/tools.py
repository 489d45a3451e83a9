"""Tools: the prompt that describes them, the grammar of a forced call, and the parser of calls.

A checkpoint's chat template tells its model's call format: between ``<tool_call>`` tags (Hermes,
Qwen), one JSON object (Llama 3), or a list after ``[TOOL_CALLS]`` (Mistral). For a template without
tools, a preamble describes them, and calls are in Hermes format. A required call is enforced by a
grammar; optional ones are parsed from the text as it is generated.
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
    """A model's call format.

    Attributes:
        begin, end: markers around each call, or around the list.
        arguments: the key of the arguments.
        listed: whether calls are a JSON list.
        special: whether ``begin`` is a control token, which decoded text doesn't show.
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
    """The tools of a request.

    Attributes:
        tools: in OpenAI's format, which chat templates take too.
        choice: "auto", "required", or the name of the tool that must be called.
        parallel: whether more than one call is allowed.
    """

    tools: tuple[dict[str, Any], ...]
    choice: str
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def grammar(self, form: CallFormat) -> Grammar | None:
        """The grammar of the required calls; None for "auto"."""
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
    """The call format of a checkpoint, from its chat template."""
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
    """The token ids of a chat's prompt.

    Args:
        tools: described in the prompt; None for none.
        variables: for the chat template.

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
    """A message with parsed call arguments: templates serialize them themselves."""
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
    """The prompt for a template without tools: a preamble describes them."""
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
    # The template takes no system message.
    first = f"{plain[0]['content']}\n\n{plain[1]['content']}"
    return tokenizer.encode_chat([{"role": "user", "content": first}, *plain[2:]], **variables)


def _plain(message: Message) -> dict[str, Any]:
    """A message with calls and their results as text."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    parts = [content] if content else []
    for call in message.get("tool_calls", ()):
        written = {"name": call["function"]["name"], "arguments": _arguments(call)}
        parts.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(parts)}


# Output ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of output: content, the start of a call, or more of its arguments."""

    text: str = ""
    call: int | None = None
    name: str = ""
    id: str = ""
    arguments: str = ""


#: The parser's state: outside of calls, in a call before its arguments, in these, after them.
_State = Literal["text", "call", "arguments", "after"]


class CallReader:
    """Parses calls from streamed text; anything else is content.

    Args:
        names: the tools' names; a call of another name is content.
        most: maximum number of calls; text after them is dropped.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, form: CallFormat, names: frozenset[str], most: int | None = None) -> None:
        self.calls = 0
        self._form, self._names, self._most = form, names, most
        self._state: _State = "text"
        self._held = ""
        self._marked = False
        self._value = JsonValue()
        self._started = False
        self._open = re.compile(
            r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
        )

    def mark(self) -> None:
        """Note that the control token that begins calls was generated."""
        self._marked = True

    def push(self, text: str) -> list[Delta]:
        """Add text -> the deltas that are certain now."""
        self._held += text
        found: list[Delta] = []
        while (step := self._step()) is not None:
            found += step
        return [delta for delta in found if delta != Delta()]

    def flush(self) -> list[Delta]:
        """The remaining deltas at the end of the text."""
        held, self._held = self._held, ""
        if self._state == "call":
            whole = self._whole(held)
            return whole or [Delta(text=self._begin + held)]
        return [Delta(text=held)] if self._state == "text" and held and not self._is_full else []

    @property
    def _begin(self) -> str:
        return "" if self._form.special else self._form.begin

    @property
    def _is_full(self) -> bool:
        return self._most is not None and self.calls >= self._most

    def _step(self) -> list[Delta] | None:
        """Advance by one step -> deltas; None if it needs more text."""
        if not self._held:
            return None
        return {
            "text": self._text,
            "call": self._call,
            "arguments": self._arguments,
            "after": self._after,
        }[self._state]()

    def _text(self) -> list[Delta] | None:
        if self._is_full:
            self._held = ""
            return None
        form, held = self._form, self._held
        if form.begin and not form.special:
            at = held.find(form.begin)
            if at >= 0:
                self._held, self._state = held[at + len(form.begin) :], "call"
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
        """Text that begins with JSON, or that follows the control token, is a call."""
        form, held = self._form, self._held
        opening = '[{"name"' if form.listed and not self._marked else "[" if form.listed else "{"
        stripped = held.lstrip()
        if self._started:
            self._held = ""
            return [Delta(text=held)]
        if form.begin and stripped.startswith(form.begin):  # the control token, spelt out
            self._held, self._marked = stripped[len(form.begin) :], True
            return []
        if form.begin.startswith(stripped):
            return None
        if not opening.startswith(stripped[: len(opening)]):
            self._started, self._held = True, ""
            return [Delta(text=held)]
        if len(stripped) < len(opening):
            return None
        self._started, self._state = True, "call"
        self._held = stripped[1:] if form.listed else stripped
        return []

    def _call(self) -> list[Delta] | None:
        match = self._open.match(self._held)
        if match is not None and match.end() < len(self._held):
            name = json.loads(match[1])
            if name in self._names and self._held[match.end()] == "{":
                self._held, self._state = self._held[match.end() :], "arguments"
                self._value = JsonValue()
                return [self._began(name)]
        value = JsonValue()
        size = value.length(self._held)
        if size is None:
            return None
        held, self._held = self._held, self._held[size:]
        whole = self._whole(held[:size])
        self._state = "after" if whole else "text"
        return whole or [Delta(text=self._begin + held[:size])]

    def _whole(self, text: str) -> list[Delta]:
        """Parse a complete call whose keys are in another order; [] if it is not a call."""
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
            self._state = "after"
        return [Delta(call=self.calls - 1, arguments=part)] if part else None

    def _after(self) -> list[Delta] | None:
        """The end of a call: its brace, a tag, a comma before the next one."""
        form, held = self._form, self._held.lstrip("} \n\t\r")
        if form.listed:
            if held.startswith(","):
                self._held, self._state = held[1:], "text" if self._is_full else "call"
                return []
            self._held = ""
            return None
        if not held or (form.end.startswith(held) and held != form.end):
            self._held = held
            return None
        self._held, self._state = held.removeprefix(form.end), "text"
        return []


class JsonValue:
    """Finds the end of a JSON object in streamed text."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def length(self, text: str) -> int | None:
        """Characters of this piece up to the object's end; None if the end isn't in it."""
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
    """Length of the longest suffix of the text that is a prefix of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
