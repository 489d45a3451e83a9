"""Run ExLlamaV2's own examples and TabbyAPI on exkv, from checkouts of those repositories.

``make upstream UPSTREAM=DIR`` runs ``python tests/compat/upstream.py DIR``, where DIR has
``exllamav2`` (turboderp-org/exllamav2 at da07fac) and ``tabbyAPI`` (theroyallab/tabbyAPI, branch
exl2-checkpoint), or one of them. Further arguments, names of :data:`EXAMPLES` or ``tabbyAPI``,
restrict the run to these. It prints each outcome, and fails if one failed.

Scripts run unchanged except for paths of models and the sizes in :data:`EXAMPLES`: the demo model
is small, and has another tokenizer. TabbyAPI's requests are in ``upstream_tabby.py``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo-model"
_SECONDS = 600  # for one program
_CHAT = "Anna put the key in the kitchen. Where is the key?\nWhere is the key?\n"


@dataclass(frozen=True, kw_only=True)
class Example:
    """How to run a script, and its expected outcome.

    Attributes:
        sizes: pairs of a text and its replacement.
        prints: patterns of its output.
        ends: pattern of the last line of the error that ends it; "" for none.
        devices: simulated devices.
        writes_json: use a model that ends strings and lists, unlike the demo model.
    """

    arguments: tuple[str, ...] = ()
    typed: str = ""
    sizes: tuple[tuple[str, str], ...] = ()
    prints: tuple[str, ...] = ()
    ends: str = ""
    devices: str = ""
    writes_json: bool = False


_TURNS: dict[str, Any] = {"typed": _CHAT, "ends": "EOFError"}
_MODEL = ("-m", "MODEL", "-gs", "auto")
_NO_TENSOR_PARALLELISM = "exkv keeps each layer on one device"
_NO_IMAGES = "exkv runs only the text part of a model"

EXAMPLES: dict[str, Example] = {
    "examples/bulk_inference": Example(
        sizes=(("max_response_len = 768", "max_response_len = 32"), ("100*1024", "16*1024")),
        prints=("Dataset loaded, 12 rows", r"Completion 11:"),
    ),
    "examples/chat": Example(
        arguments=(*_MODEL, "-mode", "raw", "-l", "2048", "-maxr", "20", "-pt"), **_TURNS
    ),
    "examples/chat -dm": Example(
        arguments=("-m", "MODEL", "-mode", "llama", "-dm", "MODEL", "-maxr", "20", "-pt"),
        prints=("SD acc",),
        **_TURNS,
    ),
    "examples/dynamic_gen": Example(
        sizes=(("max_new_tokens = 500", "max_new_tokens = 16"), ("= 16384", "= 65536")),
        prints=("max_new_tokens",),
    ),
    "examples/inference": Example(prints=("Batched completion #4", "speed, bsz 4: [0-9.]+")),
    "examples/inference_async": Example(prints=("Output 2\n",), devices="2M,64M"),
    "examples/inference_banned_strings": Example(prints=("With banned strings",)),
    "examples/inference_cfg": Example(prints=("Scale: -1.0", "Scale: 2.0")),
    "examples/inference_dedup": Example(
        sizes=(("max_new_tokens = 400", "max_new_tokens = 20"), ("= 8192", "= 32768")),
        prints=(r"Total time: [0-9.]+ seconds",),
    ),
    "examples/inference_formatron": Example(prints=('"first_appearance": {',), writes_json=True),
    "examples/inference_lmfe": Example(prints=('"first_appearance": {',), writes_json=True),
    "examples/inference_lora": Example(prints=("With LoRA",)),
    "examples/inference_speculative": Example(prints=(r"speed, \+SD: [0-9.]+ tokens/second",)),
    "examples/inference_stream": Example(
        prints=("'eos_reason': 'max_new_tokens'", "'new_tokens': 200"), devices="2M,64M"
    ),
    "examples/inference_tp": Example(ends=_NO_TENSOR_PARALLELISM),
    "examples/minimal_chat": Example(sizes=(("= 1024", "= 64"),), **_TURNS),
    "examples/ws_server": Example(arguments=_MODEL, ends="exkv serve answers over HTTP"),
    "examples/multimodal": Example(ends=_NO_IMAGES),
    "examples/multimodal_video": Example(ends=_NO_IMAGES),
    "test_inference": Example(
        arguments=("-m", "MODEL", "-p", "Anna put the", "-t", "20"), prints=("Response generated",)
    ),
    "test_inference -ps -s": Example(
        arguments=("-m", "MODEL", "-ps", "-s", "-l", "512"),
        prints=(r"Length +512 tokens", r"Position +384 \+ 128 tokens"),
        devices="2M,64M",
    ),
    "examples/deprecated/banned_strings": Example(prints=("use_banned_strings: True",)),
    "examples/deprecated/batched_inference": Example(
        sizes=(("max_new_tokens = 512", "max_new_tokens = 64"),), prints=("Batch 4 of 4",)
    ),
    "examples/deprecated/cfg": Example(
        sizes=(("    max_new_tokens = 200", "    max_new_tokens = 40"),),
        prints=("cfg_scale = 2.0",),
    ),
    "examples/deprecated/inference": Example(prints=("Response generated in",)),
    "examples/deprecated/lm_format_enforcer": Example(prints=("Parsed JSON:",), writes_json=True),
    "examples/deprecated/lora": Example(prints=("Yes LoRA:",)),
    "examples/deprecated/minimal_chat": Example(**_TURNS),
    "examples/deprecated/speculative": Example(
        sizes=(("gen_max_tokens = 250", "gen_max_tokens = 60"),),
        prints=("N-gram decoding \\(preloaded\\)", "SD accuracy: "),
    ),
    "examples/deprecated/streaming": Example(prints=("Response generated in",)),
}


def environment() -> str:
    """The Python of an environment in ``build/``: the programs' requirements, pinned, followed by
    this environment's packages, including torch."""
    folder = ROOT / "build" / "upstream"
    python, wanted = (
        folder / "bin" / "python",
        Path(__file__).with_name("upstream-requirements.txt"),
    )
    done = folder / "requirements.txt"
    if not done.is_file() or done.read_text() != wanted.read_text():
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        subprocess.run([*pip, "--no-deps", "--no-compile", "-r", wanted], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        places = [place for place in sys.path if place.endswith("site-packages")]
        (site / "zz_behind.pth").write_text("\n".join([*places, str(ROOT)]) + "\n")
        shutil.copyfile(wanted, done)
    return str(python)


def prepared(folder: Path) -> tuple[Path, Path]:
    """The demo model with more positions, and an adapter for it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from adapters import write_adapter

    model = folder / "model"
    shutil.copytree(DEMO, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}))
    wide, layers = config["hidden_size"], range(config["num_hidden_layers"])
    size = (wide, config["intermediate_size"])
    sizes = {f"model.layers.{n}.mlp.down_proj": size for n in layers}
    write_model_of_json(folder / "model-of-json", config)
    return model, write_adapter(folder / "adapter", sizes)


#: Token of a JSON text that ends soon -> its logit.
_ENDS = {'"': 16.0, "}": 15.0, "]": 14.0, ",": 12.0, ":": 12.0, **dict.fromkeys("0123456789", 6.0)}


def write_model_of_json(folder: Path, config: dict[str, Any]) -> None:
    """Write a model with the demo model's tokenizer and the same logits at every position."""
    import torch
    from safetensors.torch import save_file

    from exkv import Tokenizer

    shutil.copytree(DEMO, folder)
    tokenizer, width = Tokenizer(DEMO), 32
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width}
    changed = {**config, **sizes, "tie_word_embeddings": False, "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps(changed))
    texts = [tokenizer.bytes_of(i).decode(errors="replace") for i in range(config["vocab_size"])]
    scores = torch.tensor([_ENDS.get(text, 0.0) for text in texts])[:, None]
    ones, none = torch.ones(width), torch.zeros(width, width)
    inner = [f"self_attn.{name}_proj" for name in "qkvo"]
    inner += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ("input_layernorm", "post_attention_layernorm")
    weights = {f"layers.0.{name}.weight": none.clone() for name in inner}
    weights |= {f"layers.0.{name}.weight": ones.clone() for name in norms}
    weights |= {"norm.weight": ones.clone(), "embed_tokens.weight": torch.ones(len(texts), width)}
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    tensors["lm_head.weight"] = (scores / width).expand(-1, width).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def copied(source: Path, folder: Path, model: Path, adapter: Path) -> Path:
    """Copy ExLlamaV2's examples, with paths of our models and a data set of twelve prompts."""
    copy = folder / "exllamav2"
    shutil.copytree(source, copy)
    for script in copy.rglob("*.py"):
        text = re.sub(r'"/mnt/str/(models/_lora|loras)/[^"]*"', f'"{adapter}"', script.read_text())
        script.write_text(re.sub(r'"/mnt/str/models/[^"]*"', f'"{model}"', text))
    story = copy / "examples" / "the_black_veil.utf8"
    story.write_text(story.read_text()[:6000])
    rows = [{"prompt": f"Anna put {n} keys in the kitchen. Where are they?"} for n in range(12)]
    data = copy / "examples" / "dataset_cache"
    data.mkdir()
    name = "alespalla_chatbot_instruction_prompts-test.jsonl"
    (data / name).write_text(json.dumps(rows))
    return copy


def run(python: str, copy: Path, model: Path, name: str, example: Example) -> str:
    """Run a script -> what went wrong; "" for nothing."""
    script = copy / f"{name.split(' ')[0]}.py"
    text = before = script.read_text()
    for old, new in example.sizes:
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    script.write_text(text.replace(str(model), f"{model}-of-json") if example.writes_json else text)
    arguments = [str(model) if each == "MODEL" else each for each in example.arguments]
    command = [python, "-m", "exkv.compat.exllamav2", str(script), *arguments]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "EXKV_SIM_DEVICES": example.devices,
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            command,
            input=example.typed,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env=env,
            cwd=copy,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {_SECONDS} s"
    finally:
        script.write_text(before)
    return wrong(example, done)


def wrong(example: Example, done: subprocess.CompletedProcess[str]) -> str:
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if not example.ends and done.returncode:
        return done.stderr[-3000:]
    if example.ends and not re.search(example.ends, last):
        return f"it ended with {last!r}"
    missing = [each for each in example.prints if not re.search(each, done.stdout)]
    return f"it printed no {missing[0]!r}: {done.stdout[-2000:]}" if missing else ""


def tabby(python: str, checkout: Path) -> str:
    """Run TabbyAPI and print its answers -> what went wrong; "" for nothing."""
    script = Path(__file__).with_name("upstream_tabby.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, script, checkout, DEMO], env=env, timeout=_SECONDS)
    return "" if done.returncode == 0 else f"it ended with {done.returncode}"


def outcome_of(example: Example, problem: str) -> str:
    """A script's entry in the table."""
    if problem:
        return f"FAILED: {problem.strip().splitlines()[-1]}"
    return f"refuses: {example.ends}" if example.ends and not example.typed else "runs"


def main(argv: list[str]) -> None:
    if not argv or not Path(argv[0]).is_dir():
        sys.exit(f"usage: {Path(__file__).name} DIR [NAMES]: DIR has exllamav2 and tabbyAPI")
    upstream, chosen = Path(argv[0]).resolve(), argv[1:]
    examples, checkout = upstream / "exllamav2", upstream / "tabbyAPI"
    if not examples.is_dir() and not checkout.is_dir():
        sys.exit(f"{upstream} has neither exllamav2 nor tabbyAPI: clone one of them there")
    python, failed = environment(), []
    if unknown := set(chosen) - {*EXAMPLES, "tabbyAPI"}:
        sys.exit(f"no such names: {', '.join(unknown)}; there are {', '.join(EXAMPLES)}, tabbyAPI")
    names = [name for name in EXAMPLES if not chosen or name in chosen]
    with tempfile.TemporaryDirectory() as place:
        model, adapter = prepared(Path(place))
        copy = copied(examples, Path(place), model, adapter) if examples.is_dir() else None
        for name in names if copy else ():
            assert copy is not None
            started = time.monotonic()
            problem = run(python, copy, model, name, EXAMPLES[name])
            line = outcome_of(EXAMPLES[name], problem)
            print(f"{name:42} {time.monotonic() - started:6.1f} s  {line}", flush=True)
            print(problem, end="\n" if problem else "", file=sys.stderr, flush=True)
            failed += [name] if problem else []
    if checkout.is_dir() and (not chosen or "tabbyAPI" in chosen) and tabby(python, checkout):
        failed.append("tabbyAPI")
    sys.exit(f"{len(failed)} failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
