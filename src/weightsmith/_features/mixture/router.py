"""The `router` product: router weights of a mixture, and where they route the tokens of the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

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
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.torch_use import usable_device
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.mixture.gates import MODES, PromptSample, Rows
from weightsmith._features.mixture.prompts import ExpertTexts, Row, TokenRows, Tokens
from weightsmith._features.mixture.routing_report import PromptGroup, Routing, RoutingReport, runs
from weightsmith._plans import Product, ProductSettings
from weightsmith.abc.product import Arrays

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
