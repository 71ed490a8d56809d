"""The `router` product: router weights of a mixture, and where they route the tokens of the prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from weightsmith._base.errors import Finding
from weightsmith._base.pages import HeatMap
from weightsmith._base.pages.values import Block
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.mixture.routing.gates import MODES
from weightsmith._features.mixture.routing.gating import Gating, outs_of, router_dtype
from weightsmith._features.mixture.routing.report import Group, Routing, heat_map
from weightsmith._features.mixture.routing.route import route, useless_rows
from weightsmith._plans import Product
from weightsmith._plans.codec import has_type
from weightsmith.abc.product import Arrays

JSON_NAME = "routing.json"
PICTURE_NAME = "routing.svg"


def _compute(bench: ProductContext) -> Arrays:
    gating = Gating.of(bench.product)
    rows, routing = route(gating, bench)
    if gating.sigmoid:
        # The hidden state's norm is near √hidden. If rows are that long too, as random ones are, the logits are so far
        # below 0 that all of a token's sigmoids may be 0.
        rows[:, : gating.routed] /= max(1.0, float(np.linalg.norm(rows[:, : gating.routed], axis=-1).max()))
    dtype = router_dtype(bench.product).numpy
    per_layer = sum(not out.name.startswith("routing: ") for out in bench.product.outs) // gating.base.layers
    arrays = []
    for layer in rows:
        parts = [np.repeat(layer[: gating.routed], gating.groups, axis=0), layer[gating.routed :]]
        arrays += [part.astype(dtype) for part in parts[:per_layer]]
    if routing is not None:
        arrays += [routing.first, routing.sent, np.array([group.tokens for group in routing.groups], np.int64)]
    return arrays


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Where the router routes the tokens of the experts' texts, and problems with its rows.

    routing  None if not requested
    useless  warnings about rows that cannot distinguish experts
    """

    routing: Routing | None
    useless: tuple[Finding, ...] = ()

    def files(self) -> dict[str, bytes]:
        """routing.json and a heat map."""
        if self.routing is None:
            return {}
        data = json.dumps(self.routing.to_json(), indent=1, ensure_ascii=False) + "\n"
        return {JSON_NAME: data.encode(), PICTURE_NAME: heat_map(self.routing).encode()}

    def blocks(self) -> list[Block]:
        """A heat map for the texts of each expert: by layer, where their tokens go."""
        if self.routing is None:
            return []
        routing, about = self.routing, "Share of the tokens for which the expert comes first, on the hidden states of the base."
        layers = tuple(f"layer {i}" for i in range(routing.first.shape[0]))
        experts = tuple(map(routing.label, range(len(routing.experts))))
        return [
            HeatMap(f"Routing: {routing.title(group)}", layers, experts, values, "share", about, span=(0.0, 1.0))
            for g, group in enumerate(routing.groups)
            for values in [tuple(map(tuple, routing.first[:, g].tolist()))]
        ]

    def section(self) -> str:
        """The model card's section on routing."""
        if self.routing is None:
            return ""
        return f"""
## Routing

Share of the tokens of the experts' texts for which each expert comes first, averaged over layers. Measured on the hidden
states of the base; in this model they differ after the first layer. Per-layer values: [{JSON_NAME}]({JSON_NAME}).

{self.routing.markdown()}

![Share of tokens for which an expert comes first, by layer]({PICTURE_NAME})
"""

    def warnings(self, where: str) -> list[Finding]:
        """Warnings about a router that cannot work."""
        return [*self.useless, *([] if self.routing is None else self.routing.warnings(where))]


def _report(product: Product, arrays: Arrays) -> RoutingReport | None:
    gating = Gating.of(product)
    useless: tuple[Finding, ...] = ()
    if gating.lenient and MODES[gating.mode].needs != "nothing":
        per_layer = sum(not out.name.startswith("routing: ") for out in product.outs) // gating.base.layers
        rows = np.stack([layer[:: gating.groups] for layer in arrays[: per_layer * gating.base.layers : per_layer]])
        useless = tuple(replace(p.finding, fix="") for p in useless_rows(rows, gating))
    if not gating.report:
        return RoutingReport(None, useless) if useless else None
    first, sent, tokens = arrays[-3:]
    present = np.flatnonzero(tokens)  # a held-out text may have no token
    groups = tuple(Group(*gating.counted[g], int(tokens[g])) for g in present)
    names = tuple(expert.name for expert in gating.experts[: gating.routed])
    per_token = max(1, gating.per_token // gating.groups)
    return RoutingReport(Routing(names, per_token, groups, first[:, present], sent[:, present]), useless)


def _check(product: Product) -> str:
    if not has_type(product.settings, Gating):
        return "its settings are not those of a router product"
    gating = Gating.of(product)
    layers, experts, hidden = gating.shape
    if (
        gating.mode not in MODES
        or not 1 <= gating.routed <= experts
        or min(layers, hidden, gating.groups, gating.per_token) < 1
    ):
        return "its settings are inconsistent"
    if gating.seed < 0 or (gating.prompt_tokens or 1) < 1:
        return "its seed or its prompt_tokens is negative"
    rows = [out for out in product.outs if not out.name.startswith("routing: ")]
    n = max(len(rows) // layers, 1)
    routers = [rows[i : i + n] for i in range(0, len(rows), n)]
    shapes = [(gating.routed * gating.groups, hidden), (experts - gating.routed, hidden)][:n]
    if len(routers) != layers or any([out.shape for out in layer] != shapes for layer in routers):
        return "its arrays are not the rows of its experts"
    return "" if outs_of(gating, routers) == product.outs else "its arrays are not those of its report"


KIND = ProductKind("computing hidden states and router weights", compute=_compute, report=_report, check=_check, device=True)
