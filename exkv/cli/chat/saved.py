"""Conversations as files: JSON with OpenAI's ``messages``, which other programs can read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exkv.checkpoint.files import read_json_object
from exkv.text.conversation import ROLES


def write_conversation(file: str, model: str, messages: Sequence[Mapping[str, str]]) -> None:
    """Write a conversation atomically.

    Raises:
        ValueError: the file exists and is not a conversation; it is unchanged.
        OSError: it can't be written.
    """
    path = Path(file).expanduser()
    if path.exists():
        try:
            read_conversation(file)
        except ValueError as error:
            raise ValueError(f"{error}; it is not overwritten: choose another name") from None
    beside = path.with_name(path.name + ".part")
    text = json.dumps({"model": model, "messages": list(messages)}, indent=1, ensure_ascii=False)
    beside.write_text(text + "\n", "utf-8")
    os.replace(beside, path)


def read_conversation(file: str) -> tuple[str | None, list[dict[str, str]]]:
    """Read a saved conversation -> its system message and turns.

    Raises:
        ValueError: the file is not a conversation; the message says what is wrong, and where.
        OSError: it can't be read.
    """
    path = Path(file).expanduser()
    messages = read_json_object(path).get("messages")
    if not isinstance(messages, list):
        raise ValueError(f"{path} is not a conversation: it has no list of messages")
    checked = [_checked(path, index, message) for index, message in enumerate(messages)]
    head = checked[0]["content"] if checked and checked[0]["role"] == "system" else None
    turns = checked if head is None else checked[1:]
    for index, message in enumerate(turns):
        if message["role"] != ROLES[index % 2]:
            raise ValueError(
                f"{path} is not a conversation: message {index} is the {message['role']}'s, and "
                f"should be the {ROLES[index % 2]}'s"
            )
    return head, turns


def _checked(path: Path, index: int, message: Any) -> dict[str, str]:
    keys = ("role", "content")
    if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in keys):
        raise ValueError(f"{path} is not a conversation: message {index} has no role and content")
    return {key: message[key] for key in keys}
