"""The `plain_states` product: as `states`, with plain weights, for a measurement."""

from __future__ import annotations

from weightsmith.products import Kind
from weightsmith.quantisation.calibration.states import check, compute

KIND = Kind("measuring layer by layer", compute=compute, check=check, device=True)
