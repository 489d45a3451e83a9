"""``plan_device_map`` for the configs of transformers' models: a map, or a one-line error.

All config classes whose models generate text from text, or from images and text, with few layers
and their default widths: a plan takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from exkv.integrations.transformers import plan_device_map
from exkv.integrations.transformers.versions import SINCE_5

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers",
          "decoder_layers", "num_encoder_layers", "num_decoder_layers")  # fmt: skip
#: Some that must be planned; the first two lines used to crash or be refused.
PLANNED = {
    f"{name}Config"
    for name in (
        *("DeepseekV3", "Falcon", "GPTNeo", "GPTNeoXJapanese", "Gemma3", "Llama4", "Llama4Text"),
        *("Llava", "Mllama", "Mpt", "OPT", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL"),
        *("Bloom", "Cohere2", "FalconH1", "GPT2", "Gemma2", "Glm4", "GptOss", "Jamba"),
        *("Llama", "Mamba", "Mamba2", "Mistral", "Mixtral", "Olmo2", "Phi3", "Qwen2", "Qwen3"),
        *("Qwen3Moe", "Qwen3Next", "Starcoder2"),
    )
}
#: Number of layers to keep, which includes a hybrid's first attention layer.
KEPT = 10


def config_classes() -> dict[str, type[PretrainedConfig]]:
    autos: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return {each.__name__: each for auto in autos for each in auto._model_mapping}


def parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from parts(value)


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Reduce a config to few layers, with all per-layer settings."""
    for part in parts(config):
        if getattr(part, "num_kv_shared_layers", 0):
            part.num_kv_shared_layers = 0  # or it would exceed their number
        for name in LAYERS:
            count = vars(part).get(name)
            if isinstance(count, int) and count > KEPT:
                setattr(part, name, KEPT)
                for key, value in list(vars(part).items()):
                    if isinstance(value, list | tuple) and len(value) == count:
                        setattr(part, key, value[:KEPT])
    return config


def planned(config_class: type[PretrainedConfig]) -> str | dict[str, str]:
    """The map, or the error's message."""
    try:
        config = shrunk(config_class())
    except Exception as error:  # a class with inconsistent defaults
        return f"no config: {type(error).__name__}"
    call: dict[str, Any] = {"devices": "9T,9T", "objective": "balance"}
    try:
        return plan_device_map(config, max_seq_len=48, batch_size=2, dtype=torch.bfloat16, **call)
    except ValueError as error:
        return str(error)


CLASSES = config_classes() if SINCE_5 else {}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_config_is_planned_or_refused_in_a_sentence(name):
    transformers.logging.set_verbosity_error()
    found = planned(CLASSES[name])
    if isinstance(found, str):
        assert name not in PLANNED, found
        assert found and "\n" not in found, found
    elif name in PLANNED:
        assert set(found.values()) == {"cuda:0", "cuda:1"}
    else:  # some can't be split, or share one tensor
        assert set(found.values()) <= {"cuda:0", "cuda:1"}
