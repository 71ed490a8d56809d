"""An option is said once: every field of a record has a flag, a keyword, a place in the docs, and one check."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import weightsmith
from tests.cli_help import Cli, cli
from weightsmith._activations.options import StatisticsSettings
from weightsmith._app.cli.app import make_app
from weightsmith._base import options
from weightsmith._base.errors import PlanError
from weightsmith._base.options import Option, read_options
from weightsmith._base.tensors import DTYPES, DType
from weightsmith._execution.options import RunOptions
from weightsmith._features.adapters.options import ConvertSettings, ExtractSettings
from weightsmith._features.quantisation.formats import FORMATS
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._features.transplant.approximations import APPROXIMATIONS
from weightsmith._features.transplant.options import TransplantSettings
from weightsmith._models.formats.exl2.model import HEAD
from weightsmith._models.formats.unfused import PLAIN_HEAD
from weightsmith._planning.options import RecipeOptions
from weightsmith._reports import keywords
from weightsmith._reports.options import AutoSettings, EvaluateSettings, TuneSettings, WriteSettings

__all__ = ["cli"]

COMMANDS = get_command(make_app()).commands  # type: ignore[attr-defined]
EVERY = [(record, option) for record in options.option_records() for option in options.options_of(record).values()]
CASES = pytest.mark.parametrize(
    ("record", "option"), EVERY, ids=[f"{record.__name__}.{option.name}" for record, option in EVERY]
)
KEYWORDS = {
    RecipeOptions: keywords.RecipeKeywords,
    QuantizeSettings: keywords.QuantizeKeywords,
    ExtractSettings: keywords.ExtractKeywords,
    ConvertSettings: keywords.ConvertKeywords,
    TransplantSettings: keywords.TransplantKeywords,
    EvaluateSettings: keywords.EvaluateKeywords,
    StatisticsSettings: keywords.StatisticsKeywords,
    WriteSettings: keywords.WriteKeywords,
    AutoSettings: keywords.AutoKeywords,
    TuneSettings: keywords.TuneKeywords,
    RunOptions: keywords.RunKeywords,
}


PARAMETERS = {
    EvaluateSettings: ("text",),
    TuneSettings: ("report_text", "reference"),
    AutoSettings: ("text",),
}
"""Options that are parameters of their function."""


def flags_of(command: str) -> dict[str, Any]:
    """The parameters of a command by flag."""
    return {flag: parameter for parameter in COMMANDS[command].params for flag in (*parameter.opts, *parameter.secondary_opts)}


def section(command: str) -> str:
    """What docs/cli.md says of a command."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    listed = text.partition(f"<!-- options of {command}:begin -->")[2].partition(":end -->")[0]
    shared = [title for title in ("recipes", "quantised formats", "runs") if f"[{title}](#options-of-" in listed]
    return "\n".join(
        [listed, *(row for title in shared for row in section(title).splitlines() if f"`{command}`" in row.split(" | ")[-1])]
    )


# ---- every option is everywhere


def test_the_records_are_these() -> None:
    assert set(options.option_records()) == set(KEYWORDS)


@CASES
def test_an_option_has_its_flag_in_every_command_that_names_it(record: type[Any], option: Option) -> None:
    assert option.commands
    for command in option.commands:
        name = {"evaluate": "eval"}.get(command, command.replace("_", "-"))
        flags = flags_of(name)
        for spelling in option.spellings(command):
            for flag in spelling.split("/"):
                assert flags[flag].name == option.keyword(command)
                assert f"`{flag}" in section(name)
        shown = " ".join(flags[option.flag(command)].help.split())
        assert shown.startswith(option.sentence(lambda other: options.find_option(other).flag()))


@CASES
def test_type_checkers_know_an_option_and_its_type(record: type[Any], option: Option) -> None:
    if option.name in PARAMETERS.get(record, ()):
        return  # a parameter of the function
    known = typing.get_type_hints(KEYWORDS[record])[option.name]
    assert known is Any if option.type is DType else (type(None) in typing.get_args(known)) == option.optional


def test_type_checkers_know_no_keyword_that_is_no_option() -> None:
    for record, known in KEYWORDS.items():
        shared = set(keywords.RunKeywords.__annotations__) if known is not keywords.RunKeywords else set()
        if known is keywords.TuneKeywords:
            shared |= {*keywords.RecipeKeywords.__annotations__, *keywords.EvaluateKeywords.__annotations__}
        assert set(known.__annotations__) - shared <= set(options.options_of(record))


@CASES
def test_an_option_has_help_that_says_its_unit(record: type[Any], option: Option) -> None:
    assert record.__doc__ is not None
    assert option.name in record.__doc__
    assert len(option.help) > 10
    assert not option.help.endswith(".")
    assert option.nbytes == (option.metavar == "SIZE")
    assert (option.metavar == "") == (option.type is bool)
    for other in re.findall(r"`(\w+)`", option.help):
        assert options.find_option(other)


@CASES
def test_a_default_is_a_value_that_the_option_allows(record: type[Any], option: Option) -> None:
    assert getattr(record(), option.name) == option.default
    assert option.read(option.default) == option.default


def test_a_keyword_has_one_flag_whatever_the_record() -> None:
    flags: dict[str, str] = {}
    for _, option in EVERY:
        assert flags.setdefault(option.name, option.flag()) == option.flag()


def test_the_dtype_of_the_output_has_one_name_in_all_commands() -> None:
    for record, option in EVERY:
        for command in option.commands:
            assert option.keyword(command) != "dtype", f"{record.__name__} in {command}"
    having = {
        command for command, definition in COMMANDS.items() if any("--out-dtype" in param.opts for param in definition.params)
    }
    assert having == {"merge", "moe", "plan", "preview", "quantize", "dequantize", "extract-lora", "convert-lora"}


def test_choices_are_what_the_features_have() -> None:
    assert options.find_option("quantize").values == tuple(FORMATS)
    assert options.find_option("head_bits").values == (*HEAD, PLAIN_HEAD)
    assert tuple(approximation.name for approximation in APPROXIMATIONS) == options.find_option("approximation").values


# ---- one check


WRONG: Mapping[Any, tuple[Any, str]] = {
    bool: ("maybe", "must be True or False, not 'maybe'"),
    int: ("many", "must be a whole number, not 'many'"),
    float: ("half", "must be a number, not 'half'"),
    str: (5, "must be a string, not 5"),
    DType: ("float17", "must be one of bfloat16, float16, float32, float64 (did you mean 'float16'?), not 'float17'"),
    tuple: ("name", "must be a list of strings, not 'name'"),
    Mapping: ("parameters.t", "must be a mapping such as {'parameters.t': 0.3}, or --set parameters.t=0.3, not 'parameters.t'"),
}
SIZE = "must be a size such as 800MB, 5GB or 2GiB, or a number of bytes, not 'many'"


@CASES
def test_a_value_of_another_type_is_refused(record: type[Any], option: Option) -> None:
    value, said = WRONG[option.type]
    with pytest.raises(PlanError) as caught:
        read_options("merge", {option.keyword("merge"): value}, record)
    (problem,) = caught.value.problems
    assert problem.finding.where == f"{option.flag()} ({option.name})"
    assert problem.finding.what == (SIZE if option.nbytes else said)


@CASES
def test_none_is_a_value_where_the_type_says_so(record: type[Any], option: Option) -> None:
    if option.optional:
        assert option.read(None) is None
    else:
        with pytest.raises(ValueError, match="not None"):
            option.read(None)


CALLS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "merge": (weightsmith.merge, ("r.yml", "out")),
    "moe": (weightsmith.moe, ("r.yml", "out")),
    "quantize": (weightsmith.quantize, ("m", "out", "int8")),
    "dequantize": (weightsmith.dequantize, ("m", "out")),
    "extract_lora": (weightsmith.extract_lora, ("a", "b", "out")),
    "convert_lora": (weightsmith.convert_lora, ("a", "out")),
    "transplant_tokenizer": (weightsmith.transplant_tokenizer, ("a", "b", "out")),
    "statistics": (weightsmith.statistics, ("m", "built-in", "out")),
    "run": (weightsmith.run, ("plan.json", "out")),
}
OUT_OF_RANGE = [
    ("merge", "threads", "0", 0, "must be at least 1, not 0"),
    ("merge", "threads", "two", "two", "must be a whole number, not 'two'"),
    ("merge", "max_memory_bytes", "lots", "lots", SIZE.replace("many", "lots")),
    ("merge", "max_shard_bytes", "0", 0, "must be at least 1, not 0"),
    ("merge", "out_dtype", "int8", "int8", "must be one of bfloat16, float16, float32, float64, not 'int8'"),
    ("merge", "adapter_space", "cor", "cor", "must be one of core, knots, compressed (did you mean 'core'?), not 'cor'"),
    ("merge", "bits", "0", 0.0, "must be more than 0, not 0.0"),
    ("merge", "bits", "nan", math.nan, "must be a number, not "),
    ("merge", "head_bits", "7", 7, "must be one of 2, 3, 4, 5, 6, 8, 16, not 7"),
    ("moe", "measure", "fast", "fast", "must be one of proxy, full, not 'fast'"),
    ("quantize", "group_size", "-1", -1, "must be at least 1, not -1"),
    ("dequantize", "out_dtype", "float17", "float17", WRONG[DType][1]),
    ("extract_lora", "out_dtype", "float17", "float17", WRONG[DType][1]),
    ("extract_lora", "energy", "1.5", 1.5, "must be at most 1, not 1.5"),
    ("extract_lora", "layout", "gguf", "gguf", "must be one of peft, vllm, not 'gguf'"),
    ("extract_lora", "intruder_scale", "-0.5", -0.5, "must be at least 0, not -0.5"),
    ("transplant_tokenizer", "k", "0", 0, "must be at least 1, not 0"),
    ("transplant_tokenizer", "prefix_match", "both", "both", "must be one of no, yes, embed, lm_head, not 'both'"),
    ("statistics", "rows", "0", 0, "must be at least 1, not 0"),
    ("run", "stream_cache_bytes", "0", 0, "must be at least 1, not 0"),
]


@pytest.mark.parametrize(
    ("command", "keyword", "text", "value", "said"), OUT_OF_RANGE, ids=[f"{c}-{k}-{t}" for c, k, t, *_ in OUT_OF_RANGE]
)
def test_a_wrong_value_has_one_message_on_the_command_line_and_in_python(
    cli: Cli, command: str, keyword: str, text: str, value: Any, said: str
) -> None:
    function, arguments = CALLS[command]
    with pytest.raises(PlanError) as caught:
        function(*arguments, **{keyword: value})
    flag = next(option for _, option in EVERY if option.keyword(command) == keyword and command in option.commands).flag(
        command
    )
    assert f"error[parameter]: {flag} ({keyword}): {said}" in str(caught.value)
    inputs = [argument for argument in arguments if argument != "int8"]
    ran = cli(command.replace("_", "-"), *inputs, *(["--format", "int8"] if command == "quantize" else []), flag, text)
    assert ran.code == 2
    assert ran.err.strip() == str(caught.value) if text != "nan" else said in ran.err


def test_all_that_is_wrong_is_said_at_once_and_before_the_recipe_is_read(cli: Cli) -> None:
    ran = cli("merge", "no such recipe.yml", "out", "--threads", "0", "--bits", "x", "--push", "org/m", "--stream-cache", "1XB")
    assert ran.code == 2
    assert re.findall(r"error\[parameter\]: (\S+)", ran.err) == ["--bits", "--threads", "--stream-cache"]
    assert ran.err.endswith("Nothing was written. (3 problems)\n")


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"merge\(\) has no option 'thread' \(did you mean 'threads'\?\)"):
        weightsmith.merge("r.yml", "out", thread=2)  # type: ignore[call-arg]


def test_values_are_read_as_the_record_has_them() -> None:
    texts = {"out_dtype": "bfloat16", "max_shard_bytes": "1.5GB", "settings": ["a.b=[1, x]", "c=2"], "lenient": True}
    (planning,) = read_options("merge", texts, RecipeOptions, text=True)
    assert (planning.out_dtype, planning.max_shard_bytes, planning.lenient) == (DTYPES["BF16"], 1_500_000_000, True)
    assert planning.settings == {"a.b": [1, "x"], "c": 2}
    (extracted,) = read_options("extract_lora", {"include": ["a", "b"], "energy": 1}, ExtractSettings)
    assert (extracted.include, extracted.energy) == (("a", "b"), 1)
    (settings,) = read_options("quantize", {"calibration": Path("a/text.txt")}, QuantizeSettings)
    assert settings.calibration == "a/text.txt"


@pytest.mark.parametrize("text", ["", "x", "=3", "a={", "5B", "1 XB", "-1", "1e9"])
def test_a_text_that_is_no_size_or_setting(text: str) -> None:
    for name, value in (("max_memory_bytes", text), ("settings", [text])):
        with pytest.raises(ValueError, match="must be"):
            options.find_option(name).read(value, text=True)


def test_records_are_frozen_and_their_fields_are_options() -> None:
    for record in options.option_records():
        assert [field.name for field in dataclasses.fields(record)] == [*options.options_of(record)]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record(), next(iter(options.options_of(record))), None)
