"""Recipes to begin with, one for each goal: for `weightsmith init` and the studio."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a recipe.

    words    one line, for the list
    least, most   number of models besides the base; most None: any number
    base     `needed`, `first` (the first model if none is named) or `none`
    write    makes the recipe from the models and the base, both as YAML
    adapter  the model is an adapter of the base
    """

    words: str
    least: int
    most: int | None
    base: str
    write: Callable[[Sequence[str], str], str]
    adapter: bool = False

    def recipe(self, models: Sequence[str], base: str = "") -> str:
        """The recipe as YAML. models, base: as many as it takes; `bake` takes the base and its adapter."""
        if self.adapter:
            models = [f"{base}+{models[0]}"]
        return self.write([quoted(model) for model in models], quoted(base or models[0]))


def _entries(models: Sequence[str], *parameters: str) -> str:
    return "".join(f"  - model: {model}\n" + "".join(f"    {line}\n" for line in parameters) for model in models)


def _combine(models: Sequence[str], base: str) -> str:
    return f"""# One model with the skills of several fine-tunes of one base: the mean of their changes, with a strength.
# `weightsmith auto` measures this and other merges, and writes the best.
merge_method: task_arithmetic
base_model: {base}    # the model that all the others were tuned from
models:
{_entries(models, "parameters: {weight: 1.0}    # its share; the shares are divided by their sum")}parameters:
  normalize: true
  lambda: 1.0     # strength: 1 is the plain mean. Compare 1.2 and 1.5 with `weightsmith eval`
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
    "combine": Goal(
        "one model with the skills of several fine-tunes of one base (task_arithmetic)", 2, None, "needed", _combine
    ),
    "add": Goal("add what fine-tunes learnt to their base (task_arithmetic)", 1, None, "needed", _add),
    "blend": Goal("a model on the way from one to another (slerp)", 2, 2, "none", _blend),
    "average": Goal("the mean of fine-tunes, or of checkpoints of a run (linear)", 2, None, "none", _average),
    "bake": Goal("bake a LoRA adapter, the model, into its base (passthrough)", 1, 1, "needed", _bake, adapter=True),
    "experts": Goal("a mixture of experts of dense models (weightsmith moe)", 2, None, "first", _experts),
}


def goals() -> Mapping[str, Goal]:
    """Recipes to begin with, by name: those of `weightsmith init`.

    `goals()[name].recipe(models, base)` is the recipe as YAML; `words` says in a line what it is for.

    >>> print(goals()["average"].recipe(["fr", "de"]).splitlines()[1])
    merge_method: linear
    """
    return GOALS


def quoted(text: str) -> str:
    """A text as a YAML value; in quotes where it would be something else without."""
    return text if re.fullmatch(r"[A-Za-z_./~](?:[\w./~@+-]*[\w/])?", text) and not _is_other(text) else json.dumps(text)


def _is_other(text: str) -> bool:
    return text.lower() in ("true", "false", "yes", "no", "on", "off", "null")
