"""Router weights, and where they route the prompts' tokens, in one pass over the hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.packages import missing
from weightsmith._base.errors import NonFinite, NotFound, ParameterError, PlanError, Unsupported, WeightsmithError, first_line
from weightsmith._engine.products import ProductContext
from weightsmith._features.mixture.routing.gates import MODES, Rows, Sample
from weightsmith._features.mixture.routing.gating import Gating, router_dtype, uses_states
from weightsmith._features.mixture.routing.prompts import Row, Tokens, too_long
from weightsmith._features.mixture.routing.prompts import Rows as Prompts
from weightsmith._features.mixture.routing.report import Counter, Group, Routing, runs
from weightsmith._methods.jobs.requires import usable_device

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.decoder.forward import Decoder, LayerStates

INSTEAD = "; or use gate_mode: random, which needs no hidden states"

SAME = 1e-6
"""Two rows that differ by less than this share of their norm count as equal."""


def missing_packages() -> list[WeightsmithError]:
    """An error if torch or transformers is not installed."""
    return missing(("torch", "transformers"), "hidden states", "moe", INSTEAD)


def route(gating: Gating, bench: ProductContext) -> tuple[Rows, Routing | None]:
    """The rows of a gate mode, and where they route the prompts; None if no report was requested.

    Raises PlanError if prompts and model do not match, and for rows that cannot route.
    """
    mode = MODES[gating.mode]
    if mode.needs == "nothing" and not gating.report:
        return _scaled(mode.function(gating.shape, gating.seed), gating), None
    return _Route(gating, bench).run()


class _Route:
    def __init__(self, gating: Gating, bench: ProductContext) -> None:
        self.gating = gating
        self.bench = bench
        self.way = MODES[gating.mode]
        self.dtype = router_dtype(bench.product)
        self.device = bench.device
        self.decoder, self.prompts = self._begin()
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
            table = self.decoder.embeddings(self.bench, [row.ids for row in self.all])
            rows[:] = _scaled(_numpy(way.function(self._samples(table, positive, negative), gating.routed)), gating)
        per_layer = way.needs in ("entering", "mlp_input")
        groups = []
        for e, is_held_out in gating.counted if gating.report else ():
            own = (held_out if is_held_out else positive)[e]
            groups.append((Group(e, is_held_out, sum(len(self.all[k].ids) - self.all[k].start for k in own)), own))
        names = [expert.name for expert in gating.experts[: gating.routed]]
        counter = Counter(names, max(1, gating.per_token // gating.groups), [group for group, _ in groups], len(rows))
        if uses_states(gating.mode, report=gating.report):
            for states in self._states():
                i = states.index
                if per_layer:
                    seen = states.mlp_input if way.needs == "mlp_input" else states.entering
                    made = way.function(self._samples(seen, positive, negative), gating.routed)
                    rows[i] = _scaled(_numpy(made), gating)
                if gating.report:
                    self._count(counter, rows[i, : gating.routed], states, [own for _, own in groups])
        self._check(rows)
        return rows, counter.routing if gating.report else None

    def _begin(self) -> tuple[Decoder, list[Prompts]]:
        """The module and the prompts as tokens."""
        if problems := missing_packages():
            raise PlanError(problems)
        from weightsmith._activations.decoder.forward import build

        gating = self.gating
        problems = self._check_device()
        specs = {step.out.name: step.out for step in self.bench.product.steps}
        decoder = build(gating.base, specs)
        tokenizer = None if isinstance(decoder, WeightsmithError) else self._tokenizer()  # it reads config.json too
        problems += [found for found in (decoder, tokenizer) if isinstance(found, WeightsmithError)]
        if isinstance(decoder, WeightsmithError) or isinstance(tokenizer, WeightsmithError):
            raise PlanError(problems)
        tokens = Tokens(tokenizer, plain=self.way.plain)
        prompts = [tokens.rows(expert.texts, gating.prompt_tokens) for expert in gating.experts]
        problems += too_long(prompts, [(expert.name, expert.where) for expert in gating.experts], decoder.max_tokens)
        vocabulary = decoder.vocabulary
        for expert, own in zip(gating.experts, prompts, strict=True):
            ids = [token for row in (*own.positive, *own.negative, *own.held_out) for token in row.ids]
            if ids and max(ids) >= vocabulary:
                what = f"the tokenizer produces token {max(ids)}, but the base's embedding has {vocabulary} rows"
                problems.append(Unsupported(what, where=gating.base.label, fix="use the base's own tokenizer"))
                break
            if expert.texts.has_prompts and not own.positive:
                what = f"the prompts of {expert.name} contain no tokens"
                problems.append(ParameterError(what, where=expert.where, fix="write some text"))
        if problems:
            raise PlanError(problems)
        return decoder, prompts

    def _check_device(self) -> list[WeightsmithError]:
        try:
            self.device = usable_device(self.device)
        except ParameterError as error:
            return [error]
        return []

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        base = self.gating.base
        try:
            return AutoTokenizer.from_pretrained(self.bench.folder(base.model), trust_remote_code=False)
        except WeightsmithError:
            raise
        except Exception as error:  # bad files can raise anything in transformers
            what = f"the tokenizer of the base cannot be loaded: {first_line(error)}"
            fix = "put the tokenizer files next to the weights, or write gate_mode: random"
            return NotFound(what, where=base.label, fix=fix)

    def _numbered(self, what: str) -> list[list[int]]:
        """Add each expert's prompts of this kind to the prompts to run. Returns their indices."""
        numbers = []
        for own in self.prompts:
            rows = getattr(own, what)
            numbers.append(list(range(len(self.all), len(self.all) + len(rows))))
            self.all += rows
        return numbers

    def _states(self) -> Iterator[LayerStates]:
        sizes = self.decoder.layer_bytes
        done, total = 0, sum(sizes)
        self.bench.progress(done, total)
        for states in self.decoder.states(self.bench, [row.ids for row in self.all], device=self.device):
            if not all(bool(seen.isfinite().all()) for seen in states.mlp_input):
                raise self._not_finite(f"the base's hidden states are not finite in layer {states.index}")
            yield states
            done += sizes[states.index]
            self.bench.progress(done, total)

    def _samples(self, seen: Sequence[Tensor], positive: Sequence[list[int]], negative: Sequence[list[int]]) -> list[Sample]:
        starts = [0 if self.way.plain else row.start for row in self.all]
        return [
            Sample([seen[k][starts[k] :] for k in own], [seen[k][starts[k] :] for k in other])
            for own, other in zip(positive, negative, strict=True)
        ]

    def _count(self, counter: Counter, rows: Any, states: LayerStates, groups: Sequence[list[int]]) -> None:
        stored = rows.astype(self.dtype.numpy).astype(np.float32).T
        for g, own in enumerate(groups):
            if not own:
                continue
            seen = [states.mlp_input[k][self.all[k].start :] for k in own]
            if not any(len(x) for x in seen):
                continue  # empty prompts
            counter.add(states.index, g, np.concatenate([_numpy(x) @ stored for x in seen]).astype(np.float64))

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
    if MODES[mode].make == "hidden:last" and list(layers) == [0]:
        what += ": their prompts end in the same token, and in layer 0 gate_mode hidden only uses the last token"
        fix = "write gate_mode: router_input or hidden_avg, which use all tokens"
    else:
        fix = "give each expert different prompts, or write gate_mode: random"
    return ParameterError(what, where=where, fix=f"{fix}; --mergekit-lenient makes this a warning")


def _scaled(rows: Any, gating: Gating) -> Rows:
    scaled: Rows = (rows * np.float32(gating.scale)).astype(np.float32)
    return scaled


def _numpy(values: Tensor) -> Any:
    return values.float().cpu().numpy()
