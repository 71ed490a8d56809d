"""Router weights and the routing report of one mixture: one pass over the hidden states for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith.errors import NonFinite, NotFound, ParameterError, PlanError, Unsupported, WeightsmithError
from weightsmith.mixture.packages import missing
from weightsmith.mixture.routing.gates import MODES, Gating, Mode, Rows, Sample
from weightsmith.mixture.routing.materialise import Materialiser
from weightsmith.mixture.routing.prompts import Row, Tokens, too_long
from weightsmith.mixture.routing.prompts import Rows as Prompts
from weightsmith.mixture.routing.report import Counter, Group, Report, runs
from weightsmith.tensors import DType

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith.mixture.routing.hidden_states import Decoder, LayerStates

Progress = Callable[[int, int], None]
"""Called with bytes of weights that the prompts have gone through, and of all that they will."""

SAME = 1e-6
"""Two experts whose rows differ by less than this share of their norm are not told apart."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Router weights, and where they send the prompts' tokens (None: nothing was asked, or there are no prompts)."""

    rows: Rows
    report: Report | None


def missing_packages() -> list[WeightsmithError]:
    """An error when what hidden states need is not installed."""
    return missing(("torch", "transformers"), "hidden states", "gate_mode: random needs neither")


def route(
    gating: Gating,
    mode: str,
    dtype: DType,
    *,
    report: bool = True,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Routing:
    """The rows of a gate mode, and the report.

    dtype   that the rows are stored in: the report is of the rows as they will be
    device  for the hidden states, as torch names it
    report  False saves the hidden states where the rows do not need them

    Raises PlanError for prompts and models that do not go together, and for rows that cannot route. Nothing is written.
    """
    way = MODES[mode]
    told = report and _told(gating)
    if way.needs == "nothing" and not told:
        return Routing(_scaled(way.function(gating), gating), None)
    return _Route(gating, way, dtype, device, progress or (lambda done, total: None)).run(report=told)


def needs_states(gating: Gating, mode: str, *, report: bool) -> bool:
    """The base is run on the prompts: for the rows, or for the report."""
    return MODES[mode].needs in ("entering", "mlp_input") or (report and _told(gating))


def _told(gating: Gating) -> bool:
    return any(text.told or text.held_out or text.whole for text in gating.texts[: gating.routed])


class _Route:
    def __init__(self, gating: Gating, way: Mode, dtype: DType, device: str, progress: Progress) -> None:
        self.gating = gating
        self.way = way
        self.dtype = dtype
        self.device = device
        self.progress = progress
        self.done, self.total = 0, 0
        self.source = Materialiser(gating.base.donor, gating.assembly, gating.seed, self._tell)
        decoder, self.prompts = self._begin()
        self.decoder = decoder
        self.all: list[Row] = []

    def run(self, *, report: bool) -> Routing:
        gating, way = self.gating, self.way
        rows = np.zeros(gating.shape, np.float32)
        positive, negative = self._numbered("positive"), self._numbered("negative")
        held_out = self._numbered("held_out") if report else [[]] * len(self.prompts)
        if way.needs == "nothing":
            rows = _scaled(way.function(gating), gating)
        elif way.needs == "embedding":
            table = self.decoder.embeddings(self.source, [row.ids for row in self.all])
            rows[:] = _scaled(_numpy(way.function(self._samples(table, positive, negative), gating.routed)), gating)
        per_layer = way.needs in ("entering", "mlp_input")
        groups = [
            (Group(e, out, sum(len(self.all[k].ids) - self.all[k].start for k in own)), own)
            for out, which in ((False, positive), (True, held_out))
            for e, own in enumerate(which[: gating.routed])
            if own
        ]
        names = [str(expert.model) for expert in gating.experts[: gating.routed]]
        per_token = max(1, gating.recipe.experts_per_token // gating.recipe.virtual_groups)
        counter = Counter(names, per_token, [group for group, _ in groups], len(rows))
        if per_layer or report:
            for states in self._states():
                i = states.index
                if per_layer:
                    seen = states.mlp_input if way.needs == "mlp_input" else states.entering
                    made = way.function(self._samples(seen, positive, negative), gating.routed)
                    rows[i] = _scaled(_numpy(made), gating)
                if report:
                    self._count(counter, rows[i, : gating.routed], states, [own for _, own in groups])
        self._check(rows)
        return Routing(rows, counter.report if report else None)

    def _begin(self) -> tuple[Decoder, list[Prompts]]:
        """The module and the prompts as tokens."""
        if problems := missing_packages():
            raise PlanError(problems)
        from weightsmith.mixture.routing.hidden_states import build

        gating = self.gating
        problems = self._check_device()
        decoder = build(gating.base)
        tokenizer = None if isinstance(decoder, WeightsmithError) else _tokenizer(gating)  # it reads config.json too
        problems += [found for found in (decoder, tokenizer) if isinstance(found, WeightsmithError)]
        if isinstance(decoder, WeightsmithError) or isinstance(tokenizer, WeightsmithError):
            raise PlanError(problems)
        tokens = Tokens(tokenizer, plain=self.way.plain)
        prompts = [tokens.rows(texts, gating.recipe.prompt_tokens) for texts in gating.texts]
        problems += too_long(prompts, gating.experts, decoder.max_tokens)
        vocabulary = decoder.vocabulary
        for expert, own, texts in zip(gating.experts, prompts, gating.texts, strict=True):
            ids = [token for row in (*own.positive, *own.negative, *own.held_out) for token in row.ids]
            if ids and max(ids) >= vocabulary:
                what = f"the tokenizer gives token {max(ids)}, and the base has an embedding of {vocabulary} rows"
                problems.append(Unsupported(what, where=gating.base.donor.label, fix="use the tokenizer of the base"))
                break
            if texts.told and not own.positive:
                what = f"the prompts of {expert.model} have no token"
                problems.append(ParameterError(what, where=expert.section.where, fix="write some text"))
        if problems:
            raise PlanError(problems)
        return decoder, prompts

    def _check_device(self) -> list[WeightsmithError]:
        import torch

        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            torch.empty(1, device=self.device)
        except Exception as error:  # what torch raises for a name, and for a device that is not there, differs by build
            what = f"the device '{self.device}' cannot be used: {str(error).strip().splitlines()[0][:200]}"
            return [ParameterError(what, where="--device", fix="write cpu, or a device that torch has")]
        return []

    def _numbered(self, what: str) -> list[list[int]]:
        """The prompts of this kind of each expert, added to those that the model is shown, as numbers of them."""
        numbers = []
        for own in self.prompts:
            rows = getattr(own, what)
            numbers.append(list(range(len(self.all), len(self.all) + len(rows))))
            self.all += rows
        return numbers

    def _tell(self) -> None:
        """Say how far it is; in the middle of a layer too, so that it can be stopped there."""
        self.progress(self.done, self.total)

    def _states(self) -> Any:
        sizes = self.decoder.layer_bytes
        self.total = sum(sizes)
        self._tell()
        for states in self.decoder.states(self.source, [row.ids for row in self.all], device=self.device):
            if not all(bool(seen.isfinite().all()) for seen in states.mlp_input):
                raise self._not_finite(f"the base's hidden states are not finite in layer {states.index}")
            yield states
            self.done += sizes[states.index]
            self._tell()

    def _samples(self, seen: Sequence[Tensor], positive: Sequence[list[int]], negative: Sequence[list[int]]) -> list[Sample]:
        starts = [0 if self.way.plain else row.start for row in self.all]
        return [
            Sample([seen[k][starts[k] :] for k in own], [seen[k][starts[k] :] for k in other])
            for own, other in zip(positive, negative, strict=True)
        ]

    def _count(self, counter: Counter, rows: Any, states: LayerStates, groups: Sequence[list[int]]) -> None:
        stored = rows.astype(self.dtype.numpy).astype(np.float32).T
        for g, own in enumerate(groups):
            seen = [states.mlp_input[k][self.all[k].start :] for k in own]
            counter.add(states.index, g, np.concatenate([_numpy(x) @ stored for x in seen]).astype(np.float64))

    def _not_finite(self, what: str) -> PlanError:
        where = self.gating.recipe.section.at("gate_mode")
        return PlanError([NonFinite(what, where=where, fix="check the base model")])

    def _check(self, rows: Rows) -> None:
        """Rows that cannot route are an error."""
        gating = self.gating
        if not np.isfinite(rows).all():
            i, e = np.argwhere(~np.isfinite(rows))[0, :2]
            raise self._not_finite(
                f"the router weights of expert {e} in layer {i} are not finite: the base's hidden states are not"
            )
        problems: list[WeightsmithError] = []
        routed = rows[:, : gating.routed].astype(np.float64)
        norms = np.linalg.norm(routed, axis=2)
        fix = "give each expert prompts of its own, or write gate_mode: random"
        for e in range(gating.routed if gating.routed > 1 else 0):
            if (layers := np.flatnonzero(norms[:, e] == 0)).size:
                what = f"the router weights of expert {e}, {gating.experts[e].model}, are zero in {runs(layers)}"
                problems.append(ParameterError(what, where=gating.experts[e].section.where, fix=fix))
            for other in range(e):
                if gating.experts[other].section is gating.experts[e].section:
                    continue  # copies of one entry
                apart = np.linalg.norm(routed[:, e] - routed[:, other], axis=1)
                if (layers := np.flatnonzero((apart <= SAME * norms[:, e]) & (norms[:, e] > 0))).size:
                    what = (
                        f"experts {other} and {e} have the same router weights in {runs(layers)}: their prompts look the same"
                    )
                    problems.append(ParameterError(what, where=gating.experts[e].section.where, fix=fix))
        if problems:
            raise PlanError(problems)


def _tokenizer(gating: Gating) -> Any:
    from transformers import AutoTokenizer

    donor = gating.base.donor
    try:
        return AutoTokenizer.from_pretrained(donor.checkpoint.folder)
    except Exception as error:  # whatever the files can make of transformers
        what = f"the tokenizer of the base cannot be loaded: {str(error).strip().splitlines()[0][:200]}"
        return NotFound(what, where=donor.label, fix="put its tokenizer files beside its weights, or write gate_mode: random")


def _scaled(rows: Any, gating: Gating) -> Rows:
    scaled: Rows = (rows * np.float32(gating.recipe.router_scale)).astype(np.float32)
    return scaled


def _numpy(values: Tensor) -> Any:
    return values.float().cpu().numpy()
