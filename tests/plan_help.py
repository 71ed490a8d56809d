"""Tiny decoder checkpoints without transformers, and short ways to plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.mini import write_checkpoint
from weightsmith._base.errors import PlanError, WeightsmithError
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import assemble
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._planning.recipe import Source
from weightsmith._plans import Plan

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYER = {
    "input_layernorm.weight": (4,),
    "mlp.down_proj.weight": (4, 6),
    "mlp.up_proj.weight": (6, 4),
    "self_attn.q_proj.weight": (4, 4),
}


def decoder(
    layers: int = 2,
    *,
    seed: int = 0,
    vocab: int = 8,
    head: bool = True,
    prefix: str = "model.",
    dtype: Any = BF16,
    extra: Mapping[str, tuple[int, ...]] | None = None,
    without: Iterable[str] = (),
) -> dict[str, np.ndarray]:
    """Tensors of a Llama-like model.

    head     it stores lm_head.weight
    prefix   in front of `layers.0...`
    more     further tensors and their shapes
    without  names to leave out
    """
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (vocab, 4)}
    for i in range(layers):
        shapes |= {f"{prefix}layers.{i}.{name}": shape for name, shape in LAYER.items()}
    shapes[f"{prefix}norm.weight"] = (4,)
    if head:
        shapes["lm_head.weight"] = (vocab, 4)
    shapes |= extra or {}
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items() if name not in set(without)}


def config(layers: int = 2, **keys: Any) -> dict[str, Any]:
    """Its config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "vocab_size": 8,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **keys,
    }


def model(folder: Path, layers: int = 2, *, settings: Mapping[str, Any] | None = None, **arguments: Any) -> str:
    """Write such a model; its path. settings: changes to config.json."""
    write_checkpoint(folder, decoder(layers, **arguments), config(layers, **settings or {}))
    return str(folder)


def prepare(
    source: Source,
    options: RecipeOptions = RecipeOptions(),  # noqa: B008  frozen
    *,
    check: bool = False,
) -> Prepared:
    """The plan of a recipe of models, with its open models. check: see `Prepared.finish`."""
    return assemble(source, options).finish(check=check)


def plan(recipe: str | Mapping[str, Any], **options: Any) -> Plan:
    """The plan of a recipe."""
    with prepare(recipe, RecipeOptions(**options), check=True) as prepared:
        check_account(prepared.plan, [set(c.specs) for c in prepared.inputs])
        return prepared.plan


def check_account(p: Plan, inputs: list[set[str]]) -> None:
    """Every input tensor is used or dropped, and not both; every output tensor is named once."""
    used: list[set[str]] = [set() for _ in inputs]
    for step in p.steps:
        for source in step.inputs:
            used[source.model].add(source.tensor)
    for m, names in enumerate(inputs):
        dropped = [d.tensor for d in p.dropped if d.model == m]
        assert len(set(dropped)) == len(dropped)
        assert not used[m] & set(dropped)
        assert used[m] | set(dropped) == names
    assert all(d.reason for d in p.dropped)
    outputs = [s.out.name for s in p.steps]
    assert len(set(outputs)) == len(outputs)


def problems(recipe: str | Mapping[str, Any], **options: Any) -> tuple[WeightsmithError, ...]:
    """The problems of a recipe that must be refused."""
    with pytest.raises(PlanError) as caught:
        prepare(recipe, RecipeOptions(**options), check=True).close()
    return caught.value.problems


def only(recipe: str | Mapping[str, Any], **options: Any) -> WeightsmithError:
    """The single problem of a recipe."""
    errors = problems(recipe, **options)
    assert len(errors) == 1, "\n".join(map(str, errors))
    return errors[0]


def sources(p: Plan) -> dict[str, list[tuple[int, str]]]:
    """Output name → (model, tensor) of its inputs."""
    return {s.out.name: [(i.model, i.tensor) for i in s.inputs] for s in p.steps}


def warnings(p: Plan) -> list[str]:
    """The plan's warnings as text."""
    return [str(w) for w in p.warnings]


def prepare_moe(source: Source, options: RecipeOptions = RecipeOptions()) -> Prepared:  # noqa: B008  frozen
    """The plan of a mixture."""
    return prepare_any(source, options, QuantizeSettings(), command="moe")
