"""A recipe whose models are opened once: others of these models get the same plans as when each is planned anew."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests import plan_help
from tests.plan_help import prepare
from weightsmith._base.errors import PlanError
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import Bound, bind
from weightsmith._plans import Plan


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("abc"):
        plan_help.model(Path(name), 4, seed=seed)
    Path("a/generation_config.json").write_text('{"alignment_heads": [[1, 0], [2, 5], [3, 2]]}')


TIES = {
    "merge_method": "ties",
    "base_model": "a",
    "models": [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in "bc"],
}
SLERP = {"merge_method": "slerp", "base_model": "a", "models": [{"model": "b"}], "parameters": {"t": 0.5}}
CUTS = [{"sources": [{"model": "a", "layer_range": cut}]} for cut in ([0, 3], [1, 4])]
STAGES = [
    {"name": "one", **SLERP},
    {"merge_method": "linear", "models": [{"model": "one"}, {"model": "c"}], "parameters": {"weight": 1}},
]

CASES: dict[str, tuple[Any, tuple[dict[str, Any], ...]]] = {
    "a parameter of one model": (TIES, ({"models[0].parameters.weight": 0.25}, {"models[1].parameters.density": 1})),
    "weight 0: the model is not read": (TIES, ({"models[0].parameters.weight": 0}, {"models[0].parameters.weight": 1})),
    "a product": (TIES, ({"parameters.scope": "model"}, {"parameters.scope": "tensor"})),
    "a schedule": (SLERP, ({"parameters.t": [0, 0.5, 1]}, {"parameters.t": 0.3})),
    "the method": (TIES, ({"merge_method": "dare_ties"}, {"merge_method": "breadcrumbs_ties"})),
    "dtype": (TIES, ({"dtype": "float16"}, {"dtype": "bfloat16"})),
    "layers": ({"merge_method": "passthrough", "slices": CUTS}, ({"slices[0].sources[0].layer_range": [0, 2]},)),
    "a recipe that reads another's result": (STAGES, ({"parameters.weight": 2}, {"parameters.weight": 1})),
}


def changed(recipe: Any, values: dict[str, Any]) -> Any:
    """The recipe with values in place of others; of several recipes, the last."""
    recipe = copy.deepcopy(recipe)
    for path, value in values.items():
        *keys, last = [int(key) if key.isdecimal() else key for key in re.findall(r"\w+", path)]
        place = recipe[-1] if isinstance(recipe, list) else recipe
        for key in keys:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
        place[last] = value
    return recipe


def planned(bound: Bound, recipe: Any, values: dict[str, Any]) -> Plan:
    prepared = bound.replan(changed(recipe, values))
    assert prepared is not None
    return prepared.plan


def anew(recipe: Any, values: dict[str, Any]) -> Plan:
    with prepare(changed(recipe, values), RecipeOptions(seed=3)) as prepared:
        return prepared.plan


@pytest.mark.parametrize("name", CASES)
def test_a_bound_recipe_gives_the_same_plans_as_planning_anew(models: None, name: str) -> None:
    recipe, searched = CASES[name]
    with bind(recipe, RecipeOptions(seed=3)) as bound:
        plans = [planned(bound, recipe, values) for values in ({}, *searched, {})]
    for plan, values in zip(plans, ({}, *searched, {}), strict=True):
        expected = anew(recipe, values)
        assert plan.to_json() == expected.to_json()
        assert plan == expected
    assert plans[0] == plans[-1]
    assert plans[0] != plans[1]


def test_what_differs_between_the_models_is_looked_for_once(models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._planning.planner import merges

    looked: list[object] = []
    real = merges.disagreements
    monkeypatch.setattr(merges, "disagreements", lambda *args, **options: looked.append(args) or real(*args, **options))
    with bind(TIES) as bound:
        for weight in (0.1, 0.2, 0.3):
            planned(bound, TIES, {"models[0].parameters.weight": weight})
    assert len(looked) == 1


def test_the_models_are_opened_once(models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._planning.planner import inputs

    opened: list[str] = []
    real = inputs.open_checkpoint
    monkeypatch.setattr(inputs, "open_checkpoint", lambda path, **options: opened.append(path) or real(path, **options))
    with bind(TIES) as bound:
        for weight in (0.1, 0.2, 0.3):
            planned(bound, TIES, {"models[0].parameters.weight": weight})
    assert opened == ["a", "b", "c"]


def test_a_plan_of_a_bound_recipe_runs(models: None, tmp_path: Path) -> None:
    values = {"parameters.t": 0.25}
    with bind(SLERP) as bound:
        plan = planned(bound, SLERP, values)
    weightsmith.run(plan, tmp_path / "one", progress=False)
    weightsmith.merge(SLERP, tmp_path / "two", progress=False, settings=values)
    names = [path.name for path in (tmp_path / "one").glob("*.safetensors")]
    assert names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_values_cannot_change_what_is_bound(models: None) -> None:
    with bind(TIES) as bound:
        for values in ({"models[0].model": "c"}, {"base_model": "b"}, {"tokenizer_source": "union"}):
            assert bound.replan(changed(TIES, values)) is None
        with pytest.raises(PlanError, match="density"):
            planned(bound, TIES, {"models[0].parameters.density": 2})
        assert planned(bound, TIES, {}).provenance.name == "ties"


def test_problems_of_the_recipe_and_its_models_are_found_at_once(models: None) -> None:
    with pytest.raises(PlanError, match="nowhere"):
        bind({**TIES, "base_model": "nowhere"}).close()
    with pytest.raises(PlanError, match="merge_method"):
        bind({**TIES, "merge_method": "tiez"}).close()
