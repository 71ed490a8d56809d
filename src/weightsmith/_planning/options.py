"""The options of recipes: how a plan is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import ParameterError
from weightsmith._base.options import option, option_record, options_of
from weightsmith._base.tensors import DTYPE_NAMES, DType

SHARD_BYTES = 5_000_000_000

PLANNED = ("merge", "moe", "plan", "preview")
RECIPES = (*PLANNED, "tune")
COPIES = ("quantize", "dequantize")
ADAPTERS = ("merge", "plan")


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
        details="`quantize` rounds to it first.",
        commands=(*PLANNED, *COPIES),
        group="Output",
    )
    max_shard_bytes: int | None = option(
        None,
        "--max-shard-size SIZE",
        "Maximum size of a weight file",
        unset="5GB; GGUF: 50GB",
        least=1,
        details="A larger tensor gets a file of its own.",
        commands=("merge", "moe", "plan", *COPIES),
        group="Output",
    )
    seed: int = option(
        0,
        "--seed N",
        "Seed for random masks, router weights and noise",
        details="Calibration rows are drawn with it too. The same seed gives the same bytes with any number of threads.",
        commands=(*RECIPES, "quantize"),
    )
    ignore_quantization_config: bool = option(
        False,
        "--ignore-quantization-config",
        "Ignore the quantisation that config.json declares, and read plain weights",
        details="For models of tools that leave a `quantization_config` behind. Weights that are codes are still refused. See "
        "[plain weights](quantize.md#plain-weights-that-configjson-says-are-quantised).",
        commands=(*RECIPES, *COPIES),
        group="Advanced",
    )
    lenient: bool = option(
        False,
        "--mergekit-lenient",
        "Warn about settings that mergekit ignores, instead of failing",
        details="The same for experts with equal prompts or router weights.",
    )
    allow_code: bool = option(
        False, "--allow-code", "Allow merge_method to run a Python file", details="See [methods of your own](own-method.md)."
    )
    routing_report: bool | None = option(
        None,
        "--routing-report/--no-routing-report",
        "Write the routing of the prompts to OUT/routing.json and .svg",
        unset="only if the gate mode runs the base on the prompts",
        commands=("moe", "plan"),
        group="Output",
        brief=("moe",),
    )
    quantize: str | None = option(
        None,
        "--quantize FORMAT",
        "Quantised format of the output; `weightsmith quantize --list` lists them",
        choices="_features.quantisation.formats:FORMATS",
        lists="weightsmith quantize --list",
        replaced=dict.fromkeys(
            ("bnb", "bnb-4bit", "bnb-8bit", "bitsandbytes", "nf4", "qlora"),
            "transformers quantises to it when it loads a model, with BitsAndBytesConfig",
        ),
        details="See [quantised checkpoints](quantize.md).",
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
        details="See [merging adapters](lora.md#merging-adapters).",
        commands=ADAPTERS,
        brief=(),
    )
    adapter_space: str = option(
        "core",
        "--adapter-space SPACE",
        "Space in which adapters are merged",
        details="`compressed` only with `--adapter-rank`.",
        choices=("core", "knots", "compressed"),
        commands=ADAPTERS,
        group="Advanced",
    )
    check_loading: bool = option(
        True,
        "--check-loading/--no-check-loading",
        "Check that transformers can load the output",
        details="The output is compared with the model that transformers builds from its config.json. Only for stacks, "
        "mixtures and surgery: [what is checked](#what-is-checked-before-a-merge).",
        group="Advanced",
    )
    settings: Mapping[str, Any] = option(
        dict, "--set KEY=VALUE", "Override a recipe value, such as parameters.t=0.3 (repeatable)", details="The value is YAML."
    )

    @property
    def shard_bytes(self) -> int:
        """`max_shard_bytes`, or its default; a quantised format may have another one.

        >>> RecipeOptions().shard_bytes
        5000000000
        """
        return SHARD_BYTES if self.max_shard_bytes is None else self.max_shard_bytes


def output_dtype(asked: object) -> DType | None:
    """An output dtype, from a string or a numpy, torch or weightsmith dtype. Raises ParameterError.

    >>> output_dtype("bfloat16").name
    'BF16'
    """
    try:
        dtype: DType | None = options_of(RecipeOptions)["out_dtype"].read(asked)
    except ValueError as error:
        raise ParameterError(str(error), where="out_dtype") from None
    return dtype
