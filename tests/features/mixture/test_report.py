"""The routing report: what it counts, what it warns of, and what of it is in the output and on the screen."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import transformers
import yaml

from tests.cli_help import Cli, cli
from tests.features.mixture.test_gates import models, recipe_of, told
from weightsmith._app.api import moe
from weightsmith._app.cli.other_programs import MOE_FLAGS
from weightsmith._base.report.charts import heat_map, picture
from weightsmith._features.mixture.router import PromptGroup, Routing, runs

__all__ = ["cli", "models"]


def report_of(logits: list[list[float]], group: PromptGroup) -> Routing:
    routing = Routing.zeros(("a", "b", "c"), 2, (group,), 1)
    routing.count(0, 0, np.array(logits))
    return routing


def test_tokens_go_to_the_largest_logits_and_of_equal_ones_to_the_first() -> None:
    report = report_of([[3, 1, 2], [0, 5, 4], [1, 1, 1], [0, -1, 2]], PromptGroup(2, False, 4))
    np.testing.assert_array_equal(report.first[0, 0], [0.5, 0.25, 0.25])
    np.testing.assert_array_equal(report.sent[0, 0], [0.75, 0.5, 0.75])
    np.testing.assert_array_equal(report.of_own_expert(report.sent), [[0.75]])


def test_an_expert_that_gets_all_and_one_that_gets_nothing_are_warned_of() -> None:
    routing = report_of([[3, 2, 1]] * 10, PromptGroup(2, False, 10)).warnings("r.yml")
    assert [f.what for f in routing] == [
        "expert 0 a comes first for nearly all tokens of all prompts in layer 0",
        "expert 2 c gets nothing of its own prompts in layer 0",
    ]
    assert report_of([[1, 2, 3], [2, 1, 3], [3, 2, 1]] * 3, PromptGroup(2, False, 9)).warnings("r.yml") == []


def test_runs_of_layers() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == "layers 0 to 2, 5, 7, 8"


def test_the_picture_is_xml_with_a_cell_for_each_layer_and_expert_and_names_do_not_break_it() -> None:
    routing = Routing.zeros(("<a&b>", "c"), 1, (PromptGroup(0, False, 1), PromptGroup(1, False, 1)), 3)
    routing.count(1, 0, np.array([[2.0, 1.0]]))
    root = ElementTree.fromstring(picture(heat_map(routing.by_expert())))
    cells = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    assert len(cells) == 3 * 2 * 2
    assert [c[0].text for c in cells if "100" in str(c[0].text)] == ["layer 1, prompts of 0 <a&b>: → 0: 100%"]
    assert len({c.get("fill") for c in cells}) == 2


@pytest.mark.long
def test_the_output_has_the_report_and_it_is_of_the_mixture_s_own_router(models: Path, tmp_path: Path) -> None:
    """In layer 0 the mixture's router, run by transformers, sends tokens where the report says."""
    recipe = recipe_of(models, told(0, 1, 2))
    moe(recipe, tmp_path / "out", report=tmp_path / "out/report.html")
    data = json.loads((tmp_path / "out/routing.json").read_text())
    assert "routing.svg" in (tmp_path / "out/README.md").read_text()
    page = (tmp_path / "out/report.html").read_text()
    assert [f"<figcaption>Routing: prompts of {e} " in page for e in range(3)] == [True] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for e, text in enumerate(data["texts"]):
        first = np.zeros(3)
        for prompt in recipe["experts"][e]["positive_prompts"]:
            with torch.inference_mode():
                logits = model(**tokenizer(prompt, return_tensors="pt"), output_router_logits=True).router_logits[0]
            first += np.bincount(logits[1:].argmax(1).numpy(), minlength=3)
        np.testing.assert_allclose(text["first_by_layer"][0], first / first.sum(), atol=1e-3)


@pytest.fixture
def recipe(models: Path, tmp_path: Path) -> Path:
    file = tmp_path / "r.yml"
    file.write_text(yaml.safe_dump(recipe_of(models, told(0, 1))))
    return file


@pytest.mark.slow
def test_routing_shows_and_writes_nothing(cli: Cli, recipe: Path) -> None:
    ran = cli("moe", str(recipe), "--routing")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("tokens of")
    assert "prompts of 1" in ran.out
    assert list(recipe.parent.iterdir()) == [recipe]


@pytest.mark.slow
def test_plan_knows_recipes_of_both_kinds(cli: Cli, recipe: Path) -> None:
    plan, moe_plan = cli("plan", str(recipe)), cli("moe", str(recipe), "--plan")
    assert plan.code == moe_plan.code == 0, plan.err + moe_plan.err
    assert plan.out == moe_plan.out
    assert plan.out.startswith("method   moe")


def test_the_output_folder_is_named_when_and_only_when_something_is_written(cli: Cli, recipe: Path) -> None:
    assert "name the folder to create" in cli("moe", str(recipe)).err
    assert cli("moe", str(recipe), str(recipe.parent / "out"), "--plan").out == cli("moe", str(recipe), "--plan").out
    assert not (recipe.parent / "out").exists()


@pytest.mark.slow
def test_flags_of_mergekit_moe_are_answered(cli: Cli, recipe: Path) -> None:
    flags = [
        "--load-in-4bit",
        "--load-in-8bit",
        "--i-understand-this-is-not-useful-without-training",
        "--cuda",
        "--device",
        "cpu",
    ]
    ran = cli("moe", str(recipe), "--routing", *flags)
    assert ran.code == 0, ran.err
    for name in ("--load-in-4bit", "--load-in-8bit", "--i-understand-this-is-not-useful-without-training", "--cuda"):
        assert f"{name} is not needed: " in ran.err
    assert "--device is not needed" not in ran.err
    names = [name for flag in MOE_FLAGS for name in flag.names]
    assert len(names) == len(set(names))
