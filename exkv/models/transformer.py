"""A decoder-only transformer as a sequence of units, and the forward call across their devices.

``exkv.planning`` places units, ``exkv.loading.loader`` loads them, and ``exkv.model`` has the class
for users.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from exkv import devices, epochs
from exkv.batch import Batch, Chosen, Lengths, pad_rows
from exkv.cache import KVCache, NoCacheLayer
from exkv.cache.paging.pool import PagePool
from exkv.cache.stored_bits import CacheLosses
from exkv.checkpoint import DTYPES, Checkpoint, ExpectedTensor, ModelConfig, open_checkpoint
from exkv.errors import Attempt, PlacementError, is_out_of_memory
from exkv.layers import RotaryTables
from exkv.layers.attention import Attend
from exkv.layers.descriptions import LowRank
from exkv.layers.split_experts import ExpertStaging, HostRates
from exkv.weights.choice import Choice, Losses
from exkv.weights.lora import AdapterFolder
from exkv.weights.on_load import AS_STORED, OPTIONS, check_kept, with_weights

from .adapters import AdaptedUnits, Adapter, User, open_adapter
from .bound_run import Logits
from .elsewhere import Transport
from .exchange import ExpertExchange, between_exchanges
from .logits_check import check_logits
from .mtp import Drafting, follow
from .rerun import Rerun
from .runs import Runs
from .units import (
    PlacedUnit,
    Unit,
    UnitSpec,
    largest_host_expert,
    quantized_anew,
    unit_specs,
)

#: Default chunk sizes, in tokens: a plan takes the largest that fits.
CHUNKS = (2048, 1024, 512, 256, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The options of one :meth:`Transformer.forward` call."""

    last_id_only: bool = False
    preprocess_only: bool = False
    keep_chunks: bool = False
    each_token: bool = False
    placed_ids: torch.Tensor | None = None


class Transformer:
    """Units, the caches registered with them, and ``forward``.

    Args:
        config: the model's config; its ``path`` is the checkpoint's folder.
        dtype: of weights and arithmetic, or its name ("float16"); None or "auto" for that of the
            config or the checkpoint.
        max_input_len: tokens that a forward call handles at once; longer inputs run in chunks of
            this size. None for 2048, or fewer if a plan finds that only fewer fit.
        embed_cpu: keep the embedding table in host memory (as ExLlamaV2 does); None to do so if the
            model fits only then, or if each layer has a table, too (Gemma 3n, 4).
        exchange_experts: between calls, let experts in host memory change places with experts on
            the card that are chosen less often.

    Attributes:
        chunks: possible values of ``max_input_len``, largest first; only one if it was given.
        logits_len: tokens per row whose logits are on the device at once; longer results are
            gathered in host memory.
        choice: the weight formats that a plan has chosen for each unit, or None.
        transport: brings hidden states to and from units in other processes, which are placed on
            ``devices.ELSEWHERE``; None if all are local.
        elsewhere: the indices of these units.
        in_flight: the number of concurrent calls that keep all of its hosts busy; 1 if a call is
            complete when it returns.
        pool_kind: of the pools of paged caches.
        host_rates: used to decide whether an expert in host memory is computed there or sent to a
            card.
        resident: the share of experts in mapped files that host memory has room for, if a plan
            leaves others on disk.
        exchange: of experts; None while no unit has any in host memory, or none should be moved.
    """

    pool_kind: type[PagePool] = PagePool

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype | str | None = None,
        max_input_len: int | None = None,
        embed_cpu: bool | None = None,
        exchange_experts: bool = True,
    ) -> None:
        if max_input_len is not None and max_input_len < 1:
            raise ValueError(f"max_input_len is {max_input_len}: it must be at least 1")
        self.config = config
        self.dtype = _dtype_given(dtype) or config.dtype or _stored_dtype(config)
        self.chunks: tuple[int, ...] = CHUNKS if max_input_len is None else (max_input_len,)
        self._fitted_len: int | None = None
        self._logits_len: int | None = None
        # A table of embeddings for each layer is larger than all else, and few rows are read.
        of_layers = bool(getattr(config.specific, "hidden_size_per_layer_input", 0))
        self.embed_cpu = embed_cpu if embed_cpu is not None or not of_layers else True
        self.choice: Choice | None = None
        self._specs = {AS_STORED: unit_specs(config, self.dtype)}
        self.units = _units(self._specs[AS_STORED])
        self.rotary = RotaryTables(config)
        self.checkpoint: Checkpoint | None = None
        self._caches: list[weakref.ref[KVCache]] = []
        self._adapters: dict[str, Adapter] = {}
        self._adapted = AdaptedUnits()
        self._runs = Runs()
        self._staging: weakref.WeakValueDictionary[torch.device, ExpertStaging]
        self._staging = weakref.WeakValueDictionary()
        self.host_rates = HostRates()
        self.exchange_experts = exchange_experts
        self.exchange: ExpertExchange | None = None
        self.resident = 1.0
        self._logits_checked = False
        self.transport: Transport | None = None
        self.elsewhere: frozenset[int] = frozenset()
        self.in_flight = 1.0

    def losses(self) -> Losses | None:
        """The loss of each unit for every way of keeping its weights, from which a plan chooses;
        None if there is nothing to choose."""
        return None

    def cache_losses(self) -> CacheLosses | None:
        """The loss of each layer for keys and values in fewer bits, from which a plan chooses the
        bits of a cache; None if unknown."""
        return None

    def usage(self) -> Mapping[str, tuple[float, ...]] | None:
        """The share of tokens that choose each expert, by unit, so that a plan can tell hot experts
        from cold ones; None if unknown."""
        return None

    def keep_usage(self) -> None:
        """Save what calls have chosen since the last time, for later plans."""

    def specs_kept(self, option: str) -> list[UnitSpec]:
        """The units with all weights in one of ``on_load.OPTIONS``."""
        if option not in self._specs:
            names = (spec.name for spec in self._specs[AS_STORED])
            config = with_weights(self.config, dict.fromkeys(names, option))
            self._specs[option] = quantized_anew(self._specs[AS_STORED], config, self.dtype)
        return self._specs[option]

    def choose(self, choice: Choice | None) -> None:
        """Set the weight formats of the units, none of which is loaded; errors as in
        :meth:`units_kept`."""
        self.units, self.choice = self.units_kept(choice), choice

    def units_kept(self, choice: Choice | None) -> tuple[Unit, ...]:
        """Unloaded units with these weight formats.

        Raises:
            ValueError: a choice for other units, or two formats for a tensor that two units share.
        """
        stored = self._specs[AS_STORED]
        kept = choice.kept if choice else {spec.name: AS_STORED for spec in stored}
        check_kept(kept, [spec.name for spec in stored])
        for spec in stored:
            for other in {stored[index].name for index, _ in spec.tied.values()}:
                if kept[spec.name] != kept[other]:
                    raise ValueError(
                        f"{other} is kept {kept[other]} and {spec.name} {kept[spec.name]}: they "
                        "share a tensor"
                    )
        if all(option in OPTIONS for option in kept.values()):
            return _units([self.specs_kept(kept[spec.name])[i] for i, spec in enumerate(stored)])
        return _units(quantized_anew(stored, with_weights(self.config, kept), self.dtype))

    def set_host_experts(self, experts: Mapping[str, Collection[int]]) -> None:
        """Set which routed experts of which units lie in host memory while the rest of the unit is
        on an accelerator: unit name -> indices. Units that are not named have none there.

        Raises:
            ValueError: the model is loaded, or has no such unit or expert; nothing is set.
        """
        if placed := [unit.name for unit in self.units if unit.device is not None]:
            raise ValueError(f"{placed[0]} is loaded: call unload() before experts are moved")
        units = {unit.name: unit for unit in self.units}
        for name, each in experts.items():
            if name not in units:
                raise ValueError(f"there is no unit {name!r:.60} whose experts can be moved")
            units[name].check_experts(each)
        for unit in self.units:
            unit.put_on_host(experts.get(unit.name, ()))

    # State --------------------------------------------------------------------------------

    @property
    def max_input_len(self) -> int:
        return self._fitted_len or self.chunks[0]

    @max_input_len.setter
    def max_input_len(self, tokens: int) -> None:
        self.chunks, self._fitted_len = (tokens,), None

    @property
    def logits_len(self) -> int:
        return min(self._logits_len or self.max_input_len, self.max_input_len)

    def fit_calls(self, max_input_len: int | None, logits_len: int | None) -> None:
        """Set the tokens per row of chunks and of slices of logits while the model is loaded; None
        for the default."""
        self._fitted_len, self._logits_len = max_input_len, logits_len

    @property
    def device_map(self) -> dict[str, torch.device]:
        """Unit name -> device, for placed units."""
        return {unit.name: unit.device for unit in self.units if unit.device is not None}

    @property
    def cache_map(self) -> dict[int, torch.device]:
        """Decoder layer index -> device of its weights and its part of every cache."""
        return {
            unit.spec.layer: unit.device
            for unit in self.units
            if unit.spec.layer is not None and unit.device not in (None, devices.ELSEWHERE)
        }

    @property
    def loaded(self) -> bool:
        """Whether every unit is placed (with ``lazy=True``, possibly before its weights are
        read)."""
        return all(unit.device is not None for unit in self.units)

    @property
    def caches(self) -> list[KVCache]:
        """The living caches on this model, oldest first."""
        return [cache for ref in self._caches if (cache := ref()) is not None]

    def check_cache(self, cache: KVCache) -> None:
        """Called by a cache before it allocates; raises if there is no room."""

    def register_cache(self, cache: KVCache) -> None:
        """Called by a new cache; the model holds it weakly."""
        self._caches = [ref for ref in self._caches if ref() is not None]
        self._caches.append(weakref.ref(cache))

    def cache_changed(self, cache: KVCache) -> None:
        """Called by a cache after it was converted."""

    def forget_cache(self, cache: KVCache) -> None:
        """Drop a cache that isn't used any more."""
        self._caches = [ref for ref in self._caches if ref() is not cache]

    def stored_tensors(self) -> dict[str, ExpectedTensor]:
        """The tensors that the checkpoint must have, by name."""
        sources = (source for unit in self.units for source in unit.spec.sources)
        return {name: tensor for source in sources for name, tensor in source.stored.items()}

    def unused_modules(self) -> list[str]:
        """Modules that the checkpoint may also have and that the model doesn't use."""
        return [name for unit in self.units for name in unit.spec.unused]

    def read_unit(self, unit: Unit, device: torch.device) -> None:
        """Read a unit's weights to the device, sharing a tied tensor that is there already."""
        shared: dict[str, torch.Tensor] = {}
        for name, (index, source) in unit.spec.tied.items():
            other = self.units[index]
            if other.module is not None and other.device == device:
                shared[name] = other.module.get_parameter(source)
        assert self.checkpoint is not None  # open until all units are read
        hollow = self.checkpoint.hollow
        changes = {
            name: adapter.read(unit.index, device, hollow=hollow)
            for name, adapter in self._adapters.items()
        }
        staging = self.expert_staging(unit, device)
        unit.read(self.checkpoint, device, shared, self.precomputed(unit), staging, self.resident)
        unit.low_rank = changes
        if self.exchange_experts and unit.host_experts and not hollow:
            if self.exchange is None:
                self.exchange = ExpertExchange()
            self.exchange.watch(unit, self.checkpoint)
        self.checkpoint.unmap()  # drop mapped pages that the unit doesn't keep

    def expert_staging(self, unit: Unit, device: torch.device) -> ExpertStaging | None:
        """The buffers of a card through which its units' experts come from host memory; the last of
        these units to be unloaded frees them."""
        if not unit.host_experts or device.type == "cpu":
            return None
        if (staging := self._staging.get(device)) is None:
            staging = ExpertStaging(device, largest_host_expert(self.units), self.host_rates)
            self._staging[device] = staging
        return staging

    def precomputed(self, unit: Unit) -> Mapping[str, torch.Tensor]:
        """Parameters of a unit that are computed rather than converted by their formats: name ->
        tensor on the host."""
        return {}

    def unload(self) -> None:
        """Free every byte, caches included. The model can be loaded again, elsewhere too.

        Raises:
            CacheUseError: another thread is in the middle of a call; nothing is unloaded.
        """
        for cache in self.caches:
            cache.revoke("model.unload")
        self._logits_checked = False
        self.exchange = None
        for unit in self.units:
            unit.release()
        self.set_host_experts({})
        self.resident = 1.0
        for cache in self.caches:
            cache.free()
        if self.checkpoint is not None:
            self.checkpoint.close()
            self.checkpoint = None
        self.fit_calls(None, None)
        devices.release_idle_memory()

    # Adapters -----------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The loaded adapters by name."""
        return MappingProxyType(self._adapters)

    def load_adapter(
        self, folder: str | os.PathLike[str], name: str | None = None, *, strength: float = 1.0
    ) -> Adapter:
        """Load a low-rank adapter (LoRA) in PEFT's format; see docs/adapters.md. Before the model
        is loaded, it is planned and loaded with the model; afterwards its matrices go beside the
        weights that they change.

        Args:
            folder: with adapter_config.json and adapter_model.safetensors.
            name: by which calls choose it; None for the folder's name.
            strength: factor of the change: 1 as it was trained, 0 for nothing.

        Raises:
            ValueError: an adapter with this name is loaded already.
            FileNotFoundError: a file is missing.
            AdapterError: the files are damaged, contradict each other or the model, or need
                something unsupported; nothing is loaded.
            PlacementError: no room; every device is as it was.
        """
        name = Path(folder).resolve().name if name is None else name
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter is named {name!r:.60}: give a string")
        if name in self._adapters:
            raise ValueError(
                f"there is an adapter {name!r} already, of {self._adapters[name].folder}: call "
                "unload_adapter, or give this one another name"
            )
        files = AdapterFolder(folder, strength)
        try:
            adapter = open_adapter(files, name, self.units, self.config, self.dtype)
            self.check_adapter(adapter)
            made = self._read_adapter(adapter)
        except BaseException:
            files.close()
            raise
        for unit, changes in made.items():
            unit.low_rank = {**unit.low_rank, name: changes}
        self._adapters[name] = adapter
        self.adapters_changed()
        return adapter

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, and free its bytes.

        Raises:
            ValueError: there is none with this name, or jobs use it.
        """
        adapter = self._adapters[self._known_adapter(name)]
        if users := sum(not user.done for user in adapter.users):
            raise ValueError(
                f"{users} jobs use adapter {name!r}: let them end, or cancel them, first"
            )
        del self._adapters[name]
        for unit in self.units:
            if name in unit.low_rank:
                unit.low_rank = {n: each for n, each in unit.low_rank.items() if n != name}
        adapter.close()
        devices.release_idle_memory()
        self.adapters_changed()

    def check_adapter(self, adapter: Adapter) -> None:
        """Called before an adapter allocates; raises if there is no room."""

    def adapters_changed(self) -> None:
        """Called after an adapter was added or removed."""

    def _read_adapter(self, adapter: Adapter) -> dict[Unit, dict[str, LowRank]]:
        """Read its matrices for all loaded units to their devices; on an error, read none."""
        made: dict[Unit, dict[str, LowRank]] = {}
        read = [unit for unit in self.units if unit.module is not None]
        with Attempt():
            for unit in read:
                assert unit.device is not None
                made[unit] = adapter.read(unit.index, unit.device)
            return made
        full = read[len(made)]
        made.clear()
        devices.release_idle_memory()
        assert full.device is not None
        needed, free = adapter.nbytes[full.index], devices.available_memory(full.device)
        raise PlacementError(
            f"{full.device} ran out of memory at {full.name} of adapter {adapter.name!r}, which "
            f"takes {needed:,} bytes there ({sum(adapter.nbytes.values()):,} in all), and "
            f"{free:,} were free: unload another adapter, or load it before the model, so that it "
            "is planned with it",
            unit=full.name,
            device=str(full.device),
            needed=needed,
            available=free,
        )

    def use_adapter(self, name: str | None, user: User) -> None:
        """Keep an adapter loaded until its user is done.

        Raises:
            ValueError: there is none with this name.
        """
        if name is not None:
            self._adapters[self._known_adapter(name)].users.add(user)

    def _known_adapter(self, name: object) -> str:
        if isinstance(name, str) and name in self._adapters:
            return name
        there = ", ".join(map(repr, self._adapters)) or "none"
        raise ValueError(f"there is no adapter {name!r:.60}: load_adapter adds one (now: {there})")

    def chosen(self, adapter: str | Sequence[str | None] | None, rows: int) -> Chosen:
        """Check a call's adapters: one for all rows, or one or None per row.

        Raises:
            ValueError: there is none with such a name, or the count differs from the rows'.
        """
        if adapter is None or isinstance(adapter, str):
            return adapter if adapter is None else self._known_adapter(adapter)
        names = tuple(n if n is None else self._known_adapter(n) for n in adapter)
        if len(names) != rows:
            raise ValueError(f"{len(names)} adapters for {rows} rows: give one or None for each")
        return names[0] if len(set(names)) == 1 else names

    def keys_of(self, chosen: Chosen, rows: int) -> list[str | None]:
        """The adapter key of each row, which identifies its keys and values."""
        names = (chosen,) * rows if chosen is None or isinstance(chosen, str) else chosen
        return [
            None if name is None else self._adapters[self._known_adapter(name)].key
            for name in names
        ]

    # Forward ------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: KVCache | None = None,
        *,
        new_lens: Sequence[int] | None = None,
        last_id_only: bool = False,
        preprocess_only: bool = False,
        keep_chunks: bool = False,
        each_token: bool = False,
        placed_ids: torch.Tensor | None = None,
        adapter: str | Sequence[str | None] | None = None,
        snapshot_at: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """Run tokens through the model, after those that the cache holds.

        Args:
            input_ids: int64 (B, T); B at most the cache's ``batch_size``, rows in its order.
            cache: keys and values of earlier tokens; new ones are added. After an error it has the
                tokens that it had before.
            new_lens: number of real tokens in each row if rows differ; the rest is right padding.
            last_id_only: logits of each row's last token only.
            preprocess_only: fill the cache; no logits.
            keep_chunks: after an error the cache also keeps completed chunks, so that a call for
                the rest can continue.
            each_token: logits of every real token, row after row, (N, 1, vocabulary); of at most
                ``logits_len`` tokens per row. On a CPU with AVX2 or more, up to 16 tokens have the
                bits of single-token calls, unless a layer keeps a ring or isn't written in place.
            placed_ids: ``input_ids`` on the device where they were chosen, to save the copy. Only
                for calls of one chunk.
            adapter: the name of a loaded one, or one or None per row.
            snapshot_at: the number of new tokens of each row after which a cache with room for
                snapshots of recurrent states takes one, 0 for none; None for the first token with
                ``each_token``, otherwise for none.
        Returns:
            Logits in the model's dtype: (B, T, vocabulary), or (B, 1, vocabulary) with
            ``last_id_only``, or None with ``preprocess_only``. They are on the last device; those
            of more than ``logits_len`` tokens per row are gathered in host memory, since plans
            promise no room for them elsewhere. Logits at padding are undefined.

        Raises:
            ValueError: not loaded, a cache of another model, a token id outside the vocabulary,
                or more tokens than the cache holds.
            CacheUseError: the cache is in use.
        """
        if cache is None:
            if each_token:
                raise ValueError("each_token is for tokens that follow those in a cache")
            lengths = self._check_input(input_ids, None, new_lens, adapter)
            call = _Call(last_id_only=last_id_only, preprocess_only=preprocess_only)
            return self._forward_chunks(input_ids, None, lengths, call)
        if each_token and input_ids.shape[-1] > self.logits_len:
            raise ValueError(
                f"each_token takes {self.logits_len} tokens per row, and input_ids are "
                f"{tuple(input_ids.shape)}: give fewer, or set max_input_len"
            )
        if placed_ids is not None and placed_ids.shape != input_ids.shape:
            raise ValueError(
                f"placed_ids are {tuple(placed_ids.shape)}, and input_ids {tuple(input_ids.shape)}"
            )
        call = _Call(
            last_id_only=last_id_only,
            preprocess_only=preprocess_only,
            keep_chunks=keep_chunks,
            each_token=each_token,
            placed_ids=placed_ids,
        )
        with cache.use("model.forward"):
            lengths = self._check_input(input_ids, cache, new_lens, adapter)
            if not cache.has_snapshots:
                return self._forward_or_defragment(input_ids, cache, lengths, call)
            if snapshot_at is None and each_token:
                snapshot_at = [min(new, 1) for new in lengths.new]
            if snapshot_at is not None and any(snapshot_at):
                lengths = replace(lengths, snapshot_at=tuple(snapshot_at))
            return self._forward_from_snapshots(input_ids, cache, lengths, call)

    __call__ = forward

    def _forward_from_snapshots(
        self, input_ids: torch.Tensor, cache: KVCache, lengths: Lengths, call: _Call
    ) -> torch.Tensor | None:
        """A call whose rows may have to rerun tokens from their snapshots: together with the new
        ones if a call takes that many, otherwise before."""
        rerun = Rerun.of(cache, lengths)
        if not rerun.tokens or self.rotary.varies:
            return self._forward_or_defragment(input_ids, cache, lengths, call)
        ids, both = rerun.joined(input_ids, lengths)
        if both.chunk > (self.logits_len if call.each_token else self.max_input_len):
            ids, before = rerun.alone(lengths)
            with rerun.restored(cache):
                if before.chunk:
                    self._forward_or_defragment(ids, cache, before, _Call(preprocess_only=True))
            return self._forward_or_defragment(input_ids, cache, lengths, call)
        joined = replace(call, keep_chunks=False, placed_ids=None)
        with rerun.restored(cache):
            logits = self._forward_or_defragment(ids, cache, both, joined)
        if logits is None or call.last_id_only:
            return logits
        return rerun.own_logits(logits, lengths, call.each_token)

    def _forward_or_defragment(
        self, input_ids: torch.Tensor, cache: KVCache, lengths: Lengths, call: _Call
    ) -> torch.Tensor | None:
        """Run :meth:`_forward_cached`, and retry it if free memory is fragmented."""
        try:
            return self._forward_cached(input_ids, cache, lengths, call)
        except RuntimeError as error:
            if call.keep_chunks or not self._in_segments or not is_out_of_memory(error):
                raise
        # Calls of other shapes, and growth, may have left pieces that no request fits.
        cache.defragment()
        return self._forward_cached(input_ids, cache, lengths, call)

    def _forward_cached(
        self, input_ids: torch.Tensor, cache: KVCache, lengths: Lengths, call: _Call
    ) -> torch.Tensor | None:
        """A call with a cache, which is rolled back on an error."""
        before = cache.seq_lens
        try:
            self._make_room(cache, lengths)
            lengths = cache.placed(lengths)
            self._renew_keys(cache, lengths)
            if call.each_token:
                return self.forward_chunk(
                    input_ids, cache, lengths, head=True, last_id_only=False, each_token=True
                )
            return self._forward_chunks(input_ids, cache, lengths, call)
        except BaseException:
            cache.rollback(cache.seq_lens if call.keep_chunks else before, lengths.final)
            raise

    @property
    def _in_segments(self) -> bool:
        """Whether a device of the model gives memory in segments."""
        kinds = {unit.device.type for unit in self.units if unit.device is not None}
        return any(devices.allocator_rules(kind) is not None for kind in kinds)

    def begin_forward(
        self, input_ids: torch.Tensor, cache: KVCache, **options: Any
    ) -> Callable[[], Any]:
        """Begin :meth:`forward`, and return a function that waits for its logits, which other hosts
        may be computing. Both may raise its errors."""
        logits = self.forward(input_ids, cache, **options)
        return lambda: logits

    def _forward_chunks(
        self, input_ids: torch.Tensor, cache: KVCache | None, lengths: Lengths, call: _Call
    ) -> torch.Tensor | None:
        outputs: list[torch.Tensor] = []
        last: torch.Tensor | None = None
        for first, chunk in self._chunks(lengths, cached=cache is not None):
            end = first + chunk.chunk
            ending = [row for row, new in enumerate(lengths.new) if first < new <= end]
            wanted = not call.preprocess_only and (bool(ending) or not call.last_id_only)
            whole = chunk is lengths
            ids = input_ids if whole else input_ids[:, first:end]
            logits = self.forward_chunk(
                ids,
                cache,
                chunk,
                head=wanted,
                last_id_only=call.last_id_only,
                placed_ids=call.placed_ids if whole else None,
            )
            if logits is None:  # not wanted for this chunk
                continue
            if chunk.chunk < lengths.chunk:
                logits = logits.to(devices.CPU)  # make room for the next chunk
            if not call.last_id_only:
                outputs.append(logits)
            elif last is None:
                last = logits
            else:
                last[ending] = logits[ending]
        if outputs:
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return last

    def _chunks(self, lengths: Lengths, *, cached: bool) -> Iterator[tuple[int, Lengths]]:
        """Split a call into chunks ``(first token, lengths)`` of at most ``max_input_len`` tokens;
        a single chunk without a cache, as nothing would carry over."""
        size = self.max_input_len if cached else lengths.chunk
        if lengths.chunk <= size:
            yield 0, lengths
            return
        for first in range(0, lengths.chunk, size):
            done = tuple(min(new, first) for new in lengths.new)
            past = tuple(p + d for p, d in zip(lengths.past, done, strict=True))
            part = tuple(min(new - d, size) for new, d in zip(lengths.new, done, strict=True))
            ends = zip(lengths.final, past, part, strict=True)
            later = tuple(final - p - n for final, p, n in ends)
            borders = zip(lengths.snapshot_at, done, part, strict=False)
            at = tuple(count - d if d < count <= d + n else 0 for count, d, n in borders)
            at = at if any(at) else ()
            yield first, replace(lengths, past=past, new=part, later=later, snapshot_at=at)

    def _make_room(self, cache: KVCache, lengths: Lengths) -> None:
        """Make room for everything that a call writes; errors as of ``cache.make_room``."""
        if cache.pages is None:
            cache.make_room(lengths.final)
            return
        again = self._rows_to_renew(cache, lengths)
        past = enumerate(lengths.past)
        starts = [cache.snapshot_lens[row] if row in again else start for row, start in past]
        cache.make_room(lengths.final, starts)

    def _rows_to_renew(self, cache: KVCache, lengths: Lengths) -> list[int]:
        """Rows whose stored keys aren't valid, or not at these lengths."""
        wrong = set(cache.stale)
        if self.rotary.varies:
            stored = enumerate(zip(cache.rotary_variants, lengths.final, strict=False))
            wrong |= {row for row, (had, end) in stored if had != self.rotary.variant(end)}
        return [row for row, past in enumerate(lengths.past) if past and row in wrong]

    def _renew_keys(self, cache: KVCache, lengths: Lengths) -> None:
        """Recompute invalid keys.

        Dropped tokens may have overwritten others in a ring. And with longrope, a text that
        outgrows
        the length of its keys gets other frequencies from its first token on: transformers does so
        when it generates; here it applies to every call, row by row.
        """
        if not self.rotary.varies and not cache.stale:
            return
        stale = self._rows_to_renew(cache, lengths)
        wanted = [self.rotary.variant(length) for length in lengths.final]
        stored = cache.rotary_variants
        cache.rotary_variants = [None] * cache.batch_size  # until all rows are renewed
        if stale:
            self._rerun_rows(cache, stale, lengths)
            cache.renewed(stale)
        cache.rotary_variants = [*wanted, *stored[len(wanted) :]]

    def _rerun_rows(self, cache: KVCache, rows: Sequence[int], lengths: Lengths) -> None:
        """Rerun the tokens of these rows."""
        tokens = [list(sequence) for sequence in cache.sequences]
        again = [tokens[row] if row in rows else [] for row in range(len(lengths.past))]
        call = Lengths(
            past=tuple(0 if ids else past for ids, past in zip(again, lengths.past, strict=True)),
            new=tuple(map(len, again)),
            later=lengths.new,
            adapters=lengths.adapters,
        )
        call = cache.placed(call)
        padded, _ = pad_rows(again)
        try:
            for first, chunk in self._chunks(call, cached=True):
                ids = padded[:, first : first + chunk.chunk]
                self.forward_chunk(ids, cache, chunk, head=False, last_id_only=False)
        finally:
            cache.sequences = tokens

    @between_exchanges
    def forward_chunk(
        self,
        input_ids: torch.Tensor,
        cache: KVCache | None,
        lengths: Lengths,
        *,
        head: bool,
        last_id_only: bool,
        each_token: bool = False,
        placed_ids: torch.Tensor | None = None,
        stop: int | None = None,
    ) -> torch.Tensor | None:
        """Run the units, or those before ``stop``; the hidden state moves where the device
        changes."""
        wanted = Logits.NONE if not head else Logits.LAST if last_id_only else Logits.ALL
        wanted = Logits.EACH if each_token else wanted
        if cache is not None:
            cache.drop_snapshots(lengths.snapshot_at)
        x, batch, done = input_ids if placed_ids is None else placed_ids, None, 0
        chosen = lengths.adapters
        units = self.units if chosen is None else self._adapted.find(self.units, chosen)
        last = len(units) - 1
        end = len(units) - (not head) if stop is None else stop
        if cache is not None and any(unit.spec.is_mtp for unit in units[last - 1 : end]):
            self.give_embedded(input_ids)
        while done < end:
            unit = units[done]
            if self.transport is not None and unit.device == devices.ELSEWHERE:
                x, done = self.transport.pass_on(x, done, end, lengths)
                continue
            if unit.spec.is_mtp:
                if cache is not None:
                    module, device = self.standing(unit)
                    batch = self._batch_on(device, batch, lengths)
                    follow(self, module, x, input_ids, batch, cache)
                done += 1
                continue
            module, device = self.standing(unit)
            run = self._runs.find(units, done, cache, lengths, self.dtype, wanted)
            if run is not None and (out := run(x, lengths, self.rotary, wanted)) is not None:
                x, done = out, done + run.count
                continue
            if (last_id_only or each_token) and done == last:
                batch = self._batch_on(x.device, batch, lengths)
                x = batch.last_tokens(x) if last_id_only else batch.each_token(x)
            batch = self._batch_on(device, batch, lengths)
            x = devices.move(x, device)
            if wanted is Logits.ALL and done == last and x.shape[1] > self.logits_len:
                parts = x.split(self.logits_len, 1)
                x = torch.cat([module(part, batch, None).to(devices.CPU) for part in parts], 1)
            else:
                x = module(x, batch, self._store(unit, cache))
            done += 1
        if cache is not None:
            ids = input_ids.tolist()
            tokens = [row[:new] for row, new in zip(ids, lengths.new, strict=True)]
            cache.advance(tokens, self.keys_of(chosen, len(tokens)), lengths.snapshot_at)
        if not head:
            return None
        logits = x if self.transport is None else self.transport.logits(x, lengths, wanted)
        if not self._logits_checked and stop is None and logits is not None:
            check_logits(self, logits, input_ids, lengths, wanted)
            self._logits_checked = True
        return logits

    def embedded(self, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Embeddings (B, T, hidden) of ids (B, T), on this device; received from another process if
        the table is there."""
        if self.units[0].device == devices.ELSEWHERE:
            assert self.transport is not None
            return devices.move(self.transport.embedded(*ids.shape), device)
        module, there = self.standing(self.units[0])
        return devices.move(module(devices.move(ids, there), None, None), device)

    def give_embedded(self, ids: torch.Tensor) -> None:
        """Send embeddings to the process of the MTP head, if only the table is here."""
        first, mtp_head = self.units[0], self.units[-2]
        if mtp_head.device == devices.ELSEWHERE and first.device != devices.ELSEWHERE:
            assert self.transport is not None and first.device is not None
            self.transport.give_embedded(self.embedded(ids, first.device), mtp_head.index)

    def drafting(self, cache: KVCache, rows: int) -> Drafting:
        """Begin to propose tokens after the first ``rows`` rows of a cache by the MTP head."""
        return Drafting(self, cache, rows)

    def standing(self, unit: PlacedUnit) -> tuple[nn.Module, torch.device]:
        """The unit's module and device; read now if ``load(lazy=True)`` only placed it."""
        assert unit.device is not None
        if unit.module is None:
            self.read_unit(self.units[unit.index], unit.device)
        assert unit.module is not None
        return unit.module, unit.device

    def _batch_on(self, device: torch.device, batch: Batch | None, lengths: Lengths) -> Batch:
        """The call's batch on this device, reusing the previous unit's if possible."""
        if batch is not None and batch.past_lens.device == device:
            return batch
        return Batch.on(device, lengths, self.rotary, self.dtype)

    def _store(self, unit: PlacedUnit, cache: KVCache | None) -> Attend | None:
        """The unit's cache layer; None without keys and values."""
        if unit.spec.layer is None:
            return None
        return NoCacheLayer() if cache is None else cache.layers[unit.spec.layer]

    def _check_input(
        self,
        input_ids: torch.Tensor,
        cache: KVCache | None,
        new_lens: Sequence[int] | None,
        adapter: str | Sequence[str | None] | None,
    ) -> Lengths:
        if not self._is_ready(cache) and not self.loaded:
            raise ValueError("the model is not loaded: call load or load_autosplit first")
        if input_ids.dim() != 2 or input_ids.shape[1] == 0 or input_ids.dtype != torch.int64:
            raise ValueError(
                f"input_ids must be int64 of shape (rows, tokens) with at least one token, not "
                f"{input_ids.dtype} of {tuple(input_ids.shape)}"
            )
        rows, length = input_ids.shape
        new = (length,) * rows if new_lens is None else tuple(new_lens)
        if len(new) != rows or max(new) != length or min(new) < 0:
            raise ValueError(
                f"new_lens {list(new)} does not describe {rows} rows of at most {length} tokens"
            )
        ids = input_ids.tolist()
        low, high = min(map(min, ids)), max(map(max, ids))
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of "
                f"{self.config.vocab_size}: is this the model's own tokenizer?"
            )
        chosen = self.chosen(adapter, rows)
        if cache is None:
            return Lengths(past=(0,) * rows, new=new, adapters=chosen)
        return self._check_room(cache, rows, new, chosen)

    def _is_ready(self, cache: KVCache | None) -> bool:
        """Whether model and cache are known to be loaded and allocated in this epoch."""
        if cache is None or cache.model is not self:
            return False
        return cache.allocated_in == epochs.current()

    def _check_room(
        self, cache: KVCache, rows: int, new: tuple[int, ...], chosen: Chosen
    ) -> Lengths:
        cache.bind(self, rows)
        if rows > cache.batch_size:
            raise ValueError(f"{rows} rows, but the cache was built for {cache.batch_size}")
        if not self._is_ready(cache):
            cache.allocate(self.cache_map)
            cache.allocated_in = epochs.current()
        past = tuple(cache.seq_lens[:rows])
        for row in range(rows):
            if past[row] + new[row] > cache.row_limit(row):
                raise ValueError(
                    f"row {row} has {past[row]} tokens in the cache, and the call adds {new[row]}: "
                    f"more than its max_seq_len of {cache.row_limit(row)}"
                )
        return Lengths(past=past, new=new, adapters=chosen)


def _dtype_given(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype or its name, as in transformers; None for None or "auto"."""
    if dtype is None or dtype == "auto":
        return None
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}, or auto")
    return found


def _stored_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype of the checkpoint's first float tensor, for a config without one."""
    if config.path is None:
        raise ValueError("the config states no dtype and has no checkpoint: pass dtype")
    with open_checkpoint(config.path) as checkpoint:
        stored = [checkpoint.info(name).dtype for name in checkpoint.names()]
    return next((dtype for dtype in stored if dtype in DTYPES.values()), torch.float32)


def _units(specs: Sequence[UnitSpec]) -> tuple[Unit, ...]:
    return tuple(Unit(index, spec) for index, spec in enumerate(specs))
