"""The bench of quality sees what a cache forgets, and its divergence is torch's."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from torch.distributions import Categorical, kl_divergence
from transformers import LlamaForCausalLM

from bench import bits, harness, quality, real
from exkv import Cache, Tokenizer

RESULTS = Path(__file__).parent / "results"
CURVE = RESULTS / "quality-2026-11-24-smollm2-best.json"
TABLES = RESULTS / "quality-2026-11-23-smollm2.json"


def test_the_quick_bench_tells_a_window_from_what_keeps_everything(tmp_path):
    file, makes = tmp_path / "quality.json", quality.QUICK["makes"]
    assert harness.run(quality, ["--quick", "--json", str(file)]) == 0
    kinds = json.loads(file.read_text())["kinds"]
    lost = [kinds[name]["divergence"] for name in makes]
    assert lost == sorted(lost) and lost[1] < 1e-4 < lost[2] < lost[3]
    far = {name: kinds[name]["right"]["500-1000"] for name in makes}
    assert far["fp16"] == far["8bit"] == {"right": 4, "of": 4}
    assert far["sliding_window 128"]["right"] == 0
    # 4 layers of 2 heads of 32 keys and 32 values: 16 bits each, 8.5 or 5.
    stored = [kinds[name]["bytes_a_token"] for name in makes]
    assert stored == [1024, 544, 320, 1024]


def test_divergence_is_torchs():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 5, 40, generator=generator).log_softmax(-1)
    expected = kl_divergence(Categorical(logits=p), Categorical(logits=q))
    torch.testing.assert_close(quality.divergence(p, q), expected)


@torch.no_grad()
def test_chunks_through_a_cache_give_the_logits_of_transformers():
    theirs = LlamaForCausalLM.from_pretrained(quality.DEMO, dtype=torch.float32)
    model = on_cpu(quality.DEMO, dtype=torch.float32, max_input_len=256)
    chats = quality.chats(Tokenizer(model.config), 3, 200, 5)
    rows = [row[: 200 - 30 * n] for n, row in enumerate(chats)]
    parts = quality.logits_through(model, Cache(model, 256, 3), rows, 64)
    for row, logits in zip(rows, torch.cat(list(parts), 1), strict=True):
        expected = theirs(torch.tensor([row])).logits[0]
        torch.testing.assert_close(logits[: len(row)], expected, atol=1e-3, rtol=1e-4)


def test_the_curve_of_a_real_model_is_what_is_committed_and_grows_with_each_bit_given_up():
    """Strictly with whole bits; no step goes back by more than two standard errors."""
    curve = json.loads(CURVE.read_text())
    assert harness.text_of(real, curve) == CURVE.with_suffix(".md").read_text()
    points = curve["best"]["text"]
    for figure in ("loss", "divergence"):
        assert all(before[figure] < after[figure] for before, after in pairwise(points)), figure
    for before, after in pairwise([curve["reference"], *points]):
        change = math.log(after["perplexity"] / before["perplexity"])
        assert change > -2 * real.standard_error(after["nats"], before["nats"])
    whole = [point for point in points if point["room"] % 1 == 0]
    assert [point["room"] for point in whole] == [12, 10, 9, 8, 7, 6]
    steps = [*whole, points[-1]]
    assert all(a["perplexity"] < b["perplexity"] for a, b in pairwise(steps))


def test_the_sum_of_losses_predicts_the_divergence_on_other_pages():
    points = json.loads(CURVE.read_text())["best"]["text"]
    for point in points:
        assert point["loss"] == pytest.approx(point["divergence"], rel=0.2), point["room"]


def test_the_picture_is_what_the_committed_results_draw(tmp_path):
    drawn = tmp_path / "drawn.svg"
    assert harness.run(real, ["--draw", str(TABLES), str(CURVE), "--svg", str(drawn)]) == 0
    assert drawn.read_text() == real.SVG.read_text()


def test_a_standard_error_is_that_of_the_differences_of_rows():
    before, after = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).tolist()
    apart = torch.tensor(after) - torch.tensor(before)
    found = real.standard_error(after, before)
    torch.testing.assert_close(torch.tensor(found), apart.std() / 3)


def test_ways_of_bits_are_measured_as_transformers_measures_them_and_go_on(tmp_path, monkeypatch):
    out, words = tmp_path / "out", ["--quick", "--ints", "int4", "int3", "--json"]
    words += [str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]
    assert harness.run(bits, words) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    plain, weighted = found["ways"]["plain int3"], found["ways"]["weighted int3"]
    assert plain["bits"] == weighted["bits"] == 3.25
    assert 0 < found["ways"]["plain int4"]["divergence"] < plain["divergence"] / 2
    subject = bits.Subject(bits.Settings(**bits.QUICK, out=out))
    theirs = LlamaForCausalLM.from_pretrained(quality.DEMO, dtype=torch.float32)
    floats = _surprise_and_logits(theirs, subject.ids)
    for name, values in bits._plain(subject, "int3").values.items():
        theirs.get_submodule(name).weight.data = values
    rounded = _surprise_and_logits(theirs, subject.ids)
    assert found["reference"]["nats"] == pytest.approx(floats[0], rel=1e-4)
    assert plain["nats"] == pytest.approx(rounded[0], rel=1e-4)
    p, q = (Categorical(logits=each[1]) for each in (floats, rounded))
    expected = kl_divergence(p, q).mean(-1)
    torch.testing.assert_close(torch.tensor(plain["divergences"]), expected, rtol=1e-3, atol=1e-6)
    monkeypatch.setattr(bits, "_measured", lambda *_: pytest.fail("measured again"))
    assert harness.run(bits, words) == 0
    assert json.loads((tmp_path / "a.json").read_text())["ways"] == found["ways"]
    with pytest.raises(ValueError, match="give another --out"):
        harness.run(bits, [*words, "--tokens", "32"])


@torch.no_grad()
def _surprise_and_logits(model, ids):
    logits = model(ids).logits
    rows = [model(row[None], labels=row[None]).loss.item() for row in ids]
    return rows, logits
