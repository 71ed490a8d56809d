"""Where a router would route the tokens of each expert's prompts and held-out texts.

Measured on the hidden states of the base. The mixture itself is not run, and its states differ once a token has been routed
to an expert that differs from the base's MLP. So from the second layer on, the shares are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding
from weightsmith._base.pages.values import safe
from weightsmith._base.text import markdown_table

ALONE = 0.9
"""An expert that gets at least this share of all tokens gets "nearly all"."""

NOTHING = 0.01
"""An expert that gets less than this share of its own tokens gets "nothing"."""

Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """Texts of one expert.

    expert    its number
    held_out  the texts are its held-out file, not its prompts
    tokens    token count, without padding and the tokenizer's prefix
    """

    expert: int
    held_out: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class Routing:
    """Shares of tokens, float64 [layers, groups, experts].

    experts    names as in the recipe, in the order of the router's rows
    per_token  experts per token
    first      tokens for which the expert's logit is the largest; a group's shares sum to 1
    sent       tokens for which it is among the `per_token` largest; they sum to `per_token`
    """

    experts: tuple[str, ...]
    per_token: int
    groups: tuple[Group, ...]
    first: Shares
    sent: Shares

    def own(self, shares: Shares) -> Shares:
        """The shares of each group's own expert: [layers, groups]."""
        return np.stack([shares[:, g, group.expert] for g, group in enumerate(self.groups)], axis=1)

    def label(self, expert: int) -> str:
        """An expert's number and name."""
        return f"{expert} {self.experts[expert]}"

    def title(self, group: Group) -> str:
        """A description of the texts.

        >>> Routing(("fr", "de"), 2, (), np.zeros(0), np.zeros(0)).title(Group(1, True, 9))
        'held-out texts of 1 de'
        """
        return f"{'held-out texts' if group.held_out else 'prompts'} of {self.label(group.expert)}"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; shares are rounded to four places."""
        return {
            "states": "hidden states of the base; in the mixture they differ after the first layer",
            "experts": list(self.experts),
            "experts_per_token": self.per_token,
            "texts": [
                {
                    "expert": group.expert,
                    "held_out": group.held_out,
                    "tokens": group.tokens,
                    "first_by_layer": self.first[:, g].round(4).tolist(),
                    "sent_by_layer": self.sent[:, g].round(4).tolist(),
                }
                for g, group in enumerate(self.groups)
            ],
        }

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows: for each group, the `first` share of each expert (mean over layers), and its own expert's shares."""
        own_first, own_sent = self.own(self.first), self.own(self.sent)
        head = (
            "tokens of",
            *(f"to {self.label(e)}" for e in range(len(self.experts))),
            f"own in top {self.per_token}",
            "least, in layer",
        )
        rows = []
        for g, group in enumerate(self.groups):
            worst = int(own_first[:, g].argmin())
            means = (f"{share:.0%}" for share in self.first[:, g].mean(0))
            rows.append((self.title(group), *means, f"{own_sent[:, g].mean():.0%}", f"{own_first[worst, g]:.0%}, {worst}"))
        return head, rows

    def by_layer(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows: for each layer, the `first` share of each group's own expert."""
        own = self.own(self.first)
        head = ("layer", *(self.title(group) for group in self.groups))
        return head, [(str(i), *(f"{share:.0%}" for share in row)) for i, row in enumerate(own)]

    def markdown(self) -> str:
        """The table for the model card."""
        return markdown_table(*self.table())

    def warnings(self, where: str) -> list[Finding]:
        """Warnings if one expert gets nearly all tokens, or one gets nothing of its own texts."""
        found = []
        prompts = [g for g, group in enumerate(self.groups) if not group.held_out]
        overall = self.first[:, prompts].mean(1)
        for e in range(len(self.experts)):
            if len(self.experts) > 1 and (layers := np.flatnonzero(overall[:, e] >= ALONE)).size:
                what = f"expert {self.label(e)} comes first for nearly all tokens of all prompts in {runs(layers)}"
                found.append(Finding(what, where, fix="give prompts that differ more, or another gate_mode"))
        own = self.own(self.sent)
        for g, group in enumerate(self.groups):
            if (layers := np.flatnonzero(own[:, g] < NOTHING)).size:
                what = f"expert {self.label(group.expert)} gets nothing of its own "
                what += f"{'held-out texts' if group.held_out else 'prompts'} in {runs(layers)}"
                found.append(Finding(what, where, fix="give prompts that differ more, or another gate_mode"))
        return found


class Counter:
    """Counts where tokens are routed, layer by layer."""

    def __init__(self, experts: Sequence[str], per_token: int, groups: Sequence[Group], layers: int) -> None:
        shape = layers, len(groups), len(experts)
        self._routing = Routing(tuple(experts), per_token, tuple(groups), np.zeros(shape), np.zeros(shape))

    def add(self, layer: int, group: int, logits: npt.NDArray[np.float64]) -> None:
        """Count the tokens of a group. logits: [tokens, experts]; ties go to the lower expert number."""
        order = np.argsort(-logits, axis=1, kind="stable")
        n = logits.shape[1]
        first = np.bincount(order[:, 0], minlength=n)
        sent = np.bincount(order[:, : self._routing.per_token].reshape(-1), minlength=n)
        self._routing.first[layer, group] = first / len(logits)
        self._routing.sent[layer, group] = sent / len(logits)

    @property
    def routing(self) -> Routing:
        """The shares counted so far."""
        return self._routing


def runs(layers: Sequence[int] | npt.NDArray[np.intp]) -> str:
    """Layer numbers as a short text.

    >>> runs([3]), runs([0, 1, 2, 5])
    ('layer 3', 'layers 0 to 2, 5')
    """
    numbers = [int(i) for i in layers]
    parts: list[list[int]] = []
    for i in numbers:
        if parts and parts[-1][-1] == i - 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    text = ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts)
    return f"layer{'s' if len(numbers) > 1 else ''} {text}"


# ---- Plots where a router sends tokens, as SVG, without a plotting package.

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
