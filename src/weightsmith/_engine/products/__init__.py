"""Products: values that must exist before some steps of a plan can run. One file per kind.

A kind either *streams* (the engine passes it the tiles of the steps that need it) or *computes* (a function that runs in
its own thread and requests the tensors it needs). Both run in one graph with the steps. Results are stored in the staging
folder with a checksum and reused on resume. To add a kind, add a file with a `KIND` and its name to `KINDS`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weightsmith._base.errors import UnknownName, nearest
from weightsmith.abc.product import ProductContext as ProductContext
from weightsmith.abc.product import ProductKind as ProductKind
from weightsmith.abc.product import Report as Report
from weightsmith.abc.product import StreamingReduction as StreamingReduction

KINDS = {
    "thresholds": "weightsmith._engine.products.thresholds",
    "activity": "weightsmith._engine.products.activity",
    "magnitudes": "weightsmith._engine.products.magnitudes",
    "router": "weightsmith._features.mixture.routing.product",
    "neuron_order": "weightsmith._features.mixture.surgery.neurons",
    "embedding": "weightsmith._activations.embedding",
    "states": "weightsmith._activations.states",
    "gradients": "weightsmith._activations.gradients",
    "statistic": "weightsmith._activations.statistic",
    "quantised_layer": "weightsmith._features.quantisation.calibration.layer",
    "quantised_states": "weightsmith._features.quantisation.calibration.quantised_states",
    "measured_layer": "weightsmith._features.quantisation.calibration.measured",
    "measured_blocks": "weightsmith._features.quantisation.calibration.measured_blocks",
    "factors": "weightsmith._features.adapters.factors",
    "changes": "weightsmith._features.adapters.changes",
    "transplanted_rows": "weightsmith._features.transplant.rows",
    "cores": "weightsmith._features.adapters.cores",
    "merged_factors": "weightsmith._features.adapters.merged_factors",
    "differences": "weightsmith._reports.look.differences",
    "statistics": "weightsmith._reports.look.inspect",
    "alignments": "weightsmith._reports.look.comparison",
    "survival": "weightsmith._reports.look.sampling",
    "combination": "weightsmith._features.adapters.combinations",
}
"""`Product.op` → the module that defines `KIND`, imported when a plan first uses it."""


@cache
def find_kind(op: str) -> ProductKind:
    """The kind of a product. Raises UnknownName."""
    if op not in KINDS:
        raise UnknownName(f"unknown kind of product '{op}'{nearest(op, KINDS)}")
    kind: ProductKind = import_module(KINDS[op]).KIND
    return kind
