"""Options, written once: what the Python functions take as keywords and the commands as flags."""

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
    max_shard_bytes  bound of a weight file
    seed             of random masks, router weights and noise
    lenient          settings that mergekit ignores are warnings, not errors
    allow_code       run the Python file that merge_method may name; without it that is an error
    report           where the router of a mixture sends the prompts, in OUT/routing.json and OUT/routing.svg: True takes a
                     pass of the base over the prompts where the router weights need none, False skips it, None skips it there
    quantize         encoding of the weights of linear layers, `fp8-dynamic`; None: plain numbers
    check_loading    compare stacks, mixtures and surgery with the model that transformers builds from the new config.json,
                     where it is installed
    settings         values put into the recipe before it is read, by key path: {"parameters.t": 0.3}
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
    """How a plan is run. None of it changes a weight.

    threads           default: the processors this process may use
    max_memory_bytes  bound of resident memory; tiles shrink to fit
    overwrite         replace a checkpoint that already exists
    resume            resume interrupted work of the same plan; False discards it
    fsync             wait until the bytes are on the disk before the folder gets its name
    card              write README.md, a model card
    allow_nonfinite   merge NaN and infinities as any number; else they are an error that names tensor and model
    device            for hidden states, as torch names it
    push              upload the finished folder to the hub, as the model `org/name`
    public            make the model that `push` creates visible to everyone; it is private otherwise
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
    """A dtype to write weights in: text, or numpy's, torch's or ours. Raises ParameterError.

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
    """`RecipeOptions` as keywords of a function. out_dtype: also as text, or as numpy or torch has it."""

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
    """`RunOptions` as keywords of a function."""

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
    """The two records of a function's keywords. Raises TypeError for any other name, ParameterError for a wrong dtype.

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
