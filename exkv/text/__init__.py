"""Text to token ids and back: start with ``tokenizer``, then ``vocabulary`` (the checkpoints'
tokenizer files), ``chat_template`` (the checkpoint's Jinja template), ``conversation`` (a chat
that fits its context) and ``reasoning`` (text that a model generates before its answer)."""

from .conversation import Conversation
from .tokenizer import StreamDecoder, Tokenizer

__all__ = ["Conversation", "StreamDecoder", "Tokenizer"]
