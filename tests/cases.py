"""Checks that run over drawn cases, once for each backend or reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def check_cases(
    check: Callable[..., None], cases: Mapping[str, SearchStrategy], *args: Any, examples: int
) -> None:
    """``check(*args, **case)`` for cases that hypothesis draws from these strategies."""

    @settings(max_examples=examples)
    @given(**cases)
    def run(**case: Any) -> None:
        check(*args, **case)

    run()
