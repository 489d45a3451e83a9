"""GPTQ (Frantar et al., 2022) as AutoGPTQ, GPTQModel, optimum and AutoRound write it.

w = scale[g] * (q - zero[g]), g the input's group. ``qweight`` int32 (in * bits / 32, out) packs
codes along the inputs, ``qzeros`` int32 (groups, out * bits / 32) along the outputs, both from the
lowest bit on. Version 1 stores zero points less one, modulo 2^bits; version 2 as they are.
``g_idx`` says each input's group where they were sorted by activation order (``desc_act``).

``dynamic`` maps regular expressions to settings for the layers that they match; the first match
counts. Expressions after ``-:`` name layers that are not quantized.

Sources: GPTQModel's ``nn_modules/qlinear`` and ``utils/model.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.checkpoint.files import quoted

from .bits import (
    SCALE_DTYPES,
    check_constant,
    order_of,
    stored_scale,
    unpack,
    words,
    words_of,
)
from .finite import check_finite
from .floats import FLOATS
from .format import Size, WeightFormat
from .groups import GroupFormat
from .methods import FormatOf, register
from .settings import Settings, headers_of

BITS = (2, 3, 4, 8)
_OVERRIDES = ("bits", "group_size", "desc_act", "sym")
#: How the weights were computed, and hints for other runtimes.
_OF_OTHERS = (
    *("quant_method", "method", "damp_percent", "damp_auto_increment", "true_sequential"),
    *("static_groups", "mse", "meta", "model_name_or_path", "model_file_base_name", "quantizer"),
    *("dataset", "tokenizer", "batch_size", "block_name_to_quantize", "pad_token_id"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "model_seqlen"),
    *("cache_block_outputs", "cache_examples_on_gpu", "use_cuda_fp16", "use_exllama"),
    *("disable_exllama", "exllama_config", "max_input_length", "backend", "act_group_aware"),
    *("autoround_version", "lm_head", "hyb_act", "gptaq", "offload_to_disk", "failsafe"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat(GroupFormat):
    """The layout of groups, as GPTQ stores it.

    Attributes:
        version: version of the zero points, 1 or 2.
        indexed: whether there is a ``g_idx``; without ``ordered`` it must not reorder inputs.
    """

    version: int
    indexed: bool

    @property
    def name(self) -> str:
        return f"gptq{self.version}{'-indexed' if self.indexed else ''} {self.layout_name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        outputs, inputs = size
        groups = self.groups.count(inputs)
        found = {
            "qweight": words(words_of(inputs, self.bits), outputs),
            "qzeros": words(groups, words_of(outputs, self.bits)),
            "scales": ExpectedTensor(shape=(groups, outputs), dtypes=(self.scale,)),
        }
        if self.indexed:
            found["g_idx"] = words(inputs)
        self.layout(size)  # raises for inputs that it cannot have
        return found

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = stored["scales"].T
        outputs, inputs = scale.shape[0], len(stored["qweight"]) * 32 // self.bits
        check_finite("scales", scale)
        order = self._order(stored, inputs)
        given = (stored["qweight"].T, self.bits, inputs, order if self.ordered else None)
        codes = torch.ops.exkv.pack_words(*given)
        zeros = unpack(stored["qzeros"], self.bits, outputs).T
        zeros = zeros + (2 - self.version) & (1 << self.bits) - 1
        if self.shift == "symmetric":
            self._check_middle(zeros)
        return self.beside(codes, scale, zeros, order)

    def _order(self, stored: Mapping[str, torch.Tensor], inputs: int) -> torch.Tensor | None:
        if not self.indexed:
            return None
        order = order_of(stored["g_idx"], self.group or inputs, "g_idx")
        if not self.ordered and not torch.equal(order, torch.arange(inputs)):
            raise ValueError(
                "g_idx sorts the inputs, and quantization_config says desc_act false: they "
                "contradict each other, download the model again"
            )
        return order

    def _check_middle(self, zeros: torch.Tensor) -> None:
        why = f"sym means for {self.bits} bits and checkpoint_format {self._format()!r}"
        check_constant("zero points", zeros, 1 << self.bits - 1, why)

    def _format(self) -> str:
        return "gptq" if self.version == 1 else "gptq_v2"


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer; the checkpoint's headers say which are quantized."""
    settings, headers = Settings.of(config), headers_of(config)
    base = _base(settings)
    rules = list(_rules(settings, base))
    ignored = () if settings.flag("lm_head") else ("lm_head",)
    quantized = settings.quantized(headers, ignored, "qweight")

    @cache
    def stored(format: GptqFormat, scale: torch.dtype, indexed: bool) -> WeightFormat:
        return register(replace(format, scale=scale, indexed=indexed))

    def format_of(layer: str, size: Size) -> WeightFormat:
        named = (format for pattern, format in rules if pattern.match(layer))
        format = next(named, base)
        if format is None or not quantized(layer):
            return FLOATS[dtype]
        scale = stored_scale(layer, "scales", headers, torch.float16)
        there = headers is not None and f"{layer}.g_idx" in headers
        return stored(format, scale, format.ordered or there)

    return format_of


def _base(settings: Settings) -> GptqFormat:
    """The format of layers that no rule of ``dynamic`` matches."""
    settings.only(
        *_OF_OTHERS,
        *("checkpoint_format", "format", "pack_dtype", "dynamic", "is_marlin_format"),
        *_OVERRIDES,
    )
    key = settings.key_of("checkpoint_format", "format")
    version = settings.choice(key, ("gptq", "gptq_v2"), "gptq")
    settings.choice("is_marlin_format", (False,), False)
    settings.choice("pack_dtype", ("int32",), "int32")
    start = GptqFormat(
        bits=4, group=0, scale=SCALE_DTYPES[0], version=1 + (version == "gptq_v2"), indexed=False
    )
    return _changed(start, settings, {"group_size": 128, "sym": True, "desc_act": False})


def _changed(format: GptqFormat, settings: Settings, defaults: Mapping[str, Any]) -> GptqFormat:
    group = settings.group_size("group_size", defaults["group_size"]) or 0
    shift = "symmetric" if settings.flag("sym", defaults["sym"]) else "zero"
    return replace(
        format,
        bits=settings.choice("bits", BITS, defaults.get("bits")),
        group=group,
        shift=shift,
        ordered=settings.flag("desc_act", defaults["desc_act"]) and group != 0,
    )


def _rules(
    settings: Settings, base: GptqFormat
) -> Iterator[tuple[re.Pattern[str], GptqFormat | None]]:
    """Yield the rules of ``dynamic``: a pattern of layer names, and their format or None."""
    dynamic = settings.part("dynamic")
    defaults = {
        "bits": base.bits,
        "group_size": base.group or -1,
        "desc_act": base.ordered,
        "sym": base.shift == "symmetric",
    }
    for key in dynamic.values if dynamic else ():
        assert dynamic is not None
        try:
            pattern = re.compile(re.sub(r"^[-+]:", "", key))
        except re.error as error:
            raise ValueError(
                f"{dynamic.where}: {quoted(key)} is not a regular expression ({error}): take "
                "another version of the model"
            ) from None
        if key.startswith("-:"):
            yield pattern, None
            continue
        rule = dynamic.section(key)
        rule.only(*_OVERRIDES)
        yield pattern, _changed(base, rule, defaults)
