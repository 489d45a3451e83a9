"""config.json by architecture: transformers' defaults, published models' files, and errors."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import transformers
from tiny import TINY

from exkv.checkpoint import ModelConfig, RopeParameters, RopeScaling
from exkv.checkpoint.families import FAMILIES
from exkv.models import Transformer
from exkv.models.llama4 import CHUNKED, Llama4Settings

FULL, SLIDING = "full_attention", "sliding_attention"
CLASSES = {name: type(tiny()) for name, tiny in TINY.items()}
#: Fields of ours that transformers' configs have under the same names.
SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "pad_token_id",
)


#: Settings that transformers fills in, of others and the number of layers.
DERIVED = {
    *("moe_layer_end_index", "mlp_layer_types", "moe_layers", "layer_types"),
    *("num_attention_heads_per_layer", "per_layer_config"),
}
#: Whose defaults are no model: heads that don't divide the hidden state.
UNEVEN = {"Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"}
#: Told from another of their name by a text model that is stated.
UNEVEN |= {name for name in FAMILIES if ":" in name}
#: And an unknown number of experts.
WITHOUT_DEFAULTS = UNEVEN | {"DeepseekV2ForCausalLM", "Dots1ForCausalLM"}


def windows(config: ModelConfig) -> list[int | None]:
    """Each layer's window, None for full attention."""
    layers = range(config.num_hidden_layers)
    return [config.sliding_window if config.slides(layer) else None for layer in layers]


def windows_of_theirs(config: transformers.PreTrainedConfig) -> list[int | None]:
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == SLIDING else None for kind in types]


def known(key: str, value: object, theirs: transformers.PreTrainedConfig) -> object:
    """The value; None for a token outside of the vocabulary, as in some of their defaults."""
    return None if key.endswith("token_id") and (value or 0) >= theirs.vocab_size else value


def check_same(config: ModelConfig, theirs: transformers.PreTrainedConfig) -> None:
    aliases = FAMILIES[config.architecture].aliases
    assert config.model_type == theirs.model_type
    assert config.tie_word_embeddings == getattr(theirs, "tie_word_embeddings", False)
    theirs = theirs.get_text_config()
    theirs.allow_global_per_layer_attribute_access = True
    for key in SAME:
        name = key if hasattr(theirs, key) else aliases.get(key, key)
        expected = getattr(theirs, name, None)
        if isinstance(expected, list):  # one for each layer
            expected = max(expected)
        assert getattr(config, key) == known(key, expected, theirs), key
    check_same_heads(config, theirs)
    act_key = FAMILIES[config.architecture].act_key
    act = getattr(theirs, act_key, None) or getattr(theirs, "hidden_act", "silu")
    assert config.hidden_act == ("gelu_pytorch_tanh" if act == "gelu_new" else act)
    ends = getattr(theirs, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    ends = [end for end in ends if known("eos_token_id", end, theirs) is not None]
    assert config.eos_token_id == tuple(ends)
    bias = getattr(theirs, aliases.get("attention_bias", "attention_bias"), config.attention_bias)
    assert config.attention_bias == bias
    assert windows(config) == windows_of_theirs(theirs)
    settings = dataclasses.asdict(config.specific) if config.specific is not None else {}
    for key in settings.keys() - DERIVED - FAMILIES[config.architecture].ignores:
        name = aliases.get(key, key)
        if hasattr(theirs, name):
            expected = getattr(theirs, name)
            expected = tuple(expected or ()) if key == "mlp_only_layers" else expected
            found = getattr(config.specific, key)
            if isinstance(expected, list):  # one for each layer, mostly all the same
                expected = tuple(expected) if isinstance(found, tuple) else expected[0]
            assert found == expected, key
    for ours, key in FAMILIES[config.architecture].multipliers.items():
        found = getattr(config.multipliers, ours)
        assert (config.head_dim**-0.5 if found is None else found) == getattr(theirs, key), key
    if isinstance(config.specific, Llama4Settings):
        layers = range(config.num_hidden_layers)
        assert [i for i in layers if not config.specific.is_dense(i)] == theirs.moe_layers
        chunks = [config.specific.chunk(i, rotated=config.rotates(i)) for i in layers]
        size = theirs.attention_chunk_size
        assert chunks == [size * (kind == CHUNKED) for kind in theirs.layer_types]
    rotated = getattr(theirs, "no_rope_layers", None)
    assert rotated is None or list(config.rotated) == list(map(bool, rotated))
    if (heads := getattr(theirs, "num_attention_heads_per_layer", None)) is not None:
        assert [config.query_heads(layer) for layer in range(len(heads))] == heads
    if (bases := getattr(theirs, "layer_rope_theta", None)) is not None:
        ropes = [config.local_rope if config.slides(i) else config.rope for i in range(len(bases))]
        assert [rope.rope_theta * config.rotates(i) for i, rope in enumerate(ropes)] == bases
        return
    rope = getattr(theirs, "rope_parameters", None) or {}
    if rope.get(FULL, rope).get("rope_theta") is None:
        assert set(config.rotated) == {False}
        return
    main = rope.get(FULL, rope)
    assert config.rope_theta == main["rope_theta"]
    if SLIDING in rope:
        local = rope[SLIDING]
        part = local.get("partial_rotary_factor", config.local_rope.partial_rotary_factor and 1.0)
        expected = {"rope_theta": local["rope_theta"], "partial_rotary_factor": part}
        assert config.local_rope == RopeParameters(**expected)
    if config.latent is None and main.get("rope_type") != "proportional":
        assert config.partial_rotary_factor == main.get("partial_rotary_factor", 1.0)


def check_same_heads(config: ModelConfig, theirs: transformers.PreTrainedConfig) -> None:
    if config.latent is not None:
        sizes = dataclasses.asdict(config.latent)
        assert sizes == {key: getattr(theirs, key) for key in sizes}
        assert config.rotary_dim == theirs.qk_rope_head_dim
        assert config.rope_interleaved == getattr(theirs, "rope_interleave", config.rotates(0))
        assert config.num_key_value_heads == 1
        assert config.head_dim == theirs.kv_lora_rank + theirs.qk_rope_head_dim
        return
    kv_heads = getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads
    assert config.num_key_value_heads == kv_heads
    heads = theirs.hidden_size // theirs.num_attention_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or heads)
    unlike = "per_layer_config" in theirs.to_dict()
    for layer, own in enumerate(theirs.per_layer_config if unlike else ()):
        assert config.heads(layer) == (own.num_key_value_heads, own.head_dim)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_DEFAULTS])
def test_missing_keys_mean_what_they_mean_to_transformers(name):
    """A config.json with nothing but the architecture."""
    check_same(ModelConfig.from_dict({"architectures": [name]}), CLASSES[name]())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNEVEN])
def test_model_type_alone_suffices(name):
    config = ModelConfig.from_dict({"model_type": CLASSES[name].model_type})
    assert config == ModelConfig.from_dict({"architectures": [name]})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_config_reads_as_transformers_holds_it(name, tmp_path):
    theirs = TINY[name]()
    theirs.architectures = [name.partition(":")[0]]
    theirs.save_pretrained(tmp_path)
    check_same(ModelConfig.from_pretrained(tmp_path), theirs)


@pytest.mark.parametrize("stated", [{}, {"sliding_window_size": 64}, {"sliding_window": 64}])
def test_a_window_may_be_stated_without_the_token_itself(stated):
    theirs = transformers.MiMoV2FlashConfig(**stated)
    config = ModelConfig.from_dict({"architectures": ["MiMoV2FlashForCausalLM"], **stated})
    assert config.sliding_window == theirs.sliding_window
    assert [config.heads(layer)[0] for layer in (0, 1, 5)] == [4, 8, 4]


# Well-known models ---------------------------------------------------------------------------

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
PHI3_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
    "attention_bias": False,
}
#: The real lists have as many numbers, others than these.
SHORT_48, LONG_48 = [1.0] * 40 + [1.5] * 8, [1.5] * 24 + [40.0] * 24

#: Model -> its config.json.
KNOWN = {
    "Phi-3.5-MoE-instruct": PHI3_MINI
    | {
        "architectures": ["PhiMoEForCausalLM"],
        "model_type": "phimoe",
        "attention_bias": True,
        "eos_token_id": 32000,
        "hidden_size": 4096,
        "input_jitter_noise": 0.01,
        "intermediate_size": 6400,
        "lm_head_bias": True,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rope_scaling": {
            "long_factor": [*LONG_48, *[40.0] * 16],
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
            "short_factor": [*SHORT_48, *[1.5] * 16],
            "short_mscale": 1.243163121016122,
            "type": "longrope",
        },
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01,
        "sliding_window": 131072,
    },
    "Mistral-7B-v0.1": MISTRAL
    | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
    "Mistral-7B-v0.3": MISTRAL
    | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "Mixtral-8x7B-v0.1": MISTRAL
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Phi-3-mini-4k-instruct": PHI3_MINI
    | {"max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047},
    "Phi-3-mini-128k-instruct": PHI3_MINI
    | {
        "max_position_embeddings": 131072,
        "rope_scaling": {"long_factor": LONG_48, "short_factor": SHORT_48, "type": "longrope"},
        "sliding_window": 262144,
    },
    "Phi-4-mini-instruct": PHI3_MINI
    | {
        "bos_token_id": 199999,
        "eos_token_id": 199999,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "pad_token_id": 199999,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"long_factor": LONG_48, "short_factor": SHORT_48, "type": "longrope"},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 256000,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 262144,
    },
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_well_known_models_file_reads_as_transformers_reads_it(name):
    values = KNOWN[name] | {"eos_token_id": 1}
    config = ModelConfig.from_dict(values)
    check_same(config, CLASSES[config.architecture](**json.loads(json.dumps(values))))


@pytest.mark.parametrize("name", KNOWN)
def test_well_known_models_have_no_unknown_key(name, caplog):
    ModelConfig.from_dict(KNOWN[name])
    assert caplog.messages == []


def test_unknown_keys_are_reported_unless_empty(caplog):
    silent = {"clip_qkv": None, "lm_head_bias": False, "z_loss": 0.0, "tags": []}
    read("LlamaForCausalLM", **silent)
    assert caplog.messages == []
    read("LlamaForCausalLM", **silent, clip_logits=8.0)
    assert caplog.messages == [
        "config.json: ignored, since a LlamaForCausalLM has no such setting: clip_logits 8.0"
    ]


#: Model -> parameters, as its page on the hub counts them.
PARAMETERS = {
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Phi-3.5-MoE-instruct": 41_873_153_344,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-3-mini-128k-instruct": 3_821_079_552,
    "Phi-4-mini-instruct": 3_836_021_760,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b-it": 999_885_952,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_well_known_model_has_the_parameters_that_it_is_known_for(name):
    config = ModelConfig.from_dict(KNOWN[name])
    model = Transformer(config, dtype=torch.bfloat16)
    sizes = (math.prod(tensor.shape) for tensor in model.stored_tensors().values())
    assert sum(sizes) == PARAMETERS[name]


# Spellings -----------------------------------------------------------------------------------


def read(architecture: str, **values) -> ModelConfig:
    return ModelConfig.from_dict({"architectures": [architecture], **values})


OLDER = {
    "Qwen2ForCausalLM": {
        "use_sliding_window": True,
        "sliding_window": 512,
        "max_window_layers": 20,
        "num_hidden_layers": 28,
    },
    "Qwen3ForCausalLM": {"use_sliding_window": True, "max_window_layers": 0},
    "Gemma2ForCausalLM": {"num_hidden_layers": 5, "sliding_window": 100},
    "Gemma3ForCausalLM": {
        "num_hidden_layers": 7,
        "sliding_window_pattern": 3,
        "rope_theta": 2e6,
        "rope_local_base_freq": 5e3,
    },
    "MistralForCausalLM": {"sliding_window": None, "rope_theta": 1e6},
    "Phi3ForCausalLM": {"sliding_window": 2047, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("name", OLDER)
def test_older_keys_mean_what_they_mean_to_transformers(name):
    theirs = CLASSES[name](**json.loads(json.dumps(OLDER[name])))
    check_same(read(name, **OLDER[name]), theirs)


def test_layer_types_override_older_keys():
    types = [FULL, SLIDING, FULL]
    config = read("Gemma3ForCausalLM", num_hidden_layers=3, layer_types=types)
    assert windows(config) == [None, 4096, None]
    config = read(
        "Qwen2ForCausalLM",
        num_hidden_layers=3,
        layer_types=types,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=28,
    )
    assert windows(config) == [None, 7, None]


@pytest.mark.parametrize("spelling", ["old", "new", "both"])
def test_gemma_3_states_its_positions_in_two_spellings(spelling):
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 5000, "rope_scaling": linear}
    new = {
        "rope_parameters": {
            FULL: linear | {"rope_theta": 2e6},
            SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
        }
    }
    config = read("Gemma3ForCausalLM", **{"old": old, "new": new, "both": old | new}[spelling])
    assert config.rope == RopeParameters(
        rope_theta=2e6, rope_scaling=RopeScaling(rope_type="linear", factor=8.0)
    )
    assert config.local_rope == RopeParameters(rope_theta=5000.0)


@pytest.mark.parametrize("alias", ["su", "yarn"])
def test_phi_3s_first_files_had_other_names_for_longrope(alias):
    values = KNOWN["Phi-3-mini-128k-instruct"]
    renamed = values | {"rope_scaling": values["rope_scaling"] | {"type": alias}}
    assert ModelConfig.from_dict(renamed) == ModelConfig.from_dict(values)


def test_longrope_takes_its_factor_where_it_is_stated():
    block = {"rope_type": "longrope", "factor": 4, "attention_factor": 1.25}
    lists = {"short_factor": [1] * 48, "long_factor": [2] * 48}
    config = read("Phi3ForCausalLM", rope_scaling=block | lists, max_position_embeddings=131072)
    assert config.rope_scaling == RopeScaling(
        rope_type="longrope",
        factor=4.0,
        attention_factor=1.25,
        original_max_position_embeddings=4096,
        short_factor=(1.0,) * 48,
        long_factor=(2.0,) * 48,
    )


# Refusals ------------------------------------------------------------------------------------

LISTS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

#: Case -> architecture, values, and what the message has to name.
REFUSED = {
    "window a string": ("Mistral", {"sliding_window": "4096"}, ["sliding_window", "'4096'"]),
    "window zero": ("Gemma2", {"sliding_window": 0}, ["sliding_window", "0"]),
    "window null, layers slide": (
        "Gemma2",
        {"sliding_window": None},
        ["layer_types[0]", "no sliding_window"],
    ),
    "layers slide, windows off": (
        "Qwen3",
        {"num_hidden_layers": 2, "layer_types": [FULL, SLIDING]},
        ["layer_types[1]", "use_sliding_window"],
    ),
    "too few layer types": (
        "Gemma3",
        {"num_hidden_layers": 3, "layer_types": [FULL]},
        ["layer_types names 1", "num_hidden_layers is 3"],
    ),
    "unknown layer type": (
        "Qwen2",
        {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        ["layer_types[0]", "'linear_attention'", FULL, SLIDING],
    ),
    "layer types a string": ("Qwen2", {"layer_types": FULL}, ["layer_types", "'full_attention'"]),
    "layers a string": ("Gemma2", {"num_hidden_layers": "3"}, ["num_hidden_layers", "'3'"]),
    "use_sliding_window a string": (
        "Qwen2",
        {"use_sliding_window": "yes"},
        ["use_sliding_window", "'yes'"],
    ),
    "negative max_window_layers": ("Qwen2", {"max_window_layers": -1}, ["max_window_layers", "-1"]),
    "pattern zero": ("Gemma3", {"sliding_window_pattern": 0}, ["sliding_window_pattern", "0"]),
    "two activations": (
        "Gemma2",
        {"hidden_act": "gelu"},
        ["hidden_activation 'gelu_pytorch_tanh'", "hidden_act 'gelu'"],
    ),
    "both directions": (
        "Gemma3",
        {"use_bidirectional_attention": True},
        ["use_bidirectional_attention True"],
    ),
    "norms that aren't done": (
        "StableLm",
        {"qk_layernorm": True},
        ["qk_layernorm True", "without"],
    ),
    "a cap that isn't done": (
        "Gemma3",
        {"attn_logit_softcapping": 50.0},
        ["attn_logit_softcapping 50.0", "gemma3_text", "None"],
    ),
    "more experts taken than there are": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 5},
        ["num_experts_per_tok 5", "num_local_experts 4"],
    ),
    "no experts": ("Mixtral", {"num_local_experts": 0}, ["num_local_experts", "0"]),
    "negative cap": (
        "Gemma2",
        {"final_logit_softcapping": -30.0},
        ["final_logit_softcapping", "-30.0"],
    ),
    "scalar zero": ("Gemma2", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "0"]),
    "two local bases": (
        "Gemma3",
        {"rope_local_base_freq": 1e4, "rope_parameters": {SLIDING: {"rope_theta": 2e4}}},
        ["rope_local_base_freq 10000.0", "rope_parameters.sliding_attention.rope_theta 20000.0"],
    ),
    "two global bases": (
        "Gemma3",
        {"rope_theta": 1e4, "rope_parameters": {FULL: {"rope_theta": 2e4}}},
        ["rope_theta 10000.0", "rope_parameters.full_attention.rope_theta 20000.0"],
    ),
    "by layer where it is flat": (
        "Qwen3",
        {"rope_parameters": {FULL: {"rope_theta": 1e4}}},
        ["rope_parameters differs from layer to layer"],
    ),
    "one layer's a number": ("Gemma3", {"rope_parameters": {FULL: 3}}, [f"parameters.{FULL}", "3"]),
    "part of a head": ("Qwen2", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
    "gates of nothing": ("Laguna", {"gating": False}, ["gating False", "'per-element'"]),
    "heads of a layer less": (
        "Laguna",
        {"num_attention_heads_per_layer": [48] * 39},
        ["num_attention_heads_per_layer names 39 layers", "layer 39"],
    ),
    "heads that keys' don't divide": (
        "Laguna",
        {"num_attention_heads_per_layer": [48] * 39 + [44]},
        ["layer 39 has 44 heads", "num_key_value_heads 8"],
    ),
    "an odd part of some layers'": (
        "Laguna",
        {"rope_parameters": {SLIDING: {"partial_rotary_factor": 0.355}}},
        ["partial_rotary_factor 0.355 of head_dim 128 is 45"],
    ),
    "experts that return something": (
        "LongcatFlash",
        {"zero_expert_num": -1},
        ["zero_expert_num", "-1"],
    ),
    "queries of no vector": ("LongcatFlash", {"q_lora_rank": None}, ["q_lora_rank", "None"]),
    "values wider than keys": (
        "MiMoV2Flash",
        {"v_head_dim": 256},
        ["v_head_dim 256 is more than head_dim 192"],
    ),
    "more than a head": ("Phi3", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor 1.5"]),
    "an odd part": (
        "Phi3",
        {"partial_rotary_factor": 0.35},
        ["partial_rotary_factor 0.35 of head_dim 96 is 33"],
    ),
    "longrope without its lists": (
        "Phi3",
        {"rope_scaling": {"type": "longrope"}},
        ["'longrope' needs short_factor, long_factor"],
    ),
    "longrope too short": (
        "Phi3",
        {"rope_scaling": LISTS | {"type": "longrope", "long_factor": [1.0] * 47}},
        ["long_factor has 47", "96", "48"],
    ),
    "longrope for a part": (
        "Phi3",
        {"rope_scaling": LISTS | {"type": "longrope"}, "partial_rotary_factor": 0.75},
        ["short_factor has 48", "72", "36"],
    ),
    "longrope a negative factor": (
        "Phi3",
        {"rope_scaling": LISTS | {"type": "longrope", "short_factor": [1.0, -2.0]}},
        ["short_factor[1]", "-2.0"],
    ),
    "longrope a string": (
        "Phi3",
        {"rope_scaling": LISTS | {"type": "longrope", "short_factor": "1"}},
        ["short_factor", "'1'"],
    ),
    "longrope shrinks": (
        "Phi3",
        {"rope_scaling": LISTS | {"type": "su"}, "max_position_embeddings": 2048},
        ["factor 0.5", "shrink"],
    ),
    "groups of unequal size": (
        "Glm4Moe",
        {"head_dim": 64, "n_group": 3},
        ["n_group 3", "num_local_experts 128"],
    ),
    "groups with too few experts": (
        "Glm4Moe",
        {"head_dim": 64, "n_group": 32, "topk_group": 1},
        ["num_experts_per_tok 8", "groups of 4"],
    ),
    "a scale that is no number": (
        "Glm4Moe",
        {"head_dim": 64, "routed_scaling_factor": "2"},
        ["routed_scaling_factor", "'2'"],
    ),
    "experts that differ by layer": (
        "HunYuanMoEV1",
        {"num_experts": 8, "moe_topk": [2, 1]},
        ["num_experts_per_tok", "[2, 1]"],
    ),
    "a layer of an unknown kind": (
        "ExaoneMoe",
        {"mlp_layer_types": ["dense", "wide"]},
        ["mlp_layer_types", "wide"],
    ),
    "two magnitudes of longrope": (
        "Phimoe",
        {"rope_scaling": LISTS | {"type": "longrope", "short_mscale": 1.2, "long_mscale": 1.3}},
        ["short_mscale", "1.2", "long_mscale", "1.3"],
    ),
    "queries that shrink": (
        "Ministral3",
        {"rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": -0.1}},
        ["llama_4_scaling_beta", "-0.1"],
    ),
    "queries scaled by an unknown length": (
        "Ministral3",
        {"rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
        ["original_max_position_embeddings", "None"],
    ),
    "experts taken one by one, three times": (
        "Phimoe",
        {"num_experts_per_tok": 3},
        ["num_experts_per_tok 3", "only 2"],
    ),
    "two trained lengths": (
        "Phi3",
        {
            "rope_scaling": LISTS | {"type": "su", "original_max_position_embeddings": 77},
            "original_max_position_embeddings": 4096,
        },
        ["original_max_position_embeddings 4096", "77"],
    ),
}


@pytest.mark.parametrize(("name", "values", "named"), REFUSED.values(), ids=REFUSED)
def test_a_contradiction_is_refused_with_its_keys_values_and_remedy(name, values, named):
    with pytest.raises(ValueError) as caught:
        read(f"{name}ForCausalLM", **values)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "correct config.json" in message and "download" not in message
    for text in named:
        assert text in message


def test_constructor_requires_an_architectures_settings():
    with pytest.raises(ValueError, match="MixtralForCausalLM needs specific to be a ExpertsConfig"):
        ModelConfig(architecture="MixtralForCausalLM")
    with pytest.raises(ValueError, match="layer_types names 1 layers"):
        ModelConfig(layer_types=(FULL,))
    with pytest.raises(ValueError, match="no sliding_window"):
        ModelConfig(num_hidden_layers=1, layer_types=(SLIDING,))
