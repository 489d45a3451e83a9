"""What a checkpoint's folder holds, checked before a byte of it is used.

``config`` reads config.json, with ``families`` for what only some architectures state and
``rope_config`` for rotary positions; ``safetensors`` reads the headers and maps the tensors.
"""

from .config import DTYPES, ModelConfig
from .facts import Facts, facts_of
from .families import ExpertsConfig, GemmaConfig
from .rope_config import RopeParameters, RopeScaling
from .safetensors import Checkpoint, CheckpointError, ExpectedTensor, TensorInfo, WeightReader

__all__ = [
    "DTYPES",
    "Checkpoint",
    "CheckpointError",
    "ExpectedTensor",
    "ExpertsConfig",
    "Facts",
    "GemmaConfig",
    "ModelConfig",
    "RopeParameters",
    "RopeScaling",
    "TensorInfo",
    "WeightReader",
    "facts_of",
]
