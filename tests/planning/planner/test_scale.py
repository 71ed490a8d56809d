"""A model of 10,000 tensors and 1.3 TB is planned from its headers; plans are data, and the same in every process."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import plan_help
from tests.plan_help import plan, prepare
from tests.work import steps
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import make_layout
from weightsmith._planning.options import RecipeOptions
from weightsmith._plans import plan_from_json, values

LAYERS, EXPERTS = 30, 56
MEASURE = """
import json, resource, sys
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import assemble
found = []
for recipe in sys.argv[1:]:
    with assemble(recipe, RecipeOptions(check_loading=False)).finish() as prepared:
        p = prepared.plan
        found.append({
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "steps": len(p.steps), "dropped": len(p.dropped), "bytes": sum(s.out.nbytes for s in p.steps),
            "shards": len(p.layout.shards), "layers": p.config["num_hidden_layers"], "settings": len(p.settings),
            "inputs": sum(len(s.inputs) for s in p.steps),
        })
json.dump(found, sys.stdout)
"""


def names(layers: int = LAYERS) -> list[TensorSpec]:
    expert = (2048, 3400 * 512 // EXPERTS)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128_000, 7168)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            shapes[f"{layer}self_attn.{part}.weight"] = (7168, 1536)
        shapes[f"{layer}mlp.gate.weight"] = (EXPERTS, 7168)
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{part}.weight"] = (7168,)
        for e in range(EXPERTS):
            for part in ("gate_proj", "up_proj", "down_proj", "gate_proj_b", "up_proj_b", "down_proj_b"):
                shapes[f"{layer}mlp.experts.{e}.{part}.weight"] = expert
    shapes |= {"model.norm.weight": (7168,), "lm_head.weight": (128_000, 7168)}
    return [TensorSpec(name, DTYPES["BF16"], shape) for name, shape in shapes.items()]


def write_sparse(folder: Path, specs: list[TensorSpec]) -> str:
    """Headers are written, data are holes."""
    folder.mkdir()
    layout = make_layout(specs, 9_000_000_000)
    for shard in layout.shards:
        with (folder / shard.name).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.nbytes)
    for name, index in layout.indexes.items():
        (folder / name).write_bytes(index)
    layers = len({spec.name.split(".")[2] for spec in specs if spec.name.startswith("model.layers.")})
    settings = {"num_hidden_layers": layers, "n_routed_experts": EXPERTS, "model_type": "deepseek_v3", "vocab_size": 128_000}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def measure(*recipes: Path) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, recipes)], capture_output=True, text=True, check=True)
    measurements: list[dict[str, Any]] = json.loads(done.stdout)
    print(measurements)
    return measurements


@pytest.mark.process
@pytest.mark.slow
def test_ten_thousand_tensors_of_a_terabyte_are_planned(tmp_path: Path) -> None:
    specs = names()
    try:
        a, b = write_sparse(tmp_path / "a", specs), write_sparse(tmp_path / "b", specs)
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    total = sum(s.nbytes for s in specs)
    assert total > 1.2e12
    linear = tmp_path / "linear.yml"
    linear.write_text(f"merge_method: linear\nmodels: [{{model: {a}}}, {{model: {b}}}]\nparameters: {{weight: 0.5}}\n")
    stack = tmp_path / "stack.yml"
    stack.write_text(
        f"merge_method: passthrough\nslices:\n  - sources: [{{model: {a}, layer_range: [0, 20]}}]\n"
        f"  - sources: [{{model: {b}, layer_range: [15, 30]}}]\n"
    )
    averaged, stacked = measure(linear, stack)
    assert (averaged["steps"], averaged["inputs"], averaged["bytes"]) == (len(specs), 2 * len(specs), total)
    assert (averaged["dropped"], averaged["settings"], averaged["layers"]) == (0, 2, LAYERS)
    assert averaged["shards"] > total / 5e9
    per_layer = 6 * EXPERTS + 8
    assert (stacked["steps"], stacked["layers"]) == (3 + 35 * per_layer, 35)
    assert stacked["dropped"] == 25 * per_layer + 3


@pytest.mark.process
@pytest.mark.slow
def test_work_grows_with_the_tensors(tmp_path: Path) -> None:
    def work(layers: int) -> int:
        a, b = (write_sparse(tmp_path / f"{name}{layers}", names(layers)) for name in "ab")
        recipe = {"merge_method": "linear", "models": [{"model": a}, {"model": b}], "parameters": {"weight": 0.5}}
        return steps(lambda: prepare(recipe, RecipeOptions(check_loading=False)).close())

    assert work(6) < 3.3 * work(2)


RECIPE = """merge_method: ties
base_model: {a}
models:
  - model: {b}
    parameters: {{weight: [0.25, 1], density: 0.5}}
  - model: {c}
    parameters: {{weight: [{{filter: mlp, value: 0.5}}, {{filter: nothing, value: 1}}, {{value: 1}}]}}
parameters: {{lambda: 0.5, normalize: true}}
"""


def recipe(folder: Path) -> Path:
    tower = {f"model.vision_tower.layers.{i}.w.weight": (2, 2) for i in range(3)}
    extra = {"a": {}, "b": tower | {"score.weight": (3, 4)}, "c": {"model.rotary_emb.inv_freq": (2,)}}
    for i, name in enumerate("abc"):
        plan_help.model(folder / name, 4, seed=i, extra=extra[name])
    path = folder / "r.yml"
    path.write_text(RECIPE.format(a=folder / "a", b=folder / "b", c=folder / "c"))
    return path


def test_a_plan_survives_json_and_pickle(tmp_path: Path) -> None:
    p = plan(str(recipe(tmp_path)))
    text = json.dumps(p.to_json())
    again = plan_from_json(json.loads(text))
    assert again == p
    assert again.hash == p.hash
    assert json.dumps(again.to_json()) == text
    assert pickle.loads(pickle.dumps(p)) == p
    assert "ties" in repr(p)


def test_the_hash_is_that_of_the_whole_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = plan(str(recipe(tmp_path)))
    data = {key: value for key, value in p.to_json().items() if key not in ("warnings", "lacking")}
    for model in data["models"]:
        model.pop("sample", None)
    assert len(data["steps"]) > 4
    monkeypatch.setattr(values, "_STEPS_AT_ONCE", 3)
    assert p.hash == hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@pytest.mark.parametrize("change", ["method", "seed", "shard", "dtype"])
def test_another_plan_has_another_hash(tmp_path: Path, change: str) -> None:
    path = recipe(tmp_path)
    options: dict[str, Any] = {"seed": {"seed": 1}, "shard": {"max_shard_bytes": 100}, "dtype": {"out_dtype": DTYPES["F32"]}}
    first = plan(str(path))
    if change == "method":
        path.write_text(path.read_text().replace("ties", "dare_ties"))
    assert plan(str(path), **options.get(change, {})).hash != first.hash


PRINTED = """
import json, sys
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import assemble
recipe, *unlike = sys.argv[1:]
with assemble(recipe, RecipeOptions()).finish() as p:
    print(json.dumps(p.plan.to_json()), p.plan.hash)
try:
    assemble({"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 1}} for m in unlike]}, RecipeOptions())
except Exception as error:
    print(error)
"""


@pytest.mark.process
@pytest.mark.slow
def test_plans_and_refusals_do_not_depend_on_the_order_of_hashes(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    a = plan_help.model(tmp_path / "d", extra={f"model.m{i}.weight": (2, 2) for i in range(9)} | {"model.norm.bias": (4,)})
    b = plan_help.model(tmp_path / "e", extra={"lm_head.bias": (8,), "model.layers.0.mlp.gate.weight": (2, 2)})
    outputs = set()
    for seed in (1, 2):
        command = [sys.executable, "-c", PRINTED, str(path), a, b]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        outputs.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    (printed,) = outputs
    assert len(printed) > 5000
    assert "3 problems" in printed


def test_what_tensors_have_in_common_is_kept_once(tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / name, 3) for name in "ab")
    weight = {"parameters": {"weight": 0.5}}
    with prepare(
        {"merge_method": "linear", "models": [{"model": a, **weight}, {"model": b, **weight}]}, RecipeOptions()
    ) as prepared:
        merged = [step for step in prepared.plan.steps if len(step.inputs) == 2]
        assert len(merged) > 5
        assert all(read.tensor is step.out.name for step in merged for read in step.inputs)
        shapes = {step.out.shape: step.out.shape for step in merged}
        assert all(shapes[step.out.shape] is step.out.shape for step in merged)
        assert len({id(origin) for origin in prepared.origins.values()}) <= 3 + 1  # one for each layer, one for what is outside
        assert [origin.value for origin in prepared.explain(merged[0].out.name) if origin.parameter == "weight"] == [0.5, 0.5]
