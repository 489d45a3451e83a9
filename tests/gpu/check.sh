#!/usr/bin/env bash
# One command for a machine with a GPU and no network: builds exkv with its CUDA kernels, runs the
# tests marked `cuda`, measures beside transformers, and writes gpu-check.json and gpu-check.md.
#
#   tests/gpu/check.sh
#
#   OUT=FOLDER                where the results go; else tests/bench/results
#   PYTHON=python3            an environment with torch>=2.11 and what `need` names below
#   EXKV_CHECK_DEVICE=cuda:0  or cpu, which tries the script itself without a GPU: tests on a
#                             simulated device, the bench on the CPU with a tiny model
#
# A phase that fails or runs out of time is recorded and the next one goes on; all of them take
# at most nine minutes. The exit status is 1 if a phase failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

PYTHON=${PYTHON:-python3}
DEVICE=${EXKV_CHECK_DEVICE:-cuda:0}
OUT=$(mkdir -p "${OUT:-tests/bench/results}" && cd "${OUT:-tests/bench/results}" && pwd) || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

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

need() {
  "$PYTHON" - "$@" <<'PYTHON'
import importlib.util
import sys

missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"exkv: {sys.executable} lacks {', '.join(missing)}; install them, or name another "
             "environment with PYTHON=.")
PYTHON
}

need torch transformers safetensors sentencepiece tokenizers jinja2 rich numpy hypothesis pytest \
  ninja setuptools || exit 1

if [ "$DEVICE" = cpu ]; then
  echo "exkv: trying the script without a GPU" >&2
  build=(env "EXKV_BUILD=${EXKV_BUILD:-auto}")
  tests=(env EXKV_CHECK_DEVICE=sim:0 EXKV_SIM_DEVICES=2G)
  bench=(--quick)
else
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "exkv: $PYTHON's torch sees no CUDA device; EXKV_CHECK_DEVICE=cpu tries this script" >&2
    exit 1
  }
  build=(env "EXKV_BUILD=${EXKV_BUILD:-cuda}")
  tests=(env "EXKV_CHECK_DEVICE=$DEVICE")
  bench=(--device "$DEVICE" --shapes 150M 1.1B --dtypes bf16 --contexts 16 512 2048
    --rounds 5 --load-rounds 3 --steps 64)
fi

phase build 150 "${build[@]}" "$PYTHON" setup.py build_ext --inplace
phase tests 210 "${tests[@]}" "$PYTHON" -m pytest -m cuda tests -ra -o junit_family=xunit1 \
  --junitxml="$work/tests.xml"
phase bench 150 "$PYTHON" -m tests.bench "${bench[@]}" --json "$work/bench.json"

"$PYTHON" tests/gpu/report.py "$work" "$OUT"
