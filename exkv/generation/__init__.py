"""From a prompt to tokens: ``model.generate`` with Hugging Face's words, and what the loop of
``exkv.engine`` chooses tokens with.

``config`` says how to decode, ``call`` is where a call of ``generate`` comes in; ``sampling``,
``beams`` and ``groups`` are the loops, each over a ``runner``, which holds the model and the cache.
``assisted`` is that of tokens which ``speculation`` proposes. What a loop is given and gives back
is in ``task``; what is done to the scores in each step, in ``processors``, and what of the caller's
runs there, in ``hooks``; what is done where memory runs out, in ``fallback``. A ``completion`` of
the engine is text under way: its tokens are chosen by ``exkv.sampling``.
"""

from .call import generate
from .config import GenerationConfig
from .fallback import Fallback
from .speculation import Draft, NGrams
from .task import GenerateOutput

__all__ = [
    "Draft",
    "Fallback",
    "GenerateOutput",
    "GenerationConfig",
    "NGrams",
    "generate",
]
