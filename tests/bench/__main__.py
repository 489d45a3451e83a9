"""``make bench`` and ``python -m tests.bench``: see ``llama.py``, where the reader goes next.

``python -m tests.bench decode`` measures decoding beside other engines (``decode.py``),
``python -m tests.bench readme`` writes README.md's tables of that (``readme.py``),
``python -m tests.bench attention`` measures the attention kernels alone (``attention.py``),
``python -m tests.bench linear`` how fast weights are read (``linear.py``),
``python -m tests.bench sample`` how long the choice of a token takes (``sample.py``),
``python -m tests.bench placement`` compares placements (``placement.py``),
``python -m tests.bench bound`` sets decode steps beside another checkout's (``bound.py``),
``python -m tests.bench first`` what one waits for before the first token (``first_second.py``),
``python -m tests.bench quality`` measures what each cache loses (``quality.py``),
``python -m tests.bench hf`` caches under transformers' models (``hf_caches.py``).
"""

import sys

from . import (
    attention,
    bound,
    decode,
    first_second,
    hf_caches,
    linear,
    llama,
    placement,
    quality,
    readme,
    sample,
)

OTHERS = {
    "attention": attention.main,
    "bound": bound.main,
    "decode": decode.main,
    "readme": readme.main,
    "first": first_second.main,
    "hf": hf_caches.main,
    "linear": linear.main,
    "sample": sample.main,
    "placement": placement.main,
    "quality": quality.main,
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        sys.exit(OTHERS[sys.argv[1]](sys.argv[2:]))
    sys.exit(llama.main())
