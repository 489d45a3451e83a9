"""From prompts to tokens, by one loop of rows that join and leave.

``scheduler`` is the loop: it decides which rows run, and hands out what was chosen. Where they run
is one of two: ``in_pages`` has rows in pages that all share, ``in_place`` the rows of any cache, as
they are. A ``chooser`` makes tokens of logits: ``job_chooser`` for each job alone,
``batch_chooser``, ``beams`` and ``beam_groups`` for the batch of ``generate`` together.
``speculation`` proposes tokens, and ``guidance`` leads away from negative prompts.

What users call stands on it: ``engine`` and ``generator`` run jobs (``job`` says what one is, and
``reading`` finds what is wrong with it); ``fixed_batch`` is ``model.generate`` (``request``,
``prompts`` and ``hooks`` read its arguments). What is done where memory runs out is in
``fallback``. What tokens are chosen with is ``exkv.sampling``.
"""

from .engine import Engine
from .fallback import Fallback, OnOom
from .fixed_batch import GenerateOutput, generate
from .generator import Generator
from .hooks import Hooks
from .job import Event, Handle, Job
from .scheduler import EngineStats
from .speculation import Draft, NGrams

__all__ = [
    "Draft",
    "Engine",
    "EngineStats",
    "Event",
    "Fallback",
    "GenerateOutput",
    "Generator",
    "Handle",
    "Hooks",
    "Job",
    "NGrams",
    "OnOom",
    "generate",
]
