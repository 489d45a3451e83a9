"""Record what torch's own caching allocator answers: ``python -m tests.torch_allocator FOLDER``
with the folder that ``build.sh`` has filled. Writes ``traces.json`` beside this file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from . import CASES, TRACES, requests


def main(folder: Path) -> None:
    recorded = {}
    for name, (settings, capacity, seed) in CASES.items():
        lines = [" ".join(map(str, request)) for request in requests(seed)]
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": f"{folder}:{folder}/torch/lib",
            "PYTORCH_CUDA_ALLOC_CONF": settings,
            "FAKE_CAPACITY": str(capacity),
        }
        done = subprocess.run(
            [folder / "replay"], input="\n".join(lines), env=env, capture_output=True, text=True
        )
        answers = [list(map(int, line.split())) for line in done.stdout.splitlines()]
        assert len(answers) == len(lines), done.stderr
        recorded[name] = answers
    rows = (
        f'"{name}": {json.dumps(each, separators=(",", ":"))}' for name, each in recorded.items()
    )
    TRACES.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
