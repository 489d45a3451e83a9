"""The flags that say what is loaded and where, with the names that ``exkv plan`` gives them, and
what comes of them: a model with its cache and its plan, before a weight is read.

``prepare`` plans, ``Prepared.load`` carries the plan out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exkv.cache import CACHES, KVCache
from exkv.checkpoint import DTYPES, ModelConfig
from exkv.model import Model, split_budgets
from exkv.planning import Budget, CacheShape, Plan, Scenario, Workload, make_budgets
from exkv.planning.best import settled
from exkv.planning.budgets import without
from exkv.planning.plan import OBJECTIVES, ORDERS
from exkv.planning.solve import longest, plans_for
from exkv.sizes import parse_sizes
from exkv.text import Tokenizer
from exkv.weights.on_load import BEST, BITS

_MOST = 1 << 30


def add_loading_flags(flags: argparse._ActionsContainer) -> None:
    """All of them but the model itself."""
    add = flags.add_argument
    add(
        "--devices",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help="in the order in which they are filled, such as cuda:0,cuda:1,cpu (all)",
    )
    add(
        "--gpu-split",
        "-gs",
        type=gpu_split,
        metavar="GB,GB",
        help="GB to use on each device, such as 20,24; or auto (the default): all that is free",
    )
    add(
        "--reserve",
        "--reserve-vram",
        dest="reserve",
        type=sizes,
        metavar="SIZES",
        help="what to leave free on each device: 1G; or of one after the other: 1G,64M",
    )
    add(
        "--max-seq-len",
        "--length",
        "-l",
        type=count,
        metavar="TOKENS",
        help="tokens that the cache holds (as many as fit, up to the model's positions)",
    )
    add("--cache", choices=list(CACHES), default="fp16", help="kind of cache (fp16)")
    add(
        "--chunk-size",
        type=count,
        default=2048,
        metavar="TOKENS",
        help="the most tokens of a prompt to run at once (2048)",
    )
    add(
        "--weights",
        choices=[*BITS, BEST],
        help="turn float weights into integers as they are loaded; best: each unit's into as many "
        "bits as there is room for",
    )
    add("--calibration", type=Path, metavar="FILE", help="a text that --weights best measures on")
    add("--dtype", choices=DTYPES, help="of arithmetic and floats (what the model says)")
    add("--embed-cpu", action="store_true", help="keep the embedding in host memory")
    add("--objective", choices=OBJECTIVES, default="pack", help="how to spread over the devices")
    add("--order", choices=ORDERS, default="listed", help="any: fill devices in any order")


# Values of flags ----------------------------------------------------------------------------------


def gpu_split(text: str) -> list[float] | None:
    if text == "auto":
        return None
    try:
        split = [float(size) for size in text.split(",")]
        if all(map(math.isfinite, split)):
            return split
        raise ValueError
    except ValueError:
        message = f"{text!r} is neither auto nor GB for each device, such as 20,24"
        raise argparse.ArgumentTypeError(message) from None


def whole(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
    return int(text)


def count(text: str) -> int:
    return whole(text, 1, _MOST)


def sizes(text: str) -> int | list[int]:
    """One size for every device, or a list of them."""
    try:
        parsed = parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return parsed if "," in text else parsed[0]


# What comes of them -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that is planned and not loaded.

    Attributes:
        name: the folder's or file's.
        shortened: the cache holds fewer tokens than the model has positions, for want of memory.
    """

    name: str
    model: Model
    cache: KVCache
    tokenizer: Tokenizer
    plan: Plan
    shortened: bool

    def load(self, progress: Callable[[int, int], Any] | None = None) -> None:
        """Carry the plan out; ``progress`` is called with a unit's index and their number.

        Raises:
            CheckpointError: the files are damaged, or contradict the config.
            PlacementError: somebody took what the plan counted on.
        """
        self.model.load(plan=self.plan, callback=progress)


def prepare(args: argparse.Namespace, replaced: Model | None = None) -> Prepared:
    """Plan what the flags ask for; small files are read, and no weights.

    Args:
        replaced: a loaded model that will be unloaded before this one comes: planned as if it were
            gone.

    Raises:
        ValueError, OSError: the flags or the small files make no sense.
        PlacementError: it doesn't fit; ``plan`` is the attempt.
    """
    path = Path(args.model)
    config = ModelConfig.from_pretrained(path)
    tokenizer = Tokenizer(config)
    text = args.calibration and args.calibration.read_text("utf-8")
    model = Model(
        config,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        max_input_len=args.chunk_size,
        embed_cpu=args.embed_cpu,
        weights=args.weights,
        calibration=text or None,
    )
    found = [without(replaced, budget) for budget in budgets(args)]
    length, shortened = _length(model, args, found)
    cache = CACHES[args.cache](model, max_seq_len=length)
    (plan,) = plans_for(settled(_scenario(model, CacheShape.of(cache), args, found)))
    return Prepared(
        name=path.resolve().name,
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        plan=plan,
        shortened=shortened,
    )


def budgets(args: argparse.Namespace) -> list[Budget]:
    """What the devices offer, with what the flags leave free.

    Raises:
        ValueError: a device isn't there, or two flags contradict each other.
    """
    if args.gpu_split is None:
        return make_budgets(args.devices, reserve=args.reserve)
    if args.reserve is not None:
        raise ValueError(
            "--reserve belongs to a split that is made by itself; --gpu-split says itself how much "
            "to use"
        )
    return split_budgets(args.devices, args.gpu_split)


def _length(model: Model, args: argparse.Namespace, budgets: Sequence[Budget]) -> tuple[int, bool]:
    """Tokens that the cache is to hold, and whether these are fewer than the model's positions
    because no more fit."""
    most = model.config.max_position_embeddings
    if args.max_seq_len is not None or args.weights == BEST:  # best has bits to choose, not tokens
        return args.max_seq_len or most, False
    shape = CacheShape.planned(model, CACHES[args.cache], most, 1)
    fitting = longest(_scenario(model, shape, args, budgets), most)
    return fitting or most, 0 < fitting < most


def _scenario(
    model: Model, shape: CacheShape, args: argparse.Namespace, budgets: Sequence[Budget]
) -> Scenario:
    return Scenario(
        workloads=(Workload.of(model, [shape], last_id_only=True),),
        budgets=tuple(budgets),
        objective=args.objective,
        order=args.order,
    )
