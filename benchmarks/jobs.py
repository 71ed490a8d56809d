"""The merges that are measured: recipes that weightsmith and mergekit both read, word for word the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DENSITY = 0.5
SLERP_T = 0.4
LINEAR_WEIGHTS = (0.7, 0.3)


@dataclass(frozen=True, slots=True)
class Job:
    """One merge.

    name     the merge method
    inputs   subfolders of the models' folder that are read
    copies   True if every input tensor that is read is written once: then as many bytes are read as written
    recipe   YAML, from the models' folder and the number of layers of its models
    """

    name: str
    inputs: tuple[str, ...]
    recipe: Callable[[Path, int], str]
    copies: bool = False


def stack(layers: int) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    """The two slices of the passthrough job, (model, first layer, end): 32 layers of 22, overlapping in the middle.

    >>> stack(22)
    (('a', 0, 16), ('b', 6, 22))
    """
    long = layers * 16 // 22
    return ("a", 0, long), ("b", layers - long, layers)


def _linear(models: Path, layers: int) -> str:
    first, second = LINEAR_WEIGHTS
    return f"""\
merge_method: linear
models:
  - model: {models}/a
    parameters: {{weight: {first}}}
  - model: {models}/b
    parameters: {{weight: {second}}}
dtype: bfloat16
"""


def _slerp(models: Path, layers: int) -> str:
    return f"""\
merge_method: slerp
base_model: {models}/a
models:
  - model: {models}/a
  - model: {models}/b
parameters: {{t: {SLERP_T}}}
dtype: bfloat16
"""


def _task_vectors(method: str) -> Callable[[Path, int], str]:
    def recipe(models: Path, layers: int) -> str:
        return f"""\
merge_method: {method}
base_model: {models}/base
models:
  - model: {models}/a
    parameters: {{weight: 1, density: {DENSITY}}}
  - model: {models}/b
    parameters: {{weight: 1, density: {DENSITY}}}
dtype: bfloat16
"""

    return recipe


def _passthrough(models: Path, layers: int) -> str:
    slices = "".join(
        f"  - sources: [{{model: {models}/{model}, layer_range: [{start}, {end}]}}]\n" for model, start, end in stack(layers)
    )
    return f"merge_method: passthrough\nslices:\n{slices}dtype: bfloat16\n"


JOBS = {
    job.name: job
    for job in (
        Job("linear", ("a", "b"), _linear),
        Job("slerp", ("a", "b"), _slerp),
        Job("ties", ("base", "a", "b"), _task_vectors("ties")),
        Job("dare_ties", ("base", "a", "b"), _task_vectors("dare_ties")),
        Job("passthrough", ("a", "b"), _passthrough, copies=True),
    )
}
