"""The JSON Schema says yes to what the parser accepts and no to what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from tests.recipe_help import parse
from weightsmith._methods import all_methods
from weightsmith._planning.recipe import load
from weightsmith._planning.recipe.grammar import moe_schema, schema

jsonschema = pytest.importorskip("jsonschema")


@dataclass(frozen=True)
class FakeParameter:
    name: str
    kind: Literal["float", "int", "bool", "str"] = "float"
    scope: Literal["model", "tensor"] = "tensor"
    doc: str = "A number."
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    booleans: tuple[str, ...] = ()


@dataclass(frozen=True)
class FakeMethod:
    name: str
    parameters: tuple[FakeParameter, ...] = ()


WEIGHT = FakeParameter("weight", scope="model", doc="Share of the model.")
METHODS = (
    FakeMethod("linear", (WEIGHT,)),
    FakeMethod("slerp", (FakeParameter("t", minimum=0, maximum=1),)),
    FakeMethod(
        "ties",
        (
            WEIGHT,
            FakeParameter("density", scope="model"),
            FakeParameter("lambda"),
            FakeParameter("normalize", "bool"),
            FakeParameter("rescale", "str", choices=("none", "l1"), booleans=("none", "l1")),
        ),
    ),
    FakeMethod("other", (FakeParameter("normalize", "int"),)),
)
NAMES = tuple(dict.fromkeys(p.name for m in METHODS for p in m.parameters))


@pytest.fixture(scope="module")
def validator() -> Any:
    document = schema(METHODS)
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


@pytest.mark.long
def test_with_all_methods_both_are_json_schemas() -> None:
    """What both define the same is checked once: the definitions take seconds."""
    both, merge_schema = moe_schema(all_methods()), schema(all_methods())
    jsonschema.Draft202012Validator.check_schema(both)
    merge_schema["$defs"] = {
        name: definition for name, definition in merge_schema["$defs"].items() if both["$defs"].get(name) != definition
    }
    jsonschema.Draft202012Validator.check_schema(merge_schema)
    assert not merge_schema["$defs"]


SLERP = """\
slices:
  - sources:
      - {model: org/base, layer_range: [0, 32]}
      - {model: org/other, layer_range: [0, 32]}
    base_model: org/base
    parameters: {t: 0.1}
merge_method: slerp
base_model: org/base
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
    - value: 0.5
dtype: bfloat16
"""
TIES = """\
models:
  - model: org/base
  - model: org/a@v1.2
    parameters: {density: [1, 0.7, 0.1], weight: {filter: mlp, value: 0.5}}
merge_method: ties
base_model: org/base
parameters: {normalize: true, lambda: 1e-1}
dtype: torch.float16
out_dtype: float32
name: my-merge
"""
MODULES = """\
merge_method: linear
modules:
  text_decoder: {slices: [{sources: [{model: a, layer_range: [0, 4]}], base_model: c}]}
  vision_tower: {models: [{model: {model: b@main}}], parameters: {weight: 1}}
"""
LINEAR = "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n"
ACCEPTED = [
    SLERP,
    TIES,
    MODULES,
    LINEAR,
    LINEAR + "x-own: 1\n_own: {a: [1]}\n",
    LINEAR + "dtype:\nslices: ~\ntokenizer: null\nparameters: ~\n",
    "merge_method: linear\nbase_model: {model: {path: a+b@c, revision: v}}\nmodels: [{model: a@v}]\n",
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: [0, 1]}}]\n",
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1e-5}}]\n",
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: {value: 1, filter: ~}}}]\n",
    "merge_method: linear\nmodels: [{model: ./run/checkpoint-*, parameters: {weight: {ema: 0.9}}}]\n",
    "merge_method: linear\nmodels: [{model: './[ab]?'}]\nparameters: {weight: {lawa: 5}}\n",
    "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: [{filter: m, value: {wsm: 1-sqrt}}, {value: 1}]}\n",
    "merge_method: ties\nmodels: [{model: a}]\nparameters: {normalize: [true, false], rescale: true}\n",
    "merge_method: ties\nmodels: [{model: a}]\nparameters: {rescale: [{filter: m, value: [none, l1]}, {value: l1}]}\n",
    "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, 8]}], residual_weight: 1}]\n",
    LINEAR + "tokenizer_source: union\nchat_template: auto\n",
    "merge_method: linear\nmodels: [{model: a, text: {file: a.txt, rows: 4, tokens: 128}}, {model: b}]\ntext: built-in\n",
    LINEAR + "tokenizer_source: {model: {path: a}}\n",
    LINEAR + "tokenizer: {source: a, tokens: {<x>: {source: a, force: true}, <y>: }, pad_to_multiple_of: 8}\n",
    LINEAR + "tokenizer: {tokens: {<x>: {source: {kind: model_token, model: a, token_id: 3}}, <y>: {source: {kind: zero}}}}\n",
]
REFUSED = [
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: []}}]\n",
    LINEAR + "dtyp: float16\n",
    LINEAR + "weight: 1\n",
    LINEAR + "dtype: auto\n",
    LINEAR + "tokenizer_source: 3\n",
    LINEAR + "text: {file: a.txt, rows: 0}\n",
    LINEAR + "text: {rows: 4}\n",
    LINEAR + "tokenizer: {tokens: []}\n",
    LINEAR + "slices: [{sources: [{model: a, layer_range: [0, 8]}]}]\n",
    "models: [{model: a}]\n",
    "merge_method: linear\n",
    "merge_method: linear\nmodels: []\n",
    "merge_method: linear\nmodels: a\n",
    "merge_method: linear\nmodels: [a]\n",
    "merge_method: linear\nmodels: [{modle: a}]\n",
    "merge_method: linear\nmodels: [{model: a, revision: v}]\n",
    "merge_method: linear\nmodels: [{model: a, layer_range: [0, 8]}]\n",
    "merge_method: linear\nmodels: [{model: a+b+c}]\n",
    "merge_method: linear\nmodels: [{model: a@b@c}]\n",
    "merge_method: linear\nmodels: [{model: 7}]\n",
    "merge_method: linear\nmodels: [{model: {path: a}}]\n",
    "merge_method: linear\nmodels: [{model: {model: a, lora: [b]}}]\n",
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: [[1]]}}]\n",
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: {mlp: 1}}}]\n",
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: [1, {value: 1}]}}]\n",
    "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: {ema: 1}}\n",
    "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: {lawa: 0.5}}\n",
    "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: {wsm: square}}\n",
    "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: {ema: 0.9, lawa: 5}}\n",
    "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: {ema: }}\n",
    "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: [{ema: 0.9}]}\n",
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: }}]\n",
    "merge_method: linear\nmodules: {m: {}}\n",
    "merge_method: linear\nmodules: {}\n",
    "merge_method: passthrough\nslices: [{sources: [{model: a}]}]\n",
    "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, -1]}]}]\n",
    "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0]}]}]\n",
    "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, 8, 9]}]}]\n",
    "[]\n",
]
# Right in form: it takes the plan, which knows the method, to refuse them.
METHOD_DEPENDENT = [
    "merge_method: nosuch\nmodels: [{model: a}]\n",
    "merge_method: slerp\nmodels: [{model: a, parameters: {t: 0.5}}]\n",
    "merge_method: slerp\nmodels: [{model: a}]\nparameters: {t: 2}\n",
    "merge_method: slerp\nmodels: [{model: a}]\nparameters: {t: middle}\n",
    "merge_method: ties\nmodels: [{model: a}]\nparameters: {rescale: l2}\n",
    "merge_method: ties\nmodels: [{model: a}]\nparameters: {nosuch: 1}\n",
    "merge_method: ties\nmodels: [{model: a}]\nparameters: {density: {ema: 0.9}}\n",
]


@pytest.mark.long
@pytest.mark.parametrize("text", ACCEPTED)
def test_an_accepted_recipe_is_valid(validator: Any, text: str) -> None:
    assert parse(text, "r.yml", parameter_names=NAMES)[1] == []
    data = yaml.safe_load(text.replace("merge_method: passthrough", "merge_method: linear"))
    assert [e.message for e in validator.iter_errors(data)] == []


@pytest.mark.parametrize("text", REFUSED)
def test_a_refused_recipe_is_not_valid(validator: Any, text: str) -> None:
    assert parse(text, "r.yml", parameter_names=NAMES)[1] != []
    assert not validator.is_valid(yaml.safe_load(text.replace("merge_method: passthrough", "merge_method: linear")))


@pytest.mark.parametrize("text", METHOD_DEPENDENT)
def test_the_schema_also_knows_the_methods_and_their_parameters(validator: Any, text: str) -> None:
    assert parse(text, "r.yml", parameter_names=NAMES)[1] == []
    assert not validator.is_valid(yaml.safe_load(text))


def test_every_key_has_a_description_and_every_mapping_refuses_strangers() -> None:
    document = schema(METHODS)
    levels = [
        document,
        *(d for name, d in document["$defs"].items() if not name.startswith(("setting_", "value_", "names_of_"))),
    ]
    assert len(levels) == 16
    for level in levels:
        named = level in (document["$defs"]["parameters"], document["$defs"]["model_parameters"])  # by `names_of_parameters`
        assert level["additionalProperties"] is False or named
        assert all(p["description"] for p in level["properties"].values())


def test_a_parameter_says_which_methods_have_it() -> None:
    properties = schema(METHODS)["$defs"]["parameters"]["properties"]
    assert properties["weight"]["description"] == "linear, ties: Share of the model."
    assert list(schema(METHODS)["$defs"]["model_parameters"]["properties"]) == ["weight", "density"]


def test_kinds_that_methods_disagree_on_are_both_valid(validator: Any) -> None:
    for value in (True, 3):
        data = {"merge_method": "ties", "models": [{"model": "a"}], "parameters": {"normalize": value}}
        assert validator.is_valid(data)


OWN = """\
merge_method: {method}
models:
  - model: a
    parameters: {{{own}: 0.5}}
modules:
  text:
    slices:
      - sources: [{{model: a, layer_range: [0, 2], parameters: {{{own}: [0, 1]}}}}]
        parameters: {{{shared}: [{{filter: mlp, value: yes}}, {{value: 1}}]}}
"""


@pytest.mark.parametrize("part", ["models", "modules"])
def test_the_parameters_of_an_own_method_are_its_own_affair(validator: Any, part: str) -> None:
    def valid(method: str, parameters: str, shared: str) -> bool:
        data = yaml.safe_load(OWN.format(method=method, own=parameters, shared=shared))
        del data["modules" if part == "models" else "models"]
        return bool(validator.is_valid(data))

    assert valid("./my.py:blend", "share", "power")
    assert valid("../code/my.py:blend", "weight", "power")
    assert valid("ties", "weight", "lambda") == (part == "models"), "lambda is a number"
    assert not valid("ties", "share", "lambda")
    assert not valid("./my.py", "share", "power"), "no function"
    assert not valid("tise", "weight", "lambda")


def test_what_no_parameter_can_be_is_refused_of_own_methods_too(validator: Any) -> None:
    for value, good in (({"filter": "x"}, False), ({"value": [1, "a"]}, True), ([[1]], False), (None, False)):
        data = {"merge_method": "m.py:f", "models": [{"model": "a"}], "parameters": {"power": value}}
        assert validator.is_valid(data) == good


# ---- recipes of weightsmith moe

ROOT = Path(__file__).parents[3]
MOE_RECIPES = sorted(
    file
    for folder in ("recipes/moe", "recipes/moe_surgery", "moe/recipes")
    for file in (ROOT / "examples" / folder).glob("*.yml")
)


MERGE_RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yml")) + sorted(
    (ROOT / "src" / "weightsmith" / "_app" / "cli" / "presets").glob("*.yml")
)
SHOWN = [(moe_schema, file) for file in MOE_RECIPES] + [(schema, file) for file in MERGE_RECIPES]


@pytest.mark.parametrize(("make_schema", "file"), SHOWN, ids=lambda value: getattr(value, "name", ""))
def test_the_schema_takes_every_recipe_that_is_shown(make_schema: Any, file: Path) -> None:
    other = schema if make_schema is moe_schema else moe_schema
    for document in yaml.safe_load_all(file.read_text()):
        recipe = json.loads(json.dumps(document))  # keys of a JSON mapping are texts
        jsonschema.Draft202012Validator(make_schema(all_methods())).validate(recipe)
        assert not jsonschema.Draft202012Validator(other(all_methods())).is_valid(recipe)


@pytest.mark.parametrize(
    "change",
    [
        {"gate_mode": "hiden"},
        {"experts": []},
        {"experts_per_token": 0},
        {"expert": [{"source_model": "a"}]},
        {"experts": [{"source_model": "a", "positive_prompts": [3]}]},
        {"experts": [{"source_model": "a", "noise_scale": -1}]},
        {"base_model": {"merge_method": "linear", "modles": []}},
        {"prune_experts": {"keep": [0]}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_parser_refuses(change: dict[str, Any]) -> None:
    fine = {"base_model": "a", "experts": [{"source_model": "a"}], "gate_mode": "random"}
    validator = jsonschema.Draft202012Validator(moe_schema(METHODS))
    validator.validate(fine)
    assert load(fine, "moe").problems == ()
    assert load(fine | change, "moe").problems != ()
    assert not validator.is_valid(fine | change)


def test_layers_of_another_stack_are_named_in_full() -> None:
    keep = {"0": [0, 2], "mtp.layers.0": [1, 3]}
    recipe = {"model": "a", "prune_experts": {"keep_by_layer": keep}}
    assert load(recipe, "moe").problems == ()
    jsonschema.Draft202012Validator(moe_schema(METHODS)).validate(recipe)


@pytest.mark.parametrize("keep", [[], [-1], ["a"], {0: [1]}])
def test_the_schema_refuses_experts_that_are_no_list_of_numbers(keep: Any) -> None:
    validator = jsonschema.Draft202012Validator(moe_schema(METHODS))
    validator.validate({"model": "a", "prune_experts": {"keep": [0, 2]}})
    assert not validator.is_valid({"model": "a", "prune_experts": {"keep": keep}})
