"""What an extracted adapter keeps of the difference of two models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.idioms import grouped
from weightsmith._base.report.blocks import Block, Column, HeatMap, Mark, Table, heat_maps
from weightsmith._base.report.charts import heat_map, picture
from weightsmith._base.text import markdown_table
from weightsmith._features.adapters.built import unchecked
from weightsmith._features.adapters.factors import FactorTarget, Spectrum
from weightsmith._models.structure.model import LayerPlace

NAME = "extraction"
"""Key of the report in `Merged.reports`."""

_COLUMNS = {
    "kept": "share of the squared Frobenius norm of the difference that the factors keep",
    "possible": "an upper bound of what any factors of these ranks keep",
    "signal": "the share that they keep of the difference without rounding noise",
    "noise": "share of the difference that is rounding noise",
    "least, in": "the least share of the signal that one of the matrices keeps, and its layer",
}

_NUMBERED = re.compile(r"(?P<stack>.*?\.)(?P<layer>\d{1,5})\.(?P<part>.+)")


@dataclass(frozen=True, slots=True)
class AdapterMatrix:
    """A matrix that became factors of a rank; 0: it is not in the adapter.

    name       of its module; of one of several experts in a parameter, with its number: `….experts.down_proj[3]`
    intruders  dimensions that were scaled down
    """

    name: str
    target: FactorTarget
    spectrum: Spectrum
    rank: int
    intruders: int = 0

    @property
    def parameters(self) -> int:
        """The number of parameters in its factors."""
        return self.rank * self.spectrum.size


@dataclass(frozen=True, slots=True)
class Extraction:
    """The report of an extraction.

    matrices  in the order of the products
    whole     modules that are saved whole
    left_out  tensors that differ and are not in the adapter, and why
    in_place  tensors that PEFT puts into the base's own
    unknown   why the names were not checked with transformers; ""
    """

    matrices: tuple[AdapterMatrix, ...]
    whole: tuple[str, ...]
    left_out: Mapping[str, str]
    in_place: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def parameters(self) -> int:
        """The number of parameters in all factors."""
        return sum(matrix.parameters for matrix in self.matrices)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values. Shares are of the squared Frobenius norm; null of nothing."""
        return {
            "parameters": self.parameters,
            **_shares(self.matrices),
            "modules": [
                {
                    "module": matrix.name,
                    "shape": [matrix.spectrum.rows, matrix.spectrum.cols],
                    "rank": matrix.rank,
                    "exact": matrix.target.exact,
                    **({"intruders": matrix.intruders} if matrix.intruders else {}),
                    **_shares([matrix]),
                    "noise_share": round(matrix.spectrum.noise_share, 6),
                    "energy": matrix.spectrum.energy,
                    "singular_values": [float(f"{value:.6g}") for value in matrix.spectrum.values],
                }
                for matrix in sorted(self.matrices, key=lambda m: (with_layer(m.name).layer, m.name))
            ],
            "modules_to_save": list(self.whole),
            "in_place": list(self.in_place),
            "checked": not self.unknown,
            "left_out": dict(self.left_out),
        }

    def summary_table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows: for each kind of module, the ranks, and the shares that they keep."""
        head = ("module", "count", "rank", "kept", "possible", "signal", "noise", "least, in")
        kinds = grouped((with_layer(matrix.target.module).part, matrix) for matrix in self.matrices)
        return head, [*(_row(kind, matrices) for kind, matrices in kinds.items()), _row("all", self.matrices)]

    def files(self) -> Mapping[str, bytes]:
        """The report as JSON and as a plot."""
        report = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        maps = self._maps()
        return {"extraction.json": report.encode(), **({"extraction.svg": picture(heat_map(maps[0]))} if maps else {})}

    def section(self) -> str:
        """A section for the model card."""
        head, rows = self.summary_table()
        text = f"\n## What the adapter keeps\n\n{self.parameters:,} parameters in factors. "
        text += (
            "Shares of the squared Frobenius norm of the difference; possible is the most that factors of these ranks can "
            "keep, noise what rounding the fine-tune to 16 bits added.\n\n"
        )
        return f"{text}{markdown_table(head, rows)}\n"

    def warnings(self, where: str) -> list[Finding]:
        """What the adapter leaves out, and what PEFT does not undo."""
        reasons = grouped((why, name) for name, why in self.left_out.items())
        findings = [
            Finding(f"{len(names):,} tensors differ and are not in the adapter: {why}", names[0])
            for why, names in reasons.items()
        ]
        if self.in_place:
            what = (
                f"PEFT loads {len(self.in_place):,} tensors into the base's own, and disabling the adapter does not undo them"
            )
            findings.append(Finding(what, self.in_place[0]))
        if self.unknown:
            findings.append(unchecked(self.unknown))
        return findings

    def blocks(self) -> list[Block]:
        """Heat maps of the signal kept, and the table."""
        head, rows = self.summary_table()
        columns = tuple(Column(name, about=_COLUMNS.get(name, "")) for name in head)
        return [*self._maps(), Table("What the adapter keeps", columns, tuple(rows))]

    def _maps(self) -> list[HeatMap]:
        items = [(with_layer(matrix.target.module), matrix) for matrix in self.matrices]
        about = "Of the signal in the difference, without rounding noise, by the squared Frobenius norm."
        title, span = "Share of the signal that the adapter keeps", (0.0, 1.0)
        return heat_maps(title, items, _signal_kept, "share", about, span=span)


def _signal_kept(matrices: Sequence[AdapterMatrix]) -> float | Mark:
    kept = _shares(matrices)["signal_kept"]
    differ = any(matrix.spectrum.energy for matrix in matrices)
    return kept if kept is not None else Mark.NOTHING if differ else Mark.SAME


def _shares(matrices: Sequence[AdapterMatrix]) -> dict[str, float | None]:
    """The shares for several matrices together; None where nothing differs."""
    energy = sum(m.spectrum.energy for m in matrices)
    signal = sum(m.spectrum.signal for m in matrices)
    kept = sum(m.spectrum.energy * m.spectrum.kept(m.rank) for m in matrices)
    possible = sum(m.spectrum.energy * m.spectrum.possible(m.rank) for m in matrices)
    of_signal = sum(m.spectrum.signal * m.spectrum.signal_kept(m.rank) for m in matrices)
    return {
        "kept": round(kept / energy, 6) if energy else None,
        "possible": round(possible / energy, 6) if energy else None,
        "signal_kept": round(of_signal / signal, 6) if signal else None,
    }


def _row(kind: str, matrices: Sequence[AdapterMatrix]) -> tuple[str, ...]:
    shares = _shares(matrices)
    energy = sum(m.spectrum.energy for m in matrices)
    noise = sum(m.spectrum.energy * m.spectrum.noise_share for m in matrices)
    least = min(matrices, key=lambda m: (not m.spectrum.signal, m.spectrum.signal_kept(m.rank)))
    return (
        kind,
        f"{len(matrices):,}",
        _ranks(matrices),
        *(_percent(shares[what]) for what in ("kept", "possible", "signal_kept")),
        _percent(noise / energy if energy else None),
        _least(least) if shares["signal_kept"] is not None else "-",
    )


def _least(matrix: AdapterMatrix) -> str:
    """The share of the signal that it keeps, and the number of its layer, if it is in one."""
    place = with_layer(matrix.name)
    return f"{_percent(matrix.spectrum.signal_kept(matrix.rank))}{f', {place.layer}' if place.stack else ''}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _ranks(matrices: Sequence[AdapterMatrix]) -> str:
    ranks = {matrix.rank for matrix in matrices}
    return str(*ranks) if len(ranks) == 1 else f"{min(ranks)} to {max(ranks)}"


def with_layer(module: str) -> LayerPlace:
    """By the first number in a name; a part is named without the others.

    >>> with_layer("model.layers.3.mlp.experts.2.up_proj"), with_layer("lm_head")
    (LayerPlace(stack='model.layers.', layer=3, part='mlp.experts.up_proj'), LayerPlace(stack='', layer=0, part='lm_head'))
    """
    match = _NUMBERED.fullmatch(module)
    if match is None:
        return LayerPlace("", 0, module.rpartition(".")[2])
    part = ".".join(part for part in match["part"].split(".") if not part.isdigit())
    return LayerPlace(match["stack"], int(match["layer"]), part)
