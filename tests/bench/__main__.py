"""``make bench`` and ``python -m tests.bench``: see ``llama.py``, where the reader goes next.

``python -m tests.bench attention`` measures the attention kernels alone (``attention.py``),
``python -m tests.bench linear`` how fast weights are read (``linear.py``),
``python -m tests.bench placement`` compares placements (``placement.py``),
``python -m tests.bench quality`` measures what each cache loses (``quality.py``),
``python -m tests.bench sample`` how long the choice of a token takes (``sample.py``).
"""

import sys

from . import attention, linear, llama, placement, quality, sample

OTHERS = {
    "attention": attention.main,
    "linear": linear.main,
    "placement": placement.main,
    "quality": quality.main,
    "sample": sample.main,
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        sys.exit(OTHERS[sys.argv[1]](sys.argv[2:]))
    sys.exit(llama.main())
