"""Many jobs at once on one model: they join and leave at any step, and share a pool of pages.

``job`` says what a job is and what comes of it; ``running`` has the jobs that run: their rows,
their pages, and the calls of the model; ``engine`` decides who runs, and hands out what was
written.
"""

from .engine import Engine, EngineStats
from .job import Event, Handle, Job

__all__ = ["Engine", "EngineStats", "Event", "Handle", "Job"]
