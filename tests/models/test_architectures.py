"""Every architecture over simulated devices: the bits of the CPU, and a ledger that is exact.

The scenario runs in a process of its own, on devices that it cuts to the size of the model.
"""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Iterable
from typing import Any

import pytest
import tiny
import torch
from cases import kinds_for
from on_cpu import on_cpu
from runs import Readable
from simproc import run_sim
from tiny import (
    GEMMA4_EXPERTS,
    GEMMA4_SHARED,
    IN_ALL_WAYS,
    TINY,
    WINDOW,
    gemma4,
    longrope,
    mixtral,
    phi3,
    qwen2,
    reference,
    save,
    save_tokenizer,
)

from exkv import CACHES, Cache, Generator, Model, ModelConfig, SamplingParams, Tokenizer, sim
from exkv.checkpoint.families import FAMILIES
from exkv.loading.report import LINES, DeviceReport
from exkv.models import UnitSpec, unit_specs
from exkv.models.decoder import Decoder
from exkv.models.units import quantized_anew
from exkv.weights.on_load import OPTIONS, with_weights

LENGTH, CHUNK = 96, 16
IDS = torch.randint(3, 320, (2, LENGTH), generator=torch.Generator().manual_seed(3))

#: Variants beside each architecture's plain tiny config that take another code path.
VARIANTS = {
    "qwen2-window": qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "mixtral-window": mixtral(sliding_window=WINDOW, num_local_experts=8, num_experts_per_tok=3),
    "phi3-longrope": phi3(**longrope(trained=64), tie_word_embeddings=True),
    "cohere-qk_norm": TINY["CohereForCausalLM"](use_qk_norm=True),
    "gemma4-experts": gemma4(**GEMMA4_EXPERTS),
    "gemma4-shared_keys": gemma4(**GEMMA4_SHARED),
    "llama4-dense": TINY["Llama4ForCausalLM"](moe_layers=[], no_rope_layers=[0, 1]),
}
CONFIGS = {name: TINY[name]() for name in FAMILIES} | VARIANTS
#: Architectures and the caches that they don't meet in every run.
OTHERS = [
    (name, kind) for name in FAMILIES for kind in CACHES if kind not in kinds_for(name, CONFIGS)
]


def digest(tensor: torch.Tensor) -> int:
    """Equal only for equal bits, within one process."""
    return hash(tensor.cpu().numpy().tobytes())


def fill(model: Model, cache: Cache) -> torch.Tensor:
    """Logits of rows of unlike length, then of the cache filled to the last token."""
    ids = IDS[: cache.batch_size]
    outputs = [
        model.forward(ids[:, :40], cache, new_lens=[40, 33][: cache.batch_size]),
        model.forward(ids[:, 40:80], cache),
        model.forward(ids[:, 80:], cache),
    ]
    return torch.cat([x.cpu() for x in outputs], dim=1)


def ledgers(model: Model) -> list[list[int]]:
    """Predicted and measured bytes, line by line."""
    return [
        [getattr(row.ledger, line), row.measured.get(line, 0)]
        for row in on_devices(model)
        for line in LINES
    ]


def on_devices(model: Model) -> list[DeviceReport]:
    """Reports on the simulated devices, except a host that holds an embedding."""
    return [row for row in model.report.devices if row.device.type == "sim"]


def split(folder: str, kind: str, batch_size: int):
    """On one device, then on two of which the first is too small, then at the promise's limit."""
    alone = on_cpu(folder, max_input_len=CHUNK)
    # The CPU's bound run sums states in another order: tests/models/test_bound_states.py.
    with Readable() if alone.config.has_states else contextlib.nullcontext():
        expected = digest(fill(alone, CACHES[kind](alone, LENGTH, batch_size)))

    for index in range(2):
        sim.set_capacity(index, 64 << 20)
    model = Model(folder, max_input_len=CHUNK)
    cache = CACHES[kind](model, LENGTH, batch_size)
    model.load_autosplit(cache, devices=["sim:0"])
    rows = ledgers(model)
    (whole,) = (row.ledger for row in on_devices(model))
    model.unload()
    sim.set_capacity(0, whole.total - (whole.weights + whole.cache) * 4 // 10)
    model.load_autosplit(cache)
    rows += ledgers(model)
    for row in on_devices(model):
        sim.set_capacity(row.device.index, row.ledger.total)
    result = digest(fill(model, cache))
    embedding, *others = model.device_map.values()
    placed = sorted({str(device) for device in others})
    assert str(embedding) == ("cpu" if model.embed_cpu else "sim:0")
    model.unload()
    return {"bits": result == expected, "rows": rows, "placed": placed}


def split_with_each_cache(folder: str, kinds: list[str]):
    return [split(folder, "fp16", 1), *(split(folder, kind, 2) for kind in kinds)]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CONFIGS)
def test_over_two_devices_it_gives_the_cpus_bits_within_what_was_predicted(tmp_path, name):
    save(reference(CONFIGS[name]), tmp_path)
    args = [str(tmp_path), list(kinds_for(name, CONFIGS))]
    assert_as_predicted(run_sim(split_with_each_cache, "64M,64M", args=args))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name, kind", OTHERS)
def test_over_two_devices_so_it_does_with_the_other_caches(tmp_path, name, kind):
    save(reference(CONFIGS[name]), tmp_path)
    assert_as_predicted([run_sim(split, "64M,64M", args=[str(tmp_path), kind, 2])])


def assert_as_predicted(results: Iterable[dict[str, Any]]) -> None:
    for result in results:
        assert result["bits"]
        assert result["placed"] == ["sim:0", "sim:1"]
        # The probe's zeros make all tokens choose the same experts: the worst case.
        for predicted, measured in result["rows"]:
            assert predicted == measured


@pytest.mark.parametrize("name", [*IN_ALL_WAYS, "DeepseekV3ForCausalLM", "phi3-outgrown"])
def test_the_generator_continues_unlike_prompts_as_transformers_does_each(tmp_path, name):
    """Prompts of unlike length in one batch, past the window and longrope's trained length; no
    end-of-sequence token, so that a random model doesn't end by chance."""
    outgrown = name == "phi3-outgrown"
    make, changes = (phi3, longrope(trained=45)) if outgrown else (TINY[name], {})
    theirs = reference(make(eos_token_id=None, **changes))
    theirs.get_output_embeddings().weight.data[2] = 0  # nor the tokenizer's
    folder = save_tokenizer(save(theirs, tmp_path))
    model = on_cpu(folder, max_input_len=16)
    generator = Generator(model, Cache(model, 128, batch_size=2), Tokenizer(folder))
    prompts = [IDS[0, :40].tolist(), IDS[1, :7].tolist()]
    generator.generate_simple(prompts, SamplingParams.greedy(), num_tokens=30)
    for prompt, sequence in zip(prompts, generator.cache.sequences, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        assert len(sequence) >= len(prompt) + 29  # the last token need not pass the model
        assert sequence == expected[0, : len(sequence)].tolist()


def test_every_architecture_has_a_model_type_of_its_own():
    families = [family for name, family in FAMILIES.items() if ":" not in name]
    assert len({family.model_type for family in families}) == len(families)


def test_settings_of_architectures_have_names_of_their_own():
    """These names identify them when they are sent to other hosts."""
    kinds = {family.specific for family in FAMILIES.values()}
    assert len({kind.__name__ for kind in kinds if kind}) == len(kinds - {None})


def test_an_architecture_without_a_tiny_config_is_told_what_to_add(monkeypatch):
    monkeypatch.setitem(FAMILIES, "Brand2ForCausalLM", FAMILIES["LlamaForCausalLM"])
    with pytest.raises(LookupError, match="Brand2ForCausalLM.*add to TINY"):
        runpy.run_path(tiny.__file__)


def parts(module: torch.nn.Module) -> dict[str, tuple]:
    """A module's structure without the values of its parameters: by path, types, constructor
    settings, and shapes."""
    tensors = (torch.nn.Module, torch.Tensor)
    return {
        path: (
            type(part),
            {k: v for k, v in vars(part).items() if k[0] != "_" and not isinstance(v, tensors)}
            | {"layer": None},  # by which it finds its part of what layers hand on
            {k: (v.shape, v.dtype) for k, v in part.named_parameters(recurse=False)},
        )
        for path, part in module.named_modules()
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_one_kind_have_equal_modules(name):
    """``kind_of_layer`` decides for which layers the modules are made once."""
    config = ModelConfig.from_dict(CONFIGS[name].to_dict())
    first: dict[object, dict[str, tuple]] = {}
    for spec in unit_specs(config, torch.float32)[1:-1]:
        with torch.device("meta"):
            module = spec.build()
        own = parts(module)
        assert first.setdefault(config.kind_of_layer(spec.layer), own) == own
        assert spec.shapes.keys() == dict(module.named_parameters()).keys()


def told(specs: list[UnitSpec]) -> list[tuple]:
    return [
        (s.name, s.kind, s.is_mtp, s.matrices, s.tied, s.unused, s.classes)
        + (parts(s.like.module), s.like.nbytes, [source.stored for source in s.sources])
        for s in specs
    ]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", CONFIGS)
def test_units_in_other_formats_are_those_of_a_config_with_these(name):
    config = ModelConfig.from_dict(CONFIGS[name].to_dict())
    specs = unit_specs(config, torch.float32)
    mixed = {spec.name: OPTIONS[i % len(OPTIONS)] for i, spec in enumerate(specs)}
    mixed[specs[-1].name] = mixed[specs[0].name]  # they may be tied
    for weights in ("int4", mixed):
        kept = with_weights(config, weights)
        anew = quantized_anew(specs, kept, torch.float32)
        assert told(anew) == told(unit_specs(kept, torch.float32)) != told(specs)
        specs = anew


def test_a_model_of_many_layers_makes_the_modules_of_each_kind_once(monkeypatch):
    made = []
    module = Decoder._module
    monkeypatch.setattr(Decoder, "_module", lambda *args: made.append(args[-1]) or module(*args))
    values = TINY["Glm4MoeForCausalLM"](first_k_dense_replace=3, num_hidden_layers=40).to_dict()
    model = Model(ModelConfig.from_dict(values), dtype=torch.float32)
    assert made == [0, 0, 3, 3]  # with floats, and in their formats
    names = [name for unit in model.units[1:-1] for s in unit.spec.sources for name in s.stored]
    assert len(set(names)) == len(names) and "model.layers.39.mlp.gate.weight" in names
    assert len(made) == 4
