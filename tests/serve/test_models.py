"""Loading and unloading models while the server runs, as TabbyAPI's clients do."""

from __future__ import annotations

import json
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from running import DEMO, LONG, events, get, post, running, stopped_after, until

from exkv.serve.hosting import ModelFolder, Prepared, ServeOptions, model_folder, own_name
from exkv.serve.serving import Serving

OPTIONS = ServeOptions(max_seq_len=1024, chunk_size=64, devices=("cpu",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three models: one in the folder, one a level below, one with truncated weights."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("demo", "org/second", "broken"):
        shutil.copytree(DEMO, folder / name)
    weights = folder / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "notes").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "vision-00002-of-00002.gguf").touch()
    return folder


@pytest.fixture
def serving(folder):
    prepared = Prepared(folder / "demo", OPTIONS)
    for _ in prepared.load():
        pass
    serving = Serving(prepared.serve(), folder=ModelFolder(folder))
    yield serving
    serving.close()


@pytest.fixture
def url(serving):
    with running(serving) as address:
        yield f"{address}/v1"


def test_models_in_hugging_faces_cache_keep_their_names(tmp_path):
    """There, files are links to blobs, and folders are named after commits."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "models--org--second" / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "9f8e").write_bytes(b"GGUF")
    (snapshot / "second-Q8_0.gguf").symlink_to(blobs / "9f8e")
    assert own_name(snapshot / "second-Q8_0.gguf") == "second-Q8_0.gguf"
    assert own_name(snapshot) == "org/second"
    assert own_name(snapshot / "..") == "snapshots"
    folder = ModelFolder(model_folder(snapshot / "second-Q8_0.gguf"))
    assert folder.models() == {"second-Q8_0.gguf": snapshot / "second-Q8_0.gguf"}


def answered(url: str) -> str:
    prompt = {"prompt": "the key is in the", "max_tokens": 3, "temperature": 0}
    status, answer = post(f"{url}/completions", prompt)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_loaded_model_is_listed_first(url, folder):
    assert [model["id"] for model in get(f"{url}/models")[1]["data"]] == [
        "demo",
        "broken",
        "org/second",
    ]
    assert get(f"{url}/model/list")[1] == get(f"{url}/models")[1]
    assert get(f"{url}/models/org/second")[1]["id"] == "org/second"
    assert get(f"{url}/models/../models/demo")[0] == 404
    status, card = get(f"{url}/model")
    assert (status, card["id"], card["object"]) == (200, "demo", "model")
    assert card["parameters"]["max_seq_len"] == card["parameters"]["cache_size"] == 1024
    assert card["parameters"]["cache_mode"] == "FP16"


def test_another_model_is_loaded_and_the_first_one_is_gone(url, serving):
    before, first = answered(url), serving.loaded.engine
    asked = {"model_name": "org/second", "max_seq_len": 512, "cache_mode": "Q8", "gpu_split": None}
    said = list(events(f"{url}/model/load", asked))
    units = len(first.model.units)
    assert said[-1] == {
        "model_type": "model", "module": units, "modules": units, "status": "finished",
    }  # fmt: skip
    assert [each["status"] for each in said[:-1]] == ["processing"] * len(said[:-1])
    steps = [each["module"] for each in said[:-1]]
    assert steps == sorted(steps) and len(set(steps)) == units + 1
    assert not first.model.loaded
    card = get(f"{url}/model")[1]
    assert (card["id"], card["parameters"]["max_seq_len"]) == ("org/second", 512)
    assert card["parameters"]["cache_mode"] == "Q8"
    assert answered(url) == before
    assert get(f"{url}/state")[1]["model"] == "org/second"


def test_invalid_load_requests_change_nothing(url, serving, folder):
    loaded = serving.loaded
    for name in ("../demo", str(folder / "demo"), "demo/../demo", "none", "notes", "demo\0", "."):
        status, answer = post(f"{url}/model/load", {"name": name})
        assert (status, answer["error"]["code"]) == (404, "model_not_found"), name
        assert get(f"{url}/plan?model=none")[0] == 404
    for wrong in (
        {"name": ""},
        {"name": "demo", "cache_mode": "Q6"},
        {"name": "demo", "max_seq_len": 0},
        {"name": "demo", "rope_scale": 2},
        {"name": "demo", "gpu_split": [-1.0]},
        {"name": "demo", "weights": "int1"},
        {"name": "demo", "dtype": "int1"},
        {"name": "demo", "max_seq_len": 999_999_999},  # a page list of 4 million
        {"name": "demo", "autosplit_reserve": [1e308]},
    ):
        status, answer = post(f"{url}/model/load", wrong)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), wrong
    status, answer = get(f"{url}/plan?model=demo&max_seq_len=999999999")
    assert status == 400 and "at most 134,217,728" in answer["error"]["message"]
    assert serving.loaded is loaded
    answered(url)


def test_model_that_does_not_fit_is_refused_before_unloading(url, serving):
    loaded = serving.loaded
    status, answer = post(f"{url}/model/load", {"name": "demo", "gpu_split": [0.0005]})
    assert (status, answer["error"]["code"]) == (400, "does_not_fit")
    assert "more on cpu would be enough" in answer["error"]["message"]
    assert serving.loaded is loaded and not serving.changing
    answered(url)


def test_failed_load_restores_the_old_model(url, serving):
    before, first = answered(url), serving.loaded
    *_, last = events(f"{url}/model/load", {"name": "broken"})
    assert "broken: CheckpointError" in last["error"]["message"]
    assert last["error"]["message"].endswith("demo is loaded again")
    assert serving.loaded is not first and serving.loaded.name == "demo"
    assert answered(url) == before


def test_failed_restore_leaves_no_model(url, serving, folder):
    (folder / "demo").rename(folder / "gone")
    try:
        *_, last = events(f"{url}/model/load", {"name": "broken"})
    finally:
        (folder / "gone").rename(folder / "demo")
    assert "No model is loaded now" in last["error"]["message"]
    for path, body in (("completions", {"prompt": "a"}), ("token/encode", {"text": "a"})):
        status, answer = post(f"{url}/{path}", body)
        assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
    assert get(f"{url}/model")[0] == 503
    assert get(f"{url}/state")[1]["devices"] == []
    *_, last = events(f"{url}/model/load", {"name": "demo"})
    assert last["status"] == "finished"
    answered(url)


def test_draft_is_planned_and_loaded_and_changes_no_answer(url, serving):
    before = answered(url)
    planned = get(f"{url}/plan?model=demo&draft=org/second&max_seq_len=512")[1]
    assert (planned["fits"], planned["asked"]["draft"]) == (True, "second")
    asked = {"model_name": "demo", "max_seq_len": 512}
    draft = {"draft_model": {"draft_model_name": "org/second"}}
    last = list(events(f"{url}/model/load", asked | draft))[-1]
    models, stats = serving.loaded.models, serving.loaded.engine.stats
    units = sum(len(model.units) for model in models)
    assert (last["status"], last["module"], len(models)) == ("finished", units, 2)
    for model, plan in zip(models, planned["plans"].values(), strict=True):
        ((now,), (ledger,)) = model.plan.ledgers, plan["ledgers"]
        for line in ("weights", "cache", "workspace", "logits"):
            assert getattr(now, line) == ledger[line]
    (device,) = get(f"{url}/state")[1]["devices"]
    assert device["weights"] == sum(model.plan.ledgers[0].weights for model in models)
    again = get(f"{url}/plan?model=demo&draft=org/second&max_seq_len=512")[1]  # without both
    budgets = [found["plans"]["model"]["ledgers"][0]["budget"] for found in (planned, again)]
    assert budgets[0]["promised_workspace"] == budgets[1]["promised_workspace"]
    assert answered(url) == before
    assert 0 < stats.accepted_tokens <= stats.proposed_tokens
    assert post(f"{url}/model/load", asked | {"draft_model": {"name": "../demo"}})[0] == 404
    list(events(f"{url}/model/load", asked))  # without one
    assert not any(model.loaded for model in models) and len(serving.loaded.models) == 1


def test_running_jobs_finish_before_a_change_and_new_ones_are_refused(url, serving):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    body = {"prompt": "a", "max_tokens": 900, "response_format": LONG}
    with ThreadPoolExecutor(2) as threads:
        with stopped_after(serving.loaded.engine, 3):
            answer = threads.submit(post, f"{url}/completions", body)
            until(lambda: serving.metrics.jobs == 1)
            loading = threads.submit(lambda: list(events(f"{url}/model/load", {"name": "demo"})))
            until(lambda: serving.changing)
            with pytest.raises(openai.InternalServerError, match="try again later") as caught:
                client.completions.create(model="demo", prompt="a")
            assert caught.value.status_code == 503
            assert post(f"{url}/model/load", {"name": "demo"})[0] == 409
        status, found = answer.result()
        assert (status, len(found["choices"][0]["text"])) == (200, 600)
        assert loading.result()[-1]["status"] == "finished"


def test_disconnected_client_does_not_delay_unloading(url, serving):
    body = {"prompt": "a", "max_tokens": 900, "response_format": LONG, "stream": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        answer.readline()
    until(lambda: serving.metrics.jobs == 0)
    with ThreadPoolExecutor(1) as clients:
        unloaded = clients.submit(post, f"{url}/model/unload", {})
        until(unloaded.done)


def test_skip_queue_unloads_at_once(url, serving):
    body = {"prompt": "a", "max_tokens": 900, "response_format": LONG}
    engine = serving.loaded.engine
    with ThreadPoolExecutor(1) as threads, stopped_after(engine, 3):
        answer = threads.submit(post, f"{url}/completions", body)
        until(lambda: serving.metrics.jobs == 1)
        assert post(f"{url}/model/unload", {"skip_queue": True})[0] == 200
        assert answer.result()[0] == 503
    assert not engine.model.loaded
    assert post(f"{url}/model/unload", b"")[0] == 503


def test_plan_route_matches_the_loaded_ledgers(url, serving, capsys):
    status, found = get(f"{url}/plan?model=org/second&max_seq_len=2048&cache=8bit")
    assert (status, found["fits"]) == (200, True)
    assert found["asked"]["max_seq_len"] == 2048
    (ledger,) = found["plans"]["model"]["ledgers"]
    assert found["away_bytes_at_most"] == 15 * ledger["cache"]  # of 16 jobs one always runs
    asked = {"name": "org/second", "max_seq_len": 2048, "cache_mode": "8bit"}
    list(events(f"{url}/model/load", asked))
    (now,) = serving.loaded.engine.model.plan.ledgers
    for line in ("weights", "cache", "workspace", "logits"):
        assert getattr(now, line) == ledger[line]
    assert get(f"{url}/plan?max_seq_len=max")[1]["asked"]["max_seq_len"] == 2048
    for wrong in ("max_seq_len=0", "max_seq_len=x", "cache=3bit", "weights=int1"):
        assert get(f"{url}/plan?{wrong}")[0] == 400, wrong
    assert json.dumps(found)
