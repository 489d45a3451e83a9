#!/usr/bin/env bash
# Ten minutes on a machine with a GPU and no network. Builds exkv with its CUDA kernels for that GPU;
# then what no other machine can show, each figure beside its prediction (measure.py): formats of
# weights that never ran, bandwidth, an engine's step, what a card reserves, what a full card says,
# captures, prompts; then kernels beside their references, the tests marked `cuda`, and a bench
# beside transformers. Writes gpu-check.json and gpu-check.md, the two files to send back.
#
#   tests/gpu/check.sh
#
#   OUT=FOLDER                where the results go; else tests/bench/results
#   PYTHON=python3            an environment with torch>=2.11 and exkv's dependencies
#   EXKV_CHECK_SECONDS=570    for all phases; what doesn't fit is left out
#   EXKV_CHECK_DEVICE=cuda:0  or cpu, which tries the script itself without a GPU: the emulated
#                             kernels, tests on a simulated device, the bench on the CPU with a tiny
#                             model
#
# A build that fails ends the check. Any other phase that fails or runs out of time is recorded, and
# the next one goes on; one whose packages are missing (pytest, transformers), or for which no time
# is left, is recorded as left out. All take nine and a half minutes at most. The exit status is 1 if
# a phase failed.
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
BUDGET=${EXKV_CHECK_SECONDS:-570}

# Phases ----------------------------------------------------------------------------------------

# left_out NAME WHY: record that a phase doesn't run.
left_out() {
  echo "== $1: left out, $2"
  echo "$2" >"$work/$1.log"
  echo "$1 left-out 0" >>"$work/phases"
}

# phase NAME SECONDS COMMAND...: run, show, and record "name status seconds".
phase() {
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  [ "$limit" -le $((BUDGET - SECONDS)) ] || limit=$((BUDGET - SECONDS))
  if [ "$limit" -lt 10 ]; then
    left_out "$name" "no time is left"
    return
  fi
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
    left_out "$1" "$PYTHON lacks $lacking"
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
  measures=(env EXKV_SIM_DEVICES=2G,2G)
  CARD=sim:0
  decode=(--quick)
  load=(--quick)
else
  capability=$("$PYTHON" -c 'import sys, torch
cards = range(torch.cuda.device_count()) if sys.argv[2] else [torch.device(sys.argv[1])]
print(*sorted({"%d.%d" % torch.cuda.get_device_capability(card) for card in cards}), sep=";")' \
    "$DEVICE" "${EXKV_CHECK_CARDS:-}") || {
    echo "exkv: $PYTHON's torch sees no CUDA device; EXKV_CHECK_DEVICE=cpu tries this script" >&2
    exit 1
  }
  # For the GPUs that are here, and without PTX: the build is most of the time that there is.
  build=(env "EXKV_BUILD=${EXKV_BUILD:-cuda}" "TORCH_CUDA_ARCH_LIST=$capability")
  tests=(env "EXKV_CHECK_DEVICE=$DEVICE")
  measures=(env)
  CARD=$DEVICE
  decode=(--shapes 150M 1.1B --contexts 16 2048 8192 --prompts 2048 8192 --rounds 3 --steps 32)
  load=(--shape 1.1B --kinds bf16 --rounds 1)
fi

finish() {
  "$PYTHON" tests/gpu/report.py "$work" "$OUT" ${EXKV_CHECK_CARDS:+gpu-cards}
  exit
}

phase build 240 "${build[@]}" "$PYTHON" setup.py build_ext --inplace
grep -q '^build 0 ' "$work/phases" || {
  echo "exkv: the build failed, and nothing else is tried" >&2
  finish
}

# measure FILE PART SECONDS [NAME]: a part of a file, in a process of its own.
measure() {
  local name=${4:-$2}
  phase "$name" "$3" "${measures[@]}" "$PYTHON" "tests/gpu/$1.py" "$2" "$CARD" \
    "$work/measure-$name.json"
}

if [ -n "${EXKV_CHECK_CARDS:-}" ]; then
  measure cards alone 60
  measure cards filled 60
  measure cards hops 60
  measure cards graphs 60
  measure cards unlike 60
  finish
fi

measure measure right 45
measure measure bandwidth 60
measure measure engine 45
measure measure reserved 40
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True measure measure reserved 40 reserved-expandable
measure measure offloaded 30
measure measure full 30
measure measure capture 20
measure measure prompts 45
phase kernels 60 "$PYTHON" tests/gpu/check_kernels.py "$DEVICE" "$work/kernels.json"
phase_with "pytest" tests 150 "${tests[@]}" "$PYTHON" -m pytest -m cuda tests/gpu tests/ops -ra \
  --continue-on-collection-errors -o junit_family=xunit1 --junitxml="$work/tests.xml"
# Whatever time is left.
phase_with "transformers" load 60 "$PYTHON" -m tests.bench load --device "$DEVICE" "${load[@]}" \
  --json "$work/load.json"
phase_with "transformers" decode 300 "$PYTHON" -m tests.bench decode \
  --device "$DEVICE" "${decode[@]}" --json "$work/decode.json"
finish
