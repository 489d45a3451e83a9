"""``exkv quantize IN OUT.gguf --bits N --calibration FILE``: convert a GGUF file of floats, or a
folder of safetensors, to ggml's types, K types included.

A folder first becomes a temporary file of the same floats beside OUT.gguf
(``exkv.loading.gguf_floats``). Metadata and tokenizer are the source's. The layers' matrices
get the types that lose least on the text at N bits per weight, or of those with which the file fits
the cards of ``--fit`` (``exkv.loading.block_mixes``). The embedding and the head become Q8_0 if
their rows can be split into its blocks; norms, biases and routers stay. K types need rows whose
length is a multiple of 256; others can be of Q4_0 and further types with blocks of 32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from exkv.cache import CACHES
from exkv.checkpoint import GGUFContents, ModelConfig, open_checkpoint
from exkv.checkpoint.gguf.contents import SUFFIX, PlacedTensor
from exkv.checkpoint.gguf.tensors import GGUFCheckpoint, names_by_tensor
from exkv.checkpoint.gguf.writing import GGUFRewriter
from exkv.errors import PlacementError
from exkv.loading.block_mixes import BlockTensor, Chosen, TypeMixes, blocks_of
from exkv.loading.calibration import calibration_rows
from exkv.loading.gguf_floats import write_gguf_floats
from exkv.loading.mixes import Layers
from exkv.models import Transformer
from exkv.planning import CacheShape, Scenario, Workload, make_budgets
from exkv.planning.best import planned
from exkv.sizes import human
from exkv.weights.gguf_rounding import TYPES, blocks_with_factor
from exkv.weights.hadamard import NONE

#: Embedding and head, and their type.
_ENDS, _TYPE_OF_ENDS = ("token_embd.weight", "output.weight"), "Q8_0"
#: Number of their rows that are rounded at once.
_ROWS = 4096


def quantize_gguf(args: argparse.Namespace) -> int:
    """Carry out the command.

    Raises:
        ValueError: the source is not a GGUF file of floats, or the bits are out of range.
    """
    source, out = Path(args.model), Path(args.out)
    _check(args, out)
    config = ModelConfig.from_pretrained(source)
    if config.quantization is not None:
        raise ValueError(f"{source}: its weights are quantized already; give one of floats")
    if config.path is None:
        raise ValueError(f"{source} has no weights: give a folder of safetensors, or a GGUF file")
    if config.path.suffix == SUFFIX:
        return _quantize(args, config.path, out)
    # Beside the output, since it may be larger than the space for temporary files.
    with tempfile.TemporaryDirectory(prefix=f".{out.stem}-", dir=out.parent) as scratch:
        floats = Path(scratch) / f"floats{SUFFIX}"
        with open_checkpoint(source) as checkpoint:
            write_gguf_floats(config, checkpoint, floats)
        return _quantize(args, floats, out)


def _quantize(args: argparse.Namespace, source: Path, out: Path) -> int:
    """Convert a file of floats."""
    config = ModelConfig.from_pretrained(source)
    rows = calibration_rows(config, args.calibration, args.calibration_rows)
    contents = GGUFContents(source)
    checkpoint = GGUFCheckpoint(source)
    with checkpoint:
        layers = Layers.of(config, {})
        tensors = block_tensors(contents, checkpoint, layers)
        mixes = TypeMixes.measured(layers, checkpoint, rows, tensors)
        ends = {
            name: _TYPE_OF_ENDS
            for name in _ENDS
            if (placed := contents.tensors.get(name)) and _has_whole_blocks(placed)
        }
        types, loss = _chosen(args, config, mixes, names_by_tensor(contents), ends)
        part = out.with_name(f"{out.name}.part")
        file = GGUFRewriter(contents, part, types | ends)
        for name in ends:
            file.write(name, _round_end(contents.tensors[name]))
        _write_layers(file, contents, checkpoint, config, rows, tensors, types)
        file.copy_others()
        file.close()
        part.replace(out)
    nbytes = sum(tensors[name].nbytes(type) for name, type in types.items())
    bits = 8 * nbytes / sum(tensor.count for tensor in tensors.values())
    counted = Counter(types.values())
    print(
        f"{out}: {', '.join(f'{counted[name]} {name}' for name in TYPES if counted[name])}; "
        f"{bits:.4g} bits per weight, predicted loss {loss:.2g} nats per token; "
        f"{human(source.stat().st_size)} -> {human(out.stat().st_size)}"
    )
    return 0


def _chosen(
    args: argparse.Namespace,
    config: ModelConfig,
    mixes: TypeMixes,
    names: Mapping[str, list[str]],
    ends: Mapping[str, str],
) -> Chosen:
    """Choose by the flags.

    Args:
        names: tensor of the file -> the checkpoint's.
        ends: types of the embedding and the head.
    """
    if args.bits is not None:
        return mixes.at(args.bits)

    def missing(types: Mapping[str, str]) -> PlacementError | None:
        by_layer = {
            name.removesuffix(".weight"): type
            for tensor, type in {**types, **ends}.items()
            for name in names[tensor]
        }
        settings = {"quant_method": "gguf", "types": by_layer}
        written = replace(config, path=None, dtype=torch.bfloat16, quantization=settings)
        try:
            planned(scenario_of(args, Transformer(written)))
        except PlacementError as error:
            return error
        return None

    try:
        return mixes.fitting(missing)
    except PlacementError as error:
        raise ValueError(f"--fit {args.fit}: {error}") from None


def scenario_of(args: argparse.Namespace, model: Transformer) -> Scenario:
    """The cards and the cache of ``--fit``."""
    kind = CACHES[args.cache or "fp16"]
    length = args.max_seq_len or model.config.max_position_embeddings
    return Scenario(
        workloads=(Workload.of(model, [CacheShape.planned(model, kind, length, 1)]),),
        budgets=tuple(make_budgets(args.fit, reserve=args.reserve, cpu=args.cpu or False)),
    )


def _check(args: argparse.Namespace, out: Path) -> None:
    if args.weights is not None or args.calibration is None:
        raise ValueError(
            f"{out}: a GGUF file needs --bits N or --fit CARDS, and --calibration FILE, which "
            "choose the types that lose least"
        )
    if args.transform != NONE or args.zero_points:
        given = "--zero-points" if args.zero_points else f"--transform {args.transform}"
        raise ValueError(
            f"{out}: ggml's types have none of {given}: leave it out, or name a folder"
        )
    if out.exists():
        raise ValueError(f"{out} exists already: name a new file")


def _has_whole_blocks(placed: PlacedTensor) -> bool:
    """Whether a tensor is of floats, and its rows are whole blocks of the type of both ends."""
    tensor = placed.tensor
    return tensor.type.dtype is not None and tensor.shape[-1] % TYPES[_TYPE_OF_ENDS].block == 0


def block_tensors(
    contents: GGUFContents, checkpoint: GGUFCheckpoint, layers: Layers
) -> dict[str, BlockTensor]:
    """Name -> tensor of the file, for those that hold only matrices of decoder layers."""
    found = {}
    for name, stored in names_by_tensor(contents).items():
        matrices = [each.removesuffix(".weight") for each in stored]
        rows = (checkpoint.rows_in_file(each) for each in stored)
        if layers.matrices.keys() >= set(matrices) and all(each is not None for each in rows):
            shape = contents.tensors[name].tensor.shape
            count = torch.Size(shape).numel()
            found[name] = BlockTensor(matrices=matrices, count=count, inputs=shape[-1])
    return found


def _round_end(placed: PlacedTensor) -> bytes:
    """Round the embedding or the head, without calibration."""
    tensor = placed.tensor
    assert tensor.type.dtype is not None
    data = bytearray(placed.file.read(tensor.nbytes, tensor.offset))
    floats = torch.frombuffer(data, dtype=tensor.type.dtype).view(tensor.shape)
    root = torch.eye(tensor.shape[-1])
    blocks = [blocks_with_factor(root, each.float(), _TYPE_OF_ENDS) for each in floats.split(_ROWS)]
    return torch.cat(blocks).numpy().tobytes()


def _write_layers(
    file: GGUFRewriter,
    contents: GGUFContents,
    checkpoint: GGUFCheckpoint,
    config: ModelConfig,
    rows: torch.Tensor,
    tensors: dict[str, BlockTensor],
    types: dict[str, str],
) -> None:
    of_matrix = {m: name for name, tensor in tensors.items() for m in tensor.matrices}
    by_matrix = {matrix: types[name] for matrix, name in of_matrix.items()}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for found in blocks_of(config, checkpoint, rows, by_matrix):
        for matrix, blocks in found.items():
            name = of_matrix[matrix]
            there = waiting.setdefault(name, {})
            there[matrix] = blocks
            if len(there) == len(tensors[name].matrices):
                file.write(name, _in_file_order(contents.tensors[name], checkpoint, there))
                del waiting[name]
    assert not waiting, "every matrix gets inputs"


def _in_file_order(
    placed: PlacedTensor, checkpoint: GGUFCheckpoint, blocks: dict[str, torch.Tensor]
) -> bytes:
    """A tensor's bytes from its matrices' blocks, with rows in the file's order."""
    tensor = placed.tensor
    count = torch.Size(tensor.shape[:-1]).numel()
    (nbytes,) = {each.shape[1] for each in blocks.values()}
    whole = torch.empty(count, nbytes, dtype=torch.uint8)
    for matrix, each in blocks.items():
        stored = checkpoint.rows_in_file(f"{matrix}.weight")
        assert stored is not None  # checked
        info, order = stored
        first = (info.offset - tensor.offset) // (tensor.nbytes // count)
        own = torch.arange(len(each)) if order is None else order
        whole[first + own] = each
    return whole.numpy().tobytes()
