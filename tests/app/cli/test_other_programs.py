"""What people type who come from other programs: the answer names what was typed, and what to type instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from tests.cli_help import Cli, cli, work
from weightsmith._app.cli import other_programs
from weightsmith._app.cli.app import make_app

__all__ = ["cli", "work"]

COMMANDS = {
    "chat out": "load its folder with transformers or vLLM",
    "serve out": "run model.gguf in Ollama or llama.cpp",
    "convert a out.gguf": "weightsmith quantize MODEL OUT --format gguf-bf16",
    "convert_hf_to_gguf.py a": "weightsmith quantize MODEL OUT --format gguf-bf16",
    "list": "weightsmith methods",
    "ties a b": "Write merge_method: ties in a recipe, and run weightsmith merge RECIPE OUT.",
    "version": "weightsmith --version",
    "upload out me/x": "--push org/name",
    "download org/x": "hf download org/name",
    "info a": "weightsmith inspect MODEL",
    "evaluate a": "weightsmith eval MODEL MODEL --text FILE.txt",
    "merge-lora a b": "weightsmith init --goal bake",
    "gui": "weightsmith studio",
    "update": "Upgrade weightsmith with pip or uv",
    "validate linear.yml": "weightsmith plan RECIPE",
    "train a": "weightsmith merges what it makes",
    "linear.yml out": "Run weightsmith merge linear.yml out.",
    "linear.yml": "Run weightsmith merge linear.yml OUT.",
    "./a": "Run weightsmith inspect ./a",
    "weightsmith merge linear.yml out": "Leave out the second weightsmith: weightsmith merge linear.yml out.",
    "pip install gguf": "Install packages with pip or uv",
    "uv add gguf": "Install packages with pip or uv",
    "add a": "Install packages with pip or uv",
    "install gguf": "Install packages with pip or uv",
    "imatrix -m a -f x.txt": "weightsmith quantize MODEL OUT --format gguf-q4_k_m --calibration FILE.txt",
    "yaml linear.yml out": "Run weightsmith merge RECIPE OUT.",
    "multi linear.yml out": "Run weightsmith merge RECIPE OUT.",
    "llama-cli -m a": "run model.gguf in Ollama or llama.cpp",
    "llama-perplexity -m a": "weightsmith eval MODEL MODEL --text FILE.txt",
    "rm a": "rm -r FOLDER",
    "cp a b": "cp -r FOLDER OTHER",
    "ps": "Press Ctrl-C where the command runs",
    "remove gguf": "Install packages with pip or uv",
    "lock": "Install packages with pip or uv",
    "bakllama x.yml out": "Stack layers with slices in a recipe",
    "llama-bench -m a": "run model.gguf in Ollama or llama.cpp",
    "llama-export-lora -m a": "weightsmith init --goal bake",
    "llama-gguf-split --merge a b": "weightsmith merge RECIPE OUT --quantize gguf-q4_k_m",
    "convert-hf-to-gguf a": "weightsmith quantize MODEL OUT --format gguf-bf16",
    "-m a.gguf": "run model.gguf in Ollama or llama.cpp",
    "-hf org/name": "run model.gguf in Ollama or llama.cpp",
    "merge-pytorch linear.yml out": "Name the weight files as models in a recipe",
    "help slerp": "a merge method: weightsmith methods slerp",
}
OPTIONS = {
    "merge a b -o out": "weightsmith init --goal blend --model a --model b, then run weightsmith merge recipe.yml out.",
    "merge a b out": "weightsmith init --goal blend --model a --model b, then run weightsmith merge recipe.yml out.",
    "merge a b": "weightsmith init --goal blend --model a --model b, then run weightsmith merge recipe.yml OUT.",
    "merge linear.yml -o out": "Write OUT without a flag",
    "merge -f linear.yml out": "Write RECIPE without a flag",
    "merge linear.yml out --method ties": "Write merge_method: in the recipe",
    "merge linear.yml out --weight 0.5": "--set weight=VALUE",
    "merge linear.yml out --outtype q8_0": "--quantize FORMAT, such as gguf-q8_0",
    "quantize a out --outtype q8_0": "--format FORMAT, such as gguf-q8_0",
    "quantize a out": "--format gguf-q4_k_m",
    "quantize a out Q4_K_M": "--format gguf-q4_k_m",
    "merge linear.yml out --dtype bf16": "--out-dtype DTYPE",
    "merge linear.yml out --force": "--overwrite",
    "merge linear.yml out --dry-run": "weightsmith plan RECIPE",
    "merge linear.yml out --gpu": "--device cuda",
    "merge linear.yml out --upload me/x": "--push org/name",
    "merge linear.yml out --token hf_x": "HF_TOKEN",
    "merge linear.yml out -t 4": "--threads N",
    "merge linear.yml out --man": "--help-all",
    "merge linear.yml --out-path out --intermediate-dir tmp": "Write RECIPE and OUT without flags",
    "merge linear.yml out --intermediate-dir tmp": "intermediate merges of a recipe are computed on the fly",
    "extract-lora --model a --base-model b --out-path out": "Write FINETUNED, BASE and OUT without flags",
    "convert-lora --adapter a --out x": "Write ADAPTER without a flag",
    "tune linear.yml tuned.yml --lazy": "-> Leave it out: the intermediate merges of a recipe are computed on the fly.\n",
    "init -o recipe.yml --goal average": "Write FILE without a flag",
    "quantize a out --dry-run": "-> Use --plan.",
    "plan linear.yml --dry-run": "-> Leave it out: plan computes and writes nothing.",
    "run plan.json out --dry-run": "-> Leave it out to write OUT; weightsmith plan RECIPE shows what that takes.",
    "extract-lora a b out --rank 4 --max-rank=8": "--rank and --max-rank are names of one option, which takes one value",
    "eval -m a -f wiki.txt": "-> Write MODEL without flags, as in the usage.",
    "auto --base a --models b c --out out": "-> Write BASE MODEL OUT without flags, as in the usage.",
    "plan linear.yml --format json": "--json for a result in JSON",
    "inspect a -o x.html": "--report FILE.html",
    "run a": "Run the model elsewhere, for weightsmith only makes it: load its folder with transformers or vLLM",
    "run org/name": "run takes a plan and OUT, and org/name is no plan",
    "run a out": "Run the model elsewhere, for weightsmith only makes it: load its folder with transformers or vLLM",
    "run org/name out": "run takes a plan and OUT, and org/name is no plan",
    "merge --lora b a out": "base+adapter",
    "init a": "a is a folder, and FILE is the recipe to write: name a model with --model a",
    "quantize a out --format gguf": "gguf-q4_k_m",
    "quantize a out --format fp8": "write one of fp8-dynamic, fp8-static, fp8-block",
}


@pytest.mark.parametrize("line", [*COMMANDS, *OPTIONS])
def test_the_answer_says_what_to_type(cli: Cli, work: Path, line: str) -> None:
    ran = cli(*line.split())
    assert ran.code == 2
    assert (COMMANDS | OPTIONS)[line] in ran.err
    assert "did you mean" not in ran.err
    assert not (work / "out").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("merge https://huggingface.co/org/name out", "Write a recipe that names it: weightsmith init --model org/name."),
        ("plan https://me:secret@example.org/r.yml?key=secret", "Download it, and name the file."),
        ("merge org/name out", "Write a recipe that names it, if it is a model of the Hub: weightsmith init --model org/name."),
        ("merge model.gguf out", "Write a recipe that names it: weightsmith init --model model.gguf."),
        ("moe folder out", "Name a YAML file: weightsmith init writes one, with --goal experts for moe."),
    ],
)
def test_what_is_no_recipe_is_one_error_with_the_next_step(cli: Cli, work: Path, line: str, words: str) -> None:
    Path("folder").mkdir()
    Path("model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    ran = cli(*line.split())
    assert ran.code == 1
    assert ran.err.count("error[") == 1
    assert words in ran.err
    assert "secret" not in ran.err
    assert not Path("out").exists()


def test_no_answer_is_about_what_exists() -> None:
    program = get_command(make_app())
    assert not {*other_programs.COMMANDS} & {*program.commands}  # type: ignore[attr-defined]


def test_what_is_answered_exists() -> None:
    program = get_command(make_app())
    commands = program.commands  # type: ignore[attr-defined]
    flags = {flag for command in commands.values() for option in command.params for flag in option.opts} | {
        "--version",
        "--help",
    }
    for answer in (*other_programs.COMMANDS.values(), *other_programs.OPTIONS.values()):
        for named in re.findall(r"weightsmith ([a-z-]+)", answer):
            assert named.startswith("-") or named in {*commands, "with", "makes", "only", "merges"}, answer
        for flag in re.findall(r"--[a-z][a-z-]+", answer):
            assert flag in flags, answer


@pytest.mark.parametrize("text", ["{weight: 0,5}", "{weight: 1, density: 0,25}"])
def test_a_decimal_comma_is_one_error_that_shows_the_number(cli: Cli, work: Path, text: str) -> None:
    Path("comma.yml").write_text(f"merge_method: linear\nmodels:\n  - model: a\n    parameters: {text}\n  - {{model: b}}\n")
    ran = cli("plan", "comma.yml")
    name, number = ("weight", "0.5") if "density" not in text else ("density", "0.25")
    assert ran.code == 1
    assert f"{name}: {number.replace('.', ',')} has a decimal comma" in ran.err
    assert f"-> Write {name}: {number}." in ran.err
    assert ran.err.count("error[") == 1


def test_a_recipe_in_another_folder_than_the_command_is_explained(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("inner").mkdir()
    Path("inner/r.yml").write_text(Path("linear.yml").read_text().replace("model: ", "model: ./"))
    monkeypatch.chdir("inner")
    ran = cli("plan", "r.yml")
    assert ran.code == 1
    assert "no such folder or file here, but there is one in ..: paths start at the current folder" in ran.err
    assert "after `cd ..`" in ran.err
