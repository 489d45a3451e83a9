"""The contract of every registered format of weights."""

from __future__ import annotations

import re
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from packers import mxfp4, nvfp4
from packers.bitsandbytes import eight_bits, four_bits
from packers.blocks import random_blocks
from packers.compressed import integers
from packers.exl2 import exl2
from packers.exl3 import exl3
from packers.fp8 import blocks
from packers.hqq import hqq
from packers.integers import awq, gptq
from packers.torchao import float8
from packers.torchao import integers as torchao
from rows8 import Rows8
from safetensors.torch import load_file, save_file

from exkv.devices import rounded
from exkv.layers import Embedding, Linear
from exkv.layers.linear import side_by_side
from exkv.layers.mlp import run_experts
from exkv.ops import REFERENCES
from exkv.ops.experts import Routing
from exkv.weights import Fused, GroupFormat, formats, register
from exkv.weights.awq import AwqFormat
from exkv.weights.bitsandbytes import INT8, Bnb4Format
from exkv.weights.compressed_tensors import CompressedFormat
from exkv.weights.exl2 import Exl2Format, Section
from exkv.weights.exl3 import Exl3Format, TrellisFormat
from exkv.weights.fp8 import Fp8Format
from exkv.weights.gguf import FORMATS as GGUF
from exkv.weights.gptq import GptqFormat
from exkv.weights.hqq import HqqFormat
from exkv.weights.mxfp4 import COMPRESSED_TENSORS, MXFP4, MXFP4Format
from exkv.weights.nvfp4 import MODELOPT as NVFP4
from exkv.weights.nvfp4 import NVFP4Format
from exkv.weights.on_load import OnLoad
from exkv.weights.torchao import TorchaoFormat, TorchaoFp8Format

GROUPS = (
    OnLoad(bits=4, group=64, scale=torch.float16),
    GroupFormat(bits=8, group=32, scale=torch.float16),
    GroupFormat(bits=4, group=0, scale=torch.bfloat16, shift="offset"),
    GroupFormat(bits=4, group=32, scale=torch.float32, shift="zero"),
    GroupFormat(bits=5, group=64, scale=torch.float16, hadamard=128),
    GroupFormat(bits=2, group=64, scale=torch.float16, shift="offset", hadamard=32),
)
_GPTQ = {"bits": 3, "group": 32, "sym": False, "act": True, "version": 1}
_INT4 = {"bits": 4, "group": 32, "sym": True, "act": True, "packed": True}
#: Formats that not any numbers can be in -> a packer of matrices.
PACKERS = {
    Fp8Format(block=(16, 32)): lambda weight: blocks(weight, 16, 32),
    GptqFormat(
        bits=3, group=32, scale=torch.float16, shift="zero", ordered=True, version=1, indexed=True
    ): lambda weight: gptq("a layer", weight, **_GPTQ),
    AwqFormat(bits=4, group=32, scale=torch.float16, shift="zero"): lambda weight: awq(weight, 32),
    CompressedFormat(
        bits=4, group=32, scale=torch.float16, ordered=True, packed=True
    ): lambda weight: integers("a layer", weight, **_INT4),
    Bnb4Format(kind="nf4", block=64, nested=True, state=165): lambda weight: four_bits(
        weight, "nf4", 64, True
    ),
    Bnb4Format(kind="fp4", block=512, nested=False, state=100): lambda weight: four_bits(
        weight, "fp4", 512, False
    ),
    INT8: eight_bits,
    Exl2Format(
        sections=(Section(8, 32, 32), Section(6, 96, 96), Section(4, 64, 64), Section(3, 64, 64)),
        outputs_of=256,
    ): lambda weight: exl2("a layer", weight, [(8, 32), (6, 96), (4, 64), (3, 64)]),
    Exl3Format(tiles=TrellisFormat(words=56, codebook="mul1"), size=(256, 256)): lambda weight: (
        exl3("a layer", weight, 3.5, "mul1")
    ),
    HqqFormat(bits=3, group=64, scale=torch.float16, shift="offset"): lambda weight: hqq(
        weight, 3, 64
    ),
    TorchaoFormat(bits=4, group=32, scale=torch.bfloat16, shift="zero"): lambda weight: torchao(
        weight, 4, 32, False, torch.bfloat16
    ),
    TorchaoFp8Format(block=(1, 256)): float8,
    MXFP4: mxfp4.pack,
    COMPRESSED_TENSORS: lambda weight: mxfp4.flat(weight, "weight_packed"),
    NVFP4: lambda weight: nvfp4.pack(weight, "weight", "weight_scale_2"),
}
#: Beside the registered ones: layouts of groups, those above, and a newcomer that is made of
#: nothing but what a format must have.
OTHERS = (*GROUPS, *PACKERS, Rows8())
FORMATS = {**formats(), **{format.name: format for format in (*OTHERS, *GGUF.values())}}
SIZE = (256, 256)  # the longest of blocks
#: Formats from whose matrices rows can be taken, and some rows.
TAKING = (GroupFormat, Fp8Format, MXFP4Format, NVFP4Format, Bnb4Format)
MIXED_UP = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:97]


@pytest.fixture(autouse=True)
def newcomers():
    for format in OTHERS:
        register(format)


def stored(name: str, size=SIZE, seed=0) -> dict[str, torch.Tensor]:
    """Random tensors that a checkpoint may contain."""
    generator = torch.Generator().manual_seed(seed)
    expected = FORMATS[name].stored(size)
    if FORMATS[name] in PACKERS:
        packed, _ = PACKERS[FORMATS[name]](torch.randn(size, generator=generator))
        return {part: packed[part] for part in expected}

    def values(tensor) -> torch.Tensor:
        dtype = tensor.dtypes[0]
        if dtype.is_floating_point:
            return torch.rand(tensor.shape, generator=generator).sub(0.5).to(dtype)
        bounds = torch.iinfo(dtype)
        wide = torch.randint(bounds.min, bounds.max + 1, tensor.shape, generator=generator)
        return wide.to(dtype)

    if name.startswith("gguf "):  # any bytes would have scales that are no numbers
        return {"weight": random_blocks(name.removeprefix("gguf "), size, 1e-3, generator)}
    return {part: values(tensor) for part, tensor in expected.items()}


def on_device(name: str, size=SIZE, seed=0) -> dict[str, torch.Tensor]:
    """The tensors of the layout, cast as the loader casts them."""
    format = FORMATS[name]
    made, layout = format.convert(stored(name, size, seed)), format.layout(size)
    assert tuple(made) == tuple(layout) == format.names
    for part, (shape, dtype) in layout.items():
        assert made[part].shape == shape
        assert made[part].dtype == dtype or made[part].dtype.is_floating_point
    return {part: made[part].to(dtype) for part, (_, dtype) in layout.items()}


def linear(name: str, seed=0, bias=False, size=SIZE) -> Linear:
    layer = Linear(size[1], size[0], bias=bias, dtype=arithmetic(name))
    layer.use_format(FORMATS[name])
    state = on_device(name, size, seed)
    if bias:
        state["bias"] = torch.linspace(-1, 1, size[0]).to(arithmetic(name))
    layer.load_state_dict(state, assign=True)
    return layer


def arithmetic(name: str) -> torch.dtype:
    """The dtype that layers of the format compute in: a float format's own, else float32."""
    return getattr(FORMATS[name], "dtype", torch.float32)


def inputs(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(arithmetic(name))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within a few roundings to the format's arithmetic, of sums of about SIZE[1] products."""
    scale = expected.abs().max().item() + 1e-30
    return (found.double() - expected).abs().max().item() <= 8 * scale * torch.finfo(
        found.dtype
    ).eps * (4 if found.dtype == torch.float32 else 1)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_a_value_with_a_name_of_its_own(name):
    assert FORMATS[name].name == name
    assert hash(FORMATS[name]) == hash(FORMATS[name])
    with pytest.raises((AttributeError, TypeError)):
        FORMATS[name].dtype = 1


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_tensors(name):
    made = on_device(name)
    assert FORMATS[name].nbytes(SIZE) == sum(rounded(part.nbytes) for part in made.values())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_multiplies_by_the_dequantized_matrix(name, bias):
    layer, x = linear(name, bias=bias), inputs(name, 2, 3, SIZE[1])
    matrix = FORMATS[name].dequantize(on_device(name), torch.float64)
    expected = x.double() @ matrix.T + (layer.bias.double() if bias else 0)
    found = layer(x)
    assert found.dtype == x.dtype
    assert close(found, expected)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square."""
    return (found.double() - expected).square().mean().sqrt().item()


@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_at_most_twice_those_of_dequantized_bf16_weights(name, monkeypatch):
    """Of decode-sized inputs and of a prompt that isn't rounded to 8 bits
    (tests/ops/test_prompt_bits.py); one input is far larger than the others, as a few features of
    language models are."""
    monkeypatch.setattr("exkv.ops.prompt_bits.choice", lambda: "16bit")
    format, held = FORMATS[name], on_device(name)
    dtype = format.arithmetic or getattr(format, "dtype", torch.bfloat16)
    matrix = format.dequantize(held, torch.float64)
    for rows in (1, 5, 24, 40):
        x = torch.randn(rows, SIZE[1], generator=torch.Generator().manual_seed(rows))
        x[:, 77] *= 100
        x = x.to(dtype)
        expected = x.double() @ matrix.T
        plain = F.linear(x.bfloat16(), matrix.bfloat16())
        assert error(format.linear(x, held, None), expected) <= 2 * error(plain, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_saved_layer_is_the_same_when_it_is_loaded(name, tmp_path):
    layer, file = linear(name, bias=True), tmp_path / "layer.safetensors"
    save_file(layer.state_dict(), file)
    other = Linear(SIZE[1], SIZE[0], bias=True, dtype=arithmetic(name))
    other.use_format(FORMATS[name])
    other.load_state_dict(load_file(file))
    x = inputs(name, 3, SIZE[1])
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_layers_side_by_side_give_what_each_gives(name, bias):
    layers = [linear(name, seed, bias) for seed in range(3)]
    x = inputs(name, 1, 2, SIZE[1])
    for found, layer in zip(side_by_side(x, layers), layers, strict=True):
        assert torch.equal(found, layer(x))


def test_layers_of_mixed_formats_and_biases_side_by_side():
    layers = [linear("fp32", 0), linear("rows8", 1), linear("fp32", 2, bias=True)]
    for chosen in (layers, layers[::2]):
        x = inputs("fp32", 1, 2, SIZE[1])
        for found, layer in zip(side_by_side(x, chosen), chosen, strict=True):
            assert torch.equal(found, layer(x))


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_looks_up_rows_of_the_matrix(name):
    dtype = arithmetic(name)
    table = Embedding(*SIZE, dtype=dtype)
    table.use_format(FORMATS[name])
    table.load_state_dict(on_device(name), assign=True)
    ids = torch.tensor([[3, 0, 23], [3, 3, 7]])
    expected = FORMATS[name].dequantize(on_device(name), dtype)[ids]
    assert torch.equal(table(ids), expected)


@pytest.mark.parametrize(
    "rows", [slice(64, 192), slice(100, None), MIXED_UP], ids=["whole", "end", "any"]
)
@pytest.mark.parametrize("name", [name for name in FORMATS if isinstance(FORMATS[name], TAKING)])
def test_rows_that_are_taken_keep_their_weights(name, rows):
    format, tensors, rows = FORMATS[name], on_device(name), torch.arange(SIZE[0])[rows]
    part, taken = format.of_rows(SIZE, rows), format.take(tensors, rows)
    layout = {each: (tuple(tensor.shape), tensor.dtype) for each, tensor in taken.items()}
    assert layout == part.layout((len(rows), SIZE[1]))
    expected = format.dequantize(tensors, torch.float32)[rows]
    assert torch.equal(part.dequantize(taken, torch.float32), expected)


@pytest.mark.parametrize("kind", [Exl2Format, Exl3Format])
def test_a_format_whose_outputs_share_codes_has_no_rows_to_take(kind):
    (format,) = (each for each in PACKERS if isinstance(each, kind))
    halves = {"gate": itemgetter(slice(128)), "up": itemgetter(slice(128, None))}
    with pytest.raises(ValueError, match=f"mlp.both: {re.escape(format.name)} is not supported"):
        Fused(name="mlp.both", parts=halves).formats(format, SIZE)


def mixture(names: list[str]) -> list[list[Linear]]:
    """Gate, up and down of three experts, in these formats by turns."""
    turns = iter(names * 9)
    sizes = (SIZE, SIZE, SIZE[::-1])
    return [
        [linear(next(turns), 3 * expert + part, size=size) for part, size in enumerate(sizes)]
        for expert in range(3)
    ]


#: In which a model may compute; kernels of activations take no others.
COMPUTING = [name for name in FORMATS if arithmetic(name) != torch.float64]


@pytest.mark.parametrize("names", [*([name] for name in COMPUTING), ["fp32", "rows8"]])
def test_experts_are_those_of_the_dequantized_matrices(names):
    matrices, x = mixture(names), inputs(names[0], 5, SIZE[1])
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    weights = torch.linspace(0.1, 0.9, 10).view(5, 2)
    found = run_experts(x, Routing(chosen=chosen, weights=weights), matrices, "silu")
    plain = [
        [part.format.dequantize(dict(part.named_parameters()), x.dtype) for part in expert]
        for expert in matrices
    ]
    expected = REFERENCES["experts"](x, chosen, weights, *zip(*plain, strict=True), "silu")
    assert close(found, expected.double())


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name] not in PACKERS])
def test_a_stored_float_may_have_any_float_dtype(name):
    for expected in FORMATS[name].stored(SIZE).values():
        if expected.dtypes[0].is_floating_point:
            assert {torch.float32, torch.float16, torch.bfloat16} <= set(expected.dtypes)


def test_two_formats_cannot_have_one_name():
    class Other(Rows8):
        pass

    with pytest.raises(ValueError, match="has the name 'rows8' already"):
        register(Other())
    assert register(Rows8()) is register(Rows8())
