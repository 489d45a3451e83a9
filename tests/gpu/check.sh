#!/usr/bin/env bash
# One command for a machine with a GPU and no network: builds exkv with its CUDA kernels for the
# GPUs that are there, holds every kernel against its reference, runs the tests marked `cuda`,
# measures beside transformers, and writes gpu-check.json and gpu-check.md with the date and the
# machine's name.
#
#   tests/gpu/check.sh
#
#   OUT=FOLDER                where the results go; else tests/bench/results
#   PYTHON=python3            an environment with torch>=2.11 and exkv's dependencies
#   EXKV_CHECK_DEVICE=cuda:0  or cpu, which tries the script itself without a GPU: the emulated
#                             kernels, tests on a simulated device, the bench on the CPU with a tiny
#                             model
#
# A build that fails ends it, since nothing after it would say anything about the kernels. Any other
# phase that fails or runs out of time is recorded, and the next one goes on; one whose packages are
# missing (pytest, transformers) is recorded as left out. All of them take nine and a half minutes
# at most. The exit status is 1 if a phase failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

PYTHON=${PYTHON:-python3}
DEVICE=${EXKV_CHECK_DEVICE:-cuda:0}
OUT=$(mkdir -p "${OUT:-tests/bench/results}" && cd "${OUT:-tests/bench/results}" && pwd) || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/ops${PYTHONPATH:+:$PYTHONPATH}"
MAX_JOBS=${MAX_JOBS:-$(nproc)}
export MAX_JOBS

# Phases ----------------------------------------------------------------------------------------

# phase NAME SECONDS COMMAND...: run, show, and record "name status seconds".
phase() {
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  echo "== $name (at most $limit s)"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$work/$name.log"
  status=${PIPESTATUS[0]}
  echo "$name $status $((SECONDS - started))" >>"$work/phases"
  echo "== $name: exit status $status after $((SECONDS - started)) s"
}

# missing NAME...: those of these packages that are not there.
missing() {
  "$PYTHON" -c 'import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' "$@"
}

# phase_with "PACKAGES" NAME SECONDS COMMAND...: the phase, if its packages are there.
phase_with() {
  local lacking
  # shellcheck disable=SC2086  # a list of words
  lacking=$(missing $1)
  shift
  if [ -n "$lacking" ]; then
    echo "== $1: left out, $PYTHON lacks $lacking"
    echo "lacks $lacking" >"$work/$1.log"
    echo "$1 left-out 0" >>"$work/phases"
    return
  fi
  phase "$@"
}

# An environment that can't do the least -----------------------------------------------------------

lacking=$(missing torch setuptools safetensors sentencepiece tokenizers jinja2 rich numpy) || exit 1
if [ -n "$lacking" ]; then
  echo "exkv: $PYTHON lacks $lacking; install them, or name another environment with PYTHON=." >&2
  exit 1
fi
[ -z "$(missing ninja)" ] || echo "exkv: no ninja here: the build runs one compiler at a time" >&2

if [ "$DEVICE" = cpu ]; then
  echo "exkv: trying the script without a GPU" >&2
  build=(env "EXKV_BUILD=${EXKV_BUILD:-auto}")
  tests=(env EXKV_CHECK_DEVICE=sim:0 EXKV_SIM_DEVICES=2G)
  decode=(--quick)
  load=(--quick)
else
  capability=$("$PYTHON" -c 'import torch
print("%d.%d" % torch.cuda.get_device_capability())') || {
    echo "exkv: $PYTHON's torch sees no CUDA device; EXKV_CHECK_DEVICE=cpu tries this script" >&2
    exit 1
  }
  # For one GPU, and without PTX: the build is most of the time that there is.
  build=(env "EXKV_BUILD=${EXKV_BUILD:-cuda}" "TORCH_CUDA_ARCH_LIST=$capability")
  tests=(env "EXKV_CHECK_DEVICE=$DEVICE")
  decode=(--shapes 150M 1.1B --contexts 16 2048 8192 --prompts 2048 8192 --rounds 3 --steps 32)
  load=(--shape 1.1B --kinds bf16 --rounds 1)
fi

finish() {
  "$PYTHON" tests/gpu/report.py "$work" "$OUT"
  exit
}

phase build 240 "${build[@]}" "$PYTHON" setup.py build_ext --inplace
grep -q '^build 0 ' "$work/phases" || {
  echo "exkv: the build failed, and nothing else is tried" >&2
  finish
}
phase kernels 60 "$PYTHON" tests/gpu/check_kernels.py "$DEVICE" "$work/kernels.json"
phase_with "pytest" tests 150 "${tests[@]}" "$PYTHON" -m pytest -m cuda tests/gpu tests/ops -ra \
  --continue-on-collection-errors -o junit_family=xunit1 --junitxml="$work/tests.xml"
# Whatever time is left.
phase_with "transformers" load 60 "$PYTHON" -m tests.bench load --device "$DEVICE" "${load[@]}" \
  --json "$work/load.json"
phase_with "transformers" decode $((SECONDS < 450 ? 570 - SECONDS : 120)) "$PYTHON" -m tests.bench decode \
  --device "$DEVICE" "${decode[@]}" --json "$work/decode.json"
finish
