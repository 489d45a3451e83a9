"""A checkpoint's own head for multi-token prediction: its logits are transformers', its proposals
change no token, and a head that agrees with the model is always right."""

from __future__ import annotations

import argparse
import json
import shutil

import gguf
import pytest
import torch
from cases import KINDS
from heads import APART, BEHIND, Theirs, agreeing, with_head
from on_cpu import on_cpu
from packers.gguf import floats, write_gguf
from safetensors.torch import load_file, save_file
from simproc import run_sim
from tiny import TINY, reference, save
from torch.nn.functional import kl_div

from exkv import (
    MTP,
    Cache,
    Engine,
    Generator,
    Job,
    Model,
    ModelConfig,
    PagedCache,
    SamplingParams,
    Tokenizer,
    sim,
)
from exkv.cli import chat, main, serve
from exkv.cli.loading import prepare
from exkv.decode.speculation.heads import propose
from exkv.loading.report import LINES
from exkv.models.mtp import with_mtp
from exkv.serve.hosting import Prepared
from exkv.weights.on_load import with_weights

Q8 = gguf.GGMLQuantizationType.Q8_0


def q8(key, values):
    """Store matrices of whole blocks in 8 bits."""
    is_matrix = values.ndim > 1 and values.shape[-1] % 32 == 0 and "norm" not in key
    return Q8 if is_matrix and "gate_inp" not in key else floats(key, values)


PROMPTS = [[5, 6, 7, 8, 9, 10, 5, 6, 7] * 3, [11, 12, 13], [40, 41, 42, 43, 40, 41]]
GREEDY = SamplingParams.greedy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: with_head(name, tmp_path_factory.mktemp(name)) for name in (*BEHIND, *APART)}


def loaded(folder, **options):
    return on_cpu(folder, **{"max_input_len": 16, "mtp": True, **options})


@pytest.fixture(scope="module")
def model(folders):
    return loaded(folders["Glm4MoeForCausalLM"])


@pytest.fixture(scope="module", params=BEHIND[:2])
def agreed(request, tmp_path_factory):
    return loaded(agreeing(request.param, tmp_path_factory.mktemp("agreeing")))


def generated(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 30, "return_dict_in_generate": True, **options}
    return model.generate(prompts, **options)


def made_by_head(model):
    """Record the logits that the MTP head computes from now on."""
    found = []
    project = model.units[-1].module.project
    module = model.units[-2].module
    handle = module.register_forward_hook(lambda module, inputs, out: found.append(project(out)))
    return found, handle


# Logits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BEHIND, *APART])
@torch.no_grad()
def test_the_heads_logits_are_transformers(folders, name):
    theirs, model = Theirs(folders[name]), loaded(folders[name])
    ids = torch.randint(3, 300, (1, 40))
    hidden = theirs.hidden(ids)
    # There is no hidden state before the first token, where exkv has zeros.
    before = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), dim=1)
    _, expected = theirs.step(ids, before, 0)
    found, handle = made_by_head(model)
    logits = model.forward(ids, Cache(model, max_seq_len=48))  # in three chunks
    handle.remove()
    assert torch.allclose(torch.cat(found, dim=1), expected, atol=1e-4)
    assert torch.allclose(logits, theirs.model(ids).logits, atol=1e-4)


@pytest.mark.parametrize(("kind", "chunk"), [(Cache, 16), (Cache, 64), (PagedCache, 64)])
@torch.no_grad()
def test_proposals_are_transformers_head_on_its_own_output(folders, kind, chunk):
    """Rows of different lengths, after a call whose last tokens were dropped."""
    folder = folders["DeepseekV3ForCausalLM"]
    model, prompts = loaded(folder, max_input_len=chunk), [PROMPTS[0], PROMPTS[2]]
    cache = kind(model, max_seq_len=48, batch_size=2)
    newest, rejected = [17, 18], [200, 201]
    for ids in ([each[:-1] for each in prompts], [[each[-1], *rejected] for each in prompts]):
        width = max(map(len, ids))
        padded = torch.tensor([each + [0] * (width - len(each)) for each in ids])
        model.forward(padded, cache, new_lens=list(map(len, ids)))
    cache.crop([len(prompt) for prompt in prompts])
    found, handle = made_by_head(model)
    rows = [Stub(token) for token in newest]
    proposed = propose(model, cache, rows, {row: 3 for row in rows}, dict.fromkeys(rows, best), 0.0)
    handle.remove()
    for row, prompt in enumerate(prompts):
        theirs = Theirs(folder)
        ids = torch.tensor([[*prompt, newest[row]]])
        hidden = theirs.hidden(ids[:, :-1])
        hidden = torch.cat((torch.zeros_like(hidden[:, :1]), hidden), dim=1)
        first, tokens = 0, []
        for step in found:
            hidden, logits = theirs.step(ids, hidden, first)
            assert torch.allclose(step[row], logits[0, -1:], atol=1e-4)
            first += ids.shape[1]
            ids, hidden = logits[:, -1:].argmax(-1), hidden[:, -1:]
            tokens.append(int(ids))
        assert proposed[rows[row]] == tokens and len(tokens) == 3


@pytest.mark.parametrize("type_of", [floats, q8], ids=["floats", "Q8_0"])
def test_a_gguf_files_head(folders, tmp_path, caplog, type_of):
    """Its tensors come after the layers; those of both ends are ignored."""
    folder, file = folders["Glm4MoeForCausalLM"], tmp_path / "model.gguf"
    config = Theirs(folder).model.config
    tensors = load_file(folder / "model.safetensors")
    stands_for = write_gguf(file, config, tensors, type_of)
    shutil.copytree(folder, tmp_path / "folder")
    stands_for = {**tensors, **stands_for}
    save_file(stands_for, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    made = []
    for path in (file, tmp_path / "folder"):
        model = loaded(path, dtype="float32")
        found, _ = made_by_head(model)
        model.forward(torch.tensor([PROMPTS[0]]), Cache(model, max_seq_len=48))
        made.append(torch.cat(found, dim=1))
    assert torch.allclose(*made, atol=1e-5)
    assert "not used: blk.2.nextn.embed_tokens.weight, blk.2.nextn.shared_head_head" in caplog.text
    caplog.clear()
    assert loaded(file, mtp=False).config.num_hidden_layers == 2
    assert "blk.2.nextn.eh_proj" in caplog.text


class Stub:
    def __init__(self, newest):
        self.newest = newest


def best(logits, proposed):
    return int(logits.argmax())


# Tokens -----------------------------------------------------------------------------------------


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes_over_any_cache(model, kind):
    caches = [KINDS[kind](model, 60, 3) for _ in range(2)]
    expected = generated(model, cache=caches[0])
    found = generated(
        model, cache=caches[1], use_mtp=True, num_assistant_tokens=3,
        assistant_confidence_threshold=0,
    )  # fmt: skip
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.proposed_tokens > 0
    assert caches[0].sequences == caches[1].sequences


def test_greedy_tokens_are_transformers_with_its_head(folders):
    folder = folders["Glm4MoeForCausalLM"]
    theirs, model = Theirs(folder).model, Model.from_pretrained(folder, device_map="cpu", mtp=True)
    for prompt in PROMPTS:
        options = {"max_new_tokens": 20, "do_sample": False, "use_mtp": True}
        expected = theirs.generate(torch.tensor([prompt]), **options)
        found = generated(model, torch.tensor([prompt]), **options)
        assert found.sequences.tolist() == expected.tolist()
        assert found.proposed_tokens > 0


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 4, "seed": 3}], ids=str)
def test_head_that_agrees_is_always_accepted(agreed, sampled):
    """Its keys and values are then those of the model, whoever proposed the tokens."""
    rows = PROMPTS[:1] if sampled else PROMPTS  # draws differ with several rows
    options = {"use_mtp": True, "num_assistant_tokens": 4, "assistant_confidence_threshold": 0}
    found = generated(agreed, rows, **options, **sampled)
    assert found.sequences.tolist() == generated(agreed, rows, **sampled).sequences.tolist()
    assert found.accepted_tokens == found.proposed_tokens > 20 * len(rows)


@pytest.mark.parametrize(
    "name", ["Glm4MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"]
)
@torch.no_grad()
def test_proposals_of_a_run_are_transformers(folders, proposed, name):
    """Also after rejected ones, where recurrent states are rolled back."""
    model, theirs = loaded(folders[name]), Theirs(folders[name])
    options = {"use_mtp": True, "num_assistant_tokens": 3, "assistant_confidence_threshold": 0}
    found = generated(model, max_new_tokens=12, **options)
    assert found.sequences.tolist() == generated(model, max_new_tokens=12).sequences.tolist()
    cache, draft = PagedCache(model, max_seq_len=512, page=16, snapshots=True), MTP(confidence=0)
    with Engine(model, cache, Tokenizer(model.config), draft=draft) as engine:
        engine.run(
            Job(prompt=ids, max_new_tokens=12, settings=SamplingParams.greedy())
            for ids in [[*prompt, 99] for prompt in PROMPTS]
        )
    assert len(proposed) > 40
    for text, tokens in proposed.items():
        ids = torch.tensor([text])
        assert tokens == theirs.guessed(ids, len(tokens))


def test_rounded_weights_are_those_of_the_head_too(tmp_path):
    model = loaded(agreeing("Glm4MoeForCausalLM", tmp_path), weights="int4")
    found = generated(model, use_mtp=True, assistant_confidence_threshold=0)
    assert found.accepted_tokens == found.proposed_tokens > 50
    head = model.units[-2].module
    assert (
        head.projection.format.name == head.layer.mlp.shared_expert.up_proj.format.name != "float"
    )


def test_a_folder_of_integers_keeps_the_head(folders, tmp_path):
    folder, out = folders["DeepseekV3ForCausalLM"], tmp_path / "out"
    assert main(["quantize", str(folder), str(out), "--weights", "int8"]) == 0
    before, model = loaded(folder), loaded(out)
    assert "int" in model.units[1].module.mlp.up_proj.format.name
    heads = [each.units[-2].module.parameters() for each in (before, model)]
    assert all(map(torch.equal, *heads))
    found = generated(model, use_mtp=True)
    assert found.sequences.tolist() == generated(model).sequences.tolist()


def test_a_saved_cache_has_the_heads_layer(agreed, tmp_path):
    caches = [Cache(agreed, 80) for _ in range(2)]
    generated(agreed, PROMPTS[:1], cache=caches[0])
    caches[0].save(tmp_path / "file")
    caches[1].load(tmp_path / "file")
    options = {"use_mtp": True, "num_assistant_tokens": 4, "assistant_confidence_threshold": 0}
    text = [*caches[0].sequences[0], 9]
    found = generated(agreed, [text], cache=caches[1], max_new_tokens=20, **options)
    assert found.accepted_tokens == found.proposed_tokens > 10


def test_confidence_ends_proposals(agreed):
    options = {"use_mtp": True, "num_assistant_tokens": 4}
    ways = [generated(agreed, **options, assistant_confidence_threshold=c) for c in (0, 0.3, 1)]
    proposed = [way.proposed_tokens / way.sequences.numel() for way in ways]
    assert proposed[0] > proposed[1] >= proposed[2] > 0
    assert len({str(way.sequences.tolist()) for way in ways}) == 1


@pytest.mark.parametrize("pages", [64, 10], ids=["room", "preempted"])
def test_jobs_of_an_engine(agreed, pages):
    """Pages found in the prefix cache have the head's keys and values, too."""
    prompts = [*PROMPTS, [*PROMPTS[0], 60, 61]]
    cache, draft = PagedCache(agreed, max_seq_len=16 * pages, page=16), MTP(tokens=4, confidence=0)
    with Engine(agreed, cache, Tokenizer(agreed.config), draft=draft) as engine:
        jobs = [Job(prompt=ids, max_new_tokens=40, settings=GREEDY) for ids in prompts]
        handles = [engine.submit(job) for job in jobs]
        while engine.busy:
            engine.iterate()
        for handle in handles:
            (row,) = generated(agreed, [handle.prompt], max_new_tokens=40).sequences.tolist()
            assert [*handle.prompt, *handle.tokens] == row
        stats = engine.stats
    assert stats.found_tokens and bool(stats.put_away) == (pages == 10)
    # A readmitted job has lost one hidden state.
    assert stats.proposed_tokens - stats.accepted_tokens <= 4 * stats.put_away
    assert stats.accepted_tokens > 60


@pytest.fixture
def proposed(monkeypatch):
    """Record proposals, by the tokens so far."""
    found = {}

    def recorded(model, cache, rows, most, *how):
        made = propose(model, cache, rows, most, *how)
        found.update({(*row.prompt, *row.tokens): made[row] for row in most})
        return made

    for place in ("in_place", "in_pages"):
        monkeypatch.setattr(f"exkv.decode.{place}.propose", recorded)
    return found


def test_proposals_for_a_row_do_not_depend_on_others(model, proposed):
    """Its hidden state moves with it, from the prefill's cache, and when other rows leave."""
    options = {"use_mtp": True, "num_assistant_tokens": 4, "assistant_confidence_threshold": 0}
    lengths = [9, 30, 20]
    for prompt, length in zip(PROMPTS, lengths, strict=True):
        generated(model, [prompt], max_new_tokens=length, **options)
    alone = dict(proposed)
    assert sum(map(len, alone.values())) > 150
    proposed.clear()
    generated(model, PROMPTS, **options)
    assert {text: proposed[text] for text in alone if len(alone[text]) == 4} == {
        text: tokens for text, tokens in alone.items() if len(tokens) == 4
    }
    proposed.clear()
    drawn = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    generated(model, PROMPTS[1:2], max_new_tokens=30, **options, **drawn)
    assert proposed.items() <= alone.items() and len(proposed) > 15
    proposed.clear()
    cache, draft = PagedCache(model, max_seq_len=512, page=16), MTP(tokens=4, confidence=0)
    with Engine(model, cache, Tokenizer(model.config), draft=draft) as engine:
        engine.run(
            Job(prompt=ids, max_new_tokens=length, settings=SamplingParams.greedy())
            for ids, length in zip(PROMPTS, lengths, strict=True)
        )
    assert proposed == alone


def test_generator_accepts_mtp_by_name(agreed):
    generator = Generator(agreed, Cache(agreed, 64), Tokenizer(agreed.config), draft="mtp")
    plain = Generator(agreed, Cache(agreed, 64), Tokenizer(agreed.config))
    texts = [each.generate_simple("the key", GREEDY, 20) for each in (plain, generator)]
    assert texts[0] == texts[1]
    assert generator.stats.accepted_tokens > 0


# Plans ------------------------------------------------------------------------------------------


def predicted_and_measured(folder):
    lines = []
    for kind, *sizes, chunk in [(Cache, 48, 3, 16), (Cache, 64, 2, 64), (PagedCache, 64, 2, 32)]:
        model = Model(folder, max_input_len=chunk, mtp=True)
        cache = kind(model, *sizes)
        model.load_autosplit(cache)
        unit = model.plan.units[-2]
        weights = sum(each.nbytes for each in model.units[-2].module.parameters())
        lines.append([unit.name, unit.weights >= weights, len(set(model.cache_map.values()))])
        for row in model.report.devices:
            pairs = [[getattr(row.ledger, line), row.measured.get(line, 0)] for line in LINES]
            lines.append([str(row.ledger.device), row.units, pairs])
        prompts = [[5, 6, 7] * 9, [11, 12, 13]]
        found = model.generate(prompts, max_new_tokens=8, use_mtp=True, cache=cache)
        cache.reset()
        assert found.tolist() == model.generate(prompts, max_new_tokens=8, cache=cache).tolist()
        model.unload()
    return lines


def test_plan_matches_measurement_on_simulated_devices(tmp_path):
    """To the byte without experts, whose calls depend on routing."""
    folder = with_head("Glm4MoeForCausalLM", tmp_path, first_k_dense_replace=3)
    found = run_sim(predicted_and_measured, "250K,500K,64M", args=[str(folder)])
    for name, *rest in found:
        if not name.startswith("sim"):
            assert [name, *rest] == ["model.layers.2", True, 2]
            continue
        for predicted, measured in rest[1]:
            assert predicted == measured
    assert sum(rest[0] > 0 for name, *rest in found if name.startswith("sim")) >= 6


def chosen_for_a_card(folder, text):
    """Bits of the head and of the other units on a small card, the card's bytes, and tokens and
    proposals compared with the same choice on the host."""
    found = {}
    for calibration in (None, text):
        model = Model(folder, max_input_len=16, mtp=True, weights="best", calibration=calibration)
        cache = Cache(model, 64, 3, snapshots=model.config.has_states)
        model.load_autosplit(cache, devices=["sim:0"])
        whole = model.report.devices[0].ledger
        model.unload()
        sim.set_capacity(0, whole.total - whole.weights // 2)
        model.load_autosplit(cache)
        kept = {unit.name: unit.kept for unit in model.plan.units}
        rows = [
            [getattr(row.ledger, line), row.measured.get(line, 0)]
            for row in model.report.devices
            for line in LINES
        ]
        answers = [proposals(model, cache)]
        model.unload()
        sim.set_capacity(0, 64 << 20)
        config = with_mtp(ModelConfig.from_pretrained(folder))
        alone = on_cpu(with_weights(config, kept), max_input_len=16)
        other = Cache(alone, 64, 3, snapshots=alone.config.has_states)
        answers.append(proposals(alone, other))
        lost = model.losses().of(model.units[-2].name, kept[model.units[-2].name])
        found[str(calibration is not None)] = [kept, rows, answers, lost]
    return found


def proposals(model, cache):
    options = {"use_mtp": True, "num_assistant_tokens": 3, "assistant_confidence_threshold": 0}
    found = generated(model, cache=cache, max_new_tokens=12, **options)
    return [found.sequences.tolist(), found.proposed_tokens, found.accepted_tokens]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Qwen3_5ForCausalLM"])
def test_bits_of_a_head_are_chosen_with_those_of_the_layers(tmp_path, name):
    dense = {"first_k_dense_replace": 3} if name in BEHIND else {}
    folder = with_head(name, tmp_path, **dense)
    found = run_sim(chosen_for_a_card, "64M", args=[str(folder), "one two three " * 40])
    for kept, rows, answers, lost in found.values():
        head = kept[list(kept)[-2]]
        assert head != "as stored" and lost > 0
        assert all(predicted == measured for predicted, measured in rows)
        assert answers[0] == answers[1]
    assert {"True", "False"} == found.keys()


@pytest.mark.parametrize("name", ["Glm4MoeLiteForCausalLM", "Qwen3NextForCausalLM"])
@torch.no_grad()
def test_head_loss_is_the_divergence_of_transformers_head(folders, name):
    folder, text = folders[name], "one two three " * 15
    config = with_mtp(ModelConfig.from_pretrained(folder))
    model = Model(config, weights="best", calibration=text)
    units = [unit.name for unit in model.units]
    found = model.losses()
    assert list(found.units) == units
    kept = dict.fromkeys(units, "as stored") | {units[-2]: "int6"}
    rounded = on_cpu(with_weights(config, kept), dtype=torch.float32, max_input_len=512)
    ids = torch.tensor([Tokenizer(folder).encode(text)])
    made, handle = made_by_head(rounded)
    rounded.forward(ids, Cache(rounded, 512, dtype=torch.float32))
    handle.remove()
    theirs = Theirs(folder)
    hidden = theirs.hidden(ids)
    hidden = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), dim=1)
    _, exact = theirs.step(ids, hidden, 0)
    pair = made[0].double().log_softmax(-1), exact.double().log_softmax(-1)
    expected = kl_div(*pair, log_target=True, reduction="sum").item() / ids.shape[1]
    assert found.units[units[-2]]["int6"] == pytest.approx(expected, rel=1e-2)
    matrices = found.matrices[units[-2]].values()
    assert sum(each["int4"] for each in matrices) == pytest.approx(found.units[units[-2]]["int4"])


def test_calibration_rounds_layers_but_not_the_head(folders):
    folder = folders["Glm4MoeForCausalLM"]
    ways = {"weights": "int4", "dtype": "float32"}
    by_text = loaded(folder, calibration="one two three " * 400, **ways)
    plain = loaded(folder, **ways)
    for at, same in ((1, False), (-2, True)):
        pairs = zip(*(each.units[at].module.parameters() for each in (by_text, plain)), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) == same
    assert proposals(by_text, Cache(by_text, 64, 3))[1] > 0


# Commands ---------------------------------------------------------------------------------------


def test_mtp_flag(agreed):
    folder = str(agreed.config.path)
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for each in (chat, serve):
        each.add_to(commands)
    flags = [folder, "--draft", "mtp", "--devices", "cpu", "--max-seq-len", "64"]
    prepared = prepare(parser.parse_args(["chat", *flags]))
    prepared.load()
    generator = prepared.generator()
    generator.generate_simple("the key", SamplingParams.greedy(), 20)
    assert 0 < generator.stats.accepted_tokens <= generator.stats.proposed_tokens
    prepared.model.unload()
    served = Prepared(agreed.config.path, serve.options(parser.parse_args(["serve", *flags])))
    planned = served.plan()
    assert (planned["asked"]["draft"], list(planned["plans"])) == ("mtp", ["model"])
    assert [unit["name"] for unit in planned["plans"]["model"]["units"]][-2] == "model.layers.1"


# Refusals ---------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    folder = save(reference(TINY["Glm4MoeForCausalLM"]()), tmp_path)
    with pytest.raises(ValueError, match=r"has no head .*model\.layers\.2\.eh_proj is missing"):
        Model(folder, mtp=True)


def test_an_architecture_without_heads_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="reads no heads .* of LlamaForCausalLM, only"):
        Model(tiny_folder, mtp=True)


def test_a_model_that_was_built_without_its_head_is_refused(folders, tiny_model, tiny_tokenizer):
    model = loaded(folders["Glm4MoeForCausalLM"], mtp=False)
    with pytest.raises(ValueError, match=r"built without its head .*mtp=True"):
        generated(model, use_mtp=True)
    with pytest.raises(ValueError, match=r"built without its head .*mtp=True"):
        Engine(tiny_model, PagedCache(tiny_model, 64), tiny_tokenizer, draft="mtp")
    with pytest.raises(TypeError, match="draft is 'other'; it must be .* or \"mtp\""):
        Engine(tiny_model, PagedCache(tiny_model, 64), tiny_tokenizer, draft="other")


def test_options_incompatible_with_mtp_are_refused(model):
    with pytest.raises(ValueError, match="use_mtp with num_beams = 2"):
        generated(model, use_mtp=True, num_beams=2)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens and use_mtp are both given"):
        generated(model, use_mtp=True, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="tokens is 17"):
        MTP(tokens=17)


def test_a_damaged_head_is_named(folders, tmp_path):
    source = folders["Glm4MoeForCausalLM"]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    with pytest.raises(ValueError, match="model.layers"):
        loaded(tmp_path)
