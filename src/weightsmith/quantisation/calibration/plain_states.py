"""The `plain_states` product: as `states`, with plain weights, for a measurement."""

from __future__ import annotations

from weightsmith.products import ProductKind
from weightsmith.quantisation.calibration.states import check, compute

KIND = ProductKind("measuring layer by layer", compute=compute, check=check, device=True, transient=True)
