"""Text to token ids and back, from a model folder's own files or from a GGUF file.

`Tokenizer` is the public class. The libraries behind `vocabulary.py` encode, with the same ids as
in transformers. Decoding is exkv's own: each token stands for some bytes, and a text is their
concatenation, so that `StreamDecoder` streams text at a constant cost per token, and its pieces
joined are what `decode` returns. Chat templates are in `chat_template.py`.
"""

from __future__ import annotations

import codecs
import itertools
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch

from exkv.checkpoint import find_gguf

from .chat_template import ChatTemplate, find_templates
from .encoding import Encoding, as_tensor, padded
from .gguf import read_gguf_tokenizer
from .vocabulary import Settings, Vocabulary, open_vocabulary


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        source: a model folder or a GGUF file, or an object whose `path` is one (a `ModelConfig`).
            If a folder has both tokenizer.json and tokenizer.model, the former is read, as in
            transformers.

    Attributes:
        bos_id, pad_id, unk_id: token id, or None if the checkpoint has none.
        eos_ids: the ids that end a generation: those of generation_config.json, config.json and
            the tokenizer's own EOS token, in this order.
        vocab_size: the tokenizer's largest id plus 1. A model's embedding may be larger; its
            further ids have no text.
        padding_side: the side on which calls pad rows, "left" or "right".
        special_ids: control tokens and the like, which `decode` skips by default.
        file: the vocabulary's file.

    Raises:
        FileNotFoundError: no such folder, or none of the tokenizer files in it.
        ValueError: a file is broken or contradicts another one; names both.
    """

    def __init__(self, source: str | os.PathLike[str] | Any) -> None:
        settings, self._vocabulary, self.chat_templates = _read(_path(source))
        self.file = self._vocabulary.file
        self.vocab_size = self._vocabulary.size
        self.special_ids = frozenset(self._vocabulary.special_ids)
        self._names = self._vocabulary.names
        self.unk_id = self._named_id("unk_token")
        self.bos_id = self._named_id("bos_token", settings)
        self.pad_id = self._named_id("pad_token", settings)
        eos = (*settings.eos_ids, self._named_id("eos_token"))
        self.eos_ids = tuple(dict.fromkeys(i for i in eos if i is not None))
        self._id_limit = max(self.vocab_size, settings.model_vocab_size)
        self._ids_with: dict[str, frozenset[int]] = {}
        self._sorted_bytes: list[tuple[bytes, int]] | None = None
        self.padding_side = "left" if settings.tokenizer.get("padding_side") == "left" else "right"

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        padding_side: str | None = None,
        pad_token: str | None = None,
    ) -> Tokenizer:
        """Read a folder's tokenizer, with the arguments of transformers' ``from_pretrained``."""
        tokenizer = cls(folder)
        if pad_token is not None:
            tokenizer.pad_token = pad_token
        if padding_side is not None:
            tokenizer.padding_side = padding_side
        return tokenizer

    # transformers' names -----------------------------------------------------------------

    @property
    def bos_token(self) -> str | None:
        return self._spelling(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        return self._spelling(self.eos_token_id)

    @property
    def unk_token(self) -> str | None:
        return self._spelling(self.unk_id)

    @property
    def pad_token(self) -> str | None:
        """The padding token's spelling; can be set, usually to ``eos_token``."""
        return self._spelling(self.pad_id)

    @pad_token.setter
    def pad_token(self, piece: str | None) -> None:
        token = None if piece is None else self.id_of(piece)
        if piece is not None and token is None:
            raise ValueError(f"pad_token {piece!r} is not in the vocabulary of {self.file}")
        self.pad_id = token

    @property
    def bos_token_id(self) -> int | None:
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own EOS token; ``eos_ids`` has all that end a generation."""
        own = self._named_id("eos_token")
        return own if own is not None else next(iter(self.eos_ids), None)

    @property
    def unk_token_id(self) -> int | None:
        return self.unk_id

    @property
    def pad_token_id(self) -> int | None:
        return self.pad_id

    @pad_token_id.setter
    def pad_token_id(self, token: int | None) -> None:
        self.pad_id = token

    def __len__(self) -> int:
        return self.vocab_size

    def _spelling(self, token: int | None) -> str | None:
        return None if token is None else self.piece_of(token)

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> Encoding:
        """Encode one or several texts to ids and masks, as transformers' tokenizers do.

        Args:
            text: a text, for one list of ids, or a list of texts, for rows.
            add_special_tokens: add the checkpoint's tokens around each text, such as BOS.
            padding: True or "longest" pads to the longest row, "max_length" to ``max_length``
                tokens, on ``padding_side``.
            truncation: truncate each text at ``max_length`` tokens.
            return_tensors: "pt" for tensors; rows of different lengths need padding.

        Raises:
            ValueError: there is no pad token, rows differ in length, or an argument is invalid.
        """
        _check_call(padding, truncation, max_length, return_tensors)
        padding = False if padding == "do_not_pad" else padding
        add_bos = None if add_special_tokens else False
        texts = [text] if isinstance(text, str) else list(text)
        cut = max_length if truncation else None
        rows = [self._encode(each, add_bos, True)[:cut] for each in texts]
        if padding:
            width = max_length if padding == "max_length" else 0
            rows_and_masks = self._padded(rows, max(width or 0, *map(len, rows), 0))
        else:
            rows_and_masks = rows, [[1] * len(row) for row in rows]
        found = dict(zip(("input_ids", "attention_mask"), rows_and_masks, strict=True))
        if return_tensors:
            return Encoding({name: as_tensor(lists) for name, lists in found.items()})
        single = isinstance(text, str)
        return Encoding({name: lists[0] if single else lists for name, lists in found.items()})

    def _padded(self, rows: list[list[int]], width: int) -> tuple[list[list[int]], list[list[int]]]:
        """Pad rows to ``width`` -> rows, masks."""
        if self.pad_id is None and any(len(row) < width for row in rows):
            raise ValueError(
                f"padding: the checkpoint of {self.file} has no pad token; set pad_token, or pass "
                "one text at a time, or lists of ids to the model, which pads them itself"
            )
        fill, side = self.pad_id or 0, self.padding_side
        masks = [padded([1] * len(row), width, 0, side) for row in rows]
        return [padded(row, width, fill, side) for row in rows], masks

    @overload
    def encode(
        self, text: str, add_bos: bool | None = None, add_special: bool = True
    ) -> list[int]: ...

    @overload
    def encode(
        self, text: list[str], add_bos: bool | None = None, add_special: bool = True
    ) -> list[list[int]]: ...

    def encode(
        self, text: str | list[str], add_bos: bool | None = None, add_special: bool = True
    ) -> list[int] | list[list[int]]:
        """The token ids of a text, or of each text of a list.

        Args:
            add_bos: True adds one BOS token, False adds nothing; None follows the checkpoint,
                which may also add an EOS token at the end.
            add_special: whether control tokens spelt out in the text ("</s>") become those tokens.
                Pass False for untrusted text, so that it can't forge any.

        Raises:
            ValueError: there is no BOS token to add; a lone surrogate; or the text encodes to a
                control token despite add_special=False, as a few vocabularies do.
        """
        if isinstance(text, list | tuple):
            return [self._encode(each, add_bos, add_special) for each in text]
        return self._encode(text, add_bos, add_special)

    def _encode(self, text: Any, add_bos: bool | None, add_special: bool) -> list[int]:
        _check_text(text)
        ids = self._vocabulary.encode(text, add_special)
        if not add_special:
            self._check_not_forged(ids)
        if add_bos is None:
            return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix]
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ValueError(f"add_bos=True, but the checkpoint of {self.file} has no BOS token")
        return [self.bos_id, *ids]

    def decode(
        self,
        ids: int | Iterable[int],
        skip_special: bool = True,
        *,
        skip_special_tokens: bool | None = None,
    ) -> str:
        """Decode token ids, which may be a tensor.

        ``skip_special_tokens`` is transformers' name for ``skip_special``; control tokens are
        skipped by default. Invalid UTF-8 becomes U+FFFD; ids that only the model's embedding has
        give no text.

        Raises:
            ValueError: an id is outside of the vocabulary.
        """
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        ids = [ids] if isinstance(ids, int) else ids
        skip = skip_special if skip_special_tokens is None else skip_special_tokens
        stream = self.stream(skip)
        return "".join([*map(stream.push, ids), stream.flush()])

    def batch_decode(
        self,
        sequences: Iterable[Iterable[int]],
        skip_special: bool = True,
        *,
        skip_special_tokens: bool | None = None,
    ) -> list[str]:
        """:meth:`decode` each sequence, or each row of a tensor."""
        return [
            self.decode(ids, skip_special, skip_special_tokens=skip_special_tokens)
            for ids in sequences
        ]

    def stream(
        self,
        skip_special: bool = True,
        after: Iterable[int] = (),
        shown: Iterable[int] = (),
    ) -> StreamDecoder:
        """A decoder that takes one id at a time.

        Args:
            skip_special: skip control tokens, except those in ``shown``.
            after: ids that the text continues. Without them, the first word of a sentencepiece
                vocabulary loses its leading space, as at the beginning of a text.
        """
        skipped = self.special_ids.difference(shown) if skip_special else frozenset()
        stream = StreamDecoder(self._vocabulary, self._id_limit, skipped)
        for token in after:
            stream.push(token)
        return stream

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        template: str | None = None,
        tokenize: bool | None = None,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        **variables: Any,
    ) -> Any:
        """Render a conversation with the checkpoint's chat template.

        Returns the text; with ``tokenize=True``, ``return_tensors`` or ``return_dict``, returns
        what transformers does: an :class:`Encoding`, or only ids with ``return_dict=False``.

        Args:
            messages: [{"role": "user", "content": "Hello"}, ...].
            add_generation_prompt: end with the header of the assistant's answer.
            continue_final_message: end within the last message, which the answer continues,
                without a generation prompt.
            template: the name of one of `chat_templates`; None for "tool_use" if `tools` are
                given and there is one, else "default".
            tokenize: True for ids, False for the text.
            return_tensors: "pt" for tensors of one row.
            return_dict: False for ids without their mask.
            variables: further variables of the template, such as `tools` (JSON schemas).

        Raises:
            ValueError: there is no such template, or it failed; names the file.
        """
        chosen = self._template(template, with_tools=variables.get("tools") is not None)
        pieces = {name: self._vocabulary.piece_of(i) for name, i in self._names.items()}
        defaults = {**pieces, "tools": None, "documents": None}
        generation = {"add_generation_prompt": add_generation_prompt and not continue_final_message}
        fields = {**defaults, **variables, **generation}
        render = chosen.render_unfinished if continue_final_message else chosen.render
        text = render(messages, fields)
        if tokenize is False or (tokenize, return_tensors, return_dict) == (None, None, None):
            return text
        rows = [text] if return_tensors else text
        found = self(rows, add_special_tokens=False, return_tensors=return_tensors)
        return found["input_ids"] if return_dict is False else found

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Encode the text of `apply_chat_template`, without a second BOS token.

        The template's markers become control tokens, and so do markers that are spelt out in
        messages, as in transformers.
        """
        text = self.apply_chat_template(
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            **variables,
        )
        return self.encode(text, add_bos=False)

    def id_of(self, piece: str) -> int | None:
        """The id of a token as the vocabulary spells it ("</s>", "\u2581the"); None if unknown."""
        return self._vocabulary.id_of(piece)

    def piece_of(self, token: int) -> str:
        """The vocabulary's spelling of a token; "" for an id without one. Raises ValueError."""
        _check_id(token, self._id_limit)
        return self._vocabulary.piece_of(token)

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes within a text; b"" for an id outside of the vocabulary."""
        known = 0 <= token < self.vocab_size
        return self._vocabulary.bytes_of(token, False) if known else b""

    def ids_with(self, characters: str) -> frozenset[int]:
        """The ids whose text contains any of these ASCII characters, and the control tokens."""
        if characters not in self._ids_with:
            wanted = frozenset(characters.encode("ascii"))
            found = {i for i in range(self.vocab_size) if not wanted.isdisjoint(self.bytes_of(i))}
            self._ids_with[characters] = self.special_ids | found
        return self._ids_with[characters]

    def ids_beginning(self, data: bytes) -> list[int]:
        """The ids whose bytes begin with ``data``, without control tokens."""
        if self._sorted_bytes is None:
            ordinary = (i for i in range(self.vocab_size) if i not in self.special_ids)
            self._sorted_bytes = sorted((self.bytes_of(i), i) for i in ordinary)
        first = bisect_left(self._sorted_bytes, (data, 0))
        found = itertools.takewhile(
            lambda pair: pair[0].startswith(data), itertools.islice(self._sorted_bytes, first, None)
        )
        return [token for _, token in found]

    def _named_id(self, name: str, settings: Settings | None = None) -> int | None:
        if name in self._names:
            return self._names[name]
        # An explicit null means none; config.json counts only if the tokenizer doesn't name it.
        return None if settings is None or name in settings.named else settings.model_id(name)

    def _template(self, name: str | None, with_tools: bool) -> ChatTemplate:
        known = self.chat_templates
        if not known:
            raise ValueError(
                f"{self.file.parent} has no chat template (looked for chat_template.jinja, and "
                "chat_template in tokenizer_config.json): it may be a base model. Write the prompt "
                "yourself and encode() it, or use an instruction-tuned checkpoint"
            )
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in known else "default"
        if name not in known:
            raise ValueError(
                f"{self.file.parent} has no chat template {name!r}; it has {', '.join(known)}"
            )
        return known[name]

    def _check_not_forged(self, ids: list[int]) -> None:
        forged = self.special_ids.intersection(ids) - {self.unk_id}
        if forged:
            piece = self._vocabulary.piece_of(min(forged))
            raise ValueError(
                f"with {self.file}, the text encodes to the control token {piece!r} even as "
                "ordinary text; remove it from the text"
            )


#: A decoder's state: UTF-8 decoder, whether it is at the start, leading spaces left to strip.
DecoderState: TypeAlias = tuple[tuple[bytes, int], bool, int]


class StreamDecoder:
    """Decodes token ids one at a time; text is returned as soon as it is final.

    A character of several tokens is returned with its last one. The joined results of `push` and
    `flush` equal `Tokenizer.decode` of the same ids. A push takes constant time. Made by
    `Tokenizer.stream`.
    """

    def __init__(self, vocabulary: Vocabulary, id_limit: int, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._id_limit = id_limit
        self._at_start = True
        self._skipped = skipped
        self._begin()

    def push(self, token: int, skip: int = 0) -> str:
        """The text that this id completes; "" in the middle of a character.

        Args:
            skip: number of its first bytes to drop because the text already has them.
        """
        _check_id(token, self._id_limit)
        if token in self._skipped:
            return ""
        data = self._vocabulary.bytes_of(token, self._at_start and not skip)[skip:]
        self._at_start = False
        return self._without_margin(self._utf8.decode(data))

    @property
    def state(self) -> DecoderState:
        """The decoder's state, which can be restored."""
        return self._utf8.getstate(), self._at_start, self._margin

    @state.setter
    def state(self, state: DecoderState) -> None:
        utf8, self._at_start, self._margin = state
        self._utf8.setstate(utf8)

    def flush(self) -> str:
        """The rest of an incomplete character; the next push begins a new text."""
        rest = self._without_margin(self._utf8.decode(b"", final=True))
        self._begin()
        return rest

    def _begin(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._vocabulary.utf8_errors)
        self._at_start = True
        self._margin = self._vocabulary.margin

    def _without_margin(self, text: str) -> str:
        """Strip the leading spaces that the encoder added."""
        while text and self._margin:
            if not text.startswith(" "):
                self._margin = 0
                break
            text = text[1:]
            self._margin -= 1
        return text


def _check_call(
    padding: bool | str, truncation: bool, max_length: int | None, return_tensors: str | None
) -> None:
    if padding not in (True, False, "longest", "max_length", "do_not_pad"):
        raise ValueError(
            f'padding is {padding!r}; it must be True, False, "longest" or "max_length"'
        )
    if return_tensors not in (None, "pt"):
        raise ValueError(f'return_tensors is {return_tensors!r}; it must be "pt" or None')
    if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
        raise ValueError(f"max_length is {max_length!r}; it must be a number of tokens")
    if max_length is None and (truncation or padding == "max_length"):
        raise ValueError('max_length is missing: truncation and padding="max_length" need it')


def _path(source: str | os.PathLike[str] | Any) -> Path:
    path = source if isinstance(source, str | os.PathLike) else getattr(source, "path", None)
    if path is None:
        raise ValueError(
            f"a Tokenizer needs a model folder or a GGUF file, but {type(source).__name__} has no "
            "path to one: a config.json alone is enough only for plans"
        )
    return Path(path)


def _read(path: Path) -> tuple[Settings, Vocabulary, dict[str, ChatTemplate]]:
    """Read the settings, vocabulary and chat templates of a model folder or a GGUF file."""
    if (gguf := find_gguf(path)) is not None:
        return read_gguf_tokenizer(gguf)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder, so it has no tokenizer")
    settings = Settings.read(path)
    return settings, open_vocabulary(path, settings), find_templates(path, settings.tokenizer)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text must be a str or a list of them, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate at character {error.start}, which UTF-8 can't encode; "
            "read it with errors='replace'"
        ) from error


def _check_id(token: int, limit: int) -> None:
    if not 0 <= token < limit:
        raise ValueError(f"token id {token} is outside of the vocabulary: vocab_size is {limit}")
