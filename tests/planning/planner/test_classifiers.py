"""Classifiers merged as differences from a base with a causal head: theirs is averaged, the base's is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.mini import as_bytes, write_checkpoint
from tests.models.lora.test_lora import LLAMA, H, base, base_tensors, normal
from weightsmith._base.errors import MismatchError, PlanError, ShapeError
from weightsmith._planning.planner.outputs import AVERAGE
from weightsmith._plans import plan_from_json


def classifier(folder: Path, seed: int, labels: int = 1, **keys: Any) -> Path:
    """A fine-tune of the base, with a head for labels in place of its own."""
    tensors = {
        name: (a + 0.01 * normal(*a.shape, seed=seed)).astype(np.float32) for name, a in base_tensors(head=False).items()
    }
    tensors["score.weight"] = normal(labels, H, seed=seed)
    names = {str(i): f"LABEL_{i}" for i in range(labels)}
    config = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_hidden_layers": 2, "id2label": names, **keys}
    return write_checkpoint(folder, tensors, config)


def recipe(models: dict[str, Any], method: str = "task_arithmetic", **options: Any) -> dict[str, Any]:
    listed = [{"model": path, "parameters": {"weight": weight}} for path, weight in models.items()]
    return {"merge_method": method, "models": listed, **options}


def merged(recipe: dict[str, Any], out: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    weightsmith.merge(recipe, out, fsync=False)
    with weightsmith.open_checkpoint(out) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.specs}
    return tensors, json.loads((out / "config.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_ties", "breadcrumbs"])
def test_heads_that_the_base_has_not_are_averaged_by_their_weights(method: str, tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    a, b = classifier(tmp_path / "a", 1), classifier(tmp_path / "b", 2)
    weights, config = merged(recipe({str(a): 1, str(b): 3}, method, base_model=str(model)), tmp_path / "out")
    want = 0.25 * normal(1, H, seed=1).astype(np.float64) + 0.75 * normal(1, H, seed=2)
    np.testing.assert_allclose(weights["score.weight"], want, rtol=2e-7)
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    assert weights.keys() == base_tensors(head=False).keys() | {"score.weight"}
    if method == "task_arithmetic":
        name = "model.layers.0.self_attn.q_proj.weight"
        before, noise = base_tensors()[name], [0.01 * normal(H, H, seed=seed) for seed in (1, 2)]
        np.testing.assert_allclose(weights[name], before + noise[0] + 3 * noise[1], atol=1e-5)


def test_what_became_of_the_heads_is_said(tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    a, b = classifier(tmp_path / "a", 1), classifier(tmp_path / "b", 2)
    plan = weightsmith.plan(recipe({str(a): 1, str(b): 1}, base_model=str(model)))
    (note,) = [warning for warning in plan.warnings if "score.weight" in warning.what]
    assert f"{model} has no score.weight: no difference from it can be merged, so it is averaged over {a} and {b}" in note.what
    assert note.details == (f"config.json and other files are {a}'s", "left out: lm_head.weight")
    (step,) = [step for step in plan.steps if step.out.name == "score.weight"]
    assert step.op == AVERAGE
    (dropped,) = plan.dropped
    assert (dropped.model, dropped.tensor) == (0, "lm_head.weight")
    again = weightsmith.run(plan_from_json(plan.to_json()), tmp_path / "run", fsync=False)
    once, _ = merged(recipe({str(a): 1, str(b): 1}, base_model=str(model)), tmp_path / "out")
    with weightsmith.open_checkpoint(again.out) as checkpoint:
        assert as_bytes(checkpoint.read("score.weight")) == as_bytes(once["score.weight"])


@pytest.mark.parametrize("weight", [0, 0.5], ids=["weight 0", "no head"])
def test_the_only_head_is_copied(weight: float, tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    a = classifier(tmp_path / "a", 1)
    other = classifier(tmp_path / "b", 2) if weight == 0 else base(tmp_path / "b", np.float32)
    weights, config = merged(recipe({str(a): 0.3, str(other): weight}, base_model=str(model)), tmp_path / "out")
    np.testing.assert_array_equal(weights["score.weight"], normal(1, H, seed=1))
    assert "lm_head.weight" not in weights
    assert config["architectures"] == ["LlamaForSequenceClassification"]


def test_heads_of_different_labels_are_refused(tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    a, b = classifier(tmp_path / "a", 1), classifier(tmp_path / "b", 2, labels=3)
    with pytest.raises(PlanError) as caught:
        weightsmith.plan(recipe({str(a): 1, str(b): 1}, base_model=str(model)))
    (problem,) = caught.value.problems
    assert isinstance(problem, ShapeError)
    assert f"{a}: [1, 24] F32" in problem.finding.details


def test_heads_of_weight_0_alone_leave_nothing_to_take(tmp_path: Path) -> None:
    model = base(tmp_path / "base", np.float32)
    a, b = classifier(tmp_path / "a", 1), classifier(tmp_path / "b", 2)
    with pytest.raises(PlanError) as caught:
        weightsmith.plan(recipe({str(a): 0, str(b): 0}, base_model=str(model)))
    assert any(isinstance(problem, MismatchError) for problem in caught.value.problems)


def test_a_base_that_is_an_input_has_to_have_the_head(tmp_path: Path) -> None:
    """An average with a causal model is no average of classifiers."""
    model = base(tmp_path / "base", np.float32)
    a, b = classifier(tmp_path / "a", 1), classifier(tmp_path / "b", 2)
    with pytest.raises(PlanError, match="not all the models have this tensor"):
        weightsmith.plan(recipe({str(model): 1, str(a): 1, str(b): 1}, "linear"))


def test_classifiers_of_a_classifier_are_merged_as_before(tmp_path: Path) -> None:
    model, a = classifier(tmp_path / "base", 0), classifier(tmp_path / "a", 1)
    weights, _ = merged(recipe({str(a): 0.5}, base_model=str(model)), tmp_path / "out")
    want = (normal(1, H, seed=0) + normal(1, H, seed=1).astype(np.float64)) / 2
    np.testing.assert_allclose(weights["score.weight"], want, atol=1e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_merge_as_a_classifier(tmp_path: Path) -> None:
    torch, transformers = (pytest.importorskip(n) for n in ("torch", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    sizes = {"hidden_size": H, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = base(tmp_path / "base", np.float32, **sizes)
    a, b = (classifier(tmp_path / name, k, **sizes) for k, name in enumerate("ab", 1))
    weights, _ = merged(recipe({str(a): 1, str(b): 1}, "ties", base_model=str(model)), tmp_path / "out")
    auto = transformers.AutoModelForSequenceClassification
    loaded, info = auto.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.num_labels == 1
    np.testing.assert_array_equal(loaded.score.weight.detach().numpy(), weights["score.weight"])
