"""From loading flags to a model with its cache and plan, before any weight is read.

``flags`` declares the flags, ``prepare`` plans, ``Prepared.load`` carries out the plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from exkv.cache import BY_LOSS, CACHES, KVCache
from exkv.checkpoint import ModelConfig
from exkv.decode import Generator
from exkv.decode.speculation import OWN_HEAD, Draft
from exkv.decode.speculation.limits import check_same_vocabulary
from exkv.model import Model
from exkv.planning import Budget, CacheShape, Plan, Scenario, Workload
from exkv.planning.best import planned
from exkv.planning.best_cache import best_kind
from exkv.planning.budgets import without
from exkv.planning.fitting import ways
from exkv.planning.from_disk import may_be_left
from exkv.planning.solve import longest_in
from exkv.text import Tokenizer
from exkv.weights.on_load import BEST

from .hosts import model_kind

#: Tokens of a cache that nobody gave a length, where it takes its memory from experts that are read
#: from disk instead.
_BESIDE_DISK = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that is planned but not loaded.

    Attributes:
        name: the folder's or file's.
        draft: the draft model's cache; None without one.
        plans: of the model, and of the draft beside it.
        shortened: whether memory limits the cache to fewer tokens than the model has positions.
    """

    name: str
    model: Model
    cache: KVCache
    tokenizer: Tokenizer
    draft: KVCache | None
    plans: tuple[Plan, ...]
    shortened: bool

    @property
    def models(self) -> list[Model]:
        """The models of all plans."""
        return [self.model] if self.draft is None else [self.model, cast(Model, self.draft.model)]

    def load(self, progress: Callable[[int, int], Any] | None = None) -> None:
        """Carry out the plan; ``progress`` is called with a unit's index and the number of units.

        Raises:
            CheckpointError: the files are damaged, or contradict the config.
            PlacementError: memory that the plan counted on was taken since.
        """
        before, total = 0, sum(len(model.units) for model in self.models)
        try:
            for model, plan in zip(self.models, self.plans, strict=True):
                model.load(plan=plan, callback=_counted_from(before, total, progress))
                before += len(model.units)
        except BaseException:
            self.model.unload()
            raise

    def generator(self) -> Generator:
        """A generator of the loaded model."""
        draft: Draft | str | None = OWN_HEAD if self.model.config.mtp else None
        if self.draft is not None:
            draft = Draft(self.models[1], self.draft)
        return Generator(self.model, self.cache, self.tokenizer, draft=draft)


def _counted_from(
    before: int, total: int, progress: Callable[[int, int], Any] | None
) -> Callable[[int, int], Any] | None:
    return None if progress is None else lambda index, _: progress(before + index, total)


def prepare(args: argparse.Namespace, replaced: Sequence[Model] = ()) -> Prepared:
    """Plan a load by its flags; reads small files, but no weights.

    Args:
        replaced: loaded models that will be unloaded first; their memory counts as free.

    Raises:
        ValueError, OSError: the flags or the small files are invalid.
        PlacementError: it doesn't fit; ``plan`` is the attempt.
    """
    config = ModelConfig.from_pretrained(args.model)
    tokenizer = Tokenizer(config)
    models = [model_of(config, args, model_kind(args))]
    if args.draft and args.draft != OWN_HEAD:
        models.append(model_of(ModelConfig.from_pretrained(args.draft), args))
        check_same_vocabulary(*models)
    found = [without(replaced, budget) for budget in budgets(args, models[0])]
    length, shortened = _length(models, args, found)
    scenario = _with_caches(models, args, found, length)
    shapes = [workload.promise.caches[0] for workload in scenario.workloads]
    caches = [shape.made(model) for shape, model in zip(shapes, models, strict=True)]
    return Prepared(
        name=Path(args.model).resolve().name,
        model=models[0],
        cache=caches[0],
        tokenizer=tokenizer,
        draft=caches[1] if len(caches) > 1 else None,
        plans=planned(scenario)[1],
        shortened=shortened,
    )


def _with_caches(
    models: Sequence[Model], args: argparse.Namespace, budgets: Sequence[Budget], length: int
) -> Scenario:
    """A scenario with caches of ``length`` tokens, of the flags' kind or of the best that fits."""
    kind = CACHES["fp16" if args.cache == BEST else args.cache]
    shapes = [CacheShape.planned(model, kind, length, 1, snapshots=True) for model in models]
    scenario = _scenario(models, shapes, args, budgets)
    if args.cache != BEST:
        return scenario
    best = best_kind(scenario)
    return scenario.as_kind(CACHES[BY_LOSS[-1]]) if best is None else best.scenario


def model_of(
    config: ModelConfig, args: argparse.Namespace, make: Callable[..., Model] = Model
) -> Model:
    return make(
        config,
        dtype=args.dtype,
        max_input_len=args.chunk_size,
        embed_cpu=args.embed_cpu,
        weights=args.weights,
        calibration=args.calibration or None,
        mtp=args.draft == OWN_HEAD,
    )


def budgets(args: argparse.Namespace, model: Model) -> list[Budget]:
    """Budgets of the devices, less the flags' reserve.

    Raises:
        ValueError: a device doesn't exist, or two flags contradict each other.
    """
    if args.gpu_split is not None and args.reserve is not None:
        raise ValueError("--reserve and --gpu-split exclude each other: give one of them")
    return model.budgets(args.devices, gpu_split=args.gpu_split, reserve=args.reserve)


def _length(
    models: Sequence[Model], args: argparse.Namespace, budgets: Sequence[Budget]
) -> tuple[int, bool]:
    """Capacity of the caches in tokens, and whether memory limits it to fewer than the models'
    positions."""
    most = min(model.config.max_position_embeddings for model in models)
    if args.max_seq_len is not None or BEST in (args.weights, args.cache):
        return args.max_seq_len or most, False  # "best" chooses bits, not tokens
    kind = CACHES[args.cache]
    shapes = [CacheShape.planned(model, kind, most, 1, snapshots=True) for model in models]
    fitting = 0
    for way in ways(_scenario(models, shapes, args, budgets)):
        fitting = max(fitting, longest_in(way, most))
        if fitting > min(workload.promise.max_input_len for workload in way.workloads):
            break  # smaller chunks would slow prefill for a few tokens more
    if not fitting and may_be_left(_scenario(models, shapes, args, budgets)) is not None:
        fitting = min(most, _BESIDE_DISK)
    return fitting or most, 0 < fitting < most


def _scenario(
    models: Sequence[Model],
    shapes: Sequence[CacheShape],
    args: argparse.Namespace,
    budgets: Sequence[Budget],
) -> Scenario:
    """A draft needs logits of each proposed token; otherwise the last token's are enough."""
    pairs, alone = zip(models, shapes, strict=True), not args.draft
    return Scenario(
        workloads=tuple(Workload.of(m, [shape], last_id_only=alone or None) for m, shape in pairs),
        budgets=tuple(budgets),
        objective=args.objective,
        order=args.order,
        host_experts=args.host_experts,
        disk_experts=args.disk_experts,
    )
