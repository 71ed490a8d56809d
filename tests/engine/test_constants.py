"""NaN and infinities that all the inputs share are constants of the model: copied, and out of the way of every method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests import plan_help
from tests.cases import CASES
from tests.cases.case import Case, fine_tunes
from tests.methods.test_methods import run_case
from tests.mini import write_checkpoint
from weightsmith._base.errors import NonFinite
from weightsmith._base.tensors import DTYPES
from weightsmith._engine.reader import Reader
from weightsmith._plans import Step
from weightsmith.abc.job import Job

BF16 = DTYPES["BF16"]
SPOTS = {(0, 0): np.inf, (199, 516): np.nan, (200, 7): -np.inf}


def spoiled(arrays: list[np.ndarray], value: float | None = None) -> list[np.ndarray]:
    """The same constants, or `value` in their place, in each."""
    copies = [array.copy() for array in arrays]
    for array in copies:
        for spot, constant in SPOTS.items():
            array[spot] = constant if value is None else value
    return copies


def adjusted(name: str, **steps: Any) -> Case:
    """A case with steps after its merge."""
    return replace(CASES[name], shared={**CASES[name].shared, **steps})


BY_JOB = {
    "CombinationJob": CASES["linear"],
    "GramJob": CASES["slerp"],
    "RowJob": CASES["nuslerp, rows"],
    "ColumnJob": CASES["nuslerp, columns"],
    "ElementwiseJob": CASES["consensus_ta"],
    "ActiveJob": CASES["ramplus"],
    "TaskVectorJob": CASES["ties"],
    "TaskVectorJob, masks that are remembered": CASES["della"],
    "SceJob": CASES["sce, selected"],
    "FusionJob": CASES["arcee_fusion"],
    "MatrixJob": CASES["tsv_m"],
    "ScaledJob": adjusted("ties", norm_match="mean"),
    "SpectrumJob": adjusted("ties", spectrum="flatten"),
}
"""Constants and damage are the engine's matter: one case for each class of job that merges."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_JOB)
def test_the_cases_have_these_jobs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_names, plain = set(), Reader.job

    def job(self: Reader, step: Step) -> Job:
        step_job = plain(self, step)
        class_names.add(type(step_job).__name__)
        return step_job

    monkeypatch.setattr(Reader, "job", job)
    case = BY_JOB[name]
    run_case(case, tmp_path, fine_tunes((3, 5), case.inputs - 1), out=BF16)
    assert class_names == {name.partition(",")[0]}


@pytest.mark.long
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", BY_JOB)
def test_what_is_no_number_is_an_error_that_says_where(name: str, value: float, tmp_path: Path) -> None:
    case = BY_JOB[name]
    arrays = fine_tunes((300, 517), case.inputs - 1)
    which = case.inputs - 1
    arrays[which] = arrays[which].copy()
    arrays[which][200, 7] = value
    with pytest.raises(NonFinite) as caught:
        run_case(case, tmp_path / "a", arrays, out=BF16)
    assert f"m{which}, tensor w: element [200, 7] is {value}" in str(caught.value)
    passed = run_case(case, tmp_path / "b", arrays, out=BF16, allow_nonfinite=True)
    assert passed.shape == (300, 517)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_JOB)
def test_constants_that_are_not_finite_are_copied_and_all_else_is_as_if_they_were_zeros(name: str, tmp_path: Path) -> None:
    case = BY_JOB[name]
    arrays = fine_tunes((300, 517), case.inputs - 1)
    got = run_case(case, tmp_path / "a", spoiled(arrays), out=BF16)
    expected = run_case(case, tmp_path / "b", spoiled(arrays, 0), out=BF16).copy()
    for spot, constant in SPOTS.items():
        assert np.array_equal(got[spot].astype(np.float64), constant, equal_nan=True)
        expected[spot] = constant
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("first", "second"), [(np.inf, -np.inf), (np.inf, np.nan), (np.nan, 1.0), (1.0, np.inf)])
def test_inputs_that_differ_in_one_are_refused(first: float, second: float) -> None:
    models = [{"w": np.float32([3, value, np.inf])} for value in (first, second)]
    with pytest.raises(NonFinite, match=r"tensor w: element \[[12]\] is (inf|nan|-inf)"):
        weightsmith.merge_state_dicts("linear", models, weight=1)


def test_nan_of_two_kinds_are_not_the_same() -> None:
    models = [{"w": np.array([bits], np.uint32).view(np.float32)} for bits in (0x7FC00000, 0x7FC00001)]
    with pytest.raises(NonFinite):
        weightsmith.merge_state_dicts("linear", models, weight=1)


def test_one_model_alone_has_nobody_to_agree_with() -> None:
    with pytest.raises(NonFinite):
        weightsmith.merge_state_dicts("passthrough", [{"w": np.float32([1, np.inf])}], scale=2)


@pytest.mark.parametrize("at", [0, 4])
def test_the_first_element_and_the_last_are_looked_at_in_inputs_and_in_results(at: int) -> None:
    values = np.ones(5, np.float32)
    for value, message in ((np.inf, rf"element \[{at}\] is inf"), (3e38, rf"element \[{at}\] of the result is not a number")):
        values[at] = value
        with pytest.raises(NonFinite, match=message):
            weightsmith.merge_state_dicts("passthrough", [{"w": values}], scale=2)


def test_a_result_beside_a_base_is_looked_at(tmp_path: Path) -> None:
    """Its distance to the base is measured, and tells that something is wrong."""
    base = np.ones((2, 300), np.float32)
    tuned = base.copy()
    tuned[1, 7] = 3e38
    models = [{"x": array.astype(ml_dtypes.bfloat16)} for array in (base, tuned, tuned)]
    for name, model in zip("abc", models, strict=True):
        write_checkpoint(tmp_path / name, model)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "a"),
        "models": [{"model": str(tmp_path / name), "parameters": {"weight": 1.0}} for name in "bc"],
        "dtype": "bfloat16",
    }
    with pytest.raises(NonFinite, match=r"element \[1, 7\] of the result is not a number"):
        weightsmith.merge(recipe, tmp_path / "out")


def test_dtypes_may_differ() -> None:
    models = [{"w": np.array([2, -np.inf, np.nan], kind)} for kind in (np.float32, ml_dtypes.bfloat16)]
    with pytest.warns(UserWarning, match="w: this tensor holds a NaN or an infinity that is the same in all the models"):
        got = weightsmith.merge_state_dicts("linear", models, weight=1, out_dtype="float16")["w"]
    assert np.array_equal(got, np.float16([2, -np.inf, np.nan]), equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("method", ["linear", "ties", "slerp", "model_stock"])
def test_bounds_that_clip_nothing_are_merged_with_their_model(method: str, tmp_path: Path) -> None:
    """As in the audio tower of Gemma 4: scalars, infinite in every model."""
    bounds = {"model.audio.input_max": np.float32(np.inf), "model.audio.input_min": np.float32(-np.inf)}
    for k, name in enumerate("abc"):
        write_checkpoint(tmp_path / name, {**plan_help.decoder(seed=k), **bounds}, plan_help.config())
    parameters = {"ties": {"weight": 1, "density": 0.5}, "slerp": {"t": 0.3}, "linear": {"weight": 1}}.get(method, {})
    names = {"slerp": "b"}.get(method, "bc")
    recipe = {
        "merge_method": method,
        **({} if method == "linear" else {"base_model": str(tmp_path / "a")}),
        "models": [{"model": str(tmp_path / name)} for name in names],
        "parameters": parameters,
    }
    done = weightsmith.merge(recipe, tmp_path / "out", fsync=False)
    with weightsmith.open_checkpoint(tmp_path / "out") as model:
        assert {name: float(model.read(name)) for name in bounds} == {n: float(v) for n, v in bounds.items()}
    said = [str(w) for w in done.warnings if "infinity" in str(w)]
    assert said == [
        "model.audio.input_max: 2 tensors hold a NaN or an infinity that is the same in all the models: it is copied"
    ]


@pytest.mark.slow
def test_a_threshold_of_the_whole_model_does_not_see_them(tmp_path: Path) -> None:
    outs = []
    for k, value in enumerate((np.inf, 0)):
        for seed, name in enumerate("abc"):
            extra = {"model.w.weight": np.full((30, 40), 0.5, np.float32)}
            extra["model.w.weight"][3, 5] = value
            extra["model.w.weight"][7] += seed
            write_checkpoint(tmp_path / f"{k}{name}", {**plan_help.decoder(seed=seed), **extra}, plan_help.config())
        recipe = {
            "merge_method": "ties",
            "base_model": str(tmp_path / f"{k}a"),
            "models": [{"model": str(tmp_path / f"{k}{name}")} for name in "bc"],
            "parameters": {"weight": 1, "density": 0.3, "scope": "model"},
        }
        weightsmith.merge(recipe, tmp_path / f"out{k}", fsync=False)
        with weightsmith.open_checkpoint(tmp_path / f"out{k}") as model:
            outs.append({name: model.read(name) for name in model.specs})
    outs[1]["model.w.weight"][3, 5] = np.inf
    assert all(outs[0][name].tobytes() == outs[1][name].tobytes() for name in outs[1])
