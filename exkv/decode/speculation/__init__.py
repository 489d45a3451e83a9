"""Speculation: tokens are proposed cheaply, and the model verifies several in one call.

``ngrams`` proposes the tokens that followed the same ones earlier in the text, ``draft`` those that
a smaller model would choose, ``heads`` those of the model's own MTP head; ``proposals`` calls them,
and ``limits`` bounds how many tokens a call verifies. The scheduler chooses each token exactly as
without proposals, with the same random numbers, for as long as its choices equal the proposed ones.
So tokens are the same, also sampled ones, whatever the proposals. This is speculative decoding
(Leviathan et al. 2023; Chen et al. 2023) with the coupling of Daliri et al. 2024 ("Coupling without
Communication and Drafter-Invariant Speculative Decoding").
"""

from .draft import Draft
from .heads import MTP, OWN_HEAD, check_has_head
from .limits import Limits, check_promised, check_rollback, check_same_vocabulary
from .ngrams import NGramIndex, NGrams
from .proposals import Speculation

__all__ = [
    "MTP",
    "OWN_HEAD",
    "Draft",
    "Limits",
    "NGramIndex",
    "NGrams",
    "Speculation",
    "check_has_head",
    "check_promised",
    "check_rollback",
    "check_same_vocabulary",
]
