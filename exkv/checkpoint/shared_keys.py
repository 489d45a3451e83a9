"""Settings of models whose last layers attend to earlier layers' keys and values, and which look
up an embedding for each layer of each token (Google, 2025: Gemma 3n)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .families import Specific
from .value_checks import check_at_most, check_size, is_int

if TYPE_CHECKING:
    from .model_config import ModelConfig

#: More than any layer's embedding has.
_WIDEST = 1 << 16


@dataclass(frozen=True, kw_only=True)  # no slots: classes inherit it beside ExpertsConfig
class SharedKeysConfig(Specific):
    """The last ``num_kv_shared_layers`` layers make no keys and values: they attend to those of the
    last layer of their kind, with a window or without, before them.

    Each layer adds an embedding of ``hidden_size_per_layer_input`` features of the token, 0 for
    none, made of a table of ``vocab_size_per_layer_input`` rows for all layers and of a projection
    of the token's own embedding.
    """

    num_kv_shared_layers: int = 0
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262144

    def __post_init__(self) -> None:
        Specific.__post_init__(self)
        for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
            if not is_int(getattr(self, key)) or getattr(self, key) < 0:
                raise ValueError(f"{key} must be an integer, 0 or more, not {getattr(self, key)!r}")
        check_at_most("hidden_size_per_layer_input", self.hidden_size_per_layer_input, _WIDEST)
        check_size("vocab_size_per_layer_input", self.vocab_size_per_layer_input)

    @property
    def streams(self) -> int:
        """Hidden states of a token that layers hand on."""
        return 1

    def carried(self, config: ModelConfig) -> int:
        """Further hidden states, all layers' embeddings, and the keys and values that are
        shared."""
        sizes = (config.heads(layer) for layer in config.shared_keys)
        keys_and_values = sum(2 * count * width for count, width in sizes)
        embeddings = self.hidden_size_per_layer_input * config.num_hidden_layers
        return (self.streams - 1) * config.hidden_size + embeddings + keys_and_values
