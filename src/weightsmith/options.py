"""The options of the Python functions (keywords) and commands (flags)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from weightsmith.errors import ParameterError, nearest
from weightsmith.tensors import BY_TORCH_NAME, DTYPE_NAMES, DType, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """How a recipe is planned.

    out_dtype        overrides the recipe's dtype
    max_shard_bytes  maximum size of a weight file
    seed             of random masks, router weights and noise
    lenient          report settings that mergekit ignores as warnings, not errors
    allow_code       allow merge_method to run a Python file; otherwise that is an error
    report           write where a mixture's router routes the prompts to OUT/routing.json and OUT/routing.svg. True: always,
                     with a pass of the base over the prompts; False: never; None: only if the router weights need that pass
    quantize         encoding of the weights of linear layers, `fp8-dynamic`; None: not quantised
    check_loading    compare stacks, mixtures and surgery with the model that transformers, if installed, builds from the new
                     config.json
    settings         values to set in the recipe, by key path: {"parameters.t": 0.3}
    """

    out_dtype: DType | None = None
    max_shard_bytes: int = 5_000_000_000
    seed: int = 0
    lenient: bool = False
    allow_code: bool = False
    report: bool | None = None
    quantize: str | None = None
    check_loading: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run. These options do not affect the weights.

    threads           default: all available processors
    max_memory_bytes  limit of resident memory; tiles shrink to fit
    overwrite         replace a checkpoint that already exists
    resume            resume interrupted work of the same plan; False discards it
    fsync             flush the data to disk before the output is published
    card              write README.md, a model card
    allow_nonfinite   merge NaN and infinity like any number; else they raise an error that names tensor and model
    device            torch device name for hidden states
    push              upload the finished folder to the hub, as the model `org/name`
    public            make the model that `push` creates public; the default is private
    """

    threads: int | None = None
    max_memory_bytes: int | None = None
    overwrite: bool = False
    resume: bool = True
    fsync: bool = True
    card: bool = True
    allow_nonfinite: bool = False
    device: str = "cpu"
    push: str | None = None
    public: bool = False


def output_dtype(asked: object) -> DType | None:
    """An output dtype, from a string or a numpy, torch or weightsmith dtype. Raises ParameterError.

    >>> output_dtype("bfloat16").name
    'BF16'
    """
    if asked is None or isinstance(asked, DType):
        return asked
    name = dtype_name(asked)
    if name not in DTYPE_NAMES:
        what = f"must be one of {', '.join(DTYPE_NAMES)}{nearest(name, DTYPE_NAMES)}, not {asked!r}"
        raise ParameterError(what, where="out_dtype")
    return BY_TORCH_NAME[name]


class RecipeKeywords(TypedDict, total=False):
    """`RecipeOptions` as keywords. out_dtype may also be a string, a numpy dtype or a torch dtype."""

    out_dtype: Any
    max_shard_bytes: int
    seed: int
    lenient: bool
    allow_code: bool
    report: bool | None
    quantize: str | None
    check_loading: bool
    settings: Mapping[str, Any]


class RunKeywords(TypedDict, total=False):
    """`RunOptions` as keywords."""

    threads: int | None
    max_memory_bytes: int | None
    overwrite: bool
    resume: bool
    fsync: bool
    card: bool
    allow_nonfinite: bool
    device: str
    push: str | None
    public: bool


class Keywords(RecipeKeywords, RunKeywords, total=False):
    """Both."""


def split(function: str, keywords: Mapping[str, Any]) -> tuple[RecipeOptions, RunOptions]:
    """A function's keywords as the two records. Raises TypeError for an unknown name, ParameterError for a wrong dtype.

    >>> split("merge", {"seed": 3, "threads": 2})[1].threads
    2
    >>> split("merge", {"thread": 2})
    Traceback (most recent call last):
    TypeError: merge() has no option 'thread' (did you mean 'threads'?)
    """
    recipe, run = ([each.name for each in fields(kind)] for kind in (RecipeOptions, RunOptions))
    for name in keywords:
        if name not in (*recipe, *run):
            raise TypeError(f"{function}() has no option '{name}'{nearest(name, (*recipe, *run))}")
    if "out_dtype" in keywords:
        keywords = {**keywords, "out_dtype": output_dtype(keywords["out_dtype"])}
    return (
        RecipeOptions(**{name: value for name, value in keywords.items() if name in recipe}),
        RunOptions(**{name: value for name, value in keywords.items() if name in run}),
    )
