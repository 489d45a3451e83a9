"""Every field of transformers' config classes is read, harmless or refused; none changes
transformers' logits but not exkv's.

The second half sweeps over tiny models: each field in turn gets another value, and where that
changes transformers' logits, exkv's agree or the config is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from on_cpu import on_cpu
from tiny import TINY, reference, save
from transformers import PretrainedConfig, PreTrainedModel

from exkv import Cache, ModelConfig
from exkv.checkpoint.families import FAMILIES, Family
from exkv.checkpoint.fields import HARMLESS, Fields

IDS = torch.randint(3, 320, (1, 40), generator=torch.Generator().manual_seed(5))
#: What tensors' shapes follow from, with which a file that says otherwise is refused; and what has
#: tests of its own.
SHAPES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "layer_types", "no_rope_layers"),
    *("rope_parameters", "rope_scaling", "max_position_embeddings", "architectures", "model_type"),
    *("original_max_position_embeddings", "dtype", "n_routed_experts", "n_shared_experts"),
    *("num_shared_experts", "moe_num_experts", "moe_num_shared_experts", "mlp_layer_types"),
    *("mtp_layer_types", "mtp_mlp_layer_types", "kv_lora_rank", "q_lora_rank", "qk_head_dim"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_sliding_attention_heads"),
    *("moe_latent_size", "altup_num_inputs"),
}
#: What some architectures refuse as others' settings.
REFUSED = {"use_sliding_window", "use_bidirectional_attention", "attention_chunk_size", "gating"}
#: What fields that are null by default are set to.
TRIED = (0.05, 7, True)


@functools.cache
def text_fields(name: str) -> dict[str, Any]:
    """The fields of the text model's class, without those of every class, and their values."""
    fields = TINY[name]().get_text_config().to_dict()
    return {key: fields[key] for key in fields.keys() - PretrainedConfig().to_dict().keys()}


def harmless(name: str) -> set[str]:
    """Fields that change no logits of this architecture, which may read a key that others don't."""
    kind = FAMILIES[name].specific
    own = () if kind is None else dataclasses.fields(kind)
    return set(HARMLESS) - {each.name for each in own}


@functools.cache
def unread(name: str) -> set[str]:
    """The fields of transformers' class that exkv neither reads nor knows to be harmless."""
    family = FAMILIES[name]
    values = json.loads(json.dumps(TINY[name]().get_text_config().to_dict()))
    seen: list[Fields] = []
    translated = Family.translated

    def watched(self: Family, values: Any) -> Fields:
        seen.append(translated(self, values))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Family, "translated", watched)
        wrapped = {family.text_config: values} if family.text_config else values
        ModelConfig.from_dict({**wrapped, "architectures": [name]})
    return seen[-1].unread().keys() - family.refuses.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_transformers_class_is_read_harmless_or_refused(name):
    assert unread(name) == set(), (
        f"read these in exkv/models, add them to HARMLESS in exkv/checkpoint/fields.py if they "
        f"change no logits, or to refuses of {name}'s family"
    )


def others(key: str, value: Any) -> tuple[Any, ...]:
    """Other values for the field; none for fields that the sweep skips."""
    if key in SHAPES or key.endswith("token_id"):
        return ()
    if value is None:
        return (7,) if key == "sliding_window" else TRIED
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value // 2 or value + 1,)
    if isinstance(value, float):
        return (value * 1.5 or 0.5,)
    return ("gelu",) if key in ("hidden_act", "hidden_activation") else ()


def theirs(name: str, **values: Any) -> PreTrainedModel | None:
    """transformers' tiny model with these values in its config; None where it doesn't take them."""
    try:
        return reference(TINY[name](**values))
    except (ValueError, TypeError, AttributeError, NotImplementedError, StrictDataclassError):
        return None


@functools.cache
@torch.no_grad()
def plain(name: str) -> torch.Tensor:
    return reference(TINY[name]())(IDS).logits


def ours(model: PreTrainedModel, folder: Path) -> torch.Tensor | None:
    """exkv's logits for the same checkpoint; None where it is refused."""
    save(model, folder)
    try:
        read = on_cpu(folder)
    except ValueError:
        return None
    return read.forward(IDS, Cache(read))


def agree(ours: torch.Tensor | None, theirs: torch.Tensor) -> bool:
    return ours is None or bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


@pytest.mark.sweep(6)
@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_fields_mean_the_same_to_transformers_and_exkv(name, tmp_path):
    for key, value in text_fields(name).items():
        for new in () if key in harmless(name) else others(key, value):
            model = theirs(name, **{key: new})
            if model is not None:
                same = agree(ours(model, tmp_path), model(IDS).logits)
                assert same, f"{key} {new!r} gives other logits than transformers'"


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_harmless_fields_change_nothing(name):
    fields = {key: value for key, value in text_fields(name).items() if key in harmless(name)}
    model = theirs(name, **{key: new for key in fields for new in others(key, fields[key])[:1]})
    assert model is not None
    assert torch.equal(model(IDS).logits, plain(name))


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_other_architectures_fields_mean_the_same_to_both(name, tmp_path):
    """transformers makes attributes of fields that a class doesn't have, and may look them up."""
    foreign = {key: value for other in FAMILIES for key, value in text_fields(other).items()}
    known = text_fields(name).keys() | FAMILIES[name].aliases.keys() | HARMLESS | REFUSED
    if "per_layer_config" in text_fields(name):  # then a layer has one or a window, not both
        known.add("attention_chunk_size")
    values = {key: new for key in foreign.keys() - known for new in others(key, foreign[key])[:1]}
    model = theirs(name, **values)
    assert model is not None
    logits = model(IDS, use_cache=False).logits
    if not torch.equal(logits, plain(name)):
        assert agree(ours(model, tmp_path), logits)
