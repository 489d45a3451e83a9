"""The bench of decoding runs, and computes what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bench import decode, harness, llamacpp
from bench.shapes import SHAPES, write_checkpoint
from exkv import Model, ModelConfig

TINY = decode.Settings(**{**decode.QUICK, "dtype": "bf16", "prompts": ()})


def test_every_engine_has_its_samples_and_fp32_tokens_are_the_peers(tmp_path):
    file = tmp_path / "figures.json"
    assert harness.run(decode, ["--quick", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    models = result["models"]
    assert [(model["shape"], model["batch"]) for model in models] == [("tiny", 1), ("tiny", 3)]
    names = ["exkv fp16", "exkv 4bit", "exkv fp16 + an adapter", "exkv fp16 + one for each row"]
    names += ["exkv fp16, int4", decode.TRANSFORMERS]
    for model in models:
        counts = dict.fromkeys(names, 0)
        for sample in model["samples"]:
            counts[sample["engine"]] += 1
        assert set(counts.values()) == {TINY.rounds * len(TINY.contexts)}
        for tokens in model["tokens"].values():
            assert len(tokens["exkv fp16"]) == TINY.steps + 1
            assert tokens["exkv fp16"] == tokens[decode.TRANSFORMERS]
        assert {prompt["engine"] for prompt in model["prompts"]} == set(names)
    assert decode.wrong(result) == []
    models[0]["tokens"]["4"]["exkv 4bit"] = [0]  # a lossy cache may
    assert decode.wrong(result) == []
    models[0]["tokens"]["4"]["exkv fp16"] = [0]
    assert len(decode.wrong(result)) == 1
    assert decode.wrong(result | {"settings": {"dtype": "bf16"}}) == []


def test_alone_it_is_measured_without_the_others(tmp_path):
    write_checkpoint(tmp_path, SHAPES["tiny"], torch.bfloat16)
    found = decode.engines(tmp_path, 1, replace(TINY, alone=True, adapter_rank=0))
    assert list(found) == ["exkv fp16", "exkv 4bit", "exkv fp16, int4"]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integers_that_a_step_reads_are_those_of_the_loaded_model(weights):
    shape = SHAPES["150M"]
    config = ModelConfig.from_dict(shape.config(torch.bfloat16))
    read = Model(config, weights=weights).units[1:]
    norms = (2 * shape.layers + 1) * shape.hidden
    size = sum(tensor.nbytes for unit in read for tensor in unit.shapes.values())
    expected = decode.Reads(shape=shape).weights(weights)
    assert abs(size - expected) <= 2 * norms


SAMPLE = decode.Sample(engine="exkv fp16", context=100, round=0, speed=10.0, before=4e9, after=4e9)


def test_a_share_is_of_the_memory_around_the_sample():
    shape = SHAPES["tiny"]
    size = decode.Reads(shape=shape).nbytes("exkv fp16", 100)
    assert size == 2 * shape.read_parameters + 100 * 2 * 2 * 1 * 64 * 2  # layers, heads, D
    samples = [
        SAMPLE,
        replace(SAMPLE, speed=20.0, before=8e9, after=8e9),  # twice the speed on twice the memory
        replace(SAMPLE, speed=1.0, after=3e9),  # the machine was another one afterwards
        replace(SAMPLE, engine="other", speed=5.0),
    ]
    ours, other = decode.rows_of(decode.Reads(shape=shape), samples)
    assert ours["share"]["n"] == 2
    assert ours["share"]["min"] == ours["share"]["max"] == pytest.approx(10 * size / 4e9)
    assert ours["times"]["other"] == pytest.approx(2) and other["engine"] == "other"
    half = decode.Reads(shape=shape).nbytes("exkv 8bit", 100) - 2 * shape.read_parameters
    assert half / (size - 2 * shape.read_parameters) == pytest.approx(8.5 / 16)


def test_samples_of_two_states_of_the_machine_have_a_table_each():
    slow = [replace(SAMPLE, speed=10.0, before=x * 1e9, after=x * 1e9) for x in (32.0, 33.0, 36.0)]
    fast = [replace(SAMPLE, speed=30.0, before=x * 1e9, after=x * 1e9) for x in (58.0, 60.0)]
    between = replace(SAMPLE, before=33e9, after=60e9)
    found = decode.by_state([fast[1], *slow, between, fast[0]])
    assert [(memory["min"], memory["max"], those) for memory, those in found] == [
        (32e9, 36e9, slow),
        (58e9, 60e9, fast),
    ]
    ((memory, those),) = decode.by_state([*slow, between])
    assert memory["n"] == 3 and those == slow
    assert decode.by_state([between]) == []
    model = {"shape": "tiny", "batch": 1}
    for memory, those in found:
        rows = decode.rows_of(decode.Reads(shape=SHAPES["tiny"]), those)
        text = decode.table(model, {"memory": memory, "rows": rows})
        assert f"gave {memory['median'] / 1e9:.0f} (" in text and f"; {len(those)})" in text


def test_a_batchs_step_reads_the_weights_once_and_every_rows_cache():
    shape = SHAPES["tiny"]
    weights = 2 * shape.read_parameters
    reads = [decode.Reads(shape=shape, rows=rows) for rows in (1, 8)]
    one, eight = (each.nbytes("exkv fp16", 100) for each in reads)
    assert eight - weights == 8 * (one - weights)
    samples = [replace(SAMPLE, speed=80.0), replace(SAMPLE, engine="other", speed=20.0)]
    ours, _ = decode.rows_of(reads[1], samples)  # 80 tokens of 8 rows are 10 steps
    assert ours["share"]["median"] == pytest.approx(10 * eight / 4e9)
    assert ours["tokens_per_second"]["median"] == 80 and ours["times"]["other"] == pytest.approx(4)


def test_a_row_of_a_batch_gets_the_tokens_that_it_gets_alone(tmp_path):
    """exkv's do to the bit. Others round as they like, so only their number is checked."""
    shape, settings = SHAPES["tiny"], replace(TINY, caches=("fp16", "8bit"), adapter_rank=0)
    write_checkpoint(tmp_path, shape, torch.bfloat16)
    if llamacpp.is_installed():
        llamacpp.write_gguf(tmp_path, shape)
    ids = torch.randint(3, shape.vocab, (1, 24), generator=torch.Generator().manual_seed(0))
    starts = [3, 4, 5]
    alone = [tokens_of(tmp_path, settings, ids, [start]) for start in starts]
    for name, found in tokens_of(tmp_path, settings, ids, starts).items():
        assert [len(step) for step in found] == [len(starts)] * settings.steps
        if name.startswith("exkv"):
            assert found == [sum(step, []) for step in zip(*(a[name] for a in alone), strict=True)]
    assert len({str(a["exkv fp16"]) for a in alone}) > 1  # rows differ


def tokens_of(folder, settings, ids, starts) -> dict[str, list[list[int]]]:
    """Each engine's tokens, step by step, after these tokens, each in a row of its own."""
    found = {}
    for name, engine in decode.engines(folder, len(starts), settings).items():
        engine.prefill(ids)
        engine.rewind(ids.shape[1] - 4)
        step, found[name] = starts, []
        for _ in range(settings.steps):
            step = engine.step(step)
            found[name].append(step)
        engine.close()
    return found
