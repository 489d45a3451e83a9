"""Tools: the prompt that describes them, the grammar of required calls, and the parser of calls.

A checkpoint's chat template reveals its model's call format: between ``<tool_call>`` tags (Hermes,
Qwen), one JSON object (Llama 3), or a list after ``[TOOL_CALLS]`` (Mistral). If the template takes
no tools, a preamble describes them, and calls are in Hermes format. A grammar enforces required
calls in this format; optional ones are parsed from the text as it is generated, in any format.
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
from exkv.text.reasoning import HARMONY, reasoning_format

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
        tools: in OpenAI's format, which chat templates take too; the prompt describes all of them.
        names: names of the tools that may be called.
        forced: whether a call is required.
        parallel: whether more than one call is allowed.
    """

    tools: tuple[dict[str, Any], ...]
    names: frozenset[str]
    forced: bool
    parallel: bool

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Name -> JSON schema of the arguments, for the tools that may be called."""
        return {each["name"]: each.get("parameters") or {} for each in self._callable()}

    def _callable(self) -> list[dict[str, Any]]:
        functions = [tool["function"] for tool in self.tools]
        return [each for each in functions if each["name"] in self.names]

    def grammar(self, form: CallFormat) -> Grammar | None:
        """The grammar of required calls; None if calls are optional."""
        if not self.forced:
            return None
        schemas = [_call_schema(each, form) for each in self._callable()]
        call = json.dumps({"anyOf": schemas, **_SPACES})
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
    """Recognize a checkpoint's call format in its chat template."""
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
    if reasoning_format(tokenizer) is HARMONY:
        messages = [_with_thinking(message) for message in messages]
    called = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if tools is None and not called:
        return tokenizer.encode_chat(messages, **variables)
    if _template_with_tools(tokenizer) is None:
        return _encode_with_preamble(tokenizer, messages, tools, variables)
    messages = [_with_objects(message) for message in messages]
    if tools is not None:
        variables["tools"] = list(tools.tools)
    ids = tokenizer.encode_chat(messages, **variables)
    form = format_of(tokenizer)
    if tools is not None and tools.forced and form.special:
        ids = [*ids, *tokenizer.encode(form.begin, add_bos=False)]
    return ids


def _with_thinking(message: Message) -> Message:
    """A message with its reasoning under gpt-oss's name; that template takes none in a message
    with both calls and content."""
    found = {name: value for name, value in message.items() if name != "reasoning_content"}
    reasoning = message.get("reasoning_content")
    has_both = "tool_calls" in message and message.get("content")
    return found if not reasoning or has_both else {**found, "thinking": reasoning}


def _with_objects(message: Message) -> Message:
    """A message with parsed call arguments: templates serialize them."""
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


def _encode_with_preamble(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Encode the prompt for a template without tools: a system message describes them."""
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
    """A piece of output: content, reasoning, the start of a call, or more of its arguments."""

    text: str = ""
    reasoning: str = ""
    call: int | None = None
    name: str = ""
    id: str = ""
    arguments: str = ""


#: Parser states: before any text, outside of calls, after an opener, before a JSON object, in its
#: arguments, in XML, after a call.
_State = Literal["start", "text", "open", "json", "arguments", "xml", "after"]

#: Opener of a call -> its closer.
_OPENERS = {
    "<tool_call>": "</tool_call>",
    "[TOOL_CALLS]": "",
    "```": "```",
    "<function=": "",
    "<function_calls>": "</function_calls>",
    "<invoke ": "",
}
_OPENER = re.compile("|".join(map(re.escape, _OPENERS)))
_FENCED = frozenset({"", "json", "tool_call", "tool_calls", "tool_code", "xml"})  # info strings
_SPACE = " \n\t\r"
_LONGEST_NAME = 100  # characters of a function's name with its tag, or of a fence's info string

_JSON_CALL = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})  # of calls

#: XML calls in the formats of Qwen3-Coder and Llama 3.1, of Claude, and of GLM 4.5.
_XML_NAME = re.compile(r'<function=([^>\s]+)>|<invoke\s+name="([^"]+)"\s*>|([\w.-]+)\s*<arg_key>')
_XML_END = re.compile(r"</function>|</invoke>|</tool_call>")
_XML_VALUE = re.compile(
    r"<parameter=([^>]+)>(.*?)</parameter>"
    r'|<parameter\s+name="([^"]+)"[^>]*>(.*?)</parameter>'
    r"|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    re.DOTALL,
)


class CallReader:
    """Parse tool calls from streamed text; everything else is content. Calls are XML, or one JSON
    object or a list of them, with a name and arguments: between tags, in a code fence, after a
    control token, or at the start of the text.

    Args:
        schemas: name -> JSON schema of the arguments, of the functions that may be called; a call
            of another name is content.
        most: maximum number of calls; text after them is dropped.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], most: int | None = None) -> None:
        self.calls = 0
        self._schemas, self._most = schemas, most
        self._state: _State = "start"
        self._held = ""  # unparsed text
        self._lead = ""  # text that is content unless a call follows
        self._closer, self._listed = "", False
        self._silent = False  # only space since the last call
        self._value, self._scanned = JsonValue(), 0

    def begin(self, name: str) -> list[Delta]:
        """Begin a call that is a message of its own, as in harmony; [] if it isn't allowed."""
        return [] if self._is_full or name not in self._schemas else [self._began(name)]

    def more(self, arguments: str) -> Delta:
        """Add to the arguments of the last call."""
        return Delta(call=self.calls - 1, arguments=arguments)

    def mark(self) -> None:
        """Note that the control token that begins calls was generated."""
        if self._state in ("start", "text"):
            self._lead, self._held, self._state = self._held, "", "open"
            self._closer = ""

    def push(self, text: str) -> list[Delta]:
        """Add text -> the deltas that are certain now."""
        self._held += text
        found: list[Delta] = []
        while self._held and (step := getattr(self, f"_read_{self._state}")()) is not None:
            found += step
        return [delta for delta in found if delta != Delta()]

    def flush(self) -> list[Delta]:
        """The remaining deltas at the end of the text."""
        held, self._held = self._lead + self._held, ""
        if self._state == "json" and (whole := self._whole(held[len(self._lead) :])):
            return whole
        over = self._state in ("arguments", "after") or self._is_full
        return [] if over or not held or (self._silent and not held.strip()) else [Delta(text=held)]

    @property
    def _is_full(self) -> bool:
        return self._most is not None and self.calls >= self._most

    # Content ----------------------------------------------------------------------------------

    def _read_start(self) -> list[Delta] | None:
        """A text that begins with JSON may be a call."""
        stripped = self._held.lstrip(_SPACE)
        if stripped in ("", "["):
            return None
        self._state = "open" if stripped[0] in "{[" and stripped[:2] != "[T" else "text"
        return []

    def _read_text(self) -> list[Delta] | None:
        if self._is_full:
            self._held = ""
            return None
        match = _OPENER.search(self._held)
        end = match.start() if match else len(self._held) - _beginning(self._held)
        text = self._held[:end]
        if self._silent and not text.strip():  # between two calls
            if match is None:
                return None
            text = ""
        self._silent &= not text
        self._held = self._held[end:]
        if match is None:
            return [Delta(text=text)] if text else None
        self._closer, self._state = _OPENERS[match[0]], "open"
        if match[0] not in ("<function=", "<invoke "):
            self._take(len(match[0]))
        return [Delta(text=text)]

    def _take(self, size: int) -> None:
        """Move held text to the lead."""
        self._lead, self._held = self._lead + self._held[:size], self._held[size:]

    def _no_call(self) -> list[Delta]:
        """Release held text as content: it isn't a call."""
        lead, self._lead, self._state = self._lead, "", "text"
        if not lead:  # release something, or the same text would open a call again
            lead, self._held = self._held[:1], self._held[1:]
        self._silent &= not lead.strip()
        return [Delta(text=lead)]

    # Calls ------------------------------------------------------------------------------------

    def _read_open(self) -> list[Delta] | None:
        """After an opener: JSON, a list of it, XML, or none of these."""
        if self._lead.endswith("```"):
            info, newline, _ = self._held.partition("\n")
            if not newline and len(info) < _LONGEST_NAME:
                return None
            if info.strip() not in _FENCED:
                return self._no_call()
            self._take(len(info))
        stripped = self._held.lstrip(_SPACE)
        if not stripped:
            return None
        if stripped[0] == "[" and not self._listed:
            self._listed = True
            self._take(len(self._held) - len(stripped) + 1)
            return []
        if stripped[0] == "{":
            self._take(len(self._held) - len(stripped))
            self._state, self._value, self._scanned = "json", JsonValue(), 0
            return []
        if self._listed or not (self._closer or stripped[0] == "<"):
            self._listed = False
            return self._no_call()
        self._state = "xml"
        return []

    def _read_json(self) -> list[Delta] | None:
        """A call up to its arguments; or a complete object with its keys in another order."""
        match = _JSON_CALL.match(self._held)
        if match is not None and match.end() < len(self._held):
            name = json.loads(match[1])
            if name in self._schemas and self._held[match.end()] == "{":
                self._held, self._state = self._held[match.end() :], "arguments"
                self._value = JsonValue()
                return [self._began(name)]
        key = _FIRST_KEY.match(self._held)
        if key is not None and key[1] not in _KEYS:
            self._listed = False
            return self._no_call()
        size = self._value.length(self._held[self._scanned :])
        if size is None:
            self._scanned = len(self._held)
            return None
        size += self._scanned
        if whole := self._whole(self._held[:size]):
            self._held, self._lead, self._state = self._held[size:], "", "after"
            return whole
        self._take(size)
        self._listed = False
        return self._no_call()

    def _whole(self, text: str) -> list[Delta]:
        """Parse a complete call; [] if it is not one."""
        try:
            found = json.loads(text)
            found = found.get("function", found)
            name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        if not isinstance(name, str) or name not in self._schemas:
            return []
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return [self._began(name), Delta(call=self.calls - 1, arguments=written)]

    def _began(self, name: str) -> Delta:
        self.calls += 1
        self._lead, self._silent = "", True
        return Delta(call=self.calls - 1, name=name, id=f"call_{uuid.uuid4().hex[:24]}")

    def _read_arguments(self) -> list[Delta] | None:
        size = self._value.length(self._held)
        part = self._held if size is None else self._held[:size]
        self._held = self._held[len(part) :]
        if size is not None:
            self._state = "after"
        return [Delta(call=self.calls - 1, arguments=part)] if part else None

    def _read_xml(self) -> list[Delta] | None:
        """A call in XML, once it is complete."""
        stripped = self._held.lstrip(_SPACE)
        name = _XML_NAME.match(stripped)
        if name is None and len(stripped) < _LONGEST_NAME and _XML_END.search(stripped) is None:
            return None
        called = name and next(filter(None, name.groups()))
        if name is None or called not in self._schemas:
            return self._no_call()
        end = _XML_END.search(stripped)
        if end is None:
            return None
        body = stripped[name.end() - len("<arg_key>") * bool(name[3]) : end.start()]
        self._held = stripped[end.start() if end[0] == self._closer else end.end() :]
        self._state = "after"
        written = self._arguments_of(str(called), body)
        return [self._began(str(called)), Delta(call=self.calls - 1, arguments=written)]

    def _arguments_of(self, name: str, body: str) -> str:
        """The arguments of a call in XML, as JSON."""
        if body.strip().startswith("{"):
            return body.strip()
        known = self._schemas[name].get("properties", {})
        found = {}
        for groups in _XML_VALUE.findall(body):
            key, value = _pair(groups)
            found[key.strip()] = _typed(value, known.get(key.strip()))
        return json.dumps(found, ensure_ascii=False)

    def _read_after(self) -> list[Delta] | None:
        """The end of a call: its brace, its closer, a comma before the next call."""
        held = self._held = self._held.lstrip("} \n\t\r")
        if not held:
            return None
        if self._listed:
            if held[0] not in ",]":
                self._listed = False
            else:
                self._listed = held[0] == ","
                self._held = held[1:]
            if self._listed:
                self._state = "text" if self._is_full else "open"
            return []
        may_follow = (self._closer, "{", "<function=", "<invoke ") if self._closer else ()
        if any(each.startswith(held) and each != held for each in may_follow):
            return None
        again = held.startswith(may_follow[1:])
        self._held = held.removeprefix(self._closer)
        self._state = "open" if again and not self._is_full else "text"
        return []


def _pair(groups: Sequence[str]) -> tuple[str, str]:
    """The key and the value matched by one of three patterns; a value may be empty."""
    at = next(at for at in (0, 2, 4) if groups[at])
    return groups[at], groups[at + 1]


def _typed(text: str, schema: object) -> Any:
    """Convert an argument's text to its schema's type."""
    text = text.removeprefix("\n").removesuffix("\n")
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


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


def _beginning(text: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of an opener."""
    longest = min(len(text), max(map(len, _OPENERS)) - 1)
    lengths = range(longest, 0, -1)
    return next((n for n in lengths if any(o.startswith(text[-n:]) for o in _OPENERS)), 0)
