"""The options of the Python functions (keywords) and commands (flags)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, get_type_hints

from weightsmith.errors import ParameterError, nearest
from weightsmith.tensors import BY_TORCH_NAME, DTYPE_NAMES, DType, dtype_name

SHARD_BYTES = 5_000_000_000
ONE_FILE_BYTES = 50_000_000_000
"""The largest file that the Hub takes: people expect one GGUF file, not one for each 5 GB."""
SPOOL_BYTES = 20_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """How a recipe is planned.

    out_dtype        overrides the recipe's dtype
    max_shard_bytes  maximum size of a weight file; None: 50 GB for GGUF, else 5 GB
    seed             of random masks, router weights and noise
    lenient          report settings that mergekit ignores as warnings, not errors
    allow_code       allow merge_method to run a Python file; otherwise that is an error
    routing_report   write where a mixture's router routes the prompts to OUT/routing.json and OUT/routing.svg. True: always,
                     with a pass of the base over the prompts; False: never; None: only if the router weights need that pass
    quantize         format of the output (`weightsmith quantize --list`), such as `fp8-dynamic`; None: plain weights
    adapter_rank     largest rank of an adapter that is merged of adapters; None: the sum of their ranks
    adapter_space    what is merged of adapters: core (small matrices in shared bases), knots, or compressed (to adapter_rank
                     before the merge)
    check_loading    compare stacks, mixtures and surgery with the model that transformers, if installed, builds from the new
                     config.json
    settings         values to set in the recipe, by key path: {"parameters.t": 0.3}
    """

    out_dtype: DType | None = None
    max_shard_bytes: int | None = None
    seed: int = 0
    lenient: bool = False
    allow_code: bool = False
    routing_report: bool | None = None
    quantize: str | None = None
    adapter_rank: int | None = None
    adapter_space: str = "core"
    check_loading: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shard_bytes(self) -> int:
        """`max_shard_bytes`, or its default.

        >>> RecipeOptions().shard_bytes, RecipeOptions(quantize="gguf-q4_0").shard_bytes
        (5000000000, 50000000000)
        """
        if self.max_shard_bytes is not None:
            return self.max_shard_bytes
        return ONE_FILE_BYTES if self.quantize is not None and self.quantize.startswith("gguf-") else SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """What a format of `quantize` may read; each format names the fields it reads, and any other is an error.

    The seed is the plan's. Products get the device from their bench.

    bits                bits per weight, on average
    head_bits           bits per weight of the output head; 16: float16, and a tied head is stored once, as the embedding
    calibration         path of a text to calibrate with (txt, jsonl, parquet), "built-in" or "none"; None: the format's default
    calibration_rows    number of rows of text
    calibration_tokens  tokens of a row
    measure             how settings are measured: "proxy" (None) or "full"
    measurement         path of a measurement.json to choose bits from
    uniform             the same bits for every weight
    imatrix             path of an importance matrix
    group_size          weights that share a scale
    """

    bits: float | None = None
    head_bits: int | None = None
    calibration: str | None = None
    calibration_rows: int | None = None
    calibration_tokens: int | None = None
    measure: str | None = None
    measurement: str | None = None
    uniform: bool = False
    imatrix: str | None = None
    group_size: int | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that differ from their default."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) != each.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings:
    """How `extract_lora` makes an adapter of a fine-tune. Modules are named as in the base: `model.layers.0.mlp.up_proj`.

    max_rank             largest rank of a module's factors; also each rank, unless something below chooses
    energy               for each module the smallest rank that keeps this share of its change; rounding noise is not counted
    max_parameters       of all factors together, spent where they keep most of the change
    sv_epsilon           singular values that are not larger count as zero
    exact                exact singular value decompositions; False: randomised ones, where they cost less
    embed_lora           factors for embedding and head; False: if they differ, they are saved whole
    include              regular expressions: only modules in whose name one of them matches
    exclude              regular expressions: no module in whose name one of them matches
    save_modules         modules to save whole if they differ, by the end of their names
    distribute_scale     singular values are shared between A and B; False: all of them are in A
    skip_undecomposable  leave out tensors that cannot be decomposed (norms, embedding, head) instead of saving them whole
    layout               peft, or vllm: only what vLLM loads
    intruder_scale       scale of intruder dimensions: singular vectors of the fine-tune that the base lacks; 1 changes nothing
    """

    max_rank: int = 128
    energy: float | None = None
    max_parameters: int | None = None
    sv_epsilon: float = 0.0
    exact: bool = False
    embed_lora: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    save_modules: tuple[str, ...] = ()
    distribute_scale: bool = True
    skip_undecomposable: bool = False
    layout: str = "peft"
    intruder_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransplantSettings:
    """How `transplant_tokenizer` makes the rows of tokens that the model lacks.

    approximation      `weightsmith.transplant.approximations.NAMES` lists all
    k                  of omp, hybrid, common_interpolation, stb, mp_rope: shared tokens for one missing token
    weight_scheme      of common_interpolation: distance_proportional, barycentric or least_squares
    cosine_similarity  of common_interpolation: nearest by angle, not by distance
    subword_method     of subword: mean, sum, weighted_mean or first_last
    prefix_match       the longest token that begins a missing one serves for it: no, yes, embed or lm_head (only in that table)
    byte_match         a token for a byte and the character serve for each other: no, yes, embed or lm_head
    magikarp           poorly trained tokens are approximated too, and approximate nothing
    match_norms        new rows get the length that those of the shared tokens let expect
    new_vocab_noise    standard deviation of noise that is added to new rows
    new_vocab_scale    factor of new rows
    seed               of random rows and noise
    max_shard_bytes    maximum size of a weight file; None: 5 GB
    report_text        path of a text; the report counts the missing tokens in it
    """

    approximation: str = "omp"
    k: int = 64
    weight_scheme: str = "distance_proportional"
    cosine_similarity: bool = False
    subword_method: str = "mean"
    prefix_match: str = "no"
    byte_match: str = "yes"
    magikarp: bool = False
    match_norms: bool = False
    new_vocab_noise: float | None = None
    new_vocab_scale: float | None = None
    seed: int = 0
    max_shard_bytes: int | None = None
    report_text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run. These options do not affect the weights, but for rounding on another type of device.

    threads           default: all available processors
    max_memory_bytes  limit of resident memory; tiles shrink to fit
    overwrite         replace a checkpoint that weightsmith made, if nothing was added to it or changed in it
    resume            resume interrupted work of the same plan; False discards it
    fsync             flush the data to disk before the output is published
    card              write README.md, a model card
    report            write report.html: what was merged and how far it moved, by layer and part, as a page
    allow_nonfinite   merge NaN and infinity like any number; else they raise an error that names tensor and model
    device            torch device for hidden states and whole matrices: cpu, cuda, cuda:1, or auto
    keep_stages       write the results of all the recipes whose results the recipe reads, to OUT.stage-NAME, and keep them
    stream            read the weights of hub models where they are, instead of downloading them first
    max_spool_bytes   limit of the disk space for bytes that are streamed; those of a later pass that do not fit travel again
    push              upload the finished folder to the hub, as the model `org/name`, or to a branch of it: `org/name@branch`
    public            make a model that is created on the hub public; the default is private
    commit_message    of the commit on the hub; None: what the plan does
    ray               have a Ray cluster do the parts of the plan: its address `host:port`; "auto": the cluster of this machine,
                      or a new one on this machine; "local": a new one. Inputs and output are in folders that all machines
                      share, or elsewhere; threads and memory are those of a worker
    """

    threads: int | None = None
    max_memory_bytes: int | None = None
    overwrite: bool = False
    resume: bool = True
    fsync: bool = True
    card: bool = True
    report: bool = False
    allow_nonfinite: bool = False
    device: str = "cpu"
    keep_stages: bool = False
    stream: bool = False
    max_spool_bytes: int = SPOOL_BYTES
    push: str | None = None
    public: bool = False
    commit_message: str | None = None
    ray: str | None = None


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
    max_shard_bytes: int | None
    seed: int
    lenient: bool
    allow_code: bool
    routing_report: bool | None
    quantize: str | None
    adapter_rank: int | None
    adapter_space: str
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
    report: bool
    allow_nonfinite: bool
    device: str
    keep_stages: bool
    stream: bool
    max_spool_bytes: int
    push: str | None
    public: bool
    commit_message: str | None
    ray: str | None


class QuantizeKeywords(TypedDict, total=False):
    """`QuantizeSettings` as keywords."""

    bits: float | None
    head_bits: int | None
    calibration: str | None
    calibration_rows: int | None
    calibration_tokens: int | None
    measure: str | None
    measurement: str | None
    uniform: bool
    imatrix: str | None
    group_size: int | None


class ExtractKeywords(RunKeywords, total=False):
    """`ExtractSettings` and `RunOptions` as keywords."""

    max_rank: int
    energy: float | None
    max_parameters: int | None
    sv_epsilon: float
    exact: bool
    embed_lora: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    save_modules: tuple[str, ...]
    distribute_scale: bool
    skip_undecomposable: bool
    layout: str
    intruder_scale: float


class TransplantKeywords(RunKeywords, total=False):
    """`TransplantSettings` and `RunOptions` as keywords."""

    approximation: str
    k: int
    weight_scheme: str
    cosine_similarity: bool
    subword_method: str
    prefix_match: str
    byte_match: str
    magikarp: bool
    match_norms: bool
    new_vocab_noise: float | None
    new_vocab_scale: float | None
    seed: int
    max_shard_bytes: int | None
    report_text: str | None


class PlanKeywords(RecipeKeywords, QuantizeKeywords, total=False):
    """Those that determine a plan."""


class Keywords(PlanKeywords, RunKeywords, total=False):
    """All."""


def split(function: str, keywords: Mapping[str, Any]) -> tuple[RecipeOptions, QuantizeSettings, RunOptions]:
    """A function's keywords as the three records. Raises TypeError for an unknown name.

    Raises ParameterError for a wrong dtype, and for a format or a setting of one that has another type.

    >>> split("merge", {"seed": 3, "threads": 2})[2].threads
    2
    >>> split("merge", {"thread": 2})
    Traceback (most recent call last):
    TypeError: merge() has no option 'thread' (did you mean 'threads'?)
    """
    if "out_dtype" in keywords:
        keywords = {**keywords, "out_dtype": output_dtype(keywords["out_dtype"])}
    paths = {name: os.fspath(value) for name, value in keywords.items() if isinstance(value, os.PathLike)}
    recipe, quantize, run = split_into(function, {**keywords, **paths}, RecipeOptions, QuantizeSettings, RunOptions)
    hints = get_type_hints(QuantizeSettings)
    given = {name: (getattr(quantize, name), hint) for name, hint in hints.items()}
    given |= {"format": (recipe.quantize, str)} if function == "quantize" else {"quantize": (recipe.quantize, str | None)}
    for name, (value, hint) in given.items():
        if not _fits(value, hint):
            raise ParameterError(f"must be {_KINDS[hint]}, not {value!r}", where=name)
    return recipe, quantize, run


def _fits(value: object, hint: Any) -> bool:
    """Whether a setting has its type: True is no number, and a whole number will do for a fraction."""
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, hint | int if hint == float | None else hint)


_KINDS = {
    str: "a string",
    str | None: "a string or None",
    bool: "True or False",
    int | None: "a whole number or None",
    float | None: "a number or None",
}
"""Types of settings in words."""


def split_into(function: str, keywords: Mapping[str, Any], *kinds: type[Any]) -> tuple[Any, ...]:
    """A function's keywords as option records of some kinds. Raises TypeError for an unknown name."""
    names = [[each.name for each in fields(kind)] for kind in kinds]
    known = [name for own in names for name in own]
    for name in keywords:
        if name not in known:
            raise TypeError(f"{function}() has no option '{name}'{nearest(name, known)}")
    return tuple(
        kind(**{name: value for name, value in keywords.items() if name in own}) for kind, own in zip(kinds, names, strict=True)
    )
