"""`weightsmith methods` and `weightsmith schema`: what the methods say of themselves."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from tests.cli_help import LINEAR, Cli, cli
from weightsmith._methods import NAMES, all_methods, get
from weightsmith._methods.method import FAMILIES
from weightsmith._planning.recipe.grammar import moe_schema, schema

__all__ = ["cli"]


def test_all_methods_are_listed_by_family_a_line_each_that_fits_80_columns(cli: Cli) -> None:
    ran = cli("methods")
    assert ran.code == 0
    *tables, hint = ran.out.split("\n\n")
    assert [table.splitlines()[0].strip() for table in tables] == list(FAMILIES.values())
    for family, table in zip(FAMILIES, tables, strict=True):
        lines = {line.split()[0]: line for line in table.splitlines()[1:]}
        assert tuple(lines) == tuple(name for name in NAMES if get(name).family == family)
        for name, line in lines.items():
            assert get(name).title in line
            assert len(line) <= 80
    assert "weightsmith methods NAME" in hint


@pytest.mark.slow
def test_json_has_the_parameters_of_all_methods_or_of_one(cli: Cli) -> None:
    by_name = {method["name"]: method for method in json.loads(cli("methods", "--json").out)}
    assert tuple(by_name) == NAMES
    assert json.loads(cli("methods", "ties", "--json").out) == by_name["ties"]
    assert (by_name["ties"]["family"], by_name["consensus_ta"]["family"]) == ("sparse", "sparse")
    density = next(p for p in by_name["ties"]["parameters"] if p["name"] == "density")
    assert (density["default"], density["minimum"], density["maximum"]) == (1.0, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_method_is_shown_in_full(cli: Cli, name: str) -> None:
    ran = cli("methods", name)
    method = get(name)
    assert ran.code == 0
    for text in (method.summary, method.formula, method.source, method.example):
        assert text.strip() in ran.out
    for parameter in method.parameters:
        assert parameter.doc in ran.out
    assert yaml.safe_load(ran.out[ran.out.index("merge_method:") :])["merge_method"] == name


def test_values_and_defaults_are_shown_as_they_are_written_in_a_recipe(cli: Cli) -> None:
    out = cli("methods", "ties").out
    for line in (
        "weight: number; required; for each model",
        "density: number 0 to 1; default 1.0; for each model",
        "normalize: true | false; default true; for the merge",
        "rescale: none | l1 | inv_density; default none; for the merge",
        "    Accepted for mergekit recipes. No effect: masks take no memory here.",
    ):
        assert f"{line}\n" in out


def test_a_method_that_is_not_there_names_the_nearest_one(cli: Cli) -> None:
    ran = cli("methods", "tise")
    assert ran.code == 1
    assert "did you mean 'ties'?" in ran.err


@pytest.mark.slow
def test_the_schema_knows_good_recipes_from_bad_ones(cli: Cli) -> None:
    printed = json.loads(cli("schema").out)
    assert printed == json.loads(json.dumps(schema(all_methods())))
    validator = jsonschema.Draft202012Validator(printed)
    assert validator.is_valid(yaml.safe_load(LINEAR))
    assert not validator.is_valid(yaml.safe_load(LINEAR.replace("models:", "modles:")))


@pytest.mark.long
def test_the_schema_of_moe_recipes_is_printed_on_request(cli: Cli) -> None:
    printed = cli("schema", "moe").out
    assert json.loads(printed) == json.loads(json.dumps(moe_schema(all_methods())))
    validator = jsonschema.Draft202012Validator(json.loads(printed))
    recipe = {"base_model": "a", "experts": [{"source_model": "a"}]}
    assert validator.is_valid(recipe)
    assert not validator.is_valid(yaml.safe_load(LINEAR))
    assert cli("schema", "--moe").out == printed
    assert cli("schema", "recipe").out == cli("schema").out != printed
