"""Mixtures of experts whose matrices are in any weight formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from exkv.ops.activations import ACTIVATIONS
from exkv.ops.experts import Routing, by_choice, sum_of_experts
from exkv.ops.registry import define_op

from .format import WeightFormat, products
from .methods import formats as registered


def _fake(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define_op(
    "experts_of_formats(Tensor x, Tensor chosen, Tensor weights, Tensor[] tensors, str[] formats, "
    "str act) -> Tensor",
    fake=_fake,
)
def experts_of_formats(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    formats: Sequence[str],
    act: str,
) -> torch.Tensor:
    """The op ``experts`` for matrices in weight formats.

    Args:
        tensors: tensors of each expert's gate, up and down in the order of their layouts,
            concatenated.
        formats: name of each matrix's format.
        x, chosen, weights, act: as for ``experts``.
    """
    matrices = list(_matrices(tensors, formats))

    def run(expert: int, inputs: torch.Tensor) -> torch.Tensor:
        gate, up, down = matrices[3 * expert : 3 * expert + 3]
        inner, raised = products(inputs, (gate, up), (None, None))
        ACTIVATIONS[act].gate(inner, raised)
        del raised  # free it before the next product
        return _times(down, inner)

    routing = Routing(chosen=chosen, weights=weights)
    return sum_of_experts(x, routing, len(matrices) // 3, run)


@define_op(
    "chosen_experts(Tensor x, Tensor chosen, Tensor weights, Tensor[] tensors, int[] layouts, "
    "str formats, str act) -> Tensor",
    fake=_fake,
)
def chosen_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[int],
    formats: str,
    act: str,
) -> torch.Tensor:
    """:func:`experts_of_formats` for a few tokens and formats that bound runs know, by kernels that
    read the packed matrices.

    Args:
        layouts: the ``native`` numbers of each matrix, concatenated.
        formats: names of the formats, one a line.
        act: an activation with native code.
    """
    if act not in ACTIVATIONS:
        raise ValueError(f"chosen_experts: act is {act!r}; it is one of {', '.join(ACTIVATIONS)}")
    return experts_of_formats(x, chosen, weights, tensors, formats.split("\n"), act)


def _chosen_fake(
    x: torch.Tensor,
    chosen: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    layout: Sequence[int],
    outputs: int,
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    return x.new_empty((*chosen.shape, outputs))


@define_op(
    "chosen_products(Tensor x, Tensor chosen, Tensor[] tensors, str format, int[] layout, "
    "int outputs, Tensor[] biases) -> Tensor",
    fake=_chosen_fake,
    kernels_fall_back=True,
    reference_names=registered(),
)
def chosen_products(
    x: torch.Tensor,
    chosen: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    layout: Sequence[int],
    outputs: int,
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    """``expert_products`` for matrices of one size in one weight format, with x transformed as the
    format says.

    Args:
        tensors: of each matrix in the order of its layout, concatenated.
        format: the format's name.
        layout: its :meth:`WeightFormat.choice_layout`.
        outputs: rows of each matrix.

    Raises:
        ValueError: a choice that is no matrix.
    """
    known = registered().get(format)
    each = 1 if known is None else len(known.names)
    count, left = divmod(len(tensors), each)
    if known is None or left or len(biases) not in (0, count):
        raise ValueError(
            f"chosen_products: {len(tensors)} tensors and {len(biases)} biases don't belong to "
            f"matrices of format {format!r}"
        )
    multiply = known.times if known.transform else known.linear
    outs = x.new_empty((*chosen.shape, outputs))
    for expert, pairs, rows in by_choice("chosen_products", x, chosen, count):
        parts = dict(zip(known.names, tensors[each * expert :], strict=False))
        outs[pairs] = multiply(rows, parts, biases[expert] if biases else None)
    return outs


_Matrix = tuple[WeightFormat, dict[str, torch.Tensor]]


def _matrices(tensors: Sequence[torch.Tensor], formats: Sequence[str]) -> Iterator[_Matrix]:
    left = iter(tensors)
    for name in formats:
        format = registered().get(name)
        if format is None:
            raise ValueError(f"chosen_experts: there is no format {name!r}")
        parts = dict(zip(format.names, left, strict=False))
        if len(parts) < len(format.names):
            raise ValueError(f"chosen_experts: {len(tensors)} tensors are too few for {formats}")
        yield format, parts


def _times(matrix: _Matrix, x: torch.Tensor) -> torch.Tensor:
    format, tensors = matrix
    return format.linear(x, tensors, None)
