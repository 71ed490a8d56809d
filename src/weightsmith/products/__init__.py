"""Products: values that must exist before some steps of a plan can run. `base.py` is the form; one file a kind.

A kind either *streams* (the engine shows it the tiles of the steps that need it) or *computes* (a function that runs in a
thread of its own, and asks for the tensors it wants). Both run in one graph with the steps, are kept in the staging folder
with a checksum, and are found again when work is resumed. Adding a kind is adding a file with a `KIND` and its name to
`KINDS`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weightsmith.errors import UnknownName, nearest
from weightsmith.products.base import Bench as Bench
from weightsmith.products.base import Kind as Kind
from weightsmith.products.base import Report as Report
from weightsmith.products.base import Survey as Survey

KINDS = {
    "thresholds": "weightsmith.products.thresholds",
    "activity": "weightsmith.products.activity",
    "router": "weightsmith.mixture.routing.product",
    "neuron_order": "weightsmith.mixture.surgery.matching",
}
"""`Product.op` → the module whose `KIND` it is. Modules are imported when a plan has such a product."""


@cache
def find_kind(op: str) -> Kind:
    """The kind of a product. Raises UnknownName."""
    if op not in KINDS:
        raise UnknownName(f"there is no kind of product called '{op}'{nearest(op, KINDS)}")
    kind: Kind = import_module(KINDS[op]).KIND
    return kind
