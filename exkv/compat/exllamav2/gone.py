"""Names of ExLlamaV2 that exkv doesn't have, each with what to use instead.

Such a name can be imported, since scripts import more than they use; using it raises
:class:`NotHere`. A missing attribute raises AttributeError, an argument ValueError. Each error ends
with a sentence of this file, which the tables of names in the docs repeat.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NoReturn

_ENGINE = (
    "generator.exkv, an exkv.Engine, keeps pages, queues and buffers itself: see docs/engine.md"
)
_SPECULATION = (
    "ExLlamaV2DynamicGenerator takes draft_model and use_ngram_draft, exkv's generate() takes "
    "assistant_model and prompt_lookup_num_tokens; without them tokens are the same, and slower"
)
_LORA = "model.exkv.adapters[lora.name] is the adapter, with its folder and its config"
_LORAS = "pass loras= to each call: exkv keeps no list of those that are active"
_FILTERS = "begin, feed and next are all that exkv calls of a filter"
_TENSOR_PARALLEL = (
    "exkv keeps each layer on one device: use load(gpu_split) or load_autosplit(cache)"
)
_IMAGES = "exkv runs the text part of a model only: pass token ids"
_QUANTIZE = (
    "exkv quantizes on load, by Model(folder, weights=...), or once, by exkv quantize IN OUT, and "
    "reads EXL2, GPTQ, AWQ, GGUF and others as they are"
)
_HEALING = "generators take token_healing=True"
_LAYOUT = "exkv's caches have a layout of their own: look at cache.exkv.layers[i].keys and .values"
_UNITS = "model.exkv.units are what is placed on devices, each with its module"
_SAMPLER = "exkv's sampler does it by the settings alone: see exkv.sampling"
_MIROSTAT = (
    "exkv's sampler keeps no state from token to token: min_temp and max_temp bend the temperature "
    "to a distribution's entropy, min_p and typical cut what surprises"
)
_HOOKS = (
    "a stream gives tokens, probabilities and logits out: begin_stream_ex(return_logits=True); to "
    "change them, pass a logits_processor to exkv's generate()"
)
_ROPE = "config.json says it: exkv reads rope_scaling there"
_STATE = "it is the state of a loop that exkv writes otherwise: sequence_ids has the tokens"
_INSIDE = "it belongs to ExLlamaV2's insides: see exkv's own in docs/how-it-works.md"
_VISION = "it describes an image tower, and exkv runs the text part of a model only"
_TRIES = "get_id_to_piece_list() has every token's text"
_SERVER = "exkv serve answers over HTTP, with streams, in OpenAI's words: see docs/server.md"

#: Pattern of a name, as in ``fnmatch`` -> what to use instead. The first match counts.
GONE: dict[str, str] = {
    "ExLlamaV2Lora.*": _LORA,
    "ExLlamaV2Dynamic*": _ENGINE,
    "ExLlamaV2Filter*": _FILTERS,
    "ExLlamaV2SelectFilter*": _FILTERS,
    "ExLlamaV2PrefixFilter*": _FILTERS,
    "ExLlamaV2Cache_TP*": _TENSOR_PARALLEL,
    "ExLlamaV2MM*": _IMAGES,
    "ExLlamaV2Multimodal*": _IMAGES,
    "ExLlamaV2VisionTower*": _IMAGES,
    "ExLlamaV2PostSampling*": _HOOKS,
    "ExLlamaV2WebSocketServer*": _SERVER,
    "ExLlamaV2TokenizerBase*": "tokenizer.exkv is exkv's Tokenizer",
    "ExLlamaV2TokenizerHF*": "tokenizer.exkv is exkv's Tokenizer",
    "SeqTensor*": "use a list of token ids, or torch.cat",
    "Intervention*": "put a forward hook on model.exkv.units[i].module",
    "NgramCache*": _SPECULATION,
    # ExLlamaV2
    "ExLlamaV2.load_tp*": _TENSOR_PARALLEL,
    "ExLlamaV2.update_loras": _LORAS,
    "ExLlamaV2.modules*": _UNITS,
    "ExLlamaV2.get_modules": _UNITS,
    "ExLlamaV2.is_quant": "model.exkv.config.quantization says how the weights are stored",
    "ExLlamaV2.forward_chunk": "forward splits its input into chunks itself",
    "ExLlamaV2.*device_context": "exkv's plan leaves room for every buffer: see model.exkv.plan",
    "ExLlamaV2.*_layer_idx": _UNITS,
    "ExLlamaV2.archparams": "model.exkv.config.architecture names it",
    # ExLlamaV2Config
    "ExLlamaV2Config.vision_*": _VISION,
    "ExLlamaV2Config.load_in_q4": _QUANTIZE,
    "ExLlamaV2Config.checkpoint_*": _QUANTIZE,
    "ExLlamaV2Config.max_dq_size": _QUANTIZE,
    "ExLlamaV2Config.tensor_file*": "model.exkv.checkpoint reads tensors by their names",
    "ExLlamaV2Config.arch": "config.architecture has the name",
    "ExLlamaV2Config.model_config": "config.model_dir has the folder",
    "ExLlamaV2Config.tokenizer_path": "config.model_dir has the folder",
    "ExLlamaV2Config.*rope*": _ROPE,
    "ExLlamaV2Config.scale_???*_factor": _ROPE,
    "ExLlamaV2Config.scale_pos_emb_alt": _ROPE,
    "ExLlamaV2Config.rotary_embedding_base_alt": _ROPE,
    "ExLlamaV2Config.partial_rotary_factor": _ROPE,
    "ExLlamaV2Config.original_max_seq_len": _ROPE,
    "ExLlamaV2Config.pos_id_index": _IMAGES,
    **dict.fromkeys(
        (
            f"ExLlamaV2Config.{name}"
            for name in (
                *("initializer_range", "logit_scale", "scale_depth", "scale_emb", "use_qk_norm"),
                *("query_pre_attn_scalar", "norm_head", "attention_multiplier"),
                *("*_logit_softcapping", "sliding_window_pattern"),
            )
        ),
        "config.exkv, after prepare(), is exkv's ModelConfig, with all that counts",
    ),
    # Caches
    "ExLlamaV2Cache*.*_states": _LAYOUT,
    "ExLlamaV2Cache*.*_scales": _LAYOUT,
    "ExLlamaV2Cache*.*_kv_state": _LAYOUT,
    "ExLlamaV2Cache*.weights_per_*": _LAYOUT,
    "ExLlamaV2Cache*.shape_*": _LAYOUT,
    "ExLlamaV2Cache*.q_block": _LAYOUT,
    "ExLlamaV2Cache*.temp_tensors": _LAYOUT,
    "ExLlamaV2Cache*.wbits": _LAYOUT,
    "ExLlamaV2Cache*.touch_device": "update_cache_tensors() allocates what isn't there",
    "ExLlamaV2Cache*.create_state_tensors": "update_cache_tensors() allocates what isn't there",
    "ExLlamaV2Cache*.copy_states": "cache.clone() copies a cache, cache.exkv.reorder its rows",
    "ExLlamaV2Cache*.roll_left": (
        "forget the oldest tokens with exkv's SlidingWindowCache or SinkCache, or run the rest of "
        "the prompt again"
    ),
    "ExLlamaV2Cache*.fixed_device": "a layer's cache lies where the layer does",
    "ExLlamaV2Cache_Q": "use ExLlamaV2Cache_Q4, _Q6 or _Q8",
    # Tokenizer
    "ExLlamaV2Tokenizer.*trie*": _TRIES,
    "ExLlamaV2Tokenizer.Trie*": _TRIES,
    "ExLlamaV2Tokenizer.*prefix*": _TRIES,
    "ExLlamaV2Tokenizer.*id_to_ord*": "tokenizer.exkv.bytes_of(id) has a token's bytes",
    "ExLlamaV2Tokenizer.id_to_piece*": _TRIES,
    "ExLlamaV2Tokenizer.piece_to_id": "get_piece_to_id_dict() makes it",
    "ExLlamaV2Tokenizer.*_special": "encode(text, encode_special_tokens=True)",
    "ExLlamaV2Tokenizer.*unspecial*": "encode(text) takes special tokens as text",
    "ExLlamaV2Tokenizer.special_delimiters": "tokenizer.exkv.special_ids are the control tokens",
    "ExLlamaV2Tokenizer.decode_": "decode does it",
    "ExLlamaV2Tokenizer.*cached_str*": "cached_encode_str keeps as many as it likes",
    "ExLlamaV2Tokenizer.tokenized_str_cache": "cached_encode_str keeps what it made",
    "ExLlamaV2Tokenizer.tokenizer_config_dict": "tokenizer.exkv is exkv's Tokenizer",
    # Sampler
    "ExLlamaV2Sampler.apply_dry": _SAMPLER,
    "ExLlamaV2Sampler.get_dry_*": _SAMPLER,
    "ExLlamaV2Sampler.*xtc_mask*": _SAMPLER,
    "ExLlamaV2Sampler.Settings.post_sampling_hooks": _HOOKS,
    "ExLlamaV2Sampler.Settings.ngram_*": _SAMPLER,
    "ExLlamaV2Sampler.Settings.mirostat*": _MIROSTAT,
    "NgramNode": _SAMPLER,
    # Generators
    "ExLlamaV2*Generator.ngram": _STATE,
    "ExLlamaV2*Generator.ngram_preloaded": _STATE,
    "ExLlamaV2*Generator.future_*": _STATE,
    "ExLlamaV2*Generator.active_loras": _LORAS,
    "ExLlamaV2*Generator.filter*": "pass filters to begin_stream_ex",
    "ExLlamaV2*Generator.indexed_embeddings": _IMAGES,
    "ExLlamaV2*Generator.heal_next_token": "pass token_healing to begin_stream_ex",
    "ExLlamaV2*Generator.position_offsets": "pass input_mask alone: positions follow from it",
    "ExLlamaV2*Generator.input_mask": "pass lists of texts: generate_simple pads and masks them",
    "ExLlamaV2*Generator.held_*": _STATE,
    "ExLlamaV2*Generator.no_*": _STATE,
    "ExLlamaV2*Generator.*_utf32*": _STATE,
    "ExLlamaV2*Generator.*blocked_*": _STATE,
    "ExLlamaV2*Generator.ban_checkpoint": _STATE,
    "ExLlamaV2*Generator.reuse_logits": _STATE,
    "ExLlamaV2*Generator.first_token": _STATE,
    "ExLlamaV2*Generator.remaining_tokens": _STATE,
    "ExLlamaV2*Generator.tail_decode_tokens": _STATE,
    "ExLlamaV2*Generator.max_fallback_tokens": _STATE,
    # Modules
    "exllamav2.server*": _SERVER,
    "exllamav2.vlm*": _IMAGES,
    "exllamav2.conversion*": _QUANTIZE,
    "exllamav2.generator.dynamic*": _ENGINE,
    "exllamav2.generator.filters*": _FILTERS,
    "exllamav2.generator.ngram*": _SPECULATION,
    "exllamav2.stloader*": "model.exkv.checkpoint reads tensors by their names",
    "exllamav2.tensor_p*": _TENSOR_PARALLEL,
    "exllamav2.util.*_vram*": "model.exkv.report says what is placed where, exkv.devices.memory",
    "exllamav2.util.*gpu_memory*": "exkv.devices.memory(device) says what is free and taken",
    "exllamav2.util.get_visible_devices": "torch.accelerator.device_count() counts them",
    "exllamav2*": _INSIDE,
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
    "archparams": "config.json says which architecture it is",
    "num_key_value_heads": "the model says how many there are",
    "fixed_device": "a layer's cache lies where the layer does",
    "force_json": "exkv reads tokenizer.json where there is one",
    "force_spm": "move tokenizer.json away, and exkv reads tokenizer.model",
}


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless a value is an instance of one of our classes."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be an {kind.__qualname__}")


class NotHere(NotImplementedError):
    """A name of ExLlamaV2 that exkv doesn't have; the message says what to use."""


def instead_of(name: str) -> str | None:
    """What to use in place of a name such as ``ExLlamaV2.load_tp`` or ``exllamav2.attn``."""
    return next((said for pattern, said in GONE.items() if fnmatchcase(name, pattern)), None)


def refuse_arguments(call: str, **given: Any) -> None:
    """Raise ValueError for the first argument that is given."""
    for name, value in given.items():
        if value is not None and value is not False and not (isinstance(value, list) and not value):
            raise ValueError(f"{call} takes no {name} here: {ARGUMENTS[name]}")


class _Gone(type):
    """Metaclass of placeholders."""

    said: str | None

    def refuse(cls) -> NoReturn:
        said = vars(cls).get("said") or instead_of(cls.__name__)
        raise NotHere(f"exkv has no {cls.__name__}: {said}")

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls.refuse()

    def __bool__(cls) -> NoReturn:  # of a flag, such as exllamav2.attn.has_flash_attn
        cls.refuse()

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):  # what Python itself asks for
            raise AttributeError(name)
        cls.refuse()


class Gone(metaclass=_Gone):
    """A placeholder: a name that can only be imported and compared by ``isinstance``."""

    def __init_subclass__(cls, placeholder: bool = False) -> None:
        if not placeholder:
            parent = cls.__mro__[1]
            assert isinstance(parent, _Gone)
            parent.refuse()


def gone(name: str, module: str, said: str | None = None) -> type:
    """Make the placeholder of a name; ``said`` is what to use instead."""
    return _Gone(name, (Gone,), {"__module__": module, "said": said}, placeholder=True)


class Adapter:
    """Base of our classes: a missing attribute says what to use instead."""

    def __getattr__(self, name: str) -> NoReturn:
        raise absent(type(self).__qualname__, name, dir(self))


class AdapterType(type):
    """The same for attributes of a class itself."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise absent(cls.__qualname__, name, dir(cls))


def absent(kind: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a missing attribute of one of our classes."""
    said = None if name.startswith("_") else instead_of(f"{kind}.{name}")
    if said is not None:
        return AttributeError(f"{kind}.{name} isn't here: {said}")
    return AttributeError(f"{kind} has no {name!r}{close_to(name, known)}")


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """Make the ``__getattr__`` of one of our modules; ``from ... import`` shows its ImportError.

    A package that uses it imports all its modules, which would be refused otherwise.
    """
    there = module.replace(__name__.rpartition(".")[0], "exllamav2")

    def missing(name: str) -> NoReturn:
        if name.startswith("_"):  # what Python itself asks for
            raise AttributeError(f"{module} has no {name!r}")
        said = instead_of(name) or instead_of(f"{there}.{name}")
        classes = [each for each in vars(sys.modules[module]) if each.startswith("ExLlamaV2")]
        near = close_to(name, classes) if said == _INSIDE else ""
        raise ImportError(f"exkv has no {there}.{name}{near or f': {said}'}")

    return missing


def close_to(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` if a known name is similar."""
    near = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], 1)
    return f"; did you mean {near[0]!r}?" if near else ""
