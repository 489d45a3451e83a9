"""Names of ExLlamaV2 that exkv doesn't have, each with a replacement.

Such a name can be imported, since scripts import more than they use; using it raises
:class:`NotHere`. A missing attribute raises AttributeError, an argument ValueError. Each error ends
with an advice of this file, which the tables of names in the docs repeat.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NoReturn

_ENGINE = (
    "generator.exkv, an exkv.Engine, manages pages, queues and buffers itself: see docs/engine.md"
)
_SPECULATION = (
    "ExLlamaV2DynamicGenerator takes draft_model and use_ngram_draft, exkv's generate() takes "
    "assistant_model and prompt_lookup_num_tokens; without them, generation is slower and has the "
    "same tokens"
)
_LORA = "model.exkv.adapters[lora.name] is the adapter, with its folder and its config"
_LORAS = "pass loras= to each call: exkv has no list of active adapters"
_FILTERS = "exkv calls only a filter's begin, feed and next"
_TENSOR_PARALLEL = (
    "exkv keeps each layer on one device: use load(gpu_split) or load_autosplit(cache)"
)
_IMAGES = "exkv runs only the text part of a model: pass token ids"
_QUANTIZE = (
    "exkv quantizes while loading, with Model(folder, weights=...), or once, with exkv quantize IN "
    "OUT, and reads EXL2, GPTQ, AWQ, GGUF and other formats as they are"
)
_HEALING = "generators take token_healing=True"
_LAYOUT = "exkv's caches have their own layout: look at cache.exkv.layers[i].keys and .values"
_UNITS = "model.exkv.units are placed on devices, each with its module"
_SAMPLER = "exkv's sampler does this by its settings alone: see exkv.sampling"
_MIROSTAT = (
    "exkv's sampler has no state between tokens: min_temp and max_temp adapt the temperature to a "
    "distribution's entropy, min_p and typical cut surprising tokens"
)
_HOOKS = (
    "begin_stream_ex(return_logits=True) makes a stream return tokens, probabilities and logits; "
    "to change them, pass a logits_processor to exkv's generate()"
)
_ROPE = "exkv reads it from rope_scaling in config.json"
_STATE = "it is the state of a loop that exkv implements differently: sequence_ids has the tokens"
_INSIDE = "it is internal to ExLlamaV2: docs/how-it-works.md describes exkv's own internals"
_VISION = "it describes an image tower, but exkv runs only the text part of a model"
_TRIES = "get_id_to_piece_list() has every token's text"
_SERVER = "exkv serve answers over HTTP with OpenAI's API, streaming included: see docs/server.md"

_TOKENIZER = "tokenizer.exkv is exkv's Tokenizer"
_FOLDER = "config.model_dir has the folder"
_TENSORS = "model.exkv.checkpoint reads tensors by their names"
_ALLOCATES = "update_cache_tensors() allocates missing storage"

#: Beginning of a name -> rest (patterns as in ``fnmatch``, separated by spaces) -> replacement.
_REPLACEMENTS: dict[str, dict[str, str]] = {
    "": {
        "ExLlamaV2Lora.*": _LORA,
        "ExLlamaV2Dynamic*": _ENGINE,
        "ExLlamaV2Filter* ExLlamaV2SelectFilter* ExLlamaV2PrefixFilter*": _FILTERS,
        "ExLlamaV2Cache_TP*": _TENSOR_PARALLEL,
        "ExLlamaV2MM* ExLlamaV2Multimodal* ExLlamaV2VisionTower*": _IMAGES,
        "ExLlamaV2PostSampling*": _HOOKS,
        "ExLlamaV2WebSocketServer*": _SERVER,
        "ExLlamaV2TokenizerBase* ExLlamaV2TokenizerHF*": _TOKENIZER,
        "SeqTensor*": "use a list of token ids, or torch.cat",
        "Intervention*": "put a forward hook on model.exkv.units[i].module",
        "NgramCache*": _SPECULATION,
        "NgramNode": _SAMPLER,
        "ExLlamaV2Cache_Q": "use ExLlamaV2Cache_Q4, _Q6 or _Q8",
    },
    "ExLlamaV2.": {
        "load_tp*": _TENSOR_PARALLEL,
        "update_loras": _LORAS,
        "modules* get_modules *_layer_idx": _UNITS,
        "is_quant": "model.exkv.config.quantization is the weights' quantization",
        "forward_chunk": "forward splits its input into chunks itself",
        "*device_context": "exkv's plan includes all buffers: see model.exkv.plan",
        "archparams": "model.exkv.config.architecture names it",
    },
    "ExLlamaV2Config.": {
        "vision_*": _VISION,
        "load_in_q4 checkpoint_* max_dq_size": _QUANTIZE,
        "tensor_file*": _TENSORS,
        "arch": "config.architecture has the name",
        "model_config tokenizer_path": _FOLDER,
        "*rope* scale_???*_factor scale_pos_emb_alt rotary_embedding_base_alt "
        "partial_rotary_factor original_max_seq_len": _ROPE,
        "pos_id_index": _IMAGES,
        "initializer_range logit_scale scale_depth scale_emb use_qk_norm query_pre_attn_scalar "
        "norm_head attention_multiplier *_logit_softcapping sliding_window_pattern": (
            "config.exkv, after prepare(), is exkv's ModelConfig, which has all settings"
        ),
    },
    "ExLlamaV2Cache*.": {
        "copy_states": "cache.clone() copies a cache, cache.exkv.reorder its rows",
        "*_states *_scales *_kv_state weights_per_* shape_* q_block temp_tensors wbits": _LAYOUT,
        "touch_device create_state_tensors": _ALLOCATES,
        "roll_left": "evict the oldest tokens with exkv's SlidingWindowCache or SinkCache, or "
        "run the rest of the prompt again",
        "fixed_device": "a layer's cache is on the layer's device",
    },
    "ExLlamaV2Tokenizer.": {
        "*trie* Trie* *prefix* id_to_piece*": _TRIES,
        "*id_to_ord*": "tokenizer.exkv.bytes_of(id) has a token's bytes",
        "piece_to_id": "get_piece_to_id_dict() returns it",
        "*_special": "encode(text, encode_special_tokens=True)",
        "*unspecial*": "encode(text) treats special tokens as text",
        "special_delimiters": "tokenizer.exkv.special_ids are the control tokens",
        "decode_": "use decode",
        "*cached_str*": "cached_encode_str has no limit",
        "tokenized_str_cache": "cached_encode_str has a cache of its own",
        "tokenizer_config_dict": _TOKENIZER,
    },
    "ExLlamaV2Sampler.": {
        "apply_dry get_dry_* *xtc_mask* Settings.ngram_*": _SAMPLER,
        "Settings.post_sampling_hooks": _HOOKS,
        "Settings.mirostat*": _MIROSTAT,
    },
    "ExLlamaV2*Generator.": {
        "active_loras": _LORAS,
        "filter*": "pass filters to begin_stream_ex",
        "indexed_embeddings": _IMAGES,
        "heal_next_token": "pass token_healing to begin_stream_ex",
        "position_offsets": "pass only input_mask: positions follow from it",
        "input_mask": "pass lists of texts: generate_simple pads and masks them",
        "ngram ngram_preloaded future_* held_* no_* *_utf32* *blocked_* ban_checkpoint "
        "reuse_logits first_token remaining_tokens tail_decode_tokens "
        "max_fallback_tokens": _STATE,
    },
    "exllamav2": {
        ".server*": _SERVER,
        ".vlm*": _IMAGES,
        ".conversion*": _QUANTIZE,
        ".generator.dynamic*": _ENGINE,
        ".generator.filters*": _FILTERS,
        ".generator.ngram*": _SPECULATION,
        ".stloader*": _TENSORS,
        ".tensor_p*": _TENSOR_PARALLEL,
        ".util.*_vram*": "model.exkv.report has the placement, exkv.devices.memory the memory",
        ".util.*gpu_memory*": "exkv.devices.memory(device) has free and used memory",
        ".util.get_visible_devices": "torch.accelerator.device_count() counts them",
        "*": _INSIDE,
    },
}
#: Pattern of a name -> what to use instead. The first match counts.
INSTEAD: dict[str, str] = {
    f"{beginning}{rest}": replacement
    for beginning, group in _REPLACEMENTS.items()
    for rests, replacement in group.items()
    for rest in rests.split()
}

#: Arguments of ExLlamaV2 that exkv doesn't take.
ARGUMENTS: dict[str, str] = {
    "filters": "generators and jobs take filters",
    "filter_prefer_eos": "generators and jobs take filter_prefer_eos",
    "prefix_token": _HEALING,
    "input_embeddings": _IMAGES,
    "indexed_embeddings": _IMAGES,
    "embeddings": _IMAGES,
    "return_last_state": "put a forward hook on model.exkv.units[-1].module",
    "extract_state_indices": "put forward hooks on model.exkv.units[i].module",
    "lazy_load": "build the model, and call load(..., lazy=True)",
    "archparams": "config.json names the architecture",
    "num_key_value_heads": "the model determines the number",
    "fixed_device": "a layer's cache is on the layer's device",
    "force_json": "exkv reads tokenizer.json if there is one",
    "force_spm": "move tokenizer.json away, and exkv reads tokenizer.model",
}


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless a value is an instance of this class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be an {kind.__qualname__}")


class NotHere(NotImplementedError):
    """A name of ExLlamaV2 that exkv doesn't have; the message says what to use instead."""


def instead_of(name: str) -> str | None:
    """What to use instead of a name such as ``ExLlamaV2.load_tp`` or ``exllamav2.attn``."""
    return next((advice for pattern, advice in INSTEAD.items() if fnmatchcase(name, pattern)), None)


def refuse_arguments(call: str, **given: Any) -> None:
    """Raise ValueError for the first of these arguments that is given."""
    for name, value in given.items():
        if value is not None and value is not False and not (isinstance(value, list) and not value):
            raise ValueError(f"{call} doesn't take {name}: {ARGUMENTS[name]}")


class _PlaceholderType(type):
    """Metaclass of placeholders."""

    advice: str | None

    def refuse(cls) -> NoReturn:
        advice = vars(cls).get("advice") or instead_of(cls.__name__)
        raise NotHere(f"exkv has no {cls.__name__}: {advice}")

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls.refuse()

    def __bool__(cls) -> NoReturn:  # of a flag such as exllamav2.attn.has_flash_attn
        cls.refuse()

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):  # requested by Python itself
            raise AttributeError(name)
        cls.refuse()


class Placeholder(metaclass=_PlaceholderType):
    """Base of placeholders, which can only be imported and passed to ``isinstance``."""

    def __init_subclass__(cls, placeholder: bool = False) -> None:
        if not placeholder:
            parent = cls.__mro__[1]
            assert isinstance(parent, _PlaceholderType)
            parent.refuse()


def placeholder(name: str, module: str, advice: str | None = None) -> type:
    """Make the placeholder of a name; ``advice`` says what to use instead."""
    members = {"__module__": module, "advice": advice}
    return _PlaceholderType(name, (Placeholder,), members, placeholder=True)


class Adapter:
    """Base of our classes: the error for a missing attribute says what to use instead."""

    def __getattr__(self, name: str) -> NoReturn:
        raise missing_attribute(type(self).__qualname__, name, dir(self))


class AdapterType(type):
    """The same for attributes of a class itself."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise missing_attribute(cls.__qualname__, name, dir(cls))


def missing_attribute(kind: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a missing attribute of one of our classes."""
    advice = None if name.startswith("_") else instead_of(f"{kind}.{name}")
    if advice is not None:
        return AttributeError(f"exkv has no {kind}.{name}: {advice}")
    return AttributeError(f"{kind} has no {name!r}{close_to(name, known)}")


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """Make the ``__getattr__`` of one of our modules; ``from ... import`` shows its ImportError.

    A package that uses it must import all its modules, or they would be refused.
    """
    there = module.replace(__name__.rpartition(".")[0], "exllamav2")

    def missing(name: str) -> NoReturn:
        if name.startswith("_"):  # requested by Python itself
            raise AttributeError(f"{module} has no {name!r}")
        advice = instead_of(name) or instead_of(f"{there}.{name}")
        classes = [each for each in vars(sys.modules[module]) if each.startswith("ExLlamaV2")]
        near = close_to(name, classes) if advice == _INSIDE else ""
        raise ImportError(f"exkv has no {there}.{name}{near or f': {advice}'}")

    return missing


def close_to(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` if a known name is similar."""
    near = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], 1)
    return f"; did you mean {near[0]!r}?" if near else ""
