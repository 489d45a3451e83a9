"""Server metrics in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

import time
from collections import Counter

from exkv.decode import Engine, EngineStats


class Metrics:
    """Counts jobs and tokens.

    Attributes:
        jobs: jobs running or waiting.
    """

    def __init__(self) -> None:
        self.jobs = 0
        self._ended: Counter[str] = Counter()
        self._started = time.time()

    def ended(self, reason: str) -> None:
        """Count a job as ended for this reason; "" if its client disconnected."""
        self.jobs -= 1
        if reason:
            self._ended[reason] += 1

    def text(self, engine: Engine | None) -> str:
        """All metrics; those of the engine and its pages are 0 while no model is loaded."""
        stats = EngineStats() if engine is None else engine.stats
        pages = (0, 0) if engine is None else (engine.pool.pages, engine.pool.available)
        gauges = {
            "exkv_jobs": ("jobs running or waiting", self.jobs),
            "exkv_pages": ("KV pages in the pool", pages[0]),
            "exkv_pages_available": ("KV pages that no running job holds", pages[1]),
            "exkv_start_time_seconds": ("start time, seconds since the epoch", self._started),
        }
        counters = {
            "exkv_steps_total": ("engine steps", stats.steps),
            "exkv_prompt_tokens_total": ("prompt tokens processed", stats.prompt_tokens),
            "exkv_cached_tokens_total": ("prompt tokens in the prefix cache", stats.found_tokens),
            "exkv_generated_tokens_total": ("tokens generated", stats.new_tokens),
            "exkv_preemptions_total": (
                "jobs preempted for lack of pages or memory",
                stats.put_away,
            ),
            "exkv_memory_pressure_total": (
                "times that fewer jobs could run because another program took memory",
                stats.pressed,
            ),
            "exkv_out_of_memory_total": ("calls that ran out of memory", stats.out_of_memory),
            "exkv_expert_exchanges_total": ("experts copied to a card", stats.exchanges),
            "exkv_exchanged_bytes_total": ("bytes of copied experts", stats.exchanged_bytes),
        }
        lines = []
        for kind, figures in (("gauge", gauges), ("counter", counters)):
            for name, (what, value) in figures.items():
                lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name} {value}"]
        lines += ["# HELP exkv_jobs_total jobs ended, by reason", "# TYPE exkv_jobs_total counter"]
        lines += [f'exkv_jobs_total{{reason="{r}"}} {n}' for r, n in sorted(self._ended.items())]
        return "\n".join(lines) + "\n"
