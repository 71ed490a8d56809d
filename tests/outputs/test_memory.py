"""Saving takes a tile of memory, not a tensor; and torch is not imported for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fork_help import forked
from weightsmith._outputs.save import save_file, save_model

pytestmark = pytest.mark.process


def arrays(library: str) -> dict[str, Any]:
    """60 MB each."""
    if library == "numpy":
        return {"transposed": np.ones((3_000, 5_000), np.float32).T, "one row": np.ones((2, 15_000_000), np.float32)[:, ::2]}
    import torch

    one = torch.ones(1, 5_500, dtype=torch.bfloat16)
    return {"transposed": torch.ones(5_500, 5_500, dtype=torch.bfloat16).T, "expanded": one.expand(5_500, 5_500)}


def measure(library: str, folder: Path) -> None:
    def resident(key: str) -> float:
        return int(re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]

    save_file({"warm": np.ones((300, 300)).T}, folder / "warm", fsync=False)
    save_model({"warm": np.ones((300, 300)).T}, folder / "warm_model", fsync=False)
    for kind, tensor in arrays(library).items():
        for save in (save_file, save_model) if kind == "transposed" else (save_file,):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
            before = resident("VmRSS")
            save({"a": tensor}, folder / save.__name__, fsync=False, overwrite=True)  # type: ignore[operator]
            print(f"{resident('VmHWM') - before:.1f} {kind} {save.__name__}")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_saving_60_mb_takes_less_than_16_mib_more(tmp_path: Path, library: str) -> None:
    ran = forked(lambda: measure(library, tmp_path))
    assert ran.code == 0, ran.err
    peaks = [float(line.split()[0]) for line in ran.out.splitlines()]
    assert len(peaks) == 3
    assert max(peaks) < 16, ran.out


@pytest.mark.slow
def test_saving_numpy_arrays_needs_no_torch_and_no_safetensors(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import numpy as np; from weightsmith._outputs.save import save_model; from weightsmith import verify\n"
        "save_model({'a': np.ones((3, 4)).T}, sys.argv[1]); verify(sys.argv[1])\n"
        "assert not {'torch', 'safetensors', 'transformers', 'numba'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "m"), *sys.path], check=True)
