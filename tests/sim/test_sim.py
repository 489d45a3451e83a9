"""The simulated accelerator: exact books, real errors, and the CPU's results bit for bit."""

from __future__ import annotations

import gc
import operator
import resource
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from apart import run_apart
from hypothesis import given
from hypothesis import strategies as st
from simproc import needs_sim, run_sim

from exkv import sim

pytestmark = needs_sim

K, M, G = 1 << 10, 1 << 20, 1 << 30


# --- sizes --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.sampled_from("BKMG")), min_size=1))
def test_sizes_are_read_back(pieces):
    units = {"B": 1, "K": K, "M": M, "G": G}
    text = ", ".join(f"{n}{'' if unit == 'B' else unit}" for n, unit in pieces)
    assert sim.parse_sizes(text) == [n * units[unit] for n, unit in pieces]
    assert sim.parse_sizes(text.lower()) == sim.parse_sizes(text)


@given(st.text(max_size=12))
def test_any_other_text_is_refused_or_gives_positive_sizes(text):
    try:
        sizes = sim.parse_sizes(text)
    except ValueError as error:
        assert "24G" in str(error) or "more bytes" in str(error)
    else:
        assert all(size > 0 for size in sizes)
        assert len(sizes) == text.count(",") + 1


@pytest.mark.parametrize("piece", ["0", "0G", "-1G", "", "24X", "G", "1.5", "1e9", "2 4G", "nan"])
def test_a_bad_size_is_named(piece):
    with pytest.raises(ValueError, match="sizes look like") as caught:
        sim.parse_sizes(f"24G,{piece},8G")
    assert repr(piece) in str(caught.value)


def test_fractions_and_suffixes():
    assert sim.parse_sizes("1.5G,64KiB,2MB,512B") == [3 * G // 2, 64 * K, 2 * M, 512]


@pytest.mark.parametrize(
    ("devices", "error"),
    [("0G", ValueError), ([-1], ValueError), ([], ValueError), ([1.5], TypeError),
     ([True], TypeError), (["1G"] * 65, ValueError), ([1 << 63], ValueError)],
)  # fmt: skip
def test_devices_that_make_no_sense_are_refused_before_anything_happens(devices, error):
    with pytest.raises(error):
        sim.enable(devices)
    assert not sim.enabled()


def test_faults_need_devices():
    with pytest.raises(RuntimeError, match="exkv.sim.enable first"):
        sim.fail_allocation(1)


def test_a_switch_in_the_environment_is_on_or_off(monkeypatch):
    monkeypatch.setenv("EXKV_SIM_DEVICES", "1G")
    monkeypatch.setenv("EXKV_SIM_DRY", "maybe")
    with pytest.raises(ValueError, match="EXKV_SIM_DRY='maybe'"):
        sim.enable_from_env()
    for wrong in ("two cards", "0", ",".join(["1G"] * 1000)):
        monkeypatch.setenv("EXKV_SIM_DEVICES", wrong)
        with pytest.raises(ValueError, match="^EXKV_SIM_DEVICES: "):  # it came from nowhere else
            sim.enable_from_env()
    assert not sim.enabled()


@pytest.mark.parametrize(
    "variables",
    [
        {"EXKV_SIM_DEVICES": "24X"},
        {"EXKV_SIM_DEVICES": f"1G,{1 << 70}"},
        {"EXKV_SIM_DEVICES": "1G", "EXKV_SIM_DRY": "maybe"},
        {"EXKV_SIM_DEVICES": "1G", "EXKV_SIM_ALLOCATOR": "fast"},
    ],
)
def test_a_bad_variable_ends_every_program_with_one_sentence(variables):
    done = run_apart("import exkv", **variables)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(list(variables)[-1]) and list(variables.values())[-1][-3:] in line


# --- books --------------------------------------------------------------------------------------


def _books():
    memory = torch.accelerator.memory_allocated
    seen = {
        "count": torch.accelerator.device_count(),
        "type": torch.accelerator.current_accelerator().type,
        "info": [torch.accelerator.get_memory_info(i) for i in range(3)],
    }
    odd = torch.empty(513, dtype=torch.uint8, device="sim:1")
    seen["rounded"] = (memory(0), memory(1), torch.accelerator.memory_reserved("sim:1"))
    rest = torch.accelerator.get_memory_info(1)[0]
    full = torch.empty(rest, dtype=torch.uint8, device="sim:1")
    seen["full"] = torch.accelerator.get_memory_info(1)
    seen["one too many"] = _oom(lambda: torch.empty(1, dtype=torch.uint8, device="sim:1"))
    del full
    seen["over by one"] = _oom(lambda: torch.empty(rest + 1, dtype=torch.uint8, device="sim:1"))
    seen["op over"] = _oom(odd.repeat(200, 1).repeat_interleave, 1000)
    seen["still there"] = memory(1)
    del odd
    seen["end"] = memory(1)
    seen["peak"] = torch.accelerator.max_memory_allocated(1)
    torch.accelerator.reset_peak_memory_stats(1)
    seen["peak after reset"] = torch.accelerator.max_memory_allocated(1)
    seen["ooms"] = torch.accelerator.memory_stats(1)["num_ooms"]
    seen["zero bytes"] = (torch.empty(0, device="sim:0").numel(), memory(0))
    seen["resized"] = _resized()
    seen["current"] = _current_device()
    seen["set_capacity"] = _capacity_at_run_time()
    seen["injected"] = _injected()
    seen["again"] = _enabled_again()
    return seen


def _oom(allocate, *args):
    try:
        allocate(*args)
    except torch.OutOfMemoryError as error:
        return str(error)


def _resized():
    t = torch.arange(100, device="sim:0")
    t.resize_(1000)
    grown = torch.accelerator.memory_allocated(0)
    out = torch.empty(0, device="sim:0")
    torch.add(torch.ones(300, device="sim:0"), 1, out=out)
    same = bool((t[:100].cpu() == torch.arange(100)).all()) and out.cpu().tolist() == [2.0] * 300
    t.untyped_storage().resize_(0)
    return grown, same, torch.accelerator.memory_allocated(0)


def _current_device():
    torch.accelerator.set_device_index(2)
    made = torch.ones(3, device="sim").device.index
    with torch.device("sim:1"):
        inner = torch.zeros(2).device.index
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return made, inner, torch.accelerator.current_device_index()


def _capacity_at_run_time():
    kept = torch.empty(1 * M, dtype=torch.uint8, device="sim:2")
    sim.set_capacity(2, 1 * M + 512)
    fits = torch.empty(512, dtype=torch.uint8, device="sim:2")
    del fits
    refused = _oom(lambda: torch.empty(513, dtype=torch.uint8, device="sim:2")) is not None
    sim.set_capacity(2, 1 * K)
    info = torch.accelerator.get_memory_info(2)
    sim.set_capacity(2, 8 * M)
    return kept.nbytes, refused, info


def _injected():
    before = sim.allocation_count()
    sim.fail_allocation(3)
    outcomes = [_oom(lambda: torch.empty(8, device="sim:0")) for _ in range(5)]
    sim.fail_allocation(1)
    sim.fail_allocation(None)
    outcomes.append(_oom(lambda: torch.empty(8, device="sim:1")))
    return [outcome is not None for outcome in outcomes], sim.allocation_count() - before


def _in_every_word():
    """What each error is, and that only the allocation that was meant fails."""
    found = {}
    for word in sim.MEMORY_ERRORS:
        pinned = word == "pinned"
        where = {"pin_memory": True} if pinned else {"device": "sim:1"}
        before, free = sim.allocation_count(pinned=pinned), torch.accelerator.get_memory_info(1)
        sim.fail_allocation(2, word)
        torch.empty(8, **where)
        try:
            torch.empty(8, **where)
        except RuntimeError as error:
            found[word] = [type(error).__name__, str(error), getattr(error, "error_code", None)]
        torch.empty(8, **where)
        assert sim.allocation_count(pinned=pinned) - before == 3
        assert torch.accelerator.get_memory_info(1) == free
    return found


def test_an_allocation_fails_in_every_librarys_words():
    found = run_sim(_in_every_word)
    kinds = {word: kind for word, (kind, _, _) in found.items()}
    assert kinds == {
        "torch": "OutOfMemoryError",
        "cublas": "RuntimeError",
        "runtime": "AcceleratorError",
        "launch": "RuntimeError",
        "pinned": "AcceleratorError",
    }
    assert "CUBLAS_STATUS_ALLOC_FAILED" in found["cublas"][1]
    assert "failed to launch: out of memory" in found["launch"][1]
    assert all(
        found[word][1].startswith("CUDA error: out of memory") for word in ("runtime", "pinned")
    )
    with pytest.raises(ValueError, match="error is 'none'"):
        sim.fail_allocation(1, "none")


def _touched():
    start = [sim.touches(index) for index in range(3)]
    torch.accelerator.device_count()
    torch.accelerator.memory_allocated(0)
    none = [sim.touches(index) for index in range(3)]
    torch.empty(3, device="sim:1")
    torch.accelerator.get_memory_info(2)
    sim.refuse(0, "CUDA error: busy")
    said = []
    for question in (
        lambda: torch.accelerator.get_memory_info(0),
        lambda: torch.empty(3, device="sim:0"),
    ):
        try:
            question()
        except torch.AcceleratorError as error:
            said.append(str(error))
    sim.refuse(0, None)
    torch.empty(3, device="sim:0")
    return start, none, [sim.touches(index) for index in range(3)], said


def test_what_makes_a_context_on_a_device_is_counted_and_can_be_refused():
    start, none, after, said = run_sim(_touched, "64M,64M,64M")
    assert start == none == [0, 0, 0]
    assert after == [3, 1, 1]
    assert said == ["CUDA error: busy"] * 2


def _enabled_again():
    sim.enable("64M,48M,8M")  # the same list: nothing happens
    sim.enable([64 * M, "48M", 8 * M])
    try:
        sim.enable("64M")
    except RuntimeError as error:
        return str(error)


@pytest.fixture(scope="module")
def books():
    return run_sim(_books, "64M,48M,8M")


def test_devices_answer_the_accelerator_api(books):
    assert (books["type"], books["count"]) == ("sim", 3)
    assert books["info"] == [[64 * M] * 2, [48 * M] * 2, [8 * M] * 2]
    assert books["current"] == [2, 1, 0]


def test_bytes_are_rounded_up_to_512_and_reserved_is_allocated(books):
    assert books["rounded"] == [0, 1024, 1024]


def test_out_of_memory_comes_at_the_byte_and_says_the_numbers(books):
    assert books["full"] == [0, 48 * M]
    assert books["one too many"] and books["over by one"]
    for words in ("sim:1", "Tried to allocate 1 bytes", "48.00 MiB", "(0 bytes) is free"):
        assert words in books["one too many"]


def test_an_op_whose_result_does_not_fit_raises_and_leaves_nothing(books):
    assert books["op over"] and books["still there"] == 1024


def test_memory_returns_to_zero_and_the_peak_is_remembered(books):
    assert books["end"] == 0
    assert (books["peak"], books["peak after reset"]) == (48 * M, 0)
    assert books["ooms"] == 3
    assert books["zero bytes"] == [0, 0]


def test_resizing_moves_contents_and_charges(books):
    # 8,000 bytes are 8,192; after all: the 300 floats of the out= tensor are 1,536.
    assert books["resized"] == [8192, True, 1536]


def test_capacity_can_shrink_below_what_is_in_use(books):
    assert books["set_capacity"] == [1 * M, True, [0, 1 * K]]


def test_an_injected_failure_hits_one_allocation(books):
    assert books["injected"] == [[False, False, True, False, False, False], 6]


def test_a_process_has_one_device_list(books):
    assert "one device list per process" in books["again"]


# --- between devices ----------------------------------------------------------------------------


def _between():
    seen = {}
    x = torch.randn(64, 3)
    a = x.to("sim:0")
    b = a.to("sim:1", non_blocking=True)
    seen["copies"] = torch.equal(b.cpu(), x) and b.device == torch.device("sim:1")
    seen["converted"] = torch.equal(torch.empty(3, 64, device="sim:1").half().copy_(a.T).cpu(),
                                    x.T.half())  # fmt: skip
    seen["traffic"] = sorted([*places, n] for places, n in sim.transfer_bytes().items())
    sim.reset_transfer_bytes()
    seen["reset"] = len(sim.transfer_bytes())
    seen["two devices"] = _error(lambda: a + b)
    seen["cpu and device"] = _error(lambda: torch.mm(a, x.T))
    seen["device into cpu"] = _error(lambda: torch.add(a, 1, out=torch.empty(64, 3)))
    seen["cpu indices"] = torch.equal(a[torch.tensor([5, 1])].cpu(), x[[5, 1]])
    seen["cpu generator"] = _error(
        lambda: torch.rand(3, device="sim:0", generator=torch.Generator())
    )
    seen["no device"] = _error(lambda: torch.empty(1, device="sim:7"))
    sim.copy_fault(0, 1, True)
    seen["fault"] = (int(a.to("sim:1").count_nonzero()), int(b.to("sim:0").count_nonzero()) > 0,
                     torch.equal(a.cpu().to("sim:1").cpu(), x))  # fmt: skip
    sim.copy_fault(0, 1, False)
    seen["no fault"] = torch.equal(a.to("sim:1").cpu(), x)
    pinned = torch.empty(100).pin_memory()
    seen["pinned"] = (pinned.is_pinned(), pinned[50:].is_pinned(), x.is_pinned())
    seen["threads"] = _from_threads(a)
    seen["streams"] = _streams()
    return seen


def _error(call, *args):
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)


def _from_threads(shared):
    def work(index):
        torch.accelerator.set_device_index(index % 2)
        for _ in range(200):
            made = torch.empty(1000, device="sim") + 1
            shared + 1
        return made.device.index

    used = torch.accelerator.memory_allocated(0), torch.accelerator.memory_allocated(1)
    with ThreadPoolExecutor(4) as pool:
        indices = list(pool.map(work, range(4)))
    now = torch.accelerator.memory_allocated(0), torch.accelerator.memory_allocated(1)
    return indices, torch.accelerator.current_device_index(), used == now


def _streams():
    stream = torch.Stream(device="sim:1")
    before = torch.accelerator.current_stream("sim:1")
    with stream:
        inside = torch.accelerator.current_stream("sim:1")
    event = torch.Event(device="sim:1")
    event.record(stream)
    event.synchronize()
    return inside == stream, torch.accelerator.current_stream("sim:1") == before, event.query()


@pytest.fixture(scope="module")
def between():
    return run_sim(_between)


def test_copies_cross_devices_and_convert(between):
    assert between["copies"] and between["converted"]


def test_traffic_is_counted_by_source_and_destination(between):
    assert between["traffic"] == [
        ["cpu", "sim:0", 768],
        ["sim:0", "sim:1", 768 + 384],
        ["sim:1", "cpu", 768 + 384],
    ]
    assert between["reset"] == 0


def test_tensors_of_different_devices_do_not_meet(between):
    assert "sim:0 and sim:1" in between["two devices"]
    assert "sim:0 and cpu" in between["cpu and device"]
    assert "sim:0 and cpu" in between["device into cpu"]
    assert "Expected a 'sim' device type for generator" in between["cpu generator"]
    assert "sim:7 does not exist" in between["no device"]
    assert between["cpu indices"]


def test_a_faulty_link_delivers_zeros_one_way_and_only_directly(between):
    assert between["fault"] == [0, True, True]
    assert between["no fault"]


def test_threads_have_their_own_current_device_and_share_the_books(between):
    assert between["threads"] == [[0, 1, 0, 1], 0, True]


def test_pinned_memory_streams_and_events_exist(between):
    assert between["pinned"] == [True, True, False]
    assert between["streams"] == [True, True, True]


# --- ops are the CPU's, bit for bit ---------------------------------------------------------------


def _same(a, b):
    """Equal in type, shape, strides and bits, for tensors, numbers and nests of them."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, torch.Tensor):
        return a == b
    bits = a.detach().contiguous(), b.detach().cpu().contiguous()
    return (
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and b.device.type == "sim"
        and torch.equal(*(t.view(torch.uint8) if t.numel() and t.ndim else t for t in bits))
    )


def _to(value, device):
    if isinstance(value, (tuple, list)):
        return type(value)(_to(v, device) for v in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _attention_cases(dtype):
    q, k, v = (torch.randn(2, h, t, 16).to(dtype) for h, t in ((4, 5), (2, 9), (2, 9)))
    mask = torch.rand(2, 1, 5, 9) > 0.3
    mask[..., 0] = True
    sdpa = F.scaled_dot_product_attention
    full = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return {
        "sdpa": (sdpa, (q, *full)),
        "sdpa causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), (q, *full)),
        "sdpa mask": (lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), (q, *full, mask)),
        "sdpa float mask": (
            lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
            (q, *full, torch.randn(5, 9).to(dtype)),
        ),
        "sdpa gqa": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), (q, k, v)),
        "sdpa gqa mask": (
            lambda q, k, v, m: sdpa(q, k, v, attn_mask=m, enable_gqa=True, scale=0.3),
            (q, k, v, mask),
        ),
    }


def _float_cases(dtype):
    x, w, b = (torch.randn(s).to(dtype) for s in ((3, 7, 32), (24, 32), (24,)))
    ones = torch.randn(32).to(dtype)
    y = torch.randn(3, 7, 32).to(dtype)
    return {
        "linear": (F.linear, (x, w, b)),
        "linear one row": (F.linear, (x[:1, :1], w)),
        "matmul": (torch.matmul, (x, y.transpose(1, 2))),
        "einsum": (lambda a, b: torch.einsum("btd,bsd->bts", a, b), (x, y)),
        "baddbmm": (torch.baddbmm, (x[:, :, :7], x, y.mT)),
        "softmax": (lambda t: t.softmax(-1), (x,)),
        "softmax float32": (lambda t: F.softmax(t, -1, dtype=torch.float32), (x,)),
        "log_softmax": (lambda t: t.log_softmax(-1), (x,)),
        "layer_norm": (lambda t, w: F.layer_norm(t, (32,), w, w), (x, ones)),
        "rms_norm": (lambda t, w: F.rms_norm(t, (32,), w, 1e-5), (x, ones)),
        "silu": (F.silu, (x,)),
        "gelu": (lambda t: F.gelu(t, approximate="tanh"), (x,)),
        "embedding": (F.embedding, (torch.tensor([[1, 0], [23, 5]]), w)),
        "arithmetic": (lambda a, b: (a * 2 + b / 3 - 1).pow(2).rsqrt(), (x, y)),
        "cpu scalar": (lambda a: a * torch.tensor(2.5) + torch.tensor(3), (x,)),
        "cat and stack": (lambda a, b: (torch.cat((a, b), 1), torch.stack((a, b))), (x, y)),
        "topk": (lambda t: tuple(t.topk(5)), (x,)),
        "sort": (lambda t: tuple(t.sort(dim=-1, stable=True)), (x,)),
        "cumsum": (lambda t: t.cumsum(-1), (x,)),
        "mean var": (lambda t: (t.mean(), *torch.var_mean(t, -1)), (x,)),
        "masked_fill": (lambda t: t.masked_fill(t > 0, float("-inf")), (x,)),
        "where": (lambda a, b: torch.where(a > b, a, 0.0), (x, y)),
        "rope": (lambda t: torch.cat((-t[..., 16:], t[..., :16]), -1) * t.cos(), (x,)),
        "casts": (lambda t: (t.double(), t.half(), t.bfloat16(), t.to(torch.int8)), (x,)),
    }


def _index_cases():
    cache, new = torch.randn(2, 10, 4), torch.randn(2, 3, 4)
    at = torch.tensor([7, 0, 3])
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([2, 9, 4])
    return {
        "index_copy_": (lambda c, n, i: c.index_copy_(1, i, n), (cache, new, at)),
        "index_put_": (lambda c, r, k, n: c.index_put_((r, k), n[0]), (cache, rows, columns, new)),
        "index_put_ adding": (
            lambda c, r, k, n: c.index_put_((r, k), n[0], accumulate=True),
            (cache, rows, columns, new),
        ),
        "setitem": (lambda c, r, k: c.__setitem__((r, k), 1.5) or c, (cache, rows, columns)),
        "bool index": (lambda c: c[c > 0], (cache,)),
        "gather": (lambda c, i: c.gather(1, i.view(1, 3, 1).expand(2, 3, 4)), (cache, at)),
        "scatter_": (
            lambda c, n, i: c.scatter_(1, i.view(1, 3, 1).expand(2, 3, 4), n),
            (cache, new, at),
        ),
        "scatter_add": (
            lambda c, n, i: c.scatter_add(1, i.view(1, 3, 1).expand(2, 3, 4), n),
            (cache, new, at),
        ),
        "index_select": (lambda c, i: c.index_select(1, i), (cache, at)),
        "take_along_dim": (lambda c: c.take_along_dim(c.argsort(1), 1), (cache,)),
        "slice copy": (lambda c, n: c[:, 4:7].copy_(n), (cache, new)),
        "roll": (lambda c: c.roll(-1, 1), (cache,)),
        "nonzero": (lambda c: c.gt(0).nonzero(), (cache,)),
    }


def _other_cases():
    x, ints = torch.randn(4, 6), torch.arange(-12, 12).view(4, 6)
    small = ints.to(torch.int8)
    return {
        "views": (lambda t: [t.T, t[1:, ::2], t.view(2, 12), t.unfold(1, 3, 2), t.chunk(2)], (x,)),
        "dtype view": (lambda t: t.view(torch.int32) ^ 1, (x,)),
        "expand": (lambda t: t[:, None].expand(4, 3, 6).reshape(12, 6), (x,)),
        "in place": (lambda t: t.mul_(2).add_(1).clamp_(-1, 1).t_(), (x,)),
        "in place on a view": (lambda t: (t[1:3].zero_(), t)[1], (x,)),
        "out=": (lambda t: torch.mm(t, t.T, out=t.new_empty(4, 4)), (x,)),
        "out= resized": (lambda t: torch.add(t, 1, out=t.new_empty(0)), (x,)),
        "int8": (lambda t: (t * 3, t.float() * 0.5, t // 2, t & 7, t << 1), (small,)),
        "int8 dequantized": (lambda q, s: q.to(torch.float32) * s[:, :1], (small, x)),
        "int8 matmul": (lambda q: torch._int_mm(q.repeat(6, 4), q.repeat(6, 4).T), (small,)),
        "reductions": (lambda t: (t.sum(), t.amax(1), t.argmax(1), t.any()), (ints,)),
        "item": (lambda t: [t[1, 2].item(), t.tolist(), bool((t > 3).any())], (ints,)),
        "tril": (lambda t: t.tril(-1), (ints,)),
        "foreach": (lambda t: torch._foreach_add([t, t * 2], 1), (x,)),
        "complex": (lambda t: torch.view_as_complex(t.view(4, 3, 2)).conj().mul(2j).abs(), (x,)),
        "conv1d": (lambda t: F.conv1d(t[None], t.view(3, 4, 2)), (x,)),
        "unique": (lambda t: t.abs().unique(return_counts=True), (ints,)),
        "searchsorted": (lambda t: torch.searchsorted(t[0], t), (ints,)),
        "wrapped types": (lambda t: (t * 1.5, t + True, t / 2), (small,)),
    }  # fmt: skip


def _random_cases():
    p = torch.rand(3, 20)
    return {
        "multinomial": lambda d, g: torch.multinomial(p.to(d), 4, generator=g),
        "randn": lambda d, g: torch.randn(33, device=d, generator=g),
        "uniform_": lambda d, g: torch.empty(5, 5, device=d).uniform_(generator=g),
        "exponential_": lambda d, g: torch.empty(40, device=d).exponential_(generator=g),
        "randperm": lambda d, g: torch.randperm(50, device=d, generator=g),
        "randint": lambda d, g: torch.randint(9, (7,), device=d, generator=g),
    }


def _factories():
    return {
        "arange": lambda d: torch.arange(3, 40, 2, device=d),
        "full": lambda d: torch.full((3, 3), -1.5, dtype=torch.bfloat16, device=d),
        "eye": lambda d: torch.eye(4, device=d),
        "linspace": lambda d: torch.linspace(0, 1, 9, device=d),
        "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
        "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
        "zeros_like": lambda d: torch.zeros_like(torch.empty(2, 3, device=d)),
        "new_ones": lambda d: torch.empty(2, device=d).new_ones(2, 2),
    }


def _different_ops():
    """Names of the cases that differ between the CPU and sim:0, and the bytes left behind."""
    torch.manual_seed(0)
    cases = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, case in {**_float_cases(dtype), **_attention_cases(dtype)}.items():
            cases[f"{name} {dtype}"] = case
    cases |= {**_index_cases(), **_other_cases()}
    differing = []
    with torch.no_grad():
        for name, (function, arguments) in cases.items():
            ours = tuple(argument.clone() for argument in arguments)
            theirs = _to(arguments, "sim:0")
            if not _same(function(*ours), function(*theirs)):
                differing.append(name)
            if not _same(ours, theirs):  # an op in place writes to both, or to neither
                differing.append(f"{name}: arguments")
        for name, function in _random_cases().items():
            drawn = [
                function(d, torch.Generator(device=d).manual_seed(5)) for d in ("cpu", "sim:0")
            ]
            if not _same(*drawn):
                differing.append(name)
        for name, function in _factories().items():
            if not _same(function("cpu"), function("sim:0")):
                differing.append(name)
    theirs = drawn = None
    return differing, len(cases), torch.accelerator.memory_allocated(0)


def test_ops_are_bit_identical_to_the_cpu():
    differing, count, left = run_sim(_different_ops)
    assert differing == []
    assert count > 100
    assert left == 0


# --- whole models -------------------------------------------------------------------------------


def _llama_on_a_device():
    import tiny

    model = tiny.reference(tiny.llama())
    ids = torch.randint(3, 300, (2, 17))
    with torch.no_grad():
        expected = [model(ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False)]
        weights = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
        model.to("sim:0")
        buffers = sum(-(-b.nbytes // 512) * 512 for b in model.buffers())
        used = torch.accelerator.memory_allocated(0)
        there = ids.to("sim:0")
        seen = [model(there).logits, model.generate(there, max_new_tokens=5, do_sample=False)]
    same = [torch.equal(a, b.cpu()) for a, b in zip(expected, seen, strict=True)]
    del model, there, seen
    gc.collect()
    return same, used == weights + buffers, torch.accelerator.memory_allocated(0)


def test_a_llama_gives_the_same_bits_and_leaves_nothing():
    same, exact, left = run_sim(_llama_on_a_device)
    assert same == [True, True]
    assert exact
    assert left == 0


def _attention_block(x, weights, cache, start):
    """One attention layer over a preallocated cache: the workspace that a planner asks about."""
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, 16)).transpose(1, 2) for w in weights[:3])
    at = torch.arange(start, start + x.shape[1], device=x.device)
    cache[0].index_copy_(2, at, k)
    cache[1].index_copy_(2, at, v)
    keys = torch.arange(cache[0].shape[2], device=x.device)
    mask = keys <= at[:, None]
    out = F.scaled_dot_product_attention(q, *cache, attn_mask=mask, enable_gqa=True)
    return x + F.linear(F.rms_norm(out.transpose(1, 2).flatten(2), (64,)), weights[3])


def _block_inputs(dtype, device):
    shapes = (2, 24, 64), [(64, 64), (32, 64), (32, 64), (64, 64)], [(2, 2, 96, 16)] * 2
    make = partial(torch.zeros, dtype=dtype, device=device)
    return make(shapes[0]), [make(s) for s in shapes[1]], [make(s) for s in shapes[2]], 40


def _injected_everywhere():
    """The block with a failure at each of its allocations in turn, under both grad modes."""
    inputs = _block_inputs(torch.float32, "sim:0")
    clean = torch.accelerator.memory_allocated(0)
    rows = []
    for mode in (torch.no_grad, torch.inference_mode):
        before = sim.allocation_count()
        with mode():
            _attention_block(*inputs)
        points = sim.allocation_count() - before
        failed = 0
        for n in range(1, points + 1):
            sim.fail_allocation(n)
            with mode():
                failed += _oom(_attention_block, *inputs) is not None
            assert torch.accelerator.memory_allocated(0) == clean, n
        with mode():
            completed = _oom(_attention_block, *inputs) is None
        rows.append((points, failed, completed))
    return rows


def test_a_failure_at_any_allocation_leaves_no_byte_behind():
    for points, failed, completed in run_sim(_injected_everywhere):
        assert points > 15
        assert failed == points
        assert completed


def _temporaries():
    x = torch.ones(64, 2048, device="sim:0", dtype=torch.bfloat16)
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    q = x.view(1, 64, 8, 256).transpose(1, 2)
    with torch.no_grad():
        out = F.scaled_dot_product_attention(q, q, q)
    peak = torch.accelerator.max_memory_allocated(0) - before
    result = out.untyped_storage().nbytes()
    del x, q, out
    return peak, result, torch.accelerator.memory_allocated(0)


def test_temporaries_of_kernels_are_charged_on_request_only():
    # The other allocation is the row sums: 64 x 8 floats, 2,048 bytes.
    peak, result, left = run_sim(_temporaries)
    assert (peak, left) == (result + 2048, 0)
    peak, result, left = run_sim(_temporaries, env={"EXKV_SIM_CHARGE_TEMPORARIES": "1"})
    assert peak > result + 2048
    assert left == 0


# --- dry mode -----------------------------------------------------------------------------------


def _seventy_billion():
    """80 layers of Llama-3-70B's shapes with a cache of 32k tokens over three devices."""
    hidden, inner, heads, kv_heads, dim, length, chunk = 8192, 28672, 64, 8, 128, 32768, 256
    make = partial(torch.empty, dtype=torch.bfloat16)
    layers = []
    for i in range(80):
        device = f"sim:{min(i // 27, 2)}"
        sizes = [(heads * dim, hidden), *[(kv_heads * dim, hidden)] * 2, (hidden, heads * dim)]
        sizes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        weights = [make(size, device=device) for size in sizes]
        cache = [torch.zeros(1, kv_heads, length, dim, dtype=torch.bfloat16, device=device)] * 2
        layers.append((weights, cache))
    loaded = [torch.accelerator.memory_allocated(i) for i in range(3)]
    x = make(1, chunk, hidden, device="sim:0")
    with torch.no_grad():
        for weights, cache in layers:
            x = _dry_layer(x.to(weights[0].device), weights, cache, dim)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seen = {"shape": list(x.shape), "dry": sim.is_dry(x), "item": x[0, 0, 0].item()}
    seen["on the host"] = x[:, -1].cpu().abs().max().item()
    seen["mask"] = _error(operator.getitem, x, x > 0)
    del x, layers, weights, cache
    left = [torch.accelerator.memory_allocated(i) for i in range(3)]
    return {**seen, "loaded": loaded, "host": used, "left": left}


def _dry_layer(x, weights, cache, dim):
    h = F.rms_norm(x, x.shape[-1:])
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, dim)).transpose(1, 2) for w in weights[:3])
    at = torch.arange(x.shape[1], device=x.device)
    cache[0].index_copy_(2, at, k)
    cache[1].index_copy_(2, at, v)
    out = F.scaled_dot_product_attention(q, *cache, enable_gqa=True)
    x = x + F.linear(out.transpose(1, 2).flatten(2), weights[3])
    return x + F.linear(F.silu(F.linear(x, weights[4])) * F.linear(x, weights[5]), weights[6])


def test_a_70b_model_is_placed_and_probed_without_its_memory():
    seen = run_sim(_seventy_billion, "48G,48G,80G", env={"EXKV_SIM_DRY": "1"}, fresh=True)
    assert sum(seen["loaded"]) > 128 * G
    assert seen["host"] < 1.5 * G
    assert seen["shape"] == [1, 256, 8192] and seen["dry"]
    assert seen["item"] == seen["on the host"] == 0
    assert "dry mode" in seen["mask"] and "aten::index" in seen["mask"]
    assert seen["left"] == [0, 0, 0]


def _small_in_dry_mode():
    x = torch.randn(8, 8)
    small = x.to("sim:0")
    over = torch.empty(48 * K // 4, device="sim:0")
    grown = torch.cat((over, over))
    oom = _oom(lambda: torch.empty(2 * M, dtype=torch.uint8, device="sim:0"))
    kinds = [sim.is_dry(t) for t in (small, over, grown, grown[:2], x)]
    out = torch.add(grown, 1, out=torch.empty(0, device="sim:0"))  # a number, and a resize
    picked = grown.view(2, -1).argmax(-1).tolist()  # small again, so zeros that can be read
    shapes = [list(t.shape) for t in (out, grown.view(-1, 64).topk(3).indices, grown[:5])]
    unsupported = _error(grown.unique)
    return torch.equal((small @ small).cpu(), x @ x), kinds, oom, picked, shapes, unsupported


def test_small_tensors_stay_real_in_dry_mode_and_capacities_hold():
    same, kinds, oom, picked, shapes, unsupported = run_sim(
        _small_in_dry_mode, "1M", env={"EXKV_SIM_DRY": "1"}
    )
    assert same and "sim:0" in oom
    assert kinds == [False, False, True, True, False]
    assert picked == [0, 0]
    assert shapes == [[24576], [384, 3], [5]]
    assert "dry mode" in unsupported


def test_without_devices_nothing_is_enabled():
    assert run_sim("result = [sim.enabled(), torch.accelerator.is_available()]", "")[0] is False
