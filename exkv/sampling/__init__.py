"""From the scores of the next token to a token.

``step`` says what a step of the sampler is; ``penalties``, ``bans``, ``temperature`` and
``truncation`` have them all, each once. ``exllamav2`` and ``huggingface`` are the two vocabularies
on top: names and orders. ``chain`` runs the first one's, on sorted candidates, and
``exkv.generation.processors`` the other's. ``bounds`` checks settings; ``scores`` says which scores
are refused. A ``grammar`` and ``banned_strings`` forbid tokens by the text so far, and ``logprobs``
says how likely tokens were.
"""

from .exllamav2 import EXLLAMAV2, SamplingParams
from .grammar import Grammar
from .huggingface import HUGGING_FACE
from .step import Step

#: All steps, those that both vocabularies have once.
STEPS: tuple[Step, ...] = tuple(dict.fromkeys(row.step for row in (*EXLLAMAV2, *HUGGING_FACE)))

__all__ = ["EXLLAMAV2", "HUGGING_FACE", "STEPS", "Grammar", "SamplingParams", "Step"]
