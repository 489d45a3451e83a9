"""``python -m tests.bench BENCH`` measures, and ``make bench`` does: what and how is said by the
docstring of each module that ``BENCHES`` names, and by ``--help``. All share ``harness.py``.
"""

import importlib
import sys
from pathlib import Path

from . import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what benches share with tests

#: Command -> module, which is imported when it is asked for: some need packages that others don't.
BENCHES = {
    "decode": "decode",  # decode steps beside transformers and llama.cpp, with adapters, of files
    "families": "families",  # models with states or latent attention, beside the same
    "mixture": "mixture",  # experts in 4 bits on the host, beside llama.cpp
    "pages": "pages",  # the docs' tables of that
    "load": "load",  # imports, a plan, and opening a model in each format of weights
    "kernels": "kernels",  # attention, linear layers and the choice of a token, alone
    "bound": "bound",  # decode steps of this tree beside another checkout's
    "engine": "engine",  # jobs together, alone, with n-grams, served, in llama.cpp
    "serve-load": "serve_load",  # a server, or one over hosts, under a load, checked
    "placement": "placement",  # plans beside transformers' device maps
    "limits": "limits",  # CPU time of the largest mixtures, and of many unlike cards
    "larger": "larger",  # what models larger than the cards are expected to give
    "walk": "walk",  # files and functions that calls enter
    "reserved": "reserved",  # what a card reserves beyond its ledger
    "quality": "quality",  # what each cache costs the demo model
    "real": "real",  # what caches and integers cost a real model
    "bits": "bits",  # what fewer bits cost real models, ours beside other packers
    "cache-bits": "cache_bits",  # caches whose bits are chosen by layer
    "hf": "hf_caches",  # caches under transformers' models
    "cluster": "cluster",  # stages with a core each beside one, and llama.cpp's RPC
    "cluster-product": "cluster_product",  # all stages, caches and batches, bit by bit
    "cluster-kills": "cluster_kills",  # hosts killed, stopped and cut off
    "hosts": "hosts",  # what many hosts give, by arithmetic
}


def main(words: list[str]) -> int:
    """The bench that the first word names, else the first of all; its exit status."""
    name, rest = (words[0], words[1:]) if words and words[0] in BENCHES else ("decode", words)
    return harness.run(importlib.import_module(f".{BENCHES[name]}", __package__), rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
