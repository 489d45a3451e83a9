"""Only exkv/planning knows that calls are run on shapes alone, to predict what they take."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from test_floors import FLOOR_OF, ROOT, part_of

import exkv.weights  # noqa: F401  (registers the ops that formats of weights have)
from exkv.ops import REFERENCES
from exkv.ops.registry import FAKES

#: What nobody below planning speaks of.
#: (A field of checkpoints is called ``nextn_predict_layers``, and heads are for multi-token
#: prediction.)
WORDS = re.compile(
    r"(?<!nextn_)(?<!multi-token )(?<!altup\.)predict|"
    r"\bprobe|dry.?run|ShapeTensor|first_query|shortened=",
    re.I,
)
#: AltUp predicts hidden states.
NOT_OF_PLANS = {"gemma3n.py"}
#: They may ask whether any mode of torch's is on, for what they keep or bind; see there.
ASK_FOR_MODES = {"exkv/layers/rope.py", "exkv/layers/linear.py"}


def below_planning() -> list[Path]:
    files = (ROOT / "exkv").rglob("*.py")
    modules = [(f, ".".join(f.relative_to(ROOT).with_suffix("").parts)) for f in sorted(files)]
    planning = FLOOR_OF["planning"]
    return [f for f, name in modules if FLOOR_OF.get(part_of(name), planning) < planning]


def test_nobody_below_planning_speaks_of_prediction():
    files = below_planning()
    assert len(files) > 80
    spoken = [f for f in files if f.name not in NOT_OF_PLANS]
    lines = [(f, line) for f in spoken for line in f.read_text().splitlines()]
    assert [(f.name, line) for f, line in lines if WORDS.search(line)] == []


def test_few_ask_for_a_dispatch_mode():
    asking = {f for f in below_planning() if "_dispatch_mode" in f.read_text()}
    assert {str(f.relative_to(ROOT)) for f in asking} == ASK_FOR_MODES


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_reference_takes_the_ops_arguments_and_no_others(name):
    schema = getattr(torch.ops.exkv, name).default._schema
    taken = inspect.signature(REFERENCES[name]).parameters
    assert list(taken) == [argument.name for argument in schema.arguments]
    assert name in FAKES
