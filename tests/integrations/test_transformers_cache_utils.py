"""The checks of transformers' ``tests/utils/test_cache_utils.py``, with stock caches and exkv's.

Written anew, with the demo model in place of downloads: what is asserted as a text there is
compared with ``use_cache=False`` here. Its tests on accelerators (of "offloaded" by stock caches)
are not here; that of allocating ahead is in ``test_transformers_graphs.py``, those of classes of
layers in ``test_transformers_classes.py``, of exporting a cache in
``test_transformers_exporting.py``.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import TINY, llama, reference
from transformers import Cache, DynamicCache, GenerationConfig, QuantizedCache, StaticCache
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.integrations import executorch

from exkv.cache import CACHES
from exkv.integrations.transformers import HFCache, disable, enable
from exkv.integrations.transformers.versions import BaseQuantizedLayer

DEMO = "examples/demo-model"
#: Stock caches of these kinds need CUDA, or a package that isn't installed.
EXKV_ONLY = {name for name in ALL_CACHE_IMPLEMENTATIONS if "offloaded" in name} | {"quantized"}
PROMPTS = [[1, 40, 41, 42, 43, 44], [1, 60, 61]]


@pytest.fixture(params=["stock", "exkv"])
def side(request):
    """Whether stock caches or exkv's are tested."""
    if request.param == "exkv":
        enable(every_name=True)
    yield request.param
    disable()


@pytest.fixture(scope="module")
def demo():
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    model.config.sliding_window = 256  # for sliding layers
    return model


def static(side, config, length):
    if side == "stock":
        return StaticCache(config, max_cache_len=length)
    return HFCache(config, "static", max_cache_len=length)


def dynamic(side, config):
    return DynamicCache(config=config) if side == "stock" else HFCache(config, "dynamic")


# Shapes and contents ------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [32, 4, 1])
def test_static_cache_of_any_number_of_heads(side, heads):
    config = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=heads)
    found = static(side, config, 10).update(*torch.rand((2, 1, heads, 1, 128)), 0)
    assert [tensor.shape for tensor in found] == [(1, heads, 10, 128)] * 2


def layers(*kinds, window=4):
    """A config with one layer of each kind, with one head of width 1."""
    return transformers.Gemma2Config(
        num_hidden_layers=len(kinds), num_key_value_heads=1, num_attention_heads=1, head_dim=1,
        hidden_size=1, sliding_window=window, attention_chunk_size=window, layer_types=list(kinds),
    )  # fmt: skip


def updated(cache, layer, *values):
    """The result of an update with these values, and the layer's contents after it."""
    tokens = torch.tensor(values, dtype=torch.float32)[None, None, :, None]
    found = cache.update(tokens, tokens, layer)
    return [tensor.flatten().tolist() for tensor in (found[0], cache.layers[layer].keys)]


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
#: Kind, window, steps of (values, returned, stored); None if it isn't checked.
STEPS = {
    "full": (FULL, 4, [((1, 2), None, [1, 2, 0, 0]), ((3,), None, [1, 2, 3, 0]),
                       ((4,), None, [1, 2, 3, 4])]),
    "within the window": (SLIDING, 4, [((1, 2), None, None), ((3,), None, [1, 2, 3, 0])]),
    "slides": (SLIDING, 4, [((1, 2, 3, 4), None, None), ((5,), None, [2, 3, 4, 5]),
                            ((6,), None, [3, 4, 5, 6])]),
    "long prompt": (SLIDING, 4, [((1, 2, 3, 4, 5, 6), None, [3, 4, 5, 6])]),
    "chunks": (CHUNKED, 2, [((10, 20, 30), [10, 20, 30], [20, 30]), ((50,), [30, 50], [30, 50]),
                            ((60, 70), [50, 60, 70], [60, 70])]),
    "across the chunk": (CHUNKED, 3, [((10, 20), [10, 20, 0], [10, 20, 0]),
                                      ((30, 40), [10, 20, 30, 40], [20, 30, 40])]),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_static_layer_stores_and_returns(side, case):
    kind, window, steps = STEPS[case]
    cache = static(side, layers(kind, window=window), 4)
    for values, returned, stored in steps:
        found = updated(cache, 0, *values)
        for expected, got in zip((returned, stored), found, strict=True):
            assert expected is None or got == expected


def test_full_static_layer_is_out_of_bounds(side):
    cache = static(side, layers(FULL), 4)
    updated(cache, 0, 1, 2, 3, 4)
    with pytest.raises(IndexError):
        updated(cache, 0, 5)


@pytest.mark.parametrize("kind", [SLIDING, CHUNKED])
def test_layers_of_two_kinds(side, kind):
    cache = static(side, layers(FULL, kind, window=2), 4)
    assert updated(cache, 0, 1, 2, 3) == [[1, 2, 3, 0]] * 2
    assert updated(cache, 1, 10, 20, 30) == [[10, 20, 30], [20, 30]]
    assert updated(cache, 0, 5)[1] == [1, 2, 3, 5]
    assert updated(cache, 1, 50)[1] == [30, 50]


@pytest.mark.parametrize("count", [1, 2])
def test_dynamic_cache_of_layers(side, count):
    cache = dynamic(side, layers(*[FULL] * count))
    for values in ((1, 2), (3,), (4,)):
        for layer in range(count):
            stored = updated(cache, layer, *(10**layer * value for value in values))[1]
    assert [value / 10 ** (count - 1) for value in stored] == [1, 2, 3, 4]
    assert cache.layers[0].keys.flatten().tolist() == [1, 2, 3, 4]


# generate -----------------------------------------------------------------------------------


def generated(model, prompts, *, width=6, **options):
    """Tokens generated after prompts that are left-padded to ``width``."""
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    call = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    call |= {"attention_mask": mask, "return_dict_in_generate": True, **options}
    out = model.generate(ids, **call)
    return out, out.sequences[:, width:].tolist()


@pytest.mark.parametrize("name", ALL_CACHE_IMPLEMENTATIONS)
def test_generate_by_name(side, demo, name):
    """In a batch, with beams, and with more padding than needed."""
    if side == "stock" and name in EXKV_ONLY:
        pytest.skip("stock caches of this name need CUDA, or optimum-quanto")
    kind = {"cache_implementation": name}
    for how in ({}, {"num_beams": 2, "num_return_sequences": 2}, {"width": 32}):
        out, found = generated(demo, PROMPTS, **kind, **how)
        assert isinstance(out.past_key_values, Cache)
        assert name == "quantized" or found == generated(demo, PROMPTS, use_cache=False, **how)[1]
        if how.get("num_beams"):  # beams change places: the cache was reordered
            assert any(len(set(row)) > 1 for row in out.beam_indices.tolist())


@pytest.mark.parametrize("backend, axis", [("quanto", 0), ("HQQ", 1)])
def test_generate_with_quantized_settings(side, demo, backend, axis):
    if side == "stock":
        pytest.skip("stock caches of this kind need optimum-quanto or hqq")
    settings = {"backend": backend, "nbits": 4, "q_group_size": 16, "residual_length": 4}
    settings |= {"axis_key": axis, "axis_value": axis}
    kind = {"cache_implementation": "quantized", "cache_config": settings}
    out, found = generated(demo, PROMPTS[:1], **kind)
    assert isinstance(out.past_key_values, QuantizedCache)
    assert found == generated(demo, PROMPTS[:1], use_cache=False)[1]


def test_quantized_cache_has_quantized_layers():
    for kind in (*CACHES, "static", "quantized"):
        cache = HFCache(llama(), kind, max_seq_len=30)
        assert isinstance(cache, QuantizedCache) == isinstance(cache.layers[0], BaseQuantizedLayer)


# torch.export -------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_export_with_a_static_cache(side, name):
    model = reference(TINY[name](eos_token_id=None))
    settings = {"batch_size": 1, "max_cache_len": 23, "device": "cpu"}
    model.generation_config = GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=23, cache_config=settings
    )
    module = executorch.TorchExportableModuleForDecoderOnlyLM(model, 1, 23)
    program = module.export(input_ids=torch.tensor([[1]]), cache_position=torch.tensor([0]))
    for kind in ("key_cache", "value_cache"):
        buffers = [each for at, each in program.named_buffers() if at.startswith(kind)]
        assert len(buffers) == model.config.num_hidden_layers
        assert all(each.shape[0] == 1 for each in buffers)
