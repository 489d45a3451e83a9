"""EXL3, ExLlamaV3's format: trellis codes of 1 to 8 bits between two Hadamard transforms (a variant
of QTIP, Tseng et al., 2024).

A tile is 16 inputs by 16 outputs, a ring of 256 positions. Each position adds its bits to a
circular stream, highest bit first, and its weight is a function, the codebook, of the stream's last
16 bits. ``trellis`` int16 (in / 16, out / 16, 16 * bits) has the streams, in words of 32 bits with
the lower half first. With H the Hadamard matrix of size 128, divided by sqrt(128), over blocks of
inputs and of outputs::

    y = ((x * suh) H W H) * svh

Inputs and outputs are padded to multiples of 128. ``suh`` (in) and ``svh`` (out) are float16; older
files have only their signs, as bits, in ``su`` and ``sv``. A scalar ``mcg`` or ``mul1``, the factor
of the codebook's generator, identifies the codebook. The head is quantized too, and never tied to
the embedding.

Tiles stay packed on a device, those of the same outputs next to each other. Layers transform x,
multiply it by W in float32, and transform the product; kernels read the packed tiles.

Source: exllamav3's ``exllamav3_ext/quant`` (codebook.cuh, exl3_dq.cuh, reconstruct.cu) and
``modules/quant/exl3.py``; half bits are from its ``tests/testlib/trellis.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from exkv.checkpoint import ExpectedTensor, ModelConfig

from .finite import check_finite
from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat
from .hadamard import signs_of
from .methods import FormatOf, register
from .settings import EMBEDDING, Headers, Settings, headers_of
from .tiles import CHUNK, Packing, TiledFormat, packed_layout

#: Size of a tile, and of a block of the transform.
TILE, BLOCK = 16, 128
#: 16-bit words that a tile may have, for 1 to 8 bits a weight.
_WORDS = range(16, 129, 8)
#: Codebook -> the factor of its generator, if files state it.
CODEBOOKS = {"3inst": None, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisFormat(TiledFormat):
    """W alone: int16 (out / 16, in / 16, words); any rows can be dequantized.

    Attributes:
        words: words of a tile; 16 times the bits of a weight.
        codebook: "3inst", "mcg" or "mul1".
    """

    words: int
    codebook: str
    names: ClassVar[tuple[str, ...]] = ("trellis",)

    @property
    def name(self) -> str:
        return f"exl3 tiles {self.codebook} {self.words / TILE:g}"

    def layout(self, size: Size) -> Layout:
        outputs, inputs = (-(-each // TILE) for each in size)
        return {"trellis": ((outputs, inputs, self.words), torch.int16)}

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        ((shape, dtype),) = self.layout(size).values()
        return {"trellis": ExpectedTensor(shape=shape, dtypes=(dtype,))}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(stored)

    def native(self, size: Size) -> tuple[int, ...] | None:
        if size[1] % CHUNK:
            return None
        return packed_layout(Packing.TRELLIS, self.words, list(CODEBOOKS).index(self.codebook))

    def outputs(self, tensors: Tensors) -> int:
        return TILE * len(tensors["trellis"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        trellis, device = tensors["trellis"], ids.device
        begins = [self._begin(output, place) for output in range(TILE) for place in range(TILE)]
        of_all = torch.tensor(begins, dtype=torch.int32, device=device).view(TILE, 1, TILE)
        begin = of_all[ids & 15]  # (n, 1, 16)
        word = begin >> 4
        after = torch.where(word == self.words - 1, 0, word + 1)
        row = (ids >> 4).view(-1, 1, 1)
        tile = torch.arange(trellis.shape[1], device=device).unsqueeze(1)
        states = trellis[row, tile, word ^ 1].int().bitwise_left_shift_(16)
        states |= trellis[row, tile, after ^ 1].int().bitwise_and_(0xFFFF)
        states >>= 16 - (begin & 15)
        states &= 0xFFFF
        return self._values(device)[states].flatten(1).to(dtype)

    def _begin(self, output: int, place: int) -> int:
        """Position in the ring of the first of the 16 bits of a tile's weight."""
        lane = 4 * (output & 7) + (place >> 1 & 3)
        position = 8 * lane + (output >> 3 << 2) + (place >> 3 << 1) + (place & 1)
        # With half bits every second position has one bit more.
        end = (position + 1) * (self.words >> 4) + (position + 1 >> 1) * (self.words >> 3 & 1)
        return (end - 16) % (16 * self.words)

    def _values(self, device: torch.device) -> torch.Tensor:
        """The codebook: float16 (65536,). Products wrap around at 32 bits."""
        states = torch.arange(1 << 16, dtype=torch.int32, device=device)
        factor = CODEBOOKS[self.codebook]
        made = states * 89226354 + 64248484 if factor is None else states * (factor - 2**32)
        if self.codebook == "mul1":  # the sum of four bytes
            total = made & 0xFF
            for shift in (8, 16, 24):
                total += made >> shift & 0xFF
            return ((1024 + total).float() * (1774 / 2**18) - 1329 / 2**7).half()
        halves = (made & 0x8FFF8FFF - 2**32 ^ 0x3B603B60).view(torch.float16)
        low, high = halves.view(-1, 2).float().unbind(1)
        return (low + high).half()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl3Format(WeightFormat):
    """Tiles between two transforms.

    Attributes:
        tiles: the format of W.
        size: size of the matrix without padding.
        signs: whether the file has signs as bits in place of ``suh`` and ``svh``.
    """

    tiles: TrellisFormat
    size: Size
    signs: bool = False
    names: ClassVar[tuple[str, ...]] = ("trellis", "suh", "svh")

    def __post_init__(self) -> None:
        register(self.tiles)  # ops find it by its name

    @property
    def name(self) -> str:
        bits = f"{self.tiles.words / TILE:g}"
        sizes = "x".join(map(str, self.size))
        return f"exl3 {sizes}: {self.tiles.codebook} {bits}{' signs' * self.signs}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        outputs, inputs = _padded(size)
        shape = (inputs // TILE, outputs // TILE, self.tiles.words)
        made = {"trellis": ExpectedTensor(shape=shape, dtypes=(torch.int16,))}
        for name, count in (("suh", inputs), ("svh", outputs)):
            if self.signs:
                made[name[:2]] = ExpectedTensor(shape=(count // 16,), dtypes=(torch.int16,))
            else:
                made[name] = ExpectedTensor.of_floats((count,), torch.float16)
        if self.tiles.codebook != "3inst":
            made[self.tiles.codebook] = ExpectedTensor(shape=(), dtypes=(torch.int32,))
        return made

    def layout(self, size: Size) -> Layout:
        outputs, inputs = _padded(size)
        return {
            **self.tiles.layout((outputs, inputs)),
            "suh": ((inputs,), torch.float16),
            "svh": ((size[0],), torch.float16),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        codebook = self.tiles.codebook
        factor = int(stored[codebook]) & 0xFFFFFFFF if codebook in stored else None
        if factor != CODEBOOKS[codebook]:
            raise ValueError(
                f"{codebook} is {factor:#x}, and exkv knows only {CODEBOOKS[codebook]:#x}: take "
                "another quantized version of the model"
            )
        suh, svh = (
            _from_bits(stored[name[:2]]) if self.signs else stored[name] for name in self.names[1:]
        )
        check_finite("suh", suh)
        check_finite("svh", svh)
        trellis = stored["trellis"].transpose(0, 1).contiguous()
        return {"trellis": trellis, "suh": suh, "svh": svh[: self.size[0]].contiguous()}

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        h = signs_of(BLOCK, torch.float64, tensors["suh"].device)
        # Sums of 2^14 values of 11 bits are exact in float64.
        tiles = self.tiles.dequantize(tensors, torch.float64)
        for _ in range(2):  # inputs and outputs
            tiles = (tiles.T.unflatten(1, (-1, BLOCK)) @ h).flatten(1)
        suh, svh = tensors["suh"], tensors["svh"]
        made = (tiles / BLOCK)[: len(svh)] * suh * svh.unsqueeze(1)
        return made[:, : self.size[1]].to(dtype)

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        suh, svh = tensors["suh"], tensors["svh"]
        wide = _transformed(F.pad(x.float(), (0, len(suh) - x.shape[-1])) * suh)
        out = _transformed(self.tiles.linear(wide, tensors, None))[..., : len(svh)] * svh
        return (out if bias is None else out + bias).to(x.dtype)


def _padded(size: Size) -> Size:
    """The size in whole blocks."""
    outputs, inputs = (-(-each // BLOCK) * BLOCK for each in size)
    return outputs, inputs


def _transformed(x: torch.Tensor) -> torch.Tensor:
    """Multiply each block by H."""
    return torch.ops.exkv.hadamard(x.unflatten(-1, (-1, BLOCK))).flatten(-2)


def _from_bits(words: torch.Tensor) -> torch.Tensor:
    """-1 for each set bit, the lowest of a word first, otherwise 1: float16."""
    bits = words.unsqueeze(1) >> torch.arange(16, dtype=torch.int16) & 1
    return (1 - 2 * bits).half().flatten()


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer, from the checkpoint's headers.

    Raises:
        ValueError: there is no checkpoint, or it is damaged; config.json alone doesn't say how many
            bits a layer has.
    """
    settings, headers = Settings.of(config), headers_of(config)
    settings.only(
        *("quant_method", "version", "bits", "head_bits", "mtp_bits", "vision_bits"),
        *("calibration", "out_scales", "codebook", "original_quantization_config"),
        "tensor_storage",
    )
    if headers is None:
        raise ValueError(
            f"{settings.where}: with EXL3 only the weights' files say how many bits a layer has, "
            "and there are none that can be read: give the folder of the whole model"
        )
    quantized = settings.quantized(headers, (EMBEDDING,), "trellis")

    def format_of(layer: str, size: Size) -> WeightFormat:
        if not quantized(layer) or f"{layer}.trellis" not in headers:
            return FLOATS[dtype]  # if that is missing too, loading reports it
        signs = f"{layer}.su" in headers
        tiles = _tiles(layer, headers)
        return register(Exl3Format(tiles=tiles, size=size, signs=signs))

    return format_of


def _tiles(layer: str, headers: Headers) -> TrellisFormat:
    """The format of a layer's tiles; ValueError for unknown bits or two codebooks."""
    info = headers[f"{layer}.trellis"]
    words = info.shape[2] if len(info.shape) == 3 else 0
    named = [name for name in CODEBOOKS if f"{layer}.{name}" in headers]
    codebook = named[0] if named else "3inst"
    half = words % TILE != 0  # exllamav3 writes these with mul1 only
    if words not in _WORDS or len(named) > 1 or (half and codebook != "mul1"):
        raise ValueError(
            f"{info.file}: {info.name} is {list(info.shape)}, of {words / TILE:g} bits a weight, "
            f"with the codebook {' and '.join(named) or codebook}; exkv reads 1 to 8 bits, and "
            "half bits with mul1 only: take another quantized version of the model"
        )
    return TrellisFormat(words=words, codebook=codebook)
