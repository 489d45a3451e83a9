"""OLMo 3 (OLMo team, 2025): an OLMo 2 with a window in three of four layers, whose positions are
unscaled; the config has a type for each layer."""

from dataclasses import replace

from exkv.checkpoint import windows
from exkv.checkpoint.gguf.names import POST_NORMS, GGUFFamily

from . import olmo2

FAMILY = replace(
    olmo2.FAMILY,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults=olmo2.FAMILY.defaults | {"sliding_window": 4096},
    windows=windows.three_of_four,
    rope_theta=5e5,
    rope_local_base_freq=5e5,
    gguf=GGUFFamily(
        architecture="olmo2",
        names=POST_NORMS,
        metadata={"rope.freq_base_swa": "rope_local_base_freq"},
        marks={"attention.sliding_window": True},
    ),
)
