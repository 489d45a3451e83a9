"""One server for the tests of its requests: the demo model, on pages of 16 tokens."""

from __future__ import annotations

import openai
import pytest
from on_cpu import on_cpu
from running import DEMO, TOKENS, running, until

from exkv import Engine, Job, PagedCache, SamplingParams, Tokenizer
from exkv.serve.guard import Limits
from exkv.serve.hosting import ServedModel
from exkv.serve.serving import Serving

PAGE, CHUNK = 16, 64


@pytest.fixture(scope="package")
def model():
    return on_cpu(DEMO, max_input_len=64)


@pytest.fixture(scope="package")
def alone(model):
    """A prompt's greedy completion in an engine that runs nothing else: its chunks end at page
    boundaries as the server's do, which may decide between equally likely tokens."""
    cache = PagedCache(model, max_seq_len=TOKENS, page=PAGE)
    with Engine(model, cache, Tokenizer(DEMO), max_running=1, chunk=CHUNK) as engine:

        def complete(prompt: str, num_tokens: int) -> str:
            settings = SamplingParams.greedy()
            job = Job(prompt=prompt, settings=settings, max_new_tokens=num_tokens)
            (text,) = engine.run([job])
            return text

        yield complete


@pytest.fixture(scope="package")
def serving(model):
    cache = PagedCache(model, max_seq_len=TOKENS, page=PAGE)
    with Engine(model, cache, Tokenizer(DEMO), max_running=8, chunk=CHUNK) as engine:
        usual = SamplingParams.recommended(DEMO)
        yield Serving(ServedModel(engine=engine, name="demo", usual=usual), limits=Limits(jobs=100))


@pytest.fixture(scope="package")
def address(serving):
    with running(serving) as address:
        yield address


@pytest.fixture(scope="package")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def no_job_or_page_is_left(request):
    """After each test, no job is left and no page is held."""
    yield
    if "address" in request.fixturenames and "serving" in request.fixturenames:
        serving = request.getfixturevalue("serving")
        until(lambda: serving.metrics.jobs == 0)
        if serving.loaded is not None:
            pool = serving.loaded.engine.pool
            until(lambda: pool.available == pool.pages)
