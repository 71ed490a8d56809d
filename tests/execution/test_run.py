"""A plan runs from its JSON alone: in another process, in parts that several processes do at once, and in parts that die."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import weightsmith
from tests import plan_help
from tests.cli_help import CONFIG, Cli
from tests.mini import write_checkpoint
from weightsmith._app.cli.merge import parse_part
from weightsmith._base.errors import Busy, CheckpointError, FormatError, ParameterError, PlanError, StoreError, WeightsmithError
from weightsmith._outputs.area import ProductFiles, staging_folder
from weightsmith._plans import plan_from_json
from weightsmith._plans.parts import part_of

SHARD = 500_000


@pytest.fixture
def here(linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models a, b and c, and a recipe whose thresholds are of the whole model."""
    (tmp_path / "ties.yml").write_text(
        "merge_method: ties\nbase_model: ./a\nmodels:\n"
        "  - {model: ./b, parameters: {weight: 1, density: 0.4}}\n  - {model: ./c, parameters: {weight: 0.5, density: 0.2}}\n"
        "parameters: {scope: model}\ndtype: bfloat16\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    """Everything but the manifest, whose times differ, under the name `out`."""
    return {
        f.name: f.read_bytes().replace(folder.name.encode(), b"out") for f in folder.iterdir() if f.name != "weightsmith.json"
    }


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "weightsmith", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def done(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def planned(here: Path, cli: Cli) -> Path:
    """The plan as the command line prints it."""
    file = here / "plan.json"
    file.write_text(cli("plan", "ties.yml", "--json").out)
    return file


@pytest.mark.process
@pytest.mark.slow
def test_two_processes_do_a_part_each_one_dies_and_the_last_one_publishes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weightsmith.merge("ties.yml", "whole")
    cli = Cli(monkeypatch, capsys)
    file = planned(here, cli)
    assert plan_from_json(json.loads(file.read_text())).hash == weightsmith.plan("ties.yml").hash
    slow = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    (here / "sitecustomize.py").write_text(
        "import time\nfrom weightsmith._engine import local\nplain = local.Run._do\n"
        "def slow(self, *a):\n    time.sleep(0.05)\n    return plain(self, *a)\nlocal.Run._do = slow\n"
    )
    parts = {k: command("run", str(file), "out", "--part", f"{k}/3", "--threads", "1", env=slow) for k in (1, 2)}
    journal = staging_folder(here / "out") / "parts" / "journal-2-of-3"
    deadline = time.monotonic() + 60
    while not (journal.exists() and b'"tensor"' in journal.read_bytes()):
        assert time.monotonic() < deadline
        assert parts[2].poll() is None, parts[2].communicate()
        time.sleep(0.01)
    parts[2].send_signal(signal.SIGKILL)
    parts[2].communicate()
    for k in (2, 3):
        assert f"part {k} of 3 is done" in cli("run", file, "out", "--part", f"{k}/3").out
    assert "part 1 of 3 is done" in done(parts[1])
    assert not (here / "out").exists()
    merged = json.loads(cli("run", file, "out", "--json").out)
    assert merged["resumed"] == merged["tensors"]
    assert merged["read_bytes"] == 0, "thresholds were found again too"
    assert files(here / "out") == files(here / "whole")
    assert not staging_folder(here / "out").exists()


def read_again(plan: weightsmith.Plan, **options: Any) -> int:
    """Bytes of finished tensors that the run which publishes reads again; all tensors are of earlier runs."""
    totals = [0]
    merged = weightsmith.run(plan, "out", rechecking=lambda _, total: totals.append(total), progress=False, **options)
    assert merged is not None
    assert merged.resumed == len(plan.steps)
    assert files(Path("out")) == files(Path("whole"))
    return max(totals)


@pytest.mark.long
def test_the_run_that_publishes_reads_again_only_what_parts_have_not_vouched_for(here: Path) -> None:
    weightsmith.merge("ties.yml", "whole", max_shard_bytes=SHARD, progress=False)
    plan = weightsmith.plan("ties.yml", max_shard_bytes=SHARD)
    for part in ((1, 2), (2, 2)):  # the second enters the folder alone
        weightsmith.run(plan, "out", part=part, progress=False)
    assert read_again(plan) == 0

    shutil.rmtree("out")
    weightsmith.run(plan, "out", part=(1, 2), progress=False)
    weightsmith.run(plan, "out", part=(2, 2), fsync=False, progress=False)  # a power cut may take its bytes
    second = sum(step.nbytes for step in part_of(plan, 2, 2))
    assert read_again(plan) == second > 0


@pytest.mark.long
def test_a_file_of_a_part_that_has_changed_is_read_again_and_damage_is_repaired(here: Path) -> None:
    weightsmith.merge("ties.yml", "whole", max_shard_bytes=SHARD, progress=False)
    plan = weightsmith.plan("ties.yml", max_shard_bytes=SHARD)
    for part in ((1, 2), (2, 2)):
        weightsmith.run(plan, "out", part=part, progress=False)
    shard = plan.layout.shards[0]
    path = staging_folder(here / "out") / "content" / shard.name
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(shard.nbytes - 8)
        file.write(b"\x55" * 8)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as tools that copy files leave it
    totals: list[int] = []
    merged = weightsmith.run(plan, "out", rechecking=lambda _, total: totals.append(total), progress=False)
    assert merged is not None
    assert merged.resumed == len(plan.steps) - 1
    assert max(totals) == sum(spec.nbytes for spec in shard.tensors)
    assert files(here / "out") == files(here / "whole")


@pytest.mark.long
def test_a_part_that_is_being_done_is_busy_and_so_is_the_whole(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._outputs.staging.ATTACH_SECONDS", 0.2)
    plan, messages = weightsmith.plan("ties.yml", max_shard_bytes=SHARD), []

    def try_others(now: weightsmith.Progress) -> None:
        if messages or not now.tensors:  # a part that makes products has them to itself: another one waits
            return
        for part in ((1, 2), None):
            with pytest.raises(Busy) as caught:
                weightsmith.run(plan, "out", part=part)
            messages.append(str(caught.value))
        weightsmith.run(plan, "out", part=(2, 2))

    weightsmith.run(plan, "out", part=(1, 2), progress=try_others)
    assert "another process is doing part 1 of 2" in messages[0]
    assert "is building this output now" in messages[1]
    assert weightsmith.run(plan, "out").resumed == len(plan.steps)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_part_waits_for_nobody_while_the_whole_is_being_done(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._outputs.staging.ATTACH_SECONDS", 0.2)
    plan, errors = weightsmith.plan("ties.yml", max_shard_bytes=SHARD), []

    def try_part(now: weightsmith.Progress) -> None:
        if not errors:
            with pytest.raises(Busy) as caught:
                weightsmith.run(plan, "out", part=(1, 2))
            errors.append(caught.value)

    weightsmith.merge("ties.yml", "out", progress=try_part, max_shard_bytes=SHARD)
    assert errors


@pytest.mark.long
def test_a_product_is_made_by_one_part_and_found_by_the_others(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product_names, plain = [], ProductFiles.write

    def write(self: ProductFiles, name: str, arrays: Any) -> str:
        product_names.append(name)
        return plain(self, name, arrays)

    monkeypatch.setattr(ProductFiles, "write", write)
    plan = weightsmith.plan("ties.yml", max_shard_bytes=SHARD)
    for part in ((1, 2), (2, 2)):
        weightsmith.run(plan, "out", part=part)
    weightsmith.run(plan, "out")
    assert product_names == ["thresholds"]


@pytest.mark.long
def test_a_part_says_that_it_waits_for_the_process_that_makes_its_products(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = Cli(monkeypatch, capsys)
    plan = here / "plan.json"
    plan.write_text(json.dumps(weightsmith.plan("ties.yml", max_shard_bytes=SHARD).to_json()))
    cli("run", plan, "out", "--part", "1/2")
    lock = os.open(staging_folder(here / "out") / "parts" / "lock-products", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    release = threading.Timer(0.3, os.close, [lock])
    release.start()
    waited = cli("run", plan, "out", "--part", "2/2")
    release.join()
    assert "part 2 of 2 is done" in waited.out
    assert waited.err.count("waiting for another process") == 1


@pytest.mark.parametrize("part", ["5/4", "0/4", "4", "1/2/4", "one/4"])
def test_a_part_that_cannot_be_is_a_mistake_of_the_command_line(part: str) -> None:
    assert parse_part("4/4") == (4, 4)
    with pytest.raises(typer.BadParameter, match="is not a part"):
        parse_part(part)


@pytest.mark.slow
def test_warnings_about_the_data_of_all_parts_are_shown_once_by_the_run_that_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli = Cli(monkeypatch, capsys)
    for seed, name in enumerate("ab"):
        tensors = {"norm": np.ones(4, np.float32), "steps": np.full(2, seed), "bound": np.full(2, np.inf, np.float32)}
        write_checkpoint(tmp_path / name, tensors, CONFIG | {"rope_theta": seed})
    recipe = {"merge_method": "linear", "models": [{"model": f"./{name}", "parameters": {"weight": 1}} for name in "ab"]}
    Path("plan.json").write_text(json.dumps(weightsmith.plan(recipe).to_json()))
    said = [cli("run", "plan.json", "out", *part).err for part in (["--part", "1/2"], ["--part", "2/2"], [])]
    assert "warning" not in said[0] + said[1]
    for warning in ("differ in RoPE theta", "steps: the models differ in this int64 tensor", "bound: this tensor holds a NaN"):
        assert said[2].count(warning) == 1


@pytest.mark.long
def test_an_older_journal_of_a_part_does_not_outweigh_the_newer_one_of_the_whole(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = weightsmith.plan("ties.yml", max_shard_bytes=SHARD)
    weightsmith.run(plan, "out", part=(1, 2), allow_nonfinite=True)
    with monkeypatch.context() as patch:
        patch.setattr("weightsmith._outputs.staging.Staging.publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            weightsmith.run(plan, "out")
    assert weightsmith.run(plan, "out").resumed == len(plan.steps)  # type: ignore[union-attr]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_part_does_not_discard_the_work_of_others(here: Path) -> None:
    with pytest.raises(ParameterError, match="a part cannot discard"):
        weightsmith.run(weightsmith.plan("ties.yml", max_shard_bytes=SHARD), "out", part=(1, 2), resume=False)


def test_a_part_is_not_for_a_cluster(here: Path) -> None:
    with pytest.raises(ParameterError, match="a cluster does all parts"):
        weightsmith.run(weightsmith.plan("ties.yml", max_shard_bytes=SHARD), "out", part=(1, 2), ray="auto")


@pytest.mark.long
def test_tensors_made_from_other_numbers_of_a_product_are_made_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the product was lost and computed again, and came out otherwise."""
    weightsmith.run(weightsmith.plan("ties.yml", max_shard_bytes=SHARD), "out", part=(1, 2))

    plain = ProductFiles.read

    def read(*arguments: Any) -> list[np.ndarray] | None:
        arrays = plain(*arguments)
        return None if arrays is None else [array + array.dtype.type(1) for array in arrays]

    with monkeypatch.context() as patch:
        patch.setattr(ProductFiles, "read", read)
        assert weightsmith.merge("ties.yml", "other", max_shard_bytes=SHARD).resumed == 0
        weightsmith.run(weightsmith.plan("ties.yml", max_shard_bytes=SHARD), "out", part=(2, 2))
    merged = weightsmith.run(weightsmith.plan("ties.yml", max_shard_bytes=SHARD), "out")
    assert 0 < merged.resumed < len(merged.plan.steps)
    weightsmith.merge("ties.yml", "straight", max_shard_bytes=SHARD)
    assert files(here / "out") == files(here / "straight")


def test_a_product_that_reads_what_it_does_not_say_is_refused(here: Path) -> None:
    data = weightsmith.plan("ties.yml", max_shard_bytes=SHARD).to_json()
    other = json.loads(json.dumps(data["products"][0]).replace("thresholds", "others"))
    data["products"].append(other | {"op": data["products"][0]["op"]})
    for step in data["steps"]:
        step["needs"] = [*step["needs"], "others"]
    with pytest.raises(WeightsmithError, match="does not say that it needs"):
        weightsmith.run(plan_from_json(data), "out")


def test_every_step_is_in_one_part(here: Path) -> None:
    plan = weightsmith.plan("ties.yml", max_shard_bytes=SHARD)
    for n in (1, 2, 3, 7, 50):
        parts = [part_of(plan, k, n) for k in range(1, n + 1)]
        assert [step for part in parts for step in part] == list(plan.steps)
    sizes = [sum(step.out.nbytes for step in part_of(plan, k, 2)) for k in (1, 2)]
    assert max(sizes) < 0.7 * sum(sizes)
    with pytest.raises(ValueError, match="invalid part 3 of 2"):
        part_of(plan, 3, 2)


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "a/b", "1/0", "-1/2"])
def test_a_part_that_is_none_is_a_usage_error(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Cli(monkeypatch, capsys)("run", "plan.json", "out", f"--part={part}")
    assert refused.code == 2
    assert "is not a part: write 2/4 for the second of four" in refused.err


# ---- models that are not those of the plan


def test_a_model_that_is_another_one_is_refused(here: Path) -> None:
    plan = weightsmith.plan("ties.yml", max_shard_bytes=SHARD)
    shutil.rmtree(here / "b")
    write_checkpoint(here / "b", {"model.norm.weight": np.ones(3, np.float32)}, {"model_type": "llama"})
    with pytest.raises(PlanError, match="not the model that the plan was made for"):
        weightsmith.run(plan, "out")
    shutil.rmtree(here / "b")
    with pytest.raises(PlanError, match="b"):
        weightsmith.run(plan, "out")
    assert {f.name for f in here.iterdir()} == {"a", "c", "ties.yml"}


@pytest.mark.long
def test_a_model_with_the_names_and_shapes_of_the_plan_and_other_weights_is_refused(here: Path) -> None:
    plan = weightsmith.plan("ties.yml", max_shard_bytes=SHARD)
    shutil.copytree(here / "b", here / "copy")
    shutil.rmtree(here / "b")
    shutil.copytree(here / "copy", here / "b")
    for path in (here / "b").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-2] + b"\x00\x40")
    with pytest.raises(PlanError, match="the files of this model have changed since the plan was made") as refused:
        weightsmith.run(plan, "out")
    assert [problem.finding.where for problem in refused.value.problems] == ["./b"]
    shutil.rmtree(here / "b")
    (here / "copy").rename(here / "b")  # a copy of the model is the model
    weightsmith.run(plan, "out")


def test_code_of_the_user_runs_only_when_allowed_and_only_as_it_was(here: Path) -> None:
    code = "import weightsmith\n@weightsmith.block_method\ndef half(models, out):\n    out[:] = models[0] / 2\n"
    (here / "own.py").write_text(code)
    (here / "own.yml").write_text("merge_method: ./own.py:half\nmodels:\n  - model: ./a\ndtype: bfloat16\n")
    whole = weightsmith.merge("own.yml", "whole", allow_code=True)
    plan = plan_from_json(json.loads(json.dumps(whole.plan.to_json())))
    with pytest.raises(WeightsmithError, match="would run code"):
        weightsmith.run(plan, "out")
    weightsmith.run(plan, "out", allow_code=True)
    assert files(here / "out") == files(here / "whole")
    (here / "own.py").write_text(code.replace("/ 2", "/ 3"))
    with pytest.raises(PlanError, match="has changed since the plan was made"):
        weightsmith.run(plan, "other", allow_code=True)


# ---- hostile plans


def edits(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in JSON data."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(inside for key, value in inner for inside in edits(value, (*path, key)))]


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


@pytest.mark.long
def test_a_mutated_plan_is_one_clear_error_or_runs_inside_its_inputs(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        plan_help.model(tmp_path / name, seed=seed)
    recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / n), "parameters": {"weight": 0.5}} for n in "ab"]}
    good = weightsmith.plan(recipe).to_json()
    places = [p for p in edits(good) if p and p[0] not in ("recipe", "warnings", "config")]
    values: list[Any] = [
        None,
        -1,
        0,
        1,
        7,
        1 << 40,
        1 << 70,
        "x",
        "",
        [],
        {},
        [1],
        True,
        0.5,
        "../../etc/passwd",
        ["BF16"],
        "join",
    ]
    rng = random.Random(1)
    refused = 0
    for _ in range(400):
        data = copy.deepcopy(good)
        place = rng.choice(places)
        at(data, place[:-1])[place[-1]] = rng.choice(values)
        try:
            plan = plan_from_json(data)
            weightsmith.run(plan, tmp_path / "out", fsync=False)
        except WeightsmithError:
            refused += 1
        for leftover in tmp_path.glob("*out*"):
            shutil.rmtree(leftover)
    assert refused > 270


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("steps"), "'steps' is missing"),
        (lambda d: d["carried"].append("../id_rsa"), "is not a file name"),
        (lambda d: d.__setitem__("models", []), "there is no model 0"),
        (lambda d: d["steps"][0]["inputs"][0].__setitem__(0, 9), "there is no model 9"),
        (lambda d: d["steps"][0]["inputs"][0].extend([0, 1 << 40, 8, 8]), "ends at element"),
        (lambda d: d["steps"][0]["inputs"][0].__setitem__(1, "no.such"), "has no tensor 'no.such'"),
        (lambda d: d["steps"][0].__setitem__("shape", [3]), "elements, and 3 are wanted"),
        (lambda d: d["steps"][0].__setitem__("op", "no_such_method"), "no merge method is called"),
        (lambda d: d["steps"][0].__setitem__("settings", 99), "there are no settings 99"),
        (lambda d: d["steps"][0].__setitem__("encoding", "nf4"), "must list its stored tensors"),
        (lambda d: d["steps"][0].__setitem__("needs", ["thresholds"]), "not all products of this plan"),
        (lambda d: d["steps"][0]["inputs"][0].append({"table": 3, "axis": 0, "block": [0, 1, 1, 1]}), "there is no table 3"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(tmp_path: Path, edit: Callable[[Any], object], message: str) -> None:
    for seed, name in enumerate("ab"):
        plan_help.model(tmp_path / name, seed=seed)
    recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / n), "parameters": {"weight": 0.5}} for n in "ab"]}
    data = weightsmith.plan(recipe).to_json()
    edit(data)
    with pytest.raises(WeightsmithError, match=message):
        weightsmith.run(plan_from_json(data), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_plan_is_one_error(tmp_path: Path) -> None:
    from weightsmith._planning.planner.reopen import load_plan

    for text in ("", "{", "[" * 100_000, "3", '{"steps": []}'):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(FormatError, match=r"the plan is not |the plan is JSON nested too deeply|invalid plan"):
            load_plan(tmp_path / "plan.json")


# ---- identity of work


@pytest.mark.long
def test_an_input_that_is_overwritten_while_it_is_read_is_not_published(here: Path) -> None:
    """`cp new old` keeps the inode, and may keep the size: neither name nor header tells."""
    shard = here / "b" / "model.safetensors"
    changed = bytearray(shard.read_bytes())
    shard.unlink()  # a link to what other tests read
    shard.write_bytes(changed)
    changed[-1] ^= 1

    def overwrite(now: weightsmith.Progress) -> None:
        if now.tensors and shard.read_bytes() != changed:
            with shard.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(changed[-1:])

    with pytest.raises(CheckpointError, match="chang") as caught:
        weightsmith.merge("ties.yml", "out", progress=overwrite, threads=1)
    assert "model.safetensors" in str(caught.value)
    assert not (here / "out").exists()
    with pytest.raises(StoreError, match="does not match this run"):
        weightsmith.merge("ties.yml", "out")


@pytest.mark.long
def test_work_of_another_program_is_not_resumed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors:
            raise Stop

    with pytest.raises(Stop):
        weightsmith.merge("ties.yml", "out", progress=stop)
    with monkeypatch.context() as patch:
        patch.setattr("weightsmith._execution.identity.program_digest", lambda: "another")
        with pytest.raises(StoreError, match="does not match this run"):
            weightsmith.merge("ties.yml", "out")
    assert weightsmith.merge("ties.yml", "out").resumed
