"""Command R7B and Command A (Cohere, 2024): a Command R with a window in three of four layers, of
which the fourth has no positions; the config has a type for each layer."""

from dataclasses import replace

from exkv.checkpoint import windows
from exkv.checkpoint.gguf.names import GGUFFamily

from . import cohere

FAMILY = replace(
    cohere.FAMILY,
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    units=cohere.DECODER,
    specific=None,
    defaults=cohere.FAMILY.defaults | {"sliding_window": 4096},
    windows=windows.three_of_four,
    rope_theta=1e4,
    # Layers without a window have no positions, even if none has a window.
    rotated=lambda values, types: (
        windows.sliding_ones(values, types) or (False,) * values["num_hidden_layers"]
    ),
    gguf=GGUFFamily(
        architecture="cohere2",
        metadata={"logit_scale": "logit_scale"},
        assumed={"attention.sliding_window_pattern": "every fourth layer attends to everything"},
    ),
)
