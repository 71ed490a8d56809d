"""The `router` product: router weights of a mixture, and where they route the tokens of the prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.decoder import Base
from weightsmith._base.errors import (
    Finding,
    NonFinite,
    NotFound,
    ParameterError,
    PlanError,
    Unsupported,
    WeightsmithError,
    first_line,
    noting,
)
from weightsmith._base.installation import absent_packages
from weightsmith._base.report.blocks import Block, HeatMap
from weightsmith._base.report.charts import heat_map, picture
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import markdown_table
from weightsmith._base.torch_use import usable_device
from weightsmith._features.mixture.gates import MODES, PromptSample, Rows
from weightsmith._features.mixture.prompts import ExpertTexts, Row, TokenRows, Tokens
from weightsmith._plans import Product, ProductSettings
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.decoder.forward import Decoder, LayerStates


INSTEAD = "; or use gate_mode: random, which needs no hidden states"

SAME = 1e-6
"""Two rows that differ by less than this share of their norm count as equal."""


def missing_packages() -> list[WeightsmithError]:
    """An error if torch or transformers is not installed."""
    return absent_packages(("torch", "transformers"), "hidden states", "moe", INSTEAD)


@dataclass(frozen=True, slots=True)
class GatedExpert:
    """An expert with a router row.

    name   of its model, as in the recipe
    where  position of its entry in the recipe; copies of an entry share it
    texts  its prompts and held-out texts
    """

    name: str
    where: str
    texts: ExpertTexts


@dataclass(frozen=True, slots=True)
class Gating(ProductSettings):
    """What router weights depend on, besides tensors and the tokenizer's files.

    mode           a key of `gates.MODES`
    experts        experts with a row, shared ones last
    routed         number of routed experts; the rest are shared
    seed           random seed
    scale          factor on all rows
    sigmoid        whether the router's scores are sigmoids
    groups         number of experts that share a row
    per_token      experts per token, before virtual groups
    prompt_tokens  tokens per row of a text file; None: one prompt per paragraph
    report         whether to report where the rows route the prompts
    where          position of the gate mode in the recipe
    packages       versions of the packages that hidden states depend on
    lenient        warn about rows that cannot distinguish the experts, instead of raising
    """

    mode: str
    experts: tuple[GatedExpert, ...]
    routed: int
    base: Base
    seed: int
    scale: float
    sigmoid: bool
    groups: int
    per_token: int
    prompt_tokens: int | None
    report: bool
    where: str
    packages: Mapping[str, str]
    lenient: bool = False

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        layers, experts, hidden = self.shape
        if self.mode not in MODES or not 1 <= self.routed <= experts or min(layers, hidden, self.groups, self.per_token) < 1:
            return "its settings are inconsistent"
        if self.seed < 0 or (self.prompt_tokens or 1) < 1:
            return "its seed or its prompt_tokens is negative"
        rows = _stored(product)
        n = max(len(rows) // layers, 1)
        routers = [rows[i : i + n] for i in range(0, len(rows), n)]
        expected = [(self.routed * self.groups, hidden), (experts - self.routed, hidden)][:n]
        if len(routers) != layers or any([out.shape for out in layer] != expected for layer in routers):
            return "its arrays are not the rows of its experts"
        if not {expert.texts.written for expert in self.experts} - {""} <= set(product.needs):
            return "it does not need what its settings name"
        return "" if self.outs(routers) == product.outs else "its arrays are not those of its report"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts, hidden."""
        return self.base.layers, len(self.experts), self.base.hidden

    @property
    def counted(self) -> list[tuple[int, bool]]:
        """The report's groups of texts: expert, and whether these are its held-out texts."""
        routed = list(enumerate(self.experts[: self.routed]))
        prompts = [(e, False) for e, expert in routed if expert.texts.has_prompts]
        return prompts + [(e, True) for e, expert in routed if expert.texts.has_held_out]

    def outs(self, routers: Sequence[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
        """The arrays: the stored tensors of each layer (routers), then the report's shares and counts."""
        outs = [spec for layer in routers for spec in layer]
        if self.report:
            shape = self.base.layers, len(self.counted), self.routed
            outs += [TensorSpec(f"routing: {what}", DTYPES["F64"], shape) for what in ("first", "sent")]
            outs.append(TensorSpec("routing: tokens", DTYPES["I64"], (len(self.counted),)))
        return tuple(outs)


def uses_states(mode: str, *, report: bool) -> bool:
    """Whether the base must run on the prompts, for the rows or for the report."""
    return MODES[mode].needs in ("entering", "mlp_input") or report


# ---- Router weights and routing, in one pass over the hidden states.


def route(gating: Gating, context: ProductContext) -> tuple[Rows, Routing | None]:
    """The rows of a gate mode, and where they route the prompts; None if no report was requested.

    Raises PlanError if prompts and model do not match, and for rows that cannot route.
    """
    mode = MODES[gating.mode]
    if mode.needs == "nothing" and not gating.report:
        return _scaled(mode.function(gating.shape, gating.seed), gating), None
    return _Route(gating, context).run()


class _Route:
    def __init__(self, gating: Gating, context: ProductContext) -> None:
        self.gating = gating
        self.context = context
        self.way = MODES[gating.mode]
        self.dtype = context.product.outs[0].dtype.numpy
        self.device = context.device
        self.decoder, self.tokens = self._begin()
        self.prompts = [self._rows(expert.texts) for expert in gating.experts]
        self._check_prompts()
        self.all: list[Row] = []

    def run(self) -> tuple[Rows, Routing | None]:
        """The rows, and the report."""
        gating, way = self.gating, self.way
        rows = np.zeros(gating.shape, np.float32)
        positive, negative = self._numbered("positive"), self._numbered("negative")
        held_out = self._numbered("held_out") if gating.report else [[]] * len(self.prompts)
        if way.needs == "nothing":
            rows = _scaled(way.function(gating.shape, gating.seed), gating)
        elif way.needs == "embedding":
            table = self.decoder.embeddings(self.context, self.all)
            rows[:] = _scaled(_numpy(way.function(self._samples(table, positive, negative), gating.routed)), gating)
        per_layer = way.needs in ("entering", "mlp_input")
        groups = []
        for e, is_held_out in gating.counted if gating.report else ():
            numbers = (held_out if is_held_out else positive)[e]
            groups.append((PromptGroup(e, is_held_out, sum(len(self.all[k]) - self.tokens.start for k in numbers)), numbers))
        names = [expert.name for expert in gating.experts[: gating.routed]]
        counted = Routing.zeros(names, max(1, gating.per_token // gating.groups), [group for group, _ in groups], len(rows))
        if uses_states(gating.mode, report=gating.report):
            for states in self._states():
                i = states.index
                if per_layer:
                    seen = states.mlp_input if way.needs == "mlp_input" else states.entering
                    gate_rows = way.function(self._samples(seen, positive, negative), gating.routed)
                    rows[i] = _scaled(_numpy(gate_rows), gating)
                if gating.report:
                    self._count(counted, rows[i, : gating.routed], states, [numbers for _, numbers in groups])
        self._check(rows)
        return rows, counted if gating.report else None

    def _rows(self, texts: ExpertTexts) -> TokenRows:
        """The prompts of an expert, with those that its model has written."""
        rows = self.tokens.rows(texts, self.gating.prompt_tokens)
        if not texts.written:
            return rows
        return replace(rows, positive=(*rows.positive, *map(tuple, self.context.arrays(texts.written)[0].tolist())))

    def _begin(self) -> tuple[Decoder, Tokens]:
        """The module and the tokenizer."""
        if lacking := missing_packages():
            raise PlanError(lacking)
        from transformers import AutoTokenizer

        from weightsmith._activations.decoder.forward import build

        base, problems = self.gating.base, list[WeightsmithError]()
        with noting(problems, ParameterError):
            self.device = usable_device(self.device)
        decoder = build(base, {step.out.name: step.out for step in self.context.product.steps})
        if isinstance(decoder, WeightsmithError):
            raise PlanError([*problems, decoder])
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.context.folder(base.model), trust_remote_code=False)
        except WeightsmithError:
            raise
        except Exception as error:  # bad files can raise anything in transformers
            what = f"the tokenizer of the base cannot be loaded: {first_line(error)}"
            fix = "put the tokenizer files next to the weights, or write gate_mode: random"
            raise PlanError([*problems, NotFound(what, where=base.label, fix=fix)]) from error
        if problems:
            raise PlanError(problems)
        return decoder, Tokens(tokenizer, plain=self.way.plain)

    def _check_prompts(self) -> None:
        """Raise PlanError for prompts that the model cannot take."""
        problems: list[WeightsmithError] = []
        limit, vocabulary = self.decoder.max_tokens, self.decoder.vocabulary
        for expert, rows_of_expert in zip(self.gating.experts, self.prompts, strict=True):
            rows = (*rows_of_expert.positive, *rows_of_expert.negative, *rows_of_expert.held_out)
            longest, largest = max(map(len, rows), default=0), max((token for row in rows for token in row), default=0)
            if longest > limit:
                what = f"a prompt of {expert.name} has {longest:,} tokens, but the base supports at most {limit:,}"
                fix = "shorten it, or split a text file into rows with prompt_tokens: 512"
                problems.append(ParameterError(what, where=expert.where, fix=fix))
            if largest >= vocabulary:
                what = f"the tokenizer produces token {largest}, but the base's embedding has {vocabulary} rows"
                problems.append(Unsupported(what, where=self.gating.base.label, fix="use the base's own tokenizer"))
                break
            if expert.texts.has_prompts and not rows_of_expert.positive:
                what = f"the prompts of {expert.name} contain no tokens"
                problems.append(ParameterError(what, where=expert.where, fix="write some text"))
        if problems:
            raise PlanError(problems)

    def _numbered(self, what: str) -> list[list[int]]:
        """Add each expert's prompts of this kind to the prompts to run. Returns their indices."""
        numbers = []
        for rows_of_expert in self.prompts:
            rows = getattr(rows_of_expert, what)
            numbers.append(list(range(len(self.all), len(self.all) + len(rows))))
            self.all += rows
        return numbers

    def _states(self) -> Iterator[LayerStates]:
        sizes = self.decoder.layer_bytes
        done, total = 0, sum(sizes)
        self.context.progress(done, total)
        for states in self.decoder.states(self.context, self.all, device=self.device):
            if not all(bool(seen.isfinite().all()) for seen in states.mlp_input):
                raise self._not_finite(f"the base's hidden states are not finite in layer {states.index}")
            yield states
            done += sizes[states.index]
            self.context.progress(done, total)

    def _samples(
        self, seen: Sequence[Tensor], positive: Sequence[list[int]], negative: Sequence[list[int]]
    ) -> list[PromptSample]:
        start = 0 if self.way.plain else self.tokens.start
        return [
            PromptSample([seen[k][start:] for k in numbers], [seen[k][start:] for k in negative_numbers])
            for numbers, negative_numbers in zip(positive, negative, strict=True)
        ]

    def _count(self, counted: Routing, rows: Any, states: LayerStates, groups: Sequence[list[int]]) -> None:
        stored = rows.astype(self.dtype).astype(np.float32).T
        for g, numbers in enumerate(groups):
            if not numbers:
                continue
            seen = [states.mlp_input[k][self.tokens.start :] for k in numbers]
            if not any(len(x) for x in seen):
                continue  # empty prompts
            counted.count(states.index, g, np.concatenate([_numpy(x) @ stored for x in seen]).astype(np.float64))

    def _not_finite(self, what: str) -> PlanError:
        return PlanError([NonFinite(what, where=self.gating.where, fix="check the base model")])

    def _check(self, rows: Rows) -> None:
        """Raise for rows that cannot route."""
        gating = self.gating
        if not np.isfinite(rows).all():
            i, e = np.argwhere(~np.isfinite(rows))[0, :2]
            raise self._not_finite(
                f"the router weights of expert {e} in layer {i} are not finite: the base's hidden states are not"
            )
        problems = useless_rows(rows, gating)
        if problems and not gating.lenient:
            raise PlanError(problems)


def useless_rows(rows: Any, gating: Gating) -> list[WeightsmithError]:
    """Errors for rows [layers, experts, hidden] that cannot distinguish experts: zero and equal rows."""
    problems: list[WeightsmithError] = []
    routed = np.asarray(rows)[:, : gating.routed].astype(np.float64)
    norms = np.linalg.norm(routed, axis=2)
    for e in range(gating.routed if gating.routed > 1 else 0):
        where = gating.experts[e].where
        if (layers := np.flatnonzero(norms[:, e] == 0)).size:
            what = f"the router weights of expert {e}, {gating.experts[e].name}, are zero in {runs(layers)}"
            problems.append(_useless(what, layers, where, gating.mode))
        for other in range(e):
            if gating.experts[other].where == where:
                continue  # copies of one entry
            distance = np.linalg.norm(routed[:, e] - routed[:, other], axis=1)
            if (layers := np.flatnonzero((distance <= SAME * norms[:, e]) & (norms[:, e] > 0))).size:
                what = f"experts {other} and {e} have the same router weights in {runs(layers)}"
                problems.append(_useless(what, layers, where, gating.mode))
    return problems


def _useless(what: str, layers: Any, where: str, mode: str) -> ParameterError:
    if MODES[mode].make == "prompt_gates:last" and list(layers) == [0]:
        what += ": their prompts end in the same token, and in layer 0 gate_mode hidden only uses the last token"
        fix = "write gate_mode: router_input or hidden_avg, which use all tokens"
    else:
        fix = "give each expert different prompts, or write gate_mode: random"
    return ParameterError(what, where=where, fix=f"{fix}; --mergekit-lenient makes this a warning")


def _scaled(rows: Any, gating: Gating) -> Rows:
    return (rows * np.float32(gating.scale)).astype(np.float32)


def _numpy(values: Tensor) -> Any:
    return values.float().cpu().numpy()


# ---- The product.


def _stored(product: Product) -> list[TensorSpec]:
    """The arrays that the output stores: those before the report."""
    return [out for out in product.outs if not out.name.startswith("routing: ")]


def _compute(context: ProductContext) -> Arrays:
    gating = Gating.of(context.product)
    rows, routing = route(gating, context)
    if gating.sigmoid:
        # The hidden state's norm is near √hidden. If rows are that long too, as random ones are, the logits are so far
        # below 0 that all of a token's sigmoids may be 0.
        rows[:, : gating.routed] /= max(1.0, float(np.linalg.norm(rows[:, : gating.routed], axis=-1).max()))
    dtype, per_layer, arrays = context.product.outs[0].dtype.numpy, len(_stored(context.product)) // gating.base.layers, []
    for layer in rows:
        parts = [np.repeat(layer[: gating.routed], gating.groups, axis=0), layer[gating.routed :]]
        arrays += [part.astype(dtype) for part in parts[:per_layer]]
    if routing is not None:
        arrays += [routing.first, routing.sent, np.array([group.tokens for group in routing.groups], np.int64)]
    return arrays


def _report(product: Product, arrays: Arrays) -> RoutingReport | None:
    gating = Gating.of(product)
    useless: tuple[Finding, ...] = ()
    if gating.lenient and MODES[gating.mode].needs != "nothing":
        per_layer = len(_stored(product)) // gating.base.layers
        rows = np.stack([layer[:: gating.groups] for layer in arrays[: per_layer * gating.base.layers : per_layer]])
        useless = tuple(replace(p.finding, fix="") for p in useless_rows(rows, gating))
    if not gating.report:
        return RoutingReport(None, useless) if useless else None
    first, sent, tokens = arrays[-3:]
    present = np.flatnonzero(tokens)  # a held-out text may have no token
    groups = tuple(PromptGroup(*gating.counted[g], int(tokens[g])) for g in present)
    names = tuple(expert.name for expert in gating.experts[: gating.routed])
    per_token = max(1, gating.per_token // gating.groups)
    return RoutingReport(Routing(names, per_token, groups, first[:, present], sent[:, present]), useless)


KIND = ProductKind(
    "computing hidden states and router weights", compute=_compute, report=_report, check=Gating.check, device=True
)


# ---- Where the router sends the tokens of each expert's prompts and held-out texts
#
# Measured on the hidden states of the base. The mixture itself is not run, and its states differ once a token has been routed
# to an expert that differs from the base's MLP. So from the second layer on, the shares are estimates.


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

    def summary_table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
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

{markdown_table(*self.routing.summary_table())}

![Share of tokens for which an expert comes first, by layer]({PICTURE_NAME})
"""

    def warnings(self, where: str) -> list[Finding]:
        """Warnings about a router that cannot work."""
        return [*self.useless, *([] if self.routing is None else self.routing.warnings(where))]
