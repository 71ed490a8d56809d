"""Options that several commands share, and the parsers of their values."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from weightsmith.errors import ParameterError, nearest
from weightsmith.options import (
    ExtractSettings,
    QuantizeSettings,
    RecipeOptions,
    RunOptions,
    TransplantSettings,
    output_dtype,
)
from weightsmith.tensors import DType

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?)?", re.IGNORECASE | re.ASCII)
_EXAMPLES = "write bytes, or a number with kB, MB, GB, TB (1000s) or KiB, MiB, GiB, TiB (1024s)"


def parse_size(text: str | int) -> int:
    """Bytes from `500MB`, `2GiB`, `1.5GB` or a plain number of bytes.

    >>> parse_size("2GiB"), parse_size("1.5GB"), parse_size("4096")
    (2147483648, 1500000000, 4096)
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        hint = "; for five billion bytes write 5GB" if re.fullmatch(r"\d+\s*[bB]", str(text).strip()) else ""
        raise typer.BadParameter(f"{str(text)!r} is not a size: {_EXAMPLES}{hint}.")
    number, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    whole, _, decimals = number.partition(".")
    # In integers: 1.1 is not exact as a float, and importing the decimal module is slow.
    unit: int = (1024 if binary else 1000) ** power
    nbytes: int = int(whole + decimals) * unit // 10 ** len(decimals)
    if nbytes < 1:
        raise typer.BadParameter(f"{str(text)!r} is less than one byte.")
    return nbytes


def parse_dtype(text: str | DType) -> DType:
    """A dtype to write, by its name in recipes.

    >>> parse_dtype("bfloat16").name
    'BF16'
    """
    try:
        found = output_dtype(text)
    except ParameterError as error:
        raise typer.BadParameter(f"{error.finding.what}.") from None
    assert found is not None
    return found


def parse_format(text: str) -> str:
    """The name of a format.

    >>> parse_format("fp8-dynamic")
    'fp8-dynamic'
    """
    from weightsmith.quantisation.formats import FORMATS

    if text not in FORMATS:
        raise typer.BadParameter(
            f"no format is called {text!r}{nearest(text, FORMATS)}; weightsmith quantize --list shows all."
        )
    return text


def parse_setting(text: str | tuple[str, Any]) -> tuple[str, Any]:
    """Where and what, from `parameters.t=0.3`; the value is YAML.

    >>> parse_setting("parameters.t=[0, 0.5]")
    ('parameters.t', [0, 0.5])
    """
    if isinstance(text, tuple):
        return text
    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise typer.BadParameter(f"{text!r} has no value: write parameters.t=0.3.")
    import yaml

    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise typer.BadParameter(f"{value!r} is not YAML.") from None


def recipe_source(recipe: str) -> str:
    """The path of a recipe, or for `-` the text on standard input."""
    if recipe != "-":
        return recipe
    from weightsmith.errors import SyntaxProblem
    from weightsmith.recipe import StandardInput
    from weightsmith.recipe.yaml import MAX_BYTES

    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    try:
        return StandardInput(f"{data.decode()}\n")  # text is known by its newline
    except UnicodeDecodeError as error:
        what = f"the recipe is not UTF-8 text: byte 0x{data[error.start]:02x}"
        raise SyntaxProblem(what, where="<stdin>", fix="save it as UTF-8") from None


def _size_option(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, metavar="SIZE", parser=parse_size, help=help, **more)


Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file; - for standard input.")]
Out = Annotated[
    str,
    typer.Argument(metavar="OUT", help="The folder to create, or s3://BUCKET/PREFIX, gs://, az://, hf://ORG/NAME[@BRANCH]."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, help="Number of threads; all cores that this process may use if not given."),
]
MaxMemory = Annotated[
    int | None,
    _size_option("--max-memory", "Bound of resident memory, such as 500MB or 2GiB; the result does not depend on it."),
]
OutOrPlan = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="The folder to create, or s3://BUCKET/PREFIX, gs://, az://, hf://ORG/NAME[@BRANCH]; not with --plan.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no summary; warnings and errors are still shown.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Stream = Annotated[
    bool,
    typer.Option("--stream", help="Read the weights of hub models where they are, only what is needed, without a download."),
]
MaxSpool = Annotated[
    int,
    _size_option(
        "--max-spool",
        "Bound of the disk space for streamed bytes that are read again, in huggingface_hub's cache folder.",
        show_default="20GB",
    ),
]
PageFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Also write the result as a page: one HTML file, readable offline."),
]


def check_out(out: str, *, plan_only: bool) -> None:
    """Raise BadParameter unless either a folder is named or --plan is given."""
    if bool(out) == plan_only:
        raise typer.BadParameter("with --plan nothing is written." if out else "name the folder to create.", param_hint="OUT")


FLAGS: Mapping[str, Any] = {
    "threads": Threads,
    "max_memory_bytes": MaxMemory,
    "max_shard_bytes": Annotated[
        int | None,
        _size_option("--max-shard-size", "Bound of one weight file, such as 800MB; 5GB (of GGUF: 50GB) if not given."),
    ],
    "seed": Annotated[int, typer.Option("--seed", metavar="N", help="Seed of random masks, router weights and noise.")],
    "out_dtype": Annotated[
        DType | None,
        typer.Option(
            "--out-dtype",
            metavar="DTYPE",
            parser=parse_dtype,
            help="Dtype of the output, over the recipe's: bfloat16, float16, float32 or float64.",
        ),
    ],
    "lenient": Annotated[
        bool, typer.Option("--mergekit-lenient", help="Ignore, with a warning, the settings that mergekit ignores silently.")
    ],
    "allow_code": Annotated[
        bool, typer.Option("--allow-code", help="Run the Python file that merge_method names, if it names one.")
    ],
    "routing_report": Annotated[
        bool | None,
        typer.Option(
            "--routing-report/--no-routing-report",
            show_default=False,
            help="Write where the router sends the prompts, or not; by default if the gate mode runs the base on them anyway.",
        ),
    ],
    "quantize": Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="FORMAT",
            parser=parse_format,
            help="Quantise the output: fp8-dynamic, or another of the formats of `weightsmith quantize`.",
        ),
    ],
    "adapter_rank": Annotated[
        int | None,
        typer.Option(
            "--adapter-rank",
            metavar="R",
            min=1,
            help="Of a merge of adapters: the largest rank of the result; the sum of their ranks if not given.",
        ),
    ],
    "adapter_space": Annotated[
        str,
        typer.Option(
            "--adapter-space",
            metavar="SPACE",
            help="Of a merge of adapters: core, knots, or compressed (to the rank of --adapter-rank before the merge).",
        ),
    ],
    "check_loading": Annotated[
        bool,
        typer.Option(
            " /--no-check-loading",
            show_default=False,
            help="Do not compare a stack or mixture with the model that transformers builds from its config.json.",
        ),
    ],
    "settings": Annotated[
        list[Any],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            parser=parse_setting,
            show_default=False,
            help="Put a value into the recipe first, such as parameters.t=0.3; may be given several times.",
        ),
    ],
    "bits": Annotated[float | None, typer.Option("--bits", metavar="BITS", help="Of exl2: bits per weight, on average.")],
    "head_bits": Annotated[
        int | None, typer.Option("--head-bits", metavar="BITS", help="Of exl2: bits of the output head; 16: float16.")
    ],
    "calibration": Annotated[
        str | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Text to calibrate with: txt, jsonl, parquet, or built-in (exl2's default). none: round to nearest.",
        ),
    ],
    "calibration_rows": Annotated[
        int | None, typer.Option("--calibration-rows", metavar="N", min=1, help="Number of rows of calibration text.")
    ],
    "calibration_tokens": Annotated[
        int | None, typer.Option("--calibration-tokens", metavar="N", min=1, help="Tokens of a row of calibration text.")
    ],
    "measure": Annotated[
        str | None,
        typer.Option("--measure", metavar="HOW", help="Of exl2: proxy (default), or full: as ExLlamaV2 does, slowly."),
    ],
    "measurement": Annotated[
        str | None,
        typer.Option("--measurement", metavar="FILE", help="Of exl2: choose bits from this measurement.json."),
    ],
    "uniform": Annotated[bool, typer.Option("--uniform", help="Of exl2: the same bits for every weight.")],
    "imatrix": Annotated[
        str | None, typer.Option("--imatrix", metavar="FILE", help="Of GGUF: an importance matrix, ours or llama.cpp's.")
    ],
    "group_size": Annotated[
        int | None, typer.Option("--group-size", metavar="N", min=1, help="Number of weights that share a scale.")
    ],
    "max_rank": Annotated[
        int,
        typer.Option("--max-rank", metavar="R", min=1, help="Largest rank; also each rank, if no other option chooses it."),
    ],
    "energy": Annotated[
        float | None,
        typer.Option(
            "--energy",
            metavar="SHARE",
            help="For each matrix the smallest rank that keeps this share of its change, such as 0.9; rounding noise is not "
            "counted.",
        ),
    ],
    "max_parameters": Annotated[
        int | None,
        typer.Option(
            "--max-parameters", metavar="N", min=1, help="Choose ranks so that all factors have N parameters at most."
        ),
    ],
    "sv_epsilon": Annotated[
        float, typer.Option("--sv-epsilon", metavar="S", min=0, help="Leave out singular values that are not larger.")
    ],
    "exact": Annotated[
        bool, typer.Option("--exact", help="Exact singular value decompositions, not randomised ones where they cost less.")
    ],
    "embed_lora": Annotated[
        bool,
        typer.Option("--embed-lora/--no-embed-lora", help="Factors for embedding and head, which are saved whole otherwise."),
    ],
    "include": Annotated[
        list[str],
        typer.Option(
            "-i",
            "--include",
            "--include-regex",
            metavar="REGEX",
            show_default=False,
            help="Only modules in whose name this matches; may be given several times.",
        ),
    ],
    "exclude": Annotated[
        list[str],
        typer.Option(
            "-e",
            "--exclude",
            "--exclude-regex",
            metavar="REGEX",
            show_default=False,
            help="No module in whose name this matches; may be given several times.",
        ),
    ],
    "save_modules": Annotated[
        list[str],
        typer.Option(
            "--save-module",
            metavar="NAME",
            show_default=False,
            help="Save this module whole if it differs: the end of its name; may be given several times.",
        ),
    ],
    "distribute_scale": Annotated[
        bool,
        typer.Option("--distribute-scale/--no-distribute-scale", help="Share singular values between A and B, or all in A."),
    ],
    "skip_undecomposable": Annotated[
        bool,
        typer.Option("--skip-undecomposable", help="Leave out norms, embedding and head, instead of saving them whole."),
    ],
    "layout": Annotated[
        str,
        typer.Option(
            "--for", metavar="PROGRAM", help="peft, or vllm: only what vLLM loads, which is factors of linear layers."
        ),
    ],
    "intruder_scale": Annotated[
        float,
        typer.Option(
            "--intruder-scale",
            metavar="SCALE",
            help="Scale intruder dimensions, singular vectors of FINETUNED that are unlike all of BASE; 0 removes them.",
        ),
    ],
    "approximation": Annotated[
        str,
        typer.Option(
            "-a",
            "--approximation",
            "--approximation-method",
            metavar="NAME",
            help="How rows of missing tokens are made: omp, hybrid, common_interpolation, subword, landmark_pca, stb, mp_rope, "
            "john_hewitt, mean, zero or randn.",
        ),
    ],
    "k": Annotated[
        int, typer.Option("-k", "--k", metavar="K", min=1, help="Shared tokens that a missing token is approximated by.")
    ],
    "weight_scheme": Annotated[
        str,
        typer.Option(
            "-w",
            "--weight-scheme",
            metavar="SCHEME",
            help="Of common_interpolation: distance_proportional, barycentric or least_squares.",
        ),
    ],
    "cosine_similarity": Annotated[
        bool,
        typer.Option("-c/-nc", "--cosine-similarity/--no-cosine-similarity", help="Of common_interpolation: nearest by angle."),
    ],
    "subword_method": Annotated[
        str,
        typer.Option("-s", "--subword-method", metavar="METHOD", help="Of subword: mean, sum, weighted_mean or first_last."),
    ],
    "prefix_match": Annotated[
        str,
        typer.Option(
            "-pm",
            "--prefix-match",
            metavar="WHERE",
            help="Use the row of the longest token that a missing token begins with: no, yes, embed or lm_head.",
        ),
    ],
    "byte_match": Annotated[
        str,
        typer.Option(
            "-bm",
            "--byte-match",
            metavar="WHERE",
            help="Use the row of <0x41> for A, and the other way round: no, yes, embed or lm_head.",
        ),
    ],
    "magikarp": Annotated[
        bool, typer.Option("--magikarp", help="Approximate poorly trained tokens too, and use none of them for others.")
    ],
    "match_norms": Annotated[
        bool, typer.Option("--match-norms", help="Give new rows the length that the shared tokens let expect.")
    ],
    "new_vocab_noise": Annotated[
        float | None,
        typer.Option("-nvn", "--new-vocab-noise", metavar="S", min=0, help="Standard deviation of noise in new rows."),
    ],
    "new_vocab_scale": Annotated[
        float | None, typer.Option("-nvs", "--new-vocab-scale", metavar="F", help="Factor of new rows.")
    ],
    "report_text": Annotated[
        str | None,
        typer.Option("--report-text", metavar="FILE", help="A text of yours: report which missing tokens occur in it."),
    ],
    "overwrite": Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that weightsmith made.")],
    "resume": Annotated[
        bool, typer.Option("--resume/--no-resume", help="Resume interrupted work of the same plan, or discard it.")
    ],
    "fsync": Annotated[
        bool, typer.Option("--fsync/--no-fsync", help="Wait until the bytes are on the disk before OUT is created.")
    ],
    "report": Annotated[
        bool, typer.Option("--report", help="Write OUT/report.html too: what was done, by layer and part, readable offline.")
    ],
    "card": Annotated[bool, typer.Option("--card/--no-card", help="Write README.md, a model card.")],
    "allow_nonfinite": Annotated[
        bool, typer.Option("--allow-nonfinite", help="Merge NaN and infinities as any number; else they are an error.")
    ],
    "device": Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="Where hidden states and whole matrices are computed: cpu, cuda, cuda:1 or auto."
        ),
    ],
    "keep_stages": Annotated[
        bool,
        typer.Option(
            "--keep-stages",
            help="Write the result of each recipe that the recipe uses as a model, to OUT.stage-NAME, and keep it.",
        ),
    ],
    "stream": Stream,
    "max_spool_bytes": MaxSpool,
    "push": Annotated[
        str | None,
        typer.Option(
            "--push", metavar="ORG/NAME[@BRANCH]", help="Upload OUT to the hub when it is finished, as a private model."
        ),
    ],
    "ray": Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Have a Ray cluster do the work, over a shared folder or a bucket: HOST:PORT; auto: this machine's "
            "cluster, or a new one on this machine; local: a new one.",
        ),
    ],
    "public": Annotated[bool, typer.Option("--public", help="Make a model that is created on the hub visible to everyone.")],
    "commit_message": Annotated[
        str | None,
        typer.Option("--commit-message", metavar="TEXT", help="Of the commit on the hub; the plan's title if not given."),
    ],
}
"""Field of `RecipeOptions`, `QuantizeSettings`, `ExtractSettings`, `TransplantSettings` or `RunOptions` → its flag."""

_RECORDS = RecipeOptions, QuantizeSettings, ExtractSettings, TransplantSettings, RunOptions
_LISTS = ("settings", "include", "exclude", "save_modules")
"""Fields whose flags may be given several times."""


def expand(*skipped: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose parameters are option records: each of their fields becomes a flag.

    skipped  fields that the command has no flag for
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters, records = [], {}
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.annotation not in _RECORDS:
                parameters.append(parameter)
                continue
            names = [field.name for field in fields(parameter.annotation) if field.name not in skipped]
            records[parameter.name] = parameter.annotation, names
            defaults = parameter.annotation()
            parameters += [
                inspect.Parameter(name, parameter.KEYWORD_ONLY, default=getattr(defaults, name) or None, annotation=FLAGS[name])
                if name in _LISTS
                else inspect.Parameter(name, parameter.KEYWORD_ONLY, default=getattr(defaults, name), annotation=FLAGS[name])
                for name in names
            ]

        @wraps(function)
        def command(**given: Any) -> None:
            for name in _LISTS:
                if name in given:
                    given[name] = (dict if name == "settings" else tuple)(given[name] or ())
            made = {to: kind(**{name: given.pop(name) for name in names}) for to, (kind, names) in records.items()}
            function(**given, **made)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate
