"""A model of weight 0 is as good as not listed: in every method, for every kind of tensor, byte for byte."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests import plan_help
from tests.cases import CASES, FIRST, swept
from tests.cases.case import Case, fine_tunes
from tests.kernels import reference
from tests.mini import write_checkpoint
from tests.plan_help import plan, prepare
from weightsmith import _methods as methods
from weightsmith._execution.state_dicts import merge_state_dicts
from weightsmith._methods.jobs.task_vectors import random_key
from weightsmith._methods.method import Method

SHAPES = {
    "model.embed_tokens.weight": (50, 20),
    "model.layers.0.mlp.up_proj.weight": (40, 20),
    "model.layers.0.mlp.down_proj.weight": (20, 40),
    "model.layers.0.mlp.gate.weight": (6, 20),
    "model.norm.weight": (20,),
}
Model = dict[str, np.ndarray]


def random_models(count: int, dtype: Any = ml_dtypes.bfloat16) -> list[Model]:
    """A base and `count` fine-tunes."""
    arrays = [fine_tunes(shape, count, dtype, seed=i) for i, shape in enumerate(SHAPES.values())]
    return [dict(zip(SHAPES, tensors, strict=True)) for tensors in zip(*arrays, strict=True)]


def float32(count: int) -> list[Model]:
    """The same, and no two deltas of one magnitude."""
    return [{k: v.astype(np.float32) for k, v in model.items()} for model in random_models(count, np.float64)]


def weighted(method: Method) -> bool:
    """It has weights, and merges in memory, where there is no text."""
    return not method.requires({}) and any(p.name == "weight" and p.scope == "model" for p in method.parameters)


def merge(case: Case, models: list[Model], per_model: list[Any], **options: Any) -> Model:
    """In memory. per_model: the parameters of each model but the base."""
    ignored = {p.name for p in methods.get(case.method).parameters if p.ignored}
    shared = {k: v for k, v in {**case.shared, **options}.items() if v is not None and k not in ignored}
    shared = {"lambda_" if name == "lambda" else name: value for name, value in shared.items()}
    by_name = {name: [m[name] for m in per_model] for name in per_model[0]}
    base = models[0] if case.base else None
    return merge_state_dicts(case.method, models[1:] if case.base else models, base=base, **by_name, **shared)


def same(a: Model, b: Model) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


WITH_WEIGHTS = [name for name, case in CASES.items() if weighted(methods.get(case.method)) and case.method != "nuslerp"]


LISTED_FIRST = [FIRST[method] for method in ("linear", "ties", "tsv_m")]


def test_every_method_with_weights_is_among_the_cases() -> None:
    assert {CASES[name].method for name in WITH_WEIGHTS} == {
        name for name in methods.NAMES if weighted(methods.get(name)) and methods.get(name).max_models is None
    }


def placed(first: bool, sample: Collection[str]) -> list[Any]:
    """Cases with the model of weight 0 before the others, or after them."""
    where = "first" if first else "last"
    return [
        pytest.param(*case.values, first, marks=case.marks, id=f"{case.values[0]}-{where}")
        for case in swept(WITH_WEIGHTS, sample)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), [*placed(False, FIRST.values()), *placed(True, LISTED_FIRST)])
def test_a_model_of_weight_nought_changes_nothing(name: str, first: bool) -> None:
    case = CASES[name]
    if first and case.method.startswith(("dare", "della")):
        pytest.skip("masks are keyed by the place in the recipe")
    per_model = [dict(m) for m in (case.models[1:] if case.base else case.models)]
    models = random_models(len(per_model) - (not case.base))
    stranger = {k: np.random.default_rng(9).normal(0, 1, v.shape).astype(v.dtype) for k, v in models[0].items()}
    at = int(case.base) if first else len(models)
    with_stranger = [*models[:at], stranger, *models[at:]]
    own_with = [*per_model[: at - case.base], {**per_model[0], "weight": 0.0}, *per_model[at - case.base :]]
    same(merge(case, with_stranger, own_with), merge(case, models, per_model))


@pytest.mark.parametrize("name", swept(n for n in WITH_WEIGHTS if CASES[n].base))
def test_where_all_weights_are_nought_the_base_is_left(name: str) -> None:
    case, models = CASES[name], random_models(2)
    per_model = [{**case.models[1], "weight": 0.0}, {**case.models[1], "weight": 0.0}]
    normalised = {"task_arithmetic": "normalize", "multislerp": "normalize_weights"}.get(case.method)
    options = {normalised: False} if normalised else {}  # weights that sum to zero cannot be
    same(merge(case, models, per_model, **options), models[0])


@pytest.mark.parametrize("step", [{"norm_match": "mean"}, {"norm_match": "max"}, {"spectrum": "calibrate"}], ids=str)
def test_the_steps_after_a_merge_do_not_see_it_either(step: dict[str, str]) -> None:
    case = CASES["ties"]
    models, per_model = random_models(2), [dict(m) for m in case.models[1:]]
    stranger = {k: (v.astype(np.float64) + 1).astype(v.dtype) for k, v in models[0].items()}
    extra = [*per_model, {**per_model[0], "weight": 0.0}]
    same(merge(case, [*models, stranger], extra, **step), merge(case, models, per_model, **step))


def test_two_models_of_which_one_has_no_weight_are_the_other() -> None:
    """nuslerp takes two models, no more and no fewer."""
    base, a, b = random_models(2)
    for model, weights in ((a, [0.7, 0.0]), (b, [0.0, 0.7])):
        same(merge_state_dicts("nuslerp", [a, b], weight=weights), model)
        same(merge_state_dicts("nuslerp", [a, b], base=base, weight=weights), model)


def test_the_masks_of_the_others_stay_when_a_weight_becomes_nought() -> None:
    base = {"w": np.zeros((30, 40), ml_dtypes.bfloat16)}
    model = {"w": np.ones((30, 40), np.float32)}
    got = merge_state_dicts("dare_linear", [model, model], base=base, weight=[0.0, 1.0], density=0.4, rescale="none")
    expected = reference.random_mask(random_key(0, 1, "w"), 1200, 0.4).reshape(30, 40)
    np.testing.assert_array_equal(got["w"], expected)


# ---- recipes


def checkpoints(folder: Path, count: int) -> list[str]:
    return [plan_help.model(folder / f"m{i}", 3, seed=i) for i in range(count)]


def written(recipe: dict[str, Any], out: Path) -> bytes:
    weightsmith.merge(recipe, out, fsync=False, card=False)
    return (out / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ties", "tsv_m", "localize_and_stitch", "dare_ties"])
def test_a_recipe_with_it_gives_the_bytes_of_one_without_it(method: str, tmp_path: Path) -> None:
    base, a, b, c = checkpoints(tmp_path, 4)
    parameters = {"weight": 0.7, "density": 0.4} if method != "tsv_m" else {"weight": 0.7}
    listed = [{"model": m, "parameters": parameters} for m in (a, b)]
    recipe = {"merge_method": method, "base_model": base, "models": listed}
    longer = {**recipe, "models": [*listed, {"model": c, "parameters": {**parameters, "weight": 0}}]}
    p = plan(longer)
    assert {read.model for step in p.steps for leaf in step.leaves for read in leaf.inputs} == {0, 1, 2}
    (note,) = [w for w in p.warnings if "not read" in w.what]
    assert note.what == f"{c} is not read: its weight is 0 for every tensor"
    assert written(longer, tmp_path / "more") == written(recipe, tmp_path / "out")


def test_a_gradient_leaves_a_model_out_of_some_layers_alone(tmp_path: Path) -> None:
    """Layer 0, the embedding, the norm and the head are what the base has: [0, 1] begins with 0."""
    base, a = checkpoints(tmp_path, 2)
    recipe = {
        "merge_method": "tsv_m",
        "base_model": base,
        "models": [{"model": a}],
        "parameters": {"weight": [0, 1], "norm_match": "mean"},
    }
    p = plan(recipe)
    of = {step.out.name: step for step in p.steps}
    assert of["lm_head.weight"].op == of["model.layers.0.mlp.up_proj.weight"].op == "copy"
    assert of["model.layers.1.mlp.up_proj.weight"].op == "tsv_m"
    moved = {m.name: m for m in weightsmith.merge(recipe, tmp_path / "out", fsync=False).distance}
    with weightsmith.open_checkpoint(tmp_path / "out") as out, weightsmith.open_checkpoint(base) as stored:
        for name, step in of.items():
            assert (out.read(name).tobytes() == stored.read(name).tobytes()) == (step.op == "copy"), name
    assert moved["model.layers.0"].delta == 0
    assert moved["model.layers.0"].base > 0  # it is measured like the others


def test_the_base_is_cast_where_all_weights_are_nought(tmp_path: Path) -> None:
    base, a = checkpoints(tmp_path, 2)
    recipe = {"merge_method": "ties", "base_model": base, "models": [{"model": a}], "parameters": {"weight": 0}}
    weightsmith.merge(recipe | {"dtype": "float32"}, tmp_path / "out", fsync=False, card=False)
    with weightsmith.open_checkpoint(tmp_path / "out") as out, weightsmith.open_checkpoint(base) as stored:
        for name in stored.specs:
            np.testing.assert_array_equal(out.read(name), stored.read(name).astype(np.float32))


def test_explain_shows_the_weight_and_reads_nothing_of_the_model(tmp_path: Path) -> None:
    base, a, b = checkpoints(tmp_path, 3)
    listed = [{"model": a, "parameters": {"weight": 0}}, {"model": b, "parameters": {"weight": 1}}]
    with prepare({"merge_method": "ties", "base_model": base, "models": listed}) as prepared:
        weights = {o.model: o.value for o in prepared.explain("model.norm.weight") if o.parameter == "weight"}
        (step,) = [s for s in prepared.plan.steps if s.out.name == "model.norm.weight"]
    assert weights == {1: 0.0, 2: 1.0}
    assert [read.model for read in step.inputs] == [0, 2]


def test_the_share_of_a_whole_model_is_that_of_the_tensors_it_takes_part_in(tmp_path: Path) -> None:
    base, a = float32(1)
    name = "model.layers.0.mlp.up_proj.weight"
    large = {**a, "model.norm.weight": np.ones(20, np.float32)}
    folders = [write_checkpoint(tmp_path / label, tensors) for label, tensors in (("base", base), ("a", large))]
    weight = [{"filter": name, "value": 1}, {"value": 0}]
    listed = [{"model": str(folders[1]), "parameters": {"weight": weight, "density": 0.25}}]
    recipe = {"merge_method": "localize_and_stitch", "base_model": str(folders[0]), "models": listed}
    weightsmith.merge(recipe, tmp_path / "out", fsync=False, card=False)
    with weightsmith.open_checkpoint(tmp_path / "out") as out:
        moved = {k: int((out.read(k) != base[k]).sum()) for k in base}
    assert moved.pop(name) == 0.25 * 800
    assert not any(moved.values())


# ---- roles that a method leaves to the base


@pytest.mark.parametrize("embeddings", [False, True])
def test_localize_and_stitch_leaves_embeddings_and_heads_to_the_base(embeddings: bool, tmp_path: Path) -> None:
    """As its authors do; they take no part in the ranking either."""
    base, a = float32(1)
    embedding = base["model.embed_tokens.weight"]
    a["model.embed_tokens.weight"] = embedding + np.linspace(1, 2, embedding.size, dtype=np.float32).reshape(embedding.shape)
    others = sum(v.size for k, v in a.items() if "embed" not in k)
    folders = [write_checkpoint(tmp_path / label, tensors) for label, tensors in (("base", base), ("a", a))]
    recipe = {
        "merge_method": "localize_and_stitch",
        "base_model": str(folders[0]),
        "models": [{"model": str(folders[1])}],
        "parameters": {"embeddings": embeddings, "density": 0.25},
    }
    p = plan(recipe)
    reasons = {d.tensor: d.reason for d in p.dropped if d.model == 1}
    expected = {} if embeddings else {"model.embed_tokens.weight": "localize_and_stitch keeps the base's"}
    assert reasons == expected
    weightsmith.merge(recipe, tmp_path / "out", fsync=False, card=False)
    with weightsmith.open_checkpoint(tmp_path / "out") as out:
        made_ = {k: out.read(k) for k in base}
    moved = {k: int((made_[k] != base[k]).sum()) for k in base}
    if embeddings:
        assert moved["model.embed_tokens.weight"] == sum(moved.values()) == int(0.25 * (others + embedding.size))
    else:
        assert moved.pop("model.embed_tokens.weight") == 0
        assert sum(moved.values()) == int(0.25 * others)
    same(merge_state_dicts("localize_and_stitch", [a], base=base, embeddings=embeddings, density=0.25), made_)
