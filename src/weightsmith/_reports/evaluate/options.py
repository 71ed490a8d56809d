"""The options of evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from weightsmith._base.options import option, option_record


@option_record("evaluate", "tune", group="Texts")
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateSettings:
    """What `evaluate` and `tune` measure models by: texts, and how they are cut; or a command."""

    text: tuple[str, ...] = option(
        (), "--text FILE", "Text to predict: a txt, jsonl or parquet file, or built-in (repeatable)", path=True
    )
    rows: int | None = option(
        None,
        "--rows N",
        "Number of rows of each text, from its beginning",
        unset={"": "all, at most 512", "tune": "at most 24, or 16 with a report text"},
        least=1,
    )
    tokens: int | None = option(
        None, "--tokens N", "Number of tokens in each row", unset="512, or the model's maximum", least=2
    )
    command: str | None = option(
        None,
        "--command COMMAND",
        "Program that measures a model; `{model}` is its folder",
        unset="none",
        details="The last line that it prints is the number, unless `metric` says where it is; for `tune`, smaller is better.",
        group="Command",
    )
    metric: str | None = option(
        None,
        "--metric KEYS",
        "Where the number is in JSON: its keys, with slashes between them",
        unset="in the last line, alone",
        details="In what the command prints, or in a file that it writes into `{output}`. A minus before them changes the "
        "sign.",
        group="Command",
        brief=(),
    )
    command_timeout: str | None = option(
        None,
        "--command-timeout TIME",
        "End the command after this time, such as 90s, 30m or 2h",
        unset="no limit",
        group="Command",
        brief=(),
    )
    shell: bool = option(False, "--shell", "Run the command by a shell, for pipes and variables", group="Command", brief=())
    work: str | None = option(
        None,
        "--work FOLDER",
        "Folder for unfinished work",
        unset="~/.cache/weightsmith/evaluations",
        path=True,
        commands=("evaluate",),
        group="Resources",
    )
