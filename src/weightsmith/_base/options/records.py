"""The options, in records: of recipes, formats, adapters, transplants, evaluations, statistics, tuning, and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weightsmith._base.errors import ParameterError
from weightsmith._base.options.option import find_option, option, option_record
from weightsmith._base.tensors import DTYPE_NAMES, DType

SHARD_BYTES = 5_000_000_000
ONE_FILE_BYTES = 50_000_000_000
"""The largest file that the Hub takes: people expect one GGUF file, not one for each 5 GB."""
STREAM_CACHE_BYTES = 20_000_000_000

PLANNED = ("merge", "moe", "plan", "preview")
RECIPES = (*PLANNED, "tune")
COPIES = ("quantize", "dequantize")
ADAPTERS = ("merge", "plan")
WRITING = ("merge", "moe", "plan", *COPIES, "extract_lora", "transplant_tokenizer", "run")
LOOKING = ("inspect", "diff", "preview", "evaluate", "tune")
RUNNING = (*WRITING, "evaluate", "statistics", "tune", "auto")

APPROXIMATIONS = ("omp", "hybrid", "common_interpolation", "subword", "landmark_pca", "mp_rope", "mean")
TABLES = ("no", "yes", "embed", "lm_head")
"""The tables of token rows in which a token of another text may serve: none, both, or one of them."""


@option_record(*RECIPES, group="Recipe")
@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """How a recipe is planned."""

    out_dtype: DType | None = option(
        None,
        "--out-dtype DTYPE",
        "Dtype of the output weights",
        unset="the recipe's, or the model's own",
        choices=DTYPE_NAMES,
        more="`quantize` rounds to it first.",
        commands=(*PLANNED, *COPIES),
        group="Output",
    )
    max_shard_bytes: int | None = option(
        None,
        "--max-shard-size SIZE",
        "Maximum size of a weight file",
        unset="5GB; GGUF: 50GB",
        least=1,
        more="A larger tensor gets a file of its own.",
        commands=("merge", "moe", "plan", *COPIES),
        group="Output",
    )
    seed: int = option(
        0,
        "--seed N",
        "Seed of random masks, router weights and noise",
        more="Calibration rows are drawn with it too. The same seed gives the same bytes with any number of threads.",
        commands=(*RECIPES, "quantize"),
    )
    ignore_quantization_config: bool = option(
        False,
        "--ignore-quantization-config",
        "Read plain weights that config.json says are quantised, and drop what it says",
        more="For models of tools that leave a `quantization_config` behind. Weights that are codes are still refused. See "
        "[plain weights](quantize.md#plain-weights-that-configjson-says-are-quantised).",
        commands=(*RECIPES, *COPIES),
        group="Advanced",
    )
    lenient: bool = option(
        False,
        "--mergekit-lenient",
        "Warn about settings that mergekit ignores, instead of failing",
        more="The same for experts with equal prompts or router weights.",
    )
    allow_code: bool = option(
        False, "--allow-code", "Allow merge_method to run a Python file", more="See [methods of your own](own-method.md)."
    )
    routing_report: bool | None = option(
        None,
        "--routing-report/--no-routing-report",
        "Write the routing of the prompts to OUT/routing.json and .svg",
        unset="only if the gate mode runs the base on the prompts",
        commands=("moe", "plan"),
        group="Output",
    )
    quantize: str | None = option(
        None,
        "--quantize FORMAT",
        "Quantised format of the output, such as fp8-dynamic",
        choices="_features.quantisation.formats:FORMATS",
        more="`weightsmith quantize --list` lists the formats: [quantised checkpoints](quantize.md).",
        commands=("merge", "moe", "plan", "quantize"),
        spelled={"quantize": "format"},
        required=("quantize",),
        group="Quantisation",
    )
    adapter_rank: int | None = option(
        None,
        "--adapter-rank R",
        "Maximum rank when merging adapters",
        unset="the sum of their ranks",
        least=1,
        more="See [merging adapters](lora.md#merging-adapters).",
        commands=ADAPTERS,
    )
    adapter_space: str = option(
        "core",
        "--adapter-space SPACE",
        "Space in which adapters are merged",
        more="`compressed` only with `--adapter-rank`.",
        choices=("core", "knots", "compressed"),
        commands=ADAPTERS,
        group="Advanced",
    )
    check_loading: bool = option(
        True,
        "--check-loading/--no-check-loading",
        "Check that transformers can load the output",
        more="The output is compared with the model that transformers builds from its config.json. Only for stacks, mixtures "
        "and surgery: [what is checked](#what-is-checked-before-a-merge).",
        group="Advanced",
    )
    settings: Mapping[str, Any] = option(
        dict, "--set KEY=VALUE", "Override a recipe value, such as parameters.t=0.3 (repeatable)", more="The value is YAML."
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


@option_record("merge", "moe", "plan", "quantize", group="Quantisation")
@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """Settings of quantised formats. Each format names those that it reads; any other is an error."""

    bits: float | None = option(None, "--bits BITS", "EXL2, EXL3: average bits per weight", above=0)
    size_bytes: int | None = option(
        None,
        "--size SIZE",
        "EXL2, GGUF: as many bits as fit into weight files of this size, such as 4GB",
        least=1,
        more="See [EXL2](exl2.md#a-target-size) and [GGUF](gguf.md#a-target-size).",
    )
    target: str | None = option(
        None,
        "--target kl=X",
        "EXL2, GGUF: smallest result with this KL divergence on the text of `evaluate`",
        more="In nats per token. See [a target divergence](quantize.md#a-target-divergence).",
    )
    head_bits: int | None = option(
        None,
        "--head-bits BITS",
        "EXL2, EXL3: bits per weight of the output head",
        more="16 is float16.",
        unset="6",
        choices=(2, 3, 4, 5, 6, 8, 16),
    )
    calibration: str | None = option(
        None,
        "--calibration FILE",
        "Calibration text: a file, built-in, or none",
        unset="EXL2, EXL3, fp8-static, nvfp4, KV cache: built-in; others: none",
        path=True,
        more="The file is txt, jsonl or parquet; `none` rounds to nearest. See [calibration](calibration.md).",
    )
    calibration_rows: int | None = option(
        None, "--calibration-rows N", "Number of rows of calibration text", unset="at most 128", least=1
    )
    calibration_tokens: int | None = option(
        None, "--calibration-tokens N", "Tokens in each row of calibration text", unset="512", least=1
    )
    calibration_dtype: str | None = option(
        None,
        "--calibration-dtype DTYPE",
        "Dtype in which linear layers multiply during a calibration",
        more="`bfloat16` is [faster](calibration.md#faster-forward-passes) on processors that multiply it.",
        unset="float32",
        choices=("float32", "bfloat16"),
    )
    measure: str | None = option(
        None,
        "--measure METHOD",
        "EXL2 only: how settings are measured",
        more="`full` is ExLlamaV2's measurement, which is slow.",
        unset="proxy",
        choices=("proxy", "full"),
    )
    measurement: str | None = option(None, "--measurement FILE", "EXL2 only: choose bits from this measurement.json", path=True)
    uniform: bool = option(False, "--uniform", "EXL2 only: use the same bits for every weight")
    imatrix: str | None = option(None, "--imatrix FILE", "GGUF only: importance matrix of weightsmith or llama.cpp", path=True)
    tensor_types: tuple[str, ...] = option(
        (),
        "--tensor-type REGEX=TYPE",
        "GGUF only: type of tensors whose llama.cpp name matches, such as ffn_down=Q6_K (repeatable; the last one wins)",
        more="See [GGUF](gguf.md#types-of-single-tensors).",
    )
    mmproj: bool = option(
        True,
        "--mmproj/--no-mmproj",
        "GGUF only: write a model's vision half to OUT/mmproj.gguf",
        more="See [models for images](gguf.md#models-for-images).",
    )
    group_size: int | None = option(
        None, "--group-size N", "Number of weights that share a scale", unset="the format's", least=1
    )
    kv_cache: str | None = option(
        None,
        "--kv-cache DTYPE",
        "compressed-tensors only: scales for a KV cache of this dtype",
        unset="no scales",
        choices=("fp8",),
        more="They need a calibration text. See [the KV cache](quantize.md#the-kv-cache).",
    )
    engine: str | None = option(
        None,
        "--for ENGINE",
        "Program that must load the result; what it cannot load is an error",
        unset="a warning names programs that cannot",
        choices="_models.formats.engines:ENGINE_NAMES",
        more="One of `transformers`, `vllm`, `sglang`, `llama.cpp`, `exllamav2`, `exllamav3` and `mlx-lm`: [which loads "
        "what](quantize.md#programs).",
    )

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that differ from their default."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) != each.default)


@option_record(*WRITING, group="Output")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run. These options do not affect the weights, but for rounding on another type of device."""

    threads: int | None = option(
        None,
        "--threads N",
        "Number of threads",
        unset="all available cores",
        least=1,
        commands=(*RUNNING, *LOOKING, "write"),
        group="Resources",
        setting=True,
    )
    max_memory_bytes: int | None = option(
        None,
        "--max-memory SIZE",
        "Memory limit, such as 500MB or 2GiB; does not affect the output",
        least=1,
        commands=RUNNING,
        group="Resources",
        setting=True,
    )
    overwrite: bool = option(
        False,
        "--overwrite",
        "Replace a checkpoint that weightsmith made",
        more="It stays until the new one is complete. A folder that has no manifest (`weightsmith.json`), has added or changed "
        "files, or is read, is never replaced: choose another name, or remove it yourself.",
        commands=(*WRITING, "statistics", "write", "auto"),
    )
    resume: bool = option(
        True, "--resume/--no-resume", "Resume interrupted work of the same plan, or discard it", commands=RUNNING
    )
    fsync: bool = option(
        True,
        "--fsync/--no-fsync",
        "Flush the data to disk before OUT is created",
        commands=(*WRITING, "statistics", "auto"),
        group="Advanced",
    )
    card: bool = option(True, "--card/--no-card", "Write README.md, a model card", setting=True)
    report: str | None = option(
        None,
        "--report FILE",
        "Also write the result to one HTML file, readable offline",
        path=True,
        more="Models, method, and distances by layer and part. `OUT/report.html` becomes part of the checkpoint, with "
        "pictures in its model card. See [reports](look.md#reports).",
    )
    allow_nonfinite: bool = option(
        False,
        "--allow-nonfinite",
        "Merge NaN and infinity like any number, instead of failing",
        more="The error names model, tensor and element.",
        group="Advanced",
    )
    device: str = option(
        "cpu",
        "--device DEVICE",
        "Device for computation: cpu, cuda, cuda:1 or auto",
        more="It computes whole matrices and hidden states; everything else runs on the CPU.",
        commands=(*(each for each in RUNNING if each != "dequantize"), "write"),
        group="Resources",
        setting=True,
    )
    keep_stages: bool = option(
        False,
        "--keep-stages",
        "Keep results of recipes used as models, as OUT.stage-NAME",
        more="See [stages](recipe.md#stages).",
        commands=("merge", "moe", "plan"),
        group="Advanced",
    )
    stream: bool = option(
        False,
        "--stream",
        "Read Hub models over the network instead of downloading them",
        more="Only the needed byte ranges are read. See [remote models](remote.md).",
        commands=(*RUNNING, *LOOKING, "write"),
        group="Remote",
    )
    stream_cache_bytes: int = option(
        STREAM_CACHE_BYTES,
        "--stream-cache SIZE",
        "Disk limit of streamed data; what does not fit is fetched again",
        least=1,
        commands=RUNNING,
        group="Resources",
        setting=True,
    )
    evaluate: str | None = option(
        None,
        "--evaluate FILE",
        "Measure how well the result predicts a text",
        path=True,
        more="Before OUT is created: perplexity, and KL divergence from the source. The text is a txt, jsonl or parquet file, "
        "or `built-in`: [evaluating](evaluate.md#evaluate-while-merging-or-quantising).",
        commands=("merge", "moe", "quantize"),
    )
    push: str | None = option(
        None,
        "--push ORG/NAME[@BRANCH]",
        "Upload OUT to the Hub when it is complete",
        more="See [pushing](#pushing-to-the-hub).",
        group="Remote",
    )
    public: bool = option(False, "--public", "Create the Hub model as public; otherwise it is private", group="Remote")
    commit_message: str | None = option(
        None, "--commit-message TEXT", "Commit message on the Hub", unset="the plan's title", group="Remote"
    )
    ray: str | None = option(
        None,
        "--ray ADDRESS",
        "Ray cluster to run on: HOST:PORT, auto or local",
        more="`auto` is this machine's cluster, or a new one; `local` is a new one. Inputs and output are in a shared folder "
        "or a bucket: [several machines](scale.md).",
        group="Remote",
    )


@option_record("extract_lora", group="Modules")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings:
    """How `extract_lora` makes an adapter of a fine-tune. Modules are named as in the base: `model.layers.0.mlp.up_proj`."""

    max_rank: int = option(
        128,
        "--max-rank R",
        "Maximum rank of a module",
        more="Also the rank of every module, unless `--energy` or `--max-parameters` chooses it.",
        least=1,
        group="Ranks",
    )
    energy: float | None = option(
        None,
        "--energy SHARE",
        "Choose ranks that keep this share of the change, such as 0.9",
        more="The smallest rank of each matrix that keeps it; rounding noise is not counted.",
        above=0,
        most=1,
        group="Ranks",
    )
    max_parameters: int | None = option(
        None,
        "--max-parameters N",
        "Choose ranks so that the adapter has at most N parameters",
        least=1,
        group="Ranks",
    )
    sv_epsilon: float = option(0.0, "--sv-epsilon S", "Drop singular values up to this size", least=0, group="Ranks")
    exact: bool = option(
        False,
        "--exact",
        "Use exact singular value decompositions",
        more="Otherwise randomised ones are used where they are cheaper.",
        group="Advanced",
    )
    embed_lora: bool = option(
        False,
        "--embed-lora/--no-embed-lora",
        "Decompose embedding and head too",
        more="Otherwise they are saved whole if they differ.",
    )
    include: tuple[str, ...] = option(
        (), "-i, --include, --include-regex REGEX", "Include modules whose names match REGEX (repeatable)"
    )
    exclude: tuple[str, ...] = option(
        (), "-e, --exclude, --exclude-regex REGEX", "Exclude modules whose names match REGEX (repeatable)"
    )
    save_modules: tuple[str, ...] = option(
        (),
        "--save-module NAME",
        "Save modules with this name whole, if they differ (repeatable)",
        more="NAME is the end of the module's name.",
    )
    distribute_scale: bool = option(
        True,
        "--distribute-scale/--no-distribute-scale",
        "Share singular values between A and B",
        more="Otherwise all are in A.",
        group="Advanced",
    )
    skip_undecomposable: bool = option(
        False,
        "--skip-undecomposable",
        "Leave out norms, embedding and head",
        more="Otherwise tensors that cannot be decomposed are saved whole.",
    )
    layout: str = option(
        "peft",
        "--for PROGRAM",
        "Program that loads the adapter",
        more="vLLM loads factors of linear layers only.",
        choices=("peft", "vllm"),
        group="Output",
    )
    intruder_scale: float = option(
        1.0,
        "--intruder-scale SCALE",
        "Scale of intruder dimensions; 0 removes them",
        least=0,
        most=1,
        more="They are singular vectors of the fine-tune that the base lacks. See [modules](lora.md#modules).",
        group="Advanced",
    )
    out_dtype: DType | None = option(
        None, "--out-dtype DTYPE", "Dtype of the factors", unset="the fine-tune's", choices=DTYPE_NAMES, group="Output"
    )


@option_record("transplant_tokenizer", group="Token rows")
@dataclass(frozen=True, slots=True, kw_only=True)
class TransplantSettings:
    """How `transplant_tokenizer` makes the rows of tokens that the model lacks."""

    approximation: str = option(
        "omp",
        "-a, --approximation, --approximation-method NAME",
        "Approximation of missing tokens",
        choices=APPROXIMATIONS,
        plugins="weightsmith.approximations",
        replaced={
            "zero": "use mean",
            "randn": "use mean, with --new-vocab-noise for random rows",
            "john_hewitt": "use mean, with --new-vocab-noise for random rows",
            "stb": "use landmark_pca or omp",
        },
    )
    k: int = option(64, "-k, --k K", "Number of shared tokens that approximate a missing one", least=1)
    weight_scheme: str = option(
        "distance_proportional",
        "-w, --weight-scheme SCHEME",
        "common_interpolation only: weights of the neighbours",
        choices=("distance_proportional", "barycentric", "least_squares"),
    )
    cosine_similarity: bool = option(
        False,
        "-c/-nc, --cosine-similarity/--no-cosine-similarity",
        "common_interpolation only: choose neighbours by angle, not by distance",
    )
    subword_method: str = option(
        "mean",
        "-s, --subword-method METHOD",
        "subword and hybrid only: combination of the pieces",
        choices=("mean", "sum", "weighted_mean", "first_last"),
    )
    prefix_match: str = option(
        "no",
        "-pm, --prefix-match TABLE",
        "Use the row of a missing token's longest known prefix",
        more="TABLE is where: both tables (yes), or one of them.",
        choices=TABLES,
    )
    byte_match: str = option(
        "yes",
        "-bm, --byte-match TABLE",
        "Use the row of <0x41> for A, and the reverse",
        more="TABLE is where: both tables (yes), or one of them.",
        choices=TABLES,
    )
    magikarp: bool = option(False, "--magikarp", "Approximate poorly trained tokens too", more="They are not used for others.")
    match_norms: bool = option(False, "--match-norms", "Scale new rows to the norm predicted from shared tokens")
    new_vocab_noise: float | None = option(
        None, "-nvn, --new-vocab-noise S", "Standard deviation of noise added to new rows", unset="no noise", least=0
    )
    new_vocab_scale: float | None = option(None, "-nvs, --new-vocab-scale F", "Factor of new rows", unset="1")
    seed: int = option(0, "--seed N", "Seed of random rows and noise")
    max_shard_bytes: int | None = option(
        None, "--max-shard-size SIZE", "Maximum size of a weight file", unset="5GB", least=1, group="Output"
    )
    report_text: str | None = option(
        None, "--report-text FILE", "Text in which the report counts the missing tokens", path=True, group="Output"
    )


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
        "Number of rows of each text, from its beginning",
        unset="all, at most 512; tune: at most 24, or 16 with a report text",
        least=1,
    )
    tokens: int | None = option(
        None, "--tokens N", "Number of tokens in each row", unset="512, or the model's maximum", least=2
    )
    command: str | None = option(
        None,
        "--command COMMAND",
        "Program that measures a model; `{model}` is its folder",
        unset="none",
        more="The last line that it prints is the number, unless `metric` says where it is; for `tune`, smaller is better.",
        group="Command",
    )
    metric: str | None = option(
        None,
        "--metric KEYS",
        "Where the number is in JSON: its keys, with slashes between them",
        unset="in the last line, alone",
        more="In what the command prints, or in a file that it writes into `{output}`. A minus before them changes the sign.",
        group="Command",
    )
    command_timeout: str | None = option(
        None,
        "--command-timeout TIME",
        "End the command after this time, such as 90s, 30m or 2h",
        unset="no limit",
        group="Command",
    )
    shell: bool = option(False, "--shell", "Run the command by a shell, for pipes and variables", group="Command")
    work: str | None = option(
        None,
        "--work FOLDER",
        "Folder for unfinished work",
        unset="~/.cache/weightsmith/evaluations",
        path=True,
        commands=("evaluate",),
        group="Resources",
    )


@option_record("statistics", group="Texts")
@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsSettings:
    """Options of `statistics`: kinds to measure, rows of the text."""

    kind: tuple[str, ...] = option(
        ("second_moments", "magnitudes"),
        "--kind NAME",
        "Statistic: second_moments for regmean, magnitudes for aim, fisher (repeatable)",
        unset="second_moments and magnitudes",
        more="The merge methods and their statistics: [merges that look at text](statistics.md).",
    )
    rows: int | None = option(None, "--rows N", "Number of rows of the text", unset="all, at most 128", least=1)
    tokens: int | None = option(None, "--tokens N", "Number of tokens in each row", unset="512", least=1)
    seed: int = option(0, "--seed N", "Seed of the rows that are drawn, and of the labels of fisher")


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
        unset="the tokens that begin and end texts, and line breaks",
        more="Rows take the starts in turn.",
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


@option_record("tune", group="Search")
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """How `tune` searches."""

    report_text: tuple[str, ...] = option(
        (),
        "--report-text FILE",
        "Text to judge the result on, once, at the end (repeatable)",
        unset="the last third of the rows of each text",
        path=True,
    )
    report_command: str | None = option(
        None, "--report-command COMMAND", "Program that judges the result, once, at the end", unset="that of --command"
    )
    budget: int = option(100, "--budget N", "Number of candidates to try", least=1)
    time: str | None = option(
        None,
        "--time TIME",
        "Start no candidate after this time, such as 90s, 30m or 2h",
        unset="no limit",
        more="The time includes the start. The last candidate and the report come on top.",
    )
    search: str = option(
        "cma",
        "--search NAME",
        "How candidates are chosen",
        choices=("cma", "line", "gradient", "random", "grid"),
        more="`cma` is CMA-ES, and needs the extra `tune`. `line` is for one number. `gradient` moves all numbers at once.",
    )
    objective: str = option(
        "mean",
        "--objective NAME",
        "Measure to minimise: mean loss, worst text, KL divergence from `reference`",
        choices=("mean", "worst", "kl"),
    )
    reference: tuple[str, ...] = option(
        (), "--reference MODEL", "Model to stay close to, for kl: one, or one for each text (repeatable)"
    )
    scoring_dtype: str | None = option(
        None,
        "--scoring-dtype DTYPE",
        "Dtype in which linear layers multiply when candidates are scored",
        unset="bfloat16 on processors that multiply it, else float32",
        choices=("float32", "bfloat16"),
        more="[`gradient`](tune.md#what-it-costs) uses float32 by default. The result is always judged in float32.",
    )


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
