"""``make bench`` and ``python -m tests.bench``: whole models, see ``llama.py``, where the reader
goes next; ``python -m tests.bench attention``: the attention kernels alone, ``attention.py``."""

import sys

from . import attention, llama

if __name__ == "__main__":
    if sys.argv[1:2] == ["attention"]:
        sys.exit(attention.main(sys.argv[2:]))
    sys.exit(llama.main())
