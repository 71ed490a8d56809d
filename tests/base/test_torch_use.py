"""What torch takes, by the build that is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weightsmith._base.torch_use import CPU_BUILD_BYTES, GPU_BUILD_BYTES, installed_bytes


@pytest.mark.parametrize(
    ("library", "memory_bytes"),
    [
        ("libtorch_cpu.so", CPU_BUILD_BYTES),
        ("libtorch_cuda.so", CPU_BUILD_BYTES + GPU_BUILD_BYTES),
        ("libtorch_hip.so", CPU_BUILD_BYTES + GPU_BUILD_BYTES),
        ("libtorch_xpu.so", CPU_BUILD_BYTES + GPU_BUILD_BYTES),
        ("torch_cpu.dll", CPU_BUILD_BYTES),
        ("torch_cuda.dll", CPU_BUILD_BYTES + GPU_BUILD_BYTES),
        ("torch_xpu.dll", CPU_BUILD_BYTES + GPU_BUILD_BYTES),
    ],
)
def test_a_build_for_a_gpu_takes_more(library: str, memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/lib" / library).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert installed_bytes.__wrapped__() == memory_bytes
