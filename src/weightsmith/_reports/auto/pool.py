"""The candidates of `weightsmith auto` as recipes, their scores on held-back rows, and the choice. No candidate is written."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.decoder.forward import fast_arithmetic
from weightsmith._activations.rows import text_source
from weightsmith._base.errors import NOTHING_WRITTEN, MismatchError, NonFinite, ParameterError, StoreError
from weightsmith._base.files import expand_user, write_whole
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._base.torch_use import usable_device
from weightsmith._engine.results import JobMemory
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._models.lora.opening import is_adapter
from weightsmith._planning.planner.inputs import is_pattern, number_models, pinned_names
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._planning.recipe import Recipe as RecipeRecord
from weightsmith._plans import TextSource
from weightsmith._reports.evaluate.opening import Opened, opened, prepare_readable
from weightsmith._reports.evaluate.values import TOLD_APART, Mean
from weightsmith._reports.tuning.evaluator import MEMORY_BYTES, Candidate, Evaluator, Reference, Rows
from weightsmith._reports.tuning.search import lowest
from weightsmith._reports.tuning.texts import part

Recipe = Mapping[str, Any]

MOST_ROWS = 64
"""Held-back rows that are read of a text."""

FEW_ROWS = 4
"""Rows of each fine-tune that strengths are found on; candidates are compared on all."""

DIRECTIONS, FLATTEN = 8, 0.4
"""tsv_m's settings: few directions, nearly equally strong, did best on both testbeds of docs/quality.md."""

PRIOR_PULL = 1.0
"""`mu` of RegMean: the prior counts as much as the mean of the diagonal."""


@dataclass(frozen=True, slots=True)
class Models:
    """A base and its fine-tunes, as recipes name them.

    labels  what messages call models that have other names
    """

    base: str
    fine_tunes: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, base: str, fine_tunes: Sequence[str]) -> Models:
        """An adapter's folder stands for the base with it."""
        return cls(base, tuple(f"{base}+{model}" if is_adapter(expand_user(model)) else model for model in fine_tunes))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the base and the fine-tunes."""
        return (self.base, *self.fine_tunes)

    def pinned(self, prepared: Prepared) -> Models:
        """The same models, those on the Hub at the commits that were opened: their branches may move during the search.

        prepared  a merge of all

        Raises ParameterError for a pattern that matches several models.
        """
        assert prepared.request is not None
        assert isinstance(prepared.request.recipe, RecipeRecord)
        numbers, refs = number_models(prepared.request.recipe)
        if len(refs) != len(prepared.inputs):
            where = next((str(ref) for ref in refs if is_pattern(ref)), "")
            fix = "name each model once, the base first"
            raise ParameterError("it matches several models", where=where, fix=fix, state=NOTHING_WRITTEN)
        names = pinned_names(numbers, prepared.inputs)
        base, *fine_tunes = (names[name] for name in self.names)
        return Models(base, tuple(fine_tunes), {names[name]: name for name in self.names})

    def label(self, name: str) -> str:
        """What messages call a model: its name as the user wrote it."""
        return self.labels.get(name, name)

    def mean(self) -> dict[str, Any]:
        """The plain mean of the fine-tunes."""
        models = [{"model": name, "parameters": {"weight": 1}} for name in self.fine_tunes]
        return {"merge_method": "linear", "models": models}

    def sum(self, strength: float) -> dict[str, Any]:
        """The base and the sum of all deltas, times a strength."""
        return self._merge("task_arithmetic", {"lambda": strength})

    def tsv(self, strength: float) -> dict[str, Any]:
        """Task singular vectors, times a strength."""
        return self._merge("tsv_m", _tsv_parameters(strength))

    def regmean(self, texts: Sequence[object], prior: str, strength: float, factor: float = 1.0) -> dict[str, Any]:
        """RegMean, pulled towards `tsv_m` or the sum at a strength, times a factor.

        texts  of the fine-tunes, in order: files, or folders of statistics
        """
        towards = _tsv_parameters(strength) if prior == "tsv_m" else {"lambda": strength}
        parameters = {"prior": prior, "prior_parameters": towards, "mu": PRIOR_PULL, "lambda": factor}
        recipe = self._merge("regmean", parameters)
        for model, text in zip(recipe["models"], texts, strict=True):
            model["text"] = text
        return recipe

    def _merge(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        models: list[dict[str, Any]] = [{"model": name, "parameters": {"weight": 1}} for name in self.fine_tunes]
        return {"merge_method": method, "base_model": self.base, "models": models, "parameters": dict(parameters)}


def _tsv_parameters(strength: float) -> dict[str, Any]:
    return {"directions": DIRECTIONS, "flatten": FLATTEN, "lambda": strength}


def kept_bytes(running: RunOptions) -> int:
    """What may be kept of a candidate for the next one: tensors take at most half of it."""
    limit = running.max_memory_bytes
    return MEMORY_BYTES if limit is None else limit // 2


class Pool:
    """Scores recipes on the held-back rows of fine-tunes."""

    def __init__(
        self, one: Opened, held: Sequence[Path], tokens: int, running: RunOptions, journal: Journal, memory: JobMemory
    ) -> None:
        """
        one      the mean, opened: its tokenizer cuts the texts
        held     held-back text of each fine-tune
        tokens   in a row
        journal  scores that an earlier call has found
        memory   of the candidates' jobs

        Raises ParameterError for a text that is too short.
        """
        resources = resources_of(one.prepared, running)
        self._evaluator = Evaluator(
            one,
            resources,
            kept_bytes(running),
            arithmetic=fast_arithmetic(usable_device(resources.device)),
            exact_head=True,
            allow_nonfinite=running.allow_nonfinite,
            memory=memory,
        )
        self._parts = [_parts(one, path, tokens) for path in held]
        self._texts = [text_source(str(path), None, tokens, 0, "") for path in held]
        self._streamed = running.stream
        self._references: list[Reference] = []
        self._journal = journal
        # A GPU computes predictions sooner than they come from a disk.
        self._predictions = memory if self._evaluator.device == "cpu" else None
        self._memory = memory

    @property
    def rows(self) -> list[int]:
        """Number of held-back rows of each fine-tune."""
        return [sum(len(rows.scored.ids) for rows in parts) for parts in self._parts]

    def refer(self, models: Models) -> list[RowScores]:
        """Run each fine-tune on its own rows, from which KL divergences are measured. Returns its own scores on them.

        Raises MismatchError for a model of another shape or with another tokenizer.
        """
        heads = KeptHeads(self._memory)
        scores = list[RowScores]()
        self._references = []
        for model, parts, text in zip(models.fine_tunes, self._parts, self._texts, strict=True):
            label = models.label(model)
            with self._named(label), prepare_readable(model, streamed=self._streamed) as prepared:
                self._check(label, prepared, parts, text)
                reference = self._evaluator.reference(
                    Candidate.of(prepared.plan, prepared.inputs), parts, label, self._predictions
                )
            self._references.append(replace(reference, weights=heads.keep(reference.weights)))
            with self._named(label):
                nats = [self._evaluator.own_losses(rows, reference) for rows in parts]
            scores.append(_joined([_row_scores(rows, row_nats) for rows, row_nats in zip(parts, nats, strict=True)]))
            del reference  # its head is in memory
        return scores

    def _check(self, name: str, prepared: Prepared, parts: Sequence[Rows], text: TextSource) -> None:
        what = ""
        if not self._evaluator.fits(prepared.plan):
            what = "its tensors or its config.json are not those of the other models"
        else:
            ids = opened(name, prepared).cutter.rows(text, MOST_ROWS).ids
            if ids.tolist() != np.concatenate([rows.scored.ids for rows in parts]).tolist():
                what = "its tokenizer cuts a text into other tokens than that of the other models"
        if what:
            fix = "name fine-tunes of one base, with its tokenizer; to change a tokenizer: weightsmith transplant-tokenizer"
            raise MismatchError(what, where=name, fix=fix, state=NOTHING_WRITTEN)

    @contextmanager
    def _named(self, label: str) -> Iterator[None]:
        """Let an error of the block that says NaN name this model, not the one whose tensors all have."""
        try:
            yield
        except NonFinite as error:
            if error.finding.where == self._evaluator.base.label:
                fix = error.finding.fix or "check the model: weightsmith inspect"
                error.finding = replace(error.finding, where=label, fix=fix)
            raise

    def scores(
        self, recipe: Recipe | str, *, few: bool = False, measured_on: Sequence[str] = (), label: str = "mean"
    ) -> Scores:
        """The scores of a recipe, or of a model by its name, on the rows of each fine-tune.

        few          on the first `FEW_ROWS`
        measured_on  digests of the texts of the statistics that the recipe names
        label        what errors call it

        Raises NonFinite, PlanError.
        """
        parts = [rows_of_model[:1] if few else rows_of_model for rows_of_model in self._parts]
        counts = [sum(len(rows.scored.ids) for rows in rows_of_model) for rows_of_model in parts]
        key = self._key(recipe, parts, measured_on)
        for known in (self._journal.scores.get(key), self._journal.scores.get(self._key(recipe, self._parts, measured_on))):
            if known is not None and all(len(of_model.nats) >= count for of_model, count in zip(known, counts, strict=True)):
                return [of_model.first(count) for of_model, count in zip(known, counts, strict=True)]
        with self._named(label), prepare_readable(recipe, streamed=self._streamed) as prepared:
            candidate = Candidate.of(prepared.plan, prepared.inputs)
            scored = [
                _joined([self._scored(candidate, rows, reference) for rows in rows_of_model])
                for rows_of_model, reference in zip(parts, self._references, strict=True)
            ]
        self._journal.add(key, scored)
        return scored

    def _key(self, recipe: Recipe | str, parts: Sequence[Sequence[Rows]], measured_on: Sequence[str]) -> str:
        return self._journal.key(recipe, [*(rows.name for rows_of_model in parts for rows in rows_of_model), *measured_on])

    def _scored(self, candidate: Candidate, rows: Rows, reference: Reference) -> RowScores:
        return _row_scores(rows, *self._evaluator.losses(candidate, rows, reference, keep=False))


def _row_scores(rows: Rows, nats: Numbers, divergences: Numbers | None = None) -> RowScores:
    tokens = (rows.scored.nbytes >= 0).sum(1).astype(np.float64)
    return RowScores(nats, np.zeros_like(nats) if divergences is None else divergences, tokens)


def _parts(one: Opened, path: Path, tokens: int) -> list[Rows]:
    """The rows of a held-back text: the few that strengths are found on, and the rest."""
    rows = one.cutter.rows(text_source(str(path), None, tokens, 0, ""), MOST_ROWS)
    count = len(rows.ids)
    if count < 2:
        what = f"the held-back text has fewer than two rows of {tokens:,} tokens"
        raise ParameterError(what, where=str(path), fix="give a longer text for it: --text NAME=FILE (text)")
    few = min(FEW_ROWS, count // 2)
    return [Rows.of(part(rows, range(few))), Rows.of(part(rows, range(few, count)))]


def _joined(parts: Sequence[RowScores]) -> RowScores:
    return RowScores(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("nats", "divergences", "tokens")))


class KeptHeads:
    """The weights of heads, on disk where there is room: they are needed again only if predictions have no room there."""

    def __init__(self, memory: JobMemory) -> None:
        self._on_disk = memory.of("heads")
        self._in_memory = dict[str, Any]()

    def keep(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same tensors, each read when it is asked for. Equal ones are kept once: fine-tunes by adapters have the head of
        their base. Those on a GPU stay there.
        """
        return _Lazy({name: partial(self._read, self._kept(tensor)) for name, tensor in weights.items()})

    def _kept(self, tensor: Any) -> str:
        array = tensor.cpu().numpy()
        digest = hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16).hexdigest()
        if digest not in self._on_disk and tensor.device.type == "cpu":
            self._on_disk[digest] = array
        if digest not in self._on_disk:
            self._in_memory.setdefault(digest, tensor)
        return digest

    def _read(self, digest: str) -> Any:
        import torch

        if digest in self._in_memory:
            return self._in_memory[digest]
        try:
            return torch.from_numpy(self._on_disk[digest])
        except KeyError:
            raise StoreError("what was written to the disk cannot be read again", where="the head of a fine-tune") from None


class _Lazy(Mapping[str, Any]):
    """Values that are made when they are asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


KIND = "weightsmith auto"
"""The `kind` of a journal, in its first line."""


def is_journal(path: Path) -> bool:
    """Whether a file is a `Journal`, and no file of the user's with its name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline(_MOST_FIRST_BYTES)
    try:
        about = parse(first)
    except JsonError:
        return False
    return isinstance(about, dict) and about.get("kind") == KIND


_MOST_FIRST_BYTES = 1 << 20


class Journal:
    """Scores in a file, a line for each candidate, so that a search that was killed does not score it again.

    scores  by `key`
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, resume: bool) -> None:
        """about: what the search is for, the first line. The file of another search is begun again: it holds nothing else."""
        self._path = path
        self._about = json.loads(json.dumps(about))
        self.scores: dict[str, Scores] = {}
        self._lines = [json.dumps(self._about)]
        if resume and path.is_file():
            self._read(path.read_bytes())
        self._save()  # it marks the folder as ours

    def key(self, recipe: Recipe | str, texts: Sequence[str]) -> str:
        """Identity of a candidate's scores. texts: digests of all that they depend on."""
        return hashlib.sha256(json.dumps([recipe, texts], sort_keys=True).encode()).hexdigest()[:32]

    def add(self, key: str, scores: Scores) -> None:
        """Keep scores, at once."""
        self.scores[key] = scores
        values = [[part.nats.tolist(), part.divergences.tolist(), part.tokens.tolist()] for part in scores]
        self._lines.append(json.dumps({"candidate": key, "scores": values}))
        self._save()

    def _save(self) -> None:
        write_whole(self._path, ("\n".join(self._lines) + "\n").encode())

    def _read(self, data: bytes) -> None:
        first, *rest = data.splitlines() or [b""]
        try:
            if parse(first) != self._about:
                return
            for line in rest:
                entry = parse(line)
                parts = [RowScores(*(np.array(values, np.float64) for values in of_model)) for of_model in entry["scores"]]
                self.scores[str(entry["candidate"])] = parts
                self._lines.append(line.decode())
        except (JsonError, KeyError, TypeError, ValueError):
            return  # a damaged line and what follows it are computed again


Numbers = npt.NDArray[np.float64]

MOST_STRENGTH = 1.5
"""The largest strength that a parabola may give: farther out it is a guess."""

FAR_NATS = 1.0
"""Without texts, fine-tunes whose predictions are farther than this from their base's get the mean: their own text cannot tell
a fine-tune that is too strong from a good one."""


@dataclass(frozen=True, eq=False)
class RowScores:
    """Sums over the scored tokens of each row of one fine-tune's held-back text: float64 [rows].

    nats         cross entropy
    divergences  KL(fine-tune, candidate)
    tokens       number of scored tokens
    """

    nats: Numbers
    divergences: Numbers
    tokens: Numbers

    def first(self, count: int) -> RowScores:
        """The scores of the first rows."""
        return RowScores(self.nats[:count], self.divergences[:count], self.tokens[:count])


Scores = Sequence[RowScores]
"""A candidate's scores on the rows of each fine-tune, in order."""


def score(scores: Scores, measure: str) -> float:
    """The mean over the fine-tunes. measure: `nats` or `divergences`.

    >>> rows = RowScores(np.array([2.0, 4.0]), np.array([1.0, 1.0]), np.array([2.0, 2.0]))
    >>> score([rows, rows], "nats")
    1.5
    """
    return float(np.mean([getattr(part, measure).sum() / part.tokens.sum() for part in scores]))


def difference(scores: Scores, other: Scores, measure: str) -> Mean:
    """How much higher a candidate's score is than another's, with the standard error of the paired differences.

    The mean over fine-tunes of the means over their rows, so its error is √(Σ eᵢ²) / N.
    """
    parts = [Mean.of(getattr(a, measure) - getattr(b, measure), a.tokens) for a, b in zip(scores, other, strict=True)]
    error = math.sqrt(sum(part.error**2 for part in parts)) / len(parts)
    return Mean(sum(part.value for part in parts) / len(parts), error)


def is_better(scores: Scores, other: Scores, measure: str) -> bool:
    """Whether a candidate has a lower score by more than noise."""
    change = difference(scores, other, measure)
    return change.value < -TOLD_APART * change.error


def strength(points: Mapping[float, float]) -> float:
    """The best strength by a parabola, between 0 and `MOST_STRENGTH`, with four digits. points: score by strength."""
    return float(f"{lowest(points, 0.0, MOST_STRENGTH):.4g}")


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate that is written, and why: a sentence."""

    name: str
    why: str


def choose(scored: Mapping[str, Scores], usual: str, mean: str, *, with_texts: bool) -> Choice:
    """The usual candidate, another that is better than it by more than noise, or the mean if the winner does not beat it.

    scored      by name
    usual, mean their names in `scored`
    with_texts  cross entropy chooses, and KL divergence may confirm it; without, KL divergence does both
    """
    measure = "nats" if with_texts else "divergences"
    rivals = [name for name in scored if name != mean]
    best = min(rivals, key=lambda name: score(scored[name], measure))
    winner = best if is_better(scored[best], scored[usual], measure) else usual
    gain = difference(scored[winner], scored[mean], measure)
    told = f"{abs(gain.value):.4f} ± {gain.error:.4f} nats a token {'better' if gain.value < 0 else 'worse'} than the mean"
    if is_better(scored[winner], scored[mean], measure):
        return Choice(winner, told)
    if with_texts and gain.value < 0 and is_better(scored[winner], scored[mean], "divergences"):
        return Choice(winner, f"{told}, and closer to the fine-tunes by more than two standard errors")
    return Choice(mean, f"no candidate is better by two standard errors ({winner}: {told})")


def too_far(distance: float, mean: str) -> Choice | None:
    """The mean, if fine-tunes are too far from their base for a choice without texts; else None.

    distance  mean KL divergence of the base from the fine-tunes on their own text
    """
    if distance <= FAR_NATS:
        return None
    return Choice(mean, f"the fine-tunes are far from their base, {distance:.2f} nats a token on their own text")
