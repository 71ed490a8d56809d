"""Saving takes a tile of memory, not a tensor; and torch is not imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import re, sys
sys.path[:0] = sys.argv[3:]
import numpy as np
from weightsmith._outputs.save import save_file, save_model

def resident(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

kinds = {
    "numpy transposed": lambda: np.ones((5_000, 10_000), np.float32).T,
    "numpy one row": lambda: np.ones((2, 50_000_000), np.float32)[:, ::2],
}
if sys.argv[1] == "torch":
    import torch
    kinds = {
        "torch transposed": lambda: torch.ones(10_000, 10_000, dtype=torch.bfloat16).T,
        "torch expanded": lambda: torch.ones(1, 10_000, dtype=torch.bfloat16).expand(10_000, 10_000),
    }
save_file({"warm": np.ones((300, 300)).T}, sys.argv[2] + "/warm", fsync=False)
save_model({"warm": np.ones((300, 300)).T}, sys.argv[2] + "/warm_model", fsync=False)
for kind, make in kinds.items():
    tensor = make()
    for save in (save_file, save_model) if "transposed" in kind else (save_file,):
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
        before = resident("VmRSS")
        save({"a": tensor}, f"{sys.argv[2]}/{save.__name__}", fsync=False, overwrite=True)
        print(f"{resident('VmHWM') - before:.1f} {kind} {save.__name__}")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_saving_200_mb_takes_less_than_16_mib_more(tmp_path: Path, library: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, library, str(tmp_path), *sys.path], capture_output=True, text=True, check=True
    )
    peaks = [float(line.split()[0]) for line in result.stdout.splitlines()]
    assert len(peaks) == 3
    assert max(peaks) < 16, result.stdout


def test_saving_numpy_arrays_needs_no_torch_and_no_safetensors(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import numpy as np; from weightsmith._outputs.save import save_model; from weightsmith import verify\n"
        "save_model({'a': np.ones((3, 4)).T}, sys.argv[1]); verify(sys.argv[1])\n"
        "assert not {'torch', 'safetensors', 'transformers', 'numba'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "m"), *sys.path], check=True)
