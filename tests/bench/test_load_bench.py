"""The bench of opening models writes what exkv opens, and says what it measured."""

from __future__ import annotations

import pytest
from bench import load, load_weights
from bench.common import SHAPES

from exkv import Cache, Model


@pytest.mark.parametrize("kind", ["int8", "EXL2", "Q4_0"])
def test_a_checkpoint_of_a_kind_is_opened_with_packed_weights(tmp_path, kind):
    if kind in load_weights.BLOCKS:
        pytest.importorskip("gguf", reason="of the test extra, which `make test` installs")
    shape = SHAPES["tiny"]
    model = Model(load_weights.write(tmp_path / kind, kind, shape))
    model.load_autosplit(Cache(model, max_seq_len=8), devices=["cpu"])
    formats = [
        layer.format.name for layer in model.units[1].module.modules() if hasattr(layer, "format")
    ]
    assert len(formats) == 7 and not {"bf16", "fp32"} & set(formats)


def test_a_table_has_a_row_for_each_kind():
    figures = {name: [1.0, 2.0, 4.0] for name in load.FIGURES}
    text = load_weights.as_text({"int4": 5 * 10**8}, {"int4": figures}, "A machine")
    row = text.splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")][:3] == [
        "int4", "0.50", "2.00 (1.00..4.00)"
    ]  # fmt: skip
