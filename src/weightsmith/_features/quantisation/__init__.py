"""Formats of quantised checkpoints: each makes a draft of plain tensors one of stored codes.

base.py      `Format`: the interface; targets
formats.py   `FORMATS`: the list of all; those that need no data; those that plan whole models themselves, with importances and
             types from a measurement: GGUF; `weightsmith quantize` and `dequantize`
exl2.py      EXL2: settings for each block, from a measurement or without
exl3.py      EXL3: a rate for each weight
optimise.py  which candidate each block gets, for a size
calibration/ products that quantise layer by layer, for what a text makes of their inputs

What a stored format is, how its codes are chosen, and which models its programs load: `_models/formats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsmith._base.errors import WeightsmithError
from weightsmith._features.quantisation.options import QuantizeSettings

if TYPE_CHECKING:  # the options of this package are imported with it, by every command
    from weightsmith._planning.options import RecipeOptions
    from weightsmith._planning.planner.prepared import Prepared


def format_problems(name: str | None, settings: QuantizeSettings) -> list[WeightsmithError]:
    """The problems of a format's name and settings, before anything is opened. Formats are imported if one is asked for."""
    if name is None and not settings.changed:
        return []
    from weightsmith._features.quantisation.formats import problems_of

    return problems_of(name, settings)


def store_as(prepared: Prepared, options: RecipeOptions, settings: QuantizeSettings) -> None:
    """Change a draft of plain tensors to one in the format `options.quantize`; None: leave it.

    Raises PlanError as `Format.apply`.
    """
    if options.quantize is None:
        return
    from weightsmith._features.quantisation.formats import FORMATS, apply_format

    if options.max_shard_bytes is None:
        prepared.draft.max_shard_bytes = FORMATS[options.quantize].shard_bytes
    apply_format(prepared, options.quantize, settings)
