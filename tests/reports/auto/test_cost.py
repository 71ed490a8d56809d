"""What `weightsmith auto --plan` says of memory and disk is what a run takes, or a little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.calibration_help import CONFIGS, TINY, noisy_copy, save_model
from tests.reports.tuning.help import words

RUN = """
import json, os, re, sys, threading
sys.path[:0] = json.loads(sys.argv[1])
import weightsmith
from weightsmith._base.process import limit_malloc_arenas

limit_malloc_arenas()  # as the command does
options = {"text": {name: f"{name}.txt" for name in ("fr", "de")}, "threads": 1, "budget": 1}
plan = weightsmith.plan_auto("base", ["fr", "de"], "merged", **options)
unnamed, ended = [0], threading.Event()

def look():
    while not ended.wait(0.01):
        for number in os.listdir("/proc/self/fd"):
            try:
                if "merged.auto" in os.readlink(f"/proc/self/fd/{number}"):
                    unnamed[0] = max(unnamed[0], os.stat(int(number)).st_size)
            except OSError:
                pass

watching = threading.Thread(target=look)
watching.start()
weightsmith.auto("base", ["fr", "de"], "merged", progress=False, **options)
ended.set()
watching.join()
# not ru_maxrss, which a child inherits from the process that forked it
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(json.dumps([plan.memory_bytes, peak, plan.disk_bytes, unnamed[0]]))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 256, "intermediate_size": 2560, "num_hidden_layers": 1},  # 330 MB are RegMean's squares
        {"hidden_size": 256, "vocab_size": 80_000, "num_hidden_layers": 1},  # 230 MB are heads and logits
    ],
    ids=["matrices", "vocabulary"],
)
def test_the_memory_of_the_plan_is_an_upper_bound_and_a_close_one(
    sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "sizes", lambda: transformers.LlamaConfig(**{**TINY, **sizes}, tie_word_embeddings=True))
    save_model(tmp_path / "base", "sizes")
    for seed, name in enumerate(("fr", "de"), 1):
        noisy_copy(tmp_path / "base", tmp_path / name, seed, size=0.01)
        (tmp_path / f"{name}.txt").write_text(" ".join(words(10 * seed + i) for i in range(5)))
    command = [sys.executable, "-c", RUN, json.dumps(sys.path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    memory, peak, disk, unnamed = json.loads(done.stdout.splitlines()[-1])
    print(
        f"memory {memory / 1e6:.0f} planned, {peak / 1e6:.0f} taken; disk {disk / 1e6:.0f}, {unnamed / 1e6:.0f} without a name"
    )
    assert peak <= memory <= 1.25 * peak
    assert unnamed <= disk
