"""Readers of a checkpoint's folder, which check everything before a byte of data is used.

``model_config`` reads config.json: ``families`` describes each architecture's keys, ``windows`` and
``rope_config`` read sliding windows and rotary positions, ``fields`` reports keys that nothing
reads. ``safetensors`` reads headers and maps tensors, and ``gguf`` does the same for llama.cpp's
files.
"""

from __future__ import annotations

from .disk import measured_rate, read_ahead
from .facts import Facts, facts_of, has_tensors
from .families import (
    ClampedExpertsConfig,
    ExpertsConfig,
    LatentHeads,
    LinearAttentionConfig,
    Multipliers,
    QueryScaling,
    RoutedExpertsConfig,
    StateTensor,
)
from .gguf.contents import GGUFContents, find_gguf
from .gguf.tensors import GGUFCheckpoint
from .model_config import DTYPES, ModelConfig
from .opening import mount, open_checkpoint, unmount
from .rope_config import RopeParameters, RopeScaling
from .safetensors import Checkpoint, CheckpointError, ExpectedTensor, TensorInfo

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
    "LatentHeads",
    "LinearAttentionConfig",
    "ModelConfig",
    "Multipliers",
    "QueryScaling",
    "RopeParameters",
    "RopeScaling",
    "RoutedExpertsConfig",
    "StateTensor",
    "TensorInfo",
    "facts_of",
    "find_gguf",
    "has_tensors",
    "measured_rate",
    "mount",
    "open_checkpoint",
    "read_ahead",
    "unmount",
]
