"""From prompts to tokens: one loop, in which rows join and leave.

``scheduler`` is the loop: it decides which rows run, and hands out the tokens that were chosen.
Rows run in pages of a shared pool (``in_pages``), or in place in any cache (``in_place``). A
``chooser`` turns logits into tokens: ``job_chooser`` for each job alone, ``batch_chooser``,
``beams`` and ``beam_groups`` for a batch of ``generate`` together. ``speculation`` proposes tokens,
and ``guidance`` applies negative prompts.

Users call ``engine`` and ``generator``, which run jobs (``job`` defines them, ``new_job`` checks
them), and ``fixed_batch``, which is ``model.generate`` (``request``, ``prompts`` and ``hooks`` read
its arguments). ``fallback`` is what it does when memory runs out. The sampler is
``exkv.sampling``.
"""

from .engine import Engine
from .fallback import Fallback, OnOom
from .fixed_batch import GenerateOutput, generate
from .generator import Generator
from .hooks import Hooks
from .job import Event, Handle, Job
from .scheduler import EngineStats
from .speculation import MTP, Draft, NGrams

__all__ = [
    "MTP",
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
