"""A checkpoint's folder as a model on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exkv import Model


def on_cpu(folder: Path | str, **options: Any) -> Model:
    """exkv's model of this folder, or this file, whole on the CPU."""
    model = Model(folder, **options)
    model.load(devices=["cpu"])
    return model
