"""Sampling: from the logits of the next token to a token.

``steps`` lists every step of the sampler: functions of ``penalties``, ``bans``, ``temperature`` and
``truncation``, with settings checked by ``bounds``; ``step`` defines a step. ``exllamav2`` and
``huggingface`` are two vocabularies on top: names and orders. ``chain`` runs the first, on sorted
candidates, and ``exkv.decode.processors`` the second. ``scores`` refuses bad scores. ``grammar``
and ``banned_strings`` forbid tokens depending on the text so far, and ``logprobs`` reads the
log-probabilities of chosen tokens.
"""

from .exllamav2 import EXLLAMAV2, SamplingParams
from .grammar import Grammar
from .huggingface import HUGGING_FACE

__all__ = ["EXLLAMAV2", "HUGGING_FACE", "Grammar", "SamplingParams"]
