"""Tiny checkpoints with a head for multi-token prediction, in the real layout, and transformers'
own class for such heads as a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import TINY, reference, save, save_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

#: Architectures whose heads lie behind the layers.
BEHIND = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
#: And those whose heads lie apart; their models have states.
APART = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
PARTS = {
    **dict.fromkeys(BEHIND, ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    **dict.fromkeys(APART, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}


def with_head(architecture: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint of the tiny model and a head: of a model that has one layer more, this one."""
    config = TINY[architecture](eos_token_id=None, **changes)
    count = config.num_hidden_layers
    more: dict[str, Any] = {"num_hidden_layers": count + 1}
    for name in ("layer_types", "mlp_layer_types"):
        if (types := getattr(config, name, None)) is not None:
            more[name] = [*types, types[-1]]
    grown = TINY[architecture](eos_token_id=None, **{**changes, **more})
    save(reference(grown), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    behind = architecture in BEHIND
    last, head = f"model.layers.{count}.", f"model.layers.{count}." if behind else "mtp."
    if not behind:
        tensors = {name.replace(last, "mtp.layers.0."): each for name, each in tensors.items()}
    tensors |= {f"{head}{part}.weight": each for part, each in _parts(architecture, config).items()}
    if behind:  # as real ones have them, which nothing reads
        tensors[f"{head}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{head}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    wanted = {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    wanted |= {name: getattr(config, name) for name in more if name in stated}
    (folder / "config.json").write_text(json.dumps({**stated, **wanted}))
    return save_tokenizer(folder)


def _parts(architecture: str, config: Any) -> dict[str, Tensor]:
    size = config.hidden_size
    first, second, last = (0.5 + torch.rand(size) for _ in range(3))
    drawn = first, second, torch.randn(size, 2 * size) / (2 * size) ** 0.5, last
    return dict(zip(PARTS[architecture], drawn, strict=True))


def agreeing(architecture: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint of one layer whose head predicts what the model does: it is the same layer, over
    the same inputs, since its projection takes the embeddings alone, which its norm leaves as they
    are."""
    options = {"num_hidden_layers": 1, "first_k_dense_replace": 0, **changes}
    with_head(architecture, folder, **options)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    table, own, head = tensors["model.embed_tokens.weight"], "model.layers.0.", "model.layers.1."
    size = table.shape[1]
    tensors["model.embed_tokens.weight"] = table / table.square().mean(-1, keepdim=True).sqrt()
    for name in [name for name in tensors if name.startswith(own)]:
        tensors[name.replace(own, head)] = tensors[name].clone()
    tensors[f"{head}enorm.weight"] = torch.ones(size)
    tensors[f"{head}eh_proj.weight"] = torch.eye(size, 2 * size)
    tensors[f"{head}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


class Theirs:
    """transformers' model and its head."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = self.model.config
        config.num_mtp_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.mtp_layer_types = ["full_attention"]
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mtp_mlp_layer_types = ["sparse"]
        behind = rf"model\.layers\.{config.num_hidden_layers}\..*"
        self.model._keys_to_ignore_on_load_unexpected = [behind, r"^mtp.*"]
        self.head = MtpModel.from_pretrained(self.model)
        self.cache = MtpCache(config=config.get_mtp_config())

    def guessed(self, ids: Tensor, count: int) -> list[int]:
        """The likeliest tokens behind a text (1, T), of which all but the last have run."""
        self.cache = MtpCache(config=self.model.config.get_mtp_config())
        hidden = self.hidden(ids[:, :-1])
        hidden = torch.cat((torch.zeros_like(hidden[:, :1]), hidden), dim=1)
        first, tokens = 0, list[int]()
        while len(tokens) < count:
            hidden, logits = self.step(ids, hidden, first)
            first += ids.shape[1]
            ids, hidden = logits[:, -1:].argmax(-1), hidden[:, -1:]
            tokens.append(int(ids))
        return tokens

    def hidden(self, ids: Tensor) -> Tensor:
        """The model's last hidden states of tokens (1, T)."""
        return self.model(ids, output_hidden_states=True).hidden_states[-1]

    def step(self, ids: Tensor, hidden: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The head's hidden states and logits of tokens (1, T) from position ``first`` on, of the
        hidden states of those before."""
        positions = torch.arange(first, first + ids.shape[1])[None]
        made = self.head.forward_layer(0, hidden, positions, self.cache, input_ids=ids)
        return made, self.head._project_to_logits(made)
