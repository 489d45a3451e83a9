"""``make bench`` and ``python -m tests.bench``: see ``llama.py``, where the reader goes next.

``python -m tests.bench placement`` compares placements instead: ``placement.py``;
``python -m tests.bench linear`` is about reading weights: ``linear.py``.
"""

import sys

from . import linear, llama, placement

if __name__ == "__main__":
    if sys.argv[1:2] == ["placement"]:
        sys.exit(placement.main(sys.argv[2:]))
    if sys.argv[1:2] == ["linear"]:
        sys.exit(linear.main(sys.argv[2:]))
    sys.exit(llama.main())
