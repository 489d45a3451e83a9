"""The keys of a config.json: which ones were read, and which others change no logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

#: Keys that change no logits: settings of training, generation, other classes' heads, MTP layers
#: and rounding, and notes of programs.
HARMLESS = frozenset(
    (
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout", "hidden_dropout"),
        *("resid_pdrop", "residual_dropout", "classifier_dropout", "router_jitter_noise"),
        *("input_jitter_noise", "enable_moe_fp32_combine", "altup_coef_clip"),
        *("initializer_range", "router_aux_loss_coef", "output_router_logits", "pretraining_tp"),
        *("use_cache", "cache_implementation", "output_attentions", "output_hidden_states"),
        *("return_dict", "id2label", "label2id", "problem_type", "chunk_size_feed_forward"),
        *("is_encoder_decoder", "is_decoder", "ignore_keys_at_rope_validation"),
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("num_mtp_layers", "num_nextn_predict_layers", "eod_token_id", "sep_token_id"),
        *("mtp_layer_types", "mtp_mlp_layer_types", "aux_loss_alpha", "seq_aux", "ep_size"),
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
        *("linear_dt_init_floor",),
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        *("mamba_chunk_size", "chunk_size", "expand", "z_loss_coefficient", "num_logits_to_keep"),
        *(
            "use_mambapy",
            "use_associative_scan",
            "use_mamba_kernels",
            "mamba_ssm_cache_dtype",
            "time_step_max",
            "time_step_floor",
        ),
        *("rescale_prenorm_residual", "residual_in_fp32", "moe_shared_expert_overlap"),
        *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        *("auto_map", "transformers_version", "_name_or_path"),
        *("_sliding_window_pattern", "sliding_window_size", "full_attn_mod", "interpolate_factor"),
        "shared_moe_mode",
    )
)


class Fields(Mapping[str, Any]):
    """A config.json's keys and values, which records the keys that were read."""

    def __init__(self, values: Mapping[str, Any], read: set[str] | None = None) -> None:
        self._values = values
        self._read = set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """The same with defaults for missing keys; both share the record of keys read."""
        return Fields({**defaults, **self._values}, self._read)

    def under(self, derived: Mapping[str, Any]) -> Fields:
        """The same with some values replaced."""
        return Fields({**self._values, **derived}, self._read)

    def unread(self) -> dict[str, Any]:
        """The keys that nothing read, and that may change logits."""
        rest = self._values.keys() - self._read - HARMLESS
        return {key: value for key, value in self._values.items() if key in rest}


def refuse_unsupported(fields: Fields, refused: Mapping[str, Any], model_type: str) -> None:
    """ValueError for a key that changes logits in transformers' models but not in exkv's.

    Args:
        refused: those keys -> the value without effect, beside null.
    """
    for key, neutral in refused.items():
        value = fields.get(key)
        if value is not None and value != neutral:
            raise ValueError(
                f"{key} {value!r} is not supported for a {model_type}, only {neutral!r}; take a "
                f"model without it"
            )


def warn_of_unread(fields: Fields, where: str, architecture: str) -> None:
    """Warn about keys that neither exkv nor transformers' class of the architecture has, unless
    their value is null, false, zero or empty."""
    unread = [f"{key} {value!r:.80}" for key, value in fields.unread().items() if value]
    if unread:
        logger.warning(
            "%s: ignored, since a %s has no such setting: %s",
            where,
            architecture,
            ", ".join(unread),
        )
