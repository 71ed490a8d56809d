"""mergekit's flags: all of them known, each with an answer, none with another meaning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from tests.cli_help import Cli, cli, work
from weightsmith._app.cli.other_programs import FLAGS, translate

__all__ = ["cli", "work"]

# Every option of mergekit-yaml 0.1.5.
MERGEKIT = """--allow-crimes --no-allow-crimes --unsafe-truncate-embeddings --no-unsafe-truncate-embeddings --transformers-cache
--lora-merge-cache --lora-merge-dtype --cuda --no-cuda --device --low-cpu-memory --no-low-cpu-memory --read-to-gpu
--no-read-to-gpu --multi-gpu --no-multi-gpu --gpu-rich --no-gpu-rich --num-threads -j --out-shard-size --copy-tokenizer
--no-copy-tokenizer --clone-tensors --no-clone-tensors --trust-remote-code --no-trust-remote-code --random-seed --lazy-unpickle
--no-lazy-unpickle --write-model-card --no-write-model-card --safe-serialization --no-safe-serialization --no-quiet -v --verbose
--async-write --no-async-write --write-threads""".split()

KNOWN = {name: flag for flag in FLAGS for name in flag.names}


OURS = {"--device", "-v", "--verbose"}
"""Of the same name and meaning here."""


def test_every_option_of_mergekit_is_in_the_table_once() -> None:
    assert sorted({*MERGEKIT} - OURS) == sorted(name for flag in FLAGS for name in flag.names)


def test_those_that_take_a_value_are_mergekits() -> None:
    taking = "--transformers-cache --lora-merge-cache --lora-merge-dtype --num-threads -j --out-shard-size --random-seed"
    assert {name for name, flag in KNOWN.items() if flag.value} == {*taking.split(), "--write-threads"}


@pytest.mark.slow
def test_all_that_are_not_refused_together_change_nothing_but_are_answered(
    cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "before")
    values = {"--transformers-cache": str(work), "--out-shard-size": "5B"}
    args: list[str] = []
    for name, flag in KNOWN.items():
        if flag.fate != "refused":
            args += [name, values.get(name, "1")] if flag.value else [name]
    ran = cli("merge", "linear.yml", *args, "out")
    assert ran.code == 0, ran.err
    for name, flag in KNOWN.items():
        if flag.fate == "accepted":
            assert f"{name} is not needed: {flag.answer}." in ran.err.splitlines()
    assert os.environ["HF_HUB_CACHE"] == str(work)
    assert cli("merge", "linear.yml", "plain", "--no-card").code == 0
    assert (work / "out/model.safetensors").read_bytes() == (work / "plain/model.safetensors").read_bytes()


@pytest.mark.parametrize("name", [n for n, f in KNOWN.items() if f.fate == "refused"])
def test_a_flag_whose_absence_would_change_the_result_is_refused_by_name(cli: Cli, work: Path, name: str) -> None:
    ran = cli("merge", "linear.yml", "out", name)
    assert ran.code == 2
    assert name in ran.err
    assert KNOWN[name].answer in ran.err
    assert not (work / "out").exists()


@pytest.mark.parametrize(
    ("args", "ours"),
    [
        (["--random-seed", "3"], ["--seed", "3"]),
        (["--random-seed=3"], ["--seed", "3"]),
        (["--num-threads", "2"], ["--threads", "2"]),
        (["-j2"], ["--threads", "2"]),
        (["-j", "2"], ["--threads", "2"]),
        (["--write-model-card"], ["--card"]),
        (["--no-write-model-card"], ["--no-card"]),
        (["--out-shard-size", "5B"], ["--max-shard-size", "5000000000"]),
        (["--out-shard-size", "200m"], ["--max-shard-size", "200000000"]),
        (["--out-shard-size", "12345"], ["--max-shard-size", "12345"]),
        (["--out-shard-size", "-1"], ["--max-shard-size", str(1 << 62)]),
        (["--out-shard-size", "2GiB"], ["--max-shard-size", "2GiB"]),
        (["--no-quiet"], []),
        (["--seed", "1", "--json"], ["--seed", "1", "--json"]),
        (["--", "--cuda"], ["--", "--cuda"]),
    ],
)
def test_flags_with_another_name_here_are_passed_on(args: list[str], ours: list[str]) -> None:
    assert translate(args).args == ours


@pytest.mark.parametrize(("args", "text"), [(["--write-threads"], "needs a value"), (["--cuda=yes"], "takes no value")])
def test_a_value_too_few_or_too_many_is_an_error(args: list[str], text: str) -> None:
    with pytest.raises(typer.BadParameter, match=text):
        translate(args)


def test_they_are_not_in_the_help(cli: Cli) -> None:
    ran = cli("merge", "--help")
    words = set(ran.out.replace(",", " ").split())
    assert ran.code == 0
    assert words & {*MERGEKIT} == OURS


def test_a_model_after_a_flag_of_mergekit_is_an_argument_here(cli: Cli) -> None:
    ran = cli("extract-lora", "--model", "tuned", "--base-model", "base", "--out-path", "out")
    assert ran.code == 2
    assert "no such option: --model\n" in ran.err
    assert "-> Write FINETUNED, BASE and OUT without flags, as in the usage." in ran.err


def test_a_command_of_mergekit_names_the_one_that_does_the_same(cli: Cli) -> None:
    from weightsmith._app.cli.app import make_app
    from weightsmith._app.cli.help import COMMANDS_OF_MERGEKIT

    assert set(COMMANDS_OF_MERGEKIT.values()) <= set(get_command(make_app()).commands)  # type: ignore[attr-defined]
    ran = cli("mergekit-yaml", "r.yml", "out", "--cuda")
    assert (ran.code, ran.err) == (
        2,
        "error[usage]: no such command: mergekit-yaml\n  -> Run weightsmith merge: see weightsmith merge --help.\n",
    )


@pytest.mark.parametrize(
    ("args", "argument"), [(("merge", "--recipe", "r.yml"), "RECIPE"), (("plan", "r.yml", "--out", "o"), "OUT")]
)
def test_an_argument_that_is_written_as_an_option_is_named(cli: Cli, args: tuple[str, ...], argument: str) -> None:
    ran = cli(*args)
    assert ran.code == 2
    assert f"-> Write {argument} without a flag, as in the usage.\n" in ran.err
