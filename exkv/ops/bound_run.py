"""Native ops of a bound run (``exkv.models.native_run``); only CPU kernels implement them.

``new_run`` returns a handle, int64 (2,): the run's number, and the upper bound on tokens of one
call. The run references the tensors added to it until ``release_run``. They are checked when added,
and a call's tensors when it is made. These ops have no references: the bound modules are the
reference.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .registry import define_native

#: Flags of a norm's kind: the factor is 1 + weight; it is a layer norm.
OFFSET, CENTERED = 1, 2

define_native("new_run(Tensor like, int hidden) -> Tensor")
#: A matrix is the tensors of its format, and a layout of four numbers: the fields of
#: ``exkv.ops.weight_groups.Groups``, zeros for a single tensor of floats, or, with a negative first
#: number, packed rows as defined in ``exkv.weights.tiles``; sections have more numbers.
FLOAT_LAYOUT = (0, 0, 0, 0)
#: Precedes a layout of groups, with the block size of the Hadamard transform to apply to x before
#: the product, rounded as by the op ``hadamard``.
TRANSFORMED = -8
define_native("add_embedding(Tensor run, Tensor[] table, int[] layout, float scale) -> ()")
#: Norms: before and after attention, before and after the MLP, of queries and of keys; their kinds
#: are sums of :data:`OFFSET` and :data:`CENTERED`. Weights, layouts and biases: of query, key,
#: value, output, gate, up and down; the gate may be missing; without the first four, or the last
#: three, the call returns to ask for that part. ``act``: an activation that is ``native``.
#: ``interleaved``, ``residual`` and ``parallel``: see ``exkv.layers.descriptions``. ``rotary``:
#: index of the pair of a call's factors. Stores are as in ``append_kv``; ``paged`` if they are
#: pools of pages. ``gated``: each head's queries are followed by gates.
define_native(
    "add_layer(Tensor run, Tensor?[] norms, float[] eps, int[] kinds, Tensor?[] norm_biases, "
    "Tensor[] weights, int[] layouts, Tensor?[] biases, int head_dim, str act, int interleaved, "
    "float residual, bool parallel, int rotary, float scale, int window, float softcap, "
    "Tensor[] k_stored, str k_format, Tensor[] v_stored, str v_format, int ring, bool hadamard, "
    "bool paged=False, bool gated=False) -> ()"
)
#: Attention over latent vectors (``exkv.layers.latent``) of the layer that was added last, without
#: attention. Norms: of latent vectors, and of queries' low ranks or None. Weights, layouts and
#: biases: of queries, of what is stored, of the output, of queries' low ranks if they have a norm;
#: of what makes each head's keys, (rank, nope), and then of what makes each head's values,
#: (values, rank). ``rotated``: features of a head.
define_native(
    "add_latent(Tensor run, Tensor?[] norms, float[] eps, Tensor[] weights, int[] layouts, "
    "Tensor?[] biases, int heads, int rotated, int interleaved, int rotary, float scale, "
    "int window, Tensor[] stored, str format, int ring, bool hadamard, bool paged) -> ()"
)
#: More about the layer that was added last, before all else is added to it: whether it has no
#: attention, or no MLP; and of its attention, whether norms come after the rotation, the pair of a
#: call's factors of which the first multiplies queries (-1 for none), the size of chunks of
#: positions (0 for none), sinks (heads,), a matrix of gates and whether they are softplus's, a
#: factor of the input, and factors of the outputs of all its projections or none. See
#: ``exkv.layers.descriptions``.
define_native(
    "add_details(Tensor run, bool no_attention, bool no_mlp, bool normed_rotated, "
    "int query_factors, int chunk, Tensor? sinks, Tensor[] gates, int[] layout, bool soft_plus, "
    "float input_scale, float[] factors) -> ()"
)
#: Experts of the last added layer, which has no MLP. Weights, layouts and biases: of the router; of
#: the gate, up and down of each of ``experts`` but those ``elsewhere``, and of the shared expert if
#: ``shared``, without gates if not ``gated``; of the shared one's own gate, if it has one; and of
#: projections before and after experts if ``narrow``. Without the router's, the experts are for
#: ``chosen_of_run``. ``top_k`` and what follows: see ``route_experts``; ``weighs_inputs``: see
#: ``exkv.layers.descriptions.ExpertsBlock``; ``alpha`` and ``limit``: of ``clamped_swiglu_`` in
#: place of ``act``, if the limit is not 0.
define_native(
    "add_experts(Tensor run, Tensor[] weights, int[] layouts, Tensor?[] biases, "
    "Tensor? correction, str act, int experts, bool shared, int top_k, bool sigmoid, "
    "bool normalize, float min_sum, int groups, int top_k_groups, int best_of_group, float scale, "
    "bool gated=True, bool weighs_inputs=False, bool narrow=False, float alpha=0.0, "
    "float limit=0.0, int[] elsewhere=[]) -> ()"
)
#: A layer with a state, in the place of attention of the layer that was added last, without one, or
#: ``beside`` it: "delta" for ``gated_delta``, "ssd" for ``ssd``, "scan" for ``selective_scan``, or
#: "conv" for none, behind a causal convolution with SiLU, or without in the last case. Weights,
#: layouts, biases and factors: of its projections, the two of a scan's selection, and that of the
#: output. ``sources``: of each before these, an earlier one whose outputs it takes, or -1 for
#: the layer's input. ``outputs``: five numbers, a projection, an offset, a size, a step and a
#: count, for each of what the convolution's inputs are multiplied by, the gate, steps and betas,
#: -1 first where there are none; and of what is convolved, side by side. What follows: see
#: ``exkv.layers.descriptions.Recurrence``. States of all rows: ``inputs`` (B, K - 1, C) of the
#: convolution, and float32 (B, heads, keys, values), or (B, N, C) of a scan, whose rows may lie
#: apart.
define_native(
    "add_mixer(Tensor run, str rule, Tensor[] weights, int[] layouts, Tensor?[] biases, "
    "int[] sources, int[] outputs, Tensor conv, Tensor? conv_bias, Tensor? step_bias, "
    "Tensor? rates, Tensor? skip, Tensor[] norms, float eps, str gating, bool sigmoid, int groups, "
    "int order, float largest_beta, float least_step, float most_step, Tensor inputs, "
    "Tensor? state, float[] factors, float input_scale, bool beside) -> ()"
)
define_native(
    "add_head(Tensor run, Tensor norm, Tensor? norm_bias, float eps, int kind, Tensor[] weight, "
    "int[] layout, Tensor? bias) -> ()"
)
#: An adapter's change b (a x) to a projection of the last added layer, by its index in
#: ``add_layer`` (:data:`GATE` for the gate, :data:`VALUE` for queries' low ranks), or to the head
#: (:data:`HEAD`), for the rows [first, last) of a call; for all if last is -1. Changes of one
#: projection are added in the order of their rows.
HEAD = -1
QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN = range(7)
define_native(
    "add_low_rank(Tensor run, int projection, Tensor a, Tensor b, int first, int last) -> ()"
)
#: x: ids int64 (B, T) if there is an embedding, else (B, T, hidden). ``new_lens`` is None without
#: padding. Logits: 0 for none, 1 for each row's last token, 2 for all; without logits the result is
#: the hidden state. A layer without stores asks for attention (for all of it, if it has no
#: projections either), and one without gate, up and down or experts asks for its MLP: the call then
#: returns its space, and queries, keys and values, (B, T, heads * D), or the normed hidden state.
#: One with experts elsewhere asks for their part: for the normed hidden state, int64 choices and
#: float32 weights (B, T, K), what ``chosen_of_run`` returns for them.
#: It is resumed with the same arguments, the space, the answer, and ``at``, the number of questions
#: answered. ``block_table`` is int32 (B, pages), if a layer's stores are pools of pages; see
#: ``exkv.ops.pages``. Rows of one call may be consecutive tokens of one sequence: all are stored
#: before any attends. ``store_rows``, int32 (B,), then has the row of the stores of each, except
#: for pools of pages.
define_native(
    "bound_run(Tensor run, Tensor x, Tensor past_lens, Tensor? new_lens, int kv_len, "
    "Tensor[] factors, int logits, Tensor? space=None, Tensor? answer=None, int at=0, "
    "Tensor? block_table=None, Tensor? store_rows=None) -> Tensor[]"
)
#: Of a run whose only layer has experts without a router: x (..., hidden), int64 choices and
#: float32 weights (..., K) -> each choice's weighted and rounded output, (..., K, hidden),
#: undefined for experts elsewhere; or, if ``sum``, the sums that the op ``experts`` describes,
#: (..., hidden), where no chosen expert is elsewhere. All choices are added to ``counts``, int64
#: (experts,).
define_native(
    "chosen_of_run(Tensor run, Tensor x, Tensor chosen, Tensor weights, bool sum, "
    "Tensor(a!)? counts=None) -> Tensor"
)
define_native("release_run(Tensor run) -> ()")


class RunHandle:
    """A native run, released with its last reference, so that a current call ends first.

    Attributes:
        tensor: what ``new_run`` returned.
        most_tokens: of one call.
    """

    def __init__(self, dtype: torch.dtype, hidden: int) -> None:
        self.tensor = torch.ops.exkv.new_run(torch.empty(0, dtype=dtype), hidden)
        self.most_tokens = int(self.tensor[1])
        weakref.finalize(self, _release, self.tensor).atexit = False


def _release(run: torch.Tensor) -> None:
    """Release outside of any dispatch mode, under which the garbage collector may call this."""
    with _disable_current_modes():
        torch.ops.exkv.release_run.default(run)
