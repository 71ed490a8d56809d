"""The options, in five records: of recipes, quantised formats, adapters, transplanted tokenizers, and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weightsmith.errors import ParameterError
from weightsmith.options.option import find_option, option, option_record
from weightsmith.tensors import DTYPE_NAMES, DType

SHARD_BYTES = 5_000_000_000
ONE_FILE_BYTES = 50_000_000_000
"""The largest file that the Hub takes: people expect one GGUF file, not one for each 5 GB."""
SPOOL_BYTES = 20_000_000_000

RECIPES = ("merge", "moe", "plan", "preview")
COPIES = ("quantize", "dequantize")
ADAPTERS = ("merge", "plan")
WRITING = ("merge", "moe", "plan", *COPIES, "extract_lora", "transplant_tokenizer", "run")
LOOKING = ("inspect", "diff", "preview")

APPROXIMATIONS = (
    *("omp", "hybrid", "common_interpolation", "subword", "landmark_pca", "stb", "mp_rope"),
    *("john_hewitt", "mean", "zero", "randn"),
)
TABLES = ("no", "yes", "embed", "lm_head")
"""The tables of token rows in which a token of another text may serve: none, both, or one of them."""


@option_record(*RECIPES)
@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """How a recipe is planned."""

    out_dtype: DType | None = option(
        None,
        "Dtype of the output weights",
        metavar="DTYPE",
        choices=DTYPE_NAMES,
        unset="the recipe's, or the model's own",
        more="`quantize` rounds to it first.",
        commands=(*RECIPES, *COPIES),
        spelled={"dequantize": "dtype"},
    )
    max_shard_bytes: int | None = option(
        None,
        "Maximum size of a weight file",
        metavar="SIZE",
        least=1,
        flags=("--max-shard-size",),
        unset="5GB; GGUF: 50GB",
        more="A larger tensor gets a file of its own.",
        commands=("merge", "moe", "plan", *COPIES),
    )
    seed: int = option(
        0,
        "Seed of random masks, router weights, noise and calibration rows",
        metavar="N",
        more="The same seed gives the same bytes with any number of threads.",
        commands=(*RECIPES, "quantize"),
    )
    lenient: bool = option(
        False,
        "Warn about settings that mergekit silently ignores, instead of failing",
        flags=("--mergekit-lenient",),
        more="The same for experts with equal prompts or router weights.",
    )
    allow_code: bool = option(
        False, "Allow merge_method to run a Python file", more="See [methods of your own](own-method.md)."
    )
    routing_report: bool | None = option(
        None,
        "Write the routing of the prompts to OUT/routing.json and OUT/routing.svg",
        flags=("--routing-report/--no-routing-report",),
        unset="only if the gate mode runs the base on the prompts",
        commands=("moe", "plan"),
    )
    quantize: str | None = option(
        None,
        "Quantised format of the output, such as fp8-dynamic",
        metavar="FORMAT",
        choices="quantisation.formats:FORMATS",
        more="`weightsmith quantize --list` lists the formats: [quantised checkpoints](quantize.md).",
        commands=("merge", "moe", "plan", "quantize"),
        spelled={"quantize": "format"},
        required=("quantize",),
    )
    adapter_rank: int | None = option(
        None,
        "Maximum rank when merging adapters",
        metavar="R",
        least=1,
        unset="the sum of their ranks",
        more="See [merging adapters](lora.md#merging-adapters).",
        commands=ADAPTERS,
    )
    adapter_space: str = option(
        "core",
        "Space in which adapters are merged, compressed only with `adapter_rank`",
        metavar="SPACE",
        choices=("core", "knots", "compressed"),
        commands=ADAPTERS,
    )
    check_loading: bool = option(
        True,
        "Compare the output with the model that transformers builds from its config.json",
        more="Only for stacks, mixtures and surgery: [what is checked](#what-is-checked-before-a-merge).",
    )
    settings: Mapping[str, Any] = option(
        dict,
        "Set a value in the recipe, such as parameters.t=0.3 (repeatable)",
        flags=("--set",),
        metavar="KEY=VALUE",
        more="The value is YAML.",
    )

    @property
    def shard_bytes(self) -> int:
        """`max_shard_bytes`, or its default.

        >>> RecipeOptions().shard_bytes, RecipeOptions(quantize="gguf-q4_0").shard_bytes
        (5000000000, 50000000000)
        """
        if self.max_shard_bytes is not None:
            return self.max_shard_bytes
        return ONE_FILE_BYTES if self.quantize is not None and self.quantize.startswith("gguf-") else SHARD_BYTES


@option_record("merge", "moe", "plan", "quantize")
@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """Settings of quantised formats. Each format names those that it reads; any other is an error."""

    bits: float | None = option(None, "EXL2 only: average bits per weight", metavar="BITS", above=0)
    head_bits: int | None = option(
        None,
        "EXL2 only: bits per weight of the output head, 16 for float16",
        metavar="BITS",
        choices=(2, 3, 4, 5, 6, 8, 16),
        unset="6",
    )
    calibration: str | None = option(
        None,
        "Calibration text: a txt, jsonl or parquet file, built-in, or none to round to nearest",
        metavar="FILE",
        path=True,
        unset="EXL2: built-in; others: none",
        more="See [calibration](calibration.md).",
    )
    calibration_rows: int | None = option(None, "Number of rows of calibration text", metavar="N", least=1, unset="at most 128")
    calibration_tokens: int | None = option(None, "Tokens in each row of calibration text", metavar="N", least=1, unset="512")
    measure: str | None = option(
        None,
        "EXL2 only: method that measures settings, full for ExLlamaV2's, which is slow",
        metavar="METHOD",
        choices=("proxy", "full"),
        unset="proxy",
    )
    measurement: str | None = option(None, "EXL2 only: choose bits from this measurement.json", metavar="FILE", path=True)
    uniform: bool = option(False, "EXL2 only: use the same bits for every weight")
    imatrix: str | None = option(None, "GGUF only: importance matrix of weightsmith or llama.cpp", metavar="FILE", path=True)
    group_size: int | None = option(None, "Number of weights that share a scale", metavar="N", least=1, unset="the format's")

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that differ from their default."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) != each.default)


@option_record(*WRITING)
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run. These options do not affect the weights, but for rounding on another type of device."""

    threads: int | None = option(
        None,
        "Number of threads",
        metavar="N",
        least=1,
        unset="all available cores",
        commands=(*WRITING, *LOOKING),
    )
    max_memory_bytes: int | None = option(
        None,
        "Limit of resident memory, such as 500MB or 2GiB; the result does not depend on it",
        metavar="SIZE",
        least=1,
    )
    overwrite: bool = option(
        False,
        "Replace a checkpoint that weightsmith made",
        more="It stays until the new one is complete. A folder that has no manifest (`weightsmith.json`), has added or changed "
        "files, or is read, is never replaced: choose another name, or remove it yourself.",
    )
    resume: bool = option(True, "Resume interrupted work of the same plan, or discard it")
    fsync: bool = option(True, "Flush the data to disk before OUT is created")
    card: bool = option(True, "Write README.md, a model card")
    report: bool = option(
        False,
        "Write OUT/report.html: models, method and distances by layer and part",
        more="See [reports](look.md#reports).",
    )
    allow_nonfinite: bool = option(
        False,
        "Merge NaN and infinity like any number; otherwise they are an error",
        more="The error names model, tensor and element.",
    )
    device: str = option(
        "cpu",
        "Device for whole matrices and hidden states: cpu, cuda, cuda:1 or auto",
        metavar="DEVICE",
        commands=tuple(each for each in WRITING if each != "dequantize"),
    )
    keep_stages: bool = option(
        False,
        "Write the results of recipes that the recipe uses as models to OUT.stage-NAME, and keep them",
        more="See [stages](recipe.md#stages).",
        commands=("merge", "moe", "plan"),
    )
    stream: bool = option(
        False,
        "Read the needed bytes of Hub models over the network, without downloading the models",
        more="See [remote models](remote.md).",
        commands=(*WRITING, *LOOKING),
    )
    max_spool_bytes: int = option(
        SPOOL_BYTES,
        "Disk limit for streamed bytes that are read again; bytes beyond it are transferred again",
        metavar="SIZE",
        least=1,
    )
    push: str | None = option(
        None,
        "Upload OUT to the Hub when it is complete",
        metavar="ORG/NAME[@BRANCH]",
        more="See [pushing](#pushing-to-the-hub).",
    )
    public: bool = option(False, "Make a new model on the Hub public; otherwise it is private")
    commit_message: str | None = option(None, "Commit message on the Hub", metavar="TEXT", unset="the plan's title")
    ray: str | None = option(
        None,
        "Run on a Ray cluster: HOST:PORT, auto (this machine's cluster, or a new one), or local (a new one)",
        metavar="ADDRESS",
        more="Inputs and output are in a shared folder or a bucket: [several machines](scale.md).",
    )


@option_record("extract_lora")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings:
    """How `extract_lora` makes an adapter of a fine-tune. Modules are named as in the base: `model.layers.0.mlp.up_proj`."""

    max_rank: int = option(
        128,
        "Maximum rank; also the rank of every module, unless `energy` or `max_parameters` chooses it",
        metavar="R",
        least=1,
    )
    energy: float | None = option(
        None,
        "Choose the smallest rank that keeps this share of each matrix's change, such as 0.9; rounding noise is not counted",
        metavar="SHARE",
        above=0,
        most=1,
    )
    max_parameters: int | None = option(
        None, "Choose ranks so that all factors together have at most this many parameters", metavar="N", least=1
    )
    sv_epsilon: float = option(0.0, "Drop singular values up to this size", metavar="S", least=0)
    exact: bool = option(False, "Use exact singular value decompositions; otherwise randomised ones where they are cheaper")
    embed_lora: bool = option(
        False,
        "Decompose embedding and head too; otherwise they are saved whole if they differ",
        flags=("--embed-lora/--no-embed-lora",),
    )
    include: tuple[str, ...] = option(
        (),
        "Only modules whose name matches this regular expression (repeatable)",
        flags=("-i", "--include", "--include-regex"),
        metavar="REGEX",
    )
    exclude: tuple[str, ...] = option(
        (),
        "No module whose name matches this regular expression (repeatable)",
        flags=("-e", "--exclude", "--exclude-regex"),
        metavar="REGEX",
    )
    save_modules: tuple[str, ...] = option(
        (),
        "Save the modules whose name ends in this whole, if they differ (repeatable)",
        flags=("--save-module",),
        metavar="NAME",
    )
    distribute_scale: bool = option(True, "Share singular values between A and B; otherwise all are in A")
    skip_undecomposable: bool = option(
        False, "Leave out tensors that cannot be decomposed (norms, embedding, head), instead of saving them whole"
    )
    layout: str = option(
        "peft",
        "Program that loads the adapter, vllm for factors of linear layers only",
        flags=("--for",),
        metavar="PROGRAM",
        choices=("peft", "vllm"),
    )
    intruder_scale: float = option(
        1.0,
        "Scale of intruder dimensions, singular vectors of the fine-tune that the base lacks; 0 removes them",
        metavar="SCALE",
        least=0,
        most=1,
        more="See [modules](lora.md#modules).",
    )
    dtype: DType | None = option(None, "Dtype of the factors", metavar="DTYPE", choices=DTYPE_NAMES, unset="the fine-tune's")


@option_record("transplant_tokenizer")
@dataclass(frozen=True, slots=True, kw_only=True)
class TransplantSettings:
    """How `transplant_tokenizer` makes the rows of tokens that the model lacks."""

    approximation: str = option(
        "omp",
        "Approximation of missing tokens",
        flags=("-a", "--approximation", "--approximation-method"),
        metavar="NAME",
        choices=APPROXIMATIONS,
    )
    k: int = option(64, "Number of shared tokens that approximate a missing one", flags=("-k", "--k"), metavar="K", least=1)
    weight_scheme: str = option(
        "distance_proportional",
        "common_interpolation only: weights of the neighbours",
        flags=("-w", "--weight-scheme"),
        metavar="SCHEME",
        choices=("distance_proportional", "barycentric", "least_squares"),
    )
    cosine_similarity: bool = option(
        False,
        "common_interpolation only: choose neighbours by angle, not by distance",
        flags=("-c/-nc", "--cosine-similarity/--no-cosine-similarity"),
    )
    subword_method: str = option(
        "mean",
        "subword and hybrid only: combination of the pieces",
        flags=("-s", "--subword-method"),
        metavar="METHOD",
        choices=("mean", "sum", "weighted_mean", "first_last"),
    )
    prefix_match: str = option(
        "no",
        "Use the row of the longest token that a missing token begins with, in both tables or one",
        flags=("-pm", "--prefix-match"),
        metavar="TABLE",
        choices=TABLES,
    )
    byte_match: str = option(
        "yes",
        "Use the row of <0x41> for A and the reverse, in both tables or one",
        flags=("-bm", "--byte-match"),
        metavar="TABLE",
        choices=TABLES,
    )
    magikarp: bool = option(False, "Approximate poorly trained tokens too, and do not use them for others")
    match_norms: bool = option(False, "Scale new rows to the norm predicted from shared tokens")
    new_vocab_noise: float | None = option(
        None,
        "Standard deviation of noise added to new rows",
        flags=("-nvn", "--new-vocab-noise"),
        metavar="S",
        least=0,
        unset="no noise",
    )
    new_vocab_scale: float | None = option(
        None, "Factor of new rows", flags=("-nvs", "--new-vocab-scale"), metavar="F", unset="1"
    )
    seed: int = option(0, "Seed of random rows and noise", metavar="N")
    max_shard_bytes: int | None = option(
        None, "Maximum size of a weight file", metavar="SIZE", least=1, flags=("--max-shard-size",), unset="5GB"
    )
    report_text: str | None = option(None, "Text in which the report counts the missing tokens", metavar="FILE", path=True)


def output_dtype(asked: object) -> DType | None:
    """An output dtype, from a string or a numpy, torch or weightsmith dtype. Raises ParameterError.

    >>> output_dtype("bfloat16").name
    'BF16'
    """
    try:
        found: DType | None = find_option("out_dtype").read(asked)
    except ValueError as error:
        raise ParameterError(str(error), where="out_dtype") from None
    return found
