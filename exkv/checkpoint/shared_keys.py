"""Settings of models whose last layers attend to earlier layers' keys and values, and which have
per-layer embeddings (Google, 2025: Gemma 3n)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .families import Specific
from .value_checks import check_at_most, check_count, check_size

if TYPE_CHECKING:
    from .model_config import ModelConfig

#: Upper bound on features of a per-layer embedding.
_WIDEST = 1 << 16


@dataclass(frozen=True, kw_only=True)  # no slots: classes inherit it beside ExpertsConfig
class SharedKeysConfig(Specific):
    """The last ``num_kv_shared_layers`` layers make no keys and values: they attend to those of the
    last layer before them of the same kind, with or without a window.

    Each layer adds an embedding of the token with ``hidden_size_per_layer_input`` features, 0 for
    none: the sum of a row of a table with ``vocab_size_per_layer_input`` rows and a projection of
    the token's embedding.
    """

    num_kv_shared_layers: int = 0
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262144

    def __post_init__(self) -> None:
        Specific.__post_init__(self)
        for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
            check_count(key, getattr(self, key))
        check_at_most("hidden_size_per_layer_input", self.hidden_size_per_layer_input, _WIDEST)
        check_size("vocab_size_per_layer_input", self.vocab_size_per_layer_input)

    @property
    def streams(self) -> int:
        """Hidden states a token that layers hand on."""
        return 1

    def carried(self, config: ModelConfig) -> int:
        """Values of further hidden states, per-layer embeddings, and shared keys and values."""
        sizes = (config.heads(layer) for layer in config.shared_keys)
        keys_and_values = sum(2 * count * width for count, width in sizes)
        embeddings = self.hidden_size_per_layer_input * config.num_hidden_layers
        return (self.streams - 1) * config.hidden_size + embeddings + keys_and_values
