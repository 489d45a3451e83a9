"""From the scores of the next token to a token.

``steps`` has every step of the sampler: functions of ``penalties``, ``bans``, ``temperature`` and
``truncation``, and settings that ``bounds`` check; ``step`` says what a step is. ``exllamav2`` and
``huggingface`` are two vocabularies on top: names and orders. ``chain`` runs the first one's, on
sorted candidates, and ``exkv.generation.processors`` the other's. ``scores`` says which scores are
refused. A ``grammar`` and ``banned_strings`` forbid tokens by the text so far, and ``logprobs``
says how likely tokens were.
"""

from .exllamav2 import EXLLAMAV2, SamplingParams
from .grammar import Grammar
from .huggingface import HUGGING_FACE

__all__ = ["EXLLAMAV2", "HUGGING_FACE", "Grammar", "SamplingParams"]
