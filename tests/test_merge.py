"""Whole merges through the Python API: interruption, full disks, determinism, memory, and what the folder holds."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.sampling import sampled
from weightsmith._base.errors import CannotResume, NonFinite, NoSpace, ParameterError, StoreError
from weightsmith._execution.identity import program_digest
from weightsmith._outputs.area import staging_folder

RECIPE = """
merge_method: {method}
base_model: base
models:
  - model: a
    parameters: {{weight: 0.7, density: 0.4}}
  - model: b
    parameters: {{weight: 0.5, density: 0.6}}
dtype: bfloat16
"""


def models(folder: Path, rows: int = 600, layers: int = 4) -> None:
    """base, a and b in `folder`: a Llama-like set of names, bf16. A matrix of more than 2,000 rows repeats the first ones."""
    rng, times = np.random.default_rng(0), max(1, rows // 2000)
    drawn = (rows // times, 96)
    shapes = {"model.embed_tokens.weight": drawn, "model.norm.weight": (96,), "lm_head.weight": drawn}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{n}.weight": drawn for n in ("self_attn.q_proj", "mlp.up_proj")}
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (96,)
    base = {n: rng.standard_normal(s, np.float32) * np.float32(0.02) for n, s in shapes.items()}
    config = {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": rows, "tie_word_embeddings": False}
    for name, noise in (("base", 0.0), ("a", 1e-3), ("b", 2e-3)):
        tensors = {
            n: (v + rng.standard_normal(v.shape, np.float32) * np.float32(noise)).astype(ml_dtypes.bfloat16)
            for n, v in base.items()
        }
        repeated = {n: np.tile(v, (times, 1)) if v.ndim == 2 else v for n, v in tensors.items()}
        write_checkpoint(folder / name, repeated, config, max_shard_bytes=10**6)
    (folder / "base" / "tokenizer.json").write_text("{}")
    (folder / "base" / "chat_template.jinja").write_text("{{ messages }}")


def weights(folder: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes()
        for p in sorted(folder.iterdir())
        if p.suffix in (".safetensors", ".json") and p.name != "weightsmith.json"
    }


def merge_in_a_process(folder: Path, code: str, **environment: str) -> subprocess.Popen[str]:
    program = f"import weightsmith\n{code}"
    env = {**os.environ, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    models(tmp_path)
    monkeypatch.chdir(tmp_path)
    for method in ("ties", "dare_ties"):
        (tmp_path / f"{method}.yml").write_text(RECIPE.format(method=method))
    return tmp_path


@pytest.mark.slow
def test_what_the_folder_holds(here: Path) -> None:
    merged = weightsmith.merge("ties.yml", "out", max_shard_bytes=500_000)
    names = {p.name for p in (here / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "recipe.yml", "README.md", "weightsmith.json"} <= names
    assert "model.safetensors.index.json" in names
    assert (here / "out" / "recipe.yml").read_text() == (here / "ties.yml").read_text()
    assert merged.out == here / "out"
    assert merged.written_bytes == sum(s.out.nbytes for s in merged.plan.steps)
    manifest = json.loads((here / "out" / "weightsmith.json").read_text())
    assert [i["ref"] for i in manifest["inputs"]] == ["base", "a", "b"]
    assert manifest["seed"] == 0
    assert weightsmith.verify("out").tensors == len(merged.plan.steps)
    assert json.loads((here / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.long
def test_a_second_merge_into_the_same_folder_is_refused_unless_asked(here: Path) -> None:
    weightsmith.merge("ties.yml", "out")
    before = weights(here / "out")
    with pytest.raises(StoreError, match="not empty"):
        weightsmith.merge("dare_ties.yml", "out")
    assert weights(here / "out") == before
    weightsmith.merge("dare_ties.yml", "out", overwrite=True)
    assert weights(here / "out") != before


def test_an_input_is_never_overwritten(here: Path) -> None:
    before = weights(here / "a")
    with pytest.raises(StoreError, match="is the input a"):
        weightsmith.merge("ties.yml", "a", overwrite=True)
    assert weights(here / "a") == before


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("method", sampled(["ties", "dare_ties"], {"dare_ties"}))
def test_killed_at_any_point_and_run_again_gives_the_same_bytes(here: Path, method: str) -> None:
    weightsmith.merge(f"{method}.yml", "whole")
    expected = weights(here / "whole")
    code = (
        "import os, signal; from weightsmith._engine import local; w = local.Run._do; n = [0]\n"
        "def die(self, *a):\n"
        "    n[0] += 1\n"
        "    if n[0] == {tiles}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return w(self, *a)\n"
        f"local.Run._do = die; weightsmith.merge('{method}.yml', 'out', threads=2)"
    )
    chance = random.Random(7)
    for _ in range(3):
        process = merge_in_a_process(here, code.replace("{tiles}", str(chance.randint(5, 12))))
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
        assert not (here / "out").exists()
    merged = weightsmith.merge(f"{method}.yml", "out")
    assert 0 < merged.resumed < len(merged.plan.steps)
    assert weights(here / "out") == expected
    assert not staging_folder(here / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("how", ["touched", "replaced"])
def test_an_input_that_changed_is_not_mixed_with_finished_work(how: str, here: Path) -> None:
    interrupt("ties.yml")
    shard = next((here / "a").glob("*.safetensors"))
    if how == "touched":
        os.utime(shard, ns=(1, 1))
    else:  # by other numbers of equal size and modification time, as `rsync -t` does
        other = Path(shutil.copy2(shard, here / "other"))
        before, data = shard.stat(), bytearray(shard.read_bytes())
        data[-1] ^= 1
        other.write_bytes(data)
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(shard)
        assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(CannotResume) as caught:
        weightsmith.merge("ties.yml", "out")
    assert caught.value.finding.details[0] == "files of a: changed"
    assert len(caught.value.finding.details) == 2
    weightsmith.merge("ties.yml", "out", resume=False)


class Stop(Exception):
    pass


def interrupt(recipe: str, tensors: int = 1) -> None:
    """Begin the merge into `out`, and stop when so many tensors are finished."""

    def stop(progress: weightsmith.Progress) -> None:
        if progress.tensors >= tensors:
            raise Stop

    with pytest.raises(Stop):
        weightsmith.merge(recipe, "out", progress=stop)


@pytest.mark.long
def test_work_that_had_finished_nothing_is_begun_anew_when_the_recipe_changes(here: Path) -> None:
    interrupt("ties.yml", tensors=0)
    assert staging_folder(here / "out").exists()
    weightsmith.merge("dare_ties.yml", "out")
    weightsmith.merge("dare_ties.yml", "fresh")
    assert weights(here / "out") == weights(here / "fresh")


@pytest.mark.long
def test_what_changed_since_work_was_interrupted_is_said_in_the_terms_of_the_recipe(here: Path) -> None:
    interrupt("ties.yml")
    text = (here / "ties.yml").read_text()
    changed = text.replace("weight: 0.7", "weight: 0.8").replace("dtype: bfloat16", "parameters: {normalize: false}")
    (here / "ties.yml").write_text(changed)
    with pytest.raises(CannotResume) as caught:
        weightsmith.merge("ties.yml", "out", max_shard_bytes=10**6)
    *details, lost = caught.value.finding.details
    assert details == [
        "models[0].parameters.weight: 0.7 -> 0.8",
        "dtype: bfloat16 -> not set",
        "max_shard_bytes: 5,000,000,000 -> 1,000,000",
        "parameters.normalize: not set -> false",
    ]
    assert re.fullmatch(r"discarding it would lose: \d+ of 15 tensors", lost)

    (here / "ties.yml").write_text(f"# a comment\n{text}")
    with pytest.raises(CannotResume, match="comments in the recipe, or an option"):
        weightsmith.merge("ties.yml", "out")
    (here / "ties.yml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightsmith._execution.identity.__version__", "9.9")
        program_digest.cache_clear()
        with pytest.raises(CannotResume, match=r"program version: .* -> 9\.9"):
            weightsmith.merge("ties.yml", "out")
    program_digest.cache_clear()
    assert weightsmith.merge("ties.yml", "out").resumed


@pytest.mark.long
def test_work_done_with_nonfinite_numbers_allowed_is_not_resumed_without(here: Path) -> None:
    # Finished tensors are not merged again, so nothing else would see the NaN.
    for path in sorted((here / "a").glob("*.safetensors")):
        path.write_bytes(path.read_bytes()[:-2] + b"\xc0\x7f")  # the last number: NaN in bf16

    def stop(progress: weightsmith.Progress) -> None:
        if progress.tensors > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge("ties.yml", "out", allow_nonfinite=True, progress=stop)
    with pytest.raises(NonFinite):
        weightsmith.merge("ties.yml", "out")
    assert weightsmith.merge("ties.yml", "out", allow_nonfinite=True).resumed, "what was checked counts with the flag too"


@pytest.mark.slow
def test_a_full_disk_is_found_before_the_work(here: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    code = """
import weightsmith
from weightsmith._base.errors import NoSpace
try:
    weightsmith.merge("ties.yml", "out", progress=lambda p: print("worked"))
except NoSpace as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=here, text=True, capture_output=True, preexec_fn=limit, check=True)
    assert "worked" not in done.stdout
    assert "Nothing was written" in done.stdout
    assert not (here / "out").exists()
    assert NoSpace.__mro__[1] is StoreError


@pytest.mark.process
@pytest.mark.slow
def test_bytes_do_not_depend_on_hash_seed_threads_or_memory(here: Path) -> None:
    outputs = []
    for i, (seed, options) in enumerate([("1", "threads=1"), ("2", "threads=4, max_memory_bytes=260_000_000")]):
        process = merge_in_a_process(here, f"weightsmith.merge('dare_ties.yml', 'out{i}', {options})", PYTHONHASHSEED=seed)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        outputs.append(weights(here / f"out{i}"))
    assert outputs[0] == outputs[1]


@pytest.mark.long
def test_what_a_merge_made_can_be_merged_again(here: Path) -> None:
    first = weightsmith.merge("ties.yml", "first", fsync=False)
    listed = [{"model": "first", "parameters": {"weight": 1}}, {"model": "a", "parameters": {"weight": 1}}]
    second = weightsmith.merge({"merge_method": "linear", "models": listed}, "second", fsync=False)
    assert "tokenizer.json" in second.plan.carried
    manifests = [(here / done.out / "weightsmith.json").read_text() for done in (first, second)]
    assert manifests[0] != manifests[1], "the manifest is the second merge's own"
    assert (here / "second" / "recipe.yml").read_text() != (here / "first" / "recipe.yml").read_text()


@pytest.mark.long
def test_seed_changes_the_random_masks_and_nothing_else(here: Path) -> None:
    weightsmith.merge("dare_ties.yml", "one", seed=1)
    weightsmith.merge("dare_ties.yml", "two", seed=2)
    weightsmith.merge("dare_ties.yml", "again", seed=1)
    assert weights(here / "one") == weights(here / "again")
    assert weights(here / "one") != weights(here / "two")
    weightsmith.merge("ties.yml", "t1", seed=1)
    weightsmith.merge("ties.yml", "t2", seed=2)
    assert weights(here / "t1") == weights(here / "t2")


def test_a_memory_bound_that_cannot_be_kept_is_refused(here: Path) -> None:
    with pytest.raises(ParameterError, match="max_memory"):
        weightsmith.merge("ties.yml", "out", max_memory_bytes=50_000_000)
    assert not (here / "out").exists()


def test_integers_on_which_models_disagree_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("a", "b")):
        write_checkpoint(tmp_path / name, {"w": np.ones(4, np.float32), "same": np.arange(3), "ids": np.arange(3) + i})
    entries = [{"model": m, "parameters": {"weight": 1}} for m in ("a", "b")]
    merged = weightsmith.merge({"merge_method": "linear", "models": entries}, "out")
    assert [w.where for w in merged.warnings if "differ in this" in w.what] == ["ids"]
    with weightsmith.open_checkpoint("out") as out:
        np.testing.assert_array_equal(out.read("ids"), [0, 1, 2])


@pytest.mark.long
def test_progress_is_told_and_ends_at_all(here: Path) -> None:
    seen: list[weightsmith.Progress] = []
    began = time.monotonic()
    weightsmith.merge("ties.yml", "out", progress=seen.append)
    assert 0 <= seen[0].seconds <= seen[-1].seconds <= time.monotonic() - began
    assert seen[-1].written_bytes == seen[-1].total_bytes
    assert seen[-1].tensors == seen[-1].total_tensors
    assert [p.written_bytes for p in seen] == sorted(p.written_bytes for p in seen)


@pytest.mark.process
@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    models(tmp_path, rows=120_000, layers=2)  # 140 MB a model
    (tmp_path / "ties.yml").write_text(RECIPE.format(method="ties"))
    code = (
        "weightsmith.merge('ties.yml', 'out', threads=2, fsync=False)\n"
        # not ru_maxrss, which a child inherits from the process that forked it
        "print([int(l.split()[1]) // 1024 for l in open('/proc/self/status') if l.startswith('VmHWM')][0])"
    )
    process = merge_in_a_process(tmp_path, code)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert int(output) < 300  # MB; the three inputs have 415, and one of them in memory would be seen


@pytest.mark.slow
@pytest.mark.parametrize("after", ["all", "some, then nothing", "some, then an error", "an error"])
def test_a_copy_that_the_file_system_does_not_finish_is_finished_by_us(
    tmp_path: Path, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copy_file_range may copy less than it was asked for, or refuse at any call, as between two file systems."""
    models(tmp_path, layers=2)
    sources = [{"model": str(tmp_path / "a"), "layer_range": [first, first + 1]} for first in (1, 0, 1)]
    recipe = {"merge_method": "passthrough", "slices": [{"sources": [s]} for s in sources]}
    weightsmith.merge(recipe, tmp_path / "through memory")
    copy, calls = os.copy_file_range, []

    def copy_some(source: int, target: int, count: int, *offsets: int) -> int:
        calls.append(count)
        if after == "an error" or (after == "some, then an error" and len(calls) % 2 == 0):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        if after == "some, then nothing" and len(calls) % 2 == 0:
            return 0
        return copy(source, target, count if after == "all" else min(1000, count), *offsets)

    monkeypatch.setattr("weightsmith._engine.tile_work.copies_by_reference", lambda fd: True)
    monkeypatch.setattr(os, "copy_file_range", copy_some)
    weightsmith.merge(recipe, tmp_path / "by the file system", threads=1)
    assert calls
    assert weights(tmp_path / "by the file system") == weights(tmp_path / "through memory")
