"""Architectures by the name in config.json; a file is imported when its name is met."""

from __future__ import annotations

import importlib

import torch

from exkv.checkpoint import ModelConfig

from .units import UnitSpec

#: ``architectures[0]`` of config.json -> module of this package.
ARCHITECTURES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def unit_specs(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the config's architecture, in the order in which a token passes them.

    Raises:
        ValueError: the architecture has no file here.
    """
    module = ARCHITECTURES.get(config.architecture)
    if module is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(
            f"{config.path or 'the config'}: architecture {config.architecture!r} is not "
            f"supported; known are: {known}"
        )
    return importlib.import_module(f"{__package__}.{module}").units(config, dtype)
