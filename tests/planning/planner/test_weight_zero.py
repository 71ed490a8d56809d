"""A model of weight 0 is as good as not listed, also where its tensor is missing, has another shape, or is not merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import weightsmith
from tests import plan_help
from tests.mini import write_checkpoint
from tests.plan_help import BF16, config, decoder, plan, problems, sources
from weightsmith import _methods as methods
from weightsmith._base.errors import MismatchError, ShapeError
from weightsmith._methods.method import Method

IN_LAYERS = [{"filter": "layers.", "value": 0.5}, {"value": 0}]
ELSEWHERE = [{"filter": "layers.", "value": 0}, {"value": 0.5}]


def has_weights(method: Method) -> bool:
    """It takes a weight for each model and any number of models, and needs nothing else."""
    required = {p.name for p in method.parameters if p.required} - {"weight"}
    defaults = {p.name: p.default for p in method.parameters if p.scope == "tensor"}
    weighted = any(p.name == "weight" and p.scope == "model" for p in method.parameters)
    return weighted and not required and not method.requires(defaults) and method.max_models is None


WEIGHTED = sorted(method.name for method in methods.all_methods() if has_weights(method))


def entry(model: str, weight: Any = 1.0, **keys: Any) -> dict[str, Any]:
    return {"model": model, "parameters": {"weight": weight, **keys}}


def linear(*models: dict[str, Any]) -> dict[str, Any]:
    return {"merge_method": "linear", "models": list(models), "parameters": {"normalize": False}}


def test_a_donor_of_layers_may_have_another_vocabulary(tmp_path: Path) -> None:
    a, b = plan_help.model(tmp_path / "a"), plan_help.model(tmp_path / "b", vocab=10, seed=1, settings={"vocab_size": 10})
    for order in (0, 1):
        entries = [entry(a, [{"filter": "layers.", "value": 0.5}, {"value": 1}]), entry(b, IN_LAYERS)]
        p = plan(linear(*entries[:: -1 if order else 1]))
        origins, shapes = sources(p), {step.out.name: step.out.shape for step in p.steps}
        for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
            assert origins[name] == [(order, name)]
        assert len(origins["model.layers.0.mlp.up_proj.weight"]) == 2
        assert shapes["lm_head.weight"] == (8, 4)
        assert p.config is not None
        assert p.config["vocab_size"] == 8
    (wrong,) = (e for e in problems(linear(entry(a), entry(b, ELSEWHERE))) if "embed" in e.finding.where)
    assert isinstance(wrong, ShapeError)


def test_a_donor_of_weight_0_may_not_have_tokens_without_rows(tmp_path: Path) -> None:
    """Its tokenizer is the output's, so the ids of the others' rows end too early."""
    larger = plan_help.model(tmp_path / "larger", vocab=10, settings={"vocab_size": 10})
    others = [plan_help.model(tmp_path / name, seed=seed) for seed, name in enumerate("ab", 1)]
    listed = [entry(str(larger), 0.0), *(entry(str(path)) for path in others)]
    assert plan(linear(*listed)).config["vocab_size"] == 8  # no tokenizer, no wrong ids
    smaller = plan_help.model(tmp_path / "smaller", vocab=6, settings={"vocab_size": 6})
    for folder, tokens in ((larger, 10), (smaller, 6)):
        words = Tokenizer(WordLevel({f"w{i}": i for i in range(tokens)}, unk_token="w0"))
        words.save(str(Path(folder) / "tokenizer.json"))
    (wrong,) = (e for e in problems(linear(*listed)) if "embed" in e.finding.where)
    assert isinstance(wrong, ShapeError)
    assert "tokenizer_source" in wrong.finding.fix
    assert plan(linear(entry(str(smaller), 0.0), *listed[1:])).config["vocab_size"] == 8


def test_a_gradient_may_end_before_the_layer_that_does_not_fit(tmp_path: Path) -> None:
    a = plan_help.model(tmp_path / "a")
    tensors = decoder(seed=1) | {"model.layers.1.mlp.up_proj.weight": np.ones((9, 4), BF16)}
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    b = str(write_checkpoint(tmp_path / "b", tensors, config()))
    origins = sources(plan(linear(entry(a), entry(b, [1, 0]))))
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert origins[name] == [(0, name)]
    assert len(origins["model.layers.0.mlp.up_proj.weight"]) == 2
    said = problems(linear(entry(a), entry(b, [1, 0.5])))
    assert {type(e) for e in said} == {ShapeError, MismatchError}


def test_missing_tensors_are_told_of_the_models_that_count(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": (4,)}
    a, b = plan_help.model(tmp_path / "a", extra=bias), plan_help.model(tmp_path / "b", seed=1)
    c = plan_help.model(tmp_path / "c", seed=2)
    (name,) = bias
    without_bias = [{"filter": "bias", "value": 0}, {"value": 1}]
    assert sources(plan(linear(entry(a), entry(b, without_bias))))[name] == [(0, name)]
    p = plan(linear(entry(a, without_bias), entry(b)))
    assert name not in sources(p)
    assert (0, name, "its weight is 0") in {(d.model, d.tensor, d.reason) for d in p.dropped}
    (wrong,) = problems(linear(entry(a), entry(b), entry(c, without_bias)))
    assert wrong.finding.details == (f"{a}: [4] BF16", f"{b}: missing")


@pytest.mark.parametrize("base", [True, False])
def test_a_model_of_another_depth_may_be_listed_with_weight_0(tmp_path: Path, base: bool) -> None:
    a, b, c = (plan_help.model(tmp_path / n, layers, seed=k) for k, (n, layers) in enumerate((("a", 2), ("b", 3), ("c", 2))))
    recipe = linear(entry(c), entry(b, 0)) | ({"merge_method": "task_arithmetic", "base_model": a} if base else {})
    p = plan(recipe)
    assert "model.layers.2.mlp.up_proj.weight" not in sources(p)
    assert any(w.what == f"{b} is not read: its weight is 0 for every tensor" for w in p.warnings)
    assert {d.reason for d in p.dropped} == {"its weight is 0"}
    assert any("different numbers of layers" in e.finding.what for e in problems(linear(entry(c), entry(b, 0.5))))


def test_the_donor_keeps_the_parts_that_its_config_describes(tmp_path: Path) -> None:
    tower = {f"model.vision_tower.layers.{i}.mlp.up_proj.weight": (4, 4) for i in range(2)}
    projector = {"model.multi_modal_projector.weight": (4, 4)}
    text = {k: v for k, v in config().items() if k not in ("model_type", "architectures")}
    settings = {"text_config": text, "vision_config": {"num_hidden_layers": 2}, "model_type": "llava"}
    tensors = decoder(seed=1, prefix="model.language_model.", extra=tower | projector)
    vlm = str(write_checkpoint(tmp_path / "vlm", tensors, settings))
    a = plan_help.model(tmp_path / "a")
    origins = sources(plan(linear(entry(vlm, 0), entry(a))))
    assert all(origins[name] == [(0, name)] for name in (*tower, *projector))
    assert origins["model.language_model.norm.weight"] == [(1, "model.norm.weight")]


def test_the_head_of_a_model_of_weight_0_unties_nothing(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    a = plan_help.model(tmp_path / "a", head=False, settings=tied)
    b = plan_help.model(tmp_path / "b", seed=1)
    p = plan(linear(entry(a), entry(b, 0)))
    assert "lm_head.weight" not in sources(p)
    assert p.config is not None
    assert p.config["tie_word_embeddings"] is True
    untied = plan(linear(entry(b, 0), entry(a)))  # the donor's config.json has a head: it is the other's embedding
    assert sources(untied)["lm_head.weight"] == [(1, "model.embed_tokens.weight")]


def test_integers_and_dtypes_are_those_of_the_models_that_count(tmp_path: Path) -> None:
    name = "model.layers.0.table"
    paths = []
    for k, dtype in enumerate((np.float32, BF16, BF16)):
        tensors = decoder(seed=k, dtype=dtype) | {name: np.full((3, 2), k)}
        paths.append(str(write_checkpoint(tmp_path / "abc"[k], tensors, config())))
    a, b, c = paths
    p = plan(linear(entry(a, 0), entry(b), entry(c)))
    assert sources(p)[name] == [(1, name), (2, name)]
    assert {step.out.dtype.name for step in p.steps} == {"BF16", "I64"}
    based = plan({"merge_method": "task_arithmetic", "base_model": a, "models": [entry(b, 0), entry(c)]})
    assert sources(based)[name] == [(0, name), (2, name)]


@pytest.mark.slow
@pytest.mark.parametrize("method", WEIGHTED)
def test_every_method_makes_the_same_bytes_without_the_model(tmp_path: Path, method: str) -> None:
    description = methods.get(method)
    names = [plan_help.model(tmp_path / f"m{k}", seed=k) for k in range(max(description.min_models, 2))]
    odd = write_checkpoint(tmp_path / "odd", decoder(3, seed=9, vocab=12, dtype=np.float32), config(3, vocab_size=12))
    recipe: dict[str, Any] = {"merge_method": method, "models": [entry(n) for n in names]}
    if description.base == "required":
        recipe["base_model"] = plan_help.model(tmp_path / "base", seed=7)
    contents = []
    for out, models in (("with", [*recipe["models"], entry(str(odd), 0)]), ("without", recipe["models"])):
        weightsmith.merge({**recipe, "models": models}, tmp_path / out, fsync=False)
        contents.append((tmp_path / out / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]
