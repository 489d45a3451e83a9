"""``ExLlamaV2Tokenizer``: ids as tensors with a row per text, over :class:`exkv.Tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, overload

import torch
from torch import Tensor

from exkv import Tokenizer
from exkv.batch import pad_rows

from .config import ExLlamaV2Config
from .missing import Adapter, missing_from, placeholder, refuse_arguments

ExLlamaV2TokenizerBase = placeholder("ExLlamaV2TokenizerBase", __name__)
ExLlamaV2TokenizerHF = placeholder("ExLlamaV2TokenizerHF", __name__)

_MASKED = -65504.0  # the lowest finite half


class ExLlamaV2Tokenizer(Adapter):
    """Text to ids and back.

    Args:
        config: its folder has the tokenizer.
        lazy_init: without effect: tables are made on demand.

    Attributes:
        exkv: the :class:`exkv.Tokenizer` that does the work.
        bos_token_id: the tokenizer's own, unless the config's was set.
        eos_token_id: the config's, or the tokenizer's own; None if there is none. All ids that end
            a text are in ``exkv.eos_ids``.
        pad_token_id: fills rows; the EOS token's if there is none.
        extended_id_to_piece, extended_piece_to_id: the control tokens.

    Raises:
        FileNotFoundError, ValueError: as :class:`exkv.Tokenizer` does.
    """

    newline_token = "\n"
    space_token = " "

    def __init__(
        self,
        config: ExLlamaV2Config,
        lazy_init: bool = True,
        force_json: bool = False,
        force_spm: bool = False,
    ) -> None:
        refuse_arguments("ExLlamaV2Tokenizer", force_json=force_json, force_spm=force_spm)
        read = config.exkv
        if read is None:
            raise ValueError("call config.prepare() before ExLlamaV2Tokenizer(config)")
        self.config = config
        self.exkv = tokenizer = Tokenizer(config.model_dir)
        self._encoded: dict[str, Tensor] = {}
        bos, pad = tokenizer.bos_id, tokenizer.pad_id
        if config.bos_token_id != read.bos_token_id:
            bos = config.bos_token_id
        if config.pad_token_id != read.pad_token_id:
            pad = config.pad_token_id
        self.bos_token_id = bos
        self.eos_token_id = _first(config.eos_token_id, *tokenizer.eos_ids)
        self.pad_token_id = _first(pad, tokenizer.id_of("<pad>"), self.eos_token_id) or 0
        self.extended_id_to_piece = {i: tokenizer.piece_of(i) for i in tokenizer.special_ids}
        self.extended_piece_to_id = {piece: i for i, piece in self.extended_id_to_piece.items()}

    @cached_property
    def tokenizer_model(self) -> TokenizerModel:
        """The vocabulary, for lm-format-enforcer and formatron."""
        return TokenizerModel(self.exkv)

    @property
    def tokenizer(self) -> TokenizerModel:
        return self.tokenizer_model

    @overload
    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: Literal[False] = False,
        embeddings: object = None,
    ) -> Tensor: ...

    @overload
    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        *,
        return_offsets: Literal[True],
        embeddings: object = None,
    ) -> tuple[Tensor, Tensor]: ...

    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: object = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The ids of a text, (1, T), or of several, (B, T), left-padded.

        Args:
            add_bos, add_eos: add these tokens to each text, if the model has them.
            encode_special_tokens: parse control tokens in the texts.
            return_offsets: also return minus the padding of each row, int32 (B,).

        Raises:
            ValueError: as :meth:`exkv.Tokenizer.encode` does.
        """
        refuse_arguments("tokenizer.encode", embeddings=embeddings)
        texts = [text] if isinstance(text, str) else text
        rows = self.rows(texts, add_bos, add_eos, encode_special_tokens)
        ids, lengths = pad_rows(rows, fill=self.pad_token_id, left=True)
        if not return_offsets:
            return ids
        return ids, torch.tensor([n - ids.shape[1] for n in lengths], dtype=torch.int32)

    def rows(
        self, texts: Sequence[str], add_bos: bool, add_eos: bool, encode_special_tokens: bool
    ) -> list[list[int]]:
        """The ids of each text, without padding; for arguments see :meth:`encode`."""
        before = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        after = [self.eos_token_id] if add_eos and self.eos_token_id is not None else []
        encoded = (self.exkv.encode(each, False, encode_special_tokens) for each in texts)
        return [[*before, *ids, *after] for ids in encoded]

    def decode(
        self, ids: Tensor | Sequence[Tensor], decode_special_tokens: bool = False
    ) -> str | list[str]:
        """The text of a row of ids, or a list of texts for several rows.

        Padding is skipped, and so are control tokens unless ``decode_special_tokens`` is set.
        """
        if not isinstance(ids, Tensor) or ids.dim() > 1:
            rows = (row for each in ids for row in each.reshape(-1, each.shape[-1]))
            return [self._decode(row, decode_special_tokens) for row in rows]
        return self._decode(ids, decode_special_tokens)

    def _decode(self, ids: Tensor, special: bool) -> str:
        known = [i for i in ids.tolist() if i != self.pad_token_id and i < self.exkv.vocab_size]
        return self.exkv.decode(known, skip_special=not special)

    def padding_mask(self, ids: Tensor) -> Tensor:
        """A mask of the ids' shape, half: below 0 at padding, 0 elsewhere."""
        mask = torch.zeros_like(ids, dtype=torch.float16)
        return mask.masked_fill(ids == self.pad_token_id, _MASKED)

    def num_tokens(self, text: str) -> int:
        return len(self.exkv.encode(text, False, False))

    def cached_encode_str(self, text: str) -> Tensor:
        """:meth:`encode` of one text, cached."""
        if text not in self._encoded:
            self._encoded[text] = self.encode(text)
        return self._encoded[text]

    # One token ----------------------------------------------------------------------------

    def single_token(self, token_id: int) -> Tensor:
        """(1, 1)."""
        return torch.tensor([[token_id]])

    def single_id(self, token: str) -> int | None:
        """The id of a token by its text or its spelling in the vocabulary; None if unknown."""
        known = self.exkv.id_of(token)
        return self.get_piece_to_id_dict().get(token) if known is None else known

    def get_vocab_size(self) -> int:
        return self.exkv.vocab_size

    @property
    def actual_vocab_size(self) -> int:
        return self.exkv.vocab_size

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """The text of each token; "" for control tokens unless they are included."""
        return [
            self.exkv.piece_of(i) * include_special_tokens
            if i in self.exkv.special_ids
            else self.exkv.bytes_of(i).decode(errors="replace")
            for i in range(self.exkv.vocab_size)
        ]

    def get_piece_to_id_dict(self) -> dict[str, int]:
        """A token's text -> its id, the lowest one of several."""
        pieces = self.get_id_to_piece_list(include_special_tokens=True)
        return {piece: i for i, piece in reversed(list(enumerate(pieces)))}

    bos_token = property(lambda self: self._spelling(self.bos_token_id))
    eos_token = property(lambda self: self._spelling(self.eos_token_id))
    pad_token = property(lambda self: self._spelling(self.pad_token_id))
    unk_token = property(lambda self: self._spelling(self.unk_token_id))

    @property
    def unk_token_id(self) -> int | None:
        return self.exkv.unk_id

    @property
    def newline_token_id(self) -> int | None:
        return self.single_id("\n")

    @property
    def space_token_id(self) -> int | None:
        return self.single_id(" ")

    def _spelling(self, token: int | None) -> str | None:
        return None if token is None else self.exkv.piece_of(token)


class TokenizerModel(Adapter):
    """A vocabulary as spelt in its file.

    Attributes:
        vocab: the pieces by id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab = [tokenizer.piece_of(i) for i in range(tokenizer.vocab_size)]

    def vocab_size(self) -> int:
        return len(self.vocab)

    def id_to_piece(self, idx: int) -> str:
        return self.vocab[idx]

    def piece_to_id(self, text: str) -> int | None:
        return self.vocab.index(text) if text in self.vocab else None


def _first(*tokens: int | None) -> int | None:
    return next((token for token in tokens if token is not None), None)


__getattr__ = missing_from(__name__)
