"""A conversation fits its context, and drops the oldest turns first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exkv.text import Conversation

HEADER = 2  # tokens that the template below adds to each message, and at the end


class CountingTokenizer:
    """A chat template with two tokens around each message, and one token per character."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        ids = []
        for message in messages:
            ids += [-1, *map(ord, message["content"]), -2]
        return [*ids, -3, -4]


def conversation(*texts: str, limit: int = 1000, system: str | None = None) -> Conversation:
    """A conversation whose messages alternate, beginning with the user's."""
    made = Conversation(CountingTokenizer(), limit, system)
    for index, text in enumerate(texts):
        made.add(("user", "assistant")[index % 2], text)
    return made


def contents(made: Conversation) -> list[str]:
    return [message["content"] for message in made.messages]


words = st.text("abc", max_size=12)
histories = st.lists(words, min_size=1, max_size=11).filter(lambda texts: len(texts) % 2 == 1)


@given(histories, st.none() | words, st.integers(1, 120), st.integers(1, 40))
def test_prompt_fits_or_refuses_and_keeps_the_newest(texts, system, limit, room):
    made = conversation(*texts, limit=limit, system=system)
    head = [] if system is None else [system]
    alone = sum(len(text) + HEADER for text in [*head, texts[-1]]) + HEADER
    if alone + room > limit:
        with pytest.raises(ValueError, match=rf"\b{alone} tokens.*\b{limit}\b"):
            made.prompt(room)
        assert contents(made) == [*head, *texts]
        return
    ids, dropped = made.prompt(room)
    assert len(ids) + room <= limit
    assert contents(made) == [*head, *texts[2 * dropped :]]
    assert ids == CountingTokenizer().encode_chat(made.messages)
    # As few as possible: one more turn wouldn't fit.
    if dropped:
        wider = conversation(*texts[2 * dropped - 2 :], limit=limit, system=system)
        assert len(CountingTokenizer().encode_chat(wider.messages)) + room > limit


def test_dropped_turns_are_counted_once():
    made = conversation("aaaa", "bbbb", "cccc", limit=20)
    assert made.prompt(6)[1] == 1
    assert made.prompt(6)[1] == 0


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_greetings_and_consecutive_user_messages_are_turns(role):
    made = Conversation(CountingTokenizer(), 12)
    made.add(role, "hello")
    made.add("user", "then")
    assert made.prompt(4)[1] == 1
    assert contents(made) == ["then"]


def test_reset_keeps_only_the_system_message():
    made = conversation("hello", "hi", system="be kind")
    made.reset()
    assert made.messages == [{"role": "system", "content": "be kind"}]
    without = conversation("hello")
    without.reset()
    assert without.messages == []


def test_empty_system_message_is_kept():
    assert conversation(system="").messages == [{"role": "system", "content": ""}]


def test_prompt_needs_a_user_message():
    for made in (conversation(), conversation("hello", "hi"), conversation(system="be kind")):
        with pytest.raises(ValueError, match="nothing to answer"):
            made.prompt(1)


def test_invalid_arguments_are_named():
    with pytest.raises(ValueError, match="'system'"):
        conversation().add("system", "be kind")
    with pytest.raises(ValueError, match="room is 0"):
        conversation("hello").prompt(0)
