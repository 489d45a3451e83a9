"""From a checkpoint to a running engine, with its placement planned before anything is loaded.

``ModelFolder`` lists the models that clients may request by name. ``Prepared`` holds everything
except a model's weights: it plans the placement, then loads. ``serving`` uses it to replace the
model of a running server.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exkv.cache import KVCache, PagedCache
from exkv.cache.paging.growth import PAGE
from exkv.checkpoint import DTYPES, ModelConfig
from exkv.decode import Engine
from exkv.decode.speculation import MTP, OWN_HEAD, Draft, check_same_vocabulary
from exkv.loading.options import LoadOptions
from exkv.model import Model
from exkv.planning import Budget, CacheShape, Scenario, Workload, with_measured_bandwidths
from exkv.planning.answer import Answer, as_values, fixed, solved
from exkv.planning.best import planned
from exkv.planning.best_cache import best_bits, in_fewest_bits_of_caches
from exkv.planning.budgets import without
from exkv.planning.solve import longest
from exkv.sampling import SamplingParams
from exkv.text import Tokenizer
from exkv.version import __version__
from exkv.weights.on_load import BEST

#: Kind of cache -> bits per key or value.
CACHE_BITS = {"fp16": 16, "8bit": 8, "4bit": 4, "2bit": 2}
_TOKENS = 32_768  # default size of the cache, if the model has positions for more
_MOST_TOKENS = 1 << 27  # page lists are allocated before the plan says whether the cache fits
_LISTED = 1000  # maximum number of models listed from a folder
_CHUNKS = (256, 128, 64)  # tokens per prefill step; other jobs decode between two steps
_DRAFTED = 5  # tokens that a draft proposes per job at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How a model is loaded.

    Attributes:
        max_seq_len: tokens in the cache, over all jobs; None for as many as the model has
            positions, up to 32,768.
        cache: one of ``CACHE_BITS``; "best" for the most bits that fit or, with a calibration
            text, the bits per layer that lose least.
        page: tokens per page; prompts share whole pages.
        host_tokens: capacity, in tokens, of the host memory tier for evicted pages of the prefix
            cache.
        away_tokens: upper bound on tokens of preempted jobs in host memory; None for no bound.
        max_running: number of jobs that run at once.
        chunk_size: tokens per prefill step; None for 256, or fewer if only they fit.
        devices: names, in the order in which they are filled; None for all.
        gpu_split: GB to use on each device; None for all free memory except ``reserve``.
        reserve: bytes to leave free on each device, one number for all or one for each.
        weights: integer type to which float weights are quantized while loading; None to load them
            as stored.
        calibration: a text with which to calibrate that quantization.
        dtype: of activations and float weights; None for the checkpoint's.
        embed_cpu: keep the embedding in host memory; None to do so only if the model does not fit
            otherwise.
        objective, order, host_experts, disk_experts: how to use the devices, see
            :func:`exkv.place`.
        draft: a smaller model with the same vocabulary that proposes tokens, with the same kind of
            cache; "mtp" for the model's own head, None for none.
        exchange_experts: see :class:`exkv.Model`.
    """

    max_seq_len: int | None = None
    cache: str = "fp16"
    page: int = PAGE
    host_tokens: int = 0
    away_tokens: int | None = None
    max_running: int = 16
    chunk_size: int | None = None
    devices: tuple[str, ...] | None = None
    gpu_split: tuple[float, ...] | None = None
    reserve: int | tuple[int, ...] | None = None
    weights: str | None = None
    calibration: str | None = None
    dtype: str | None = None
    embed_cpu: bool | None = None
    objective: str = "pack"
    order: str = "listed"
    host_experts: bool = True
    disk_experts: bool = True
    draft: Path | str | None = None
    exchange_experts: bool = True

    def __post_init__(self) -> None:
        if self.max_seq_len is not None and self.max_seq_len > _MOST_TOKENS:
            raise ValueError(f"max_seq_len is {self.max_seq_len:,}; at most {_MOST_TOKENS:,}")
        if self.cache not in (*CACHE_BITS, BEST):
            known = ", ".join((*CACHE_BITS, BEST))
            raise ValueError(f"cache is {self.cache!r:.40}; it is one of {known}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r:.40}; it is one of {', '.join(DTYPES)}")
        if self.gpu_split is not None and self.reserve is not None:
            raise ValueError("reserve and gpu_split exclude each other: give one of them")
        if self.gpu_split is not None and (self.objective, self.order) != ("pack", "listed"):
            raise ValueError("objective and order don't apply to gpu_split: leave them out")

    def budgets(self, model: Model) -> list[Budget]:
        """The devices' budgets for a model now."""
        budgets = model.budgets(self.devices, gpu_split=self.gpu_split, reserve=self.reserve)
        return with_measured_bandwidths(budgets) if self.objective == "speed" else budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A loaded model with its engine.

    Attributes:
        engine: has the model, the cache and the tokenizer.
        name: the model's name for clients.
        usual: default sampling parameters of requests.
        path: of the checkpoint; None if the server did not load the model itself.
        options: how it was loaded.
        created: when, in seconds since the epoch.
    """

    engine: Engine
    name: str
    usual: SamplingParams = field(default_factory=SamplingParams)
    path: Path | None = None
    options: ServeOptions = field(default_factory=ServeOptions)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def models(self) -> list[Model]:
        """The model and its draft, if any."""
        draft = self.engine.draft
        found = [self.engine.model, *(() if draft is None else (draft.model,))]
        return [model for model in found if isinstance(model, Model)]

    @property
    def fingerprint(self) -> str:
        """Identifies the model, how it was loaded, and the version of exkv."""
        asked = repr((__version__, self.name, self.options))
        return "fp_" + hashlib.sha256(asked.encode()).hexdigest()[:16]

    @property
    def chunk(self) -> int:
        """Tokens of a prefill step."""
        return min(self.engine.model.max_input_len, _CHUNKS[0])

    def unload(self) -> None:
        """Cancel the remaining jobs and free all memory."""
        models = self.models
        self.engine.close()
        for model in models:
            model.unload()


class Prepared:
    """A model, its draft and their caches; everything is read except the weights.

    Args:
        path: a checkpoint's folder, or a GGUF file.
        make: the model's constructor; a subclass of ``Model``.

    Raises:
        ValueError, OSError: config or tokenizer files are damaged or missing, or an option is out
            of range.
        UnsupportedArchitecture: exkv doesn't run this architecture.
    """

    def __init__(
        self,
        path: Path,
        options: ServeOptions,
        name: str | None = None,
        make: Callable[..., Model] = Model,
    ) -> None:
        config = ModelConfig.from_pretrained(path)
        self.path, self.options, self.name = path, options, name or own_name(path)
        self.tokenizer = Tokenizer(config)
        self.usual = SamplingParams.recommended(path)
        self.models = [_model(config, options, make)]
        if isinstance(options.draft, Path):
            self.models.append(_model(ModelConfig.from_pretrained(options.draft), options))
            check_same_vocabulary(*self.models)
        self.limit = min(model.config.max_position_embeddings for model in self.models)
        tokens = options.max_seq_len or min(self.limit, _TOKENS)
        self.caches: list[KVCache] = [
            PagedCache(
                model,
                max_seq_len=tokens,
                page=options.page,
                nbits=CACHE_BITS.get(options.cache, 16),  # "best" is chosen later
                host_tokens=options.host_tokens if model is self.model else 0,
                snapshots=options.draft is not None,
            )
            for model in self.models
        ]

    @property
    def model(self) -> Model:
        """The model that answers requests: the draft's target."""
        return self.models[0]

    @property
    def cache(self) -> KVCache:
        """The target's cache."""
        return self.caches[0]

    @property
    def units(self) -> int:
        """Number of units, over all models."""
        return sum(len(model.units) for model in self.models)

    def load(self, progress: bool = False) -> Iterator[tuple[int, int]]:
        """Load, yielding the number of units loaded so far and the total.

        Raises:
            PlacementError: it doesn't fit.
            CheckpointError: the weights are damaged.
        """
        self._choose_cache()
        with_engine, _, _ = planned(self._scenario())  # the engine doesn't exist yet
        for model, workload in zip(self.models, with_engine.workloads, strict=True):
            model.max_input_len = workload.promise.max_input_len
            model.embed_cpu = workload.embed_cpu
        yield from self._load(progress)
        for model, workload in zip(self.models, with_engine.workloads, strict=True):
            assert model.plan is not None and model.report is not None
            model.plan = replace(model.plan, fitted=workload.fitted)
            model.report = replace(model.report, fitted=workload.fitted)

    def _load(self, progress: bool) -> Iterator[tuple[int, int]]:
        announced: dict[str, Any] = {"callback_gen": lambda *step: [step], "progress": progress}
        if len(self.models) == 1:
            yield from self._load_alone(announced)
            return
        _, plans, _ = planned(self._scenario(engine=False))
        done = 0
        try:
            for model, plan in zip(self.models, plans, strict=True):
                for index, _ in model.load_gen(plan=plan, **announced):
                    yield done + index, self.units
                done += len(model.units)
        except BaseException:
            self.unload()
            raise

    def _load_alone(self, announced: dict[str, Any]) -> Iterator[tuple[int, int]]:
        own = self.options
        options = LoadOptions(
            gpu_split=own.gpu_split,
            reserve_vram=own.reserve,
            devices=own.devices,
            last_id_only=own.draft is None,
            objective=own.objective,
            order=own.order,
            host_experts=own.host_experts,
            disk_experts=own.disk_experts,
            **announced,
        )
        yield from self.model.load_by(options)

    def unload(self) -> None:
        """Unload all models."""
        for model in self.models:
            model.unload()

    def serve(self, thread: Executor | None = None) -> ServedModel:
        """Start an engine on the loaded model, whose steps run in ``thread``."""
        options = self.options
        engine = Engine(
            self.model,
            self.cache,
            self.tokenizer,
            max_running=options.max_running,
            chunk=self.model.max_input_len,
            away_tokens=options.away_tokens,
            draft=self._draft(),
            thread=thread,
        )
        return ServedModel(
            engine=engine, name=self.name, usual=self.usual, path=self.path, options=options
        )

    def _draft(self) -> Draft | MTP | None:
        if len(self.models) == 1:
            return None if self.options.draft is None else MTP(tokens=_DRAFTED)
        return Draft(self.models[1], self._draft_rows(), tokens=_DRAFTED)

    def _draft_rows(self) -> KVCache:
        """One row per job, all in the draft's page pool."""
        return self.caches[1].sharing_pool(self.options.max_running, call_len=self._chunk)

    @property
    def _chunk(self) -> int:
        """Largest number of prompt tokens in one call."""
        return min(self.model.max_input_len, self.cache.max_seq_len)

    def answer(self, leaving: Sequence[Model] = (), as_long_as_fits: bool = False) -> Answer:
        """Plan the placement.

        Args:
            leaving: loaded models whose memory counts as free.
            as_long_as_fits: plan the longest cache that fits.
        """
        self._choose_cache(leaving)
        scenario = self._scenario(leaving)
        if as_long_as_fits:
            found = longest(scenario, self.limit)
            return solved(scenario, "max_seq_len", found, self.limit)
        return fixed(scenario)

    def plan(self, leaving: Sequence[Model] = (), as_long_as_fits: bool = False) -> dict[str, Any]:
        """:meth:`answer` as JSON values like those of ``exkv plan --json``, with the requested
        options."""
        started = time.perf_counter()
        answer = self.answer(leaving, as_long_as_fits)
        values = as_values(answer, ["model", "draft"], time.perf_counter() - started)
        draft = self.options.draft
        asked = {
            "model": self.name,
            "max_seq_len": values["found"].get("max_seq_len", self.cache.max_seq_len),
            "cache": self.options.cache,
            "weights_as": self.options.weights,
            "draft": draft.name if isinstance(draft, Path) else draft,
        }
        return {"asked": asked, **values, "away_bytes_at_most": self._away_bytes()}

    def _away_bytes(self) -> int:
        """Upper bound on host memory for preempted jobs of equal priority, and for the states that
        belong to pages of the prefix cache."""
        options, tokens = self.options, self.cache.max_seq_len
        pages, at_once = -(-tokens // options.page), options.max_running - 1
        own = [layer for layer in self.cache.layers if not layer.shares]
        full, states = (
            sum(x.full_bytes() for x in own if (x.spec.state is None) == attends)
            for attends in (True, False)
        )
        beside = (at_once + options.max_running) * states
        if options.away_tokens is None:
            return at_once * full + beside
        most = min(at_once * pages, options.away_tokens // options.page)
        return most * full // pages + beside

    def _choose_cache(self, leaving: Sequence[Model] = ()) -> None:
        """With ``cache="best"``, make the caches that fit and lose least; those of fewest bits if
        none fit."""
        if self.options.cache != BEST:
            return
        scenario = self._scenario(leaving)
        best = best_bits(scenario)
        found = in_fewest_bits_of_caches(scenario) if best is None else best.scenario
        for model, cache in zip(self.models, self.caches, strict=True):
            model.forget_cache(cache)
        self.caches = [
            workload.promise.caches[0].made(model)
            for workload, model in zip(found.workloads, self.models, strict=True)
        ]

    def _scenario(self, leaving: Sequence[Model] = (), *, engine: bool = True) -> Scenario:
        """The models with their caches, and with those that the engine adds in the same page pool:
        the decoding rows and two prompts. With a draft, each proposed token needs logits."""
        options = self.options
        proposed = _DRAFTED if options.draft is not None else 0
        calls: list[list[KVCache]] = [[] for _ in self.models]
        if engine:
            rows = self.cache.sharing_pool(options.max_running, call_len=1 + proposed)
            prompts = (self.cache.sharing_pool(1, call_len=self._chunk) for _ in range(2))
            calls[0] = [rows, *prompts]
        if engine and len(self.models) > 1:
            calls[1] = [self._draft_rows()]
        workloads = []
        for model, cache, beside in zip(self.models, self.caches, calls, strict=True):
            shapes = [CacheShape.of(each) for each in (cache, *beside)]
            for each in beside:  # only their shapes count: the engine makes its own
                model.forget_cache(each)
            last_id_only = not proposed or model is not self.model
            workloads.append(Workload.of(model, shapes, last_id_only=last_id_only))
        return Scenario(
            workloads=tuple(workloads),
            budgets=tuple(without(leaving, budget) for budget in options.budgets(self.model)),
            objective=options.objective,
            order=options.order,
            host_experts=options.host_experts,
            disk_experts=options.disk_experts,
        )


def _model(config: ModelConfig, options: ServeOptions, make: Callable[..., Model] = Model) -> Model:
    model = make(
        config,
        dtype=options.dtype,
        max_input_len=options.chunk_size,
        weights=options.weights,
        embed_cpu=options.embed_cpu,
        calibration=options.calibration,
        mtp=options.draft == OWN_HEAD,
        exchange_experts=options.exchange_experts,
    )
    if options.chunk_size is None:
        model.chunks = _CHUNKS
    return model


def own_name(path: Path) -> str:
    """A model's name, from its path without following links. A snapshot in Hugging Face's cache is
    named after its repository, ``ORG/NAME``."""
    path = Path(os.path.abspath(path))  # normalized, without following links
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def model_folder(path: Path) -> Path:
    """The folder that holds a model, without following links."""
    return Path(os.path.abspath(path)).parent


class ModelFolder:
    """The models that clients may request: checkpoint folders and GGUF files, in a folder or one
    level below it, and no others.

    Args:
        path: the folder.
        given: name -> path of models elsewhere.
    """

    def __init__(self, path: Path, given: dict[str, Path] | None = None) -> None:
        self.path = path
        self.given = given or {}

    def models(self) -> dict[str, Path]:
        """Name -> path of the models that exist now."""
        found = dict(self.given)
        known = {path.resolve() for path in found.values()}
        for name, path in _models_in(self.path, ""):
            if path.resolve() not in known and len(found) < _LISTED:
                found.setdefault(name, path)
        return found

    def find(self, name: str) -> Path | None:
        """The path of the model with this name; None if there is none."""
        return self.models().get(name)


def _models_in(folder: Path, before: str) -> Iterator[tuple[str, Path]]:
    for path in _entries(folder):
        name = f"{before}{path.name}"
        if path.suffix.lower() == ".gguf" and path.is_file():
            if not path.name.startswith("mmproj") and not _is_later_part(path):
                yield name, path
        elif (path / "config.json").is_file():
            yield name, path
        elif not before and path.is_dir():
            yield from _models_in(path, f"{path.name}/")


def _entries(folder: Path) -> Sequence[Path]:
    """A folder's entries except hidden ones; none if it can't be read."""
    with contextlib.suppress(OSError):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return []


def _is_later_part(path: Path) -> bool:
    """Whether this is a part other than the first, such as ``...-00002-of-00003.gguf``."""
    parts = path.stem.rsplit("-", 3)
    return len(parts) == 4 and parts[2] == "of" and parts[1].isdigit() and int(parts[1]) > 1
