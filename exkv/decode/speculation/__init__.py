"""Speculation: tokens are proposed cheaply, and a model checks several of them in one call.

``ngrams`` proposes what followed the same tokens earlier in the text, ``draft`` what a smaller
model would choose, and ``proposals`` asks both; ``limits`` says how many a call may check. The
scheduler chooses a token after each one exactly as without proposals, with the same random
numbers, and goes on for as long as what it chose was proposed. So
tokens are the same, drawn ones too, whatever is proposed; what is wrong costs time only. This is
speculative decoding (Leviathan et al. 2023; Chen et al. 2023) with the coupling of Daliri et al.
2024 ("Coupling without Communication and Drafter-Invariant Speculative Decoding").
"""

from .draft import Draft
from .limits import Limits, check_promised, check_same_vocabulary
from .ngrams import NGramIndex, NGrams
from .proposals import Speculation

__all__ = [
    "Draft",
    "Limits",
    "NGramIndex",
    "NGrams",
    "Speculation",
    "check_promised",
    "check_same_vocabulary",
]
