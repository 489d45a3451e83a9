"""``check.sh`` where it can't go on: what a borrowed GPU's ten minutes are too short for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from native_ops import ROOT


def run_check(out, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tests/gpu/check.sh")],
        env={**os.environ, "OUT": str(out), "EXKV_CHECK_DEVICE": "cpu", **env},
        capture_output=True,
        text=True,
    )


def test_nothing_is_tried_after_a_failed_build(tmp_path):
    result = run_check(tmp_path, PYTHON=sys.executable, EXKV_BUILD="nonsense")
    assert result.returncode == 1, result.stderr
    assert "the build failed, and nothing else is tried" in result.stderr
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [phase["name"] for phase in found["phases"]] == ["build"]
    assert "EXKV_BUILD='nonsense' is unknown" in " ".join(found["phases"][0]["log"])
    assert found["machine"]["date"] and found["machine"]["name"]


def test_an_environment_without_torch_is_told_at_once(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    result = run_check(tmp_path, PYTHON=str(bare))
    assert result.returncode == 1
    assert "lacks torch" in result.stderr
