"""What a checkpoint's folder holds, checked before a byte of it is used.

``config`` reads config.json, with ``families`` for what only some architectures state and
``rope_config`` for rotary positions; ``safetensors`` reads the headers and maps the tensors.
``gguf`` does the same for llama.cpp's files, and ``gguf_config`` makes a config of what they say.
"""

from __future__ import annotations

from .config import DTYPES, ModelConfig
from .facts import Facts, facts_of
from .families import ExpertsConfig, GemmaConfig
from .gguf import GGUFCheckpoint, GGUFContents, find_gguf, open_checkpoint
from .rope_config import RopeParameters, RopeScaling
from .safetensors import Checkpoint, CheckpointError, ExpectedTensor, TensorInfo, WeightReader

__all__ = [
    "DTYPES",
    "Checkpoint",
    "CheckpointError",
    "ExpectedTensor",
    "ExpertsConfig",
    "Facts",
    "GGUFCheckpoint",
    "GGUFContents",
    "GemmaConfig",
    "ModelConfig",
    "RopeParameters",
    "RopeScaling",
    "TensorInfo",
    "WeightReader",
    "facts_of",
    "find_gguf",
    "open_checkpoint",
]
