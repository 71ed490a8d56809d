"""Messages that were false or misleading, each as a user meets it: what is wrong, and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import weightsmith
from tests.cli_help import LINEAR, Cli, cli, run_process, work

__all__ = ["cli", "work"]


def refused(cli: Cli, work: Path, recipe: str, *options: str, command: str = "merge") -> str:
    """What a recipe that is refused is answered with."""
    (work / "r.yml").write_text(recipe)
    ran = cli(command, "r.yml", "out", *options)
    assert ran.code == 1
    assert not (work / "out").exists()
    return ran.err


MODELS = "models:\n  - {model: a, parameters: {weight: 1}}\n  - {model: b, parameters: {weight: 1}}\n"


# ---- places that are no models


@pytest.mark.parametrize("folder", ["hub", "hub/models--org--tiny"])
def test_the_cache_of_hub_models_is_named_as_such(cli: Cli, work: Path, folder: str) -> None:
    snapshot = work / "hub/models--org--tiny/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (work / "hub/models--org--tiny/refs").mkdir()
    said = refused(cli, work, LINEAR.replace("model: b", f"model: ./{folder}"))
    assert "it is empty" not in said
    assert "cache" in said
    assert "org/tiny" in said
    if folder != "hub":
        assert f"{folder}/snapshots/0123abcd" in said


def test_a_config_as_recipe_is_one_error(cli: Cli, work: Path) -> None:
    ran = cli("merge", "a/config.json", "out")
    assert ran.code == 1
    assert ran.err.count("error[") == 1
    assert "this is the config.json of a model, not a recipe" in ran.err
    assert "- model: a." in ran.err


@pytest.mark.slow
def test_a_plan_as_recipe_is_one_error(cli: Cli, work: Path) -> None:
    (work / "plan.json").write_text(cli("plan", "linear.yml", "--json").out)
    ran = cli("merge", "plan.json", "out")
    assert ran.err.count("error[") == 1
    assert "Run `weightsmith run` with it" in ran.err


@pytest.mark.slow
def test_offline_is_said_to_be_the_reason(work: Path) -> None:
    (work / "linear.yml").write_text(LINEAR.replace("model: b", "model: org/nowhere"))
    home = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "home")}
    ran = run_process("plan", "linear.yml", cwd=work, env=home)
    assert ran.code == 1
    assert "nor a model in the Hub cache, and HF_HUB_OFFLINE" in ran.err
    assert "download" in ran.err
    assert "cannot be reached" not in ran.err


# ---- bases


def test_slerp_without_a_base_names_one_of_the_two(cli: Cli, work: Path) -> None:
    said = refused(cli, work, "merge_method: slerp\nmodels: [{model: a}, {model: b}]\nparameters: {t: 0.5}\n")
    assert "Write base_model: a: slerp starts there and goes towards the other model." in said
    assert "tuned from" not in said


def test_a_base_that_is_listed_without_parameters_is_found(cli: Cli, work: Path) -> None:
    """Many published recipes of dare_ties list the base first; its missing weight is no second problem."""
    entry = "  - {model: a, parameters: {weight: 1, density: 0.5}}\n"
    said = refused(cli, work, f"merge_method: dare_ties\nmodels:\n  - model: b\n{entry}")
    assert said.count("error[") == 1
    assert "Write base_model: b if the others were tuned from it." in said


@pytest.mark.slow
def test_the_base_alone_is_copied_with_a_warning_as_by_mergekit(cli: Cli, work: Path) -> None:
    (work / "alone.yml").write_text("merge_method: task_arithmetic\nbase_model: a\nmodels: [{model: a}]\n")
    ran = cli("merge", "alone.yml", "alone")
    assert ran.code == 0
    assert "alone.yml:3:1: nothing is merged: a is the base and the only model, and is copied" in ran.err
    assert "Write merge_method: passthrough, which says so." in ran.err
    with weightsmith.open_checkpoint(work / "alone") as alone, weightsmith.open_checkpoint(work / "a") as base:
        assert {name: alone.read(name).tobytes() for name in alone.specs} == {n: base.read(n).tobytes() for n in base.specs}
    said = refused(cli, work, "merge_method: multislerp\nbase_model: a\nmodels: [{model: a}]\nparameters: {weight: 1}\n")
    assert "takes at least 1 model besides the base, and there is none" in said
    assert "Write merge_method: passthrough" in said


# ---- parameters


def test_an_empty_list_is_said_to_be_empty(cli: Cli, work: Path) -> None:
    said = refused(cli, work, f"merge_method: linear\n{MODELS.replace('weight: 1', 'weight: []', 1)}")
    assert said.count("error[") == 1
    assert "the list of 'weight' is empty" in said


def test_a_misspelled_parameter_is_one_error_and_not_also_missing(cli: Cli, work: Path) -> None:
    said = refused(cli, work, f"merge_method: linear\n{MODELS.replace('weight: 1', 'wieght: 1', 1)}")
    assert said.count("error[") == 1
    line = "  - {model: a, parameters: {wieght: 1}}"
    assert f"    3 | {line}\n      | {' ' * line.index('wieght')}^^^^^^\n  -> Write 'weight'." in said


def test_one_missing_parameter_of_many_models_is_one_error(cli: Cli, work: Path) -> None:
    said = refused(cli, work, "merge_method: linear\nmodels:\n  - model: a\n  - model: b\n")
    assert said.count("error[") == 1
    assert "also at r.yml:4:5" in said
    assert "(2 problems)" in said


@pytest.mark.slow
def test_one_thread_is_not_asked_to_be_fewer(cli: Cli, work: Path) -> None:
    ran = cli("merge", "linear.yml", "out", "--max-memory", "100MB", "--threads", "1")
    assert ran.code == 1
    assert "on 1 thread needs" in ran.err
    assert "fewer" not in ran.err
    assert "Write --max-memory 167MB or more." in ran.err
    assert "or fewer --threads" in cli("merge", "linear.yml", "out", "--max-memory", "100MB", "--threads", "2").err
    assert cli("merge", "linear.yml", "out", "--max-memory", "167MB", "--threads", "1").code == 0


# ---- recipes of the other command


@pytest.mark.parametrize(
    "recipe", [f"merge_method: moe\n{MODELS}", f"merge_method: ties\nbase_model: a\n{MODELS}experts: []\n"]
)
def test_a_mixture_written_as_a_merge_is_sent_to_moe(cli: Cli, work: Path, recipe: str) -> None:
    said = refused(cli, work, recipe)
    assert "did you mean" not in said
    assert "run `weightsmith moe`" in said


@pytest.mark.parametrize("key", ["tokenizer: {source: union}", "tokenizer_source: union", "chat_template: chatml"])
def test_what_is_not_supported_is_said_to_be_so_in_a_recipe_of_moe_too(cli: Cli, work: Path, key: str) -> None:
    said = refused(cli, work, f"base_model: a\nexperts: [{{source_model: b}}]\n{key}\n", command="moe")
    assert f"{key.partition(':')[0]} is not supported in a recipe of `weightsmith moe`" in said
    assert "it belongs at the top level" not in said


def test_a_key_of_merges_in_a_recipe_of_moe_is_said_to_be_one(cli: Cli, work: Path) -> None:
    said = refused(cli, work, "base_model: a\nexperts: [{source_model: b}]\nout_dtype: float32\n", command="moe")
    assert "Move it: it belongs in a recipe of a merge." in said


# ---- stacks


STACK = """merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 2]}]
  - sources: [{model: a, layer_range: [0, 2]}]
"""


def test_a_stack_is_no_warning_and_its_modules_have_its_layers(cli: Cli, work: Path) -> None:
    (work / "r.yml").write_text(STACK)
    ran = cli("plan", "r.yml")
    assert (ran.code, ran.err) == (0, "reading the recipe and the models' headers\n")
    assert "model.layers.0 to 3" in ran.out
    modules = json.loads(cli("plan", "r.yml", "--json").out)["summary"]["modules"]
    assert [(m["tensors"], m["stacks"]) for m in modules] == [(10, [{"prefix": "model.layers.", "layers": 4}])]
    assert "num_hidden_layers  2    4" in ran.out


# ---- all at once


def test_missing_models_are_reported_with_errors_of_the_grammar(cli: Cli, work: Path) -> None:
    said = refused(cli, work, "merge_method: linear\nmodles:\n  - model: ./nowhere\nbase_model: ./missing\nslices: 3\n")
    assert "error[not-found]: r.yml:4:13: ./missing: no such folder or file" in said
    assert "'slices' takes a list" in said
    said = refused(cli, work, "base_model: ./missing\nexperts: [{source_model: ./nowhere}, {source: b}]\n", command="moe")
    assert "./missing" in said
    assert "./nowhere" in said
    assert "unknown key 'source'" in said
