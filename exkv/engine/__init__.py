"""The loop that chooses tokens: many jobs at once, or one batch on any cache.

``job`` says what a job is and what comes of it, and ``reading`` finds what is wrong with it.
``scheduler`` is the loop: it decides who runs, and hands out what was written, with a token for
each job by ``choosing``. Where jobs run is one of two: ``running`` has rows in pages that all
share, ``in_place`` the rows of any cache, as they are. ``engine`` and ``generator`` are what users
call, one on each.
"""

from .engine import Engine
from .generator import Generator
from .job import Event, Handle, Job
from .scheduler import EngineStats

__all__ = ["Engine", "EngineStats", "Event", "Generator", "Handle", "Job"]
