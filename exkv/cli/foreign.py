"""``exkv plan`` for a model that only transformers can run: the same picture, planned by
``exkv.integrations.transformers`` if transformers is installed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from exkv.errors import PlacementError, UnsupportedArchitecture
from exkv.models.transformer import CHUNKS
from exkv.planning import Budget, Plan
from exkv.sizes import human
from exkv.version import __version__

from .flags import unknowns
from .picture import draw, page_console, say

#: Flags for exkv's own models only.
_OWN_ONLY = ("draft", "weights", "svg", "simulate", "hosts")


def plan_foreign(
    args: argparse.Namespace, budgets: Sequence[Budget], refused: UnsupportedArchitecture
) -> int:
    """Plan a model that exkv refused -> the exit status.

    Raises:
        ValueError: transformers is missing, or refuses it too, or a flag needs an exkv model.
    """
    started = time.perf_counter()
    try:
        from exkv.integrations.transformers.measuring import Promise
        from exkv.integrations.transformers.placing import config_of, map_of, plan_blocks
    except ImportError:
        raise ValueError(
            f"{refused}. transformers may run it: pip install 'exkv[hf]' to plan that"
        ) from None
    _check(args)
    folder = Path(args.model)
    try:
        config = config_of(folder.parent if folder.is_file() else folder)
    except (ValueError, KeyError, OSError):
        raise refused from None
    text = config.get_text_config(decoder=True)
    length = args.max_seq_len or getattr(text, "max_position_embeddings", None)
    if length is None:
        raise ValueError("give --max-seq-len: the config names no length")
    promise = Promise(
        max_seq_len=int(length),
        batch_size=int(args.batch_size),
        max_input_len=None if config.is_encoder_decoder else args.chunk_size or CHUNKS[0],
        cache=args.cache,
    )
    where: dict[str, str] = {}
    try:
        units, plan = plan_blocks(config, promise, budgets, objective=args.objective)
        where = map_of(units, plan)
        sentence = f"It fits; the smallest headroom is {human(plan.smallest_headroom)}."
    except PlacementError as error:
        assert error.plan is not None, "a plan refuses with its attempt"
        plan, sentence = error.plan, str(error)
    name = (config.architectures or [type(config).__name__])[0]
    who = f"transformers runs {name}, exkv doesn't: load it with this device_map, and an HFCache."
    seconds = time.perf_counter() - started
    _print(args, plan, f"{who} {sentence}", where, seconds)
    return 0 if where else 1


def _check(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in _OWN_ONLY if getattr(args, name)] + unknowns(args)
    if given:
        raise ValueError(f"{', '.join(given)}: for models that exkv runs itself")


def _print(
    args: argparse.Namespace, plan: Plan, sentence: str, where: dict[str, str], seconds: float
) -> None:
    if args.json:
        values = {
            "fits": bool(where),
            "answer": sentence,
            "runs_with": "transformers",
            "device_map": where,
            "plans": [json.loads(plan.to_json())],
            "seconds": round(seconds, 3),
            "exkv": __version__,
        }
        print(json.dumps(values, indent=1))
        return
    console = page_console()
    draw(console, [plan], ["model"])
    say(console, sentence, style="bold green" if where else "bold red")
    say(console, f"Planned in {seconds:.2f} s.", style="dim")
