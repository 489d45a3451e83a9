"""EXAONE 4 (LG AI Research, 2025): a Qwen 3 with its norms after attention and MLP; where some
layers have a window, the others have no positions."""

from exkv.checkpoint import windows
from exkv.checkpoint.families import Family, beside_images
from exkv.checkpoint.gguf.names import POST_NORMS, GGUFFamily

from .decoder import Decoder, PostNormLayer, rms_norm

FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    units=Decoder(layer=PostNormLayer, head_norm=rms_norm),
    defaults={
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "bos_token_id": 0,
    },
    windows=windows.three_of_four,
    rotated=windows.sliding_ones,
    gguf=GGUFFamily(architecture="exaone4", names=POST_NORMS),
)
#: The text model of a vision-language model (EXAONE 4.5).
WITH_IMAGES = beside_images(FAMILY, "Exaone4_5_ForConditionalGeneration", "exaone4_5")
