"""How hypothesis draws examples, in every process of the tests: importing this sees to it.

They are the same each time: who changes something else isn't told of a failure that comes up once
in a hundred runs. ``EXKV_CHANCE=1 make test`` draws others each time, to find what these miss.
"""

import os

from hypothesis import settings

# A slow example on a busy machine is no failure.
settings.register_profile(
    "exkv", deadline=None, derandomize=os.environ.get("EXKV_CHANCE", "0") in ("", "0")
)
settings.load_profile("exkv")
