"""Keys that mergekit silently ignores: errors that say how to write what was meant, or warnings if harmless."""

from __future__ import annotations

import pytest

from tests.recipe_help import parse
from weightsmith._planning.recipe import Recipe

NAMES = ("weight", "density", "t", "normalize", "int8_mask", "scale", "epsilon")
TOP = "merge_method: ties\nmodels: [{model: a}]\n"


def problems(text: str) -> list[str]:
    return [f"{type(p).__name__}: {p}" for p in parse(text, "r.yml", parameter_names=NAMES)[1]]


def lenient(text: str) -> Recipe:
    recipe, errors = parse(text, "r.yml", lenient=True, parameter_names=NAMES)
    assert [str(p) for p in errors] == []
    assert recipe is not None
    return recipe


SILENT = "; mergekit silently ignored it\n"
INPUT_KEYS = "  -> Write one of model, parameters, text; keys of your own start with x- or _."

# (what stands at the top level, the error)
AT_THE_TOP = [
    (
        "normalize: true",
        f"ParameterError: r.yml:3:1: the parameter 'normalize' at the top level must be inside 'parameters'{SILENT}"
        "  -> Write parameters: {normalize: true} at the top level.",
    ),
    (
        "density: [1, 0.5]",
        f"ParameterError: r.yml:3:1: the parameter 'density' at the top level must be inside 'parameters'{SILENT}"
        "  -> Write parameters: {density: ...} at the top level.",
    ),
    (
        "paramters: {weight: 1}",
        f"UnknownKey: r.yml:3:1: unknown key 'paramters' at the top level (did you mean 'parameters'?){SILENT}"
        "  -> Write 'parameters'.",
    ),
    (
        "parameter: {weight: 1}",
        f"UnknownKey: r.yml:3:1: unknown key 'parameter' at the top level (did you mean 'parameters'?){SILENT}"
        "  -> Write 'parameters'.",
    ),
    (
        "tokenizer-source: union",
        "UnknownKey: r.yml:3:1: unknown key 'tokenizer-source' at the top level (did you mean 'tokenizer_source'?)"
        f"{SILENT}  -> Write 'tokenizer_source'.",
    ),
    (
        "torch_dtype: float16",
        f"UnknownKey: r.yml:3:1: unknown key 'torch_dtype' at the top level (did you mean 'dtype'?){SILENT}  -> Write 'dtype'.",
    ),
    (
        "weigth: 1",
        f"ParameterError: r.yml:3:1: unknown key 'weigth' at the top level (did you mean 'weight'?){SILENT}"
        "  -> Write 'weight' under a 'parameters:' key.",
    ),
    (
        "layer_range: [0, 8]",
        f"UnknownKey: r.yml:3:1: the key 'layer_range' has no meaning at the top level{SILENT}"
        "  -> Move it: it belongs in an entry of 'sources'.",
    ),
    (
        "zzz: 1",
        f"UnknownKey: r.yml:3:1: unknown key 'zzz' at the top level{SILENT}"
        "  -> Write one of merge_method, base_model, models, slices, modules, parameters, dtype, out_dtype, name, "
        "tokenizer_source, tokenizer, chat_template, text; keys of your own start with x- or _.",
    ),
    (
        "embed_slerp: true",
        "ParameterError: r.yml:3:1: embed_slerp has had no effect in mergekit since its tokenizer code was rewritten\n"
        "  -> Remove it; for spherical interpolation of all tensors, embeddings too, use merge_method: slerp.",
    ),
    (
        "input_model_parameters: {a: {weight: 1}}",
        "ParameterError: r.yml:3:1: input_model_parameters is read by no version of mergekit, "
        "though its README named it\n  -> Write 'parameters:' in each entry of 'models' or 'sources'.",
    ),
    (
        "random_seed: 7",
        f"UnknownKey: r.yml:3:1: 'random_seed' is a command-line option, not a key of a recipe{SILENT}"
        "  -> Remove it and pass --seed on the command line.",
    ),
]

# (what stands beside `model:` in an entry of models, the error)
BESIDE_MODEL = [
    (
        "revision: v1.1",
        "UnknownKey: r.yml:4:3: 'revision' beside 'model': mergekit ignored it and used the main branch, not "
        "'v1.1'\n  -> Write model: org/a@v1.1.",
    ),
    (
        "lora: my/adapter",
        "UnknownKey: r.yml:4:3: 'lora' beside 'model': mergekit ignored it and used the model without its adapter\n"
        "  -> Write model: org/a+my/adapter.",
    ),
    (
        "density: 0.5",
        "ParameterError: r.yml:4:3: the parameter 'density' in an entry of 'models' must be inside 'parameters'"
        f"{SILENT}"
        "  -> Write parameters: {density: 0.5} in the same mapping.",
    ),
    (
        "layer_range: [0, 8]",
        "UnknownKey: r.yml:4:3: 'layer_range' in an entry of 'models': mergekit ignored it and merged all layers\n"
        "  -> Write 'slices' with 'sources' instead of 'models', to merge some layers.",
    ),
    (
        "base_model: x",
        f"UnknownKey: r.yml:4:3: the key 'base_model' has no meaning in an entry of 'models'{SILENT}"
        "  -> Move it: it belongs at the top level or in an entry of 'slices'.",
    ),
    (
        "dtype: float16",
        f"UnknownKey: r.yml:4:3: the key 'dtype' has no meaning in an entry of 'models'{SILENT}"
        "  -> Move it: it belongs at the top level.",
    ),
    ("zzz: 1", f"UnknownKey: r.yml:4:3: unknown key 'zzz' in an entry of 'models'{SILENT}{INPUT_KEYS}"),
    (
        "parameters: {dtype: float16}",
        f"UnknownKey: r.yml:4:16: the key 'dtype' has no meaning inside 'parameters'{SILENT}"
        "  -> Move it: it belongs at the top level.",
    ),
    (
        "parameters: {embed_slerp: true}",
        "ParameterError: r.yml:4:16: embed_slerp has had no effect in mergekit since its tokenizer code was rewritten\n"
        "  -> Remove it; for spherical interpolation of all tensors, embeddings too, use merge_method: slerp.",
    ),
]


@pytest.mark.parametrize(("line", "message"), AT_THE_TOP)
def test_a_key_without_meaning_at_the_top_level_is_an_error(line: str, message: str) -> None:
    assert problems(TOP + line + "\n") == [message]


@pytest.mark.parametrize(("line", "message"), BESIDE_MODEL)
def test_a_key_without_meaning_beside_model_is_an_error(line: str, message: str) -> None:
    assert problems(f"merge_method: ties\nmodels:\n- model: org/a\n  {line}\n") == [message]


@pytest.mark.parametrize(("line", "message"), AT_THE_TOP)
def test_leniently_a_key_without_meaning_is_ignored_with_the_same_words(line: str, message: str) -> None:
    recipe = lenient(TOP + line + "\n")
    assert [str(f) for f in recipe.findings] == [message.split(": ", 1)[1]]
    assert recipe.parameters == {}


@pytest.mark.parametrize(("line", "message"), BESIDE_MODEL)
def test_leniently_a_key_without_meaning_beside_model_is_ignored(line: str, message: str) -> None:
    recipe = lenient(f"merge_method: ties\nmodels:\n- model: org/a\n  {line}\n")
    assert [str(f) for f in recipe.findings] == [message.split(": ", 1)[1]]
    assert recipe.models[0].parameters == {}
    assert recipe.models[0].model.revision == ""


def test_one_recipe_has_one_method() -> None:
    text = "merge_method: slerp\nslices:\n- sources: [{model: a, layer_range: [0, 8]}]\n  merge_method: passthrough\n"
    assert problems(text) == [
        "UnknownKey: r.yml:4:3: one recipe has one merge_method, not one in an entry of 'slices'; mergekit silently "
        "ignored it\n  -> Write one recipe per method and name the output of the first as a model of the next."
    ]


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        (
            "int8_mask: true",
            "r.yml:3:1: int8_mask never changes the result: it only chose the type of an intermediate in mergekit",
        ),
        ("int_space: 1", "r.yml:3:1: int_space is read by no version of mergekit and has no effect"),
        ("description: words", "r.yml:3:1: the key 'description' at the top level has no effect"),
        (
            "copy_tokenizer: true",
            "r.yml:3:1: 'copy_tokenizer' is a command-line option, not a key of a recipe; mergekit silently ignored it",
        ),
    ],
)
def test_what_cannot_have_changed_the_result_is_a_warning(line: str, warning: str) -> None:
    recipe, errors = parse(TOP + line + "\n", "r.yml", parameter_names=NAMES)
    assert errors == []
    assert recipe is not None
    assert [str(f).split("\n")[0] for f in recipe.findings] == [warning]


def test_what_changes_nothing_is_a_warning_inside_parameters_too_unless_a_method_has_it() -> None:
    text = TOP + "parameters: {int8_mask: true, int_space: 1}\n"
    recipe, errors = parse(text, "r.yml", parameter_names=NAMES)
    assert errors == []
    assert recipe is not None
    assert list(recipe.parameters) == ["int8_mask"]
    assert [f.where for f in recipe.findings] == ["r.yml:3:31"]


def test_keys_that_mergekit_reads_and_never_uses_are_warnings() -> None:
    recipe, errors = parse(
        "merge_method: passthrough\nslices:\n- sources:\n"
        "  - {model: {model: a, override_architecture: X}, layer_range: [0, 8]}\n  residual_weight: 0.5\n",
        "r.yml",
    )
    assert errors == []
    assert recipe is not None
    assert [str(f) for f in recipe.findings] == [
        "r.yml:4:24: override_architecture is not needed and has no effect: structure comes from tensor names\n  -> Remove it.",
        "r.yml:5:3: residual_weight has no effect: mergekit read it and never used it\n  -> Remove it.",
    ]


def test_two_keys_for_the_tokenizer_exclude_each_other() -> None:
    _, (problem,) = parse(TOP + "tokenizer_source: union\ntokenizer: {source: base}\n", "r.yml")
    assert str(problem) == (
        "r.yml:3:1: 'tokenizer' and 'tokenizer_source' exclude each other\n"
        "  -> Keep one of them; 'source' inside 'tokenizer' says the same as 'tokenizer_source'."
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("tokenizer_source: 3", "r.yml:3:19: 'tokenizer_source' takes a model, not the number 3"),
        ("tokenizer: {source: a, tokens: [x]}", "r.yml:3:32: 'tokens' takes a mapping of tokens, not a list of 1"),
        ("tokenizer: {tokens: {<x>: {force: true}}}", "r.yml:3:22: 'force' for the token '<x>' needs a source"),
        (
            "tokenizer: {tokens: {<x>: {source: {kind: zero, token: y}}}}",
            "r.yml:3:36: a row of zeros has no model and no token",
        ),
        (
            "tokenizer: {tokens: {<x>: {source: {kind: model_token, model: a}}}}",
            "r.yml:3:36: kind 'model_token' needs a model, and one of token and token_id",
        ),
        ("tokenizer: {pad_to_multiple: 8}", "r.yml:3:13: unknown key 'pad_to_multiple' in 'tokenizer' (did you mean"),
    ],
)
def test_keys_of_the_tokenizer_are_checked(text: str, what: str) -> None:
    _, (problem,) = parse(TOP + text + "\n", "r.yml")
    assert str(problem).startswith(what)


def test_a_misplaced_parameter_leaves_a_setting_so_that_it_is_not_reported_as_missing_too() -> None:
    recipe, _ = parse(TOP + "weight: 1\nparamters: {density: 1}\n", "r.yml", parameter_names=NAMES)
    assert recipe is not None
    assert {name: s.reported for name, s in recipe.parameters.items()} == {"weight": True, "density": True}
    assert recipe.parameters["weight"].where == "r.yml:3:1"


def test_a_parameter_in_its_place_wins_over_the_same_one_misplaced() -> None:
    recipe, _ = parse(TOP + "weight: 1\nparameters: {weight: 2}\n", "r.yml", parameter_names=NAMES)
    assert recipe is not None
    assert recipe.parameters["weight"].entries[0].value == 2


def test_a_misspelled_base_model_gives_no_recipe_for_the_plan_to_complain_about() -> None:
    assert parse(TOP + "base_modle: b\n", "r.yml")[0] is None
    assert lenient(TOP + "base_modle: b\n").base_model is None


def test_a_misspelled_required_key_is_reported_once() -> None:
    messages = problems("merge_methd: ties\nmodles: [{model: a}]\n")
    assert [p.split(";")[0] for p in messages] == [
        "UnknownKey: r.yml:1:1: unknown key 'merge_methd' at the top level (did you mean 'merge_method'?)",
        "UnknownKey: r.yml:2:1: unknown key 'modles' at the top level (did you mean 'models'?)",
    ]


def test_leniently_a_misspelled_required_key_is_still_missing() -> None:
    recipe, errors = parse("merge_methd: ties\nmodels: [{model: a}]\n", "r.yml", lenient=True)
    assert recipe is None
    assert [str(p).split("\n")[0] for p in errors] == ["r.yml:1:1: the key 'merge_method' is missing at the top level"]


def test_an_anchor_does_not_excuse_a_misplaced_parameter() -> None:
    text = "merge_method: ties\nmodels:\n- {model: a, weight: &w 1}\n- {model: b, parameters: {weight: *w}}\n"
    assert [p.split(" in ")[0] for p in problems(text)] == ["ParameterError: r.yml:3:14: the parameter 'weight'"]


def test_an_anchor_that_nothing_uses_does_not_excuse_an_unknown_key() -> None:
    assert [p.split(" at the")[0] for p in problems(TOP + "zzz: &w 1\n")] == ["UnknownKey: r.yml:3:1: unknown key 'zzz'"]
    assert problems("zzz: &w {weight: 1}\n" + TOP + "parameters: *w\n") == []


def test_a_key_known_elsewhere_may_still_be_the_name_of_a_parameter() -> None:
    recipe, errors = parse(TOP + "parameters: {dtype: 1}\n", "r.yml", parameter_names=(*NAMES, "dtype"))
    assert errors == []
    assert recipe is not None
    assert recipe.parameters["dtype"].entries[0].value == 1
