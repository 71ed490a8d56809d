"""The options of `write` and `auto`."""

from __future__ import annotations

from dataclasses import dataclass

from weightsmith._base.options import option, option_record


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
        "Text that rows begin with, not written itself (repeatable)",
        unset="the tokens that begin and end texts, line breaks, and the first turns of the chat template",
        details="Rows take the starts in turn.",
    )
    seed: int = option(0, "--seed N", "Seed of the tokens that are drawn", least=0)


@option_record("auto", group="Texts")
@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSettings:
    """What `auto` measures fine-tunes on."""

    text: tuple[str, ...] = option(
        (),
        "--text MODEL=FILE",
        "Text of a fine-tune, by the last part of its name: one for each, or none (repeatable)",
        unset="each fine-tune writes its own",
        path=True,
    )
    seed: int = option(0, "--seed N", "Seed of the text that fine-tunes write", least=0)
    budget: int = option(
        7,
        "--budget N",
        "Number of candidates to score, beside the mean",
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
