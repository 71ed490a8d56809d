"""`weightsmith plan`: the sums, the whole plan as JSON, and where each parameter comes from."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.calibration_help import TEXT, prepared_for, quantise, save_model, settings
from tests.cli_help import LINEAR, Cli, cli, environment, run_process, work
from tests.methods.test_post_steps import make_recipe
from tests.mini import write_checkpoint
from weightsmith import merge, open_checkpoint
from weightsmith._app.cli.merge import short
from weightsmith._app.cli.work import CommandWork
from weightsmith._base.errors import UnknownName
from weightsmith._plans import plan_from_json
from weightsmith._plans.summary import config_changes

__all__ = ["cli", "work"]

STACK = """merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 1]}]
  - sources: [{model: b, layer_range: [0, 2]}]
"""

TIES = """merge_method: ties
base_model: a
models:
  - model: b
    parameters:
      weight: [0, 1]
      density:
        - filter: mlp
          value: 0.5
        - value: 0.25
parameters:
  normalize: false
"""


def row(text: str, begins: str) -> list[str]:
    """The words of the line that begins so."""
    return row_text(text, begins).split()


def row_text(text: str, begins: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(begins))


def test_a_plan_prints_what_would_happen_and_writes_nothing(cli: Cli, work: Path) -> None:
    (work / "stack.yml").write_text(STACK)
    before = sorted(work.rglob("*"))
    ran = cli("plan", "stack.yml")
    assert ran.code == 0
    assert row(ran.out, "copy") == ["copy", "8", "528", "bytes"]
    assert row(ran.out, "num_hidden_layers") == ["num_hidden_layers", "2", "3"]
    assert row(ran.out, "model ")[:2] == ["model", "8"]
    assert "model.layers.0 to 2" in ran.out
    assert "its layer is in no slice" in ran.out
    assert "tokenizer.json" in ran.out
    assert row(ran.out, "read") == ["read", "528", "bytes"]
    assert sorted(work.rglob("*")) == before


@pytest.mark.slow
def test_json_is_the_plan_with_the_place_of_every_tensor_and_the_sums(cli: Cli, work: Path) -> None:
    args = ["linear.yml", "--max-shard-size", "100", "--out-dtype", "float16", "--seed", "7"]
    ran = cli("plan", *args, "--json", "--threads", "3", "--max-memory", "1GB")
    printed = json.loads(ran.out)
    assert (printed["seed"], printed["summary"]["threads"], printed["summary"]["peak_memory_bytes"] < 10**9) == (7, 3, True)
    assert len(printed["files"]) > 1
    assert cli("merge", *args, "out").code == 0
    for step in printed["steps"]:
        place = printed["places"][step["name"]]
        with (work / "out" / place["file"]).open("rb") as file:
            file.seek(place["offset"])
            data = np.frombuffer(file.read(place["bytes"]), np.float16)
        inputs = [open_checkpoint(work / m).read(step["name"]).ravel() for m in "ab"]
        np.testing.assert_allclose(data, 0.25 * inputs[0] + 0.75 * inputs[1], rtol=1e-3, atol=1e-3)
    for extra in ("hash", "files", "places", "summary"):
        del printed[extra]
    assert len(plan_from_json(printed).steps) == 6  # the plan's own keys are all there


@pytest.mark.slow
def test_the_passes_for_statistics_count_as_reading(cli: Cli, work: Path) -> None:
    everywhere = TIES.replace("[0, 1]", "1")  # where its weight is 0 a model is not read
    (work / "ties.yml").write_text(everywhere)
    summary = json.loads(cli("plan", "ties.yml", "--json").out)["summary"]
    assert summary["read_bytes_at_most"] % summary["input_bytes"] == 0
    assert summary["read_bytes_at_most"] > summary["input_bytes"]
    times = summary["read_bytes_at_most"] // summary["input_bytes"]
    assert f"read up to {times} times" in cli("plan", "ties.yml").out
    (work / "ties.yml").write_text(everywhere.replace("0.5", "1").replace("0.25", "1"))
    summary = json.loads(cli("plan", "ties.yml", "--json").out)["summary"]
    assert summary["read_bytes_at_most"] == summary["input_bytes"] == 2 * summary["bytes"]


@pytest.mark.long
def test_what_is_predicted_to_be_read_is_read(cli: Cli, work: Path) -> None:
    (work / "ties.yml").write_text(TIES)
    predicted = json.loads(cli("plan", "ties.yml", "--json").out)["summary"]
    done = json.loads(cli("merge", "ties.yml", "out", "--json").out)
    assert predicted["input_bytes"] < done["read_bytes"] <= predicted["read_bytes_at_most"]
    assert done["bytes"] == predicted["bytes"]
    assert sum(f["bytes"] for f in done["files"]) == predicted["write_bytes"]


@pytest.mark.slow
def test_explain_shows_each_value_and_the_line_it_comes_from(cli: Cli, work: Path) -> None:
    (work / "ties.yml").write_text(TIES)
    ran = cli("plan", "ties.yml", "--explain", "model.layers.1.mlp.up_proj.weight")
    assert ran.code == 0
    assert row(ran.out, "weight") == ["weight", "b", "1", "ties.yml:6:15"]
    assert row(ran.out, "density") == ["density", "b", "0.5", "ties.yml:9:18"]
    assert row(ran.out, "normalize") == ["normalize", "false", "ties.yml:12:14"]
    assert row(ran.out, "lambda") == ["lambda", "1", "default"]
    assert "the base's: no model takes part in it" in cli("plan", "ties.yml", "--explain", "model.norm.weight").out
    ran = cli("plan", "ties.yml", "--explain", "model.layers.0.self_attn.q_proj.weight", "--json")
    assert [read["model"] for read in json.loads(ran.out)["inputs"]] == ["a"]
    explained = {p["parameter"]: (p["model"], p["value"], p["where"]) for p in json.loads(ran.out)["parameters"]}
    assert explained["weight"] == ("b", 0.0, "ties.yml:6:15")
    assert explained["density"] == ("b", 0.25, "ties.yml:10:18")


def test_explain_of_a_tensor_that_is_not_there_names_the_nearest_one(cli: Cli, work: Path) -> None:
    ran = cli("plan", "linear.yml", "--explain", "model.layer.1.mlp.up_proj.weight")
    assert ran.code == 1
    assert "did you mean 'model.layers.1.mlp.up_proj.weight'?" in ran.err
    assert ran.out == ""


@pytest.mark.long
def test_long_names_are_neither_cut_nor_wrapped_in_a_pipe(tmp_path: Path) -> None:
    name = "model.layers.0." + "very_long_part." * 20 + "weight"
    for model in "ab":
        write_checkpoint(tmp_path / model, {name: np.ones((2, 2), np.float32)})
    (tmp_path / "linear.yml").write_text(LINEAR)
    ran = run_process("plan", "linear.yml", "--explain", name, cwd=tmp_path, env={"COLUMNS": ""})
    assert ran.code == 0
    assert f"b           {name}\n" in ran.out
    assert "\x1b" not in ran.out


@pytest.mark.long
def test_colour_is_for_terminals_whose_user_wants_it() -> None:
    def on_a_terminal(**options: str) -> str:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "weightsmith", "methods", "nope"]
        subprocess.run(command, stdout=theirs, stderr=theirs, env=environment(TERM="xterm", **options), check=False)
        text = os.read(ours, 65536).decode()
        os.close(ours)
        os.close(theirs)
        return text

    assert "\x1b[1;31merror[unknown-method]:" in on_a_terminal()
    assert "\x1b" not in on_a_terminal(NO_COLOR="1")


def test_a_change_of_type_in_the_config_is_a_change() -> None:
    assert [(c.key, c.old, c.new) for c in config_changes({"a": 1, "b": {"x": 0}}, {"a": True, "b": {}})] == [
        ("a", 1, True),
        ("b.x", 0, None),
    ]


def test_a_long_config_value_is_shortened() -> None:
    assert len(short(["full_attention"] * 48)) <= 60
    assert short("x" * 100, 20).endswith("...") and len(short("x" * 100, 20)) <= 20  # noqa: PT018
    assert short(None) == "-"


@pytest.mark.slow
def test_the_distance_can_be_had_without_writing(tmp_path: Path, cli: Cli) -> None:
    recipe = make_recipe(tmp_path)
    (tmp_path / "recipe.yml").write_text(recipe)
    before = sorted(p.name for p in tmp_path.iterdir())
    ran = cli("plan", str(tmp_path / "recipe.yml"), "--distance", "--json")
    assert ran.code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    done = merge(recipe, tmp_path / "out")
    assert json.loads(ran.out) == [{"name": m.name, "delta_norm": m.delta, "base_norm": m.base} for m in done.distance]
    assert "model.layers.1" in cli("plan", str(tmp_path / "recipe.yml"), "--distance").out


# ---- calibrated formats

CALIBRATED = ["--calibration", "text.txt", "--calibration-rows", "6", "--calibration-tokens", "16"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that can be calibrated, a text, and a recipe `copy.yml`, in the current folder."""
    save_model(tmp_path / "llama")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "copy.yml").write_text("merge_method: passthrough\nmodels: [{model: llama}]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_calibrated_weights_are_explained_by_their_own_names(cli: Cli, small: Path) -> None:
    plan, name = ["plan", "copy.yml", "--quantize", "w4a16", *CALIBRATED], "model.layers.0.mlp.gate_proj.weight"
    text = cli(*plan, "--explain", name).out
    assert text.startswith(f"{name} [96, 64] BF16, made by copy\ncalibrated: quantised for what enters the layer\n")
    assert "stored as w4a16-g32: model.layers.0.mlp.gate_proj.weight_packed I32, " in text
    assert ["llama", name] in [line.split() for line in text.splitlines()]
    assert cli(*plan, "--explain", f"{name}_packed").out == text
    explained = json.loads(cli(*plan, "--explain", name, "--json").out)
    assert (explained["calibrated"], explained["encoding"], explained["inputs"]) == (
        True,
        "w4a16-g32",
        [{"model": "llama", "tensor": name}],
    )
    assert "calibrated" not in cli(*plan, "--explain", "lm_head.weight").out
    ran = cli(*plan, "--explain", "model.layers.0.mlp.gate_proj")
    assert (ran.code, ran.out) == (1, "")
    assert f"did you mean '{name}'?" in ran.err
    with prepared_for(small / "llama", settings(small, bits=None, uniform=False), "w4a16") as prepared:
        with pytest.raises(UnknownName):  # the plan's own tensors are the arrays
            prepared.explain(name)


@pytest.mark.long
def test_a_calibrated_plan_shows_weights_and_all_that_is_read(cli: Cli, small: Path) -> None:
    plan = ["plan", "copy.yml", "--quantize", "w4a16", *CALIBRATED]
    text = cli(*plan).out
    assert row(text, "w4a16-g32")[:2] == ["w4a16-g32", "14"]
    assert row(text, "output")[1] == "21"
    assert "calibrated: quantised for what enters the layer" in text
    assert "plus the calibration: torch, transformers, a layer in float32 and its inputs" in text
    assert "plus the calibration" not in cli("plan", "copy.yml", "--quantize", "w4a16").out
    predicted = json.loads(cli(*plan, "--json").out)["summary"]
    done = json.loads(cli("merge", "copy.yml", "out", "--quantize", "w4a16", *CALIBRATED, "--json").out)
    assert done["read_bytes"] <= predicted["read_bytes_at_most"] < 1.2 * done["read_bytes"]
    assert (done["bytes"], done["tensors"]) == (predicted["bytes"], 21)
    assert predicted["tensors"] == 21


@pytest.mark.long
@pytest.mark.parametrize("flags", [[], ["--measure", "full"]])
def test_a_plan_that_is_measured_first_says_so(cli: Cli, small: Path, flags: list[str]) -> None:
    exl2 = ["--quantize", "exl2", "--bits", "4.1", *CALIBRATED, *flags]
    text = cli("plan", "copy.yml", *exl2).out
    assert "first: that decides how weights are stored, the sizes and config.json" in text
    assert "; more when it is quantised then" in row_text(text, "read")
    assert "write" not in text
    assert "plus the calibration" in text
    explained = cli("plan", "copy.yml", *exl2, "--explain", "lm_head.weight")
    assert "the model is measured first, for exl2: that decides how this is stored" in explained.out
    printed = json.loads(cli("plan", "copy.yml", *exl2, "--explain", "lm_head.weight", "--json").out)
    assert (printed["measured_first"], printed["encoding"], printed["stored"]) == (True, None, [])
    predicted = json.loads(cli("plan", "copy.yml", *exl2, "--json").out)["summary"]
    assert (predicted["measured_first"], predicted["write_bytes"], predicted["read_bytes_at_most"]) == (True, None, None)
    done = json.loads(cli("merge", "copy.yml", "out", *exl2, "--json").out)
    assert abs(predicted["bytes"] - done["bytes"]) < 0.02 * done["bytes"]
    kinds = {kind["kind"]: kind for kind in predicted["kinds"]}
    assert sum(kind["bytes"] for kind in kinds.values()) == predicted["bytes"]
    assert "size by kind of tensor (about)" in text


@pytest.mark.long
def test_warnings_of_the_plan_that_follows_are_shown_once(cli: Cli, small: Path) -> None:
    """Those of the first plan are not shown again."""
    ran = cli("quantize", "llama", "out", "--format", "exl2", "--bits", "4.55", *CALIBRATED)
    assert ran.code == 0
    assert ran.err.count("bits for each weight, not 4.55: its blocks are few") == 1
    assert ran.err.count("which is archived") == 1


def test_a_quantised_plan_shows_the_size_of_each_kind(cli: Cli, small: Path) -> None:
    """OUT is ignored."""
    quantize = ["quantize", "llama", "out", "--format", "fp8-dynamic", "--plan"]
    ran = cli(*quantize, "--json")
    assert ran.code == 0
    assert not Path("out").exists()
    summary = json.loads(ran.out)["summary"]
    kinds = {kind["kind"]: kind for kind in summary["kinds"]}
    assert {"embedding", "attention", "MLPs"} <= kinds.keys()
    assert sum(kind["bytes"] for kind in kinds.values()) == summary["bytes"]
    assert kinds["MLPs"]["bytes"] < 1.1 * kinds["MLPs"]["elements"]
    assert "bits a number" in cli(*quantize).out


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [["w4a16"], ["w4a16", *CALIBRATED], ["exl2", "--bits", "4.1", "--uniform", *CALIBRATED]], ids=" ".join
)
def test_what_is_made_is_counted_in_weights(cli: Cli, small: Path, flags: list[str]) -> None:
    assert "out: 21 tensors, " in cli("quantize", "llama", "out", "--format", *flags).out


@pytest.mark.long
def test_what_an_earlier_run_made_of_calibrated_weights_is_counted_in_arrays(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = quantise(small / "llama", small / "out", settings(small, bits=None, uniform=False), name="w4a16")
    CommandWork("out", quiet=False, as_json=False).report(replace(quantised, resumed=12))
    assert "out: 21 tensors, 12 of the 49 stored arrays by an earlier run, " in capsys.readouterr().out
