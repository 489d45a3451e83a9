"""``make bench`` and ``python -m tests.bench``: see ``llama.py``, where the reader goes next."""

import sys

from .llama import main

if __name__ == "__main__":
    sys.exit(main())
