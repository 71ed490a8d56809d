"""mergekit's flags: one table for `weightsmith merge` and for the docs.

A flag without an effect here is accepted with an answer, one with another name here is passed on, and one that would change
the result is refused with the next step. So a command line for mergekit-yaml works here, or explains why not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import typer

from weightsmith._app.cli.help import CommandWithPage
from weightsmith._base.text import note


@dataclass(frozen=True, slots=True)
class Flag:
    """One spelling, or several with one meaning.

    names   as typed
    fate    `accepted`: does nothing; `passed on`: becomes `ours`; `refused`: an error
    answer  one sentence: why it is not needed, what happens instead, or the next step
    value   the flag is followed by a value
    ours    our option; "" with `passed on` when it is what happens anyway
    """

    names: tuple[str, ...]
    fate: Literal["accepted", "passed on", "refused"]
    answer: str
    value: bool = False
    ours: str = ""


def _switch(name: str, answer: str) -> Flag:
    return Flag((f"--{name}", f"--no-{name}"), "accepted", answer)


_CPU = "merging is limited by the disk and runs on the CPU; --device cuda computes whole matrices and hidden states on a GPU"

FLAGS = (
    _switch("clone-tensors", "shared and overlapping storage is always written right, without copies"),
    _switch("lazy-unpickle", "weights are always read piece by piece; pickles are read as data, and never executed"),
    _switch("low-cpu-memory", "memory does not grow with the model; --max-memory limits it"),
    _switch("async-write", "reading, merging and writing always overlap"),
    Flag(("--write-threads",), "accepted", "every thread writes; --threads sets the number of threads", value=True),
    _switch("allow-crimes", "architectures may differ if their tensors match; differences are warnings"),
    Flag(("--copy-tokenizer",), "accepted", "the tokenizer files of the base, else of the first model, are always copied"),
    _switch("cuda", _CPU),
    _switch("read-to-gpu", _CPU),
    _switch("multi-gpu", _CPU),
    _switch("gpu-rich", _CPU),
    Flag(("--safe-serialization",), "accepted", "the output is always safetensors"),
    Flag(("--lora-merge-cache",), "accepted", "adapters are merged while they are read, without a cache", value=True),
    Flag(("--lora-merge-dtype",), "accepted", "arithmetic is always float32 or wider", value=True),
    _switch("trust-remote-code", "a model's own code is copied and never run"),
    Flag(("--no-unsafe-truncate-embeddings",), "accepted", "embeddings are never truncated"),
    Flag(
        ("--transformers-cache",),
        "passed on",
        "folder of the Hub cache, as with the variable HF_HUB_CACHE",
        value=True,
        ours="HF_HUB_CACHE",
    ),
    Flag(("--random-seed",), "passed on", "is --seed", value=True, ours="--seed"),
    Flag(("--num-threads", "-j"), "passed on", "is --threads", value=True, ours="--threads"),
    Flag(
        ("--out-shard-size",),
        "passed on",
        "is --max-shard-size; the k, M and B of mergekit are thousands, millions and billions of bytes",
        value=True,
        ours="--max-shard-size",
    ),
    Flag(("--write-model-card",), "passed on", "is --card, the default", ours="--card"),
    Flag(("--no-write-model-card",), "passed on", "is --no-card", ours="--no-card"),
    Flag(("--no-quiet",), "passed on", "is the default"),
    Flag(
        ("--no-copy-tokenizer",),
        "refused",
        "a checkpoint without its tokenizer is not written; remove the tokenizer files from the output afterwards",
    ),
    Flag(
        ("--no-safe-serialization",),
        "refused",
        "pickled weights are not written; the output is safetensors, which loaders of pickles read too",
    ),
    Flag(
        ("--unsafe-truncate-embeddings",),
        "refused",
        "rows of different vocabularies are not cut to the smallest one; give all models the same tokenizer and "
        "number of embedding rows first",
    ),
)

_GPU_IN_MOE = {"--cuda", "--read-to-gpu", "--multi-gpu", "--gpu-rich"}
_BY_LAYER = "hidden states need the memory of one layer in float32, however large the model is"

MOE_FLAGS = (
    *(flag for flag in FLAGS if not {*flag.names} & _GPU_IN_MOE),
    *(
        _switch(name.removeprefix("--"), "copying is limited by the disk; --device sets the device of hidden states")
        for name in sorted(_GPU_IN_MOE)
    ),
    _switch("load-in-4bit", _BY_LAYER),
    _switch("load-in-8bit", _BY_LAYER),
    _switch("i-understand-this-is-not-useful-without-training", "experts that are all the same are not refused"),
)
"""Those of mergekit-moe. `--device` is ours too, for both, and means the same."""

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_SIZE = re.compile(r"([+-]?\d+)([kmb]?)", re.IGNORECASE | re.ASCII)
_ONE_SHARD = 1 << 62


@dataclass(frozen=True, slots=True)
class Translated:
    """A command line without mergekit's flags.

    args     the remaining arguments, with our options instead of mergekit's
    answers  one line for each flag that is not simply another name of ours
    hub_cache  folder of Hub models, "" for the usual one
    """

    args: list[str]
    answers: tuple[str, ...]
    hub_cache: str = ""


def translate(args: Sequence[str], flags: Sequence[Flag] = FLAGS) -> Translated:
    """Take mergekit's flags out of the arguments of a command. Raises typer.BadParameter for those that are refused.

    >>> found = translate(["r.yml", "out", "--cuda", "--out-shard-size", "2B", "-j4"])
    >>> found.args
    ['r.yml', 'out', '--max-shard-size', '2000000000', '--threads', '4']
    >>> found.answers[0][:24]
    '--cuda is not needed: me'
    """
    by_name = {name: flag for flag in flags for name in flag.names}
    remaining: list[str] = []
    answers: dict[str, None] = {}
    cache = ""
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg == "--":
            remaining += [arg, *queue]
            break
        name, equals, value = _split(arg)
        flag = by_name.get(name)
        if flag is None:
            remaining.append(arg)
            continue
        if flag.fate == "refused":
            raise typer.BadParameter(f"mergekit's {name} is not supported: {flag.answer}.")
        if equals and not flag.value:
            raise typer.BadParameter(f"{name} takes no value.")
        if flag.value and not equals:
            if not queue:
                raise typer.BadParameter(f"{name} needs a value.")
            value = queue.pop(0)
        if flag.fate == "accepted":
            answers[f"{name} is not needed: {flag.answer}."] = None
        elif flag.ours == "HF_HUB_CACHE":
            cache = value
            answers[f"{name}: {flag.answer}."] = None
        elif flag.ours:
            remaining.append(flag.ours)
            if flag.value:
                remaining.append(_shard_size(value) if flag.ours == "--max-shard-size" else value)
    return Translated(remaining, tuple(answers), cache)


def _split(arg: str) -> tuple[str, bool, str]:
    """Name, whether a value is attached, the value: `--a=b`, `-j4`."""
    if arg.startswith("-j") and len(arg) > 2:
        return "-j", True, arg[2:].removeprefix("=")
    name, equals, value = arg.partition("=")
    return name, bool(equals), value


def _shard_size(value: str) -> str:
    match = _SIZE.fullmatch(value)
    if match is None:
        return value  # one of our sizes, or the error of our option
    nbytes = int(match[1]) * _SUFFIXES[match[2].lower()]
    return str(nbytes if nbytes > 0 else _ONE_SHARD)


ANSWERS = "weightsmith.mergekit_flags"
"""Key of `translate`'s result in the context's `meta`."""


class MergeCommand(CommandWithPage):
    """`merge`, with mergekit's flags removed before typer reads the command line; they are in no help text."""

    flags: Sequence[Flag] = FLAGS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer's hook for reading the arguments of a command."""
        try:
            translated = translate(args, self.flags)
        except typer.BadParameter as error:
            ctx.fail(error.message)
        ctx.meta[ANSWERS] = translated
        return super().parse_args(ctx, translated.args)


class MoeCommand(MergeCommand):
    """`moe`, with mergekit-moe's flags removed."""

    flags = MOE_FLAGS


def answer(context: typer.Context, *, quiet: bool) -> None:
    """Apply mergekit's flags of this command line, and print the answers."""
    flags: Translated = context.meta[ANSWERS]
    if flags.hub_cache:  # huggingface_hub reads this when it is imported, which has not happened yet
        os.environ["HF_HUB_CACHE"] = flags.hub_cache
    for line in () if quiet else flags.answers:
        note(line)
