"""Folders that transformers runs although their files state things in unusual ways, or too little,
or too much: exkv gives the same logits."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from safetensors.torch import load_file, save_file
from tiny import TINY, WINDOW, gemma3, llama, mistral, mixtral, reference, save
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from exkv import Cache, Model, ModelConfig

IDS = torch.randint(3, 320, (1, 48), generator=torch.Generator().manual_seed(5))


def edit(folder: Path, **changes: object) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def rewrite(folder: Path, change) -> None:
    """Replace the weights with the result of ``change``."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def theirs(folder: Path, dtype=torch.float32) -> torch.nn.Module:
    images = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype).eval()


def assert_same(folder: Path, dtype=torch.float32) -> Model:
    model = on_cpu(folder, dtype=dtype)
    with torch.no_grad():
        expected = theirs(folder, dtype)(IDS).logits
    assert (model.forward(IDS) - expected).abs().max() <= 2e-4 * expected.abs().max()
    return model


def test_a_tied_config_with_another_head_in_the_file_uses_that_head(tmp_path, caplog):
    folder = save(reference(llama(tie_word_embeddings=False)), tmp_path)
    edit(folder, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        model = assert_same(folder)
    assert "two that differ" in caplog.text
    assert not model.units[-1].spec.tied


def test_a_tied_config_with_the_same_head_in_the_file_holds_it_once(tmp_path):
    folder = save(reference(llama(tie_word_embeddings=True)), tmp_path)
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    model = assert_same(folder)
    assert model.units[-1].module.lm_head.weight is not None
    table = model.units[0].module.embed_tokens.weight
    assert model.units[-1].module.lm_head.weight.data_ptr() == table.data_ptr()


def test_a_head_that_differs_in_its_last_number_is_another_head(tmp_path):
    folder = save(reference(llama(tie_word_embeddings=True)), tmp_path)

    def change(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1
        return tensors | {"lm_head.weight": head}

    rewrite(folder, change)
    assert not Model(folder).units[-1].spec.tied


def test_a_tied_model_with_the_head_alone_embeds_by_it(tmp_path):
    folder = save(reference(llama(tie_word_embeddings=True)), tmp_path)
    rewrite(folder, lambda t: {k.replace("model.embed_tokens", "lm_head"): v for k, v in t.items()})
    assert_same(folder)


@pytest.mark.parametrize("architecture", [["LlamaModel"], None])
def test_the_names_of_a_model_without_its_head_are_known(tmp_path, architecture):
    folder = save(reference(llama(tie_word_embeddings=True)), tmp_path)
    rewrite(folder, lambda t: {name.removeprefix("model."): v for name, v in t.items()})
    edit(folder, architectures=architecture)
    assert_same(folder)


def test_float64_files_are_read(tmp_path):
    folder = save(reference(llama()), tmp_path)
    rewrite(folder, lambda t: {name: tensor.double() for name, tensor in t.items()})
    assert_same(folder)


@pytest.mark.parametrize(
    ("name", "same"),
    [("swish", "silu"), ("gelu_new", "gelu_pytorch_tanh"), ("gelu_fast", "gelu_pytorch_tanh")]
    + [("gelu_python", "gelu"), ("gelu_accurate", "gelu_pytorch_tanh")],
)
def test_an_activation_has_other_names(tmp_path, name, same):
    folder = save(reference(llama(hidden_act=name)), tmp_path)
    assert assert_same(folder).config.hidden_act == same


def test_layer_types_of_a_mistral_are_its_layers(tmp_path):
    types = ["full_attention", "sliding_attention"] * 2
    folder = save(reference(mistral(layer_types=types)), tmp_path)
    edit(folder, architectures=["MistralForCausalLM"])
    assert_same(folder)


def test_layer_types_of_a_mixtral_change_nothing(tmp_path, caplog):
    folder = save(reference(mixtral(sliding_window=WINDOW)), tmp_path)
    edit(folder, layer_types=["full_attention", "sliding_attention"] * 2)
    with caplog.at_level(logging.WARNING):
        assert_same(folder)
    assert "layer_types are ignored" in caplog.text


def test_flat_rope_parameters_of_a_gemma3_change_nothing(tmp_path, caplog):
    config = gemma3(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    folder = save(reference(config), tmp_path)
    edit(folder, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    with caplog.at_level(logging.WARNING):
        assert_same(folder)
    assert "'factor'" in caplog.text and "ignored" in caplog.text


def test_minus_one_is_no_token(tmp_path):
    folder = save(reference(llama()), tmp_path)
    edit(folder, bos_token_id=-1, eos_token_id=-1, pad_token_id=-1)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [-1], "pad_token_id": -1, "top_k": -1}))
    config = ModelConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, (), None)
    model = on_cpu(folder)
    tokens = model.generate(IDS, max_new_tokens=6)
    expected = theirs(folder).generate(IDS, max_new_tokens=6, do_sample=False, top_k=50)
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "stated",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"num_beam_groups": 4, "diversity_penalty": 0.5},
        {"diversity_penalty": 0.5},
        {"pad_token_id": -1, "eos_token_id": [-1]},
    ],
)
def test_a_generation_config_may_switch_things_off_in_any_way(tmp_path, stated):
    folder = save(reference(llama(eos_token_id=None)), tmp_path)
    expected = on_cpu(folder).generate(IDS, max_new_tokens=6, do_sample=False)
    (folder / "generation_config.json").write_text(json.dumps(stated))
    assert torch.equal(on_cpu(folder).generate(IDS, max_new_tokens=6), expected)


def test_dynamic_rotary_positions_go_beyond_the_trained_length(tmp_path):
    """A prompt within it that outgrows it token by token, and one that starts beyond it."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = llama(rope_scaling=scaling, max_position_embeddings=32, eos_token_id=None)
    folder = save(reference(config), tmp_path)
    assert_same(folder)
    model = on_cpu(folder, max_input_len=16)
    for width in (20, 40):
        other = theirs(folder)  # a used one remembers the longest text that it has seen
        cache, past, logits = Cache(model, 64), None, []
        with torch.no_grad():
            for ids in (IDS[:, :width], *IDS[:, width:].split(1, dim=1)):
                out = other(ids, cache=past, use_cache=True)
                past = out.cache
                logits.append((model.forward(ids, cache)[:, -1], out.logits[:, -1]))
        for found, expected in logits:
            assert (found - expected).abs().max() <= 2e-4 * expected.abs().max()


WIDE, MIXTURE = {"hidden_size": 2**20}, {"architectures": ["MixtralForCausalLM"]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 10**5}, "num_hidden_layers 100000 is more than the 2048"),
        ({"head_dim": 2**30}, "head_dim 1073741824 is more than the"),
        ({**WIDE, "intermediate_size": 2**30}, "intermediate_size 1073741824 by hidden_size"),
        ({**WIDE, "vocab_size": 2**30}, "vocab_size 1073741824 by hidden_size 1048576 are"),
        ({**WIDE, "num_attention_heads": 2**19}, r"num_attention_heads \* head_dim 16777216 by"),
        ({**MIXTURE, "num_local_experts": 10**6}, "num_local_experts 1000000: exkv supports"),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_the_config(values, said):
    """Nothing is built: without its bound, each of these would take minutes, or all memory."""
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_dict(
            {**llama().to_dict(), "architectures": ["LlamaForCausalLM"], **values}
        )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 200}, "num_hidden_layers 200, and the checkpoint has only 39"),
        ({**MIXTURE, "num_local_experts": 64}, "num_local_experts 64, and .* has only 39"),
    ],
)
def test_more_layers_or_experts_than_the_checkpoint_has_are_refused(tmp_path, values, said):
    folder = save(reference(llama()), tmp_path)
    edit(folder, **values)
    with pytest.raises(ValueError, match=said):
        Model(folder)


@pytest.mark.parametrize("name", ["BloomForCausalLM", "FalconForCausalLM", "MptForCausalLM"])
def test_an_unknown_architecture_is_called_that_and_nothing_else(tmp_path, name):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [name], "num_attention_heads": 7, "hidden_act": "gelu_10"})
    )
    with pytest.raises(ValueError) as caught:
        Model(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: architecture '{name}' is not supported")
    assert "LlamaForCausalLM" in message and "Qwen3ForCausalLM" in message
    assert "correct" not in message and "download" not in message
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(ValueError, match="model_type 'bloom' is not supported; known are"):
        Model(tmp_path)


def test_experts_inputs_first_as_qwens_files_have_them(tmp_path):
    config = TINY["Qwen3VLMoeForConditionalGeneration"](moe_intermediate_size=24)
    folder = save(reference(config), tmp_path)
    is_stack = lambda name: ".experts." in name  # noqa: E731
    rewrite(
        folder,
        lambda tensors: {
            name: tensor.transpose(1, 2).contiguous() if is_stack(name) else tensor
            for name, tensor in tensors.items()
        },
    )
    assert_same(folder)


def test_a_text_model_whose_keys_lie_among_those_of_images(tmp_path, caplog):
    """As in Qwen2.5-VL's files."""
    folder = save(reference(TINY["Qwen2_5_VLForConditionalGeneration"]()), tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    rope = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    edit(folder, text_config=None, **text | {"rope_scaling": rope, "model_type": "qwen2_5_vl"})
    rewrite(
        folder,
        lambda tensors: {
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): x
            for name, x in tensors.items()
        },
    )
    model = assert_same(folder)
    assert model.config.num_attention_heads == text["num_attention_heads"]
    assert "ignored, since" not in caplog.text
