"""LN tuning: norms that were trained take the place of the model's (Zhao et al. 2023, arXiv 2312.11420)."""

from __future__ import annotations

from weightsmith.abc.adapter import AdapterKind

KIND = AdapterKind(title="LN tuning", types=("LN_TUNING",), parts=("ln_tuning_layers",), replaces=True)
