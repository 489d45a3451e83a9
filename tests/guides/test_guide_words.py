"""Programs in the words of Hugging Face's guides, whose import line alone changes.

Each is run as it stands with transformers' classes, then with exkv's; both must give the same.
"""

from __future__ import annotations

import pytest
import tokenizers
import torch
import transformers
from tiny import llama, reference, save

from exkv import (
    DynamicCache,
    Model,
    ModelConfig,
    OffloadedCache,
    OffloadedStaticCache,
    PlacementError,
    QuantizedCache,
    StaticCache,
)

NAMES = "GenerationConfig, DynamicCache, StaticCache"
THEIRS = f"from transformers import AutoModelForCausalLM, AutoTokenizer, {NAMES}"
OURS = f"from exkv import Model as AutoModelForCausalLM, Tokenizer as AutoTokenizer, {NAMES}"
LOADED = """
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
inputs = tokenizer("Anna put the key in the kitchen.", return_tensors="pt").to(model.device)
"""

SIZE = {"max_cache_len": 64}

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
    "a cache for a config": """
cache = DynamicCache(config=model.config)
out = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, do_sample=False)
result = out.tolist()
""",
    "a cache for nothing, of a batch": """
texts = ["Anna put the key in the", "The bag is"]
batch = [tokenizer(text, return_tensors="pt")["input_ids"][0, :2] for text in texts]
cache = DynamicCache()
out = model.generate(torch.stack(batch), past_key_values=cache, max_new_tokens=6, num_beams=2,
                     do_sample=False, pad_token_id=0)
result = out.tolist(), cache.get_seq_length()
""",
    "a loop": """
cache = DynamicCache(config=model.config)
ids, position = inputs["input_ids"], torch.arange(inputs["input_ids"].shape[1])
lengths = [cache.get_seq_length()]
for _ in range(5):
    outputs = model(**inputs, cache_position=position, past_key_values=cache, use_cache=True)
    new = outputs.logits[:, -1:].argmax(-1)
    ids = torch.cat([ids, new], dim=-1)
    mask = inputs["attention_mask"]
    mask = torch.cat([mask, mask.new_ones((mask.shape[0], 1))], dim=-1)
    inputs, position = {"input_ids": new, "attention_mask": mask}, position[-1:] + 1
    lengths.append(cache.get_seq_length())
result = ids.tolist(), lengths
""",
    "a cache of the call's own, and its newer name": """
outputs = model(**inputs, use_cache=True)
cache, new = outputs.cache, outputs.logits[:, -1:].argmax(-1)
result = new.tolist(), model(new, cache=cache).logits.argmax(-1).tolist(), cache.get_seq_length()
""",
    "turns of a chat": """
cache, messages, texts = DynamicCache(config=model.config), [], []
for prompt in ("Where is the key?", "And the ball?"):
    messages.append({"role": "user", "content": prompt})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True).to(model.device)
    length = inputs["input_ids"].shape[1]
    outputs = model.generate(**inputs, do_sample=False, max_new_tokens=4, past_key_values=cache)
    texts.append(tokenizer.decode(outputs[0, length:], skip_special_tokens=True))
    messages.append({"role": "assistant", "content": texts[-1]})
result = texts
""",
    "a prefix for several prompts": """
import copy
first = tokenizer("Anna put", return_tensors="pt").to(model.device)
prefix = StaticCache(config=model.config, max_batch_size=1, max_cache_len=64, device=model.device,
                     dtype=torch.float32)
with torch.no_grad():
    prefix = model(**first, past_key_values=prefix).past_key_values
result = []
for rest in (" the key in", " the red ball"):
    inputs = tokenizer("Anna put" + rest, return_tensors="pt").to(model.device)
    cache = copy.deepcopy(prefix)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=5, do_sample=False)
    result.append(out.tolist())
""",
    "a static cache, and steps by tuples": """
def step(model, token, position, cache):
    logits = model(token, cache_position=position, past_key_values=cache, return_dict=False,
                   use_cache=True)[0]
    return torch.argmax(logits[:, -1], dim=-1)[:, None]

length = inputs["input_ids"].shape[1]
cache = StaticCache(model.config, max_cache_len=64)  # by position, too
found = [step(model, inputs["input_ids"], torch.arange(length), cache)]
for place in range(length, length + 4):
    found.append(step(model, found[-1].clone(), torch.tensor([place]), cache))
result = torch.cat(found, dim=1).tolist()
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


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
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


def test_a_cache_that_waits_for_its_model_says_so(folder):
    for made in (DynamicCache(), DynamicCache(block=64)):
        assert made.get_seq_length() == 0 and repr(made) == "DynamicCache(of no model yet)"
        for use in ("nbytes", "reset", "clone"):
            with pytest.raises(AttributeError, match=r"bound to no model.*DynamicCache\(model"):
                getattr(made, use)()
    with pytest.raises(TypeError, match="DynamicCache has no 'nbits'"):
        DynamicCache(nbits=4)
    with pytest.raises(ValueError, match="max_seq_len and max_cache_len are both given"):
        StaticCache(max_seq_len=64, max_cache_len=64)


def test_a_waiting_cache_serves_the_model_of_its_config(folder):
    model = Model.from_pretrained(folder, device_map="cpu")
    other = ModelConfig.from_pretrained(folder).replace(rope_theta=5000.0)
    with pytest.raises(ValueError, match="built for another model"):
        model.generate([[3, 4]], cache=DynamicCache(other), max_new_tokens=2)
    cache = QuantizedCache(config=ModelConfig.from_pretrained(folder), backend="quanto", nbits=4)
    model.generate([[3, 4], [5, 6]], cache=cache, max_new_tokens=2)
    assert cache.model is model and cache.batch_size == 2 and cache in model.caches
    planned = StaticCache(ModelConfig.from_pretrained(folder), max_cache_len=64)
    (unloaded := Model(folder)).load_autosplit(planned, devices=["cpu"])
    assert unloaded.caches == [planned] and planned.nbytes()
    with pytest.raises(ValueError, match="built for another model"):
        Model.from_pretrained(folder, device_map="cpu").generate([[3, 4]], cache=cache)


def test_offloading_is_an_offloaded_cache(folder):
    model = Model.from_pretrained(folder, device_map="cpu")
    for made, as_named in ((DynamicCache, OffloadedCache), (StaticCache, OffloadedStaticCache)):
        specs = made.layer_specs(model, 64, offloading=True)
        assert specs == as_named.layer_specs(model, 64) != made.layer_specs(model, 64)


def test_a_cache_without_room_waits_on(folder, monkeypatch):
    model = Model.from_pretrained(folder, device_map="cpu")
    cache = DynamicCache()
    monkeypatch.setattr(Model, "check_cache", refuse)
    with pytest.raises(PlacementError):
        model(torch.tensor([[3, 4]]), cache=cache)
    monkeypatch.undo()
    assert repr(cache) == "DynamicCache(of no model yet)" and not model.caches
    model(torch.tensor([[3, 4], [5, 6]]), cache=cache)
    assert cache.seq_lens == [2, 2] and model.caches == [cache]


def refuse(*_):
    raise PlacementError("no room", unit="", device="cpu", needed=1, available=0)


def test_classes_of_the_other_library_say_so(folder):
    model = Model.from_pretrained(folder, device_map="cpu")
    for kind, settings in ((transformers.DynamicCache, {}), (transformers.StaticCache, SIZE)):
        with pytest.raises(AttributeError, match=r"ModelConfig has no 'get_text_config'.*caches"):
            kind(config=model.config, **settings)


def test_from_pretrained_refuses_what_it_does_not_know(folder):
    with pytest.raises(TypeError, match="has no argument quantization_config"):
        run(OURS, "AutoModelForCausalLM.from_pretrained(folder, quantization_config={})", folder)
    with pytest.raises(ValueError, match="device_map is 'balanced'"):
        run(OURS, "AutoModelForCausalLM.from_pretrained(folder, device_map='balanced')", folder)
    with pytest.raises(ValueError, match="pad_token 'nowhere to be found' is not in"):
        run(OURS, "tokenizer.pad_token = 'nowhere to be found'", folder)
