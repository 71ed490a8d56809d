"""Plans of a single model: stored in a format, or with plain weights."""

from __future__ import annotations

import os

from weightsmith._base.options import QuantizeSettings, RecipeOptions
from weightsmith._features.quantisation import quantised
from weightsmith._planning.planner import Prepared
from weightsmith._planning.planner.build import assemble
from weightsmith._plans import Made
from weightsmith._version import __version__


def prepare_copy(model: str | os.PathLike[str], options: RecipeOptions, settings: QuantizeSettings) -> Prepared:
    """Plan a copy of a model in the format `options.quantize`; None: with plain weights.

    model  as in a recipe: a folder, a hub id, `base+adapter`

    Raises PlanError with all problems.
    """
    recipe = {"merge_method": "passthrough", "models": [{"model": os.fspath(model)}]}
    assembled = quantised(lambda: assemble(recipe, options), options.quantize, settings)
    made = Made("dequantize", f"Dequantised with weightsmith {__version__}.", relation="")
    if options.quantize is not None:
        title = f"Quantised with weightsmith {__version__} as `{options.quantize}`."
        made = Made("quantize", title, relation="quantized", format=options.quantize)
    assembled.draft.made = made
    return assembled.finish()
