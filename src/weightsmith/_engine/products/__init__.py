"""Products: values that must exist before some steps of a plan can run. `abc/product.py` has the interface; one file per kind.

A kind either *streams* (the engine passes it the tiles of the steps that need it) or *computes* (a function that runs in
its own thread and requests the tensors it needs). Both run in one graph with the steps. Results are stored in the staging
folder with a checksum and reused on resume. To add a kind, add a file with a `KIND` and its name to `OWN`; or a package with an
entry point of the group `weightsmith.products`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsmith._base.plugins import Plugins
from weightsmith.abc.product import ProductKind

if TYPE_CHECKING:
    from weightsmith._plans import Plan, Product

OWN = {
    "thresholds": "weightsmith._engine.products.thresholds:KIND",
    "activity": "weightsmith._engine.products.activity:KIND",
    "magnitudes": "weightsmith._engine.products.magnitudes:KIND",
    "router": "weightsmith._features.mixture.router:KIND",
    "neuron_order": "weightsmith._features.mixture.experts:KIND",
    "own_text": "weightsmith._activations.own_text:KIND",
    "text_rows": "weightsmith._activations.states:TEXT_ROWS",
    "states": "weightsmith._activations.states:STATES",
    "gradients": "weightsmith._activations.gradients:KIND",
    "statistic": "weightsmith._activations.statistic:KIND",
    "stored_statistic": "weightsmith._activations.stored:KIND",
    "given": "weightsmith._activations.states:GIVEN",
    "embedded_rows": "weightsmith._activations.states:EMBEDDED_ROWS",
    "sampled_states": "weightsmith._activations.states:SAMPLED_STATES",
    "losses": "weightsmith._activations.losses:KIND",
    "quantised_layer": "weightsmith._features.quantisation.calibration.layer:QUANTISED",
    "quantised_states": "weightsmith._features.quantisation.calibration.layer:STATES",
    "largest_state": "weightsmith._features.quantisation.calibration.activations:LARGEST_STATE",
    "largest_states": "weightsmith._features.quantisation.calibration.activations:LARGEST_STATES",
    "activation_scales": "weightsmith._features.quantisation.calibration.activations:SCALES",
    "measured_layer": "weightsmith._features.quantisation.calibration.costs:MEASURED_LAYER",
    "scored_layer": "weightsmith._features.quantisation.calibration.costs:SCORED_LAYER",
    "scored_vocabulary": "weightsmith._features.quantisation.calibration.costs:SCORED_VOCABULARY",
    "measured_blocks": "weightsmith._features.quantisation.calibration.costs:MEASURED_BLOCKS",
    "token_row": "weightsmith._models.formats.gguf.mmproj:KIND",
    "factors": "weightsmith._features.adapters.factors:KIND",
    "changes": "weightsmith._features.adapters.select:KIND",
    "transplanted_rows": "weightsmith._features.transplant.rows:KIND",
    "cores": "weightsmith._features.adapters.cores:CORES",
    "merged_factors": "weightsmith._features.adapters.cores:MERGED_FACTORS",
    "differences": "weightsmith._reports.look.differences:KIND",
    "statistics": "weightsmith._reports.look.inspect:KIND",
    "alignments": "weightsmith._reports.look.diff:KIND",
    "survival": "weightsmith._reports.look.preview:KIND",
    "combination": "weightsmith._features.adapters.combinations:KIND",
}
"""`Product.op` → its kind, imported when a plan first uses it."""

KINDS = Plugins("kind of product", "weightsmith.products", ProductKind, OWN)
find_kind = KINDS.get


def divisible(product: Product) -> bool:
    """Whether several processes can measure the product together."""
    kind = find_kind(product.op)
    return kind.reduce is not None and not product.needs and kind.reduce(product).divisible


def has_tasks(plan: Plan) -> bool:
    """Whether other processes can help the one that computes the products of a plan."""
    return any(find_kind(product.op).help is not None for product in plan.products)
