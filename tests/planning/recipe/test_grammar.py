"""The grammar: every form mergekit-yaml accepts is accepted, and what it is read as."""

from __future__ import annotations

import pytest

from tests.recipe_help import parse
from weightsmith._base.tensors import DTYPES
from weightsmith._planning.recipe import Entry, ModelRef, Recipe, Setting

NAMES = ("weight", "density", "t", "normalize", "lambda", "scale", "rescale", "gamma")


def accepted(text: str) -> Recipe:
    recipe, problems = parse(text, "r.yml", parameter_names=NAMES)
    assert [str(p) for p in problems] == []
    assert recipe is not None
    return recipe


def refused(text: str) -> list[str]:
    _, problems = parse(text, "r.yml", parameter_names=NAMES)
    return [f"{type(p).__name__}: {p}" for p in problems]


SLERP = """\
slices:
  - sources:
      - model: org/base-7b
        layer_range: [0, 32]
      - model: org/other-7b
        layer_range: [0, 32]
merge_method: slerp
base_model: org/base-7b
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # the rest
dtype: bfloat16
"""

TIES = """\
models:
  - model: /root/base
    # no parameters for the base
  - model: org/a@v1.2
    parameters:
      density: [1, 0.7, 0.1] # gradient
      weight: 1.0
  - model: ./local folder/b
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: /root/base
parameters:
  normalize: true
  lambda: 1e-1
dtype: torch.float16
out_dtype: float32
name: my-merge
"""

MODULES = """\
merge_method: linear
modules:
  text_decoder:
    slices:
      - sources:
          - {model: a, layer_range: [0, 4], parameters: {weight: 1}}
        base_model: c
        parameters: {weight: 0.25}
  vision_tower:
    models:
      - model: {model: {path: odd@name+x, revision: main}}
      - model: {model: b@main}
    parameters:
      weight: {value: [0, 1], filter: "*"}
"""


def test_a_slerp_recipe_of_slices() -> None:
    recipe = accepted(SLERP)
    assert recipe.merge_method == "slerp"
    assert recipe.base_model == ModelRef("org/base-7b")
    assert recipe.dtype == DTYPES["BF16"]
    assert recipe.out_dtype is None
    assert (recipe.models, recipe.modules) == ((), ())
    (one,) = recipe.slices
    assert [(s.model.path, s.layer_range) for s in one.sources] == [("org/base-7b", (0, 32)), ("org/other-7b", (0, 32))]
    assert recipe.parameters["t"] == Setting(
        (
            Entry((0, 0.5, 0.3, 0.7, 1), "self_attn", "r.yml:12:14", "r.yml:11:15"),
            Entry((1, 0.5, 0.7, 0.3, 0), "mlp", "r.yml:14:14", "r.yml:13:15"),
            Entry(0.5, None, "r.yml:15:14"),
        ),
        "r.yml:10:3",
    )
    assert recipe.text == SLERP
    assert recipe.findings == ()


def test_positions_of_everything_the_plan_may_have_to_point_at() -> None:
    recipe = accepted(SLERP)
    source = recipe.slices[0].sources[1]
    assert recipe.slices[0].where == "r.yml:2:5"
    assert source.where == "r.yml:5:9"
    assert source.model.where == "r.yml:5:16"
    assert source.range_where == "r.yml:6:22"
    assert recipe.base_model is not None
    assert recipe.base_model.where == "r.yml:8:13"
    assert recipe.at("merge_method") == "r.yml:7:1"
    assert recipe.at("out_dtype") == "r.yml"


def test_a_ties_recipe_of_models() -> None:
    recipe = accepted(TIES)
    base, a, b = recipe.models
    assert base.parameters == {}
    assert a.model == ModelRef("org/a", "v1.2")
    assert str(a.model) == "org/a@v1.2"
    assert a.parameters["density"].entries == (Entry((1, 0.7, 0.1), None, "r.yml:6:16"),)
    assert b.model.path == "./local folder/b"
    assert [(e.filter, e.value) for e in b.parameters["weight"].entries] == [("mlp", 0.5), (None, 0)]
    assert recipe.parameters["normalize"].entries[0].value is True
    assert recipe.parameters["lambda"].entries[0].value == "1e-1"
    assert recipe.dtype == DTYPES["F16"]
    assert recipe.out_dtype == DTYPES["F32"]
    assert recipe.name == "my-merge"


def test_a_recipe_of_modules() -> None:
    recipe = accepted(MODULES)
    text, vision = recipe.modules
    assert (text.name, vision.name) == ("text_decoder", "vision_tower")
    assert text.models == ()
    assert text.slices[0].base_model == ModelRef("c")
    assert text.slices[0].parameters["weight"].at("x", 0.0) == (0.25, Entry(0.25, None, "r.yml:8:30"))
    assert [m.model for m in vision.models] == [ModelRef("odd@name+x", "main"), ModelRef("b", "main")]
    assert vision.parameters["weight"].entries == (Entry((0, 1), "*", "r.yml:14:23", "r.yml:14:39"),)
    assert vision.where == "r.yml:9:3"


def test_anchors_aliases_merge_keys_and_a_place_of_ones_own_for_them() -> None:
    recipe = accepted(
        "common: &common {weight: 0.5, density: 0.4}\n"
        "x-note: anything\n"
        "_scratch: [1, 2]\n"
        "merge_method: ties\n"
        "base_model: &base org/base\n"
        "models:\n"
        "  - {model: *base}\n"
        "  - {model: a, parameters: *common}\n"
        "  - {model: b, parameters: {<<: *common, weight: 1}}\n"
    )
    assert recipe.findings == ()
    assert [m.model.path for m in recipe.models] == ["org/base", "a", "b"]
    values = [{n: s.entries[0].value for n, s in m.parameters.items()} for m in recipe.models]
    assert values == [{}, {"weight": 0.5, "density": 0.4}, {"weight": 1, "density": 0.4}]


def test_keys_without_a_value_count_as_absent() -> None:
    recipe = accepted(
        "merge_method: linear\nslices:\ndtype: ~\nbase_model: null\nparameters:\ntokenizer_source:\nmodels: [{model: a}]\n"
    )
    assert (recipe.dtype, recipe.base_model, recipe.parameters) == (None, None, {})


def test_a_null_filter_is_kept() -> None:
    recipe = accepted("merge_method: linear\nmodels: [{model: a}]\nparameters: {t: [{filter: ~, value: 1}]}\n")
    assert recipe.parameters["t"].entries[0] == Entry(1, None, "r.yml:3:37")


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_the_floating_dtypes_are_known_with_and_without_torch(name: str) -> None:
    recipe = accepted(f"merge_method: linear\nmodels: [{{model: a}}]\ndtype: {name}\nout_dtype: torch.{name}\n")
    assert recipe.dtype == recipe.out_dtype
    assert recipe.dtype is not None
    assert recipe.dtype.torch == name


CHOICES = "  -> Write one of bfloat16, float16, float32, float64."


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("bfloat61", f"UnknownName: r.yml:2:8: unknown dtype 'bfloat61' (did you mean 'bfloat16'?)\n{CHOICES}"),
        ("bf16", f"UnknownName: r.yml:2:8: unknown dtype 'bf16' (did you mean 'bfloat16'?)\n{CHOICES}"),
        ("torch.half", f"UnknownName: r.yml:2:8: unknown dtype 'torch.half' (did you mean 'float16'?)\n{CHOICES}"),
        (
            "auto",
            "UnknownName: r.yml:2:8: dtype: auto is not a dtype\n  -> Remove the line: the default is the dtype of the inputs.",
        ),
        (
            "int64",
            "UnknownName: r.yml:2:8: dtype: int64 would round every weight to a whole number\n"
            f"{CHOICES} Integer tensors keep their own dtype anyway.",
        ),
        (
            "float8_e4m3fn",
            "Unsupported: r.yml:2:8: dtype: float8_e4m3fn is not supported: 8-bit floats need scales that a plain merge"
            f" does not make\n{CHOICES}",
        ),
        ("16", f"SyntaxProblem: r.yml:2:8: 'dtype' takes the name of a dtype, not the number 16\n{CHOICES}"),
    ],
)
def test_other_dtypes_are_refused_with_the_reason(value: str, message: str) -> None:
    text = f"merge_method: linear\ndtype: {value}\nmodels: [{{model: a}}]\n"
    assert refused(text) == [message]
    assert parse(text, "r.yml")[0] is not None


RANGE = "  -> Write [first, end]: [0, 8] is the first eight layers, 0 to 7."


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            "[0, -1]",
            "layer_range [0, -1]: negative numbers do not count from the end\n"
            "  -> Write the number of layers in full: [0, 32] for all layers of a model of 32.",
        ),
        (
            "[0, 0]",
            f"layer_range [0, 0] holds no layers, because the end is not included\n{RANGE}",
        ),
        ("[8, 4]", f"layer_range [8, 4] ends before it starts\n{RANGE}"),
        ("[0, true]", f"'layer_range' takes two whole numbers, not [number 0, true]\n{RANGE}"),
        ("[0, 8.5]", f"'layer_range' takes two whole numbers, not [number 0, number 8.5]\n{RANGE}"),
        ("0-8", f"'layer_range' takes two whole numbers, not the text '0-8'\n{RANGE}"),
        ("[0, 99999999999999999999]", f"'layer_range' reaches beyond layer 1,000,000\n{RANGE}"),
    ],
)
def test_layer_ranges_that_name_no_layers_are_refused(written: str, message: str) -> None:
    text = f"merge_method: passthrough\nslices:\n- sources:\n  - model: a\n    layer_range: {written}\n"
    assert refused(text) == [f"SyntaxProblem: r.yml:5:18: {message}"]


ONLY_ONE = "SyntaxProblem: r.yml:3:1: exactly one of models, slices or modules is allowed at the top level, not 2"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "models: [{model: a}]\n",
            [
                "SyntaxProblem: r.yml:1:1: the key 'merge_method' is missing at the top level\n"
                "  -> Add merge_method. The method; `weightsmith methods` lists them."
            ],
        ),
        (
            "merge_method: linear\n",
            [
                "SyntaxProblem: r.yml:1:1: one of models, slices or modules is needed at the top level\n"
                "  -> Add models: and a list below it."
            ],
        ),
        (
            "merge_method: linear\nmodels: [{model: a}]\nmodules: {m: {models: [{model: a}]}}\n",
            [f"{ONLY_ONE}\n  models at r.yml:2:1\n  modules at r.yml:3:1\n  -> Keep one of them."],
        ),
        (
            "merge_method: linear\nmodules:\n  m: {}\n",
            ["SyntaxProblem: r.yml:3:6: one of models or slices is needed in a module\n  -> Add models: and a list below it."],
        ),
        (
            "- merge_method: linear\n",
            [
                "SyntaxProblem: r.yml:1:1: expected a mapping at the top level, not a list of 1\n"
                "  -> Write a mapping with merge_method."
            ],
        ),
        (
            "merge_method: [linear]\nmodels: [{model: a}]\n",
            ["SyntaxProblem: r.yml:1:15: 'merge_method' takes a text, not a list of 1"],
        ),
        (
            "merge_method:\nmodels: [{model: a}]\n",
            [
                "SyntaxProblem: r.yml:1:1: the key 'merge_method' at the top level has no value\n"
                "  -> Write a value after 'merge_method:'."
            ],
        ),
        (
            "merge_method: linear\nmodels: org/a\n",
            [
                "SyntaxProblem: r.yml:2:9: 'models' takes a list, not the text 'org/a'\n"
                "  -> Write each entry after a dash: - model: ..."
            ],
        ),
        (
            "merge_method: linear\nmodels: []\n",
            ["SyntaxProblem: r.yml:2:9: 'models' is empty\n  -> Write at least one entry: - model: ..."],
        ),
        (
            "merge_method: linear\nmodels:\n- org/a\n",
            [
                "SyntaxProblem: r.yml:3:3: expected a mapping in an entry of 'models', not the text 'org/a'\n"
                "  -> Write model: org/a."
            ],
        ),
        (
            "merge_method: linear\nmodels:\n- parameters: {weight: 1}\n",
            [
                "SyntaxProblem: r.yml:3:3: the key 'model' is missing in an entry of 'models'\n"
                "  -> Add model. The model: `path_or_hub_id[@revision]`; or a pattern, for all folders that match."
            ],
        ),
        (
            "merge_method: passthrough\nslices:\n- sources:\n  - model: a\n",
            [
                "SyntaxProblem: r.yml:4:5: the key 'layer_range' is missing in an entry of 'sources'\n"
                "  -> Add layer_range. `[first, end]`: layers first to end - 1, counted from 0."
            ],
        ),
        (
            "merge_method: linear\nmodules: [text_decoder]\n",
            [
                "SyntaxProblem: r.yml:2:10: 'modules' takes a mapping of names, not a list of 1\n"
                "  -> Write each module under its name: text_decoder: {models: [...]}."
            ],
        ),
        (
            "~\n",
            ["SyntaxProblem: r.yml:1:1: the recipe is empty\n  -> It needs merge_method and models, slices or modules."],
        ),
    ],
)
def test_a_broken_skeleton_is_reported_and_gives_no_recipe(text: str, messages: list[str]) -> None:
    assert refused(text) == messages
    assert parse(text, "r.yml")[0] is None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "7",
            "SyntaxProblem: r.yml:2:18: 'model' takes a model, not the number 7\n"
            "  -> Write path_or_hub_id[@revision]; put digits in quotes.",
        ),
        (
            '""',
            "SyntaxProblem: r.yml:2:18: cannot read the model '': no path or Hub id\n"
            "  -> Write path_or_hub_id or path_or_hub_id@revision.",
        ),
        (
            "org/a@",
            "SyntaxProblem: r.yml:2:18: cannot read the model 'org/a@': no revision after '@'\n"
            "  -> Write path_or_hub_id or path_or_hub_id@revision.",
        ),
        (
            "a@b@c",
            "SyntaxProblem: r.yml:2:18: cannot read the model 'a@b@c': more than one '@'\n"
            "  -> A folder whose name holds '+' or '@' is written model: {model: {path: ...}}.",
        ),
        (
            "a+b+c",
            "SyntaxProblem: r.yml:2:18: cannot read the model 'a+b+c': more than one '+'\n"
            "  -> A folder whose name holds '+' or '@' is written model: {model: {path: ...}}.",
        ),
        (
            "org/a@v1+",
            "SyntaxProblem: r.yml:2:18: cannot read the model 'org/a@v1+': no adapter after '+'\n"
            "  -> Write base_path_or_hub_id+adapter_path_or_hub_id.",
        ),
        (
            "+org/b",
            "SyntaxProblem: r.yml:2:18: cannot read the model '+org/b': no model before '+'\n"
            "  -> Write base_path_or_hub_id+adapter_path_or_hub_id.",
        ),
        (
            "{model: a, lora: [b]}",
            "SyntaxProblem: r.yml:2:35: 'lora' takes a model, not a list of 1\n  -> Write path_or_hub_id[@revision].",
        ),
        (
            "{path: a}",
            "UnknownKey: r.yml:2:19: the key 'path' has no meaning in a model reference; mergekit silently"
            " ignored it\n  -> Move it: it belongs in a model path.",
        ),
        (
            "{model: [a]}",
            "SyntaxProblem: r.yml:2:26: 'model' takes a model, not a list of 1\n  -> Write path_or_hub_id[@revision].",
        ),
        (
            "{model: {revision: v1}}",
            "SyntaxProblem: r.yml:2:26: the key 'path' is missing in a model path\n"
            "  -> Add path. Folder, weight file, or Hub id `org/name`.",
        ),
    ],
)
def test_model_references_that_cannot_be_read(model: str, message: str) -> None:
    text = refused(f"merge_method: linear\nmodels: [{{model: {model}}}]\n")
    assert message in text
    assert parse(f"merge_method: linear\nmodels: [{{model: {model}}}]\n", "r.yml")[0] is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "",
            "ParameterError: r.yml:3:14: the parameter 'weight' has no value\n"
            "  -> Write weight: and a value, or remove the line.",
        ),
        (
            "[]",
            "ParameterError: r.yml:3:22: the list of 'weight' is empty\n"
            "  -> Write one value, weight: 0.5, or values from the first layer to the last, weight: [0.2, 0.8].",
        ),
        (".nan", "ParameterError: r.yml:3:22: 'weight' is nan; a value must be finite\n  -> Write a finite number."),
        (
            "[1, -.inf]",
            "ParameterError: r.yml:3:26: an entry of 'weight' is -inf; a value must be finite\n  -> Write a finite number.",
        ),
        (
            "1" + "0" * 400,
            "ParameterError: r.yml:3:22: 'weight' is a number too large for a float; a value must be finite\n"
            "  -> Write a finite number.",
        ),
        (
            "[1, [2]]",
            "ParameterError: r.yml:3:26: an entry of 'weight' takes a number, true, false or a text, not a list of 1\n"
            "  -> Write one value, such as 0.5.",
        ),
        (
            "[1, ~]",
            "ParameterError: r.yml:3:26: an entry of 'weight' takes a number, true, false or a text, not nothing\n"
            "  -> Write one value, such as 0.5.",
        ),
        (
            "{mlp: 1}",
            "ParameterError: r.yml:3:22: a mapping here takes 'value' and 'filter', not a mapping with the keys mlp\n"
            "  -> Write a list of mappings: - {filter: mlp, value: 0.5}.",
        ),
        (
            "{value: {a: 1}}",
            "ParameterError: r.yml:3:30: 'value' takes a number, true, false or a text, not a mapping with the keys a\n"
            "  -> Write one value, such as 0.5.",
        ),
        (
            "{value: ~}",
            "SyntaxProblem: r.yml:3:23: the key 'value' in a value with a filter has no value\n"
            "  -> Write a value after 'value:'.",
        ),
        ("{value: 1, filter: [a]}", "SyntaxProblem: r.yml:3:41: 'filter' takes a text, not a list of 1"),
        (
            "[1, {value: 1}]",
            "SyntaxProblem: r.yml:3:22: the list of 'weight' mixes plain values with mappings of filter and"
            " value\n  -> Write each entry as a mapping; one without a filter is for the rest.",
        ),
    ],
)
def test_a_wrong_value_is_reported_once_and_leaves_a_setting_that_says_so(value: str, message: str) -> None:
    text = f"merge_method: linear\nmodels: [{{model: a}}]\nparameters: {{weight: {value}, t: 1}}\n"
    assert refused(text) == [message]
    recipe, _ = parse(text, "r.yml")
    assert recipe is not None
    assert recipe.parameters["weight"].reported
    assert recipe.parameters["weight"].at("x", 0.0) is None
    assert recipe.parameters["t"].entries[0].value == 1


def test_all_problems_come_at_once_in_the_order_of_the_text_each_once() -> None:
    text = (
        "merge_method: ties\n"
        "bad: &w {weight: .nan}\n"
        "models:\n"
        "  - {model: a, parameters: *w}\n"
        "  - {model: b@, parameters: *w}\n"
        "  - {modle: c}\n"
        "dtype: bf16\n"
        "dtype: bf16\n"
        "residual: auto\n"
    )
    assert [p.split(": ")[1] for p in refused(text)] == [
        "r.yml:2:18",
        "r.yml:5:13",
        "r.yml:6:6",
        "r.yml:8:1",
        "r.yml:8:8",
        "r.yml:9:1",
    ]
