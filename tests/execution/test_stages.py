"""Recipes that use each other's results: the same bytes as run one after the other, by hand, through checkpoints on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import weightsmith
from tests.cases import SWEEP
from tests.cli_help import Cli, cli
from tests.mini import write_checkpoint
from tests.plan_help import config, decoder, model, prepare
from tests.work import steps
from weightsmith._base.errors import NOTHING_WRITTEN, NonFinite, ParameterError, PlanError, WeightsmithError
from weightsmith._engine.resources import fit_tile_bytes
from weightsmith._outputs.area import StagingArea, staging_folder
from weightsmith._plans import Plan, plan_from_json

__all__ = ["cli"]

QUIET: dict[str, Any] = {"progress": False, "fsync": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a, b and c: bf16, of three layers."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        model(folder / name, 3, seed=seed)
    return folder


def by_hand(text: str, folder: Path, **options: Any) -> bytes:
    """The weights of the last recipe, after those before it were written to folders of their names."""
    *stages, last = text.split("---\n")
    folders: dict[str, Path] = {}

    def filled(recipe: str) -> str:
        for name, out in folders.items():
            recipe = recipe.replace(f"model: {name}", f"model: {out}")
        return recipe

    for recipe in stages:
        name = recipe.splitlines()[0].removeprefix("name: ")
        out = folder / f"by-hand-{name}"
        weightsmith.merge(filled(recipe), out, **QUIET, allow_nonfinite=options.get("allow_nonfinite", False))
        folders[name] = out
    weightsmith.merge(filled(last), folder / "by-hand", **QUIET, **options)
    return (folder / "by-hand/model.safetensors").read_bytes()


def merged(recipe: Any, out: Path, **options: Any) -> bytes:
    weightsmith.merge(recipe, out, **QUIET, **options)
    return (out / "model.safetensors").read_bytes()


LINEAR = """\
name: one
merge_method: linear
models:
- {model: A, parameters: {weight: 0.3}}
- {model: B, parameters: {weight: 0.7}}
dtype: bfloat16
"""
TIES = """\
merge_method: ties
base_model: C
models:
- {model: one, parameters: {weight: 1, density: 0.5}}
- {model: B, parameters: {weight: 0.5, density: 0.3}}
dtype: bfloat16
"""
SLERP = (
    "merge_method: slerp\nbase_model: A\nmodels:\n- {model: A}\n- {model: one}\nparameters: {t: [0.2, 0.8]}\ndtype: float32\n"
)
FILTERS = """\
name: one
merge_method: linear
models:
- model: A
  parameters:
    weight:
    - {filter: mlp, value: 0.1}
    - {value: 0.6}
- {model: B, parameters: {weight: 0.5}}
dtype: float32
"""
SCE = """\
name: one
merge_method: sce
base_model: C
models: [{model: A}, {model: B}]
parameters: {select_topk: 0.3}
"""
STAGES = {
    "linear": LINEAR,
    "slerp": "name: one\nmerge_method: slerp\nbase_model: A\nmodels:\n- {model: A}\n- {model: B}\nparameters: {t: 0.4}\n",
    "ties": "name: one\n" + TIES.replace("model: one", "model: A"),
    "dare_ties": "name: one\n" + TIES.replace("model: one", "model: A").replace("ties", "dare_ties"),
    "nuslerp": "name: one\nmerge_method: nuslerp\nmodels:\n- {model: A, parameters: {weight: 1}}\n"
    "- {model: B, parameters: {weight: 2}}\nparameters: {nuslerp_row_wise: true, nuslerp_flatten: false}\n",
    "stack": "name: one\nmerge_method: passthrough\nslices:\n- sources: [{model: A, layer_range: [0, 2]}]\n"
    "- sources: [{model: B, layer_range: [2, 3]}]\n",
    "filters": FILTERS,
    "sce": SCE,
    "copy": "name: one\nmerge_method: linear\nmodels:\n- {model: A, parameters: {weight: 1}}\n",
}
"""Recipes that are computed where the next reads their results."""


LAST = {"ties": TIES, "dare_ties": TIES.replace("ties", "dare_ties"), "slerp": SLERP}


@pytest.mark.matrix("linear-linear", "filters-ties", "copy-ties")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "last"),
    [
        pytest.param(stage, last, id=f"{one}-{other}", marks=() if "linear" in (one, other) or other == "ties" else SWEEP)
        for one, stage in STAGES.items()
        for other, last in LAST.items()
    ],
)
def test_one_plan_makes_the_bytes_of_checkpoints_in_between(stage: str, last: str, models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{stage}---\n{last}")
    with prepare(recipe) as prepared:
        assert [stage.why for stage in prepared.stages] == [""]
    with_plan = merged(recipe, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert with_plan == by_hand(recipe, tmp_path)


def _at(models: Path, recipe: str) -> str:
    for name in "ABC":
        recipe = recipe.replace(f"model: {name}", f"model: {models / name.lower()}")
    return recipe


# ---- results that must be written first

SCOPED = "name: one\n" + TIES.replace("model: one", "model: A") + "parameters: {scope: model}\n"
TSV = """\
name: one
merge_method: tsv_m
base_model: C
models: [{model: A}, {model: B}]
"""
WRITTEN = {"scope": SCOPED, "matrices": TSV}
"""Recipes whose methods look at the whole model first, or hold whole matrices."""


@pytest.mark.long
@pytest.mark.parametrize("stage", WRITTEN.values(), ids=WRITTEN)
def test_a_result_that_must_be_written_is_and_is_removed(stage: str, models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{stage}---\n{TIES}")
    seen: list[str] = []

    def look(progress: Any) -> None:
        seen.extend(path.name for path in tmp_path.iterdir())

    weightsmith.merge(recipe, tmp_path / "out", fsync=False, progress=look)
    assert "out.stage-one" in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == by_hand(recipe, tmp_path)


@pytest.mark.long
def test_a_finished_result_is_used_again_after_an_interruption_of_the_next(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{SCOPED}---\n{TIES}")
    out, stage = tmp_path / "out", tmp_path / "out.stage-one"

    def stop(progress: Any) -> None:
        if stage.is_dir() and progress.written_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(recipe, out, fsync=False, progress=stop)
    first = (stage / "model.safetensors").stat()
    changed = recipe.replace("model: one, parameters: {weight: 1,", "model: one, parameters: {weight: 0.9,")
    assert changed != recipe

    def still(progress: Any) -> None:
        assert (stage / "model.safetensors").stat().st_ino == first.st_ino

    weightsmith.merge(changed, out, fsync=False, resume=False, progress=still)
    assert not stage.exists()
    assert (out / "model.safetensors").read_bytes() == by_hand(changed, tmp_path)


@pytest.mark.long
def test_interrupted_work_of_a_result_is_resumed(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{SCOPED}---\n{TIES}")

    def stop(progress: Any) -> None:
        if progress.tensors >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(recipe, tmp_path / "out", threads=1, fsync=False, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == [".out.stage-one.weightsmith-staging"]
    seen = []
    weightsmith.merge(recipe, tmp_path / "out", fsync=False, progress=seen.append)
    assert seen[0].tensors >= 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_a_result_of_other_models_is_made_again(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{SCOPED}---\n{TIES}")
    other = recipe.replace("weight: 1, density: 0.5", "weight: 1, density: 0.2", 1)
    merged(recipe, tmp_path / "first", keep_stages=True)
    (tmp_path / "first.stage-one").rename(tmp_path / "out.stage-one")
    with pytest.raises(weightsmith.OutputExists, match="already exists"):  # it was to be kept
        merged(other, tmp_path / "out")
    assert merged(other, tmp_path / "out", overwrite=True) == by_hand(other, tmp_path)


@pytest.mark.long
def test_results_are_kept_where_that_is_asked_for(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{LINEAR}---\n{TIES}")
    kept = weightsmith.merge(recipe, tmp_path / "out", keep_stages=True, **QUIET)
    assert kept.stages == (tmp_path / "out.stage-one",)
    one, _ = recipe.split("---\n")
    assert (kept.stages[0] / "model.safetensors").read_bytes() == merged(one, tmp_path / "one")
    assert (kept.stages[0] / "recipe.yml").read_text() == one
    assert (tmp_path / "out/recipe.yml").read_text() == recipe
    weightsmith.verify(kept.stages[0])


@pytest.mark.long
def test_an_error_after_a_result_says_where_that_is(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last recipe is planned again, with the finished result; another program may have taken its models away meanwhile."""

    def gone(*_plan: Any) -> Any:
        raise weightsmith.NotFound("the model is gone", state=NOTHING_WRITTEN)

    recipe = _at(models, f"{SCOPED}---\n{TIES}")
    with monkeypatch.context() as patched:
        patched.setattr("weightsmith._execution.execute.replan", gone)
        with pytest.raises(weightsmith.NotFound) as caught:
            weightsmith.merge(recipe, tmp_path / "out", **QUIET)
    kept = tmp_path / "out.stage-one"
    assert f"Results of other recipes are kept in {kept}, and used by the next run." in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    before = (kept / "model.safetensors").stat().st_mtime_ns
    weightsmith.merge(recipe, tmp_path / "out", keep_stages=True, **QUIET)
    assert (kept / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.long
@pytest.mark.parametrize("leftover", ["all of it", "an empty folder"])
def test_what_the_run_of_a_kept_result_left_when_it_died_is_removed(
    leftover: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died after it had published the result, and the next run uses that."""
    recipe = _at(models, f"{LINEAR}---\n{TIES}")

    def die(area: StagingArea) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StagingArea, "remove_replaced", die)
        with pytest.raises(KeyboardInterrupt):
            weightsmith.merge(recipe, tmp_path / "out", keep_stages=True, **QUIET)
    staging = staging_folder(tmp_path / "out.stage-one")
    if leftover == "an empty folder":
        shutil.rmtree(staging)
        staging.mkdir()
    weightsmith.merge(recipe, tmp_path / "out", keep_stages=True, **QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.stage-one"]


# ---- one plan


@pytest.mark.long
def test_a_plan_in_json_computes_results_on_the_way(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{LINEAR}---\n{TIES}")
    plan = weightsmith.plan(recipe)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.to_json()))
    assert merged(recipe, tmp_path / "out") == _run(file, tmp_path / "run")
    for k in (1, 2):
        weightsmith.run(file, tmp_path / "parts", part=(k, 2), **QUIET)
    assert _run(file, tmp_path / "parts") == _run(file, tmp_path / "run", overwrite=True)


def _run(file: Path, out: Path, **options: Any) -> bytes:
    weightsmith.run(file, out, **QUIET, **options)
    return (out / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_result_that_is_used_twice(models: Path, tmp_path: Path) -> None:
    two = LINEAR.replace("name: one", "name: two").replace("model: A", "model: one").replace("0.7", "0.2")
    last = TIES.replace("model: B", "model: two")
    recipe = _at(models, f"{LINEAR}---\n{two}---\n{last}")
    assert merged(recipe, tmp_path / "out") == by_hand(recipe, tmp_path)


@pytest.mark.long
def test_the_order_of_the_recipes_does_not_matter(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{LINEAR}---\n{TIES}")
    one, last = recipe.split("---\n")
    assert merged(f"{last}---\n{one}", tmp_path / "a") == merged(recipe, tmp_path / "b")


@pytest.mark.long
def test_recipes_inside_recipes_and_lists_of_recipes(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{LINEAR}---\n{TIES}")
    one, last = (yaml.safe_load(part) for part in recipe.split("---\n"))
    as_list = merged([one, last], tmp_path / "list")
    inside = {**last, "models": [{**last["models"][0], "model": one}, *last["models"][1:]]}
    assert merged(inside, tmp_path / "inside") == as_list == merged(recipe, tmp_path / "text")


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"seed": 7}, {"out_dtype": "float32"}, {"threads": 1, "max_memory_bytes": 240 << 20}])
def test_options_of_the_output_are_not_those_of_the_results_in_between(
    options: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    dare = TIES.replace("ties", "dare_ties")
    recipe = _at(models, f"name: one\n{dare.replace('model: one', 'model: A')}---\n{dare}")
    one, last = recipe.split("---\n")
    weightsmith.merge(one, tmp_path / "one", **QUIET, seed=options.get("seed", 0))
    by_hand = merged(last.replace("model: one", f"model: {tmp_path / 'one'}"), tmp_path / "by-hand", **options)
    assert merged(recipe, tmp_path / "out", **options) == by_hand


@pytest.mark.long
def test_a_stack_of_results_and_modules_of_results(models: Path, tmp_path: Path) -> None:
    stack = "merge_method: passthrough\nslices:\n- sources: [{model: one, layer_range: [0, 3]}]\n"
    stack += "- sources: [{model: C, layer_range: [1, 3]}]\n- sources: [{model: one, layer_range: [2, 3]}]\n"
    module = "merge_method: linear\nmodules:\n  model:\n    models:\n    - {model: one, parameters: {weight: 1}}\n"
    module += "    - {model: B, parameters: {weight: 0.5}}\n"
    for k, last in enumerate((stack, module)):
        recipe = _at(models, f"{LINEAR}---\n{last}")
        (tmp_path / str(k)).mkdir()
        options = {"check_loading": False} if k == 0 else {}
        assert merged(recipe, tmp_path / f"out-{k}", **options) == by_hand(recipe, tmp_path / str(k), **options)
    config = json.loads((tmp_path / "out-0/config.json").read_text())
    assert config["num_hidden_layers"] == 6


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "lora").mkdir()
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    rng = np.random.default_rng(5)
    factors = {f"{name}.lora_{k}.weight": rng.standard_normal(s).astype(np.float32) for k, s in (("A", (2, 4)), ("B", (4, 2)))}
    write_checkpoint(tmp_path / "lora", factors)
    (tmp_path / "lora/model.safetensors").rename(tmp_path / "lora/adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(about))
    return tmp_path / "lora"


@pytest.mark.slow
def test_an_adapter_inside_a_stage_and_one_on_its_result(models: Path, adapter: Path, tmp_path: Path) -> None:
    inside = _at(models, f"{LINEAR.replace('model: A', f'model: A+{adapter}')}---\n{TIES}")
    assert merged(inside, tmp_path / "inside") == by_hand(inside, tmp_path)
    (tmp_path / "second").mkdir()
    outside = _at(models, f"{LINEAR}---\n{TIES.replace('model: one', f'model: one+{adapter}')}")
    with prepare(outside) as prepared:
        assert [stage.why for stage in prepared.stages] == ["an adapter is applied to it"]
    outcome = weightsmith.merge(outside, tmp_path / "outside", **QUIET)
    assert [model.ref for model in outcome.plan.models][1] == f"one+{adapter}"
    assert (tmp_path / "outside/model.safetensors").read_bytes() == by_hand(outside, tmp_path / "second")


@pytest.mark.long
def test_a_format_is_that_of_the_output(models: Path, tmp_path: Path) -> None:
    for stage in (LINEAR, SCOPED):
        recipe = _at(models, f"{stage}---\n{TIES}")
        folder = tmp_path / stage.splitlines()[1].removeprefix("merge_method: ")
        folder.mkdir()
        written = merged(recipe, folder / "out", quantize="fp8-dynamic")
        assert written == by_hand(recipe, folder, quantize="fp8-dynamic")


@pytest.mark.long
def test_files_of_the_output_come_from_the_first_donor(models: Path, tmp_path: Path) -> None:
    for name in "ab":
        shutil.copytree(models / name, tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"of": name}))
    recipe = f"{LINEAR.replace('A', str(tmp_path / 'a')).replace('B', str(tmp_path / 'b'))}---\n"
    recipe += f"merge_method: linear\nmodels: [{{model: one}}, {{model: {models / 'c'}}}]\nparameters: {{weight: 1}}\n"
    assert merged(recipe, tmp_path / "out") == by_hand(recipe, tmp_path)
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"of": "a"}'
    ours, by = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "by-hand"))
    assert ours == by


@pytest.mark.long
def test_a_constant_of_all_the_models_is_one_of_the_results(models: Path, tmp_path: Path) -> None:
    for seed, name in enumerate("ABC"):
        tensors = decoder(1, seed=seed)
        tensors["model.norm.weight"][1] = np.inf
        write_checkpoint(tmp_path / name, tensors, config(1))
    recipe = f"{LINEAR}---\n{TIES}"
    for name in "ABC":
        recipe = recipe.replace(f"model: {name}", f"model: {tmp_path / name}")
    assert merged(recipe, tmp_path / "out") == by_hand(recipe, tmp_path)


@pytest.mark.long
def test_an_infinity_in_a_model_of_a_stage_is_an_error_that_names_it(models: Path, tmp_path: Path) -> None:
    tensors = decoder(3, seed=8)
    tensors["model.norm.weight"][1] = np.inf
    write_checkpoint(tmp_path / "bad", tensors, config(3))
    recipe = _at(models, f"{LINEAR}---\n{TIES}").replace(f"model: {models / 'a'}", f"model: {tmp_path / 'bad'}")
    with pytest.raises(NonFinite, match=r"bad, tensor model\.norm\.weight: element \[1\] is inf"):
        merged(recipe, tmp_path / "out")
    shutil.rmtree(tmp_path / ".out.weightsmith-staging")
    assert merged(recipe, tmp_path / "out", allow_nonfinite=True) == by_hand(recipe, tmp_path, allow_nonfinite=True)


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6}
SHAPES = {"mlp.gate_proj": (6, 4), "post_attention_layernorm": (4,), "self_attn.k_proj": (4, 4), "self_attn.v_proj": (4, 4)}
SHAPES["self_attn.o_proj"] = (4, 4)
DENSE = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}


@pytest.mark.long
def test_a_mixture_whose_merges_read_results(models: Path, tmp_path: Path) -> None:
    for seed, name in enumerate("ABC"):
        model(tmp_path / name, seed=seed, extra=DENSE, settings={"hidden_size": 4, "intermediate_size": 6, **HEADS})
    inner = {"merge_method": "linear", "models": [{"model": f"{tmp_path}/A"}, {"model": f"{tmp_path}/B"}]}
    for k, stage in enumerate((inner, {**inner, "merge_method": "ties", "base_model": f"{tmp_path}/C"})):
        stage = {**stage, "name": "one", "parameters": {"weight": 0.5} | ({"scope": "model", "density": 0.5} if k else {})}
        expert = {
            "merge_method": "slerp",
            "base_model": f"{tmp_path}/A",
            "models": [{"model": "one"}],
            "parameters": {"t": 0.5},
        }
        mixture: dict[str, Any] = {"base_model": f"{tmp_path}/A", "gate_mode": "random", "architecture": "mixtral"}
        mixture |= {"experts": [{"source_model": expert}, {"source_model": "one"}]}
        options = {"check_loading": False, **QUIET}
        mixed = weightsmith.moe([stage, mixture], tmp_path / f"out-{k}", **options)
        one = weightsmith.merge(stage, tmp_path / f"one-{k}", **QUIET).out
        expert = {**expert, "models": [{"model": str(one)}]}
        mixture["experts"] = [{"source_model": expert}, {"source_model": {key: stage[key] for key in stage if key != "name"}}]
        hand = weightsmith.moe(mixture, tmp_path / f"by-hand-{k}", **options)
        by_hand = (hand.out / "model.safetensors").read_bytes()
        assert (mixed.out / "model.safetensors").read_bytes() == by_hand
        if not k:
            mixture["experts"] = [{"source_model": {**expert, "models": [{"model": stage}]}}, mixture["experts"][1]]
            again = weightsmith.run(plan_from_json(weightsmith.plan(mixture, check_loading=False).to_json()), tmp_path / "run")
            assert again is not None
            assert (again.out / "model.safetensors").read_bytes() == by_hand


# ---- what is said


@pytest.mark.long
def test_the_plan_says_what_becomes_of_each_result(models: Path, tmp_path: Path, cli: Cli) -> None:
    two = SCOPED.replace("name: one", "name: two")
    (tmp_path / "r.yml").write_text(_at(models, f"{LINEAR}---\n{two}---\n{TIES.replace('model: B', 'model: two')}"))
    ran = cli("plan", str(tmp_path / "r.yml"))
    assert f"stage    one: linear of {models / 'a'}, {models / 'b'}; 15 tensors, 544 bytes, computed on the fly" in ran.out
    assert "stage    two: ties of" in ran.out
    assert "written first, because ties looks at the whole model first" in " ".join(ran.out.split())
    refused = cli("plan", str(tmp_path / "r.yml"), "--json")
    assert refused.code != 0
    assert "the result of two must be written first: ties looks at the whole model first" in refused.err
    assert cli("plan", str(tmp_path / "r.yml"), "--distance").code != 0
    (tmp_path / "one.yml").write_text(_at(models, f"{LINEAR}---\n{TIES}"))
    summary = json.loads(cli("plan", str(tmp_path / "one.yml"), "--json").out)["summary"]
    inputs = [str(models / "a"), str(models / "b")]
    stage = {"name": "one", "method": "linear", "models": inputs, "tensors": 15, "bytes": 544, "why": ""}
    assert summary["stages"] == [stage]
    assert summary["read_bytes_at_most"] == 2 * (544 * 2 + 544 * 2)  # base and B, and the two models of the result; twice


def test_card_and_manifest_name_the_models_of_results(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{LINEAR}---\n{TIES}")
    merged(recipe, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert card.count(f"\n* `{models / 'a'}`\n") == card.count(f"\n* `{models / 'b'}`\n") == 1
    assert "`one`" not in card
    inputs = json.loads((tmp_path / "out/weightsmith.json").read_text())["inputs"]
    assert [entry["ref"] for entry in inputs[1]["inputs"]] == [str(models / "a"), str(models / "b")]
    assert inputs[1]["merge_method"] == "linear"


def test_problems_of_all_stages_are_reported_at_once(models: Path) -> None:
    one = LINEAR.replace("B, parameters: {weight: 0.7}", "B, parameters: {wieght: 0.7}")
    two = LINEAR.replace("name: one", "name: two").replace("model: A", "model: nowhere")
    recipe = _at(models, f"{one}---\n{two}---\n{TIES.replace('model: B', 'model: two').replace('ties', 'tise')}")
    with pytest.raises(PlanError) as caught:
        weightsmith.plan(recipe)
    listed = [(problem.code, problem.finding.where.split(":")[1]) for problem in caught.value.problems]
    assert listed == [("unknown-parameter", "5"), ("not-found", "11"), ("unknown-method", "15")]


def test_a_recipe_comes_before_a_folder_of_its_name(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "one", 3, seed=9)
    monkeypatch.chdir(tmp_path)
    recipe = _at(models, f"{LINEAR}---\n{TIES}")
    (warning,) = weightsmith.plan(recipe).warnings
    assert (warning.what, warning.where) == ("'one' is the recipe of this name, not the folder", "<text>:11:11")
    both = recipe.replace(f"model: {models / 'b'}, parameters: {{weight: 0.5", "model: ./one, parameters: {weight: 0.5")
    assert [m.plan is None for m in weightsmith.plan(both).models] == [True, False, True]


@pytest.mark.long
def test_many_results_that_use_each_other_are_planned_and_closed_in_time(models: Path) -> None:
    """Each planned, or only looked at, once for each way to it: 300 times the work for twice the recipes."""

    def plan(count: int) -> Plan:
        stages = [{"name": f"r{i}", "merge_method": "linear", "models": [{"model": str(models / "a")}]} for i in range(2)]
        for i in range(2, count):
            uses = [{"model": f"r{i - 1}"}, {"model": f"r{i - 2}"}]
            stages.append({"name": f"r{i}", "merge_method": "linear", "models": uses})
        return weightsmith.plan([{**stage, "parameters": {"weight": 1}} for stage in stages])

    assert any(model.plan is not None for model in plan(26).models)
    few, many = steps(lambda: plan(12)), steps(lambda: plan(26))
    assert many < 4 * few, (few, many)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p["steps"][0]["inputs"][0].__setitem__(1, "no.such"), "has no tensor 'no.such'"),
        (lambda p: p["steps"][0].__setitem__("op", "wudi"), "wudi"),
        (lambda p: p.__setitem__("seed", 5), "this is not the model that the plan was made for"),
        (lambda p: p.__setitem__("products", [PRODUCT]), "neither products nor encodings"),
        (lambda p: p["models"][0].__setitem__("ref", "./no/such"), "no such folder or file"),
    ],
)
def test_what_is_wrong_with_a_plan_inside_a_plan_is_said(edit: Any, message: str, models: Path, tmp_path: Path) -> None:
    data = weightsmith.plan(_at(models, f"{LINEAR}---\n{TIES}")).to_json()
    edit(data["models"][1]["plan"])
    with pytest.raises(WeightsmithError) as caught:
        weightsmith.run(plan_from_json(data), tmp_path / "out", **QUIET)
    assert message in str(caught.value)


PRODUCT = {"name": "p", "op": "thresholds", "outs": [], "settings": {}, "steps": [], "models": [], "needs": [], "files": []}


@pytest.mark.slow
def test_the_command_keeps_results_and_says_where_interrupted_work_is(models: Path, tmp_path: Path, cli: Cli) -> None:
    from weightsmith._app.cli.work import interrupted

    (tmp_path / "r.yml").write_text(_at(models, f"{LINEAR}---\n{TIES}"))
    out = tmp_path / "out"
    assert cli("merge", str(tmp_path / "r.yml"), str(out), "--keep-stages").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.stage-one", "r.yml"]
    assert f"Finished tensors are kept in {tmp_path / 'out.stage-one'}" in interrupted(str(out))
    (tmp_path / ".out.stage-one.weightsmith-staging").mkdir()
    assert f"Finished tensors are kept in {tmp_path / '.out.stage-one.weightsmith-staging'}" in interrupted(str(out))
    assert interrupted(str(tmp_path / "other")) == "Interrupted. No unfinished work was left."


def test_names_of_folders_are_safe(models: Path, tmp_path: Path) -> None:
    recipe = _at(models, f"{LINEAR}---\n{TIES}").replace("name: one", "name: a/../b").replace("model: one", "model: a/../b")
    outcome = weightsmith.merge(recipe, tmp_path / "out", keep_stages=True, **QUIET)
    (stage,) = outcome.stages
    assert stage.parent == tmp_path
    assert stage.name.startswith("out.stage-a_.._b-")


def test_memory_of_results_that_are_computed_on_the_way_counts(models: Path, tmp_path: Path) -> None:
    plan = weightsmith.plan(_at(models, f"{LINEAR}---\n{TIES}"))
    alone = weightsmith.plan(_at(models, TIES.replace("model: one", "model: A")))
    assert (plan.widest, plan.levels) == (alone.widest + 2 + 1, 2)
    assert fit_tile_bytes(185 << 20, 2, plan.widest, 2) < fit_tile_bytes(185 << 20, 2, plan.widest)
    with pytest.raises(ParameterError, match=r"needs \d+ MB"):
        merged(_at(models, f"{LINEAR}---\n{TIES}"), tmp_path / "out", max_memory_bytes=170 << 20, threads=2)
