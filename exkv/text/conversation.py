"""A conversation that always fits its context: the oldest turns are dropped when it is too long.

It stores messages, not tokens: the chat template is rendered for each prompt, and
``exkv.decode.in_place`` detects how much of the prompt the cache still holds.
``exkv.cli.chat.session`` combines the two.
"""

from __future__ import annotations

from .tokenizer import Tokenizer

ROLES = ("user", "assistant")


class Conversation:
    """Messages in order, and the next prompt.

    Args:
        tokenizer: the checkpoint's, with its chat template.
        max_seq_len: tokens of prompt and answer together: the cache's capacity.
        system: the system message; never dropped.

    Attributes:
        messages: ``[{"role": "user", "content": "Hello"}, ...]``, the system message first.
    """

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Drop everything but the system message."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def add(self, role: str, text: str) -> None:
        """Append a message of role "user" or "assistant"; ValueError for other roles."""
        if role not in ROLES:
            raise ValueError(
                f"role is {role!r}: it must be 'user' or 'assistant' (the system message is given "
                "once, to Conversation)"
            )
        self.messages.append({"role": role, "content": text})

    def undo(self) -> str | None:
        """Remove the newest turn -> its user's message, or None if there is no turn."""
        _, turns = self._turns()
        if not turns:
            return None
        self.messages = self.messages[: -len(turns[-1])]
        return turns[-1][0]["content"]

    def tell(self, system: str | None) -> None:
        """Replace the system message; the turns stay."""
        turns = self.messages[0 if self.system is None else 1 :]
        self.system = system
        self.reset()
        self.messages += turns

    def prompt(self, room: int) -> tuple[list[int], int]:
        """Encode the prompt for the next answer.

        Drops as few of the oldest turns as possible, permanently; a turn is a user's message and
        everything up to the next one. The system message and the newest turn always stay.

        Args:
            room: tokens reserved for the answer, at least 1.

        Returns:
            At most ``max_seq_len - room`` token ids, and the number of dropped turns.

        Raises:
            ValueError: the newest message alone is too long (nothing is dropped then), it is not
                a user's, or the chat template refuses the messages.
        """
        if room < 1:
            raise ValueError(f"room is {room}: reserve at least 1 token for the answer")
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ValueError("there is nothing to answer: add a user message first")
        head, turns = self._turns()
        for dropped in range(len(turns)):
            kept = [*head, *(message for turn in turns[dropped:] for message in turn)]
            ids = self.tokenizer.encode_chat(kept)
            if len(ids) + room <= self.max_seq_len:
                self.messages = kept
                return ids, dropped
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but the context of {self.max_seq_len} has room "
            f"for {max(self.max_seq_len - room, 0)} besides {room} for the answer: shorten the "
            "message, or build a longer cache"
        )

    def _turns(self) -> tuple[list[dict[str, str]], list[list[dict[str, str]]]]:
        """The system message, and the others grouped in turns, oldest first."""
        first = 0 if self.system is None else 1
        turns: list[list[dict[str, str]]] = []
        for message in self.messages[first:]:
            if message["role"] == "user" or not turns:
                turns.append([])
            turns[-1].append(message)
        return self.messages[:first], turns
