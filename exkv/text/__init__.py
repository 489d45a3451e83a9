"""Text to token ids and back: ``tokenizer`` first, then ``vocabulary`` (the files that checkpoints
come with), ``chat_template`` (the checkpoint's Jinja template) and ``conversation`` (a chat whose
turns share one cache)."""

from .conversation import Conversation
from .tokenizer import StreamDecoder, Tokenizer

__all__ = ["Conversation", "StreamDecoder", "Tokenizer"]
