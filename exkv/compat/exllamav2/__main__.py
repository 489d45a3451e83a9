"""``python -m exkv.compat.exllamav2 script.py ...`` runs a script for ExLlamaV2 unchanged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .cuda import stand_in_for_cuda
from .serving import serve


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m exkv.compat.exllamav2 SCRIPT [ARGUMENTS ...]")
    script = Path(sys.argv[1])
    if not script.is_file():
        sys.exit(f"{script} is not a file")
    serve()
    stand_in_for_cuda()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
