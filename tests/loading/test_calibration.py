"""Weights rounded for a calibration text on load: which matrices, for which inputs, and how much
less they lose."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from simproc import run_sim
from tiny import TINY, llama, reference, save, save_tokenizer

from exkv import Cache, Model, ModelConfig, Tokenizer, sim
from exkv.checkpoint import Checkpoint
from exkv.cluster.model import ClusterModel
from exkv.layers.linear import Linear
from exkv.layers.mlp import Experts
from exkv.loading.calibration import ROWS, TOKENS, calibration_rows, rounded_units
from exkv.weights.feedback import cholesky_factor, compensated, rounded_with_factor
from exkv.weights.groups import GroupFormat
from exkv.weights.rounding import Rounded, rounded
from exkv.weights.settings import ROUTERS, stays_float

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo-model"
FORMAT = GroupFormat(bits=4, group=32, scale=torch.float16)
IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))


@functools.cache
def text_of(seed: int) -> str:
    """About 2,000 tokens of the demo model's language."""
    import toy_world  # not importable in the processes of simulated devices

    return toy_world.heldout_text(seed, 2000)


def all_matrices(unit) -> dict[str, GroupFormat]:
    return {
        path: FORMAT
        for path, part in unit.module.named_modules()
        if unit.spec.layer is not None and isinstance(part, Linear)
        if part.size[1] % FORMAT.group == 0 and not stays_float(path, ROUTERS)
    }


def rounded_by_ids(folder: Path) -> list[dict]:
    with Checkpoint(folder) as checkpoint:
        config = ModelConfig.from_pretrained(folder)
        return list(rounded_units(config, checkpoint, IDS, all_matrices))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", sorted(TINY))
def test_every_matrix_of_every_architecture_is_rounded_for_its_inputs(name, tmp_path):
    """A matrix whose inputs are not recorded would be rounded without data."""
    folder = save(reference(TINY[name]()), tmp_path)
    found = rounded_by_ids(folder)
    model = on_cpu(folder, dtype=torch.float32)
    assert len(found) == len(model.units) and found[0] == found[-1] == {}
    for unit, made in zip(model.units, found, strict=True):
        assert made.keys() == all_matrices(unit).keys()
        for path, values in made.items():
            weight = unit.module.get_submodule(path).weight
            assert values.scale.isfinite().all() and values.values(4).any()
            assert not torch.equal(values.codes, rounded(weight, 4, 32, torch.float16).codes)


def test_moments_are_of_rounded_inputs_and_targets_are_float_outputs():
    """Hooks on the model, with float and with rounded weights, see the inputs for which matrices
    were rounded."""
    model = on_cpu(DEMO, dtype=torch.float32)
    ids = calibration_rows(model.config, text_of(5))
    assert ids.shape == (4, TOKENS)
    with Checkpoint(DEMO) as checkpoint:
        found = list(rounded_units(model.config, checkpoint, ids, all_matrices))
    seen: dict[str, list[torch.Tensor]] = {}
    parts: dict[str, tuple[Linear, Rounded, torch.Tensor]] = {}
    for unit, made in zip(model.units, found, strict=True):
        for path, values in made.items():
            name, part = f"{unit.name}.{path}", unit.module.get_submodule(path)
            parts[name], each = (part, values, part.weight.detach()), seen.setdefault(name, [])
            part.register_forward_pre_hook(
                lambda _, inputs, each=each: each.append(inputs[0].flatten(0, -2))
            )
    model.forward(ids)
    for part, values, _ in parts.values():
        part.weight = torch.nn.Parameter(values.values(4), requires_grad=False)
    model.forward(ids)
    for name in ("0.self_attn.q_proj", "0.mlp.down_proj", "3.self_attn.o_proj"):
        _, values, weight = parts[f"model.layers.{name}"]
        floats, x = seen[f"model.layers.{name}"]
        root = cholesky_factor(x.T @ x / len(x))
        goal = compensated(root, weight, x, floats)
        expected = rounded_with_factor(root, goal, 4, 32, torch.float16)
        assert (values.codes == expected.codes).float().mean() > 0.99, name


def log_probs(model: Model) -> torch.Tensor:
    ids = torch.tensor([Tokenizer(DEMO).encode(text_of(6))[:512]])
    model.load(devices=["cpu"])
    return model.forward(ids).float().log_softmax(-1)


@pytest.mark.parametrize("weights", ["int4", "int6"])
def test_a_real_model_diverges_far_less_on_another_text(weights):
    """Also with a text of one row."""
    floats = log_probs(Model(DEMO, dtype=torch.float32))

    def divergence(**how: str) -> float:
        found = log_probs(Model(DEMO, dtype=torch.float32, weights=weights, **how))
        return float((floats.exp() * (floats - found)).sum(-1).mean())

    blind = divergence()
    assert 0 < divergence(calibration=text_of(5)) < 0.3 * blind
    assert divergence(calibration=text_of(5)[:2600]) < blind


def on_devices(folder: str, text: str) -> dict:
    """Loads over two cards and on one, of one model and of another."""
    model = Model(folder, max_input_len=32, weights="int4", calibration=text)
    cache = Cache(model, 64)
    model.load_autosplit(cache, devices=["sim:0"])
    ledger = model.report.devices[0].ledger
    alone = model.forward(IDS[:1], cache).cpu()
    model.unload()
    for index in range(2):
        sim.set_capacity(index, ledger.total - ledger.weights * 4 // 10)
    model.load_autosplit(cache)
    lines = [(row.ledger.weights, row.measured["weights"]) for row in model.report.devices]
    again = model.forward(IDS[:1], cache).cpu()
    blind = on_cpu(folder, weights="int4")
    return {
        "same": torch.equal(alone, again),
        "lines": lines,
        "other": not torch.equal(alone, blind.forward(IDS[:1])),
    }


def test_placement_and_bits_are_the_same_at_each_load(tmp_path):
    folder = save_tokenizer(save(reference(llama()), tmp_path))
    text = "the quick brown fox jumps over the lazy dog " * 60
    seen = run_sim(on_devices, "64M,64M", args=[str(folder), text])
    assert seen["same"] and seen["other"]
    assert len(seen["lines"]) == 2 and all(planned == found for planned, found in seen["lines"])


def test_rarely_chosen_expert_is_rounded_for_other_tokens_too(tmp_path, monkeypatch):
    """The router sends every token to experts 0 and 1. Each runs in the float pass and in the
    rounded one."""
    folder = save(reference(TINY["MixtralForCausalLM"](num_hidden_layers=1)), tmp_path)
    of_expert: dict[int, list[tuple[int, int]]] = {}
    run = Experts.run

    def recorded(self, x, routing):
        if routing.chosen.shape[1] == 1:
            runs = of_expert.setdefault(int(routing.chosen[0, 0]), [])
            runs.append((len(x), len(x.unique(dim=0))))
        return run(self, x, routing)

    def route(self, x):
        found = original(self, x)
        return replace(found, chosen=torch.arange(2).expand(len(x), 2).contiguous())

    original = Experts.route
    monkeypatch.setattr(Experts, "run", recorded)
    monkeypatch.setattr(Experts, "route", route)
    monkeypatch.setattr("exkv.loading.calibration._OF_EXPERT", 30)
    (_, found, _) = rounded_by_ids(folder)
    assert of_expert[0] == of_expert[1] == [(80, 80)] * 2
    assert of_expert[2] == of_expert[3] == [(30, 30)] * 2
    assert {f"mlp.experts.{i}.w2" for i in range(4)} <= found.keys()


def test_rows_are_full():
    config = ModelConfig.from_pretrained(DEMO)
    text, ids = text_of(5), torch.tensor(Tokenizer(DEMO).encode(text_of(5)))
    assert torch.equal(calibration_rows(config, text).flatten(), ids[: len(ids) // TOKENS * TOKENS])
    assert calibration_rows(config, text * 27).shape == (ROWS, TOKENS)
    assert calibration_rows(config, text[:2600]).shape == (1, TOKENS)


def test_too_short_text_is_refused_before_reading_weights():
    for text, count in (("", r"\d"), (text_of(5)[:1000], r"\d\d\d")):
        model = Model(DEMO, weights="int4", calibration=text)
        with pytest.raises(ValueError, match=rf"calibration text has {count} tokens; give a few"):
            model.load(devices=["cpu"])
        assert not model.loaded and model.checkpoint is None


def test_model_over_hosts_refuses_calibration():
    with pytest.raises(ValueError, match=r"rounds weights on one host: .* --calibration FILE"):
        ClusterModel(DEMO, None, weights="int4", calibration="a text")


def test_overflow_on_the_text_names_the_matrix(tmp_path):
    model = reference(llama(num_hidden_layers=2))
    model.model.layers[1].input_layernorm.weight.data *= 1e30
    folder = save_tokenizer(save(model, tmp_path))
    quantized = Model(folder, weights="int4", calibration="a fox and a dog " * 150)
    where = r"model.layers.1.self_attn.q_proj: squares .* are not finite"
    with pytest.raises(ValueError, match=where):
        quantized.load(devices=["cpu"])
    assert not quantized.loaded
