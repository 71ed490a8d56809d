"""Plots where a router sends tokens, as SVG, without a plotting package."""

from __future__ import annotations

from collections.abc import Iterator

from weightsmith.mixture.routing.report import Routing
from weightsmith.pages.words import safe

CELL = 18  # pixels per layer and expert
LEFT, TOP, GAP = 230, 46, 34
LOW, HIGH = (247, 250, 253), (8, 64, 129)  # colours of the shares 0 and 1


def heat_map(routing: Routing) -> str:
    """An SVG with a panel for the texts of each expert, a row for each expert and a column for each layer.

    A cell's shade is the share of the texts' tokens for which the expert comes first in that layer; the tooltip has the
    number. With a good router, only the row marked with an arrow is dark.
    """
    layers, experts = routing.first.shape[0], len(routing.experts)
    panel = experts * CELL + GAP
    width, height = LEFT + layers * CELL + 20, TOP + len(routing.groups) * panel + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="13">Share of tokens for which an expert comes first (hidden states of the base)</text>',
    ]
    for g in range(len(routing.groups)):
        parts += _panel(routing, g, TOP + g * panel)
    bottom = TOP + len(routing.groups) * panel
    parts += [
        f'<text x="{LEFT + i * CELL + CELL // 2}" y="{bottom}" text-anchor="middle">{i}</text>'
        for i in range(0, layers, 1 if layers <= 10 else 5)
    ]
    return "\n".join([*parts, f'<text x="10" y="{bottom}">layer</text>', "</svg>"]) + "\n"


def _panel(routing: Routing, g: int, top: int) -> Iterator[str]:
    group = routing.groups[g]
    yield f'<text x="10" y="{top + 4}" font-weight="bold">{safe(routing.title(group))}, {group.tokens:,} tokens</text>'
    for e in range(len(routing.experts)):
        y = top + 10 + e * CELL
        mark = "→ " if e == group.expert else ""
        label = routing.label(e)
        label = label if len(label) <= 32 else f"{label[:8]}…{label[-23:]}"
        yield f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{mark}{safe(label)}</text>'
        for i, share in enumerate(routing.first[:, g, e]):
            yield (
                f'<rect x="{LEFT + i * CELL}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{_colour(share)}">'
                f"<title>layer {i}: {share:.1%}</title></rect>"
            )


def _colour(share: float) -> str:
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(LOW, HIGH, strict=True))
