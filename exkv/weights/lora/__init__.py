"""Low-rank adapters (LoRA, Hu et al., 2021) as PEFT stores them: a matrix becomes W + scale B A.

``config`` reads adapter_config.json, ``patterns`` says which modules its names and regular
expressions mean, ``folder`` checks the tensors and gives them, ready to be used.
"""

from .adapter_config import CONFIG_NAME, AdapterConfig, AdapterError
from .folder import TENSORS_NAME, AdapterFolder, LowRankShape

__all__ = [
    "CONFIG_NAME",
    "TENSORS_NAME",
    "AdapterConfig",
    "AdapterError",
    "AdapterFolder",
    "LowRankShape",
]
