"""ModelConfig: both spellings of config.json, transformers' defaults, and every error."""

import copy
import json
import pickle

import pytest
import torch

from exkv.checkpoint import ModelConfig, RopeScaling
from exkv.checkpoint.model_config import GENERATION_CONFIG_NAME, HIDDEN_ACTS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "truncate": False,
}
LINEAR = {"rope_type": "linear", "factor": 2.5}

# What a real LlamaConfig is made with; rope in the spelling of transformers 5.
REAL = {
    "defaults": {},
    "grouped heads": {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 200,
        "num_hidden_layers": 3,
        "vocab_size": 555,
        "rms_norm_eps": 3e-5,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
    },
    "special ids": {"bos_token_id": None, "eos_token_id": [7, 9], "pad_token_id": 0},
    "no end": {"eos_token_id": None, "dtype": "float16"},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": LINEAR | {"rope_theta": 20000.0}, "dtype": "float32"},
    "llama3": {
        "rope_parameters": LLAMA3 | {"rope_theta": 500000.0},
        "max_position_embeddings": 8192,
    },
    "yarn": {"rope_parameters": YARN | {"rope_theta": 10000.0}, "max_position_embeddings": 4096},
}
PLAIN_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "hidden_act",
    "bos_token_id",
    "pad_token_id",
)


def write_json(file, values):
    file.write_text(json.dumps(values))
    return file


def in_old_spelling(values):
    """A config.json of transformers 5 as version 4 would have written it."""
    values = dict(values)
    rope = dict(values.pop("rope_parameters"))
    values["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    values["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    values["torch_dtype"] = values.pop("dtype", None)
    return values


@pytest.mark.parametrize("spelling", ["as saved", "old"])
@pytest.mark.parametrize("kwargs", REAL.values(), ids=REAL)
def test_a_saved_llama_config_reads_as_transformers_holds_it(kwargs, spelling, tmp_path):
    from transformers import LlamaConfig

    # A copy: transformers writes into the dict that it is given.
    real = LlamaConfig(**json.loads(json.dumps(kwargs)))
    real.save_pretrained(tmp_path)
    if spelling == "old":
        file = tmp_path / "config.json"
        write_json(file, in_old_spelling(json.loads(file.read_text())))

    config = ModelConfig.from_pretrained(tmp_path)

    assert config.path == tmp_path
    assert config.architecture == "LlamaForCausalLM"
    for key in PLAIN_FIELDS:
        assert getattr(config, key) == getattr(real, key), key
    ends = real.eos_token_id
    assert config.eos_token_id == tuple(
        [] if ends is None else ends if type(ends) is list else [ends]
    )
    assert config.dtype == real.dtype
    rope = dict(real.rope_parameters)
    assert config.rope_theta == rope.pop("rope_theta")
    if rope.pop("rope_type") == "default":
        assert config.rope_scaling is None
    else:
        for key, value in rope.items():
            assert getattr(config.rope_scaling, "rope_type" if key == "type" else key) == value, key


def test_an_empty_object_gives_the_defaults_of_llama_and_no_dtype():
    config = ModelConfig.from_dict({})
    assert config == ModelConfig()
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (32, 128, 1e-6)
    assert config.dtype is None


def test_keys_that_no_llama_has_are_ignored():
    extra = {
        "pretraining_tp": 4,
        "sliding_window": 512,
        "use_sliding_window": False,
        "quantization_config": None,
        "use_cache": "whatever",
        "partial_rotary_factor": 1.0,
        "auto_map": {"AutoConfig": "x"},
    }
    assert ModelConfig.from_dict(extra) == ModelConfig()


@pytest.mark.parametrize("text", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_both_keys_and_with_its_prefix(key, text):
    assert ModelConfig.from_dict({key: text}).dtype is torch.bfloat16
    assert ModelConfig.from_dict({"dtype": "bfloat16", key: text}).dtype is torch.bfloat16


def test_integers_are_accepted_as_floats():
    config = ModelConfig.from_dict({"rope_theta": 500000, "rope_scaling": LINEAR | {"factor": 2}})
    assert isinstance(config.rope_theta, float) and config.rope_theta == 500000.0
    assert isinstance(config.rope_scaling.factor, float)


def test_yarn_is_filled_in_from_the_longest_context_and_its_paper():
    config = ModelConfig.from_dict(
        {
            "max_position_embeddings": 512,
            "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": None, "mscale": 0},
        }
    )
    assert config.rope_scaling == RopeScaling(
        rope_type="yarn",
        factor=2.0,
        original_max_position_embeddings=512,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=None,
        mscale=None,
        mscale_all_dim=None,
        truncate=True,
    )


def test_both_spellings_side_by_side_are_fine_if_they_agree():
    config = ModelConfig.from_dict(
        {
            "rope_theta": 5e5,
            "rope_scaling": LLAMA3 | {"type": "llama3"},
            "rope_parameters": LLAMA3 | {"rope_theta": 500000},
        }
    )
    assert config.rope_theta == 5e5
    assert config.rope_scaling.rope_type == "llama3"


@pytest.mark.parametrize("pad", [-1, 32000])
def test_a_pad_id_outside_of_the_vocabulary_is_none(pad):
    assert ModelConfig.from_dict({"pad_token_id": pad}).pad_token_id is None


def test_generation_config_adds_its_ends_behind_those_of_the_config(tmp_path):
    write_json(tmp_path / "config.json", {"eos_token_id": 5})
    write_json(tmp_path / GENERATION_CONFIG_NAME, {"eos_token_id": [9, 5, 7]})
    assert ModelConfig.from_pretrained(tmp_path).eos_token_id == (5, 9, 7)
    write_json(tmp_path / GENERATION_CONFIG_NAME, {"temperature": 0.6})
    assert ModelConfig.from_pretrained(tmp_path).eos_token_id == (5,)


def test_replace_checks_the_copy_and_leaves_the_original():
    config = ModelConfig(hidden_size=64, num_attention_heads=4)
    assert config.replace(dtype=torch.float16).dtype is torch.float16
    assert config.dtype is None
    with pytest.raises(ValueError, match="num_key_value_heads 3"):
        config.replace(num_key_value_heads=3)
    with pytest.raises(TypeError):
        config.replace(no_such_field=1)


def test_a_configuration_can_be_a_key():
    assert len({ModelConfig(), ModelConfig(), ModelConfig(vocab_size=99)}) == 2


# Each case: what config.json says, and what the message has to name.
REFUSED = {
    "heads and kv heads": (
        {"num_attention_heads": 8, "num_key_value_heads": 3},
        ["num_attention_heads 8", "num_key_value_heads 3"],
    ),
    "hidden and heads": (
        {"hidden_size": 100, "num_attention_heads": 8},
        ["hidden_size 100", "num_attention_heads 8", "head_dim"],
    ),
    "odd head_dim": ({"head_dim": 5}, ["head_dim 5"]),
    "odd derived head_dim": (
        {"hidden_size": 24, "num_attention_heads": 8},
        ["head_dim 3", "hidden_size 24", "num_attention_heads 8"],
    ),
    "zero layers": ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    "negative vocabulary": ({"vocab_size": -5}, ["vocab_size", "-5"]),
    "zero kv heads": ({"num_key_value_heads": 0}, ["num_key_value_heads", "0"]),
    "zero head_dim": ({"head_dim": 0}, ["head_dim", "0"]),
    "huge size": ({"hidden_size": 2**31}, ["hidden_size", "2147483648"]),
    "string for int": ({"hidden_size": "4096"}, ["hidden_size", "'4096'"]),
    "float for int": ({"num_hidden_layers": 2.0}, ["num_hidden_layers", "2.0"]),
    "bool for int": ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
    "null for int": ({"vocab_size": None}, ["vocab_size", "None"]),
    "int for bool": ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
    "string for bool": ({"mlp_bias": "false"}, ["mlp_bias", "'false'"]),
    "NaN eps": ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    "infinite eps": ({"rms_norm_eps": float("inf")}, ["rms_norm_eps", "inf"]),
    "zero eps": ({"rms_norm_eps": 0.0}, ["rms_norm_eps", "0.0"]),
    "string eps": ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps", "'1e-6'"]),
    "bool eps": ({"rms_norm_eps": True}, ["rms_norm_eps", "True"]),
    "theta too large for a float": ({"rope_theta": 10**400}, ["rope_theta"]),
    "negative theta": ({"rope_theta": -1e4}, ["rope_theta", "-10000.0"]),
    "theta one": ({"rope_theta": 1.0}, ["rope_theta 1.0"]),
    "two thetas": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        ["rope_theta 10000.0", "rope_parameters.rope_theta 500000.0"],
    ),
    "two thetas, old block": (
        {"rope_theta": 1e4, "rope_scaling": LINEAR | {"rope_theta": 5e5}},
        ["rope_theta 10000.0", "rope_scaling.rope_theta 500000.0"],
    ),
    "two blocks": (
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4.0}},
        ["rope_parameters", "rope_scaling", "2.5", "4.0"],
    ),
    "block and default": (
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
        ["rope_parameters", "rope_scaling"],
    ),
    "two kinds": (
        {"rope_scaling": LINEAR | {"type": "yarn"}},
        ["rope_type 'linear'", "type 'yarn'"],
    ),
    "two dtypes": (
        {"dtype": "float16", "torch_dtype": "bfloat16"},
        ["dtype 'float16'", "torch_dtype 'bfloat16'"],
    ),
    "unknown dtype": ({"torch_dtype": "float8"}, ["torch_dtype", "'float8'", "bfloat16"]),
    "number as dtype": ({"dtype": 16}, ["dtype", "16"]),
    "two trained lengths": (
        {"original_max_position_embeddings": 77, "rope_scaling": LLAMA3},
        ["original_max_position_embeddings 77", "1024"],
    ),
    "factor below one": ({"rope_scaling": LINEAR | {"factor": 0.5}}, ["factor 0.5", "linear"]),
    "negative factor": ({"rope_scaling": LINEAR | {"factor": -2}}, ["factor", "-2"]),
    "string factor": ({"rope_scaling": LINEAR | {"factor": "2"}}, ["factor", "'2'"]),
    "NaN factor": ({"rope_scaling": LINEAR | {"factor": float("nan")}}, ["factor", "nan"]),
    "no factor": ({"rope_scaling": {"type": "linear"}}, ["linear", "needs factor"]),
    "null factor": ({"rope_scaling": YARN | {"factor": None}}, ["yarn", "needs factor"]),
    "no kind": ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling", "no rope_type"]),
    "llama3 without a band": (
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}},
        ["llama3", "low_freq_factor"],
    ),
    "llama3 without its length": (
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}},
        ["llama3", "original_max_position_embeddings"],
    ),
    "llama3 bands reversed": (
        {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.1}},
        ["low_freq_factor 4.1", "high_freq_factor 4.0"],
    ),
    "yarn bands reversed": (
        {"rope_scaling": YARN | {"beta_slow": 30}},
        ["beta_slow 30.0", "beta_fast 24.0"],
    ),
    "yarn length a string": (
        {"rope_scaling": YARN | {"original_max_position_embeddings": "1024"}},
        ["original_max_position_embeddings", "'1024'"],
    ),
    "yarn over a bad longest context": (
        {"max_position_embeddings": "x", "rope_scaling": {"type": "yarn", "factor": 2}},
        [": max_position_embeddings must", "'x'"],
    ),
    "yarn truncate a string": ({"rope_scaling": YARN | {"truncate": "no"}}, ["truncate", "'no'"]),
    "unknown kind": (
        {"rope_scaling": {"type": "ntk", "factor": 2.0}},
        ["'ntk'", "default, linear, llama3, yarn, longrope, dynamic"],
    ),
    "unknown kind without a factor": ({"rope_parameters": {"rope_type": "su"}}, ["'su'", "yarn"]),
    "a list as a kind": ({"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, ["['yarn']"]),
    "rope per layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        ["rope_parameters", "layer"],
    ),
    "rope as a string": ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
    "partial rotary inside": (
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        ["partial_rotary_factor 0.25"],
    ),
    "partial rotary true": ({"partial_rotary_factor": True}, ["partial_rotary_factor True"]),
    "unknown activation": ({"hidden_act": "quick_gelu"}, ["'quick_gelu'", *HIDDEN_ACTS]),
    "activation null": ({"hidden_act": None}, ["hidden_act", "None"]),
    "eos outside": (
        {"vocab_size": 100, "eos_token_id": 100},
        ["eos_token_id 100", "vocab_size 100"],
    ),
    "one of the eos outside": ({"eos_token_id": [2, 32000]}, ["eos_token_id 32000", "32000"]),
    "eos a string": ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
    "eos a bool": ({"eos_token_id": [True]}, ["eos_token_id", "True"]),
    "bos outside": ({"bos_token_id": 32000}, ["bos_token_id 32000", "vocab_size 32000"]),
    "bos a list": ({"bos_token_id": [1]}, ["bos_token_id", "[1]"]),
    "pad a string": ({"pad_token_id": "x"}, ["pad_token_id", "'x'"]),
    "quantized in no way": ({"quantization_config": "gptq"}, ["quantization_config", "gptq"]),
    "sliding window in use": (
        {"use_sliding_window": True, "sliding_window": 512},
        ["use_sliding_window", "512"],
    ),
    "architectures a string": ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
}


@pytest.mark.parametrize(("values", "named"), REFUSED.values(), ids=REFUSED)
def test_a_contradiction_is_refused_with_its_file_keys_values_and_remedy(values, named, tmp_path):
    file = write_json(tmp_path / "config.json", values)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "correct config.json" in message and "download" not in message
    for text in named:
        assert text in message


# Each case: the bytes of a file that is no configuration, and what the message has to say.
NO_CONFIG = {
    "not JSON": (b'{\n  "hidden_size": ,\n}', "line 2"),
    "empty": (b"", "line 1"),
    "half a file": (b'{"hidden_size": 4096', "char 20"),
    "a list": (b"[1, 2]", "object, not a list"),
    "not UTF-8": (b'{"a": "\xff"}', "byte 7"),
    "a key twice": (b'{"vocab_size": 5, "vocab_size": 6}', "'vocab_size' occurs twice"),
    "nested without end": (b'{"a":' * 200_000, "nested too deeply"),
    "a number without end": (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize("name", ["config.json", GENERATION_CONFIG_NAME])
@pytest.mark.parametrize(("data", "said"), NO_CONFIG.values(), ids=NO_CONFIG)
def test_non_json_files_are_refused_with_name_and_position(data, said, name, tmp_path):
    write_json(tmp_path / "config.json", {})
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name} ")
    assert said in str(caught.value)


@pytest.mark.parametrize("end", [32000, "</s>"])
def test_a_bad_end_in_generation_config_is_blamed_on_that_file(end, tmp_path):
    write_json(tmp_path / "config.json", {})
    file = write_json(tmp_path / GENERATION_CONFIG_NAME, {"eos_token_id": end})
    with pytest.raises(ValueError, match="eos_token_id") as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert str(caught.value).startswith(f"{file}: ")


def test_folder_without_a_config_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing.*model\.safetensors"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling must be a RopeScaling"),
        ({"dtype": "float16"}, "dtype must be a dtype"),
    ],
)
def test_the_constructor_takes_parsed_values_only(changes, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(**changes)


def test_rope_scaling_checks_itself():
    with pytest.raises(ValueError, match="rope_type 'default' is unknown"):
        RopeScaling(rope_type="default", factor=2.0)
    with pytest.raises(ValueError, match="needs original_max_position_embeddings"):
        RopeScaling(rope_type="yarn", factor=2.0)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("low_mem", "no setting 'low_mem'"),
        ("hidden_size", "replace.modelconfig, hidden"),
    ],
)
def test_an_assignment_is_refused_with_what_to_do(name, hint):
    """As ExLlamaV2's scripts do it; Python itself says "TypeError: super(type, obj)"."""
    config = ModelConfig()
    with pytest.raises(AttributeError, match=f"a ModelConfig can't be changed: .*{hint}"):
        setattr(config, name, True)
    with pytest.raises(AttributeError, match="can't be changed"):
        delattr(config, name)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
