"""Low-rank adapters (LoRA, Hu et al., 2021) as PEFT stores them: a matrix becomes W + scale B A.

``config`` reads adapter_config.json, ``patterns`` says which modules its names and regular
expressions mean, ``folder`` checks the tensors and gives them, ready to be used.
"""

from .config import AdapterConfig, AdapterError
from .folder import AdapterFolder, LowRankShape

__all__ = ["AdapterConfig", "AdapterError", "AdapterFolder", "LowRankShape"]
