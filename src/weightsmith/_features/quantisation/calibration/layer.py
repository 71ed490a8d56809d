"""A layer quantised for a calibration text, as two products: `quantised_layer`, its weights, and `quantised_states`, what
leaves it with them; and what all products of a calibration share: checks of settings, places of errors, memory of Hessians.

Attention is quantised first, then the MLP for what it receives from the quantised attention. Inputs of both are those of
unquantised weights in the module itself. An encoding with a `hessian` chooses the codes of a weight (`Encoding.quantise`); it
stores what it stores without one. Input features may get scales first (`scaling.py`): their Hessian is then that of what enters
the scaled weight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.decoder import Features
from weightsmith._activations.states import check, run
from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import FormatError, WeightsmithError
from weightsmith._base.files import FULL
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.torch_use import one_thread
from weightsmith._features.quantisation.calibration.scaling import Scaling, problem_of, scaling_of
from weightsmith._models.formats import Encoding, find_encoding, hessians
from weightsmith._models.structure.projections import is_attention, site_of
from weightsmith._plans import PLAIN, Product
from weightsmith._plans.codec import OMITTED
from weightsmith.abc.product import Arrays, Floats, ProductContext, ProductKind, Tasks
from weightsmith.abc.stored import FactoredHessian, HessianForm, Unread

if TYPE_CHECKING:
    from weightsmith._activations.decoder.forward import Layer
    from weightsmith._activations.sums import Inputs

Hessian = Floats | FactoredHessian | None
Shapes = list[tuple[str, tuple[int, ...]]]
"""dtype and shape of each."""


def split(weights: Mapping[str, str], specs: Mapping[str, TensorSpec], arrays: Arrays) -> Iterator[tuple[str, Arrays]]:
    """The stored arrays of each weight. weights: encodings by name; arrays: of all of them, in order."""
    rest = iter(arrays)
    for name, outs in stored_of(weights, specs).items():
        yield name, [*islice(rest, len(outs))]


def stored_of(weights: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> dict[str, tuple[TensorSpec, ...]]:
    """What is stored of each weight. weights: encodings by name."""
    return {name: find_encoding(encoding).outs(specs[name]) for name, encoding in weights.items()}


class CalibratedWork(LayerWork):
    """A layer, some weights of which are quantised."""

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and their encodings."""
        raise NotImplementedError

    def shapes(self, specs: Mapping[str, TensorSpec]) -> Shapes:
        """The arrays of the product. specs: of the layer's tensors, by name."""
        raise NotImplementedError

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if problem := super().problem(product, shapes):
            return problem
        specs = {step.out.name: step.out for step in product.steps}
        forms: dict[str, HessianForm] = {}
        for name, setting in self.encodings():
            if setting == PLAIN and name in specs:
                continue
            try:
                encoding = find_encoding(setting)
            except WeightsmithError as error:
                return error.finding.what
            if name not in specs or encoding.hessian == "no":
                return "it has no step for a weight, or cannot calibrate its encoding"
            if forms.setdefault(site_of(name), encoding.hessian) != encoding.hessian:
                return "weights with the same inputs take the Hessian in different forms"
            if why := encoding.refusal(specs[name]):
                return why
        arrays = [(out.dtype.name, out.shape) for out in product.outs]
        return "" if arrays == self.shapes(specs) else "its arrays are not those of its settings"


def set_weight(layer: Layer, name: str, weight: Floats) -> None:
    """Give a linear layer another weight."""
    import torch

    with torch.no_grad():
        layer.linear(name).weight.copy_(torch.from_numpy(weight))


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors of weightsmith are of this place."""
    try:
        yield
    except WeightsmithError as error:
        error.finding = replace(error.finding, where=where)
        raise


def factorised(hessian: Hessian, form: HessianForm, threads: int) -> Hessian:
    """A Hessian in the form that an encoding takes. threads: that may compute; the result does not depend on their number."""
    if form == "whole" or not isinstance(hessian, np.ndarray):
        return hessian
    return hessians.prepare(hessian, sort=form == "sorted", threads=threads)


class FactoredHessians:
    """Factorises Hessians on any thread, as many at once as `limit_bytes` allow. One alone may take more."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._taken = 0
        self._condition = threading.Condition()

    @contextmanager
    def hessian(
        self, inputs: Inputs, site: str, finish: Callable[[str], Any], encodings: Iterable[Encoding]
    ) -> Iterator[Hessian]:
        """The Hessian of a site, as encodings take it; None if no token reached it. Memory is counted while it is whole.

        finish     gives the array of a key: see `activations.sums.use_sums`
        encodings  of the weights of the site, which all take it in one form
        """
        with self.room(inputs.width(site)):
            plain: Hessian = finish(site)
            form: HessianForm = next((encoding.hessian for encoding in encodings), "sorted")
            if form == "whole":
                yield plain
                return
            factored = factorised(plain, form, inputs.threads)
            del plain
        yield factored

    @contextmanager
    def room(self, width: int) -> Iterator[None]:
        """The memory in which a Hessian of so many inputs is factorised; waits for it."""
        nbytes = hessians.PREPARE_BYTES * width**2
        with self._condition:
            self._condition.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._condition:
                self._taken -= nbytes
                self._condition.notify_all()


if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import LayerRows, NumberedRow
    from weightsmith._activations.sums import Forward, Inputs

LAYER_BY_LAYER = "quantising layer by layer"
"""The progress of quantised weights, and of what leaves their layers."""

_LAST = ("o_proj", "down_proj")
"""Inputs of these come last in their block."""


@dataclass(frozen=True, slots=True)
class QuantisedWork(CalibratedWork):
    """Settings of the product: a layer, or the head.

    weights  the encoding of each weight to quantise, by name; `plain` for other tensors that change with the scaled features
    scaled   input features of these weights that get scales
    """

    HEAD = True

    weights: Mapping[str, str]
    scaled: tuple[Features, ...] = field(default=(), metadata=OMITTED)

    @property
    def quantised(self) -> dict[str, str]:
        """The weights to quantise."""
        return {name: encoding for name, encoding in self.weights.items() if encoding != PLAIN}

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and their encodings."""
        return self.weights.items()

    def shapes(self, specs: Mapping[str, TensorSpec]) -> Shapes:
        """The stored tensors of each weight."""
        return [(out.dtype.name, out.shape) for outs in stored_of(self.weights, specs).values() for out in outs]

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """A head has one weight."""
        if self.layer == self.base.layers and len(self.weights) != 1:
            return f"there is no layer {self.layer}, or it has other weights"
        specs = {step.out.name: step.out for step in product.steps}
        return CalibratedWork.problem(self, product, shapes) or problem_of(self.scaled, self.weights, specs)


def stages(weights: Mapping[str, str], scaled: Iterable[Features] = ()) -> list[dict[str, str]]:
    """The weights of the attention, and the others. All together if some of both read the same scaled features.

    >>> [list(stage) for stage in stages({"l.0.mlp.up_proj.weight": "", "l.0.self_attn.q_proj.weight": ""})]
    [['l.0.self_attn.q_proj.weight'], ['l.0.mlp.up_proj.weight']]
    """
    first = {name: setting for name, setting in weights.items() if is_attention(name)}
    rest = {name: setting for name, setting in weights.items() if name not in first}
    if any(len({is_attention(name) for name in made.readers}) > 1 for made in scaled):
        return [dict(weights)]  # attention and MLP in parallel: the MLP receives nothing from the attention
    return [stage for stage in (first, rest) if stage]


def _compute(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import layer_rows

    work = QuantisedWork.of(context.product)
    if work.layer == work.base.layers:
        return _head(context, work)
    quantised: dict[str, Arrays] = {}
    with layer_rows(context, work, 0, 0.7) as rows:
        parts, specs = stages(work.quantised, work.scaled), {step.out.name: step.out for step in context.product.steps}
        for number, stage in enumerate(parts):
            if number:
                _give(rows, work.weights, quantised)
            first, last = number / len(parts), (number + 1) / len(parts)
            # Its quantised readers are all in one stage; others, such as a router, are in none.
            scaling, features = Scaling(), [made for made in work.scaled if not stage.keys().isdisjoint(made.readers)]
            if features:
                middle = first + SCALES_SHARE * (last - first)
                scaling, first = scaling_of(rows, features, work.weights, specs, (first, middle)), middle
            _quantise(rows, stage, scaling, (first, last), quantised)
            quantised |= scaling.plain
    return [array for name in work.weights for array in quantised[name]]


SCALES_SHARE = 0.4
"""The share of the progress that the search for scales takes."""


def _quantise(
    rows: LayerRows, stage: Mapping[str, str], scaling: Scaling, span: tuple[float, float], quantised: dict[str, Arrays]
) -> None:
    """Quantise some weights of a layer, which itself remains as it is. span: of the progress."""
    from weightsmith._activations.running import budget
    from weightsmith._activations.sums import Forward, use_sums

    routed = any("experts" in name.split(".") for name in stage)
    last = [site_of(name) for name in stage if not routed and name.split(".")[-2] in _LAST]
    forward = Forward(last=last[0] if last else "")
    if (tasks := rows.context.tasks) is not None and tasks.has_helpers():
        _quantise_together(rows, stage, scaling, span, quantised, forward, tasks)
        return
    factors = FactoredHessians(budget(rows.context))

    def quantise(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        encodings = {name: find_encoding(stage[name]) for name in inputs.sites[site]}
        first = inputs.sites[site][0]
        with (
            located(f"{site}, {rows.base.label}"),
            factors.hessian(inputs, site, lambda key: scaling.gram(first, finish(key)), encodings.values()) as hessian,
        ):
            for name, encoding in encodings.items():
                quantised[name] = encoding.quantise(scaling.weight(name, _weight(rows, name)), hessian, rows.context.threads)

    use_sums(rows, list(stage), quantise, span=span, forward=forward)


def _weight(rows: LayerRows, name: str) -> Floats:
    weight: Floats = rows.layer.linear(name).weight.detach().cpu().numpy()
    return weight


# ---- with the processes that wait for the layer


def _quantise_together(
    rows: LayerRows,
    stage: Mapping[str, str],
    scaling: Scaling,
    span: tuple[float, float],
    quantised: dict[str, Arrays],
    forward: Forward,
    tasks: Tasks,
) -> None:
    """Like `_quantise`, with tasks for all processes. This process sums up the Hessians, and then does tasks too."""
    from weightsmith._activations.sums import use_sums

    middle = span[0] + SUMS_SHARE * (span[1] - span[0])
    offered: list[WeightTask] = []

    def offer(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        names, where = inputs.sites[site], f"{site}, {rows.base.label}"
        array = scaling.gram(names[0], finish(site))
        form = find_encoding(stage[names[0]]).hessian
        try:
            hessian = "" if array is None else tasks.put(array)
            arrays = {name: tasks.put(scaling.weight(name, _weight(rows, name))) for name in names}
        except OSError as error:
            if error.errno not in FULL:
                raise
            with located(where):  # no room for tasks: this process does them
                factored = factorised(array, form, rows.context.threads)
                for name in names:
                    weight = scaling.weight(name, _weight(rows, name))
                    quantised[name] = find_encoding(stage[name]).quantise(weight, factored, rows.context.threads)
            return
        for some in [[name] for name in names] if form == "whole" else [names]:  # each weight makes of it what it needs
            cost = sum(rows.layer.linear(name).weight.numel() for name in some) + inputs.width(site) ** 2
            weights = {name: (stage[name], arrays[name]) for name in some}
            offered.append(WeightTask(weights, hessian, cost * inputs.width(site), where))

    use_sums(rows, list(stage), offer, span=(span[0], middle), forward=forward)
    # The longest first, one after the other: each uses all threads.
    pending = {tasks.offer(task.to_json()): task for task in sorted(offered, key=lambda task: (-task.cost, [*task.weights]))}
    specs, count = {step.out.name: step.out for step in rows.context.product.steps}, len(pending)
    threads = tasks.threads(rows.context.threads)
    while pending:
        for key, task in list(pending.items()):
            outs = [out for name in task.weights for out in find_encoding(stage[name]).outs(specs[name])]
            with located(task.where):
                arrays = tasks.take(key, partial(quantise_task, task.to_json(), tasks, threads), outs)
            rows.progress(middle + (span[1] - middle) * (1 - len(pending) / count))
            if arrays is not None:
                del pending[key]
                quantised |= split({name: stage[name] for name in task.weights}, specs, arrays)
        if pending:
            time.sleep(PAUSE_SECONDS)
    tasks.clear()


SUMS_SHARE = 0.4
"""The share of the progress that summing up the Hessians takes."""
PAUSE_SECONDS = 0.1
"""Between two looks at tasks that other processes are working on."""


@dataclass(frozen=True, slots=True)
class WeightTask:
    """Weights with the same inputs, to be quantised by any process.

    weights  the encoding, and the array, by name
    hessian  the array; "" if no token reached them
    cost     compared with others
    where    for messages
    """

    weights: Mapping[str, tuple[str, str]]
    hessian: str
    cost: int
    where: str

    def to_json(self) -> dict[str, Any]:
        return {"op": "quantised_layer", "weights": {**self.weights}, "hessian": self.hessian}


def quantise_task(task: Mapping[str, Any], tasks: Tasks, threads: int) -> Arrays:
    """The stored arrays of the weights of a task (`WeightTask.to_json`), in order. Raises as `quantise` does; OSError."""
    with one_thread():
        hessian: Hessian = tasks.array(task["hessian"]) if task["hessian"] else None
        encodings = {name: find_encoding(encoding) for name, (encoding, _) in task["weights"].items()}
        form: HessianForm = next(iter(encodings.values())).hessian
        hessian = factorised(hessian, form, threads)
        return [
            array
            for name, (_, weight) in task["weights"].items()
            for array in encodings[name].quantise(tasks.array(weight), hessian, threads)
        ]


def _give(rows: LayerRows, weights: Mapping[str, str], quantised: Mapping[str, Arrays]) -> None:
    """Give a layer its quantised weights, and what changes with them. weights: encodings by name."""
    import torch

    from weightsmith._activations.running import workers

    def give(name: str) -> None:
        parameter = rows.layer.weights[name]
        value = find_encoding(weights[name]).dequantise(quantised[name], tuple(parameter.shape))
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(value))

    with workers(rows.context.threads, "cpu") as pool:
        list(pool.map(give, quantised))


def _head(context: ProductContext, work: QuantisedWork) -> Arrays:
    """Quantise the head for what leaves the final norm."""
    import torch

    from weightsmith._activations.running import decoder_of, rows_of_states, workers
    from weightsmith._activations.statistics import GRAM
    from weightsmith._activations.sums import Sums

    rows = rows_of_states(context, work, 0, 0)
    [(name, setting)] = work.weights.items()
    encoding = find_encoding(setting)
    n, k = next(step.out.shape for step in context.product.steps if step.out.name == name)
    sums = Sums(GRAM, {name: (n, k)}, rows.device)
    with workers(context.threads, rows.device) as pool, decoder_of(work.base).final_norm(context, rows.device) as norm:

        def run(numbered: NumberedRow) -> dict[str, tuple[Tensor, ...]]:
            row, hidden = numbered
            with torch.no_grad():
                x = norm(hidden)
            rows.check_finite(x, "the input of the head", row)
            return {name: (x,)}

        for some in rows.batches():
            sums.add(list(pool.map(run, some)), pool)
    weight = Unread((n, k), lambda array: context.fill({name: array}))
    with located(f"{name}, {work.base.label}"):
        hessian = factorised(sums.finish(name), encoding.hessian, context.threads)
        return encoding.quantise(weight, hessian, context.threads)


QUANTISED = ProductKind(LAYER_BY_LAYER, compute=_compute, check=QuantisedWork.check, device=True, help=quantise_task)


# ---- what leaves the layer


@dataclass(frozen=True, slots=True)
class QuantisedStatesWork(LayerWork):
    """Settings of the product.

    weights       the encoding of each quantised weight, by name
    quantised_by  the product that makes them
    """

    weights: Mapping[str, str]
    quantised_by: str

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.quantised_by}

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        return LayerWork.problem(self, product, shapes) or problem_of_quantised(self.weights, product)


def problem_of_quantised(weights: Mapping[str, str], product: Product) -> str:
    """Why the weights of a layer cannot be those of a product, or "". weights: their encodings, by name."""
    specs = {step.out.name: step.out for step in product.steps}
    for name, encoding in weights.items():
        if name not in specs:
            return "it has no step for a quantised weight"
        try:
            refusal = find_encoding(encoding).refusal(specs[name])
        except WeightsmithError as error:
            return error.finding.what
        if refusal:
            return refusal
    return ""


def dequantised_weights(context: ProductContext, weights: Mapping[str, str], quantised_by: str) -> dict[str, Tensor]:
    """Weights that a product of a layer has, float32, by name. weights: their encodings.

    Raises FormatError if they are not what it has: a plan from elsewhere may say so.
    """
    import torch

    from weightsmith._files.arrays import release_pages

    specs = {step.out.name: step.out for step in context.product.steps}
    arrays = context.arrays(quantised_by)
    expected = [(out.dtype.itemsize, out.shape or (1,)) for outs in stored_of(weights, specs).values() for out in outs]
    if [
        (array.dtype.itemsize, array.shape or (1,)) for array in arrays
    ] != expected:  # a number of another process has one axis
        what = f"the arrays of product {quantised_by} are not those of the weights that its settings name"
        raise FormatError(what, where=f"product {context.product.name}", fix="make the plan again")
    dequantised = {}
    for name, stored in split(weights, specs, arrays):
        dequantised[name] = torch.from_numpy(find_encoding(weights[name]).dequantise(stored, specs[name].shape))
        for array in stored:
            release_pages(array)
    return dequantised


def _compute_states(context: ProductContext) -> Arrays:
    work = QuantisedStatesWork.of(context.product)
    return run(context, work, dequantised_weights(context, work.weights, work.quantised_by))


_check_states = partial(check, kind=QuantisedStatesWork)
STATES = ProductKind(LAYER_BY_LAYER, compute=_compute_states, check=_check_states, device=True, transient=True)
