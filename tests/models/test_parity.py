"""exkv against transformers on random checkpoints of every architecture: logits, greedy tokens."""

from __future__ import annotations

import pytest
import torch
from on_cpu import on_cpu
from tiny import (
    GEMMA4_EXPERTS,
    GEMMA4_SHARED,
    LATENT_YARN,
    RELATIVES,
    TINY,
    WINDOW,
    cast,
    gemma2,
    gemma3,
    gemma4,
    is_mixture,
    llama,
    longrope,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    reference,
    save,
)

from exkv import Cache, Model
from exkv.checkpoint.families import FAMILIES

CONFIGS = {
    "llama-mha": llama(num_key_value_heads=8),
    "llama-gqa4": llama(num_key_value_heads=2),
    "llama-mqa": llama(num_key_value_heads=1),
    "llama-tied": llama(tie_word_embeddings=True),
    "llama-attention_bias": llama(attention_bias=True),
    "llama-mlp_bias": llama(mlp_bias=True),
    "llama-linear": llama("linear"),
    "llama-llama3": llama("llama3"),
    "llama-yarn": llama("yarn"),
    "llama-wide_heads": llama(head_dim=80),
    "llama-gelu": llama(hidden_act="gelu_pytorch_tanh"),
    "mistral": mistral(),
    "mistral-no_window": mistral(sliding_window=None),
    "mixtral": mixtral(),
    "mixtral-window": mixtral(sliding_window=WINDOW, num_local_experts=8, num_experts_per_tok=3),
    "qwen2": qwen2(),
    "qwen2-window": qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": qwen3(),
    "qwen3-window": qwen3(
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, attention_bias=True
    ),
    "phi3": phi3(),
    "phi3-window": phi3(sliding_window=WINDOW, tie_word_embeddings=True),
    "phi3-partial": phi3(partial_rotary_factor=0.75),
    # Prompts are longer than the trained length, or outgrow it while tokens are generated.
    "phi3-longrope": phi3(**longrope(trained=64)),
    "phi3-outgrown": phi3(**longrope(trained=110, attention_factor=1.1)),
    "phi3-partial_longrope": phi3(**longrope(width=6, trained=64), partial_rotary_factor=0.75),
    "gemma2": gemma2(),
    "gemma2-no_caps": gemma2(attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma2-untied": gemma2(tie_word_embeddings=False, attention_bias=True),
    "gemma3": gemma3(),
    "gemma3-cap": gemma3(final_logit_softcapping=5.0),
}
CONFIGS["gemma4-experts"] = gemma4(**GEMMA4_EXPERTS)
CONFIGS["gemma4-untied"] = gemma4(tie_word_embeddings=False, attention_bias=True)
CONFIGS["gemma4-embeddings"] = gemma4(hidden_size_per_layer_input=8, vocab_size_per_layer_input=320)
CONFIGS["gemma4-shared_keys"] = gemma4(**GEMMA4_SHARED)
CONFIGS["gemma3n-unscaled"] = TINY["Gemma3nForCausalLM"](
    altup_correct_scale=False, altup_active_idx=0, num_kv_shared_layers=0, attention_bias=True
)
CONFIGS["olmoe-clip_qkv"] = TINY["OlmoeForCausalLM"](clip_qkv=0.05)
CONFIGS["cohere-qk_norm"] = TINY["CohereForCausalLM"](use_qk_norm=True, attention_bias=True)
CONFIGS["deepseek_v2-lite"] = TINY["DeepseekV2ForCausalLM"](q_lora_rank=None, topk_method="greedy")
CONFIGS["deepseek_v3-kimi"] = TINY["DeepseekV3ForCausalLM"](
    attention_bias=True,
    rope_interleave=False,
    n_group=1,
    rope_parameters={
        **LATENT_YARN["rope_parameters"],
        **{"mscale": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
    },
)
CONFIGS["llama4-two_experts"] = TINY["Llama4ForCausalLM"](
    num_experts_per_tok=2, moe_layers=None, interleave_moe_layer_step=2, use_qk_norm=False,
    attn_temperature_tuning=False, attention_bias=True,
)  # fmt: skip
CONFIGS["laguna-per_element"] = TINY["LagunaForCausalLM"](
    gating="per-element", moe_router_logit_softcapping=0.0, attention_bias=True
)
CONFIGS["granite4-dense"] = TINY["GraniteMoeHybridForCausalLM"](
    num_local_experts=0, num_experts_per_tok=0, tie_word_embeddings=True, mamba_proj_bias=True,
    mamba_conv_bias=False,
)  # fmt: skip
CONFIGS["granite4-micro"] = TINY["GraniteMoeHybridForCausalLM"](
    num_local_experts=0, num_experts_per_tok=0, layer_types=["full_attention"] * 2,
    position_embedding_type="rope",
)  # fmt: skip
CONFIGS["nemotron3-latent"] = TINY["NemotronHForCausalLM"](
    moe_latent_size=32, mlp_bias=True, use_bias=True, use_conv_bias=False, n_group=1,
    norm_topk_prob=False,
)  # fmt: skip
CONFIGS |= {
    f"falcon_h1-norm_{kind}": TINY["FalconH1ForCausalLM"](
        mamba_rms_norm=True, mamba_norm_before_gate=kind == "first", attention_bias=True,
        mlp_bias=True, mamba_proj_bias=True, projectors_bias=kind == "first",
    )
    for kind in ("first", "last")
}  # fmt: skip
CONFIGS["mimo-unscaled"] = TINY["MiMoV2FlashForCausalLM"](
    attention_value_scale=None, attention_bias=True, mlp_layer_types=["sparse", "sparse"]
)
CONFIGS |= {name: TINY[name]() for name in TINY if name in RELATIVES}
PROMPT, NEW = 90, 64


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """transformers' model and exkv's, of one checkpoint."""
    theirs = reference(CONFIGS[request.param])
    folder = save(theirs, tmp_path_factory.mktemp(request.param))
    ours = on_cpu(folder, max_input_len=32)
    return theirs, ours


def prompt(rows: int = 1, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, 320, (rows, length), generator=torch.Generator().manual_seed(1))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def greedy(model: Model, cache: Cache, ids: torch.Tensor, steps: int) -> list[int]:
    tokens = []
    for _ in range(steps):
        ids = model.forward(ids, cache, last_id_only=True)[:, 0].argmax(-1, keepdim=True).cpu()
        tokens.append(ids.item())
    return tokens


@pytest.mark.sweep(24)
@torch.no_grad()
def test_fp32_logits_agree_with_a_cache_in_chunks_and_without_one(pair):
    theirs, ours = pair
    ids = prompt(rows=2)
    expected = theirs(ids).logits
    cache = Cache(ours, batch_size=2)
    assert relative_error(ours.forward(ids, cache), expected) < 1e-4
    assert relative_error(ours.forward(ids), expected) < 1e-4
    cache.reset()
    end = 0
    for part in ids.split([1, 40, 7, 42], dim=1):
        end += part.shape[1]
        # For the text so far: with longrope, later tokens change earlier ones.
        expected = theirs(ids[:, :end]).logits[:, -part.shape[1] :]
        assert relative_error(ours.forward(part, cache), expected) < 1e-4


@pytest.mark.sweep(24)
def test_64_greedy_tokens_are_transformers_own(pair):
    theirs, ours = pair
    expected = theirs.generate(
        prompt(), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert greedy(ours, Cache(ours), prompt(), NEW) == expected[0, PROMPT:].tolist()


@pytest.mark.sweep(12)
@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_as_near_to_fp32_as_transformers_bf16(tmp_path, name):
    """The plain low-precision path sets the tolerance, twice its own error at most. Where experts
    are chosen by ratings a hair apart, rounding may choose others, which gives that token quite
    another answer: there the tokens in the middle tell, and not the worst."""
    theirs = reference(TINY[name](), torch.bfloat16)
    ours = Model(save(theirs, tmp_path))
    assert ours.dtype == torch.bfloat16
    ours.load(devices=["cpu"])
    ids = prompt()
    plain = theirs(ids).logits.float()
    exact = cast(theirs, torch.float32)(ids).logits
    mine = ours.forward(ids, Cache(ours)).float()
    errors = [(logits - exact).abs().amax(-1) for logits in (mine, plain)]  # (1, T)
    measure = torch.median if is_mixture(name) else torch.max
    assert measure(errors[0]) <= 2 * measure(errors[1])


@torch.no_grad()
@pytest.mark.parametrize("seed", range(6))
def test_bf16_greedy_tokens_are_transformers_best_or_tied_with_it(tmp_path, seed):
    """Given the same text. A random model's logits are often one unit in the last place apart, and
    then the order of summation decides, which is the kernels' own; in float32 above, the tokens
    are the same."""
    theirs = reference(llama(), torch.bfloat16, seed)
    ours = on_cpu(save(theirs, tmp_path))
    tokens = greedy(ours, Cache(ours), prompt(), NEW)
    text = torch.cat((prompt(), torch.tensor([tokens])), dim=1)
    logits = theirs(text).logits[0, PROMPT - 1 : -1].float()
    best, chosen = logits.max(-1).values, logits[torch.arange(NEW), tokens]
    assert ((best - chosen) / best.abs()).max().item() <= 2 * torch.finfo(torch.bfloat16).eps


@torch.no_grad()
def test_fp16_checkpoint_and_a_dtype_of_ones_own(tmp_path):
    theirs = reference(llama(), torch.float16)
    folder = save(theirs, tmp_path)
    assert Model(folder).dtype == torch.float16
    wide = on_cpu(folder, dtype=torch.float32)
    expected = cast(theirs, torch.float32)(prompt()).logits
    assert relative_error(wide.forward(prompt(), Cache(wide)), expected) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RELATIVES])
def test_every_architecture_of_the_table_gives_transformers_logits(tmp_path, name):
    """A new line of the table fails here until the architecture has a tiny config."""
    theirs = reference(TINY[name]())
    ours = Model(save(theirs, tmp_path), max_input_len=32)
    assert ours.config.architecture == name
    layers = range(theirs.config.num_hidden_layers)
    assert [unit.spec.layer for unit in ours.units] == [None, *layers, None]
    ours.load(devices=["cpu"])
    assert relative_error(ours.forward(prompt(), Cache(ours)), theirs(prompt()).logits) < 1e-4


@torch.no_grad()
def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path):
    theirs = reference(llama())
    folder = save(theirs, tmp_path, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ours = on_cpu(folder)
    assert relative_error(ours.forward(prompt(), Cache(ours)), theirs(prompt()).logits) < 1e-4


@pytest.mark.sweep(24)
@torch.no_grad()
def test_rows_of_unlike_length_give_what_each_gives_alone(pair):
    theirs, ours = pair
    lengths = [70, 1, 33]
    ids = prompt(rows=3, length=70)
    cache = Cache(ours, batch_size=4)
    last = ours.forward(ids, cache, new_lens=lengths, last_id_only=True)
    assert cache.seq_lens == [*lengths, 0]
    follow = torch.tensor([[5], [6], [7]])
    then = ours.forward(follow, cache)
    for row, length in enumerate(lengths):
        alone = torch.cat((ids[row : row + 1, :length], follow[row : row + 1]), dim=1)
        assert relative_error(last[row, 0], theirs(alone[:, :-1]).logits[0, -1]) < 1e-4
        assert relative_error(then[row, 0], theirs(alone).logits[0, -1]) < 1e-4
