"""A process's replica of the model, and the driver's commands on it, by name.

Each command is a method that takes the command's arguments and returns the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exkv import devices
from exkv.batch import Lengths, pad_rows
from exkv.cache import KVCache, LayerSpec
from exkv.cache.file import OwnPart
from exkv.cache.paging.pool import FollowedPool
from exkv.cache.paging.swap import SwappedPages
from exkv.checkpoint import ModelConfig, mount, open_checkpoint, unmount
from exkv.loading.loader import move_units
from exkv.model import Model
from exkv.models import Transformer
from exkv.models.mtp import Drafting
from exkv.planning import Budget, Plan, Scenario, Workload, make_budgets
from exkv.weights.choice import Choice

from .adapters import AdapterFiles, chosen_again
from .errors import ClusterError
from .hops import Hops
from .streaming import StreamedCheckpoint, StreamedTensor
from .values import CACHE_KINDS, Numbered
from .wire import WEIGHTS, Wire, pieces


def fingerprint(folder: Path) -> str:
    """Identify a checkpoint's weights: a hash of a sample of their bytes."""
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.fingerprint


#: The driver's commands, and the cache methods that it may call.
COMMANDS = frozenset(
    ("offer", "allocated", "has_copy", "build", "add_cache", "forget", "call_cache", "load")
    + ("move", "connect", "unload", "forward", "draft", "set_rows", "rebuild")
    + ("load_adapter", "unload_adapter", "describe_rows", "send_rows", "make_room", "take_rows")
)
CACHE_CALLS = frozenset(
    ("reset", "crop", "trim", "reorder", "select", "repeat_interleave", "clone", "fork", "convert")
    + ("free", "sharing_pool", "name_row", "move_row", "copy_state")
    + ("copy_page", "move_page", "swap_out", "swap_in")
)


class FollowingModel(Model):
    """A model that repeats the driver's calls, with the pages that the driver allocates."""

    pool_kind = FollowedPool


class Replica:
    """A process's model and caches.

    Args:
        folder: this host's copy of the checkpoint; None for the driver's own path.
        stream: have the driver send weights even if there is a copy.

    Attributes:
        model: None until the driver has it built.
        caches, away: caches and swapped-out pages, by the driver's numbers.
    """

    def __init__(self, wire: Wire, folder: Path | None = None, *, stream: bool = False) -> None:
        self.wire = wire
        self.folder, self.stream = folder, stream
        self._copy: Path | None = None
        self._asked_first = ""
        self._adapter_files = AdapterFiles()
        self._mounted: Path | None = None
        self.model: Model | None = None
        self._drafting: Drafting | None = None
        self.caches: dict[int, KVCache] = {}
        self.away: dict[int, SwappedPages] = {}

    @property
    def _model(self) -> Model:
        if self.model is None:
            raise ClusterError("no model has been built here yet")
        return self.model

    def offer(self, devices: Sequence[str] | None = None, memory: bool = False) -> list[Budget]:
        """The budgets of this host's devices now.

        Args:
            memory: whether to offer the host's memory beside its accelerators.
        """
        budgets = make_budgets(devices)
        beside = memory and all(budget.device.type != "cpu" for budget in budgets)
        return make_budgets(devices, cpu=True) if beside else budgets

    def allocated(self) -> dict[str, int]:
        """Bytes in live tensors on each of this host's accelerators."""
        found = {str(d): devices.allocated_memory(d) for d in devices.present_devices()}
        return {name: nbytes for name, nbytes in found.items() if nbytes is not None}

    def has_copy(self, path: str, weights_are: str) -> bool:
        """Whether this host has a copy of the checkpoint; otherwise the driver sends the weights
        that it needs.

        Args:
            path: the checkpoint's path on the driver.
            weights_are: its fingerprint.
        """
        self._asked_first = self._asked_first or weights_are
        there = [] if self.stream else [each for each in self._candidates(path) if each.exists()]
        self._copy = next((each for each in there if fingerprint(each) == weights_are), None)
        # --model names the copy of the first model, not necessarily that of a later one.
        others = [each for each in there if each != self.folder or weights_are == self._asked_first]
        if others and self._copy is None:
            raise ClusterError(
                f"{others[0]} is not the driver's model {path}: give the folder of its copy with "
                "--model, or have the weights sent with --stream"
            )
        return self._copy is not None

    def _candidates(self, path: str) -> list[Path]:
        """Possible places for a copy of the driver's checkpoint."""
        if self.folder is None:
            return [Path(path)]
        return [self.folder, self.folder.parent / Path(path).name, Path(path)]

    def build(
        self,
        path: str,
        config: ModelConfig,
        quantization: str,
        tensors: Sequence[Sequence[Any]] | None = None,
        **options: Any,
    ) -> None:
        """Build the model of the driver's config.

        Args:
            quantization: the config's, as JSON text.
            tensors: of the driver's checkpoint, if this host has no copy.
        """
        self.release_model()
        folder = self._copy or Path(path)
        if tensors is not None:
            known = [StreamedTensor(*each) for each in tensors]
            folder = self._mounted = Path(path)
            mount(folder, lambda: StreamedCheckpoint(folder, known, lambda: self.wire))
        config = config.replace(path=folder, quantization=json.loads(quantization))
        self.model = FollowingModel(config, **options)

    def close(self) -> None:
        """Leave the group and release all memory."""
        self.wire.close()
        self.release_model()

    def release_model(self) -> None:
        """Release the model and its caches."""
        if self.model is not None:
            self.model.unload()
        if self._mounted is not None:
            unmount(self._mounted)
        self._adapter_files.clear()
        self.model, self.caches, self.away, self._mounted = None, {}, {}, None
        self._drafting = None

    def load_adapter(self, name: str, key: str, strength: float, sizes: tuple[int, int]) -> None:
        """Load an adapter of the driver's, whose files follow this command."""
        folder, model = self._adapter_files.receive(self.wire, name, sizes), self._model
        if name in model.adapters:  # loaded before a recovery
            model.unload_adapter(name)
        if model.load_adapter(folder, name, strength=strength).key != key:
            raise ClusterError(f"adapter {name!r} changed while it was sent: load it again")

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, if it is loaded."""
        if name in self._model.adapters:
            self._model.unload_adapter(name)
        self._adapter_files.drop(name)

    def add_cache(
        self,
        number: int,
        kind: str,
        specs: Sequence[LayerSpec],
        call_len: int | None,
        owner: int | None = None,
        lender: int | None = None,
    ) -> None:
        """Build a cache like one of the driver's. For a fork, ``owner`` is the number of the cache
        with whose tokens it begins, and ``lender`` that of the one whose pages it shares."""
        lends = None if lender is None else self.caches[lender]
        made = CACHE_KINDS.get(kind, KVCache).of(self._model, specs, call_len, lends)
        if owner is not None:
            made.join(self.caches[owner])
        self.caches[number] = made

    def forget(self, number: int) -> None:
        """Free a cache, or swapped-out pages, that the driver no longer uses."""
        self.away.pop(number, None)
        if (cache := self.caches.pop(number, None)) is not None:
            cache.free()
            self._model.forget_cache(cache)

    def call_cache(
        self, number: int, name: str, args: Sequence[Any], kwargs: dict[str, Any], made: int
    ) -> None:
        """Call a method of a cache; a cache that it returns gets the number ``made``."""
        if name not in CACHE_CALLS:
            raise ClusterError(f"{name!r} is not a cache method that the driver may call")
        result = getattr(self.caches[number], name)(*map(self._numbered, args), **kwargs)
        if isinstance(result, KVCache):
            self.caches[made] = result
        elif isinstance(result, SwappedPages):
            self.away[made] = result

    def _numbered(self, value: Any) -> Any:
        """Resolve an argument that refers to an object by number; others pass through."""
        if not isinstance(value, Numbered):
            return value
        return self.caches[value.number] if value.number in self.caches else self.away[value.number]

    def load(
        self, plan: Plan, owners: Sequence[int], choice: Choice | None
    ) -> list[dict[str, Any]]:
        """Load this host's units -> each device's predicted and measured bytes."""
        model = self._model
        if choice != model.choice:
            model.choose(choice)
        self.connect(owners)
        model.load(plan=plan)
        assert model.report is not None
        return [
            {
                "device": str(row.ledger.device),
                "predicted": {line: getattr(row.ledger, line) for line in row.measured},
                "measured": dict(row.measured),
            }
            for row in model.report.devices
            if row.ledger.units
        ]

    def move(self, plan: Plan, owners: Sequence[int], choice: Choice | None) -> None:
        """Move this host's units as another plan has them; units that stay are not reloaded."""
        if not self._model.loaded:  # a host that joined later
            self.load(plan, owners, choice)
            return
        self.connect(owners)
        move_model(self._model, plan)

    def connect(self, owners: Sequence[int]) -> None:
        """Connect the model's units across processes; ``owners`` are their ranks."""
        connect(self._model, self.wire, owners)

    def unload(self) -> None:
        """Release all memory of the model and its caches."""
        model, self._drafting = self._model, None
        model.unload()
        model.transport, model.elsewhere = None, frozenset()

    def forward(
        self,
        number: int | None,
        ids: Sequence[Sequence[int]],
        options: dict[str, Any],
        pages: Sequence[Sequence[int]],
    ) -> None:
        """Run this host's part of a forward call; ``pages`` is the block table of a paged cache."""
        cache, self._drafting = None if number is None else self.caches[number], None
        if cache is not None and cache.pages is not None:
            cache.pages.show(pages)
        Transformer.forward(self._model, torch.tensor(ids), cache, **options)

    def draft(
        self,
        number: int,
        pages: Sequence[Sequence[int]] | None,
        begins: bool,
        step: tuple[Sequence[int], Sequence[int], Sequence[int]],
    ) -> None:
        """Take this host's part in a step of the MTP head alone, the first or the next one."""
        cache = self.caches[number]
        if pages is not None:
            assert cache.pages is not None
            cache.pages.show(pages)
        if begins:
            self._drafting = self._model.drafting(cache, len(step[0]))
        assert self._drafting is not None, "the first step begins"
        with cache.use("model.forward"), torch.no_grad():
            self._drafting.step(*step)

    def set_rows(self, number: int, state: dict[str, Any]) -> None:
        """Set a cache's rows to the driver's state, after a failed call or after reading them from
        a file."""
        cache = self.caches[number]
        cache.rollback([len(ids) for ids in state["sequences"]], state["written"])
        cache.sequences = [list(ids) for ids in state["sequences"]]
        cache.written = list(state["written"])
        cache.stale, cache.snapshot_lens = set(state["stale"]), list(state["snapshot_lens"])
        cache.rotary_variants = list(state["variants"])
        cache.made_with = list(state["made_with"])
        cache.alike[:] = 0  # unknown: rows may have changed
        cache.prefix_rows[:], cache.prefix_lens[:] = state["prefix_rows"], state["prefix_lens"]

    # Contents in files ----------------------------------------------------------------------

    def describe_rows(
        self, number: int, lens: Sequence[int], pages: Sequence[Sequence[int]] | None
    ) -> list[Any]:
        """Layer, name, dtype and shape of each tensor that this host stores for rows of these
        lengths."""
        cache = self.caches[number]
        if pages is not None:
            assert cache.pages is not None
            cache.pages.show(pages)
        return [
            (layer, name, part.dtype, part.shape)
            for layer, store in enumerate(cache.layers)
            for name in store.tensors
            for part in [OwnPart(layer=store, name=name, lens=lens)]
        ]

    def send_rows(self, number: int, layer: int, name: str, lens: Sequence[int]) -> None:
        """Send one of a layer's tensors to the driver."""
        part = OwnPart(layer=self.caches[number].layers[layer], name=name, lens=lens)
        for piece in pieces(part.values()):
            self.wire.send(piece, 0, tag=WEIGHTS)

    def make_room(
        self, number: int, lens: Sequence[int], pages: Sequence[Sequence[int]] | None
    ) -> None:
        """Grow a cache to hold rows of these lengths."""
        cache = self.caches[number]
        if cache.pages is not None and pages is not None:
            cache.pages.show(pages)
        else:
            cache.make_room(lens)

    def take_rows(self, number: int, layer: int, name: str, lens: Sequence[int]) -> None:
        """Receive one of a layer's tensors from the driver."""
        part = OwnPart(layer=self.caches[number].layers[layer], name=name, lens=lens)
        values = torch.empty(part.shape, dtype=part.dtype)
        for piece in pieces(values):
            self.wire.receive_into(piece, 0, tag=WEIGHTS)
        part.become(values)

    def rebuild(self, number: int, stop: int) -> None:
        """Recompute a cache's contents in the layers of units before ``stop``."""
        rebuild(self._model, self.caches[number], stop)


def connect(model: Transformer, wire: Wire, owners: Sequence[int]) -> None:
    """Connect a model's units across processes; ``owners`` are their ranks."""
    model.elsewhere = frozenset(i for i, owner in enumerate(owners) if owner != wire.rank)
    config = model.config
    model.transport = Hops(wire, owners, config.handed_on, config.vocab_size, model.dtype)


def rows_of(cache: KVCache) -> dict[str, Any]:
    """The state that :meth:`Replica.set_rows` takes."""
    return {
        "sequences": cache.sequences,
        "written": cache.written,
        "stale": sorted(cache.stale),
        "snapshot_lens": cache.snapshot_lens,
        "variants": cache.rotary_variants,
        "made_with": cache.made_with,
        "prefix_rows": cache.prefix_rows,
        "prefix_lens": cache.prefix_lens,
    }


def check_forks(model: Model) -> None:
    """Check that forks can be recomputed from tokens, before units move.

    Raises:
        ClusterError: the owner of a fork's prefix has changed since, or is gone.
    """
    for fork in model.caches:
        if fork.prefix_rows and fork.owner() is None:
            raise ClusterError(
                f"{fork!r} began with tokens of a cache that has changed since: they can't be "
                "recomputed"
            )


def move_model(model: Model, plan: Plan) -> None:
    """See :meth:`Replica.move`; forks share the recomputed layers again."""
    check_forks(model)
    workload = Workload.under(plan, model, model.caches)
    budgets = tuple(ledger.budget for ledger in plan.ledgers)
    model.plan = move_units(model, Scenario(workloads=(workload,), budgets=budgets), plan)


def rebuild(model: Transformer, cache: KVCache, stop: int) -> None:
    """Recompute a cache by running its token log through the units before ``stop``; for a fork only
    its own tokens. The cache holds the same tokens afterwards."""
    tokens = [list(ids) for ids in cache.sequences]
    written, stale = list(cache.written), set(cache.stale)
    past = tuple(min(n, len(ids)) for n, ids in zip(cache.prefix_lens, tokens, strict=True))
    again = [ids[n:] for ids, n in zip(tokens, past, strict=True)]
    if not any(again):
        return
    names = chosen_again(model, cache.made_with)
    chosen = model.chosen(names, len(names))
    call = Lengths(past=past, new=tuple(map(len, again)), adapters=chosen)
    padded, _ = pad_rows(again)
    made_with = model.keys_of(chosen, len(names))
    try:
        with torch.no_grad(), cache.use("cluster.rebuild"):
            cache.make_room(call.final, starts=call.past)
            for first, chunk in model._chunks(call, cached=True):
                ids = padded[:, first : first + chunk.chunk]
                model.forward_chunk(ids, cache, chunk, head=False, last_id_only=False, stop=stop)
    finally:
        cache.sequences, cache.made_with = tokens, made_with
        cache.written, cache.stale = written, stale
        cache.snapshot_lens = [0] * len(tokens)
