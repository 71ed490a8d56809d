"""Configs of mergekit-evolve, as recipes with values to tune.

The genome becomes the recipe: the same groups of layers, filters and parameters, with the same start values. Tasks are texts
here; the keys of its evaluator are refused, with what to write instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import NotFound, ParameterError, PlanError, UnknownKey, WeightsmithError
from weightsmith._base.files import expand_user, read_bounded
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.structure.configs import count_of
from weightsmith._planning.recipe import Source
from weightsmith._planning.recipe.yaml import MAX_BYTES, Node, Pair, from_python, plain, read_yaml

PARAMETERS = {
    "linear": ("weight",),
    "task_arithmetic": ("weight",),
    "ties": ("weight", "density"),
    "dare_ties": ("weight", "density"),
    "slerp": ("t",),
}
"""Parameters that mergekit-evolve tunes, by method."""

_INSTEAD = {
    "limit": "use --rows N",
    "num_fewshot": "put examples into the text",
    "shuffle": "shuffle the lines of the text file",
    "random_init": "use --search random",
    "apply_chat_template": "use a jsonl file with `messages`: its answers are scored in the model's chat template",
    "fewshot_as_multiturn": "use a jsonl file with `messages`",
}
_GENOME = (
    *("models", "merge_method", "base_model", "tokenizer_source", "layer_granularity", "normalize"),
    *("allow_negative_weights", "filters", "smooth"),
)
_TEXTS = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Evolution:
    """A config. recipe: with values to tune; texts: that its tasks name."""

    recipe: Mapping[str, Any]
    texts: tuple[str, ...]


def evolution(source: Source) -> Evolution | None:
    """A config of mergekit-evolve; None for anything else. Raises PlanError with all problems of a config."""
    root = _root(source)
    if root is None or not isinstance(root.value, dict) or "genome" not in root.value:
        return None
    problems: list[WeightsmithError] = []
    texts = _texts(root.value, problems)
    genome = root.value["genome"]
    known = plain(genome.value)
    if not isinstance(known, dict) or not isinstance(known.get("models"), list) or known.get("merge_method") not in PARAMETERS:
        fix = f"write genome: {{merge_method: ties, models: [...]}}; methods: {', '.join(PARAMETERS)}"
        raise PlanError(
            [*problems, ParameterError("the genome needs 'models' and a 'merge_method'", where=genome.where, fix=fix)]
        )
    for name in known:
        if name not in _GENOME:
            problems.append(UnknownKey(f"mergekit-evolve's genome has no key '{name}'", where=genome.where, fix="remove it"))
    if known["merge_method"] == "slerp" and len(known["models"]) != 2:
        fix = "name two models, or use another method"
        problems.append(ParameterError("a genome of slerp takes two models here", where=genome.where, fix=fix))
    if problems:
        raise PlanError(problems)
    return Evolution(_recipe(known, genome.where), texts)


def _root(source: Source) -> Node | None:
    if isinstance(source, Mapping):
        return from_python(source).root if "genome" in source else None
    if isinstance(source, str) and "\n" in source:
        return read_yaml(source, "<text>")[0].root if "genome" in source else None
    if not isinstance(source, str | os.PathLike) or not Path(source).is_file():
        return None
    text = read_bounded(expand_user(source), MAX_BYTES).decode(errors="replace")
    return read_yaml(text, os.fspath(source))[0].root if "genome" in text else None


def _texts(keys: Mapping[str, Pair], problems: list[WeightsmithError]) -> tuple[str, ...]:
    for name, pair in keys.items():
        if name in _INSTEAD:
            what = f"'{name}' is of mergekit-evolve's evaluator"
            problems.append(UnknownKey(what, where=pair.where, fix=f"remove it, and {_INSTEAD[name]}"))
        elif name not in ("genome", "tasks"):
            problems.append(UnknownKey(f"mergekit-evolve has no key '{name}'", where=pair.where, fix="remove it"))
    tasks = keys["tasks"].value.value if "tasks" in keys else ()
    texts = []
    for task in tasks if isinstance(tasks, tuple) else ():
        entry = plain(task)
        entry = entry if isinstance(entry, dict) else {"name": entry}
        text = entry.get("name")
        if not isinstance(text, str) or Path(text).suffix not in _TEXTS:
            fix = f"name a text that ends in {', '.join(_TEXTS)}; a benchmark's own text may be one"
            problems.append(NotFound(f"the task {text!r} is no text", where=task.where, fix=fix))
            continue
        if entry.get("weight", 1) != 1 or "metric" in entry:
            fix = "remove 'weight' and 'metric': --objective mean counts all texts the same, worst counts the worst one"
            problems.append(UnknownKey("texts have no weights and metrics", where=task.where, fix=fix))
        texts.append(text)
    return tuple(texts)


def _recipe(genome: Mapping[str, Any], where: str) -> dict[str, Any]:
    models, method = [str(model) for model in genome["models"]], genome["merge_method"]
    size, layers = int(genome.get("layer_granularity") or 0), _layers(models[0], where)
    if size > 0 and layers % size:
        fix = "write a divisor of the number of layers"
        raise PlanError([ParameterError(f"layer_granularity {size} does not divide {layers} layers", where=where, fix=fix)])
    step = size if size > 0 else layers
    ranges = [[first, first + step] for first in range(0, layers, step)]
    base = genome.get("base_model")
    recipe: dict[str, Any] = {"merge_method": method, "dtype": "bfloat16"}
    if base is not None and method != "slerp":
        recipe["base_model"] = base
    if genome.get("tokenizer_source"):
        recipe["tokenizer_source"] = genome["tokenizer_source"]
    if method == "slerp":
        slices = [
            {"sources": [{"model": m, "layer_range": [*run]} for m in models], "parameters": {"t": _ranged("t")}}
            for run in ranges
        ]
        return {**recipe, "base_model": models[0], "slices": slices}
    default = method in ("ties", "dare_ties", "linear")
    recipe["parameters"] = {"normalize": default if genome.get("normalize") is None else genome["normalize"]}
    negative, filters = bool(genome.get("allow_negative_weights")), [*(genome.get("filters") or []), None]

    def values(n: int) -> dict[str, Any]:
        """Parameters of one model: for each parameter and filter one number, or n numbers over the layers."""
        parameters: dict[str, Any] = {}
        for name in PARAMETERS[method]:
            one = _ranged(name, len(models), negative=negative)
            value: Any = one if n == 1 else [dict(one) for _ in range(n)]
            parameters[name] = value if len(filters) == 1 else [{"filter": f or "*", "value": value} for f in filters]
        return parameters

    if genome.get("smooth") or len(ranges) == 1:
        return {**recipe, "models": [{"model": model, "parameters": values(len(ranges))} for model in models]}
    also = [] if base is None or base in models else [base]

    def source(model: str, run: list[int]) -> dict[str, Any]:
        return {"model": model, "layer_range": [*run]} | ({"parameters": values(1)} if model in models else {})

    return {**recipe, "slices": [{"sources": [source(model, run) for model in (*models, *also)]} for run in ranges]}


def _ranged(name: str, models: int = 1, *, negative: bool = False) -> dict[str, Any]:
    """A value to tune, from mergekit-evolve's start value."""
    if name == "weight":
        return {"tune": [-1.0 if negative else 0.0, 1.5], "start": 1 / models}
    return {"tune": [0.0, 1.0], "start": 1.0 if name == "density" else 0.5}


def _layers(model: str, where: str) -> int:
    checkpoint = open_checkpoint(model)
    try:
        count = count_of(checkpoint.config or {}, "num_hidden_layers")
    finally:
        checkpoint.close()
    if not count:
        what = "the config.json of the first model does not say how many layers it has"
        raise PlanError([NotFound(what, where=where, fix="name a decoder")])
    return count
