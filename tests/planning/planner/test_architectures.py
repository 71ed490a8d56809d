"""Stacks of every model type of transformers: right, as transformers loads it, or refused. Nothing in between."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import architectures
from tests.plan_help import prepare
from weightsmith._base.errors import LayerError, PlanError, ShapeError
from weightsmith._models.structure import Stack
from weightsmith._planning.options import RecipeOptions

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from weightsmith._planning.planner.transformers_script import compare  # noqa: E402  torch first

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of default configs is not our concern
UNASKED = RecipeOptions(check_loading=False)

ONLY_ASKED = {
    "neomme": "its config class wants a full_attention layer among the others",
    "olmo_hybrid": "its config class wants a full_attention layer among the others",
}
"""Model types whose config class refuses what no key of config.json tells: found only by asking transformers."""


SAMPLE = frozenset("bert gpt2 gpt_oss jamba llama mixtral qwen2_vl qwen3_next t5 vit".split())
"""Model types that every run looks at: one of each kind of structure. The others are looked at in a sweep."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


def choices(n: int) -> dict[str, list[tuple[int, int]]]:
    """Slices of one model: the last layer left out, the first, some twice, all twice, reversed."""
    if n < 2:
        return {"twice": [(0, n), (0, n)]}
    return {
        "without the last": [(0, n - 1)],
        "without the first": [(1, n)],
        "middle twice": [(0, 2), (1, n)],
        "all twice": [(0, n), (0, n)],
        "reversed": [(i, i + 1) for i in reversed(range(n))],
    }


def recipe_for(folder: str, stack: Stack, cuts: list[tuple[int, int]], *, modules: bool) -> dict[str, Any]:
    slices = [{"sources": [{"model": folder, "layer_range": list(cut)}]} for cut in cuts]
    return {
        "merge_method": "passthrough",
        **({"modules": {stack.module: {"slices": slices}}} if modules else {"slices": slices}),
    }


def stacks_of(folder: str, layers: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Recipes that stack every list of layers of a model in several ways, each with a name.

    layers  another model that the layers are taken from, with what surrounds them; the rest is this model's
    """
    with prepare({"merge_method": "passthrough", "models": [{"model": folder}]}) as whole:
        structure = whole.structure
    for stack in structure.stacks:
        if stack.kind != "other":
            for name, cuts in choices(stack.n_layers).items():
                recipe = recipe_for(layers or folder, stack, cuts, modules=len(structure.modules) > 1)
                yield f"{stack.prefix} {name}", {**recipe, **({"base_model": folder} if layers else {})}


def tensors(specs: architectures.Specs) -> list[tuple[str, str, list[int]]]:
    return [(name, dtype, list(shape)) for name, (dtype, shape) in specs.items()]


Made = tuple[dict[str, Any], architectures.Specs]


def buildable(model_type: str) -> Iterator[tuple[type, Any, Made]]:
    """The model classes of a type that build small, and load what they would save: class, config, config.json and tensors."""
    for model_class in architectures.classes_of(model_type):
        for config in architectures.small_configs(model_type):
            built = architectures.build(config, model_class)
            if built is not None and loads(*built):
                yield model_class, config, built
                break


def loads(config: dict[str, Any], specs: architectures.Specs) -> bool:
    return compare(config, tensors(specs)) == {"differences": []}


def recipes(folder: Path, model_class: type, config: Any, built: Made) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stacks of one model, also as older versions saved it, and of its layers with those of a model of another size."""
    path = architectures.write(folder / "a", *built)
    yield from stacks_of(path)
    said = architectures.with_derived_counts(config, built[0])
    if said != built[0] and loads(said, built[1]):
        older = architectures.write(folder / "older", said, built[1])
        yield from (
            (f"older {name}", recipe) for name, recipe in stacks_of(older) if name.endswith(("without the first", "twice"))
        )
    longer = architectures.with_more_positions(config)
    other = None if longer is None else architectures.build(longer, model_class)
    if other is not None and other[1] != built[1] and loads(*other):
        layers = architectures.write(folder / "longer", *other)
        yield from ((f"longer {name}", r) for name, r in stacks_of(path, layers) if name.endswith("all twice"))


def sweep(model_type: str, folder: Path) -> tuple[list[str], int, int]:
    """Stacks that are wrong; how many are right, and how many are refused."""
    wrong, right, refused = [], 0, 0
    for model_class, config, built in buildable(model_type):
        for name, recipe in recipes(folder / model_class.__name__, model_class, config, built):
            try:
                with prepare(recipe, UNASKED) as prepared:
                    plan = prepared.plan
            except PlanError as error:
                refused += 1
                wrong += [f"{name}: {p}" for p in error.problems if not isinstance(p, LayerError | ShapeError)]
                continue
            assert plan.config is not None
            comparison = compare(plan.config, [(s.out.name, s.out.dtype.torch, list(s.out.shape)) for s in plan.steps])
            if comparison != {"differences": []}:
                wrong.append(f"{model_class.__name__} {name}: {str(comparison)[:300]}")
            elif changed := changed_constants(model_class, built[0], plan.config, recipe):
                wrong.append(f"{model_class.__name__} {name}: other constants: {changed}")
            else:
                right += 1
    return wrong, right, refused


PLACES = re.compile(
    r"(^|\.)(layer_(idx|id|index|num|number)|seed|cache_key|(mlp|attn)_residual_add_idx|attention_layers|attn_layers|"
    r"store_full_length_kv|num_hidden_layers)$|drop"
)
"""Attributes of a layer that tell where it is, or that only training reads."""


def changed_constants(model_class: Any, before: dict[str, Any], after: dict[str, Any], recipe: dict[str, Any]) -> set[str]:
    """Constants that transformers computes for a layer, and that are others in its new place."""
    slices = recipe.get("slices") or next(iter(recipe["modules"].values()))["slices"]
    source = [i for cut in slices for i in range(*cut["sources"][0]["layer_range"])]
    old, new = (architectures.layers_of(model_class, config) for config in (before, after))
    cut = [name for name in old if len(old[name]) > max(source) and len(new.get(name, ())) == len(source)]
    moved = [name for name in cut if len(old[name]) != len(source)] or cut
    if len(moved) != 1:  # other lists have as many
        return set()
    pairs = [(constants(old[moved[0]][i]), constants(layer)) for i, layer in zip(source, new[moved[0]], strict=True)]
    return {
        f"{key}: {a.get(key)} {b.get(key)}" for a, b in pairs for key in a.keys() | b.keys() if differs(a.get(key), b.get(key))
    }


def differs(a: object, b: object) -> bool:
    return a != pytest.approx(b) if isinstance(a, float) and isinstance(b, float) else a != b


def constants(layer: Any) -> dict[str, object]:
    """What the modules of a layer hold besides tensors, by name."""
    held: dict[str, object] = {}
    for path, module in layer.named_modules():
        for key, value in vars(module).items():
            name = f"{path}.{key}".lstrip(".")
            if not key.startswith("_") and isinstance(value, int | float | str | None) and not PLACES.search(name):
                held[name] = value
    return held


@pytest.mark.matrix("llama", "mixtral", "gpt2", "jamba", "t5")
@pytest.mark.long
@pytest.mark.timeout(1800)  # seconds for most; minutes for those with thousands of experts that do not get smaller
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.sweep)
        for name in architectures.model_types()
        if name not in ONLY_ASKED
    ],
)
def test_a_stack_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    """Without asking transformers: what config.json and the tensors tell is enough."""
    wrong, right, refused = sweep(model_type, tmp_path)
    assert wrong == []
    if right + refused == 0:
        pytest.skip("no model class builds from a small config, or none has layers")


def test_the_sample_is_of_model_types() -> None:
    assert set(architectures.model_types()) >= SAMPLE


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.loading
@pytest.mark.parametrize("model_type", sorted(ONLY_ASKED))
def test_what_only_transformers_knows_is_refused_where_it_is_installed(model_type: str, tmp_path: Path) -> None:
    wrong, _, _ = sweep(model_type, tmp_path)
    assert wrong, "no longer an exception"
    _, _, built = next(iter(buildable(model_type)))
    path = architectures.write(tmp_path / "m", *built)
    name = wrong[0].partition(" ")[2].partition(":")[0]
    recipe = dict(stacks_of(path))[name]
    with pytest.raises(PlanError, match="transformers could not load the output"):
        prepare(recipe, check=True).close()
