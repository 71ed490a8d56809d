"""`weightsmith init`: a recipe to begin with, for some models and a goal, or one of the papers'."""

from __future__ import annotations

import glob
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from weightsmith.cli.failures import failures
from weightsmith.errors import nearest
from weightsmith.text import note, printable, result, say, show_table

_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a recipe is for.

    words    one line, for the list
    least, most   models that it takes, besides the base; most None: any number
    base     `needed`, `first` (the first model if none is named) or `none`
    write    the recipe, of the models and the base, both as YAML
    """

    words: str
    least: int
    most: int | None
    base: str
    write: Callable[[Sequence[str], str], str]

    @property
    def wants(self) -> str:
        """The models that it takes, in words."""
        number = f"{self.least}" if self.most == self.least else f"{self.least} or more"
        return f"{number} --model{' and --base' if self.base == 'needed' else ''}"


def _entries(models: Sequence[str], *more: str) -> str:
    return "".join(f"  - model: {model}\n" + "".join(f"    {line}\n" for line in more) for model in models)


def _combine(models: Sequence[str], base: str) -> str:
    return f"""# One model with the skills of several fine-tunes of one base: TIES, https://arxiv.org/abs/2306.01708
merge_method: ties
base_model: {base}    # the model that all the others were tuned from
models:
{_entries(models, "parameters: {weight: 1.0}    # its share; the shares are divided by their sum")}parameters:
  density: 0.5    # share of each model's changes that is kept, the largest; 1 keeps all
  lambda: 1.0     # strength of the merged changes; less is closer to the base
dtype: bfloat16
"""


def _add(models: Sequence[str], base: str) -> str:
    return f"""# What fine-tunes learnt, added to their base: task arithmetic, https://arxiv.org/abs/2212.04089
merge_method: task_arithmetic
base_model: {base}    # the model that all the others were tuned from
models:
{_entries(models, "parameters: {weight: 0.5}    # factor on its changes; a negative one takes them away")}dtype: bfloat16
"""


def _blend(models: Sequence[str], base: str) -> str:
    return f"""# On the way from one model to another: spherical interpolation.
merge_method: slerp
base_model: {models[0]}    # where t = 0 is
models:
{_entries(models)}parameters:
  t: 0.5    # 1 is the other model. By layer, first to last: [0, 0.5, 1]; or by name, the first filter that fits counts:
  # t:
  #   - {{filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}}
  #   - {{value: 0.5}}
dtype: bfloat16
"""


def _average(models: Sequence[str], base: str) -> str:
    return f"""# The weighted mean of fine-tunes, or of the checkpoints of one run.
merge_method: linear
models:
{_entries(models, "parameters: {weight: 1.0}    # the mean is divided by the sum of the weights")}dtype: bfloat16
"""


def _bake(models: Sequence[str], base: str) -> str:
    return f"""# A LoRA adapter baked into its base: a model that needs no PEFT.
merge_method: passthrough
models:
{_entries(models)}dtype: bfloat16
"""


def _experts(models: Sequence[str], base: str) -> str:
    prompts = '    positive_prompts:    # texts that this expert is for: several, and typical\n      - "..."\n'
    entries = "".join(f"  - source_model: {model}\n{prompts}" for model in models)
    return f"""# A mixture of experts of dense models: run it with `weightsmith moe`, and train it: its router is a first guess.
base_model: {base}    # attention, norms, embeddings and tokenizer
experts_per_token: 2
gate_mode: random     # router weights; router_input makes them from the prompts, and needs torch and transformers
experts:
{entries}dtype: bfloat16
"""


GOALS = {
    "combine": Goal("one model with the skills of several fine-tunes of one base (ties)", 2, None, "needed", _combine),
    "add": Goal("add what fine-tunes learnt to their base (task_arithmetic)", 1, None, "needed", _add),
    "blend": Goal("a model on the way from one to another (slerp)", 2, 2, "none", _blend),
    "average": Goal("the mean of fine-tunes, or of checkpoints of a run (linear)", 2, None, "none", _average),
    "bake": Goal("bake a LoRA adapter, the model, into its base (passthrough)", 1, 1, "needed", _bake),
    "experts": Goal("a mixture of experts of dense models (weightsmith moe)", 2, None, "first", _experts),
}


def preset_names(incomplete: str = "") -> list[str]:
    """The presets whose name begins so."""
    return sorted(file.stem for file in _PRESETS.glob(f"{glob.escape(incomplete)}*.yml"))


def goal_names(incomplete: str) -> list[str]:
    """The goals whose name begins so."""
    return [name for name in GOALS if name.startswith(incomplete)]


def init(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="The recipe to write; - for standard output.")] = "recipe.yml",
    goal: Annotated[
        str,
        typer.Option(
            "--goal", metavar="GOAL", show_default=False, help=f"What for: {', '.join(GOALS)}.", autocompletion=goal_names
        ),
    ] = "",
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", show_default=False, help="A folder or hub id; may be given several times."),
    ] = None,
    base: Annotated[
        str, typer.Option("--base", metavar="MODEL", show_default=False, help="The model that the others were tuned from.")
    ] = "",
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            show_default=False,
            help="A recipe of a paper, such as ties-paper.",
            autocompletion=preset_names,
        ),
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="List the goals and the presets, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it already exists.")] = False,
) -> None:
    """Write a commented recipe to begin with.

    Asks for the goal and the models on a terminal, unless the options name them. With --preset: the recipe of a paper, whose
    models are placeholders.
    """
    with failures(interrupted=lambda: "Interrupted. Nothing was written."):
        if listed:
            _list()
            return
        target = None if file == "-" else Path(file)
        if target is not None and not force and target.exists():
            raise typer.BadParameter(
                f"{printable(file)} already exists: name another file, or write --force.", param_hint="FILE"
            )
        text = _preset(preset) if preset else _recipe(goal, [*(models or ())], base)
        if target is None:
            sys.stdout.write(text)
            return
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{printable(file)} cannot be written: {error.strerror}.", param_hint="FILE") from None
        command = "moe" if re.search(r"^experts:", text, re.MULTILINE) else "merge"
        name = printable(file)
        say(f"wrote {name}; next: weightsmith plan {name}, then weightsmith {command} {name} OUT")


def _list() -> None:
    show_table(("goal", ""), [(name, goal.words) for name, goal in GOALS.items()])
    result()
    show_table(("preset", ""), [(name, _title(name)) for name in preset_names()])


def _title(preset: str) -> str:
    """The first sentence of a preset's comment, cut to fit a line of 80."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), _text(preset).splitlines())
    return textwrap.shorten(re.split(r"[.;] ", " ".join(line[2:] for line in comment))[0], 59, placeholder=" …")


def _text(preset: str) -> str:
    return (_PRESETS / f"{preset}.yml").read_text(encoding="utf-8")


def _preset(name: str) -> str:
    wanted, known = name.removesuffix(".yml").replace("_", "-"), preset_names()
    if wanted not in known:
        raise typer.BadParameter(
            f"there is no preset {name!r}{nearest(wanted, known)}; `weightsmith init --list` lists them.", param_hint="--preset"
        )
    return _text(wanted)


def _recipe(name: str, models: list[str], base: str) -> str:
    asking = sys.stdin.isatty()
    if not name:
        if not asking:
            raise typer.BadParameter(f"write one of {', '.join(GOALS)}; or --preset NAME.", param_hint="--goal")
        name = _ask_goal()
    if name not in GOALS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(GOALS)}{nearest(name, GOALS)}.", param_hint="--goal")
    goal = GOALS[name]
    if asking and goal.base == "needed" and not base:
        base = _ask("the base, a folder or hub id")
    while asking and len(models) < (goal.most or goal.least):
        models.append(_ask("the adapter" if name == "bake" else f"model {len(models) + 1}"))
    while asking and goal.most is None and (more := _ask("one more model (Enter: no more)", default="")):
        models.append(more)
    if len(models) < goal.least or (goal.most and len(models) > goal.most) or (goal.base == "needed" and not base):
        raise typer.BadParameter(f"{name} takes {goal.wants}.", param_hint="--model")
    if name == "bake":
        models = [f"{base}+{models[0]}"]
    return goal.write([_yaml(model) for model in models], _yaml(base or models[0]))


def _ask_goal() -> str:
    for number, (name, goal) in enumerate(GOALS.items(), 1):
        note(f"{number}  {name:<9} {goal.words}")
    answer = _ask("goal, by number or name")
    return list(GOALS)[int(answer) - 1] if answer in map(str, range(1, len(GOALS) + 1)) else answer


def _ask(what: str, default: str | None = None) -> str:
    answer: str = typer.prompt(what, default=default, show_default=False, err=True)
    return answer.strip()


def _yaml(text: str) -> str:
    """A text as a YAML value; in quotes where it would be something else without."""
    return text if re.fullmatch(r"[A-Za-z_./~](?:[\w./~@+-]*[\w/])?", text) and not _is_other(text) else json.dumps(text)


def _is_other(text: str) -> bool:
    return text.lower() in ("true", "false", "yes", "no", "on", "off", "null")
