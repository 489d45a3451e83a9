"""The model that users load: ``load`` and ``load_autosplit`` take ExLlamaV2's arguments.

They differ only in the budgets that they make for ``exkv.loading.loader.load_units``.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import torch

from exkv import devices as accelerators
from exkv.cache import DynamicCache, KVCache, check_kind
from exkv.cache.stored_bits import CacheLosses
from exkv.checkpoint import ModelConfig
from exkv.decode import GenerateOutput, generate
from exkv.decode.prompts import PromptIds
from exkv.decode.request import resolve
from exkv.errors import Attempt, OutOfMemoryError, PlacementError
from exkv.generation import GenerationConfig, arguments
from exkv.loading import LoadReport, load_units
from exkv.loading.cache_losses import cache_losses_of
from exkv.loading.calibration import CalibratedUnits, calibration_rows
from exkv.loading.heat import with_usage
from exkv.loading.losses import losses_of
from exkv.loading.options import Callback, LoadOptions, finished
from exkv.loading.usage import add_served, usage_of
from exkv.models import Transformer, Unit
from exkv.models.adapters import Adapter
from exkv.models.mtp import with_mtp
from exkv.planning import Budget, Plan, Scenario, Workload, make_budgets, with_measured_bandwidths
from exkv.planning.best import planned
from exkv.planning.budgets import LOADED, devices_to_load
from exkv.planning.place import check_new_adapter, check_new_cache, with_caches
from exkv.planning.plan import UNBOUNDED
from exkv.weights.choice import Losses
from exkv.weights.on_load import BEST, with_weights

_GB = 1 << 30
_FORWARD_OPTIONS = frozenset(inspect.signature(Transformer.forward).parameters)
#: Arguments of transformers' ``from_pretrained`` that change nothing here.
_WITHOUT_MEANING = {"low_cpu_mem_usage", "attn_implementation", "use_safetensors"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What ``model(...)`` returns, under transformers' names."""

    logits: torch.Tensor | None
    cache: KVCache | None

    @property
    def past_key_values(self) -> KVCache | None:
        """The cache, by its name before transformers 5.24."""
        return self.cache


class Hosts(Protocol):
    """Hosts for a model: :class:`exkv.cluster.Cluster`."""

    def spread(self, model: Model) -> None:
        """Spread an unloaded model and its caches over these hosts."""


class Model(Transformer):
    """A language model over several devices.

    >>> model = Model(ModelConfig.from_pretrained("path/to/model"))
    >>> cache = Cache(model, max_seq_len=8192, lazy=True)
    >>> model.load_autosplit(cache)

    Attributes:
        plan: after loading, the placement and its reasons.
        report: after loading, the plan's lines, predicted beside measured.
    """

    def __init__(
        self,
        config: ModelConfig | str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        max_input_len: int | None = None,
        embed_cpu: bool | None = None,
        weights: str | None = None,
        calibration: str | None = None,
        transform: str | None = None,
        mtp: bool = False,
        exchange_experts: bool = True,
    ) -> None:
        """``Transformer``'s arguments, and the format of a checkpoint's float weights.

        Args:
            weights: "int8", "int6", "int5", "int4", "int3" or "int2" for integers, with "-asym"
                behind it for zero points (see ``exkv.weights.on_load``); "best" to choose the least
                lossy of those without zero points that fit, when the model is planned or loaded,
                for each unit (with a calibration text for each matrix); None for floats.
            calibration: a text in the model's language. Integers are rounded for the inputs that it
                gives each layer, for which the host runs the text through the model at each load
                (see ``exkv.loading.calibration``); and "best" measures the loss of fewer bits on
                it, by the model's outputs. Without one, the weights' own error counts. In a mixture
                of experts it also tells how often each is chosen (``exkv.loading.usage``), and for
                a cache whose bits a plan chooses, the loss of fewer bits by layer.
            transform: "hadamard" for integers, also those of "best", of matrices whose inputs go
                through the Hadamard transform, which lose less (see ``exkv.weights.hadamard``).
            mtp: also load the checkpoint's head for multi-token prediction, which proposes tokens
                (``exkv.MTP``). "best" gives the loss of its proposals the same weight as that of
                the model's tokens; it is always rounded as without a calibration text.
        """
        if not isinstance(config, ModelConfig):
            config = ModelConfig.from_pretrained(config)
        if mtp:
            config = with_mtp(config)
        config = with_weights(config, weights, transform)
        super().__init__(
            config,
            dtype=dtype,
            max_input_len=max_input_len,
            embed_cpu=embed_cpu,
            exchange_experts=exchange_experts,
        )
        self.weights = weights
        self._chooses, self._calibration = weights == BEST, calibration
        self._losses: Losses | None = None
        self._cache_losses: CacheLosses | None = None
        #: Memo of :meth:`usage`, empty until it is first called.
        self._usage: tuple[Mapping[str, tuple[float, ...]] | None, ...] = ()
        self._calibrated: CalibratedUnits | None = None
        self.plan: Plan | None = None
        self.report: LoadReport | None = None
        self.own_generation_config: GenerationConfig | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: str | int | torch.device | None = None,
        mtp: bool = False,
        **without_meaning: Any,
    ) -> Model:
        """Build and load a model, with the arguments of transformers' ``from_pretrained``.

        Args:
            dtype, torch_dtype: as for ``Model``; "auto" for the checkpoint's.
            mtp: as for ``Model``; for ``generate(..., use_mtp=True)``.
            device_map: None, "auto" or "sequential" for every device in order, or one device. For
                anything else build a ``Model`` and ``load`` it.
            without_meaning: ``low_cpu_mem_usage``, ``attn_implementation`` and ``use_safetensors``.

        Raises:
            ValueError: another device map.
            TypeError: an unknown argument.
        """
        unknown = without_meaning.keys() - _WITHOUT_MEANING
        if unknown:
            raise TypeError(
                f"from_pretrained() has no argument {', '.join(sorted(unknown))}: see Model(), "
                'which rounds weights with weights="int4" or "int8", and load()'
            )
        devices = None
        if isinstance(device_map, Mapping) or device_map in ("balanced", "balanced_low_0"):
            raise ValueError(
                f"device_map is {device_map!r}; it must be None, 'auto', 'sequential' or a device: "
                "Model(folder) and load(devices=..., gpu_split=...) place units otherwise"
            )
        if device_map not in (None, "auto", "sequential"):
            devices = [torch.device(device_map)]
        chosen: Any = arguments.one_of("dtype", dtype, "torch_dtype", torch_dtype)
        model = cls(folder, dtype=None if chosen == "auto" else chosen, mtp=mtp)
        model.load(devices=devices)
        return model

    @property
    def device(self) -> torch.device:
        """The embedding's device, the host before loading. Input ids may be on any device."""
        return self.units[0].device or torch.device("cpu")

    @property
    def generation_config(self) -> GenerationConfig:
        """Defaults of ``generate``: the checkpoint's recommendation with its token ids, or the
        config that was assigned."""
        return resolve(self, None, {})

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self.own_generation_config = config

    def to(self, *_: Any, **__: Any) -> Model:
        """Return the model unchanged: ``load`` determines its devices, and ``Model`` its dtype."""
        return self

    def eval(self) -> Model:
        """Return the model unchanged: there is no training mode."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model can't be pickled or copied: its weights lie on devices. Build another one "
            "from the same config, Model(model.config), and load it"
        )

    def losses(self) -> Losses | None:
        """The loss of each unit in each weight format, for ``weights="best"``; that of experts by
        how often they are chosen. Measured at the first call, see ``exkv.loading.losses``."""
        if self._chooses and self._losses is None:
            found = losses_of(self, self._calibration)
            self._losses = with_usage(found, self, self.usage())
        return self._losses

    def cache_losses(self) -> CacheLosses | None:
        """The loss of each layer with keys and values in fewer bits, by which a cache is chosen;
        measured at the first call, see ``exkv.loading.cache_losses``. None without a text, unless
        ``weights="best"`` is chosen by the weights' own error, with which the caches' is
        compared."""
        if self._calibration is None and not self._chooses:
            return None
        if self._cache_losses is None:
            self._cache_losses = cache_losses_of(self, self._calibration)
        return self._cache_losses

    def usage(self) -> Mapping[str, tuple[float, ...]] | None:
        """The share of tokens that choose each expert, by unit; measured on the calibration text at
        the first call, see ``exkv.loading.usage``. None where nothing is known."""
        if not self._usage:
            self._usage = (usage_of(self, self._calibration),)
        return self._usage[0]

    @property
    def calibrates(self) -> bool:
        """Whether loading rounds the weights for a calibration text."""
        return self._calibration is not None and self.weights is not None and not self._chooses

    def precomputed(self, unit: Unit) -> Mapping[str, torch.Tensor]:
        assert self.checkpoint is not None
        if self._calibrated is None or self.checkpoint.hollow:
            return {}
        return self._calibrated.parameters(unit, self.checkpoint)

    # Loading ------------------------------------------------------------------------------

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: Callback | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        plan: Plan | None = None,
        progress: bool = False,
    ) -> Generator[Any, None, LoadReport | None]:
        """Load with a manual split, or by a plan. ``load_gen`` is a generator that yields what
        ``callback_gen`` does, and with ``stats`` the report at the end; if it is dropped half-way,
        nothing stays loaded. ``load`` runs it to the end.

        Args:
            gpu_split: GB (2**30 bytes) to use on each device for weights, existing caches and
                workspace. A zero skips the device; devices beyond the list are not used. None, or
                an empty list, for all free memory.
            lazy: place the units, and read each at its first use.
            stats: return the report.
            callback: called as ``callback(index, total)`` before each unit and once at the end.
            callback_gen: the same, its result iterated over.
            devices: in filling order; None for every accelerator, or the CPU if there is none.
                ``"cpu"`` may come last, as overflow.
            plan: from :func:`exkv.place`, made for this model with its existing caches; takes the
                place of ``gpu_split`` and ``devices``.
            progress: show a progress bar.

        Raises:
            ValueError: a negative, empty or overlong split, a plan for another model or caches, or
                a model that is already loaded.
            CheckpointError: the files are damaged, or contradict the config.
            PlacementError: no room; every device is as it was found.
        """
        yield from self.load_by(
            LoadOptions(
                gpu_split=gpu_split,
                lazy=lazy,
                callback=callback,
                callback_gen=callback_gen,
                devices=devices,
                plan=plan,
                progress=progress,
            )
        )
        if stats:
            yield self.report
        return self.report if stats else None

    load = finished(load_gen)

    def load_autosplit_gen(
        self,
        cache: KVCache,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool | None = None,
        callback: Callback | None = None,
        callback_gen: Callback | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        objective: str = "pack",
        order: str = "listed",
        host_experts: bool = True,
        disk_experts: bool = True,
        progress: bool = False,
        draft: KVCache | None = None,
        cluster: Hosts | None = None,
    ) -> Generator[Any]:
        """Load over the devices, filling one after the other or by an objective.
        ``load_autosplit_gen`` is a generator that yields what ``callback_gen`` does;
        ``load_autosplit`` runs it to the end.

        It plans before it reads anything. The plan is a promise: a forward call within the caches'
        rows and lengths finds its memory, while the caller keeps the last call's logits. The plan
        leaves room for this process's other memory, and for the promises of loaded models.

        Args:
            cache: planned together with every other existing cache of this model.
            reserve_vram: bytes to leave free, on each device or as a list, beside the margin of
                256 MiB that a plan leaves on every real GPU.
            last_id_only: promise logits of each row's last token only, which saves memory; False
                promises those of a whole chunk on the device, None those in slices gathered in host
                memory if only these fit.
            objective, order, host_experts, disk_experts: as for :func:`exkv.place`; "speed" first
                measures each device's bandwidth.
            callback, callback_gen, devices, progress: as for :meth:`load`.
            draft: the cache of a draft model (``exkv.Draft``), which is placed and loaded after
                this one: both are planned before anything is read, and the draft's plan holds both
                promises.
            cluster: hosts over which to spread the model as well; ``devices`` and a list of
                reserves are this machine's. See docs/cluster.md.

        Raises:
            ValueError: a negative or overlong reserve, an unknown objective, or a cache of another
                model.
            CheckpointError: the files are damaged, or contradict the config.
            PlacementError: no room; every device is as it was found.
        """
        check_kind(cache)
        cache.bind(self)
        if cluster is not None:
            cluster.spread(self)
        yield from self.load_by(
            LoadOptions(
                reserve_vram=reserve_vram,
                last_id_only=last_id_only,
                callback=callback,
                callback_gen=callback_gen,
                devices=devices,
                objective=objective,
                order=order,
                host_experts=host_experts,
                disk_experts=disk_experts,
                progress=progress,
                draft=draft,
            )
        )

    load_autosplit = finished(load_autosplit_gen)

    def load_by(self, options: LoadOptions) -> Iterator[Any]:
        """Load, yielding what ``callback_gen`` does; all other ways to load end here."""
        if self._chooses and options.plan is not None and not self.loaded:
            self.choose(options.plan.choice)
        if self._calibration is not None and self.calibrates and self._calibrated is None:
            self._calibrated = CalibratedUnits(
                self, calibration_rows(self.config, self._calibration)
            )
        scenario = self._scenario_of(options)
        if options.draft is not None:
            yield from self._load_with(options.draft, scenario, options)
        else:
            yield from self._carry_out(scenario, options)

    def _scenario_of(self, options: LoadOptions) -> Scenario:
        """The scenario of this model with its existing caches, and the devices."""
        plan = options.plan
        if plan is None:
            workload = Workload.of(self, self.caches, last_id_only=options.last_id_only)
            budgets = self.budgets(
                options.devices, gpu_split=options.gpu_split, reserve=options.reserve_vram
            )
            if options.objective == "speed":
                budgets = with_measured_bandwidths(budgets)
        else:
            workload = Workload.under(plan, self, self.caches)
            budgets = [ledger.budget for ledger in plan.ledgers]
        return Scenario(
            workloads=(workload,),
            budgets=tuple(budgets),
            objective=options.objective,
            order=options.order,
            host_experts=options.host_experts,
            disk_experts=options.disk_experts,
        )

    def _carry_out(self, scenario: Scenario, options: LoadOptions) -> Iterator[Any]:
        """Load by the options' plan, or the best one."""
        steps = load_units(
            self, scenario, plan=options.plan, lazy=options.lazy, on_loaded=self._keep_record
        )
        yield from options.announce(steps, len(self.units))

    def _load_with(self, cache: KVCache, scenario: Scenario, options: LoadOptions) -> Iterator[Any]:
        """Load this model, then the draft."""
        draft = cache.model
        if not isinstance(draft, Model) or draft is self:
            raise ValueError("draft is a cache of this model: give that of another, smaller model")
        workload = Workload.of(draft, draft.caches)
        both = replace(scenario, workloads=(*scenario.workloads, workload))
        _, (own, its), _ = planned(both)
        told = LoadOptions(
            callback=options.callback, callback_gen=options.callback_gen, progress=options.progress
        )
        yield from self.load_by(replace(told, plan=own))
        try:
            yield from draft.load_by(replace(told, plan=its))
        except BaseException:
            self.unload()
            raise

    def budgets(
        self,
        devices: Sequence[str | torch.device] | None = None,
        *,
        gpu_split: Sequence[float] | None = None,
        reserve: int | Sequence[int] | None = None,
    ) -> list[Budget]:
        """The devices' current budgets; arguments and errors as of :meth:`load` and
        :meth:`load_autosplit`."""
        if gpu_split is not None:
            return split_budgets(devices, gpu_split)
        return make_budgets(devices_to_load(devices), reserve=reserve)

    def keep_usage(self) -> None:
        if self.exchange is not None and (served := self.exchange.take_served()):
            add_served(self, served)
            self._usage = ()

    def unload(self) -> None:
        self.keep_usage()
        super().unload()
        self.plan = self.report = None

    def full_report(self) -> LoadReport | None:
        """The report, covering all hosts of a spread model; None before loading."""
        return self.report

    def take_in(self) -> list[str]:
        """Readmit waiting hosts of a spread model between two calls, and return their names."""
        return []

    def unread_bytes(self, device: torch.device) -> int:
        """Bytes of weights that ``load(lazy=True)`` placed on a device and has not read yet."""
        if self.plan is None:
            return 0
        pairs = zip(self.units, self.plan.units, strict=True)
        unread = [placed for unit, placed in pairs if not unit.module]
        apart = sum(placed.host_weights for placed in unread) if device.type == "cpu" else 0
        return apart + sum(placed.weights for placed in unread if placed.device == device)

    def _keep_record(self, plan: Plan, report: LoadReport) -> None:
        """Record a complete load; later plans count this model."""
        self.plan, self.report = plan, report
        if self._calibrated is not None:
            self._calibrated.done()
        LOADED.add(self)

    # In use -------------------------------------------------------------------------------

    def check_cache(self, cache: KVCache) -> None:
        """Plan a new cache for a loaded model; PlacementError if a device has no room for it or its
        calls."""
        if self.plan is not None:
            check_new_cache(self, self.plan, cache)

    def check_adapter(self, adapter: Adapter) -> None:
        """Plan a new adapter for a loaded model; PlacementError if a device has no room for it or
        its calls."""
        if self.plan is not None:
            check_new_adapter(self, self.plan, adapter)

    def adapters_changed(self) -> None:
        if self.plan is not None:
            self.plan = with_caches(self, self.plan)

    def register_cache(self, cache: KVCache) -> None:
        super().register_cache(cache)
        self.cache_changed(cache)

    def cache_changed(self, cache: KVCache) -> None:
        if self.plan is not None:
            self.plan = with_caches(self, self.plan)

    def forget_cache(self, cache: KVCache) -> None:
        super().forget_cache(cache)
        if self.plan is None or self.report is None:
            return
        if self.caches:
            self.plan = with_caches(self, self.plan)
        else:  # back to the promise made at loading, with the current adapters
            now = with_caches(self, self.plan)
            ledgers = tuple(
                replace(row.ledger, weights=ledger.weights)
                for row, ledger in zip(self.report.devices, now.ledgers, strict=True)
            )
            self.plan = replace(self.plan, ledgers=ledgers)

    def forward(  # type: ignore[override] # takes more, and with return_dict gives an object
        self,
        input_ids: torch.Tensor,
        cache: KVCache | None = None,
        *,
        past_key_values: KVCache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache_position: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> torch.Tensor | ForwardOutput | tuple[torch.Tensor | None, KVCache | None] | None:
        """:meth:`Transformer.forward`, also with transformers' arguments.

        Args:
            past_key_values: another name for ``cache``.
            attention_mask, position_ids, cache_position: as transformers' loops pass them; checked
                against the cache's lengths.
            logits_to_keep: 1 for ``last_id_only``, 0 for all.
            use_cache: True makes a :class:`exkv.DynamicCache` if none is given.
            return_dict: True returns a :class:`ForwardOutput`, False a tuple of its two fields, as
                in transformers; None the logits alone.
            options: those of :meth:`Transformer.forward`.

        Raises:
            ValueError: as of :meth:`Transformer.forward`, or an argument that contradicts the call.
            OutOfMemoryError: memory ran out in spite of the plan; the message says what has changed
                since loading, and the cache keeps the tokens that it had.
            PlacementError: the cache has no storage yet, and a device no room for it.
        """
        if past_key_values is not None:
            cache = arguments.one_of("cache", cache, "past_key_values", past_key_values)
        if use_cache and cache is None:
            cache = DynamicCache()
        if cache is not None:
            check_kind(cache)
            if input_ids.dim() == 2:
                cache.bind(self, len(input_ids))
        if not (attention_mask is position_ids is cache_position is None):
            rows, new = input_ids.shape
            past = [0] * rows if cache is None else cache.seq_lens[:rows]
            arguments.check_step(
                past,
                new,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache_position=cache_position,
            )
        if logits_to_keep not in (0, 1):
            raise ValueError(f"logits_to_keep is {logits_to_keep!r}; it must be 0 (all) or 1")
        if logits_to_keep:
            options["last_id_only"] = True
        if not _FORWARD_OPTIONS.issuperset(options):
            options = arguments.taken(options, ())
        logits = self._forward(input_ids, cache, **options)
        if return_dict is None:
            return logits
        return ForwardOutput(logits=logits, cache=cache) if return_dict else (logits, cache)

    def __call__(  # type: ignore[override] # as for forward
        self, *args: Any, return_dict: bool | None = None, **options: Any
    ) -> ForwardOutput | tuple[torch.Tensor | None, KVCache | None]:
        """:meth:`forward` with the results of transformers' models: a :class:`ForwardOutput`, or a
        tuple with ``return_dict=False``."""
        answer: Any = self.forward(*args, return_dict=return_dict is not False, **options)
        return cast(ForwardOutput, answer)

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        with Attempt(PlacementError) as attempt:
            return super().forward(*args, **kwargs)
        accelerators.release_idle_memory()
        changes = "" if self.report is None else f"{'. '.join(self.report.changes())}. "
        raise OutOfMemoryError(
            f"a forward call ran out of memory; the cache has the tokens that it had before, so a "
            f"shorter call can continue. {changes}torch's error: {attempt.why}"
        )

    def generate(
        self,
        input_ids: PromptIds | None = None,
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        cache: KVCache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | GenerateOutput:
        """Complete prompts as transformers' ``generate`` does: see :func:`exkv.decode.generate`
        for arguments, results and errors."""
        return generate(self, input_ids, generation_config, cache, **kwargs)


def split_budgets(
    names: Sequence[str | torch.device] | None, gpu_split: Sequence[float] | None
) -> list[Budget]:
    """Budgets of a manual split; errors as of :func:`split_caps`."""
    named = devices_to_load(names)
    if gpu_split is None or (isinstance(gpu_split, list | tuple) and not gpu_split):
        return make_budgets(named)
    offered = named or accelerators.present_devices()
    caps = split_caps(gpu_split, list(map(str, offered)))
    return make_budgets(offered[: len(caps)], cap=caps)


def split_caps(gpu_split: Sequence[float], offered: Sequence[str]) -> list[int]:
    """Bytes for each of the first devices, from a split in GB of 2**30 bytes.

    Raises:
        TypeError, ValueError: not a list of sizes, more sizes than devices, or all 0.
    """
    if isinstance(gpu_split, str) or not isinstance(gpu_split, Sequence):
        raise TypeError(f"gpu_split is {gpu_split!r}: give a list of GB, one for each device")
    for index, size in enumerate(gpu_split):
        if isinstance(size, bool) or not isinstance(size, int | float):
            raise TypeError(f"gpu_split[{index}] is {size!r}: give GB as a number")
        if not 0 <= size < UNBOUNDED / _GB:
            raise ValueError(f"gpu_split[{index}] is {size}: give GB, or 0 to skip the device")
    if not any(gpu_split):
        raise ValueError("gpu_split gives no device any memory")
    if len(gpu_split) > len(offered):
        raise ValueError(
            f"gpu_split names {len(gpu_split)} devices, and there are {len(offered)}: "
            f"{', '.join(offered)}"
        )
    return [int(size * _GB) for size in gpu_split]
