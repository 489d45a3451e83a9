"""The gated delta rule with a separate matrix for each of its inputs, and separate convolutions of
queries, keys and values in checkpoints: OLMo hybrid, and Kimi, whose key channels decay
separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.weights import Source

from .descriptions import Outputs, StateBlock, describes
from .linear import Linear, weight
from .low_rank import side_by_side
from .recurrent import GatedDelta, delta_block


class SeparateGatedDelta(GatedDelta):
    """With a matrix each for queries, keys, values, the gate, beta and the decay (OLMo hybrid)."""

    def make_projections(self, hidden: int, dtype: torch.dtype) -> None:
        self.make_inputs(hidden, dtype)
        sizes = self.settings
        self.g_proj = Linear(hidden, sizes.value_size, bias=False, dtype=dtype)
        self.a_proj = Linear(hidden, sizes.linear_num_value_heads, bias=False, dtype=dtype)

    def make_inputs(self, hidden: int, dtype: torch.dtype) -> None:
        """Create the matrices of queries, keys, values and beta."""
        sizes = self.settings
        self.q_proj = Linear(hidden, sizes.key_size, bias=False, dtype=dtype)
        self.k_proj = Linear(hidden, sizes.key_size, bias=False, dtype=dtype)
        self.v_proj = Linear(hidden, sizes.value_size, bias=False, dtype=dtype)
        self.b_proj = Linear(hidden, sizes.linear_num_value_heads, bias=False, dtype=dtype)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        beta, gate, step = side_by_side(x, (self.b_proj, self.g_proj, self.a_proj))
        return self.mixed(x), gate, beta, step

    def mixed(self, x: Tensor) -> Tensor:
        """x (B, T, hidden) -> queries, keys and values side by side."""
        return torch.cat(side_by_side(x, (self.q_proj, self.k_proj, self.v_proj)), dim=-1)


class KimiDelta(SeparateGatedDelta):
    """Kimi's delta attention (Kimi Team, 2025, arXiv 2510.26692): each key channel decays
    separately, by steps from two low-rank matrices; two others make the gate, which is a
    sigmoid."""

    def make_projections(self, hidden: int, dtype: torch.dtype) -> None:
        self.make_inputs(hidden, dtype)
        sizes = self.settings
        rank = sizes.linear_value_head_dim
        self.f_a_proj = Linear(hidden, rank, bias=False, dtype=dtype)
        self.f_b_proj = Linear(rank, sizes.key_size, bias=False, dtype=dtype)
        self.g_a_proj = Linear(hidden, rank, bias=False, dtype=dtype)
        self.g_b_proj = Linear(rank, sizes.value_size, bias=False, dtype=dtype)

    def make_decay(self, dtype: torch.dtype) -> None:
        heads = self.settings.linear_num_key_heads
        self.A_log = weight(1, 1, heads, 1, dtype=torch.float32)
        self.dt_bias = weight(self.settings.key_size, dtype=torch.float32)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        beta, step, gate = side_by_side(x, (self.b_proj, self.f_a_proj, self.g_a_proj))
        return self.mixed(x), self.g_b_proj(gate), beta, self.f_b_proj(step)

    def decay(self, step: Tensor) -> Tensor:
        steps = F.softplus(step.float() + self.dt_bias)
        heads = self.settings.linear_num_key_heads, self.settings.linear_key_head_dim
        return steps.unflatten(-1, heads).mul_(-self.A_log.exp())

    def gated(self, gate: Tensor) -> Tensor:
        return gate.sigmoid()


def separate_convolutions(
    config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module, *, path: str
) -> list[Source]:
    """How to load the convolution of the layer that the checkpoint calls ``name``, whose parts for
    queries, keys and values are at ``path`` in it; empty for a layer of another kind."""
    delta = layer.get_submodule("self_attn")
    if not isinstance(delta, SeparateGatedDelta):
        return []
    sizes, size = delta.settings, delta.settings.linear_conv_kernel_dim
    channels = {"q": sizes.key_size, "k": sizes.key_size, "v": sizes.value_size}
    stored = {
        f"{name}.{path}.{each}_conv1d.weight": ExpectedTensor.of_floats((count, 1, size), dtype)
        for each, count in channels.items()
    }
    parameter = "self_attn.conv1d.weight"

    def convert(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {parameter: torch.cat([found[each] for each in stored])}

    return [Source(stored=stored, parameters=(parameter,), convert=convert)]


def _whole(linears: Sequence[Linear]) -> list[Outputs]:
    """All outputs of each projection."""
    return [Outputs(projection=i, size=each.size[0]) for i, each in enumerate(linears)]


@describes(SeparateGatedDelta)
def _separate(delta: SeparateGatedDelta) -> StateBlock:
    mixed = (delta.q_proj, delta.k_proj, delta.v_proj)
    inputs = (*mixed, delta.g_proj, delta.b_proj, delta.a_proj)
    outputs = _whole(inputs)
    return delta_block(delta, inputs, outputs[:3], *outputs[3:])


@describes(KimiDelta)
def _kimi(delta: KimiDelta) -> StateBlock:
    mixed, low = (delta.q_proj, delta.k_proj, delta.v_proj), (delta.g_a_proj, delta.f_a_proj)
    inputs = (*mixed, delta.b_proj, *low, delta.g_b_proj, delta.f_b_proj)
    *outputs, beta, _, _, gate, step = _whole(inputs)
    return delta_block(delta, inputs, outputs, gate, beta, step, sources={6: 4, 7: 5}, sigmoid=True)
