"""Recipes as sums of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from weightsmith import Sum, model
from weightsmith._base.errors import ParameterError

BASE, FR, DE = model("base"), model("fr"), model("de")


def task(**weights: float) -> dict[str, Any]:
    models = [{"model": name, "parameters": {"weight": weight}} for name, weight in weights.items()]
    return {"merge_method": "task_arithmetic", "base_model": "base", "models": models}


def linear(**weights: float) -> dict[str, Any]:
    return {"merge_method": "linear", "models": task(**weights)["models"], "parameters": {"normalize": False}}


@pytest.mark.parametrize(
    ("written", "recipe", "shown"),
    [
        (BASE + 0.5 * (FR - BASE), task(fr=0.5), "<base + 0.5 * (fr - base)>"),
        ((FR - BASE) / 2 + BASE, task(fr=0.5), "<base + 0.5 * (fr - base)>"),
        (BASE + (FR - BASE), task(fr=1.0), "<base + (fr - base)>"),
        (
            BASE + 0.5 * (FR - BASE) + 0.25 * (DE - BASE),
            task(fr=0.5, de=0.25),
            "<base + 0.5 * (fr - base) + 0.25 * (de - base)>",
        ),
        (BASE - (FR - BASE), linear(base=2.0, fr=-1.0), "<2 * base - fr>"),
        (BASE - 0.5 * (BASE - FR), task(fr=0.5), "<base + 0.5 * (fr - base)>"),
        (BASE + (FR - BASE) - (FR - BASE), {"merge_method": "passthrough", "models": [{"model": "base"}]}, None),
        (BASE + np.float32(0.5) * (FR - BASE), task(fr=0.5), None),
        ((FR + DE) / 2, linear(fr=0.5, de=0.5), "<0.5 * fr + 0.5 * de>"),
        (0.25 * FR + 0.75 * DE, linear(fr=0.25, de=0.75), None),
        ((BASE + FR + DE) / 3, linear(base=1 / 3, fr=1 / 3, de=1 / 3), None),
        (BASE + 0.5 * (FR - DE), linear(base=1.0, fr=0.5, de=-0.5), "<base + 0.5 * fr - 0.5 * de>"),
        (BASE, {"merge_method": "passthrough", "models": [{"model": "base"}]}, "<base>"),
    ],
)
def test_a_sum_is_the_recipe_that_one_would_write(written: Sum, recipe: dict[str, Any], shown: str | None) -> None:
    assert dict(written) == recipe
    assert shown is None or repr(written) == shown


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (FR - BASE, "the coefficients of <fr - base> add up to 0, and those of a model to 1"),
        (0.5 * FR + 0.4 * DE, "add up to 0.9"),
    ],
)
def test_what_is_no_model_is_refused(written: Sum, words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        weightsmith.plan(written)
    assert words in str(caught.value)
    assert "base + 0.5 * (fr - base)" in str(caught.value)


@pytest.mark.parametrize("wrong", [lambda: FR * DE, lambda: FR + 1, lambda: True * FR, lambda: FR / "2"])
def test_what_has_no_meaning_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        wrong()


@pytest.mark.parametrize("wrong", [lambda: FR / 0, lambda: float("nan") * FR])
def test_numbers_that_make_no_model_are_refused(wrong: Any) -> None:
    with pytest.raises(ParameterError, match="is no model"):
        wrong()


def test_sums_merge_to_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((4, 8)).astype(np.float32) for name in ("base", "fr", "de")}
    for name, array in arrays.items():
        write_checkpoint(tmp_path / name, {"w": array})
    merged = weightsmith.merge(BASE + 0.5 * (FR - BASE), "task", progress=False)
    np.testing.assert_allclose(merged["w"], arrays["base"] + 0.5 * (arrays["fr"] - arrays["base"]), rtol=1e-6)
    merged = weightsmith.merge({**(BASE + 0.5 * (FR - DE)), "dtype": "float64"}, "other", progress=False)
    np.testing.assert_allclose(merged["w"], arrays["base"] + 0.5 * (arrays["fr"].astype(float) - arrays["de"]), rtol=1e-6)
    with weightsmith.open_checkpoint("fr") as opened:
        assert dict(BASE + 0.5 * (model(opened) - BASE)) == task(fr=0.5)
