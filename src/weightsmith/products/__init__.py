"""Products: values that must exist before some steps of a plan can run. `base.py` defines the interface; one file per kind.

A kind either *streams* (the engine passes it the tiles of the steps that need it) or *computes* (a function that runs in
its own thread and requests the tensors it needs). Both run in one graph with the steps. Results are stored in the staging
folder with a checksum and reused on resume. To add a kind, add a file with a `KIND` and its name to `KINDS`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weightsmith.errors import UnknownName, nearest
from weightsmith.products.base import ProductContext as ProductContext
from weightsmith.products.base import ProductKind as ProductKind
from weightsmith.products.base import Report as Report
from weightsmith.products.base import StreamingReduction as StreamingReduction

KINDS = {
    "thresholds": "weightsmith.products.thresholds",
    "activity": "weightsmith.products.activity",
    "magnitudes": "weightsmith.products.magnitudes",
    "router": "weightsmith.mixture.routing.product",
    "neuron_order": "weightsmith.mixture.surgery.matching",
    "embedding": "weightsmith.quantisation.calibration.embedding",
    "states": "weightsmith.quantisation.calibration.states",
    "quantised_layer": "weightsmith.quantisation.calibration.layer",
    "plain_states": "weightsmith.quantisation.calibration.plain_states",
    "gradients": "weightsmith.quantisation.calibration.gradients",
    "measured_layer": "weightsmith.quantisation.calibration.measured",
    "measured_blocks": "weightsmith.quantisation.calibration.measured_blocks",
    "importances": "weightsmith.quantisation.calibration.importances",
    "factors": "weightsmith.adapters.factors",
    "changes": "weightsmith.adapters.changes",
    "transplanted_rows": "weightsmith.transplant.rows",
    "cores": "weightsmith.adapters.cores",
    "merged_factors": "weightsmith.adapters.merged_factors",
    "differences": "weightsmith.look.differences",
    "statistics": "weightsmith.look.statistics",
    "alignments": "weightsmith.look.alignments",
    "survival": "weightsmith.look.survival",
    "combination": "weightsmith.adapters.combinations",
}
"""`Product.op` → the module that defines `KIND`, imported when a plan first uses it."""


@cache
def find_kind(op: str) -> ProductKind:
    """The kind of a product. Raises UnknownName."""
    if op not in KINDS:
        raise UnknownName(f"unknown kind of product '{op}'{nearest(op, KINDS)}")
    kind: ProductKind = import_module(KINDS[op]).KIND
    return kind
