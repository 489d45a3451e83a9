"""Devices without kernels: what is reported, once, and the launches of references."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from native import ROOT, setup_script
from simproc import needs_sim, run_sim
from tiny import llama

import exkv_ext
from exkv import CACHES, Model, ModelConfig
from exkv.cli import main
from exkv.errors import MissingKernelsWarning
from exkv.loading import plan_checks
from exkv.ops import REFERENCES
from exkv.planning import CacheShape, Workload
from exkv.planning.dry_run import DryRun
from exkv.planning.launches import LaunchCount, launches_of_a_token, missing_kernels
from exkv.weights import GroupFormat, register
from exkv.weights.bitsandbytes import Bnb4Format
from exkv.weights.exl2 import Exl2Format, Section
from exkv.weights.fp8 import Fp8Format
from exkv.weights.gguf import FORMATS
from exkv.weights.mxfp4 import MXFP4
from exkv_ext import Missing, missing

DEMO = "examples/demo-model"
GPU = torch.device("cuda", 0)
SHIFTS = ("symmetric", "zero", "offset")


def groups(bits: int, shift: str = "symmetric", **more) -> GroupFormat:
    return GroupFormat(bits=bits, group=64, scale=torch.float16, shift=shift, **more)


# How many -------------------------------------------------------------------------------------

OUTPUTS, INPUTS = 14336, 4096  # 3.5 tiles of groups, 14 of packed rows
#: Format -> launches of a tile at most.
MOST = {
    **{groups(8, shift): most for shift, most in zip(SHIFTS, (5, 6, 7), strict=True)},
    **{groups(4, shift): most for shift, most in zip(SHIFTS, (8, 12, 10), strict=True)},
    **{groups(bits): 15 for bits in (6, 5, 3)},
    **{groups(2): 8, groups(4, "zero", ordered=True): 13},
    **{FORMATS[name]: most for name, most in {"Q4_0": 8, "Q8_0": 5, "Q5_1": 17}.items()},
}
MOST_PACKED = {
    **{Fp8Format(block=None): 10, Fp8Format(block=(128, 128)): 15, MXFP4: 16},
    **{Bnb4Format(kind="nf4", block=64, nested=nested, state=0): 23 for nested in (False, True)},
    **{FORMATS[name]: 35 for name in ("Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS")},
    **{FORMATS[name]: 57 for name in ("Q3_K", "Q5_K")},
    Exl2Format(sections=(Section(5, 128, 1024), Section(4, 128, 3072)), outputs_of=OUTPUTS): 50,
}


def counted(format) -> LaunchCount:
    """Launches for one row times a matrix in bfloat16 on a GPU."""
    register(format)
    run = LaunchCount("cuda", by_kernels=False)
    with run, torch.no_grad():
        layout = format.layout((OUTPUTS, INPUTS)).items()
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout}
        x = torch.zeros(1, INPUTS, dtype=torch.bfloat16)
        run.restart([])
        format.linear(x, tensors, None)
    return run


@pytest.mark.parametrize("format", MOST, ids=lambda format: format.name)
def test_groups_dequantize_in_few_launches(format):
    run = counted(format)
    assert run.launches <= 4 * MOST[format] + format.groups.ordered
    assert run.peak <= (8 if format.shift == "offset" else 4) << 24  # bytes


@pytest.mark.parametrize("format", MOST_PACKED, ids=lambda format: format.name)
def test_packed_rows_use_larger_tiles_on_a_gpu(format):
    run = counted(format)
    assert run.launches <= 14 * MOST_PACKED[format]
    assert run.peak <= 25 << 22


def peaks_of_tiles() -> list[tuple[int, int]]:
    """Predicted and measured peaks of a dequantized tile in every layout, on a simulated device."""
    found = []
    for bits in (8, 6, 4, 3):
        for shift in SHIFTS:
            for dtype in (torch.float32, torch.bfloat16):
                found.append(_peaks_of_a_tile(groups(bits, shift, ordered=True), dtype))
    return found


def _peaks_of_a_tile(format: GroupFormat, dtype: torch.dtype) -> tuple[int, int]:
    size, layout = (512, 512 + 96), list(format.groups)  # the last group is a smaller one

    def tensors() -> list[torch.Tensor]:
        shapes = format.layout(size).values()
        return [torch.zeros(shape, dtype=kind, device="sim") for shape, kind in shapes]

    with DryRun("sim") as run:
        given = tensors()
        run.restart([])
        REFERENCES["dequantize_weight"](given, layout, 64, 512, dtype)
    given = tensors()
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    REFERENCES["dequantize_weight"](given, layout, 64, 512, dtype)
    return run.peak, torch.accelerator.max_memory_allocated(0) - before


@needs_sim
def test_tile_peak_is_predicted_to_the_byte():
    for predicted, measured in run_sim(peaks_of_tiles, devices="64M"):
        assert predicted == measured > 0


def llama_8b() -> ModelConfig:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    more = {"vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
    return ModelConfig.from_dict(llama(**sizes, **heads).to_dict() | more)


def workload(config: ModelConfig, length: int = 8192, **options) -> Workload:
    model = Model(config, **options)
    return Workload.of(model, [CacheShape.planned(model, CACHES["fp16"], length, 1)])


def test_documented_launches_of_8b_are_counted():
    asked = workload(llama_8b(), weights="int4")
    theirs, ours = (
        launches_of_a_token(asked.model, asked.promise, "cuda", by_kernels=each)
        for each in (False, True)
    )
    assert round(theirs, -2) == 5200 and round(ours, -1) == 420
    assert counted(groups(4)).launches == 32
    page = " ".join((ROOT / "docs" / "cuda.md").read_text().split())
    assert "32 launches" in page and "some 5,200" in page and "some 420" in page


# What is missing ------------------------------------------------------------------------------


@pytest.fixture
def not_built(tmp_path, monkeypatch):
    """A folder without modules, as an installation without a compiler has."""
    monkeypatch.setattr(exkv_ext, "_FOLDER", tmp_path)
    monkeypatch.setattr(exkv_ext, "_handles", {})
    monkeypatch.setattr(exkv_ext, "disabled", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(plan_checks, "_warned", set())


def test_missing_modules_are_named_with_their_build_line(not_built, tmp_path):
    rest = "pip install --no-build-isolation --no-deps --force-reinstall --no-binary exkv exkv"
    assert missing(GPU) == Missing("exkv_ext._cuda isn't built", f"EXKV_BUILD=cuda {rest}")
    for device in ("cpu", "sim:1"):
        name, index = (*device.split(":"), None)[:2]
        found = missing(SimpleNamespace(type=name, index=index))
        assert found == Missing("exkv_ext._C isn't built", f"EXKV_BUILD=cpu {rest}")
    (tmp_path / "_C.abi3.so").write_text("not a library")
    assert missing(torch.device("cpu")).why == "exkv_ext._C does not load"


def test_installed_package_suggests_the_cuda_wheel(not_built, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert missing(GPU) == Missing("exkv_ext._cuda isn't built", "pip install exkv-cuda13")
    monkeypatch.setattr(torch.version, "cuda", "12.8")  # for which there is no wheel
    assert missing(GPU).remedy.startswith("EXKV_BUILD=cuda pip install --no-build-isolation")


def test_clone_suggests_an_editable_build(not_built, monkeypatch):
    monkeypatch.setattr(exkv_ext, "_FOLDER", ROOT / "exkv")
    assert missing(GPU).remedy.endswith("--no-deps -e .")
    assert exkv_ext._build_line() == setup_script().BUILD_LINE


def test_disabled_extension_is_reported(not_built, monkeypatch):
    monkeypatch.setattr(exkv_ext, "disabled", lambda: True)
    expected = Missing("EXKV_DISABLE_EXT leaves them out", "unset EXKV_DISABLE_EXT")
    assert missing(GPU) == missing(torch.device("cpu")) == expected


def test_unsupported_gpus_get_no_build_line(not_built, monkeypatch):
    assert missing(torch.device("xpu", 0)).remedy == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert missing(GPU) == Missing("exkv has kernels for CUDA and for CPUs only", "")


class _Told:
    """A stand-in for a library's function."""

    def __init__(self, answer) -> None:
        self.answer, self.restype = answer, None

    def __call__(self, *args):
        return self.answer


@pytest.mark.parametrize(
    "has_code, capability, expected",
    [
        (True, (8, 6), None),
        (False, (7, 5), "TORCH_CUDA_ARCH_LIST=7.5 EXKV_BUILD=cuda pip install"),
        (False, (12, 0), "TORCH_CUDA_ARCH_LIST=12.0 EXKV_BUILD=cuda pip install"),
        (False, (6, 1), ""),
    ],
)
def test_gpu_outside_the_built_capabilities(not_built, monkeypatch, has_code, capability, expected):
    told = {"exkv_cuda_has_code": _Told(has_code), "exkv_cuda_architectures": _Told(b"800,900")}
    monkeypatch.setattr(exkv_ext, "_handles", {"_cuda": SimpleNamespace(**told)})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = missing(GPU)
    if expected is None:
        assert found is None
        return
    number = ".".join(map(str, capability))
    assert f"built for compute capability 8.0, 9.0, and this is {number}" in found.why
    assert found.remedy.startswith(expected) and bool(found.remedy) == bool(expected)
    assert ("made from 7.5 on" in found.why) == (not expected)


def test_oldest_gpu_matches_the_build_script():
    assert setup_script().CUDA_CAPABILITIES[0] == exkv_ext.OLDEST_GPU


@pytest.mark.skipif(setup_script().find_cuda_home() is None, reason="no CUDA toolkit (nvcc) here")
def test_module_records_its_compute_capabilities(tmp_path, monkeypatch):
    home, library = setup_script().find_cuda_home(), tmp_path / "code.so"
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 120)]
    command = [home / "bin" / "nvcc", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *codes]
    source = ROOT / "exkv_ext" / "cuda" / "code.cu"
    subprocess.run([*command, "-o", library, source], check=True)
    monkeypatch.setattr(exkv_ext, "_handles", {"_cuda": ctypes.CDLL(str(library))})
    assert exkv_ext.cuda_architectures() == [(8, 0), (12, 0)]


# What is said ---------------------------------------------------------------------------------


def test_sentence_names_devices_reason_cost_and_remedy(not_built):
    asked = workload(ModelConfig.from_pretrained(str(ROOT / DEMO)), 64)
    devices = [GPU, torch.device("cuda", 1), torch.device("cpu")]
    on_gpus, on_host = missing_kernels(asked.model, asked.promise, devices).values()
    theirs, ours = (
        launches_of_a_token(asked.model, asked.promise, "cuda", by_kernels=each)
        for each in (False, True)
    )
    assert theirs > 2 * ours > 0
    assert on_gpus.startswith("exkv has no kernels for cuda:0, cuda:1: exkv_ext._cuda isn't built.")
    assert f"takes {theirs:,} launches, compared to about {ours:,} with kernels." in on_gpus
    assert "To mend it, type: EXKV_BUILD=cuda pip install" in on_gpus
    assert "for cpu: exkv_ext._C isn't built." in on_host and "calls of torch's ops" in on_host


def test_only_the_first_load_warns(not_built):
    def load() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Model(str(ROOT / DEMO)).load(devices=["cpu"])
        return [str(w.message) for w in caught if w.category is MissingKernelsWarning]

    (message,) = load()
    assert "exkv has no kernels for cpu" in message
    assert load() == []


def test_load_with_kernels_does_not_warn(monkeypatch):
    monkeypatch.setattr(plan_checks, "missing_kernels", lambda *asked: {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", MissingKernelsWarning)
        Model(str(ROOT / DEMO)).load(devices=["cpu"])


def test_plan_reports_only_local_devices(not_built, capsys):
    def said(*arguments: str) -> bool:
        main(["plan", str(ROOT / DEMO), *arguments])
        return "exkv has no kernels for cpu" in " ".join(capsys.readouterr().out.split())

    assert said("--devices", "cpu")
    assert not said("--devices", "24G") and not said("--hosts", "a=24G")


def test_disabled_extension_warns_on_load():
    program = f"from exkv import Model; Model({DEMO!r}).load(devices=['cpu'])"
    environment = {**os.environ, "EXKV_DISABLE_EXT": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "MissingKernelsWarning: exkv has no kernels for cpu: EXKV_DISABLE_EXT" in done.stderr
    assert done.stderr.rstrip().count("MissingKernelsWarning") == 1


# The build ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "built, gpus, said",
    [
        ([], [(8, 6)], True),
        (["exkv_ext._C"], [(8, 6), (9, 0)], True),
        (["exkv_ext._C", "exkv_ext._cuda"], [(8, 6)], False),
        ([], [], False),
        ([], [(6, 1)], False),
    ],
)
def test_build_without_gpu_kernels_prints_a_notice(monkeypatch, capsys, built, gpus, said):
    setup = setup_script()
    monkeypatch.setattr(setup, "gpus_here", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    setup.report_missing_kernels(built)
    message = capsys.readouterr().err
    assert bool(message) == said
    if said:
        assert "compute capability 8.6" in message and "32 launches" in message
        assert "some 5,200 instead of 420" in message and "CUDA 13's toolkit" in message
        assert message.rstrip().endswith(f"EXKV_BUILD=cuda {setup.BUILD_LINE}")
