"""Where a router would route the tokens of each expert's prompts and held-out texts.

Measured on the hidden states of the base. The mixture itself is not run, and its states differ once a token has been routed
to an expert that differs from the base's MLP. So from the second layer on, the shares are estimates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding
from weightsmith._base.report import HeatMap
from weightsmith._base.report.blocks import Block
from weightsmith._base.report.charts import heat_map, picture
from weightsmith._base.text import markdown_table

ALONE = 0.9
"""An expert that gets at least this share of all tokens gets "nearly all"."""

NOTHING = 0.01
"""An expert that gets less than this share of its own tokens gets "nothing"."""

SPAN = 0.0, 1.0
"""Shares that have the first and the last colour of a heat map."""

JSON_NAME = "routing.json"
PICTURE_NAME = "routing.svg"

Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PromptGroup:
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
    groups: tuple[PromptGroup, ...]
    first: Shares
    sent: Shares

    @classmethod
    def zeros(cls, experts: Sequence[str], per_token: int, groups: Sequence[PromptGroup], layers: int) -> Routing:
        """Shares to be counted."""
        shape = layers, len(groups), len(experts)
        return cls(tuple(experts), per_token, tuple(groups), np.zeros(shape), np.zeros(shape))

    def count(self, layer: int, group: int, logits: npt.NDArray[np.float64]) -> None:
        """Count the tokens of a group. logits: [tokens, experts]; ties go to the lower expert number."""
        order, n = np.argsort(-logits, axis=1, kind="stable"), logits.shape[1]
        self.first[layer, group] = np.bincount(order[:, 0], minlength=n) / len(logits)
        self.sent[layer, group] = np.bincount(order[:, : self.per_token].reshape(-1), minlength=n) / len(logits)

    def of_own_expert(self, shares: Shares) -> Shares:
        """The shares of each group's own expert: [layers, groups]."""
        return np.stack([shares[:, g, group.expert] for g, group in enumerate(self.groups)], axis=1)

    def label(self, expert: int) -> str:
        """An expert's number and name."""
        return f"{expert} {self.experts[expert]}"

    def title(self, group: PromptGroup) -> str:
        """A description of the texts.

        >>> Routing(("fr", "de"), 2, (), np.zeros(0), np.zeros(0)).title(PromptGroup(1, True, 9))
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
        own_first, own_sent = self.of_own_expert(self.first), self.of_own_expert(self.sent)
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
        shares = self.of_own_expert(self.first)
        head = ("layer", *(self.title(group) for group in self.groups))
        return head, [(str(i), *(f"{share:.0%}" for share in row)) for i, row in enumerate(shares)]

    def by_expert(self) -> HeatMap:
        """For the texts of each expert, by layer, the share of their tokens that each expert comes first for.

        With a good router, only the rows marked with an arrow are dark.
        """
        groups, experts = list(enumerate(self.groups)), range(len(self.experts))
        titles = [text if len(text) <= 48 else f"{text[:24]}…{text[-23:]}" for text in map(self.title, self.groups)]
        rows = [f"{titles[g]}: {'→ ' * (e == group.expert)}{e}" for g, group in groups for e in experts]
        values = [tuple(self.first[:, g, e].tolist()) for g, _ in groups for e in experts]
        layers = tuple(map(str, range(len(self.first))))
        return HeatMap(
            "Share of tokens for which an expert comes first", tuple(rows), layers, tuple(values), "share", span=SPAN
        )

    def warnings(self, where: str) -> list[Finding]:
        """Warnings if one expert gets nearly all tokens, or one gets nothing of its own texts."""
        findings = []
        prompts = [g for g, group in enumerate(self.groups) if not group.held_out]
        overall = self.first[:, prompts].mean(1)
        for e in range(len(self.experts)):
            if len(self.experts) > 1 and (layers := np.flatnonzero(overall[:, e] >= ALONE)).size:
                what = f"expert {self.label(e)} comes first for nearly all tokens of all prompts in {runs(layers)}"
                findings.append(Finding(what, where, fix="give prompts that differ more, or another gate_mode"))
        shares = self.of_own_expert(self.sent)
        for g, group in enumerate(self.groups):
            if (layers := np.flatnonzero(shares[:, g] < NOTHING)).size:
                what = f"expert {self.label(group.expert)} gets nothing of its own "
                what += f"{'held-out texts' if group.held_out else 'prompts'} in {runs(layers)}"
                findings.append(Finding(what, where, fix="give prompts that differ more, or another gate_mode"))
        return findings


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
        return {JSON_NAME: data.encode(), PICTURE_NAME: picture(heat_map(self.routing.by_expert()))}

    def blocks(self) -> list[Block]:
        """A heat map for the texts of each expert: by layer, where their tokens go."""
        if self.routing is None:
            return []
        routing, about = self.routing, "Share of the tokens for which the expert comes first, on the hidden states of the base."
        layers = tuple(map(str, range(routing.first.shape[0])))
        experts, group = tuple(map(routing.label, range(len(routing.experts)))), "Routing"
        return [
            HeatMap(f"Routing: {routing.title(texts)}", experts, layers, values, "share", about, span=SPAN, group=group)
            for g, texts in enumerate(routing.groups)
            for values in [tuple(map(tuple, routing.first[:, g].T.tolist()))]
        ]

    def section(self) -> str:
        """The model card's section on routing."""
        if self.routing is None:
            return ""
        return f"""
## Routing

Share of the tokens of the experts' texts for which each expert comes first, averaged over layers. Measured on the hidden
states of the base; in this model they differ after the first layer. Per-layer values: [{JSON_NAME}]({JSON_NAME}).

{markdown_table(*self.routing.table())}

![Share of tokens for which an expert comes first, by layer]({PICTURE_NAME})
"""

    def warnings(self, where: str) -> list[Finding]:
        """Warnings about a router that cannot work."""
        return [*self.useless, *([] if self.routing is None else self.routing.warnings(where))]
