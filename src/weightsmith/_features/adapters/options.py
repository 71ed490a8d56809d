"""The options of `extract_lora` and `convert_lora`."""

from __future__ import annotations

from dataclasses import dataclass

from weightsmith._base.options import option, option_record
from weightsmith._base.tensors import DTYPE_NAMES, DType


@option_record("extract_lora", group="Modules")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings:
    """How `extract_lora` makes an adapter of a fine-tune. Modules are named as in the base: `model.layers.0.mlp.up_proj`."""

    max_rank: int = option(
        128,
        "--max-rank, --rank R",
        "Maximum rank of a module",
        details="Also the rank of every module, unless `--energy` or `--max-parameters` chooses it.",
        least=1,
        group="Ranks",
    )
    energy: float | None = option(
        None,
        "--energy SHARE",
        "Choose ranks that keep this share of the change, such as 0.9",
        details="The smallest rank of each matrix that keeps it; rounding noise is not counted.",
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
    sv_epsilon: float = option(0.0, "--sv-epsilon S", "Drop singular values up to this size", least=0, group="Ranks", brief=())
    exact: bool = option(
        False,
        "--exact",
        "Use exact singular value decompositions",
        details="Otherwise randomised ones are used where they are cheaper.",
        group="Advanced",
    )
    embed_lora: bool = option(
        False,
        "--embed-lora/--no-embed-lora",
        "Decompose embedding and head too",
        details="Otherwise they are saved whole if they differ.",
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
        details="NAME is the end of the module's name.",
        brief=(),
    )
    distribute_scale: bool = option(
        True,
        "--distribute-scale/--no-distribute-scale",
        "Share singular values between A and B",
        details="Otherwise all are in A.",
        group="Advanced",
    )
    skip_undecomposable: bool = option(
        False,
        "--skip-undecomposable",
        "Leave out norms, embedding and head",
        details="Otherwise tensors that cannot be decomposed are saved whole.",
        brief=(),
    )
    layout: str = option(
        "peft",
        "--for PROGRAM",
        "Program that loads the adapter",
        details="vLLM loads factors of linear layers only.",
        choices=("peft", "vllm"),
        group="Output",
    )
    intruder_scale: float = option(
        1.0,
        "--intruder-scale SCALE",
        "Scale of intruder dimensions; 0 removes them",
        least=0,
        most=1,
        details="They are singular vectors of the fine-tune that the base lacks. See [modules](lora.md#modules).",
        group="Advanced",
    )
    out_dtype: DType | None = option(
        None, "--out-dtype DTYPE", "Dtype of the factors", unset="the fine-tune's", choices=DTYPE_NAMES, group="Output"
    )


@option_record("convert_lora", group="Output")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """How `convert_lora` writes an adapter."""

    layout: str = option(
        "peft",
        "--for PROGRAM",
        "Program that loads the adapter",
        details="See [programs](lora.md#converting-adapters).",
        choices=("peft", "mlx", "llama.cpp", "kohya", "diffusers", "comfyui"),
    )
    base: str | None = option(
        None,
        "--base MODEL",
        "Model that the adapter was trained on",
        details="Its config and the names of its tensors are read, no weights. llama.cpp's files need it.",
        unset="the one that the adapter names",
        path=True,
    )
    out_dtype: DType | None = option(
        None, "--out-dtype DTYPE", "Dtype of the factors", unset="the adapter's", choices=DTYPE_NAMES
    )
