"""All the mistakes of a recipe in one answer, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import config, decoder, problems
from weightsmith._base.errors import PlanError


def test_six_mistakes_are_told_at_once_with_their_places_and_nothing_is_written(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a", 4)
    b = plan_help.model(tmp_path / "b", 4, seed=1)
    recipe = tmp_path / "r.yml"
    recipe.write_text(f"""merge_method: ties
base_model: {a}
dtyp: bfloat16
slices:
  - sources:
      - {{model: {a}, layer_range: [0, 2]}}
      - {{model: {b}, layer_range: [0, 3], parameters: {{weight: heavy}}}}
  - sources:
      - {{model: {a}, layer_range: [2, 4]}}
      - {{model: {tmp_path}/c, layer_range: [2, 4]}}
parameters:
  density: 1.5
  lamda: 1
""")
    with pytest.raises(PlanError) as caught:
        weightsmith.merge(recipe, tmp_path / "out")
    lines = [line for line in str(caught.value).splitlines() if not line.startswith("  ")]
    assert [line.replace(str(tmp_path), "") for line in lines] == [
        "error[unknown-key]: /r.yml:3:1: unknown key 'dtyp' at the top level (did you mean 'dtype'?); mergekit silently "
        "ignored it",
        "error[layer]: /r.yml:5:5: the sources of a slice have different numbers of layers",
        f"error[parameter]: /r.yml:7:{61 + len(b)}: weight must be a number, not 'heavy'",
        "error[parameter]: /r.yml:10:9: merge_method ties needs the parameter 'weight' for each model",
        "error[not-found]: /r.yml:10:17: /c: no such folder or file",
        "error[parameter]: /r.yml:12:12: density must be at most 1, not 1.5",
        "error[unknown-parameter]: /r.yml:13:3: merge_method ties has no parameter 'lamda' (did you mean 'lambda'?); mergekit "
        "ignores it",
        "Nothing was written. (7 problems)",
    ]
    assert "    3 | dtyp: bfloat16\n      | ^^^^\n  -> Write 'dtype'.\n" in str(caught.value)
    assert "   12 |   density: 1.5\n      |            ^^^\n  -> Use a number from 0 to 1, such as density: 0.5.\n" in str(
        caught.value
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "r.yml"]


def test_a_slice_with_a_mistake_is_not_looked_at_further(tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / name, 4, seed=seed) for seed, name in enumerate("ab"))
    ranges = [{"model": a, "layer_range": [0, 2]}, {"model": b, "layer_range": [3, 4]}]  # the second has no further layer
    for sources, message in (
        (ranges, "the sources of a slice have different numbers of layers"),
        ([ranges[0], ranges[0]], f"{a} is listed twice"),
    ):
        recipe = {"merge_method": "linear", "slices": [{"sources": sources}], "parameters": {"weight": 1}}
        assert [problem.finding.what for problem in problems(recipe)] == [message]


def test_parameters_shapes_and_missing_tensors_are_told_together(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    tensors = decoder(seed=1, without=["model.layers.1.input_layernorm.weight"])
    tensors = {n: t.repeat(2, axis=0) if "q_proj" in n else t for n, t in tensors.items()}
    b = str(write_checkpoint(tmp_path / "b", tensors, config()))
    errors = problems(f"merge_method: slerp\nbase_model: {a}\nmodels: [{{model: {b}}}]\n")
    assert [str(f).split("\n")[0] for f in errors] == [
        "<text>:1:1: merge_method slerp needs the parameter 't'",
        "model.layers.0.self_attn.q_proj.weight: 'slerp' needs equal shapes; so for 1 more like it",
        "model.layers.1.input_layernorm.weight: not all the models have this tensor",
    ]


def test_an_unknown_method_does_not_hide_missing_models(tmp_path: Path) -> None:
    errors = problems(f"merge_method: tise\nmodels: [{{model: {tmp_path}/a}}, {{model: {tmp_path}/b}}]\n")
    assert [str(f).split("\n")[0] for f in errors] == [
        "<text>:1:1: no merge method is called 'tise' (did you mean 'ties'?)",
        f"<text>:2:18: {tmp_path}/a: no such folder or file",
        f"<text>:2:{18 + len(str(tmp_path)) + 13}: {tmp_path}/b: no such folder or file",
    ]


def test_an_unknown_method_hides_no_mistake_that_does_not_depend_on_it(tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / name, 2, seed=seed) for seed, name in enumerate("ab"))
    text = f"""merge_method: tise
slices:
  - sources:
      - {{model: {a}, layer_range: [0, 2]}}
      - {{model: {b}, layer_range: [1, 2], parameters: {{densty: 0.5}}}}
  - sources: [{{model: {b}, layer_range: [1, 9]}}]
parameters:
  weight: [1, heavy]
  normalize: perhaps
  rescale: l1
  density: 2
"""
    lines = text.split("\n")
    misspelled, beyond = f"5:{lines[4].index('densty') + 1}", f"6:{lines[5].index('[1,') + 1}"
    # `rescale` takes l1 in one method and a number in another, and the density of one has no bounds.
    messages = {problem.finding.where.removeprefix("<text>:"): problem.finding.what for problem in problems(text)}
    assert messages == {
        "1:1": "no merge method is called 'tise' (did you mean 'ties'?)",
        "3:5": "the sources of a slice have different numbers of layers",
        misspelled: "no merge method has a parameter 'densty' (did you mean 'density'?); mergekit ignores it",
        beyond: f"layer_range [1, 9] of {b}, which has 2 layers",
        "8:11": "weight must be a number, not 'heavy'",
        "9:14": "normalize must be true or false, not 'perhaps'",
    }


def test_an_unknown_method_is_told_even_if_the_recipe_cannot_be_read_to_its_end() -> None:
    first, second = problems("dtype: float32\nmerge_method: tise\nmodles: [{model: a}]\n")
    assert str(first).startswith("<text>:2:1: no merge method is called 'tise'")
    assert str(second).startswith("<text>:3:1: unknown key 'modles'")


def test_a_pattern_without_matches_hides_no_mistake_that_does_not_depend_on_it(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    text = f"""merge_method: ties
models:
  - {{model: {tmp_path}/step-*, parameters: {{weight: {{lawa: 3}}}}}}
  - {{model: {a}, parameters: {{densty: 0.5}}}}
  - {{model: {tmp_path}/c}}
parameters: {{density: 2}}
"""
    messages = [str(problem).split("\n")[0].replace(str(tmp_path), "") for problem in problems(text)]
    assert messages == [
        "<text>:3:13: no folder matches /step-*",
        f"<text>:4:{len(a) + 28}: merge_method ties has no parameter 'densty' (did you mean 'density'?); mergekit ignores it",
        "<text>:5:13: /c: no such folder or file",
        "<text>:6:23: density must be at most 1, not 2",
    ]


def test_the_parameters_of_code_that_is_not_run_are_not_judged(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    (tmp_path / "mine.py").write_text("raise SystemExit\n")
    recipe = tmp_path / "r.yml"
    models = f"[{{model: {a}, parameters: {{swirl: 3}}}}, {{model: {tmp_path}/c}}]"
    recipe.write_text(f"merge_method: ./mine.py:twirl\nmodels: {models}\n")
    code, missing = problems(str(recipe))
    assert "--allow-code" in str(code)
    assert "no such folder" in str(missing)


def test_models_that_are_in_the_folder_of_the_recipe_are_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "merges" / "a").mkdir(parents=True)
    recipe = "merge_method: passthrough\nmodels: [{model: ./a}]\n"
    (tmp_path / "merges" / "r.yml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    (problem,) = problems("merges/r.yml")
    assert problem.finding.fix == (
        "Run weightsmith in merges: relative paths start in the current folder, not in that of the recipe."
    )


def test_a_missing_base_does_not_hide_what_is_wrong_with_the_rest(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    models = [{"model": a, "parameters": {"weight": "x"}}]
    errors = problems({"merge_method": "ties", "base_model": str(tmp_path / "no"), "models": models})
    assert [str(f).split("\n")[0] for f in errors] == [
        "models[0].parameters.weight: weight must be a number, not 'x'",
        f"base_model: {tmp_path}/no: no such folder or file",
    ]


def test_files_are_closed_when_a_recipe_is_refused(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    before = len(list(Path("/proc/self/fd").iterdir()))
    problems({"merge_method": "linear", "models": [{"model": a}]})
    assert len(list(Path("/proc/self/fd").iterdir())) == before
