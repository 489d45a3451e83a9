"""K-EXAONE (LG AI Research, 2025): an EXAONE 4 with norms before attention and MLP, routing
by sigmoid scores with a correction bias, and a shared expert."""

from __future__ import annotations

from dataclasses import dataclass, replace

from exkv.checkpoint import RoutedExpertsConfig
from exkv.checkpoint.families import Family

from . import exaone4, glm4_moe
from .decoder import Decoder, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTypeExpertsConfig(RoutedExpertsConfig):
    """Which layers have experts may be stated by ``mlp_layer_types``, "dense" or "sparse" each."""

    mlp_layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        RoutedExpertsConfig.__post_init__(self)
        types = self.mlp_layer_types
        if types is None:
            return
        if not isinstance(types, list | tuple) or not {*types} <= {"dense", "sparse"}:
            raise ValueError(
                f"mlp_layer_types must be a list of 'dense' and 'sparse', not {types!r}"
            )
        object.__setattr__(self, "mlp_layer_types", tuple(types))

    def is_dense(self, layer: int) -> bool:
        types = self.mlp_layer_types
        if types is None:
            return RoutedExpertsConfig.is_dense(self, layer)
        return layer < len(types) and types[layer] != "sparse"


FAMILY = Family(
    architecture="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    units=Decoder(
        head_norm=rms_norm,
        mlp_of_layer=glm4_moe.MLP_OF_LAYER,
        rename={**glm4_moe.NAMES, "mlp.correction": "mlp.e_score_correction_bias"},
    ),
    defaults=exaone4.FAMILY.defaults
    | {
        "moe_intermediate_size": 1024,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 1,
        "eos_token_id": 53,
        "pad_token_id": 0,
    },
    windows=exaone4.FAMILY.windows,
    rotated=exaone4.FAMILY.rotated,
    specific=LayerTypeExpertsConfig,
    aliases={"num_local_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    gguf=replace(
        glm4_moe.GGUF,
        architecture="exaone-moe",
        names={**glm4_moe.GGUF.names, "exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
)
