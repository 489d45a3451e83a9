"""``exkv quantize IN.gguf OUT.gguf --bits N --calibration FILE``: convert a GGUF file of floats to
ggml's types, K types included.

Metadata and tokenizer are the source's. The decoder layers' matrices get the types that lose least
on the text at N bits per weight (``exkv.loading.block_mixes``). The embedding and the head become
Q8_0 if their rows can be split into its blocks; norms, biases and routers stay. K types need rows
whose length is a multiple of 256; others can be of Q4_0 and further types with blocks of 32.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch

from exkv.checkpoint import GGUFContents, ModelConfig
from exkv.checkpoint.gguf.contents import SUFFIX, PlacedTensor
from exkv.checkpoint.gguf.tensors import GGUFCheckpoint, names_by_tensor
from exkv.checkpoint.gguf.writing import GGUFRewriter
from exkv.loading.block_mixes import BlockTensor, blocks_of, chosen_types
from exkv.loading.calibration import calibration_rows
from exkv.loading.mixes import Layers
from exkv.sizes import human
from exkv.weights.gguf_rounding import TYPES, blocks_with_factor

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
    _check(args, source, out)
    config = ModelConfig.from_pretrained(source)
    if config.quantization is not None:
        raise ValueError(f"{source}: its weights are quantized already; give a file of floats")
    rows = calibration_rows(config, args.calibration)
    contents = GGUFContents(source)
    checkpoint = GGUFCheckpoint(source)
    with checkpoint:
        layers = Layers.of(config, {})
        tensors = block_tensors(contents, checkpoint, layers)
        types, loss = chosen_types(layers, checkpoint, rows, tensors, args.bits)
        ends = {
            name: _TYPE_OF_ENDS
            for name in _ENDS
            if (placed := contents.tensors.get(name)) and _has_whole_blocks(placed)
        }
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


def _check(args: argparse.Namespace, source: Path, out: Path) -> None:
    if args.bits is None or args.calibration is None:
        raise ValueError(
            f"{out}: a GGUF file needs --bits N and --calibration FILE, which choose the types "
            "that lose least at N bits per weight"
        )
    if source.suffix != SUFFIX:
        raise ValueError(
            f"{source} is not a GGUF file, and exkv can't write its tokenizer into one: convert "
            "the folder with llama.cpp's convert_hf_to_gguf.py --outtype bf16 first"
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
