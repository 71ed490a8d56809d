"""Recipes from files, YAML text and Python mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recipe_help import parse
from weightsmith._base.errors import NotFound, SyntaxProblem
from weightsmith._planning import recipe as recipes
from weightsmith._planning.recipe import Recipe, Surgery, Upcycling
from weightsmith._planning.recipe.yaml import MAX_BYTES


def load(source: Any, command: recipes.Command | None = "merge", **options: Any) -> tuple[Any, list[Any]]:
    """The recipe and its problems."""
    loaded = recipes.load(source, command, **options)
    return loaded.recipe, list(loaded.problems)


TEXT = "merge_method: linear\nmodels:\n- model: a\n  parameters: {weight: 0.5}\n"


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    path.write_text(TEXT)
    for source in (path, str(path)):
        recipe, problems = load(source)
        assert problems == []
        assert recipe is not None
        assert recipe.text == TEXT
        assert recipe.models[0].parameters["weight"].where == f"{path}:4:16"


def test_windows_line_ends_and_a_byte_order_mark_are_fine_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    recipe, problems = load(path)
    assert problems == []
    assert recipe is not None
    assert recipe.text.encode() == path.read_bytes()
    assert recipe.at("merge_method") == f"{path}:1:1"


def test_text_is_known_by_its_newline() -> None:
    recipe, problems = load(TEXT)
    assert problems == []
    assert recipe is not None
    assert recipe.at("models") == "<text>:2:1"


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "recipe.yml").write_text(TEXT)
    (tmp_path / "notes.txt").write_text("")
    recipe, (problem,) = load(tmp_path / "recpie.yml")
    assert recipe is None
    assert isinstance(problem, NotFound)
    assert str(problem) == (
        f"{tmp_path}/recpie.yml: no such recipe (did you mean 'recipe.yml'?)\n  recipes in {tmp_path}: recipe.yml"
    )


def test_a_missing_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    _, (problem,) = load(tmp_path / "no" / "r.yml")
    assert str(problem) == f"{tmp_path}/no/r.yml: no such recipe: the folder {tmp_path}/no does not exist"


def test_a_folder_that_mergekit_wrote_names_the_recipe_in_it(tmp_path: Path) -> None:
    _, (problem,) = load(tmp_path)
    assert str(problem).startswith(f"{tmp_path}: the recipe is a folder\n  -> Name a YAML file: weightsmith init writes one")
    (tmp_path / "mergekit_config.yml").write_text(TEXT)
    _, (problem,) = load(tmp_path)
    assert str(problem).endswith(f"-> Name the file in it: {tmp_path}/mergekit_config.yml.")


def test_a_path_no_file_can_have_is_not_found() -> None:
    assert isinstance(load("a\0b")[1][0], NotFound)


def test_bytes_that_are_not_utf8_are_placed(tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    path.write_bytes("merge_method: linear\nname: é".encode("latin-1"))
    _, (problem,) = load(path)
    assert isinstance(problem, SyntaxProblem)
    assert str(problem) == f"{path}:2:7: the recipe is not UTF-8 text: byte 0xe9\n  -> Save the file as UTF-8."


def test_a_huge_file_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    _, (problem,) = load(path)
    assert str(problem) == f"{path}:1:1: the recipe is larger than {MAX_BYTES:,} bytes"


def test_a_mapping_has_key_paths_for_positions_and_a_text_that_reads_back() -> None:
    source = {
        "merge_method": "ties",
        "base_model": Path("base"),
        "models": [
            {"model": "a@v1", "parameters": {"weight": np.float32(0.5), "density": (0, 1.5)}},
            {"model": "b", "parameters": {"weight": [{"filter": "mlp", "value": "1e-5"}, {"value": True}]}},
        ],
        "dtype": "float16",
    }
    recipe, problems = load(source)
    assert problems == []
    assert recipe is not None
    weight = recipe.models[1].parameters["weight"]
    assert weight.where == "models[1].parameters.weight"
    assert weight.entries[0].where == "models[1].parameters.weight[0].value"
    assert recipe.models[0].parameters["weight"].entries[0].value == 0.5
    assert recipe.models[0].where == "models[0]"
    again, problems = parse(recipe.text, "r.yml")
    assert problems == []
    assert again is not None
    assert again.base_model == recipe.base_model
    assert [i.model for i in again.models] == [i.model for i in recipe.models]
    assert [e.value for e in again.models[1].parameters["weight"].entries] == ["1e-5", True]


def test_problems_of_a_mapping_name_the_key_path() -> None:
    model = {"model": "a", "weight": 1, "parameters": {"t": object()}}
    source: dict[Any, Any] = {"merge_method": "linear", "models": [model], 7.5: 1}
    recipe, problems = load(source, parameter_names=("weight", "t"))
    assert recipe is not None
    assert [str(p).split("\n")[0] for p in problems] == [
        "models[0].parameters.t: a recipe cannot hold a value of type object",
        "7.5: a key must be a string, not 7.5",
        "models[0].weight: the parameter 'weight' in an entry of 'models' must be inside 'parameters'; mergekit"
        " silently ignored it",
        "models[0].parameters.t: the parameter 't' has no value",
    ]


def test_a_mapping_that_holds_itself_is_refused() -> None:
    loop: dict[str, object] = {"merge_method": "linear"}
    loop["models"] = [loop]
    recipe, (problem,) = load(loop)
    assert recipe is None
    assert "nested more than 64 deep" in str(problem)


def test_a_mapping_of_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._planning.recipe.yaml.MAX_NODES", 10)
    _, (problem,) = load({"a": [1] * 5, "b": [1] * 5})
    assert str(problem) == "b[2]: a recipe of more than 10 values is refused"


@pytest.mark.parametrize("source", [{}, {"models": []}])
def test_an_incomplete_mapping_is_reported_at_the_recipe(source: dict[str, object]) -> None:
    recipe, problems = load(source)
    assert recipe is None
    assert problems[0].finding.where in ("recipe", "models")


def test_lenient_and_parameter_names_reach_the_parser() -> None:
    recipe, problems = load(TEXT + "weight: 1\n", lenient=True, parameter_names=("weight",))
    assert problems == []
    assert recipe is not None
    assert "the parameter 'weight' at the top level must be inside 'parameters'" in recipe.findings[0].what


@pytest.mark.parametrize(
    "keys", ["experts: [{source_model: a}]", "prune_experts: {keep: [0]}", "merge_experts: {groups: [[0, 1]]}"]
)
def test_a_recipe_of_the_other_command_is_one_error(keys: str) -> None:
    """Not one for each key that is unknown here."""
    recipe, (problem,) = load(f"base_model: a\n{keys}\n")
    assert recipe is None
    assert str(problem) == (
        "<text>:1:1: this is a recipe of `weightsmith moe`, not of `weightsmith merge`\n"
        "  -> Run `weightsmith moe` (in Python: weightsmith.moe)."
    )
    parsed, (other,) = load(TEXT, "moe")
    assert parsed is None
    assert "this is a recipe of `weightsmith merge`, not of `weightsmith moe`" in str(other)


def test_a_recipe_with_keys_of_both_commands_has_an_error_at_the_wrong_ones() -> None:
    _, (problem,) = load(TEXT + "experts: 1\n")
    assert "the key 'experts' is of a recipe of `weightsmith moe`" in str(problem)


MOE = "base_model: a\nexperts:\n- {source_model: b, copies: 0}\n- {source_model: c, nois: 1}\ndtype: half\n"


@pytest.mark.parametrize(
    ("text", "kind", "command"),
    [
        (TEXT + "dtype: half\n", Recipe, "merge"),
        (MOE, None, "moe"),
        (MOE.replace("copies: 0", "copies: 2").replace("nois", "noise_scale"), Upcycling, "moe"),
        ("model: a\nprune_experts: {keep: [0]}\nname: 3\n", Surgery, "moe"),
        (TEXT + "experts: 1\n", Recipe, "merge"),
        ("name: 3\n", None, "merge"),
        ("[1, 2\n", None, "merge"),
    ],
)
def test_either_kind_is_read_by_its_keys(text: str, kind: type | None, command: recipes.Command, tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    path.write_text(text)
    for source in (path, text):
        recipe, problems = load(source, None)
        expected, same = load(source, command)
        assert type(recipe) is (kind or type(None))
        assert recipe == expected
        assert [str(p) for p in problems] == [str(p) for p in same] != []


def test_a_file_of_either_kind_that_is_missing_is_one_problem(tmp_path: Path) -> None:
    recipe, (problem,) = load(tmp_path / "r.yml", None)
    assert recipe is None
    assert isinstance(problem, NotFound)


def test_copies_share_an_entry_and_equal_entries_do_not() -> None:
    recipe, _ = load("base_model: a\nexperts:\n- &e {source_model: b, copies: 2}\n- *e\n", "moe")
    assert isinstance(recipe, Upcycling)
    sections = [id(expert.section) for expert in recipe.experts]
    assert sections[0] == sections[1] != sections[2] == sections[3]
