"""What the server has done, as Prometheus reads it (its text format, version 0.0.4)."""

from __future__ import annotations

import time
from collections import Counter

from exkv.decode import Engine, EngineStats


class Metrics:
    """Counts jobs and tokens.

    Attributes:
        jobs: that are running or waiting.
    """

    def __init__(self) -> None:
        self.jobs = 0
        self._ended: Counter[str] = Counter()
        self._started = time.time()

    def ended(self, reason: str) -> None:
        """One job less, because of this; "" where its client has gone."""
        self.jobs -= 1
        if reason:
            self._ended[reason] += 1

    def text(self, engine: Engine | None) -> str:
        """All figures, with those of the engine and of its pages, where a model is loaded."""
        stats = EngineStats() if engine is None else engine.stats
        pages = (0, 0) if engine is None else (engine.pool.pages, engine.pool.available)
        gauges = {
            "exkv_jobs": ("running or waiting", self.jobs),
            "exkv_pages": ("of the cache", pages[0]),
            "exkv_pages_available": ("that no running job holds", pages[1]),
            "exkv_start_time_seconds": ("since the epoch", self._started),
        }
        counters = {
            "exkv_steps_total": ("of the engine", stats.steps),
            "exkv_prompt_tokens_total": ("of prompts that were read", stats.prompt_tokens),
            "exkv_cached_tokens_total": ("of them, found in pages", stats.found_tokens),
            "exkv_generated_tokens_total": ("that were chosen", stats.new_tokens),
            "exkv_preemptions_total": ("jobs put away for want of room", stats.put_away),
            "exkv_out_of_memory_total": ("calls without room", stats.out_of_memory),
        }
        lines = []
        for kind, figures in (("gauge", gauges), ("counter", counters)):
            for name, (what, value) in figures.items():
                lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name} {value}"]
        lines += ["# HELP exkv_jobs_total ended, by why", "# TYPE exkv_jobs_total counter"]
        lines += [f'exkv_jobs_total{{reason="{r}"}} {n}' for r, n in sorted(self._ended.items())]
        return "\n".join(lines) + "\n"
