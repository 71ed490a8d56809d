"""Of every kind of value the reader and the JSON Schema say yes and no to the same values."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from weightsmith._planning.recipe import load
from weightsmith._planning.recipe.grammar import LEVELS, MOE_LEVELS, moe_schema
from weightsmith._planning.recipe.kinds import METHOD_NAME, Key, Kind
from weightsmith._planning.recipe.load import Walker
from weightsmith._planning.recipe.values import MODEL_PARAMETERS, PARAMETERS
from weightsmith._planning.recipe.yaml import from_python

KEYS: dict[Kind, Key] = {key.kind: key for level in (*LEVELS, *MOE_LEVELS) for key in level.keys}
"""Each kind with a key that takes it."""
VALUES: list[Any] = [
    *(7, -1, 0, 1, 1.5, 1024, 1025, 10**6, True, False),
    *("", "x", "a+b", "a@v", "a@b@c", "a+b@v", "a+b+c", "bfloat16"),
    *("torch.bfloat16", "bf16", "auto", "int8", "1e-5", "first", "mean"),
    *("linear", "cosine", "sdxl", "0.1, -2,.5", "0.1,,2", "hidden", "cheap_embed", "union", "base", "zero"),
    *([], [1], [0, 2], [1, 2, 3], [-1, 2], [1, "x"], ["a"], ["a", ""]),
    *([True], [1.5], [[]], [[1, 2]], [[0], [1.5]], [[-1]], [[["a"]]]),
    *({}, {"a": 1}, {"0": [1]}, {"0": []}, {"0": [[1]], "1": [[0, 2]]}, {"x": [1]}, {"0": [-1]}, {"0": [[1.5]]}, {"0": 1}),
    *({"path": "a+b"}, {"path": "a", "revision": "v"}, {"path": 1}, {"revision": "v"}, {"pth": "a"}),
    *({"model": "a"}, {"model": "a+b", "lora": "c"}),
    *({"model": {"path": "a"}, "lora": {"path": "b"}}, {"model": "a", "x-note": 1}),
    *({"ema": 0.9}, {"ema": 1}, {"lawa": 5}, {"lawa": 0.5}, {"wsm": "1-sqrt"}),
    *({"wsm": "x"}, {"ema": 0.5, "lawa": 2}, {"ema": None}),
    *([{"model": "a"}], [{"model": "a"}, {"modle": "b"}]),
    *([{"model": "a", "layer_range": [0, 2]}], [{"layer_range": [0, 2]}], ["a"]),
    *([{"sources": [{"model": "a", "layer_range": [0, 2]}]}], [{"sources": []}], [{"sources": [{"model": "a"}]}]),
    *({"text": {"models": [{"model": "a"}]}}, {"text": {}}, {"text": 1}),
    *([{"source_model": "a"}], [{"source_model": {"model": "a"}, "copies": 2}]),
    *([{"source_model": "a", "copies": 0}], [{"copies": 1}]),
    *({"keep": [0]}, {"keep": []}, {"saliency": "f", "experts": 2}),
    *({"groups": [[0]]}, {"groups": [[0]], "groups_by_layer": {"0": [[0]]}}),
    *({"groups": [[0, 1]], "match": True, "router": "mean"}),
    *({"groups": [[0, 1]], "match": 1}, {"groups": [[0, 1]], "router": "last"}),
    *({"kind": "zero"}, {"kind": "zero", "model": "a"}, {"kind": "other"}, {"kind": "zero", "token": "x"}),
    *({"kind": "model_token", "model": "a", "token": "x"}, {"kind": "model_token", "model": "a", "token_id": 3}),
    *({"kind": "model_token", "model": "a"}, {"kind": "model_token", "token": "x"}, {"kind": "model_token"}),
    {"kind": "model_token", "model": "a", "token": "x", "token_id": 3},
    *({"<a>": {"source": "a"}}, {"<a>": None}, {"<a>": {}}, {"<a>": {"source": "a", "force": True}}, {"<a>": {"force": True}}),
    *({"<a>": {"source": {"kind": "zero"}}}, {"<a>": 3}, {"": {}}, {"<a>": {"source": {"kind": "zero"}, "more": 1}}),
    *({"source": "union"}, {"tokens": {}}, {"pad_to_multiple_of": 64}, {"pad_to_multiple_of": 0}, {"sources": "union"}),
]  # fmt: skip


def accepted(key: Key, value: Any) -> bool:
    document = from_python({key.name: value})
    assert document.root is not None
    assert isinstance(document.root.value, dict)
    walk = Walker(document, "recipe", lenient=False, parameter_names=())
    read = key.kind.read(document.root.value[key.name], key, walk)
    assert (read is None) <= bool(walk.problems or walk.findings), "what is refused is reported"
    return not walk.problems


BY_METHOD = (METHOD_NAME, PARAMETERS, MODEL_PARAMETERS)  # their schemas know more than their readers: test_schema.py


@pytest.mark.parametrize("key", [KEYS[kind] for kind in KEYS if kind not in BY_METHOD], ids=lambda key: key.name)
def test_the_schema_of_a_kind_takes_what_its_reader_takes(key: Key) -> None:
    definitions = {**moe_schema([])["$defs"], "names_of_methods": {"type": "string"}}
    schema = jsonschema.Draft202012Validator({**key.kind.schema, "$defs": definitions})
    different = [value for value in VALUES if schema.is_valid(value) != accepted(key, value)]
    assert different == []


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_every_kind_tells_some_values_from_others_and_has_words(key: Key) -> None:
    taken = [accepted(key, value) for value in VALUES]
    words = key.kind.words
    assert words.strip()
    assert any(taken) == (words != "an error for now")
    assert all(taken) == (words == "anything; a warning")


@pytest.mark.parametrize("rule", ["ema", "lawa"])
def test_a_number_too_large_for_a_float_is_a_problem_of_the_recipe(rule: str) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": {rule: 10**400}}}]}
    (problem,) = load(recipe, None, parameter_names=("weight",)).problems
    assert f"{rule!r} takes a" in str(problem)
    assert "not a number too large for a float" in str(problem)


def test_these_keys_must_be_given() -> None:
    required = {f"{level.name}.{key.name}" for level in (*LEVELS, *MOE_LEVELS) for key in level.keys if key.required}
    assert required == {
        *("recipe.merge_method", "input.model", "slice.sources", "source.model", "source.layer_range", "condition.value"),
        *("block_weights.blocks", "block_weights.values"),
        *("reference.model", "path.path", "upcycling.base_model", "upcycling.experts", "expert.source_model", "surgery.model"),
        *("row.kind", "text_file.file"),
    }
