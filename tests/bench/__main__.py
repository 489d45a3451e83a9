"""``make bench`` and ``python -m tests.bench``: see ``llama.py``, where the reader goes next.

``python -m tests.bench decode`` measures decoding beside other engines (``decode.py``),
``python -m tests.bench readme`` writes README.md's tables of that (``readme.py``),
``python -m tests.bench attention`` measures the attention kernels alone (``attention.py``),
``python -m tests.bench linear`` how fast weights are read (``linear.py``),
``python -m tests.bench sample`` how long the choice of a token takes (``sample.py``),
``python -m tests.bench placement`` compares placements (``placement.py``),
``python -m tests.bench bound`` sets decode steps beside another checkout's (``bound.py``),
``python -m tests.bench engine`` jobs together, alone, and in llama.cpp (``engine.py``),
``python -m tests.bench first`` what one waits for before the first token (``first_second.py``),
``python -m tests.bench load`` opening a model in each format of weights (``load_weights.py``),
``python -m tests.bench packed`` linear layers by packed weights beside bf16 ones (``packed.py``),
``python -m tests.bench quality`` measures what each cache loses (``quality.py``),
``python -m tests.bench step`` where a step of the engine spends its time (``step.py``),
``python -m tests.bench adapters`` decode steps with adapters beside none (``adapters.py``),
``python -m tests.bench speculation`` jobs with proposed tokens beside none (``speculation.py``),
``python -m tests.bench serve`` a server beside the engine alone and beside llama.cpp's
(``serve.py``), or with ``--load`` under a load whose every answer is checked (``serve_load.py``),
``python -m tests.bench real`` what caches and integers cost a real model (``real.py``),
``python -m tests.bench hf`` caches under transformers' models (``hf_caches.py``),
``python -m tests.bench cluster`` stages with a core each beside one (``cluster.py``), or with
``--soak`` clients of a server over three stages (``cluster_soak.py``), or with ``--product`` every
combination of stages, caches and batches, bit by bit (``cluster_product.py``),
``python -m tests.bench cluster-kills`` kills, stops and cuts off hosts of generations
(``cluster_kills.py``),
``python -m tests.bench hosts`` draws what many hosts give, by arithmetic (``hosts.py``).
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what benches share with tests

# Each is imported when it is asked for: some need packages that the others don't.
OTHERS = {
    "adapters": "adapters",
    "attention": "attention",
    "bound": "bound",
    "cluster": "cluster",
    "cluster-kills": "cluster_kills",
    "decode": "decode",
    "engine": "engine",
    "first": "first_second",
    "hf": "hf_caches",
    "hosts": "hosts",
    "linear": "linear",
    "load": "load_weights",
    "packed": "packed",
    "placement": "placement",
    "quality": "quality",
    "readme": "readme",
    "real": "real",
    "sample": "sample",
    "speculation": "speculation",
    "serve": "serve",
    "step": "step",
}


def main(arguments: list[str]) -> int | None:
    """The bench that the first word names, else the whole of ``llama.py``; its exit status."""
    name = OTHERS.get(arguments[0]) if arguments else None
    bench = importlib.import_module(f".{name or 'llama'}", __package__)
    return bench.main(arguments[1:]) if name else bench.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
