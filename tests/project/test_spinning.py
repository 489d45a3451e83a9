"""How long OpenMP's threads spin is said before torch is imported, which is when it is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys

class WithoutTorch:
    def find_spec(self, name, *others):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit(0)

sys.meta_path.insert(0, WithoutTorch())
import exkv
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "20000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_a_fraction_of_a_millisecond_unless_the_user_says_otherwise(given, found):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == found, done.stderr
