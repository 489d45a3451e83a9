"""From the scores of the next token to a token.

``steps`` has every step of the sampler: functions of ``penalties``, ``bans``, ``temperature`` and
``truncation``, with settings that ``bounds`` check; ``step`` defines a step. ``exllamav2`` and
``huggingface`` are two vocabularies on top: names and orders. ``chain`` runs the first, on sorted
candidates, and ``exkv.decode.processors`` the second. ``scores`` refuses bad scores.
``grammar`` and ``banned_strings`` forbid tokens by the text so far, and ``logprobs`` are those of
chosen tokens.
"""

from .exllamav2 import EXLLAMAV2, SamplingParams
from .grammar import Grammar
from .huggingface import HUGGING_FACE

__all__ = ["EXLLAMAV2", "HUGGING_FACE", "Grammar", "SamplingParams"]
