"""What the inner loops of the kernels issue stays within the budgets of ``tests/gpu/sass.py``."""

from __future__ import annotations

import pytest
import sass
from native_ops import setup_script

from exkv.ops.weight_groups import PLANES
from exkv.weights.gguf import FORMATS as GGUF
from exkv.weights.gguf import BlockFormat

needs_nvcc = pytest.mark.skipif(
    setup_script().find_cuda_home() is None or sass.find_nvdisasm() is None,
    reason="no CUDA toolkit (nvcc), or no nvdisasm: python -m tests.gpu.sass fetches it",
)

LISTING = """\
.text._Z3oneLi4E:
_Z3oneLi4E:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E R3, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   STL [R1], R40 ;
"""


def loop(**changes) -> sass.Loop:
    values = dict(format="made up", source="one", kernel="one", rows=8, code_bytes=512)
    return sass.Loop(**{**values, "product": "HMMA", "products": 2, **changes})


def test_a_loop_is_counted_between_its_branch_and_its_target():
    counted = sass.count(loop(), 90, sass.kernels(LISTING))
    assert (counted.per_kib, counted.registers, counted.spills) == (10, 41, 1)
    # The compiler doubled it: an iteration takes in the codes of two.
    assert sass.count(loop(products=1), 90, sass.kernels(LISTING)).per_kib == 5


def test_a_kernel_that_has_no_such_loop_is_no_success():
    for wrong, what in (
        ({"kernel": "two"}, "no kernel two"),
        ({"products": 3}, "no loop of 3 HMMA"),
    ):
        with pytest.raises(ValueError, match=what):
            sass.count(loop(**wrong), 90, sass.kernels(LISTING))


def test_what_is_above_its_limit_fails():
    within = sass.Count(loop(), 90, per_kib=300, registers=128, spills=0)
    assert within.faults(None) == []
    assert within.faults(299) == ["300 a KiB, more than 299"]
    asked = sass.Count(loop(format="int4, zero"), 86, per_kib=251, registers=129, spills=2)
    assert asked.faults(None) == [
        "251 a KiB, more than 250",
        "2 loads and stores of spilled registers",
        "129 registers, more than 128",
    ]


def test_a_kernel_that_no_loop_stands_for_is_named():
    trellis = [name for name in NAMES if sass.uncounted("linear_trellis", [name])]
    assert trellis == ["_Z19TrellisTensorKernelIfLi17ELb0E"]


NAMES = [
    "_Z19TrellisTensorKernelI6__halfLi16ELb1E",
    "_Z19TrellisTensorKernelIfLi17ELb0E",
    "_Z19LinearTrellisKernelI6__halfLi4E",  # empty where there are tensor cores
    "_Z23DequantizeTrellisKernelIfE",
]


def test_every_format_with_kernels_is_counted():
    """By its own name, at every number of bits; for x of 16 bits and of 32."""
    counted = {loop.format.split(", groups")[0] for loop in sass.LOOPS}
    integers = (f"int{bits}, {shift}" for bits in PLANES for shift in sass.SHIFTS)
    blocks = [
        name
        for name, format in GGUF.items()
        if isinstance(format, BlockFormat) and format.choice_layout((256, 256)) is not None
    ]
    assert {"Q4_K", "IQ4_XS"} < set(blocks)
    trellis = (f"EXL3 at {words / 16:g} bits" for words in range(16, 129, 8))
    sections = (f"EXL2 at {bits} bits" for bits in PLANES)
    own = {*integers, *blocks, *trellis, *sections, "FP8", "MXFP4", "nf4"}
    assert own <= counted
    wide = {"int8", "int4", "int2", *blocks, "FP8", "MXFP4", "nf4", "EXL3 at 4 bits"}
    assert {f"float32 x, {name}" for name in wide} <= counted


@needs_nvcc
@pytest.mark.sweep(1)
@pytest.mark.parametrize("source", ["linear_groups_tensor", "linear_packed_tensor"])
def test_kernels_stay_within_their_budgets(source, capsys):
    """On an H100, whose budget is the smallest: the sources that compile in seconds."""
    counts = list(sass.count_all([source], [90]))
    assert {each.loop.format for each in counts} == {
        loop.format for loop in sass.LOOPS if loop.source == source
    }
    failed = sass.report(counts)
    assert failed == 0, capsys.readouterr().out
