"""Reasoning is separated from answers, in whatever chunks the text arrives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exkv import Tokenizer
from exkv.text.chat_template import ChatTemplate
from exkv.text.reasoning import HARMONY, ChannelReader, Piece, TagReader, reasoning_format

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"


def joined(reader, parts):
    """Reasoning, answer, and the text for each recipient."""
    pieces = [piece for part in parts for piece in reader.push(part)] + reader.flush()
    sent: dict[str, str] = {}
    for piece in pieces:
        if piece.recipient:
            sent[piece.recipient] = sent.get(piece.recipient, "") + piece.text
    told = [piece for piece in pieces if not piece.recipient]
    reasoning = "".join(piece.text for piece in told if piece.reasoning)
    return reasoning, "".join(piece.text for piece in told if not piece.reasoning), sent


def cuts(draw_from: str) -> st.SearchStrategy[list[str]]:
    """The text, split anywhere."""
    places = st.lists(st.integers(0, len(draw_from)), max_size=6)
    return places.map(
        lambda at: [
            draw_from[begin:end]
            for begin, end in zip([0, *sorted(at)], [*sorted(at), len(draw_from)], strict=True)
        ]
    )


#: Whether the prompt opened the reasoning, the output, its reasoning and its answer.
TAGGED = [
    (False, "<think>\nI <b>see</b>.\n</think>\n\nYes.\n", "I <b>see</b>.", "Yes.\n"),
    (True, "\nI see.\n</think>\n\nYes.", "I see.", "Yes."),
    (False, "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
    (False, " Yes. <think>no</think>", "", " Yes. <think>no</think>"),
    (True, "a </think> b </think> c", "a", "b </think> c"),
    (True, "a </thin", "a </thin", ""),
    (False, "<thi", "", "<thi"),
    (False, "", "", ""),
    (True, " a \n", "a", ""),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "answer"), TAGGED)
@given(data=st.data())
def test_tags_are_parsed_from_any_chunks(inside, text, reasoning, answer, data):
    reader = TagReader("<think>", "</think>", inside=inside)
    assert joined(reader, data.draw(cuts(text))) == (reasoning, answer, {})


CHANNELS = [
    (
        "<|channel|>analysis<|message|>I <|see.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes <b>.<|return|>",
        ("I <|see.", "Yes <b>.", {}),
    ),
    (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.find <|constrain|>json<|message|>{"thing": "key"}<|call|>',
        ("Look.", "", {"functions.find": '{"thing": "key"}'}),
    ),
    (
        ' to=functions.find<|channel|>commentary json<|message|>{"thing": 1}<|call|>',
        ("", "", {"functions.find": '{"thing": 1}'}),
    ),
    ("<|channel|>commentary<|message|>I look.<|end|>", ("", "I look.", {})),
    ("<|channel|>analysis<|message|>cut", ("cut", "", {})),
    ("<|channel|>anal", ("", "", {})),
    ("No header.", ("", "No header.", {})),
    (" to", ("", " to", {})),
]


@pytest.mark.parametrize(("text", "found"), CHANNELS)
@given(data=st.data())
def test_channels_are_parsed_from_any_chunks(text, found, data):
    assert joined(ChannelReader(), data.draw(cuts(text))) == found


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "a"]), max_size=9))
def test_only_tags_and_space_around_them_are_dropped(parts):
    reasoning, answer, _ = joined(TagReader("<think>", "</think>", inside=False), parts)
    text = "".join(parts)
    closed = "</think>" if "</think>" in text else ""
    opened = text.lstrip().startswith("<think>")
    told = f"<think>{reasoning}{closed}{answer}" if opened else reasoning + answer
    assert "".join(told.split()) == "".join(text.split())


#: Source of a chat template -> the tag that ends reasoning.
SOURCES = {
    "{%- set content = content.split('</think>')[-1] %}": "</think>",
    "{{ '[THINK]' + message.thinking + '[/THINK]' }}": "[/THINK]",
    "{{ '<seed:think>' }}{{ '</seed:think>' }}": "</seed:think>",
    "{{ '<|channel>thought\\n<channel|>' }}": "<channel|>",
    "{{ '<|inner_prefix|>' }}{{ '<|inner_suffix|>' }}": "<|inner_suffix|>",
}


def with_template(source: str) -> Tokenizer:
    tokenizer = Tokenizer(DEMO)
    tokenizer.chat_templates = {"default": ChatTemplate(source, DEMO / "chat_template.jinja")}
    return tokenizer


@pytest.mark.parametrize("source", SOURCES)
def test_format_follows_the_template(source):
    assert reasoning_format(with_template(source)).end == SOURCES[source]


def test_channels_take_precedence_over_tags():
    source = "{{ '<|start|>assistant<|channel|>final<|message|>' }}{# </think> #}"
    assert reasoning_format(with_template(source)) is HARMONY
    assert reasoning_format(Tokenizer(DEMO)) is None


def test_prompt_may_open_the_reasoning():
    tokenizer = with_template("</think>")
    form = reasoning_format(tokenizer)
    for prompt, inside in (("Hi <think>\n", True), ("<think>\n\n</think>\n\n", False)):
        reader = form.reader(tokenizer, tokenizer.encode(prompt))
        assert reader.push("a")[0] == Piece(text="a", reasoning=inside)


def test_marker_control_tokens_are_shown():
    tokenizer = Tokenizer(DEMO)
    control = min(tokenizer.special_ids - {tokenizer.unk_id, tokenizer.bos_id})
    ids = [*tokenizer.encode("key", add_bos=False), control]
    shown = tokenizer.stream(shown=[control])
    text = "".join(map(shown.push, ids)) + shown.flush()
    assert text == "key" + tokenizer.piece_of(control)
    assert tokenizer.decode(ids) == "key"
