"""How well candidates of one recipe predict rows of text. No candidate is written.

Its tensors are merged into memory, as float32 numbers, rounded as they would be stored; tensors and products that the last
candidate has too are kept (`MergedWeights`). The rows run through its layers. The states before the first layer
that has another tensor than the last candidate are kept. If the model does not fit the budget, one layer at a time is held.

A loss depends on the candidate, on its row and on the dtype of products alone: not on threads, on other rows, or on what was
kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weightsmith._activations.decoder import Arithmetic, Base
from weightsmith._activations.decoder.forward import Decoder, Layer, gradients_at, transformers_config
from weightsmith._activations.losses import (
    LOGITS_AT_ONCE,
    TOKENS_AT_ONCE,
    LogsOf,
    logs_of,
    own_losses,
    token_losses,
    token_parts,
)
from weightsmith._activations.running import build_decoder, workers
from weightsmith._activations.scored_rows import ScoredRows
from weightsmith._base.errors import MismatchError, NonFinite, StoreError
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.torch_use import usable_device
from weightsmith._engine.local import MemoryOutput, run
from weightsmith._engine.resources import Resources, Workload
from weightsmith._engine.results import JobMemory, Results
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure
from weightsmith._models.structure.configs import decoded_floats
from weightsmith._models.structure.vocabulary import is_model_head, tie_flag
from weightsmith._plans import Plan, Step
from weightsmith._plans.parts import PartHashes
from weightsmith._reports.evaluate.opening import Opened
from weightsmith.abc.product import Arrays, Floats, TensorSink, WholeTensor

# ---- the tensors of a candidate


@dataclass(frozen=True, eq=False)
class Candidate:
    """A merge that is not written.

    tensors  hashes of the tensors that predictions depend on, by name: equal ones have equal bytes
    hashes   of all its parts
    """

    plan: Plan
    inputs: Sequence[Checkpoint]
    tensors: Mapping[str, str]
    hashes: PartHashes

    @classmethod
    def of(cls, plan: Plan, inputs: Sequence[Checkpoint]) -> Candidate:
        """From a plan and its open models."""
        hashes, read = PartHashes(plan), _shapes((step.out for step in plan.steps), plan.config)
        return cls(plan, inputs, {name: digest for name, digest in hashes.tensors().items() if name in read}, hashes)


class MergedWeights:
    """The weights of one candidate after another. A `WeightSource`.

    specs        of all tensors, by name
    nbytes       of all tensors in float32
    holds_model  whether all tensors are held at once
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        resources: Resources,
        device: str,
        budget: int,
        *,
        allow_nonfinite: bool,
        memory: JobMemory,
    ) -> None:
        """
        device  that holds the tensors
        budget  bytes that they may take
        memory  of the jobs
        """
        self.specs = specs
        self.nbytes = sum(spec.size for spec in specs.values()) * 4
        self.holds_model = self.nbytes <= budget
        self._resources, self._device, self._allow_nonfinite = resources, device, allow_nonfinite
        self._candidate: Candidate | None = None
        self._tensors = dict[str, Tensor]()
        self._hashes = dict[str, str]()
        self._spare = dict[str, Tensor]()
        self._products = dict[str, Arrays]()
        self._memory = memory

    def use(self, candidate: Candidate) -> None:
        """Take tensors from this candidate from now on. Those that it changes are merged when they are next asked for."""
        self._candidate = candidate
        for name in [name for name, made_from in self._hashes.items() if candidate.tensors[name] != made_from]:
            tensor = self._tensors.pop(name)
            if self.holds_model:
                self._spare[name] = tensor  # filled again: freed and new memory would leave gaps between the two
            del self._hashes[name]

    def take(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors. Where the model does not fit, all others are dropped."""
        assert self._candidate is not None
        if not self.holds_model:
            for name in [name for name in self._tensors if name not in names]:
                del self._tensors[name], self._hashes[name]
        if missing := [name for name in names if name not in self._tensors]:
            arrays = {name: self._array(name) for name in missing}
            self._merge(self._candidate, arrays, self._products)
            for name, array in arrays.items():
                self._tensors[name] = torch.from_numpy(array).to(self._device)
                self._hashes[name] = self._candidate.tensors[name]
        return {name: self._tensors[name] for name in names}

    def fill(self, arrays: Mapping[str, Floats]) -> None:
        for name, tensor in self.take(list(arrays)).items():
            arrays[name][...] = tensor.cpu().numpy()

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        tensor = self.take([name])[name]
        return tensor[torch.tensor(numbers, device=tensor.device)].cpu().numpy()

    def merged(self, candidate: Candidate, names: Sequence[str]) -> dict[str, Floats]:
        """Some tensors of any candidate, with its own dtypes; nothing is kept."""
        arrays = {name: np.empty(self.specs[name].shape, np.float32) for name in names}
        if arrays:
            self._merge(candidate, arrays, {})
        return arrays

    def _array(self, name: str) -> Floats:
        """Memory for a tensor: that of the last candidate's, if the whole model is held."""
        spare = self._spare.pop(name, None)
        if spare is None or spare.device.type != "cpu":
            return np.empty(self.specs[name].shape, np.float32)
        return spare.numpy()

    def _merge(self, candidate: Candidate, arrays: Mapping[str, Floats], known: dict[str, Arrays]) -> None:
        """Fill arrays with tensors of a candidate. known: arrays of products by their hash, in; those that were needed, out."""
        plan = candidate.plan
        steps = [step for step in plan.steps if step.out.name in arrays]
        results, products = Results(plan), plan.products_for(steps)
        hashes = {product.name: candidate.hashes.product(product.name) for product in products}
        for product in products:
            if hashes[product.name] in known:
                results.put(product, known[hashes[product.name]])
        targets: dict[str, TensorSink] = {step.out.name: WholeTensor(step.out, arrays[step.out.name]) for step in steps}
        folders = [model.folder for model in candidate.inputs]
        work = Workload(steps, products, None, results, folders, self._allow_nonfinite, memory=self._memory)
        run(plan, candidate.inputs, MemoryOutput(targets), self._resources, work)
        if products:
            finished = [product.name for product in products if results.finished(product.name)]
            known_now = {hashes[name]: results.arrays(name) for name in finished}
            known.clear()
            known.update(known_now)


# ---- its losses


MEMORY_BYTES = 4 << 30
"""Limit of what is kept of a candidate for the next one, if the run has no limit: tensors take at most half of it."""

BATCH_TOKENS = 256
"""Tokens that run through a layer together: always the same, so that no loss depends on the number of threads. Enough to keep
one processor busy, and few enough that a quarter of the rows keeps several busy."""

GPU_BATCH_TOKENS = 1024
"""The same on a GPU, which one thread feeds."""

_Value = TypeVar("_Value")
_Head = Callable[..., Tensor]

_NEITHER = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Keys of config.json that do not change predictions."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reference:
    """A model to compare predictions with, on some rows: what leaves its last layer, and the weights of its head.

    states  by `Rows.name`
    name    of the model, in the memory
    memory  keeps its log-probabilities from one candidate to the next; None: they are computed each time
    """

    decoder: Decoder
    weights: Mapping[str, Tensor]
    states: dict[str, Tensor]
    name: str = ""
    memory: JobMemory | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of text that are scored together.

    name  identity, for states that are kept
    """

    name: str
    scored: ScoredRows

    @classmethod
    def of(cls, scored: ScoredRows) -> Rows:
        """With their hash as their name."""
        return cls(scored.sha256, scored)


class Evaluator:
    """Scores candidates of one recipe.

    one        the first of them, with the tokenizer; the others have its tensors and config.json
    resources  of the engine
    budget     bytes that may be kept for the next candidate
    """

    def __init__(
        self,
        one: Opened,
        resources: Resources,
        budget: int = MEMORY_BYTES,
        *,
        arithmetic: Arithmetic = "float32",
        exact_head: bool = False,
        allow_nonfinite: bool = False,
        memory: JobMemory | None = None,
    ) -> None:
        """
        arithmetic  dtype in which linear layers multiply, and the head where there is no reference
        exact_head  the head multiplies in float32 there too: for nats that are compared with those of others that have one
        memory      of the jobs of candidates; None: a new one

        Raises PlanError for a model that transformers cannot build, or a device that cannot be used.
        """
        self.base = replace(one.base, arithmetic=arithmetic)
        self.device = usable_device(resources.device)
        self._exact_head = exact_head
        self._threads = resources.workers
        self._config = one.prepared.plan.config
        read = _shapes((step.out for step in one.model.steps), self._config)
        steps = [step for step in one.model.steps if step.out.name in read]
        specs = {step.out.name: step.out for step in steps}
        memory = memory or JobMemory()
        self._weights = MergedWeights(
            specs, resources, self.device, budget // 2, allow_nonfinite=allow_nonfinite, memory=memory
        )
        self._parts = parts_of(one.model.structure, one.base, steps)
        self._decoder = build_decoder(self.base)
        self._states_budget = budget - (self._weights.nbytes if self._weights.holds_model else 0)
        self._states = dict[str, dict[int, tuple[str, Tensor]]]()

    def merged(self, candidate: Candidate, names: Sequence[str]) -> dict[str, Floats]:
        """Some tensors of a candidate, with its own dtypes; nothing is kept."""
        return self._weights.merged(candidate, names)

    @property
    def holds_model(self) -> bool:
        """Whether all tensors of a candidate are held at once."""
        return self._weights.holds_model

    def multiply_in(self, arithmetic: Arithmetic) -> None:
        """Let linear layers multiply in another dtype from now on."""
        if arithmetic != self.base.arithmetic:
            self.base = replace(self.base, arithmetic=arithmetic)
            self._decoder = build_decoder(self.base)
            self._states.clear()

    def fits(self, plan: Plan) -> bool:
        """Whether a plan's model can be scored: same tensors and settings, ignoring dtypes."""
        if _shapes((step.out for step in plan.steps), plan.config) != _shapes(self._weights.specs.values(), self._config):
            return False
        return not other_settings(self._config, plan.config)

    def losses(
        self, candidate: Candidate, rows: Rows, reference: Reference | None = None, *, keep: bool = True
    ) -> tuple[Numbers, Numbers | None]:
        """Sums over the scored tokens of each row, float64 [rows]: nats, and KL(reference, candidate).

        keep  states for the next candidate; False for rows that are scored once

        Raises NonFinite and other errors of merges; MismatchError for a candidate with other tensors than the first one.
        """
        with self._loaded(candidate):
            return self._score(rows, self._forward(candidate, rows, keep=keep), reference)

    def reference(
        self, candidate: Candidate, rows: Sequence[Rows], name: str = "", memory: JobMemory | None = None
    ) -> Reference:
        """Run a model on these rows, to compare others with it.

        name, memory  see `Reference`
        """
        with self._loaded(candidate):
            states = {part.name: self._forward(candidate, part, keep=False) for part in rows}
            for part in rows:
                self._states.pop(part.name, None)  # no candidate begins as the reference does
            weights = {name: tensor.clone() for name, tensor in self._head_weights().items()}
        return Reference(build_decoder(self.base), weights, states, name, memory)

    def own_losses(self, rows: Rows, reference: Reference) -> Numbers:
        """The nats of a reference on its own rows, as `losses` finds them: float64 [rows]. Its memory then has what it
        predicts.
        """
        nats = np.zeros(len(rows.scored.ids))
        with self._reference_head(reference, rows) as head:

            def measure(row: int) -> None:
                with torch.no_grad():
                    for places, targets in self._predicted(rows, row):
                        expected = _expected(reference, head, rows, row, places)
                        nats[row] += float(own_losses(expected, targets, self._vocabulary).double().sum())

            self._each_row(measure, len(nats))
        self._check_finite(nats)
        return nats

    def gradients(
        self, candidate: Candidate, rows: Rows, shares: Numbers, reference: Reference | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """The gradients of Σ shares · losses with respect to the tensors, a part of the model at a time, by tensor.

        shares     of each row in the sum, float64 [rows]
        reference  the losses are KL divergences from it; None: they are nats

        States that `losses` has not kept are computed again, from the nearest that it has. Deterministic for any threads.
        """
        layers, ids = self.base.layers, rows.scored.ids
        with self._loaded(candidate):
            leaving, outside = self._pull_head(rows, self._forward(candidate, rows, keep=True), shares, reference)
            for i in reversed(range(layers)):
                states = self._forward(candidate, rows, keep=True, last=i)
                with self._layer(i, ids.shape[1]) as layer:
                    leaving, gradients = self._pull(layer, states, leaving)
                yield gradients
            vocabulary = max(self._weights.specs[name].shape[0] for name in self._decoder.head_weights.values())
            inner = self._decoder.pull_embedded(self._weights, ids.tolist(), leaving, vocabulary)
            for name, gradient in inner.items():
                outside[name] = outside[name].cpu() + gradient if name in outside else gradient
            yield outside

    def _pull(self, layer: Layer, states: Tensor, leaving: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        for parameter in layer.weights.values():
            parameter.requires_grad_(True)
        size = self._batch_rows(states.shape[1])
        entering, sums = list[Tensor](), {name: torch.zeros_like(weight) for name, weight in layer.weights.items()}
        for batch, gradients in self._in_order(layer.pull, states.split(size), leaving.split(size)):
            entering.append(batch)
            for name, part in gradients.items():
                sums[name] += part
        return torch.cat(entering), sums

    def _in_order(self, function: Callable[..., _Value], *arguments: Sequence[object]) -> Iterator[_Value]:
        """Results of a function, computed by all threads and held for as many values as there are threads."""
        with workers(self._threads, self.device) as pool:
            calls = zip(*arguments, strict=True)
            while some := list(islice(calls, self._threads)):
                yield from pool.map(lambda call: function(*call), some)

    def _pull_head(
        self, rows: Rows, states: Tensor, shares: Numbers, reference: Reference | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradients of the last layer's output, and of the weights of the head."""
        leaving = torch.zeros_like(states)
        with self._head() as head, self._reference_head(reference, rows) as reference_head:
            weights = self._decoder.head_parameters
            for _, parameter in weights:
                parameter.requires_grad_(True)

            def pull(row: int) -> list[Tensor]:
                sums = [torch.zeros_like(parameter) for _, parameter in weights]
                for places, targets in self._predicted(rows, row):
                    expected = None
                    if reference_head is not None and reference is not None:
                        with torch.no_grad():
                            expected = reference_head(reference.states[rows.name][row, places]).log_softmax(1)
                    with torch.enable_grad():
                        entering = states[row, places].detach().requires_grad_()
                        logs = head(entering).log_softmax(1)
                        loss = _nats(logs, targets) if expected is None else _divergence(logs, expected)
                        at = [entering, *(parameter for _, parameter in weights)]
                        leaving[row, places], *parts = gradients_at(loss * float(shares[row]), at)
                    for total, part in zip(sums, parts, strict=True):
                        total += part
                return sums

            gradients = {name: torch.zeros_like(parameter) for name, parameter in weights}
            for sums in self._in_order(pull, range(len(rows.scored.ids))):
                for (name, _), part in zip(weights, sums, strict=True):
                    gradients[name] += part
        return leaving, gradients

    @property
    def _vocabulary(self) -> int:
        return max(self._weights.specs[name].shape[0] for name in self._decoder.head_weights.values())

    def _predicted(self, rows: Rows, row: int) -> Iterator[tuple[npt.NDArray[np.intp], Tensor]]:
        """Yield pieces of a row: positions, and the tokens that are predicted there."""
        at_once = max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // self._vocabulary))
        scored = np.flatnonzero(rows.scored.nbytes[row] >= 0)
        for start in range(0, len(scored), at_once):
            tokens = scored[start : start + at_once]
            yield tokens - 1, torch.from_numpy(rows.scored.ids[row, tokens].astype(np.int64)).to(self.device)

    # ---- the model

    @contextmanager
    def _loaded(self, candidate: Candidate) -> Iterator[None]:
        """Merge the changed tensors, or drop stale ones. After an error, build a new module."""
        if not self.fits(candidate.plan):
            what = "its tensors or its config.json are not those of the recipe at its start values"
            raise MismatchError(what, where=self.base.label, fix="let all choices be models of one shape and dtype")
        self._weights.use(candidate)
        try:
            with torch.no_grad():
                if self.holds_model:
                    self._weights.take(list(candidate.tensors))
                yield
        except BaseException:
            self._decoder = build_decoder(self.base)
            raise

    def _layer(self, number: int, tokens: int) -> AbstractContextManager[Layer]:
        """A layer of the candidate, for rows of so many tokens."""
        weights = self._weights.take(self._parts[number])
        return self._decoder.layer(number, self._weights, tokens, self.device, weights)

    def _head_weights(self) -> dict[str, Tensor]:
        return self._weights.take(list(dict.fromkeys(self._decoder.head_weights.values())))

    def _head(self, arithmetic: Arithmetic = "float32", *, reuse: bool = False) -> AbstractContextManager[_Head]:
        return self._decoder.head(self._weights, self.device, self._head_weights(), arithmetic, reuse=reuse)

    def _reference_head(self, reference: Reference | None, rows: Rows) -> AbstractContextManager[_Head | None]:
        """The head of a reference; None if all its predictions on these rows are in its memory."""
        if reference is None or self._remembers(reference, rows):
            return nullcontext()
        return reference.decoder.head(self._weights, self.device, dict(reference.weights), reuse=True)

    def _remembers(self, reference: Reference, rows: Rows) -> bool:
        return reference.memory is not None and all(
            part.start in reference.memory.of(_piece(reference, rows, row, places))
            for row in range(len(rows.scored.ids))
            for places, targets in self._predicted(rows, row)
            for part in token_parts(len(targets), self._vocabulary, self.device)
        )

    # ---- the forward pass

    def _forward(self, candidate: Candidate, rows: Rows, *, keep: bool, last: int | None = None) -> Tensor:
        """The input of layer `last`, or the output of the last layer: [rows, tokens, hidden]."""
        ids, layers = rows.scored.ids, self.base.layers if last is None else last
        chain, before = [""] * (layers + 1), ""
        for i in range(layers + 1):
            names = self._parts[i - 1] if i else self._parts[-1]
            before = hashlib.sha256("\n".join([before, *(candidate.tensors[n] for n in names)]).encode()).hexdigest()
            chain[i] = before
        kept = self._states.setdefault(rows.name, {})
        for i in [i for i, (made_from, _) in kept.items() if i <= layers and made_from != chain[i]]:
            del kept[i]
        first = max((i for i in kept if i <= layers), default=-1)
        if first < 0:
            embedded = [row.to(self.device) for row in self._decoder.embedded(self._weights, ids.tolist())]
            states, first = torch.stack(embedded), 0
            if keep:
                self._keep(rows.name, 0, chain[0], states)
        else:
            states = kept[first][1]
        with workers(self._threads, self.device) as pool:
            size = self._batch_rows(ids.shape[1])
            for i in range(first, layers):
                with self._layer(i, ids.shape[1]) as layer:
                    states = torch.cat(list(pool.map(layer.batch, states.split(size))))
                if keep:
                    self._keep(rows.name, i + 1, chain[i + 1], states)
        return states

    def _batch_rows(self, tokens: int) -> int:
        """Rows of so many tokens that run together."""
        return max(1, (BATCH_TOKENS if self.device == "cpu" else GPU_BATCH_TOKENS) // tokens)

    def _keep(self, name: str, layer: int, chain_hash: str, states: Tensor) -> None:
        """Keep the states that enter a layer, if they fit: of all layers, or of every second, third, …"""
        nbytes = states.numel() * 4
        others = sum(
            kept_states.numel() * 4 for rows, kept in self._states.items() if rows != name for _, kept_states in kept.values()
        )
        places = max(0, self._states_budget - others) // nbytes
        if places >= 2 and layer % -(-(self.base.layers + 1) // places) == 0:
            self._states[name][layer] = chain_hash, states

    def _score(self, rows: Rows, states: Tensor, reference: Reference | None) -> tuple[Numbers, Numbers | None]:
        nats = np.zeros(len(rows.scored.ids))
        divergences = None if reference is None else np.zeros(len(nats))
        exact = self._exact_head or reference is not None  # a divergence is small beside what rounding does
        with (
            self._head("float32" if exact else self.base.arithmetic, reuse=True) as head,
            self._reference_head(reference, rows) as reference_head,
        ):

            def measure(row: int) -> None:
                with torch.no_grad():
                    for places, targets in self._predicted(rows, row):
                        expected = None if reference is None else _expected(reference, reference_head, rows, row, places)
                        losses, distances = token_losses(head(states[row, places], targets), targets, expected)
                        nats[row] += float(losses.double().sum())
                        if divergences is not None and distances is not None:
                            divergences[row] += float(distances.double().sum())

            self._each_row(measure, len(nats))
        self._check_finite(nats, *([] if divergences is None else [divergences]))
        return nats, divergences

    def _each_row(self, measure: Callable[[int], None], count: int) -> None:
        with workers(self._threads, self.device) as pool:
            list(pool.map(measure, range(count)))

    def _check_finite(self, *sums: Numbers) -> None:
        for row_sums in sums:
            if not np.isfinite(row_sums).all():
                row = int(np.flatnonzero(~np.isfinite(row_sums))[0])
                raise NonFinite(f"the prediction is NaN or infinite in row {row} of the text", where=self.base.label)


def _expected(reference: Reference, head: _Head | None, rows: Rows, row: int, places: npt.NDArray[np.intp]) -> LogsOf:
    """What a reference predicts at some places of a row: from its memory, or by its head. Log-probabilities are computed a few
    tokens at a time, and so they are kept: malloc takes large blocks from the system each time.
    """
    entering = reference.states[rows.name][row, places]
    computed: LogsOf | None = None
    known = None if reference.memory is None else reference.memory.of(_piece(reference, rows, row, places))

    def expected(part: slice) -> Tensor:
        nonlocal computed
        if known is not None and (kept := known.get(part.start)) is not None:
            return torch.from_numpy(kept).to(entering.device)
        if computed is None:
            if head is None:
                fix = "run the same command again: what is finished is kept"
                raise StoreError("what was written to the disk cannot be read again", where=reference.name, fix=fix)
            computed = logs_of(head(entering))
        logs = computed(part)
        if known is not None:
            known[part.start] = logs.cpu().numpy()
        return logs

    return expected


def _piece(reference: Reference, rows: Rows, row: int, places: npt.NDArray[np.intp]) -> object:
    """The key of a piece of a row in the memory of a reference."""
    return reference.name, rows.name, row, int(places[0])


def _nats(logs: Tensor, targets: Tensor) -> Tensor:
    return -logs.gather(1, targets[:, None]).double().sum()


def _divergence(logs: Tensor, expected: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(logs, expected, reduction="none", log_target=True).double().sum()


def other_tensors(plan: Plan, other: Plan) -> list[str]:
    """Lines on the tensors of two plans that differ in shape, or that one of them lacks."""
    here, there = (_shapes((step.out for step in one.steps), one.config) for one in (plan, other))
    names = [name for name in here | there if here.get(name) != there.get(name)]
    return [f"{name}: {_shape(there.get(name))} here, {_shape(here.get(name))} in the others" for name in names]


def _shapes(specs: Iterable[TensorSpec], config: Mapping[str, Any] | None) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that predictions depend on: a head that is tied is a copy of the embedding."""
    tied = tie_flag(config)
    return {spec.name: spec.shape for spec in specs if not (tied and is_model_head(spec))}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def other_settings(config: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> list[str]:
    """Lines on the settings of two config.json that differ, apart from those that do not change predictions."""
    if config == other:
        return []
    here, there = _settings(config), _settings(other)
    names = [name for name in here | there if here.get(name) != there.get(name)]
    return [f"{name}: {there.get(name)!r} here, {here.get(name)!r} in the others" for name in names]


def _settings(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """What config.json says, with transformers' defaults for what it leaves out: files of one model differ in that."""
    written = decoded_floats(dict(config or {}))
    try:
        settings = transformers_config(written).to_dict()
    except Exception:  # a bad config can raise anything in transformers
        settings = {"model_type": "", **written}
    return {key: value for key, value in settings.items() if key not in _NEITHER}


def parts_of(structure: Structure, base: Base, steps: Sequence[Step]) -> list[list[str]]:
    """The tensors of each layer, and of what is outside the layers."""
    parts: list[list[str]] = [[] for _ in range(base.layers + 1)]
    for step in steps:
        place = structure.locate(step.out.name)
        is_main = place is not None and place[0] == structure.main
        parts[place[1] if is_main and place is not None else base.layers].append(step.out.name)
    return parts
