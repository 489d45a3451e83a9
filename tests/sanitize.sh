#!/usr/bin/env bash
# The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: builds exkv_ext._C anew with
# them in a copy of the tree, and runs the kernels' tests on it for each instruction set.
#
#   tests/sanitize.sh [PYTEST ARGUMENTS]
#
#   PYTHON=python3   an environment with torch>=2.11, pytest and hypothesis; else .venv's
#   ISAS="..."       instruction sets; else all of them (those that are missing here fall back)
#
# Takes minutes, so most of hypothesis is left out; needs GCC, whose sanitizers don't see the masked
# loads of AVX-512: for those, tests put tensors before a page that can't be read.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-.venv/bin/python}
PYTHON=$(cd "$(dirname "$(command -v "$PYTHON")")" && pwd)/$(basename "$PYTHON")
ISAS=${ISAS:-portable avx2 avx512 avx512_bf16}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r exkv exkv_ext tests setup.py pyproject.toml LICENSE "$work"
cd "$work"
rm -f exkv_ext/*.so

sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
CFLAGS="$sanitizers -fno-omit-frame-pointer -g1 -O1" LDFLAGS="$sanitizers" EXKV_BUILD=cpu \
  "$PYTHON" setup.py -q build_ext --inplace >build.log 2>&1 || { cat build.log; exit 1; }

# Python itself isn't built with them, so they come first by force; what it leaks is its own.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
export LD_PRELOAD
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH=$work OMP_NUM_THREADS=2
# Left out: what builds or starts other programs, what measures memory, and hypothesis's longest.
chosen="not emulated and not instruction_set and not simulated and not two_devices and not no_copy"
chosen+=" and not memory and not test_any"
status=0
for isa in $ISAS; do
  echo "== $isa"
  EXKV_CPU_ISA=$isa "$PYTHON" -m pytest -q -p no:cacheprovider \
    tests/ops/test_attention.py tests/ops/test_attention_parts.py tests/ops/test_pages.py \
    tests/ops/test_append_kv.py tests/ops/test_kv_quant.py tests/ops/test_kv_formats.py tests/ops/test_linear.py \
    tests/ops/test_norms.py tests/ops/test_rope.py tests/models/test_bound_run.py \
    tests/ops/test_sample.py -k "$chosen" "$@" || status=1
done
exit $status
