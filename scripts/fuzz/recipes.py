"""Recipes of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import Kind, Rng
from scripts.fuzz.models import make_models
from scripts.fuzz.mutators import mutate_json, mutate_recipe


def _use_recipe(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._features.any_recipe import prepare_any
    from weightsmith._features.quantisation.options import QuantizeSettings
    from weightsmith._planning.options import RecipeOptions
    from weightsmith._planning.recipe import read_template

    lenient = rng.random() < 0.5
    yield lambda: prepare_any(file, RecipeOptions(lenient=lenient), QuantizeSettings()).close()

    def fill() -> None:
        template = read_template(file, lenient=lenient)
        prepare_any(template.fill(template.start), RecipeOptions(lenient=lenient), QuantizeSettings()).close()

    yield fill


def _make_recipes() -> None:
    make_models()
    for name, text in _RECIPES.items():
        Path(name).write_text(text)
    Path("saliency.json").write_text(json.dumps({str(i): [0.1, 0.4, 0.2, 0.3] for i in range(3)}))


_RECIPES = {
    "linear.yml": "merge_method: linear\nmodels:\n  - &m\n    model: a\n    parameters:\n      weight: [0.2, 0.5, 1]\n"
    "  - <<: *m\n    model: b\ndtype: bfloat16\n",
    "ties.yml": "merge_method: ties\nbase_model: a\nmodels:\n  - model: b\n    parameters:\n      density: 0.5\n      weight:\n"
    "        - filter: mlp\n          value: 0.3\n        - value: 1\nparameters:\n  normalize: true\nout_dtype: bfloat16\n",
    "stack.yml": "merge_method: passthrough\nslices:\n  - sources:\n      - model: a\n        layer_range: [0, 2]\n"
    "  - sources:\n      - model: a+lora\n        layer_range: [1, 3]\n        parameters:\n          scale: 0.5\n",
    "moe.yml": "base_model: a\ngate_mode: random\nexperts:\n  - source_model: a\n    noise_scale: 0.01\n  - source_model: b\n"
    "shared_experts:\n  - source_model: b\n    residual_scale: 0.1\nexperts_per_token: 1\n",
    "stages.yml": "name: one\nmerge_method: linear\nmodels:\n  - model: a\nparameters: {weight: 0.5}\n---\n"
    "merge_method: ties\nbase_model: a\nmodels:\n  - model: one\n  - model:\n      merge_method: slerp\n      base_model: one\n"
    "      models:\n        - model: b\n      parameters: {t: 0.5}\nparameters: {weight: 1}\n",
    "tune.yml": "merge_method: {choice: [ties, dare_ties]}\nbase_model: a\nx-w: &w {tune: [0, 1]}\nmodels:\n  - model: b\n"
    "    parameters:\n      density: [{tune: [0.1, 1]}, 0.5]\n      weight: *w\nparameters:\n  lambda:\n    tune: [0, 2]\n",
    "prune.yml": "model: x\nprune_experts:\n  saliency: saliency.json\n  experts: 2\n",
    "groups.yml": "model: x\nmerge_experts:\n  groups: [[0, 1], [2, 3]]\n  weights: [[1, 2], [1, 1]]\n",
}


KINDS = {
    "recipe": Kind(_make_recipes, tuple(_RECIPES), mutate_recipe, _use_recipe),
    "saliency": Kind(_make_recipes, ("saliency.json",), mutate_json, lambda file, rng: _use_recipe("prune.yml", rng)),
}
