"""How much work a call is, said by something that a busy machine doesn't change."""

import sys
from collections.abc import Callable


def function_calls(call: Callable[[], object]) -> int:
    """How many Python functions run during a call, its own included."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count
