"""``ExLlamaV2Lora``: one of ``model.exkv.adapters``, with ExLlamaV2's interface."""

from __future__ import annotations

import os
from pathlib import Path

from .loras import OfModel
from .missing import check_kind, missing_from
from .model import ExLlamaV2


class ExLlamaV2Lora(OfModel):
    """A low-rank adapter (LoRA) of a model, as PEFT saves it.

    Attributes:
        model: the adapter's model.
        name: its key in ``model.exkv.adapters``.
        lora_config_path, lora_path: its files.
        lora_r, lora_alpha: rank and alpha of its config.
        lora_scaling: the factor of its matrices' product.

    Raises:
        ValueError, FileNotFoundError, PlacementError: as :meth:`exkv.Model.load_adapter` does.
    """

    def __init__(
        self,
        model: ExLlamaV2,
        lora_config_path: str | os.PathLike[str],
        lora_path: str | os.PathLike[str],
        lora_scaling: float = 1.0,
    ) -> None:
        check_kind("model", model, ExLlamaV2)
        config, tensors = Path(lora_config_path), Path(lora_path)
        if config.parent != tensors.parent:
            raise ValueError(f"{config} and {tensors} are in different folders: put them into one")
        self.model = model
        self.lora_config_path, self.lora_path = str(config), str(tensors)
        self.name = _free_name(model, config.resolve().parent.name)
        adapter = model.exkv.load_adapter(config.parent, self.name, strength=lora_scaling)
        self.config = model.config
        self.lora_r, self.lora_alpha = adapter.config.rank, adapter.config.alpha
        self.lora_scaling = lora_scaling * adapter.config.scale_of("")

    @staticmethod
    def from_directory(
        model: ExLlamaV2, directory: str | os.PathLike[str], lora_scaling: float = 1.0
    ) -> ExLlamaV2Lora:
        """Load the adapter in a folder, scaled by ``lora_scaling``."""
        files = ("adapter_config.json", "adapter_model.safetensors")
        config, tensors = (Path(directory) / file for file in files)
        return ExLlamaV2Lora(model, config, tensors, lora_scaling)

    def unload(self) -> None:
        """Free its memory; idempotent."""
        if self.name in self.model.exkv.adapters:
            self.model.exkv.unload_adapter(self.name)


def _free_name(model: ExLlamaV2, name: str) -> str:
    count, found = 1, name
    while found in model.exkv.adapters:
        count += 1
        found = f"{name} {count}"
    return found


__getattr__ = missing_from(__name__)
