"""The options of `evaluate`, `tune`, `auto` and `write`."""

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
        "Number of rows to read from the start of each text",
        unset={"": "all, at most 512", "tune": "at most 24, or 16 with a report text"},
        least=1,
    )
    tokens: int | None = option(
        None, "--tokens N", "Number of tokens in each row", unset="512, or the model's maximum", least=2
    )
    command: str | None = option(
        None,
        "--command COMMAND",
        "Command that scores a model; `{model}` stands for its folder",
        unset="none",
        details="The last line that it prints is the number, unless `metric` says where it is; for `tune`, smaller is better.",
        group="Command",
    )
    metric: str | None = option(
        None,
        "--metric KEYS",
        "Keys of the number in the JSON that it prints, separated by slashes",
        unset="the last line is the number",
        details="In what the command prints, or in a file that it writes into `{output}`. A minus before them changes the "
        "sign.",
        group="Command",
        brief=(),
    )
    command_timeout: str | None = option(
        None,
        "--command-timeout TIME",
        "Stop the command after this time, such as 90s, 30m or 2h",
        unset="no limit",
        group="Command",
        brief=(),
    )
    shell: bool = option(False, "--shell", "Run the command in a shell, for pipes and variables", group="Command", brief=())
    work: str | None = option(
        None,
        "--work FOLDER",
        "Folder for unfinished work",
        unset="~/.cache/weightsmith/evaluations",
        path=True,
        commands=("evaluate",),
        group="Resources",
    )


@option_record("tune", group="Search")
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """How `tune` searches."""

    report_text: tuple[str, ...] = option(
        (),
        "--report-text FILE",
        "Text for one final check of the result (repeatable)",
        unset="the last third of the rows of each text",
        path=True,
    )
    report_command: str | None = option(
        None,
        "--report-command COMMAND",
        "Command for one final check of the result",
        unset="that of --command",
        brief=(),
    )
    budget: int = option(100, "--budget N", "Number of candidates to try", least=1)
    time: str | None = option(
        None,
        "--time TIME",
        "Start no candidate after this time, such as 90s, 30m or 2h",
        unset="no limit",
        details="The time includes the start. The last candidate and the report come on top.",
    )
    search: str = option(
        "cma",
        "--search NAME",
        "How candidates are chosen",
        choices=("cma", "line", "gradient", "random", "grid"),
        details="`cma` is CMA-ES, and needs the extra `tune`. `line` is for one number. `gradient` moves all numbers at once.",
    )
    objective: str = option(
        "mean",
        "--objective NAME",
        "Measure to minimise: mean loss, worst text, KL divergence from `reference`",
        choices=("mean", "worst", "kl"),
    )
    reference: tuple[str, ...] = option(
        (), "--reference MODEL", "kl only: model to stay close to, one for all texts or one for each (repeatable)"
    )
    scoring_dtype: str | None = option(
        None,
        "--scoring-dtype DTYPE",
        "Dtype of matrix products while scoring candidates",
        unset="bfloat16 if the CPU supports it, else float32",
        choices=("float32", "bfloat16"),
        details="[`gradient`](tune.md#what-it-costs) uses float32 by default. The result is always judged in float32.",
        brief=(),
    )


@option_record("write", group="Texts")
@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """What a model writes by itself."""

    rows: int = option(20, "--rows N", "Number of rows to write", least=1)
    tokens: int = option(128, "--tokens N", "Number of tokens in each row", least=1)
    temperature: float = option(1.0, "--temperature T", "Divisor of the logits: less than 1 is more predictable", above=0)
    start: tuple[str, ...] = option(
        (),
        "--start TEXT",
        "Text that rows continue; not written itself (repeatable)",
        unset="the tokens that begin and end texts, line breaks, and the first turns of the chat template",
        details="Rows take the starts in turn.",
    )
    seed: int = option(0, "--seed N", "Seed for sampling", least=0)


@option_record("auto", group="Texts")
@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSettings:
    """What `auto` measures fine-tunes on."""

    text: tuple[str, ...] = option(
        (),
        "--text MODEL=FILE",
        "Text for the fine-tune with this folder name: one for each, or none (repeatable)",
        unset="each fine-tune writes its own",
        path=True,
    )
    seed: int = option(0, "--seed N", "Seed for the text that fine-tunes write", least=0)
    budget: int = option(
        7,
        "--budget N",
        "Number of candidates to score besides the mean",
        least=1,
        details="The one that is usually best comes first. Without texts, there are four.",
    )
    time: str | None = option(
        None,
        "--time TIME",
        "Start no candidate after this time, such as 90s, 30m or 2h",
        unset="no limit",
        details="The first is always scored. Writing the merge comes on top.",
    )
