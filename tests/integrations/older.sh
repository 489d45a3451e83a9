#!/usr/bin/env bash
# Tests of the plug-in (those marked "older") under earlier versions of transformers, 4.57 and the last
# one before caches got another name, each in an environment of its own: what it needs in other
# versions lies in a folder that comes before the other packages of Python's.
#
#   tests/integrations/older.sh [arguments of pytest]
#   PYTHON=.venv/bin/python  whose other packages it takes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python}

run_under() { # VERSION FURTHER_PACKAGES -- ARGUMENTS
  local packages=("transformers==$1") version=$1 tag folder
  shift
  while [ "$1" != -- ]; do packages+=("$1") && shift; done
  shift
  tag=$(echo "$("$python" -c 'import sys; print(sys.executable, sys.version)') ${packages[*]}" | cksum | cut -d' ' -f1)
  folder=build/transformers-$version-$tag
  if [ ! -d "$folder" ]; then
    rm -rf "$folder.part"
    "$python" -m pip --disable-pip-version-check install -qq --no-deps --target "$folder.part" "${packages[@]}" >&2
    mv "$folder.part" "$folder"
  fi
  echo "transformers $version" >&2
  PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 \
    "$python" -m pytest -m older tests/integrations "$@"
}

run_under 4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2 requests==2.32.5 urllib3==2.5.0 \
  idna==3.10 charset-normalizer==3.4.3 certifi==2025.8.3 -- "$@"
run_under 5.23.0 -- "$@"
