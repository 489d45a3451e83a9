"""Programs in the words of Hugging Face's guides, whose import line alone changes.

Each is run as it stands with transformers' classes, then with exkv's; both must give the same.
"""

from __future__ import annotations

import pytest
import tokenizers
import torch
import transformers
from tiny import llama, reference, save

THEIRS = "from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig"
OURS = (
    "from exkv import Model as AutoModelForCausalLM, Tokenizer as AutoTokenizer, GenerationConfig"
)
LOADED = """
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
inputs = tokenizer("Anna put the key in the kitchen.", return_tensors="pt").to(model.device)
"""

PROGRAMS = {
    "greedy": """
out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
result = tokenizer.batch_decode(out, skip_special_tokens=True)[0]
""",
    "to and eval": """
model = model.to("cpu").eval()
result = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False).tolist()
""",
    "a batch padded on the left": """
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
texts = ["Anna put the key in the", "The bag is"]
inputs = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
out = model.generate(**inputs, max_new_tokens=6, do_sample=False,
                     pad_token_id=tokenizer.pad_token_id)
result = inputs["input_ids"].tolist(), tokenizer.batch_decode(out, skip_special_tokens=True)
""",
    "sampled": """
torch.manual_seed(7)
out = model.generate(**inputs, max_new_tokens=8, do_sample=True, temperature=0.8, top_k=20)
result = out.tolist()
""",
    "beams with scores": """
out = model.generate(**inputs, max_new_tokens=6, num_beams=3, num_return_sequences=2,
                     do_sample=False, return_dict_in_generate=True, output_scores=True)
result = out.sequences.tolist(), [round(float(x), 3) for x in out.sequences_scores]
""",
    "a generation config": """
config = GenerationConfig(max_new_tokens=5, do_sample=False, repetition_penalty=1.2,
                          eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)
result = model.generate(**inputs, generation_config=config).tolist()
""",
    "prompt lookup": """
out = model.generate(**inputs, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)
result = out.tolist()
""",
    "stop strings": """
out = model.generate(**inputs, max_new_tokens=12, do_sample=False, stop_strings=["."],
                     tokenizer=tokenizer)
result = out.tolist()
""",
    "a chat template": """
messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where is it?"}]
encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True,
                                        return_tensors="pt", return_dict=True).to(model.device)
length = encoded["input_ids"].shape[1]
out = model.generate(**encoded, max_new_tokens=6, do_sample=False)
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, return_tensors="pt",
                                    return_dict=False)
texts = [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
         tokenizer.decode(out[0, length:], skip_special_tokens=True)]
plain = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
result = (texts, ids.shape[1] < length, model.generate(encoded.input_ids, max_new_tokens=2,
          do_sample=False).tolist(), plain["input_ids"], plain["attention_mask"])
""",
    "a saved generation config": """
import tempfile
folder = tempfile.mkdtemp()
GenerationConfig(max_new_tokens=5, do_sample=False, no_repeat_ngram_size=2).save_pretrained(folder)
GenerationConfig(num_beams=3, early_stopping=True).save_pretrained(folder, "beams.json")
config = GenerationConfig.from_pretrained(folder)
beams = GenerationConfig.from_pretrained(folder, "beams.json")
model.generation_config = config
result = (model.generate(inputs["input_ids"], pad_token_id=0).tolist(), beams.num_beams,
          beams.early_stopping, model.generation_config.max_new_tokens)
""",
    "the model's generation config": """
ends = model.generation_config.eos_token_id
result = [ends] if isinstance(ends, int) else list(ends)
""",
    "a pad token of its own": """
tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="</s>", padding_side="left")
result = tokenizer(["Anna", "Anna put the key"], padding=True)["input_ids"]
""",
    "the tokenizer's tokens": """
result = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token_id,
          tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer))
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer that both libraries read."""
    folder = save(reference(llama(eos_token_id=2)), tmp_path_factory.mktemp("model"))
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    said = [
        "Anna put the key in the kitchen.",
        "Anna put the red ball in the garden.",
        "The bag is",
    ]
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer.train_from_iterator(said * 20, vocab_size=320, special_tokens=list(named.values()))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **named)
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(folder)
    return str(folder)


def run(imports, program, folder):
    names = {"torch": torch, "folder": folder}
    exec(compile(imports + LOADED + program, "<guide>", "exec"), names)
    return names["result"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_with_its_import_line_changed(name, folder):
    assert run(OURS, PROGRAMS[name], folder) == run(THEIRS, PROGRAMS[name], folder)


def test_the_cache_that_was_passed_comes_back(folder):
    program = """
import exkv
cache = exkv.DynamicCache(model, max_seq_len=64)
out = model.generate(**inputs, past_key_values=cache, max_new_tokens=4,
                     return_dict_in_generate=True)
result = out.past_key_values is cache, cache.seq_lens[0], out.sequences.shape[1]
"""
    is_same, stored, length = run(OURS, program, folder)
    assert is_same and stored == length - 1


def test_a_loop_takes_logits_from_an_output_or_a_tuple(folder):
    program = """
import exkv
made = []
for step in ({"return_dict": True}, {"return_dict": False}):
    cache = exkv.DynamicCache(model, max_seq_len=64)
    ids = inputs["input_ids"]
    for _ in range(4):
        out = model(ids[:, cache.seq_lens[0]:], past_key_values=cache, use_cache=True, **step)
        logits = out.logits if step["return_dict"] else out[0]
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=-1)
    made.append(ids.tolist())
result = made, model.generate(**inputs, max_new_tokens=4, do_sample=False).tolist()
"""
    loops, generated = run(OURS, program, folder)
    assert loops == [generated, generated]


def test_a_cache_without_a_model_says_that_it_needs_one(folder):
    for made in ("exkv.DynamicCache()", "exkv.DynamicCache(config=model.config)"):
        with pytest.raises(TypeError, match=r"DynamicCache\(model\), rather than none or a config"):
            run(OURS, f"import exkv\n{made}", folder)


def test_from_pretrained_refuses_what_it_does_not_know(folder):
    with pytest.raises(TypeError, match="knows no quantization_config"):
        run(OURS, "AutoModelForCausalLM.from_pretrained(folder, quantization_config={})", folder)
    with pytest.raises(ValueError, match="device_map is 'balanced'"):
        run(OURS, "AutoModelForCausalLM.from_pretrained(folder, device_map='balanced')", folder)
    with pytest.raises(ValueError, match="pad_token 'nowhere to be found' is not in"):
        run(OURS, "tokenizer.pad_token = 'nowhere to be found'", folder)
