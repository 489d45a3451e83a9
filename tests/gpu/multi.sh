#!/usr/bin/env bash
# Ten minutes on a machine with two GPUs or more: the second card alone, beside a first one that
# another program fills, hops between them, graphs on both, unlike cards (cards.py). Writes
# gpu-cards.json and gpu-cards.md, the two files to send back. Options: see check.sh.
#
#   tests/gpu/multi.sh
set -euo pipefail
exec env EXKV_CHECK_CARDS=1 "$(dirname "${BASH_SOURCE[0]}")/check.sh" "$@"
