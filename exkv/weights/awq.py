"""AWQ (Lin et al., 2023) as AutoAWQ writes it in its version ``gemm``.

w = scale[g] * (q - zero[g]). ``qweight`` int32 (in, out / 8): the i-th 4 bits of a word, from the
lowest on, belong to output ORDER[i] of the word's eight. ``qzeros`` int32 (groups, out / 8) is
packed likewise, ``scales`` (groups, out).

Source: AutoAWQ's ``awq/utils/packing_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.ops.registry import define_op
from exkv.ops.weight_groups import CHUNK, pack_codes

from .bits import stored_scale, unpack, words, words_of
from .finite import check_finite
from .floats import FLOATS
from .format import Size, WeightFormat
from .groups import GroupFormat
from .methods import FormatOf, register
from .settings import Settings, headers_of

#: Output, among the eight of a word, of its i-th four bits.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_OF_OTHERS = (
    *("quant_method", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
    *("exllama_config", "meta", "lm_head", "desc_act", "method", "damp_percent"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqFormat(GroupFormat):
    """The layout of groups, as AWQ stores it."""

    @property
    def name(self) -> str:
        return f"awq {self.layout_name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        outputs, inputs = size
        groups = self.groups.count(inputs)
        self.layout(size)  # raises for inputs that it cannot have
        return {
            "qweight": words(inputs, words_of(outputs, 4)),
            "qzeros": words(groups, words_of(outputs, 4)),
            "scales": ExpectedTensor(shape=(groups, outputs), dtypes=(self.scale,)),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = stored["scales"].T
        check_finite("scales", scale)
        packed = torch.ops.exkv.pack_awq(stored["qweight"])
        return self.beside(packed, scale, _codes(stored["qzeros"]))


def _packed_fake(words: torch.Tensor) -> torch.Tensor:
    inputs, blocks = words.shape
    return words.new_empty((blocks, inputs // CHUNK, CHUNK * 4), dtype=torch.uint8)


@define_op("pack_awq(Tensor words) -> Tensor", fake=_packed_fake)
def pack_awq(words: torch.Tensor) -> torch.Tensor:
    """AWQ's codes, int32 (in, out / 8) -> the kernels' (``weight_groups.pack_codes``).

    Raises:
        ValueError: another dtype or shape.
    """
    if words.dtype != torch.int32 or words.dim() != 2 or len(words) % CHUNK:
        raise ValueError(
            f"pack_awq: words must be int32 (in, out / 8) with a multiple of {CHUNK} inputs; they "
            f"are {words.dtype} {tuple(words.shape)}"
        )
    return pack_codes(_codes(words), 4)


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """int32 (n, out / 8) -> uint8 (out, n)."""
    place = torch.tensor(ORDER).argsort()  # place in a word of each output's bits
    eights = unpack(packed, 4, packed.shape[1] * 8).unflatten(1, (-1, 8))
    return eights[..., place].flatten(1).T


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer; the checkpoint's headers say which are quantized."""
    settings, headers = Settings.of(config), headers_of(config)
    group = _group(settings)
    quantized = settings.quantized(headers, settings.names("modules_to_not_convert"), "qweight")

    def format_of(layer: str, size: Size) -> WeightFormat:
        if not quantized(layer):
            return FLOATS[dtype]
        scale = stored_scale(layer, "scales", headers, torch.float16)
        return register(AwqFormat(bits=4, group=group, scale=scale, shift="zero"))

    return format_of


def _group(settings: Settings) -> int:
    """Inputs of a group; 0 for whole rows. Checks the other settings."""
    bits, groups = ("bits", "w_bit"), ("group_size", "q_group_size")
    settings.only(
        *_OF_OTHERS,
        *("version", "zero_point", "modules_to_not_convert", "checkpoint_format", "format"),
        *("pack_dtype", "sym", *bits, *groups),
    )
    settings.choice(settings.key_of(*bits), (4,))
    for key in ("version", "checkpoint_format", "format"):
        settings.choice(key, ("gemm", "GEMM"), "gemm")
    settings.choice("zero_point", (True,), True)
    settings.choice("sym", (False,), False)
    settings.choice("pack_dtype", ("int32",), "int32")
    return settings.group_size(settings.key_of(*groups), 128) or 0
