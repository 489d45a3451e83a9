"""Builds the wheel exkv-cuda13: exkv's CUDA kernels for a torch that is built for CUDA 13.

The major version is that of the toolkit that compiles. The kernels are a distribution of their own
because PyPI takes one wheel of a version and platform, and most people need either. It depends on
exkv, so that ``pip install exkv-cuda13`` brings both; ``exkv_ext`` finds the module in the package
``exkv_cuda13``. ``exkv_ext/release/wheels.sh`` builds it for a release.
"""

import importlib.util
import os
import runpy
import shutil
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

spec = importlib.util.spec_from_file_location("exkv_setup", ROOT / "setup.py")
exkv = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exkv)

exkv.require_torch()
home = exkv.cuda_home_for("cuda")
# For all GPUs, whatever this machine has.
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", exkv.cuda_architectures(home, []))
release = exkv.cuda_release(home)
major = release.split(".")[0]
version = runpy.run_path(str(ROOT / "exkv" / "version.py"))["__version__"]

module = exkv.cuda_module(home)
module.name = f"exkv_cuda{major}._cuda"
module.sources = [str(ROOT / source) for source in module.sources]

shutil.copy(ROOT / "LICENSE", HERE)
setup(
    name=f"exkv-cuda{major}",
    version=version,
    description=f"CUDA kernels of exkv for torch built for CUDA {major}",
    long_description=f"`pip install exkv-cuda{major}` installs exkv with these kernels, which were "
    f"compiled by CUDA {release}. See https://pypi.org/project/exkv.",
    long_description_content_type="text/markdown",
    license_expression="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=[f"exkv=={version}"],
    packages=[],
    ext_modules=[module],
    cmdclass={"build_ext": exkv.build_command("cuda")},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
