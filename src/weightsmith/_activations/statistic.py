"""The `statistic` product: a statistic of the linear layers of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightsmith._activations import gradients, states
from weightsmith._activations.states import FORWARD
from weightsmith._activations.statistics import STATISTICS, find_statistic
from weightsmith._activations.work import StatisticWork
from weightsmith._models.structure.projections import by_site
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, ProductContext, ProductKind, Statistic

if TYPE_CHECKING:
    from weightsmith._activations.sums import Inputs


def keys_of(statistic: Statistic, weights: Sequence[str]) -> dict[str, list[str]]:
    """The weights that share each array: those with the same input, unless the statistic has gradients."""
    return {weight: [weight] for weight in weights} if statistic.gradients else by_site(weights)


def shapes_of(
    statistic: Statistic, weights: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shape of each array, by key. shapes: of the weights [N, K]."""
    return {key: statistic.shape(*shapes[sharing[0]]) for key, sharing in keys_of(statistic, weights).items()}


def _compute(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import layer_rows
    from weightsmith._activations.sums import Forward, use_sums
    from weightsmith._files.arrays import release_pages

    work = StatisticWork.of(context.product)
    statistic = find_statistic(work.kind)
    arrays = context.create()
    places = dict(zip(keys_of(statistic, work.weights), arrays, strict=True))

    def keep(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        for key in inputs.keys(site):
            if (array := finish(key)) is not None:  # else no token reached it: zeros
                places[key][...] = array
                release_pages(places[key])

    leaving = context.arrays(work.gradients)[0] if statistic.gradients else None
    gradient_states = (
        gradients.made_beside(context, work, work.gradients) if statistic.gradients else states.made_beside(context, work)
    )
    with layer_rows(context, work, 0, 0.7 if gradient_states is None else 1, back=statistic.gradients) as rows:
        use_sums(rows, work.weights, keep, statistic, forward=Forward(leaving=leaving, target=gradient_states))
    return arrays


def _check(product: Product) -> str:
    if problem := StatisticWork.check(product):
        return problem
    work = StatisticWork.of(product)
    if work.kind not in STATISTICS:
        return f"there is no statistic {work.kind}"
    statistic = find_statistic(work.kind)
    if statistic.gradients != bool(work.gradients):
        return "it has gradients, or has none, unlike its statistic"
    shapes = {step.out.name: step.out.shape for step in product.steps}
    if not all(len(shapes.get(weight, ())) == 2 for weight in work.weights):
        return "it has no step for a weight"
    expected = [("F32", shape) for shape in shapes_of(statistic, work.weights, shapes).values()]
    return (
        "" if [(out.dtype.name, out.shape) for out in product.outs] == expected else "its arrays are not those of its weights"
    )


def _installed(product: Product) -> str:
    return STATISTICS.identity(StatisticWork.of(product).kind)


KIND = ProductKind(FORWARD, compute=_compute, check=_check, installed=_installed, device=True, released=True)
