"""Candidates that are not written have the losses of the recipe with their numbers, whatever was kept of the last one."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weightsmith
from weightsmith._activations.decoder.forward import _multiplying, _reusing
from weightsmith._activations.rows import text_source
from weightsmith._base.errors import NonFinite, PlanError
from weightsmith._engine.resources import Resources
from weightsmith._engine.results import JobMemory
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.recipe import Scalar
from weightsmith._reports.evaluate.opening import Opened, opened, prepare_named
from weightsmith._reports.tuning.candidates import Candidates
from weightsmith._reports.tuning.evaluator import MEMORY_BYTES, Candidate, Evaluator, Rows
from weightsmith.abc.output import Output

SCALAR = """merge_method: {choice: [ties, dare_ties, task_arithmetic]}
base_model: a
models:
  - model: {choice: [b, a]}
    parameters: {weight: {tune: [0, 1]}, density: [{tune: [0.1, 1]}, {tune: [0.1, 1]}]}
  - model: c
    parameters: {weight: [{filter: layers.1., value: {tune: [0, 1]}}, {value: 0.5}], density: 0.5}
"""
SCOPED = """merge_method: ties
base_model: a
models:
  - model: b
    parameters: {weight: {tune: [0, 1]}, density: {tune: [0, 1]}}
parameters: {scope: model}
"""
STAGES = """name: one
merge_method: linear
models: [{model: a, parameters: {weight: {tune: [0, 1]}}}, {model: b, parameters: {weight: 1}}]
---
merge_method: slerp
base_model: c
models: [{model: one}]
parameters: {t: {tune: [0, 1]}}
"""
CASES: dict[str, tuple[str, tuple[tuple[Scalar, ...], ...]]] = {
    "parameters, a method and a model": (
        SCALAR,
        (
            ("ties", "b", 0.5, 0.4, 0.7, 0.5),
            ("ties", "b", 0.5, 0.4, 0.7, 0.1),
            ("dare_ties", "b", 0.5, 0.4, 0.7, 0.1),
            ("ties", "a", 0.5, 0.4, 0.7, 0.1),
            ("ties", "b", 0.5, 0.4, 0.7, 0.1),
        ),
    ),
    "a product": (SCOPED, ((0.5, 0.5), (0.5, 0.2), (0.7, 0.2))),
    "stages": (STAGES, ((0.5, 0.5), (0.2, 0.5), (0.2, 0.9))),
}


def rows_of(one: Opened, rows: int = 4) -> Rows:
    return Rows.of(one.cutter.rows(text_source("t.txt", rows, 32, 0, "text"), rows))


@cache
def loss_of_merge(recipe: str) -> Any:
    """The totals of an evaluation of what the recipe makes in the current folder: every `work` has the same models."""
    Path("numbers.yml").write_text(recipe)
    weightsmith.merge("numbers.yml", "merged", progress=False, seed=3, overwrite=True)
    return weightsmith.evaluate("merged", text="t.txt", tokens=32, rows=4, progress=False).totals[0]


@pytest.mark.matrix("*-4294967296", "stages-0")
@pytest.mark.long
@pytest.mark.parametrize("budget", [MEMORY_BYTES, 60_000, 0])
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_recipe_with_these_numbers(work: Path, name: str, budget: int) -> None:
    text, candidates = CASES[name]
    Path("r.yml").unlink()
    Path("r.yml").write_text(text)
    with Candidates("r.yml", RecipeOptions(seed=3)) as recipe:
        one = opened("r.yml", recipe.prepare(recipe.start))
        evaluator, rows = Evaluator(one, Resources(threads=2), budget), rows_of(one)
        assert evaluator.holds_model == (budget == MEMORY_BYTES)
        for values in candidates:
            prepared = recipe.prepare(values)
            losses, _ = evaluator.losses(Candidate.of(prepared.plan, prepared.inputs), rows)
            expected = loss_of_merge(recipe.fill(values).text)
            assert losses.sum() / expected.tokens == pytest.approx(expected.loss.value, rel=1e-6)


@pytest.mark.long
def test_only_what_the_changed_numbers_touch_is_computed_again(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("r.yml").unlink()
    Path("r.yml").write_text(SCALAR)
    computed, ran = list[str](), list[int]()
    from weightsmith._activations.decoder.forward import Decoder
    from weightsmith._reports.tuning import evaluator as module

    run, layer = module.run, Decoder.layer

    def noted_run(plan: object, inputs: object, output: Output, resources: object, work: object) -> object:
        computed.extend(step.out.name for step in work.steps)  # type: ignore[attr-defined]
        return run(plan, inputs, output, resources, work)  # type: ignore[arg-type]

    def noted_layer(self: Decoder, i: int, *args: object) -> object:
        ran.append(i)
        return layer(self, i, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "run", noted_run)
    monkeypatch.setattr(Decoder, "layer", noted_layer)
    with Candidates("r.yml", RecipeOptions()) as recipe:
        one = opened("r.yml", recipe.prepare(recipe.start))
        evaluator, rows = Evaluator(one, Resources(threads=1)), rows_of(one)

        def score(*values: Scalar) -> np.ndarray:
            computed.clear()
            ran.clear()
            prepared = recipe.prepare(values)
            return evaluator.losses(Candidate.of(prepared.plan, prepared.inputs), rows)[0]

        first = score("ties", "b", 0.5, 0.4, 0.7, 0.5)
        assert ran == [0, 1]
        assert len(computed) == len(set(computed)) == len(one.model.steps)
        again = score("ties", "b", 0.5, 0.4, 0.7, 0.5)
        assert (computed, ran) == ([], [])
        assert np.array_equal(first, again)
        score("ties", "b", 0.5, 0.4, 0.7, 0.1)
        assert ran == [1]
        assert computed
        assert all(".layers.1." in name for name in computed)


@pytest.mark.long
def test_thresholds_are_found_once_for_all_weights(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for another density."""
    counted = list[int]()
    from weightsmith._engine.tile_work import Merger

    statistics = Merger.statistics
    monkeypatch.setattr(Merger, "statistics", lambda self, leaf, *args: counted.append(1) or statistics(self, leaf, *args))
    Path("r.yml").unlink()
    Path("r.yml").write_text(SCALAR)
    with Candidates("r.yml", RecipeOptions()) as recipe:
        one = opened("r.yml", recipe.prepare(recipe.start))
        evaluator, rows, passes = Evaluator(one, Resources(threads=1)), rows_of(one), list[int]()
        for weights, density in (((0.4, 0.7), 0.5), ((0.9, 0.2), 0.5), ((0.9, 0.2), 0.3), ((0.1, 0.1), 0.3), ((0.4, 0.7), 0.5)):
            prepared = recipe.prepare(("ties", "b", weights[0], density, density, weights[1]))
            candidate = Candidate.of(prepared.plan, prepared.inputs)
            counted.clear()
            losses, _ = evaluator.losses(candidate, rows)
            passes.append(len(counted))
            assert np.array_equal(losses, Evaluator(one, Resources(threads=1)).losses(candidate, rows)[0])
    assert passes[0] == passes[2] == passes[4] > 0
    assert passes[1] == passes[3] == 0


@pytest.mark.matrix
@pytest.mark.slow
def test_losses_do_not_depend_on_threads_or_on_other_rows(work: Path) -> None:
    with Candidates("r.yml", RecipeOptions()) as recipe:
        prepared = recipe.prepare(recipe.start)
        one, candidate = opened("r.yml", prepared), Candidate.of(prepared.plan, prepared.inputs)
        few, _ = Evaluator(one, Resources(threads=1)).losses(candidate, rows_of(one, 3))
        many, _ = Evaluator(one, Resources(threads=3)).losses(candidate, rows_of(one, 22))
        assert many[:3] == pytest.approx(few, rel=1e-6)
        same, _ = Evaluator(one, Resources(threads=2)).losses(candidate, rows_of(one, 22))
        assert np.array_equal(many, same)


@pytest.mark.long
def test_divergence_from_a_reference_is_that_of_eval(work: Path) -> None:
    Path("b.yml").write_text("merge_method: passthrough\nmodels: [{model: b}]\n")
    with Candidates("r.yml", RecipeOptions()) as recipe:
        prepared = recipe.prepare(recipe.start)
        one = opened("r.yml", prepared)
        evaluator, rows = Evaluator(one, Resources()), rows_of(one)
        other = recipe.prepare((1.0, 0.0, 0.0))
        reference = evaluator.reference(Candidate.of(other.plan, other.inputs), [rows])
        _, divergences = evaluator.losses(Candidate.of(prepared.plan, prepared.inputs), rows, reference)
        for name, values in (("one.yml", recipe.start), ("other.yml", (1.0, 0.0, 0.0))):
            Path(name).write_text(recipe.fill(values).text)
    expected = weightsmith.evaluate("one.yml", text="t.txt", tokens=32, rows=4, reference="other.yml", progress=False)
    divergence = expected.totals[1].divergence
    assert divergence is not None
    assert divergences is not None
    assert divergences.sum() / expected.totals[1].tokens == pytest.approx(divergence.value, rel=1e-4)


@pytest.mark.long
def test_what_a_reference_predicts_is_computed_once(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the memory come the same numbers, and those of each reference: two that are named on the same rows too."""
    monkeypatch.setattr("weightsmith._activations.losses.SMALL_LOGITS", 1 << 14)  # several pieces, of which each is on disk
    with Candidates("r.yml", RecipeOptions()) as recipe:
        prepared, other = recipe.prepare(recipe.start), recipe.prepare((1.0, 0.0, 0.0))
        one = opened("r.yml", prepared)
        evaluator, rows, memory = Evaluator(one, Resources()), rows_of(one), JobMemory(work)
        candidates = [Candidate.of(plan.plan, plan.inputs) for plan in (prepared, other)]
        plain = [evaluator.reference(candidate, [rows]) for candidate in candidates]
        kept = [evaluator.reference(c, [rows], name, memory) for c, name in zip(candidates, "ab", strict=True)]
        for candidate, reference in zip(candidates, kept, strict=True):
            assert np.array_equal(evaluator.own_losses(rows, reference), evaluator.losses(candidate, rows)[0])
        heads = list[object]()
        for reference in kept:
            monkeypatch.setattr(reference.decoder, "head", lambda *_, **__: nullcontext(heads.append))
        for candidate in candidates:
            for mine, theirs in zip(kept, plain, strict=True):
                for losses, expected in zip(*(evaluator.losses(candidate, rows, r) for r in (mine, theirs)), strict=True):
                    assert np.array_equal(losses, expected)
        assert not heads


@pytest.mark.slow
def test_a_candidate_with_other_weights_follows_one_that_failed(work: Path) -> None:
    Path("r.yml").unlink()
    text = "merge_method: task_arithmetic\nbase_model: a\ndtype: float16\nmodels:\n"
    Path("r.yml").write_text(f"{text}  - {{model: b, parameters: {{weight: {{tune: [-1, 1e38]}}}}}}\n")
    with Candidates("r.yml", RecipeOptions()) as recipe:
        prepared = recipe.prepare((0.5,))
        one = opened("r.yml", prepared)
        evaluator, rows = Evaluator(one, Resources()), rows_of(one)
        first, _ = evaluator.losses(Candidate.of(prepared.plan, prepared.inputs), rows)
        broken = recipe.prepare((1e38,))
        with pytest.raises(NonFinite):
            evaluator.losses(Candidate.of(broken.plan, broken.inputs), rows)
        again, _ = evaluator.losses(Candidate.of(prepared.plan, prepared.inputs), rows)
        assert np.array_equal(first, again)


WRONG = {
    "density: {tune: [0, 1.5]}": ("r.yml:4:62: density must be", "1.5"),
    "density: {choice: [0.5, 2]}": ("r.yml:4:62: density must be", "not 2"),
    "densty: {tune: [0, 1]}": ("merge_method ties has no parameter 'densty'", "density"),
}


@pytest.mark.parametrize("parameter", WRONG)
def test_a_range_that_the_parameter_does_not_allow_is_an_error_at_its_line(work: Path, parameter: str) -> None:
    Path("r.yml").unlink()
    text = "merge_method: ties\nbase_model: a\nmodels:\n  - {model: b, parameters: {weight: {tune: [0, 1]}, PARAMETER}}\n"
    Path("r.yml").write_text(text.replace("PARAMETER", parameter))
    with pytest.raises(PlanError) as error, Candidates("r.yml", RecipeOptions()) as recipe:
        recipe.prepare(recipe.start)
    for part in WRONG[parameter]:
        assert part in str(error.value)
    assert len(error.value.problems) == 1


def test_numbers_have_six_digits_and_whole_ones_none(work: Path) -> None:
    Path("r.yml").unlink()
    Path("r.yml").write_text(
        "merge_method: karcher\nmodels:\n  - {model: a, parameters: {weight: {tune: [0.1, 1]}}}\n"
        "  - {model: b, parameters: {weight: 1}}\nparameters: {max_iter: {tune: [2, 9]}}\n"
    )
    with Candidates("r.yml", RecipeOptions()) as recipe:
        assert recipe.rounded((1 / 3, 4.4)) == (0.333333, 4)
        assert recipe.rounded((0.01, 1)) == (0.1, 2)
        assert recipe.start == (0.55, 6)


@pytest.mark.long
def test_products_in_bfloat16_change_losses_a_little_and_no_thread_changes_them(work: Path) -> None:
    """As long as they are asked for; a divergence from the same model is still zero."""
    with Candidates("r.yml", RecipeOptions()) as recipe:
        prepared = recipe.prepare(recipe.start)
        one, candidate = opened("r.yml", prepared), Candidate.of(prepared.plan, prepared.inputs)
        rows = rows_of(one, 9)
        exact, _ = Evaluator(one, Resources(threads=1)).losses(candidate, rows)
        evaluator = Evaluator(one, Resources(threads=1), arithmetic="bfloat16")
        losses, _ = evaluator.losses(candidate, rows)
        assert 0 < np.abs(losses - exact).max() < 0.01 * exact.max()
        threads = Evaluator(one, Resources(threads=3), arithmetic="bfloat16")
        assert np.array_equal(threads.losses(candidate, rows)[0], losses)
        _, divergences = evaluator.losses(candidate, rows, evaluator.reference(candidate, [rows]))
        assert divergences == pytest.approx(np.zeros(9), abs=1e-6)
        evaluator.multiply_in("float32")
        assert np.array_equal(evaluator.losses(candidate, rows)[0], exact)


def test_a_head_in_bfloat16_finds_the_logits_of_the_tokens_in_float32() -> None:
    torch.manual_seed(0)
    head, x, tokens = torch.nn.Linear(24, 50), torch.randn(1, 7, 24), torch.tensor([3, 49, 0, 3, 7, 7, 20])
    places = torch.arange(7)
    with torch.no_grad():
        exact = head(x)
        with _multiplying(head, "bfloat16") as name:
            rounded = head(x)
            name(tokens)
            logits = head(x)
        assert torch.equal(head(x), exact)
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(logits[0, places, tokens], exact[0, places, tokens])
    logits[0, places, tokens] = rounded[0, places, tokens]
    assert torch.equal(logits, rounded)


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_whose_logits_are_written_into_the_same_memory_finds_the_same(bias: bool) -> None:
    head, x = torch.nn.Linear(24, 50, bias=bias), torch.randn(1, 7, 24)
    with torch.no_grad():
        expected = head(x)
        with _reusing(head):
            first = head(x)
            torch.testing.assert_close(first, expected)
            assert head(x[:, 4:]).data_ptr() == first.data_ptr()
            torch.testing.assert_close(first[:, :3], expected[:, 4:])
        assert head(x).data_ptr() != first.data_ptr()


@pytest.mark.slow
def test_settings_that_one_file_leaves_out_are_those_of_transformers(work: Path) -> None:
    """A model converted from GGUF states less than one that transformers saved."""
    config = json.loads(Path("b/config.json").read_text())
    fewer = {key: value for key, value in config.items() if key not in ("attention_dropout", "hidden_act", "use_cache")}
    for name, written in (("fewer", fewer), ("other", {**config, "rms_norm_eps": 0.5})):
        shutil.copytree(Path("b").resolve(), name)
        Path(name, "config.json").write_text(json.dumps(written))
    with Candidates("r.yml", RecipeOptions()) as candidates:
        prepared = candidates.prepare(candidates.start)
        evaluator = Evaluator(opened("r.yml", prepared), Resources(1))
        fitting = {}
        for name in ("fewer", "other"):
            with prepare_named(name) as named:
                fitting[name] = evaluator.fits(named.plan)
    assert fitting == {"fewer": True, "other": False}


@pytest.mark.long
@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_another_model_of_the_same_shape_has_thresholds_of_its_own(work: Path, scope: str) -> None:
    text = f"""merge_method: ties
base_model: a
models: [{{model: {{choice: [b, c]}}, parameters: {{weight: 1, density: 0.3}}}}]
parameters: {{scope: {scope}}}
"""
    Path("r.yml").unlink()
    Path("r.yml").write_text(text)
    with Candidates("r.yml", RecipeOptions(seed=3)) as recipe:
        one = opened("r.yml", recipe.prepare(recipe.start))
        evaluator, rows = Evaluator(one, Resources(threads=1)), rows_of(one)
        for name in ("b", "c", "b"):
            prepared = recipe.prepare((name,))
            candidate = Candidate.of(prepared.plan, prepared.inputs)
            losses, _ = evaluator.losses(candidate, rows)
            assert np.array_equal(losses, Evaluator(one, Resources(threads=1)).losses(candidate, rows)[0])
