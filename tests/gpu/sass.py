"""Counts what the inner loops of the kernels for weights of few bits issue, without a GPU.

``python -m tests.gpu.sass [--arch 80 86 89 90 120] [--source NAME ...]``, by default for compute
capability 9.0 and all sources. Each kernel is compiled to machine code and disassembled, its inner
loop is found, and its instructions are set beside the codes that a warp takes in meanwhile. At full
bandwidth a multiprocessor may issue ``processors * 4 * clock / bandwidth`` instructions a byte:
:data:`CARDS` has that a KiB. Exits 1 where a kernel has no
entry in :data:`LOOPS`, or where a loop

- issues more than the card may at 0.9 of its bandwidth, or more than :data:`ASKED` where it is one
  of those formats. What doesn't reach that yet is held at the figure in ``sass_held.json``: it can
  only get better. ``--hold`` writes the figures that are reached;
- keeps registers in memory, or needs more than are its own.

Instructions are counted as they stand between a branch and its target. So branches that aren't
taken count too: a figure is an upper bound, and a prediction until a card has said so. Rows of x
beyond a loop's own take further passes.

Needs nvcc, and nvdisasm from its folder, from PATH or from the package nvidia-cuda-nvdisasm, which
is fetched into ``build/`` if pip can.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # so that it runs as a module without pytest

from native_ops import build_once, cuda_headers, setup_script  # noqa: E402

#: Compute capability -> a card, and the instructions a KiB of codes that it may issue.
CARDS = {
    80: ("A100", 322),
    86: ("RTX 3090", 610),
    89: ("RTX 4090", 1311),
    90: ("H100", 274),
    120: ("RTX 5090", 936),
}
#: Of the bandwidth.
SHARE = 0.9
#: Instructions a KiB, on every card, of the formats that most people have.
ASKED, ASKED_OF = 250, ("int4", "int8", "Q4_K", "EXL2")
HELD = Path(__file__).with_name("sass_held.json")
TOOLS = ROOT / "build" / "nvdisasm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What an iteration of an inner loop does.

    Attributes:
        kernel: a pattern of its kernels' mangled names; the slowest one counts.
        rows: of x that it multiplies at once.
        code_bytes: that a warp takes in.
        product: the instruction that multiplies.
        products: how many of them. The compiler may double a loop; that shows here.
        place: of the loops with that many products, by length: one kernel has several.
        registers: that a thread may have. With 128, a multiprocessor has room for 16 warps.
    """

    format: str
    source: str
    kernel: str
    rows: int
    code_bytes: float
    product: str
    products: int
    place: int = 0
    registers: int = 128

    @property
    def name(self) -> str:
        return f"{self.format}, {self.rows} row{'s' * (self.rows > 1)}"


SHIFTS = ("symmetric", "offset", "zero")


def _tensor_loops() -> Iterator[Loop]:
    """linear_groups_tensor.cu: four chunks of 16 outputs and 32 inputs."""
    own, is_sorted, either = range(3)  # its enum class Order
    kinds = [
        *((bits, own, wide, of) for bits in (4, 8) for wide, of in enumerate((32, 128))),
        *((bits, is_sorted, 0, "any, sorted inputs") for bits in (4, 8)),
        *((bits, either, 0, "any") for bits in (2, 3, 5, 6)),
    ]
    for bits, order, wide, groups in kinds:
        for shift, beside in enumerate(SHIFTS):
            yield Loop(
                format=f"int{bits}, {beside}, groups of {groups}",
                source="linear_groups_tensor",
                kernel=rf"GroupsTensorKernel.*Li{bits}EL.*OrderE{order}ELNS_11GroupsShiftE{shift}"
                rf"ELb{wide}E",
                rows=8,
                code_bytes=4 * 16 * 32 * bits / 8,
                product="HMMA",
                products=8 if shift == 0 else 16,
            )


#: Types of linear_packed_tensor.cu -> the format's name, bytes of a row's piece, products.
TENSOR_TYPES = {
    "TensorQ2K": ("Q2_K", 84, 32),
    "TensorQ3K": ("Q3_K", 110, 16),
    "TensorWithMinimaILi4E": ("Q4_K", 144, 32),
    "TensorWithMinimaILi5E": ("Q5_K", 176, 32),
    "TensorQ6K": ("Q6_K", 105, 8),
    "TensorIq4Nl": ("IQ4_NL", 72, 8),
    "TensorIq4Xs": ("IQ4_XS", 136, 16),
    "TensorFloat8": ("FP8", 128, 8),
    "TensorFloat4": ("MXFP4", 64, 8),
    "TensorIndices": ("nf4", 64, 8),
}


def _packed_tensor_loops() -> Iterator[Loop]:
    """linear_packed_tensor.cu: a piece of 128 or 256 inputs of 16 outputs."""
    for block, (name, block_bytes, products) in TENSOR_TYPES.items():
        yield Loop(
            format=name,
            source="linear_packed_tensor",
            kernel=rf"PackedTensorKernel.*{block}",
            rows=8,
            code_bytes=16 * block_bytes,
            product="HMMA",
            products=products,
        )


#: Chunk types of packed_chunk.cuh -> the format's name, and bytes of 32 weights.
PACKED = {
    "GgmlChunkINS_7CudaQ2KE": ("Q2_K", 84 / 8),
    "GgmlChunkINS_7CudaQ3KE": ("Q3_K", 110 / 8),
    "GgmlChunkINS_14CudaWithMinimaILi4E": ("Q4_K", 144 / 8),
    "GgmlChunkINS_14CudaWithMinimaILi5E": ("Q5_K", 176 / 8),
    "GgmlChunkINS_7CudaQ6KE": ("Q6_K", 210 / 8),
    "GgmlChunkINS_9CudaIq4NlE": ("IQ4_NL", 18),
    "GgmlChunkINS_9CudaIq4XsE": ("IQ4_XS", 136 / 8),
    "Float8Chunk": ("FP8", 32),
    "Float4Chunk": ("MXFP4", 17),
    "TableChunk": ("nf4", 16.5),
}


def _packed_loops() -> Iterator[Loop]:
    """linear_packed.cu: a lane has a chunk of 32 inputs of two outputs."""
    for chunk, (name, chunk_bytes) in PACKED.items():
        for rows in (1, 4):
            yield Loop(
                format=f"float32 x, {name}",
                source="linear_packed",
                kernel=rf"LinearPackedKernel.*{chunk}.*Li{rows}E",
                rows=rows,
                code_bytes=32 * 2 * chunk_bytes,
                product="FFMA",
                products=64 * rows,
                registers=255,
            )


def _section_loops() -> Iterator[Loop]:
    """linear_sections.cu: four chunks of 16 outputs and 32 inputs, in one kernel a loop for each
    number of bits. They have as many products, and what sets them apart is the work of taking codes
    out of planes: a loop is found by its length."""
    for place, bits in enumerate((4, 2, 8, 3, 6, 5)):
        yield Loop(
            format=f"EXL2 at {bits} bits",
            source="linear_sections",
            kernel="TensorSectionsKernel",
            rows=8,
            code_bytes=4 * 16 * 32 * bits / 8,
            product="HMMA",
            products=8,
            place=place,
        )
    # For float32 two chunks, lane by lane, in loops for 4 bits and 8, of which the longer counts,
    # and one for all others.
    for rows in (1, 4):
        for bits, place in ((4, 1), (2, 3)):  # the third is around them
            yield Loop(
                format=f"float32 x, EXL2 at {bits} bits",
                source="linear_sections",
                kernel=f"LinearSectionsKernelIfLi{rows}E",
                rows=rows,
                code_bytes=2 * 16 * 32 * bits / 8,
                product="FFMA",
                products=36 * rows,
                place=place,
            )


def _trellis_loops() -> Iterator[Loop]:
    """linear_trellis.cu: four tiles of 16 outputs and inputs; for float32 one tile, lane by lane,
    by a kernel for all bits and codebooks, one of which multiplies, too."""
    for bits in (half / 2 for half in range(2, 17)):
        yield Loop(
            format=f"EXL3 at {bits:g} bits",
            source="linear_trellis",
            kernel=rf"TrellisTensorKernel.*Li{2 * bits:g}ELb[01]E",
            rows=8,
            code_bytes=4 * 16 * 16 * bits / 8,
            product="HMMA",
            products=4,
        )
    for rows in (1, 4):
        yield Loop(
            format="float32 x, EXL3 at 4 bits",
            source="linear_trellis",
            kernel=f"LinearTrellisKernelIfLi{rows}E",
            rows=rows,
            code_bytes=16 * 16 * 4 / 8,
            product="FFMA",
            products=8 * rows + 8,
        )


def _group_loops() -> Iterator[Loop]:
    """linear_groups.cu, for float32: a lane has a chunk of 32 inputs of four outputs. One kernel
    has all bits that are in planes, and 2 bits."""
    for of_kernel, bits in ((4, 4), (8, 8), (0, 2)):
        for rows in (1, 4):
            yield Loop(
                format=f"float32 x, int{bits}",
                source="linear_groups",
                kernel=rf"LinearGroupsKernelIfLi{rows}ELi{of_kernel}E",
                rows=rows,
                code_bytes=32 * 4 * 32 * bits / 8,
                product="FFMA",
                products=(4 * 32 + 2 * 4) * rows,
                registers=255,
            )


LOOPS = (
    *_tensor_loops(),
    *_packed_tensor_loops(),
    *_packed_loops(),
    *_section_loops(),
    *_trellis_loops(),
    *_group_loops(),
)
SOURCES = tuple(dict.fromkeys(loop.source for loop in LOOPS))


# Machine code -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """Instructions in their order, and where labels point to."""

    code: list[str]
    labels: dict[str, int]

    def registers(self) -> int:
        """Registers of a thread, by the highest that is named."""
        return 1 + max(int(n) for line in self.code for n in re.findall(r"\bR(\d+)\b", line))

    def spills(self) -> int:
        return sum(_operation(line).startswith(("LDL", "STL")) for line in self.code)

    def loops(self) -> Iterator[list[str]]:
        """What stands between each backward branch and its target."""
        for at, line in enumerate(self.code):
            target = re.search(r"`\((\S+)\)", line)
            first = self.labels.get(target[1], at + 1) if target else at + 1
            if "BRA" in _operation(line) and first <= at:
                yield self.code[first : at + 1]


def _operation(line: str) -> str:
    words = line.split()
    return words[1] if words[0].startswith("@") else words[0]


def issued(code: list[str], operation: str = "") -> int:
    return sum(_operation(line).split(".")[0].startswith(operation) for line in code)


def kernels(text: str) -> dict[str, Kernel]:
    """Mangled name -> the kernel, from what nvdisasm writes."""
    found: dict[str, Kernel] = {}
    kernel = Kernel([], {})
    for line in text.splitlines():
        if start := re.match(r"\.text\.(\S+):", line):
            kernel = found.setdefault(start[1], Kernel([], {}))
        elif label := re.match(r"(\.L_\S+):", line):
            kernel.labels[label[1]] = len(kernel.code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            kernel.code.append(instruction[1])
    return found


@cache
def find_nvdisasm() -> Path | None:
    """nvdisasm beside nvcc, on PATH, or as :func:`fetch_nvdisasm` left it."""
    home = setup_script().find_cuda_home()
    beside = [home / "bin" / "nvdisasm"] if home else []
    on_path = shutil.which("nvdisasm")
    candidates = [*beside, *([Path(on_path)] if on_path else []), *TOOLS.glob("**/bin/nvdisasm")]
    return next(filter(Path.is_file, candidates), None)


def fetch_nvdisasm() -> None:
    """Take it out of its wheel: 6 MB that no environment needs to have installed."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*pip, "nvidia-cuda-nvdisasm>=13,<14"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith("bin/nvdisasm")]
            archive.extractall(TOOLS, names)
    for name in names:
        (TOOLS / name).chmod(0o755)
    find_nvdisasm.cache_clear()


def compile_and_read(source: str, arch: int) -> dict[str, Kernel]:
    """The kernels of a source; what was compiled of the same files before isn't compiled again."""
    setup = setup_script()
    home, nvdisasm = setup.find_cuda_home(), find_nvdisasm()
    assert home is not None and nvdisasm is not None
    file = ROOT / "exkv_ext" / "cuda" / f"{source}.cu"
    command = [str(home / "bin" / "nvcc"), *setup.NVCC_FLAGS, f"-arch=sm_{arch}", "-cubin"]
    inputs = [file, *cuda_headers()]
    name = f"{source}-{arch}.cubin"
    (cubin,) = build_once("sass", {name: ([*command, str(file)], inputs)})
    listing = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True)
    return kernels(listing.stdout)


# Counting -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Count:
    """What one loop issues on one card."""

    loop: Loop
    arch: int
    per_kib: int
    registers: int
    spills: int

    def faults(self, held: int | None) -> list[str]:
        """Why it fails; ``held`` is the figure that stands in for a budget that isn't reached."""
        most = budget(self.loop, self.arch) if held is None else held
        spilled, wide = self.spills > 0, self.registers > self.loop.registers
        return [
            *([f"{self.per_kib} a KiB, more than {most}"] if self.per_kib > most else []),
            *([f"{self.spills} loads and stores of spilled registers"] if spilled else []),
            *([f"{self.registers} registers, more than {self.loop.registers}"] if wide else []),
        ]


def budget(loop: Loop, arch: int) -> int:
    """Instructions a KiB of codes that a loop may issue."""
    most = int(CARDS[arch][1] / SHARE)
    return min(most, ASKED) if loop.format.startswith(ASKED_OF) else most


def count(loop: Loop, arch: int, found: dict[str, Kernel]) -> Count:
    """The slowest of a loop's kernels.

    Raises:
        ValueError: no kernel has such a name, or none has such a loop.
    """
    made = [kernel for name, kernel in found.items() if re.search(loop.kernel, name)]
    if not made:
        raise ValueError(f"{loop.name}: {loop.source}.cu has no kernel {loop.kernel}")
    lengths = [_length(loop, kernel) for kernel in made]
    return Count(
        loop,
        arch,
        round(max(lengths) / loop.code_bytes * 1024),
        max(kernel.registers() for kernel in made),
        max(kernel.spills() for kernel in made),
    )


def _length(loop: Loop, kernel: Kernel) -> float:
    """Instructions of an iteration; of a loop that the compiler doubled, half of them."""
    sizes = []
    for body in kernel.loops():
        times, left = divmod(issued(body, loop.product), loop.products)
        if times > 0 and left <= loop.products // 4:  # a few products apply scales
            sizes.append(len(body) / times)
    if len(sizes) <= loop.place:
        raise ValueError(f"{loop.name}: no loop of {loop.products} {loop.product} in {loop.kernel}")
    return sorted(sizes)[loop.place]


#: Kernels that multiply nothing, or run on GPUs without tensor cores only, where they are empty
#: elsewhere.
_UNCOUNTED = r"Dequantize|Linear(Groups|Sections|Trellis)KernelI(6__half|13__nv_b)"


def uncounted(source: str, found: Iterable[str]) -> list[str]:
    """Kernels of a source that no loop here stands for."""
    patterns = [_UNCOUNTED, *(loop.kernel for loop in LOOPS if loop.source == source)]
    return [name for name in found if not any(re.search(each, name) for each in patterns)]


def count_all(sources: list[str], arches: list[int]) -> Iterator[Count]:
    for arch in arches:
        for source in sources:
            found = compile_and_read(source, arch)
            if left := uncounted(source, found):
                raise ValueError(f"{source}.cu: LOOPS has no entry for {', '.join(left)}")
            yield from (count(loop, arch, found) for loop in LOOPS if loop.source == source)


def held_figures() -> dict[str, dict[str, int]]:
    """Loop -> compute capability -> the figure that it is held at."""
    return json.loads(HELD.read_text())


def hold(counts: list[Count]) -> None:
    """Write what is above its budget; figures of loops that weren't counted stay."""
    held = held_figures()
    for each in counts:
        figures = held.setdefault(each.loop.name, {})
        figures.pop(str(each.arch), None)
        if each.per_kib > budget(each.loop, each.arch):
            figures[str(each.arch)] = each.per_kib
    left = {name: dict(sorted(held[name].items())) for name in sorted(held) if held[name]}
    HELD.write_text(json.dumps(left, indent=1) + "\n")


def report(counts: list[Count]) -> int:
    """Print a table; how many loops fail."""
    held, failed = held_figures(), 0
    print("| loop | card | a KiB | budget | share of bandwidth | registers |")
    print("|---|---|---:|---:|---:|---:|")
    for each in counts:
        card, most = CARDS[each.arch]
        figure = held.get(each.loop.name, {}).get(str(each.arch))
        faults = each.faults(figure)
        failed += bool(faults)
        wanted = budget(each.loop, each.arch)
        limit = f"{wanted}" if figure is None else f"{wanted}, held at {figure}"
        share = min(1.0, most / each.per_kib)
        print(
            f"| {each.loop.name} | {card} | {each.per_kib} | {limit} | {share:.2f} "
            f"| {each.registers} |{' FAILED: ' + '; '.join(faults) if faults else ''}"
        )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Count instructions of kernels' inner loops.")
    parser.add_argument("--arch", nargs="+", type=int, choices=CARDS, default=[90])
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--hold", action="store_true", help="write what is above its budget")
    args = parser.parse_args()
    if setup_script().find_cuda_home() is None:
        sys.exit("sass: no CUDA toolkit here. Type: pip install 'cuda-toolkit[cccl,nvcc]<14'")
    if find_nvdisasm() is None:
        fetch_nvdisasm()
    counts = list(count_all(args.source, args.arch))
    if args.hold:
        hold(counts)
    return int(report(counts) > 0)


if __name__ == "__main__":
    sys.exit(main())
