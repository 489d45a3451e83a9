"""The files and functions of exkv that common calls enter: ``python -m tests.bench walk``. A
profile counts each Python function once, in the second of two equal calls, in all threads."""

import contextlib
import io
import sys
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import torch
from serve.running import DEMO, QUESTION, running

import exkv
from exkv import Cache, Engine, Model, PagedCache, SamplingParams, Tokenizer
from exkv.cli import main
from exkv.serve.hosting import ServedModel
from exkv.serve.serving import Serving

from .harness import markdown

REQUEST = str({"messages": QUESTION, "max_tokens": 8}).replace("'", '"').encode()
#: (file, line) of functions entered before the first ``Transformer.forward``, and since each.
entered: list[set[tuple[str, int]]] = [set()]


@dataclass(frozen=True)
class Settings:
    """None: the counts don't depend on the machine."""


def profile(frame, event, _):
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if event == "call" and file.startswith(str(Path(exkv.__file__).parent)) and name[0] != "<":
        if name == "forward" and file.endswith("models/transformer.py"):
            entered.append(set())
        entered[-1].add((file, frame.f_code.co_firstlineno))


def walked(call, first=0, last=None):
    """Files and functions entered, of the forward calls from first to last."""
    call()
    entered[:] = [set()]
    call()
    found = set().union(*entered[first:last])
    return len({file for file, _ in found}), len(found)


def load():
    model = Model(DEMO)
    model.load_autosplit(cache := Cache(model, max_seq_len=256), devices=["cpu"])
    return model, cache


def measure(settings):
    sys.setprofile(profile)
    threading.setprofile(profile)
    (model, cache), tokenizer, walks = load(), Tokenizer(DEMO), {"`load_autosplit`": walked(load)}
    walks["`forward`"] = walked(lambda: model.forward(torch.tensor([[5]]), cache))
    asked = {"inputs": [tokenizer.encode_chat(QUESTION)], "max_new_tokens": 8}
    walks["a token of `generate`"] = walked(lambda: model.generate(**asked), -2, -1)
    pages = PagedCache(model, max_seq_len=1024)
    with contextlib.redirect_stdout(io.StringIO()), Engine(model, pages, tokenizer) as engine:
        walks["`exkv plan`"] = walked(lambda: main(["plan", str(DEMO), "--devices", "24G,24G"]))
        served = ServedModel(engine=engine, name="demo", usual=SamplingParams.recommended(DEMO))
        with running(Serving(served)) as url:
            request = urllib.request.Request(f"{url}/v1/chat/completions", REQUEST)
            request.add_header("Content-Type", "application/json")
            walks["a request"] = walked(lambda: urllib.request.urlopen(request).read())
    sys.setprofile(None)
    threading.setprofile(None)
    return {"walks": walks}


def report(result):
    rows = [(name, *each) for name, each in result["walks"].items()]
    return [markdown(("walk", "files", "functions"), rows)]
