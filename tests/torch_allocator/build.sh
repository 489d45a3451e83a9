#!/bin/bash
# Builds torch's own caching allocator over a CUDA runtime without a GPU, to record what it answers:
#   build.sh TORCH_WHEEL FOLDER      (a wheel of torch for CUDA, as pip download fetches it)
# Then `python -m tests.torch_allocator FOLDER` records traces.json anew.
set -eu
here=$(cd "$(dirname "$0")" && pwd); wheel=$1; out=$2; cuda=${CUDA_HOME:-/usr/local/cuda}
mkdir -p "$out"
python3 - "$wheel" "$out" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wanted = ("torch/lib/libc10", "torch/include/c10/", "torch/include/torch/headeronly/")
    for name in wheel.namelist():
        if name.startswith(wanted):
            wheel.extract(name, sys.argv[2])
PYTHON
echo 'libcudart.so.13 { global: *; };' > "$out/versions.map"
g++ -O1 -shared -fPIC -I"$cuda/include" -Wl,-soname,libcudart.so.13 \
  -Wl,--version-script="$out/versions.map" -o "$out/libcudart.so.13" "$here/fake_cudart.cpp"
g++ -shared -fPIC -o "$out/libnvidia-ml.so.1" "$here/fake_nvml.cpp"
g++ -O1 -std=c++20 -I"$out/torch/include" -I"$cuda/include" -o "$out/replay" "$here/replay.cpp" \
  -L"$out/torch/lib" -lc10_cuda -lc10 -L"$out" -l:libcudart.so.13
