"""Holds every CUDA kernel against its reference with nothing but torch and exkv at hand.

``python tests/gpu/check_kernels.py DEVICE OUT.json``: with calls of ``tests/ops/hostile_calls.py``,
before these are changed. On a GPU it also measures at how much of a copy's bandwidth attention,
quantized weights and experts are read at decode; on ``cpu`` the emulated kernels stand in. Exits 1
where a difference is too large.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hostile_calls import MAKERS, WITHOUT_CUDA, Maker, tensors_in
from native_ops import WRITERS, OnCuda, load_emulated_ops
from torch import Tensor

from exkv.ops import REFERENCES
from exkv.weights import GroupFormat

NAMES = sorted(set(MAKERS) - WITHOUT_CUDA)
#: Calls of each op: emulated threads take their time.
CALLS = {"cpu": 5, "cuda": 40}
#: Of the largest value, where an op computes in 16 bits; others differ by the order of their sums.
TOLERANCE = 2e-2
#: Their references round weights to the inputs' type, the kernels don't: held against float32.
WIDE = {"linear_groups", "linears_groups", "linear_packed"}
#: Undefined at padding: tokens behind the real ones, which the last argument counts.
PADDED = {"gated_delta", "selective_scan", "ssd"}
ROUNDS = 20
#: What a call reads, and the call.
Reading = tuple[tuple[Tensor, ...], Callable[[], object]]


def ops_on(device: str) -> Any:
    if device != "cpu":
        return OnCuda()
    load_emulated_ops()
    return torch.ops.exkv_emulated


def largest_difference(name: str, seed: int, ops: Any) -> float:
    """Of one call's results, and of what it writes to, relative to the largest value."""
    torch.manual_seed(seed)
    given = MAKERS[name](Maker(random.Random(f"{name} {seed}")))
    expected_in, found_in = _copy(given), _copy(given)
    if name in WIDE:
        x, *packed, biases = expected_in
        expected_in = [x.float(), *packed, _floats(biases)]
    expected, found = REFERENCES[name](*expected_in), getattr(ops, name)(*found_in)
    if expected is None:
        expected, found = tensors_in(expected_in), tensors_in(found_in)
    if name in PADDED and (lens := given[-1]) is not None:
        real = torch.arange(expected.shape[1]) < lens.unsqueeze(-1)
        real = real.view(*real.shape, *[1] * (expected.dim() - 2))
        expected, found = (x.where(real, 0) for x in (expected, found))
    if name in WRITERS and isinstance(expected, Tensor):
        expected, found = [expected, *tensors_in(expected_in)], [found, *tensors_in(found_in)]
    pairs = zip(_listed(expected), _listed(found), strict=True)
    return max(_difference(one, other) for one, other in pairs)


def _copy(arguments: Any) -> Any:
    if isinstance(arguments, list):
        return [_copy(each) for each in arguments]
    return arguments.clone() if isinstance(arguments, Tensor) else arguments


def _floats(biases: Any) -> Any:
    if isinstance(biases, list):
        return [each.float() for each in biases]
    return None if biases is None else biases.float()


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _difference(expected: Tensor, found: Tensor) -> float:
    if expected.shape != found.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    expected, found = expected.double(), found.double()
    same = (expected == found) | (expected.isnan() & found.isnan())
    apart = (expected - found).abs().where(~same, 0)
    largest = torch.where(expected.isfinite(), expected, 0).abs().max()
    return float(apart.max() / largest.clamp(min=1))


def bandwidths(device: str) -> dict[str, float]:
    """What each call reads, as a share of what a copy moves: attention at decode over 32,000 keys,
    a linear layer's quantized weights for one row, and two experts' of eight."""
    matrix = torch.randn(14336, 4096, device=device, dtype=torch.bfloat16)
    copied = 2 * matrix.nbytes / _seconds(matrix.clone)
    calls = {**_attention_reads(device), **_weight_reads(matrix)}
    return {name: _bytes(read) / _seconds(call) / copied for name, (read, call) in calls.items()}


def _attention_reads(device: str) -> dict[str, Reading]:
    q = torch.randn(4, 1, 32, 128, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 4, 32000, 8, 128, device=device, dtype=torch.bfloat16)
    past = torch.full((4,), 31999, dtype=torch.int32, device=device)
    kv = (*torch.ops.exkv.quantize_kv(k), *torch.ops.exkv.quantize_kv(v))
    return {
        "keys of bfloat16": (
            (k, v),
            lambda: torch.ops.exkv.attention(q, k, v, past, 32000, True, 0.1),
        ),
        "keys of int8": (kv, lambda: torch.ops.exkv.attention_int8(q, *kv, past, 32000, 0.1)),
    }


def _weight_reads(matrix: Tensor) -> dict[str, Reading]:
    x = torch.randn_like(matrix[:1])
    calls: dict[str, Reading] = {}
    for bits in (4, 8):
        format = GroupFormat(bits=bits, group=64, scale=torch.float16)
        groups, many = list(format.groups), 8 // bits * 4  # more than the caches hold
        shape = (many, len(matrix) // 8, 4096 // 32, 32 * bits)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=matrix.device)
        scale = torch.rand(many, len(matrix), 64, device=matrix.device).half()
        layers = list(zip(codes, scale, strict=True))

        def multiply(layers: Any = layers, groups: list[int] = groups) -> None:
            for layer in layers:
                torch.ops.exkv.linear_groups(x, list(layer), groups, None)

        calls[f"weights of int{bits}"] = ((codes, scale), multiply)
    experts = [matrix.clone() for _ in range(4)]
    chosen = torch.tensor([[3, 1]], device=matrix.device)
    calls["experts"] = (
        (experts[3], experts[1]),
        lambda: torch.ops.exkv.expert_products(x, chosen, experts, []),
    )
    return calls


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _seconds(call: Any) -> float:
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(ROUNDS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / ROUNDS


def main(device: str, out: Path) -> int:
    ops, kind = ops_on(device), device.split(":")[0]
    errors = {}
    for name in NAMES:
        errors[name] = max(largest_difference(name, seed, ops) for seed in range(CALLS[kind]))
        print(f"{name}: {errors[name]:.2g}", flush=True)
    found = {"errors": errors, "bandwidths": bandwidths(device) if kind == "cuda" else {}}
    out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(not error <= TOLERANCE for error in errors.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
