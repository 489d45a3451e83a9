"""What a checkpoint's folder holds, checked before a byte of it is used.

``config`` reads config.json, with ``families`` for what only some architectures state and
``rope_config`` for rotary positions; ``safetensors`` reads the headers and maps the tensors.
``gguf`` does the same for llama.cpp's files, and ``gguf_config`` makes a config of what they say.
"""

from __future__ import annotations

from .config import DTYPES, ModelConfig
from .facts import Facts, facts_of
from .families import (
    ClampedExpertsConfig,
    ExpertsConfig,
    GemmaConfig,
    Multipliers,
    OutputBiasConfig,
    ResidualConfig,
)
from .gguf import (
    GGUFCheckpoint,
    GGUFContents,
    find_gguf,
    mount,
    open_checkpoint,
    unmount,
)
from .rope_config import RopeParameters, RopeScaling
from .safetensors import Checkpoint, CheckpointError, ExpectedTensor, TensorInfo, WeightReader

__all__ = [
    "DTYPES",
    "Checkpoint",
    "CheckpointError",
    "ClampedExpertsConfig",
    "ExpectedTensor",
    "ExpertsConfig",
    "Facts",
    "GGUFCheckpoint",
    "GGUFContents",
    "GemmaConfig",
    "ModelConfig",
    "Multipliers",
    "OutputBiasConfig",
    "ResidualConfig",
    "RopeParameters",
    "RopeScaling",
    "TensorInfo",
    "WeightReader",
    "facts_of",
    "find_gguf",
    "mount",
    "open_checkpoint",
    "unmount",
]
