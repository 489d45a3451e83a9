"""Tools: calls enforced by a grammar, calls parsed from text, and the prompts of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import DEMO

from exkv import Tokenizer
from exkv.serve.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    CallReader,
    JsonValue,
    Tools,
    encode_chat,
    format_of,
)
from exkv.text.chat_template import ChatTemplate

FIND = {
    "name": "find",
    "description": "Finds a thing",
    "parameters": {
        "type": "object",
        "properties": {"thing": {"enum": ["key", "lamp"]}, "deep": {"type": "boolean"}},
        "required": ["thing"],
        "additionalProperties": False,
    },
}
WAIT = {"name": "wait", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = tuple({"type": "function", "function": each} for each in (FIND, WAIT))
CALL = '{"name": "find", "arguments": {"thing": "ke{y\\"}"}}'
ARGUMENTS = '{"thing": "ke{y\\"}"}'
TYPED = '{"thing": "ke\\ny", "deep": true}'
#: Generated text, its content (None if unchanged), its calls' names and arguments.
TEXTS = [
    ("Hello <tool", "Hello <tool", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [("find", ARGUMENTS)]),
    (
        f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
        "I look.\n",
        [("find", ARGUMENTS)] * 2,
    ),
    (f"<tool_call>{CALL}\n{CALL}</tool_call> So.", " So.", [("find", ARGUMENTS)] * 2),
    (f"<tool_call>{CALL}<tool_call>{CALL}", "", [("find", ARGUMENTS)] * 2),
    ('<tool_call>\n{"arguments": {}, "name": "wait"}\n</tool_call>', "", [("wait", "{}")]),
    ('<tool_call>\n{"name": "no", "arguments": {}}', None, []),
    ("<tool_call> nonsense", None, []),
    (f"<tool_call>\n{CALL[:-1]}", "", [("find", ARGUMENTS)]),
    # One JSON object, as a text's beginning.
    ('{"name": "find", "parameters": {"thing": 1}}', "", [("find", '{"thing": 1}')]),
    (' {"name": "wait", "parameters": {}}', "", [("wait", "{}")]),
    ('{"type": "function", "function": {"name": "wait"}}', "", [("wait", "{}")]),
    ('{"thing": 1} is JSON', None, []),
    ("It is {here}.", None, []),
    (f"It is {CALL}", None, []),
    # A list.
    (f"[{CALL}, {CALL}]", "", [("find", ARGUMENTS)] * 2),
    (f"[TOOL_CALLS] [{CALL}]", "", [("find", ARGUMENTS)]),
    ("[1, 2] is a list", None, []),
    # In a code fence.
    (f"I look:\n```json\n{CALL}\n```\nSo.", "I look:\n\nSo.", [("find", ARGUMENTS)]),
    (f"```\n[{CALL},\n{CALL}]\n```", "", [("find", ARGUMENTS)] * 2),
    (f"```tool_call\n{CALL}\n{CALL}\n```", "", [("find", ARGUMENTS)] * 2),
    ('```json\n{"thing": 1}\n```\nis JSON', None, []),
    ("```python\nprint({})\n```\nis Python, `this` too", None, []),
    # In XML.
    (
        "<tool_call>\n<function=find>\n<parameter=thing>\nke\ny\n</parameter>\n"
        "<parameter=deep>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "",
        [("find", TYPED)],
    ),
    ('Yes. <function=find>{"thing": 1}</function>', "Yes. ", [("find", '{"thing": 1}')]),
    (
        '<function_calls>\n<invoke name="find">\n<parameter name="thing">ke\ny</parameter>'
        '<parameter name="deep">true</parameter></invoke>\n<invoke name="wait">\n</invoke>\n'
        "</function_calls>",
        "",
        [("find", TYPED), ("wait", "{}")],
    ),
    (
        "<tool_call>find\n<arg_key>thing</arg_key>\n<arg_value>ke\ny</arg_value>\n"
        "<arg_key>deep</arg_key><arg_value>true</arg_value>\n</tool_call>",
        "",
        [("find", TYPED)],
    ),
    ("<function=no>\n</function> is none", None, []),
    ("Hello", None, []),
]
OPENINGS = ("", "<tool_call>", "[TOOL_CALLS]", "```json\n", "<function=", '<invoke name="', "[")


def read(pieces, most=None):
    """Content and calls, joined from deltas as clients do."""
    reader = CallReader({each["name"]: each["parameters"] for each in (FIND, WAIT)}, most)
    content, calls = "", []
    for delta in [*(d for piece in pieces for d in reader.push(piece)), *reader.flush()]:
        if delta.call is None:
            content += delta.text
        elif delta.name:
            assert delta.call == len(calls) and delta.id
            calls.append([delta.name, ""])
        else:
            calls[delta.call][1] += delta.arguments
    return content, [tuple(call) for call in calls]


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_calls_are_parsed_from_any_chunks(text, content, calls, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == (text if content is None else content, calls)
    assert read(list(text)) == read(pieces)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OPENINGS), st.text('[]{}<>=\\"/ :,`\nabtool_call', max_size=40))
def test_other_text_passes_through_unchanged(opening, text):
    for written in (text, f"{opening}{text}", f'{opening}{{"name": "no", {text}'):
        content, calls = read(list(written))
        assert calls or content == written
    read(list(f'{opening}{{"name": "wait", {text}'))


def test_parser_is_linear_in_input():
    """Ten times the text scans about ten times as many characters."""

    def looked_at(length: int) -> int:
        value, count = JsonValue.length, 0

        def counted(self, text):
            nonlocal count
            count += len(text)
            return value(self, text)

        JsonValue.length = counted
        try:
            read(list('{"arguments": {"thing": "' + "a" * length))
        finally:
            JsonValue.length = value
        return count

    assert looked_at(3000) < 11 * looked_at(300)


def test_only_one_call_without_parallel_calls():
    two = f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> and more"
    assert read([two], most=1) == ("", [("find", ARGUMENTS)])
    assert read([f"[{CALL}, {CALL}]"], most=1) == ("", [("find", ARGUMENTS)])


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("choice", ["required", "wait"])
def test_grammar_allows_only_what_the_reader_parses(form, choice):
    """The grammar accepts exactly the texts that the reader parses as calls of that tool."""
    tokenizer = Tokenizer(DEMO)
    names = frozenset({"find", "wait"} if choice == "required" else {choice})
    tools = Tools(tools=TOOLS, names=names, forced=True, parallel=True)
    one = {"name": "wait", form.arguments: {}}
    written = {
        HERMES: f"<tool_call>\n{json.dumps(one)}\n</tool_call>\n<tool_call>\n{json.dumps(one)}",
        LLAMA: json.dumps(one),
        MISTRAL: json.dumps([one, one]),
    }[form]
    grammar = tools.grammar(form)
    assert _allows(tokenizer, grammar, written)
    other = {"name": "find", form.arguments: {"thing": "key"}}
    text = written.replace(json.dumps(one), json.dumps(other), 1)
    assert _allows(tokenizer, grammar, text) == (choice == "required")
    assert not _allows(tokenizer, grammar, "It is in the kitchen.")
    _, calls = read([written])
    assert [name for name, _ in calls] == ["wait"] * (1 if form is LLAMA else 2)


def _allows(tokenizer, grammar, text):
    follower = grammar.follow(tokenizer)
    for token in tokenizer.encode(text, add_bos=False, add_special=False):
        if text and not follower.allowed(tokenizer.vocab_size)[token]:
            # A sentencepiece vocabulary prepends a space: try byte tokens instead.
            return _allows_bytes(tokenizer, grammar, text)
        follower.take(token)
    return True


def _allows_bytes(tokenizer, grammar, text):
    follower = grammar.follow(tokenizer)
    ids = {tokenizer.bytes_of(i): i for i in range(7, tokenizer.vocab_size)}
    for byte in text.encode():
        token = ids[bytes([byte])]
        if not follower.allowed(tokenizer.vocab_size)[token]:
            return False
        follower.take(token)
    return True


# Prompts --------------------------------------------------------------------------------------

#: Shortened versions of real models' templates.
HERMES_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}"
)
MISTRAL_TEMPLATE = "[AVAILABLE_TOOLS]{{ tools | tojson }}[TOOL_CALLS]"
LLAMA_TEMPLATE = '{% if tools %}{"name": function, "parameters": ...}{% endif %}{{ messages }}'
CALLED = [
    {"role": "user", "content": "Where is the key?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "find", "arguments": '{"thing": "key"}'},
            }
        ],
    },
    {"role": "tool", "content": "kitchen", "tool_call_id": "1"},
]


def with_template(source):
    tokenizer = Tokenizer(DEMO)
    tokenizer.chat_templates = {"default": ChatTemplate(source, Path("chat_template.jinja"))}
    return tokenizer


def test_call_format_follows_the_template():
    assert format_of(Tokenizer(DEMO)) is HERMES
    assert format_of(with_template(HERMES_TEMPLATE)) is HERMES
    assert format_of(with_template(MISTRAL_TEMPLATE)) is MISTRAL
    assert format_of(with_template(LLAMA_TEMPLATE)) is LLAMA


def test_template_gets_tools_and_arguments_as_objects():
    tokenizer = with_template(HERMES_TEMPLATE)
    tools = Tools(tools=TOOLS, names=frozenset({"find", "wait"}), forced=False, parallel=True)
    text = tokenizer.decode(encode_chat(tokenizer, CALLED, tools), skip_special=False)
    assert '"description": "Finds a thing"' in text
    assert '<tool_call>{"name": "find", "arguments": {"thing": "key"}}</tool_call>' in text
    assert "kitchen" in text


def test_preamble_describes_tools_without_a_tool_template():
    tokenizer = Tokenizer(DEMO)
    tools = Tools(tools=TOOLS, names=frozenset({"find", "wait"}), forced=False, parallel=True)
    text = tokenizer.decode(encode_chat(tokenizer, CALLED, tools), skip_special=False)
    assert text.index("Finds a thing") < text.index("Where is the key?")
    assert '<tool_call>\n{"name": "find", "arguments": {"thing": "key"}}\n</tool_call>' in text
    assert "<tool_response>\nkitchen\n</tool_response>" in text
    told = [{"role": "system", "content": "Be kind."}, *CALLED]
    text = tokenizer.decode(encode_chat(tokenizer, told, tools), skip_special=False)
    assert text.count("<|system|>") == 1 and "Be kind." in text and "Finds a thing" in text


def test_preamble_joins_the_first_message_if_system_is_refused():
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    tokenizer = with_template(refusing)
    tools = Tools(tools=TOOLS, names=frozenset({"find", "wait"}), forced=False, parallel=True)
    text = tokenizer.decode(encode_chat(tokenizer, CALLED[:1], tools), skip_special=False)
    assert text.index("Finds a thing") < text.index("Where is the key?")
