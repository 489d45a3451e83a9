"""``ExLlamaV2Config``: a folder, and settings that can be changed until the model is built.

``prepare`` reads the folder into exkv's ModelConfig; :meth:`ExLlamaV2Config.for_exkv` applies a
script's settings to it, once, when ``ExLlamaV2(config)`` is built.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from exkv import ModelConfig, RopeScaling

from .missing import Adapter, missing_attribute, missing_from

logger = logging.getLogger(__name__)

_LOW_MEM_TOKENS = 1024

#: Settings that a script may change, with their defaults.
_SETTINGS: dict[str, Any] = {
    "model_dir": None,
    "max_seq_len": None,
    "max_batch_size": 1,
    "max_input_len": 2048,
    "max_attention_size": 2048**2,
    "max_output_len": None,
    "scale_pos_emb": 1.0,
    "scale_alpha_value": 1.0,
    "rotary_embedding_base": None,
    "num_experts_per_token": None,
    "alt_rope_method": None,
    "yarn_rope_factor": None,
    "yarn_rope_original_max_position_embeddings": None,
    "low_mem": False,
    "no_flash_attn": False,
    "no_xformers": False,
    "no_sdpa": False,
    "no_graphs": False,
    "fasttensors": False,
}
#: Attributes that prepare() reads -> fields of ModelConfig.
_READ = {
    "architecture": "architecture",
    "bos_token_id": "bos_token_id",
    "pad_token_id": "pad_token_id",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "num_hidden_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "sliding_window": "sliding_window",
}
#: Attributes that prepare() reads and a script may not change.
_FIXED = {*_READ, "num_key_value_groups", "num_experts", "exkv"} - {"bos_token_id", "pad_token_id"}
#: Settings without effect -> why.
WITHOUT_EFFECT = {
    "max_batch_size": "exkv plans with each cache's batch_size",
    "max_attention_size": "exkv's attention has no matrix that grows with both lengths",
    "no_flash_attn": "exkv has kernels of its own",
    "no_xformers": "exkv has kernels of its own",
    "no_sdpa": "exkv has kernels of its own",
    "no_graphs": "exkv decides about graphs itself",
    "fasttensors": "exkv chooses the fastest way to read files itself",
}
_noted: set[str] = set()


class ExLlamaV2Config(Adapter):
    """Settings of a model, which ExLlamaV2's scripts change.

    Attributes:
        exkv: the ModelConfig that :meth:`prepare` read; None before.
        low_mem: run prompts in chunks of at most 1,024 tokens, which needs less workspace.

    Raises:
        AttributeError: a fixed or unknown attribute is set; the message names a similar one, or
            what to use instead.
    """

    exkv: ModelConfig | None
    model_dir: str | None
    max_seq_len: int
    max_input_len: int
    max_output_len: int | None
    low_mem: bool
    scale_pos_emb: float
    scale_alpha_value: float
    rotary_embedding_base: float
    num_experts_per_token: int | None
    alt_rope_method: str | None
    yarn_rope_factor: float | None
    yarn_rope_original_max_position_embeddings: int | None
    eos_token_id: int | None
    bos_token_id: int | None
    pad_token_id: int | None
    vocab_size: int

    def __init__(self, model_dir: str | os.PathLike[str] | None = None) -> None:
        vars(self).update(_SETTINGS, exkv=None)
        if model_dir is not None:
            self.model_dir = str(model_dir)
            self.prepare()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            raise missing_attribute(type(self).__qualname__, name, vars(self))
        if name in _FIXED:
            raise AttributeError(
                f"config.{name} is {vars(self)[name]!r:.60} in config.json, and can't be set: edit "
                "a copy of config.json"
            )
        if name in WITHOUT_EFFECT and value != _SETTINGS[name]:
            _note(name, WITHOUT_EFFECT[name])
        if name.startswith("scale_") and value is None:  # the value of a flag that isn't given
            value = 1.0
        super().__setattr__(name, value)
        if name == "low_mem" and value:
            self.set_low_mem()

    def prepare(self, no_tensors: bool = False) -> None:
        """Read the folder's config.json.

        Args:
            no_tensors: without effect: exkv opens the weights when they are loaded.

        Raises:
            ValueError: no ``model_dir`` is set, or the files contradict each other.
            FileNotFoundError: there is no such folder, or no config.json in it.
        """
        if self.model_dir is None:
            raise ValueError("set config.model_dir before config.prepare()")
        read = ModelConfig.from_pretrained(self.model_dir)
        known = vars(self)
        known.update({name: getattr(read, field) for name, field in _READ.items()})
        known.update(
            exkv=read,
            eos_token_id=read.eos_token_id[0] if read.eos_token_id else None,
            num_key_value_groups=read.num_attention_heads // read.num_key_value_heads,
            num_experts=_experts(read)[0],
            num_experts_per_token=_experts(read)[1],
            rotary_embedding_base=read.rope_theta,
        )
        if self.max_seq_len is None:
            self.max_seq_len = read.max_position_embeddings

    def set_low_mem(self) -> None:
        """Run prompts in chunks of at most 1,024 tokens."""
        self.max_input_len = min(self.max_input_len, _LOW_MEM_TOKENS)
        if self.max_output_len is not None:
            self.max_output_len = min(self.max_output_len, _LOW_MEM_TOKENS)

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        """Without effect: exkv implements the architecture, or refuses it by name."""

    def for_exkv(self) -> ModelConfig:
        """The ModelConfig with the script's settings.

        Raises:
            ValueError: :meth:`prepare` wasn't called, or a setting is out of range.
        """
        if self.exkv is None:
            raise ValueError("call config.prepare() before ExLlamaV2(config)")
        config = self.exkv
        if self.rotary_embedding_base != config.rope_theta or self.scale_alpha_value != 1:
            config = config.replace(rope_theta=self._rope_base(config))
        if (scaling := self._rope_scaling(config)) is not None:
            config = config.replace(rope_scaling=scaling)
        if self.num_experts_per_token != _experts(config)[1]:
            if not dataclasses.is_dataclass(config.specific) or not _experts(config)[0]:
                _note("num_experts_per_token", f"{config.architecture} has no experts")
                return config
            taken: dict[str, Any] = {"num_experts_per_tok": self.num_experts_per_token}
            config = config.replace(specific=dataclasses.replace(config.specific, **taken))
        return config

    def _rope_base(self, config: ModelConfig) -> float:
        """NTK-aware scaling raises the base by alpha ** (d / (d - 2)) (bloc97, 2023)."""
        width = config.rotary_dim
        return self.rotary_embedding_base * self.scale_alpha_value ** (width / (width - 2))

    def _rope_scaling(self, config: ModelConfig) -> RopeScaling | None:
        """The scaling that the settings add to config.json; None for none."""
        if self.alt_rope_method is not None:
            if self.alt_rope_method != "yarn" or self.yarn_rope_factor is None:
                raise ValueError(
                    f"config.alt_rope_method is {self.alt_rope_method!r}: set 'yarn' with "
                    "yarn_rope_factor; other methods must be in config.json"
                )
            trained = self.yarn_rope_original_max_position_embeddings
            return RopeScaling(
                rope_type="yarn",
                factor=self.yarn_rope_factor,
                original_max_position_embeddings=trained or config.max_position_embeddings,
            )
        if self.scale_pos_emb == 1:
            return None
        if config.rope_scaling is not None:
            raise ValueError(
                f"config.scale_pos_emb is {self.scale_pos_emb}, but config.json already has a "
                f"rope_scaling: {config.rope_scaling.rope_type}; set one of them"
            )
        return RopeScaling(rope_type="linear", factor=self.scale_pos_emb)


def _note(name: str, why: str) -> None:
    """Warn once that a setting has no effect."""
    if name not in _noted:
        _noted.add(name)
        logger.warning("config.%s has no effect: %s", name, why)


def _experts(config: ModelConfig) -> tuple[int | None, int | None]:
    """Number of experts, and of experts per token."""
    number, per_token = (
        getattr(config.specific, name, None)
        for name in ("num_local_experts", "num_experts_per_tok")
    )
    return number, per_token


__getattr__ = missing_from(__name__)
