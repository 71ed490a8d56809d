"""How the loss of a candidate changes with each number of its recipe.

One backward pass gives the gradients at all tensors. What a number does to the tensors is the difference of two merges, in
float32: exact where they are linear in the number, as for weights of `linear`, `task_arithmetic` and, between changes of sign,
`ties`. Numbers that change different tensors share a merge, so that weights of 30 layers take as many merges as models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from weightsmith._planning.recipe import Scalar, Tunable
from weightsmith._reports.tuning.candidates import Candidates
from weightsmith._reports.tuning.evaluator import Candidate, Evaluator

STEP = 1 / 64
"""How far a number is moved, as a share of its range."""


class Slopes:
    """Finds the slopes of the numbers of one recipe.

    candidates  of the recipe, with float32 as the dtype of the output: a small step would be lost in the rounding to bfloat16
    numbers     places of the values that are moved
    """

    def __init__(self, candidates: Candidates, evaluator: Evaluator, numbers: Sequence[int]) -> None:
        self._candidates, self._evaluator, self._numbers = candidates, evaluator, numbers
        self._chosen: tuple[Scalar, ...] = ()
        self._touched = dict[int, frozenset[str]]()

    def of(self, values: Sequence[Scalar], gradients: Iterable[Mapping[str, Tensor]]) -> list[float]:
        """The slope of the loss for each of `numbers`, by one unit of it.

        gradients  of the loss with respect to the tensors at these values, in parts of the model
        """
        still = self._candidate(values)
        self._learn(values, still)
        groups = [(group, self._candidate(_moved(self._tunables, values, group))) for group in self._groups()]
        slopes = dict.fromkeys(self._numbers, 0.0)
        for part in gradients:
            found = {name: gradient for name, gradient in part.items() if name in still.tensors}
            changes = [[name for name in found if moved.tensors[name] != still.tensors[name]] for _, moved in groups]
            before = self._evaluator.merged(still, [name for name in found if any(name in names for names in changes)])
            for (group, moved), names in zip(groups, changes, strict=True):
                after = self._evaluator.merged(moved, names)
                for name in names:
                    k = next(k for k in group if name in self._touched[k])
                    change = (after[name] - before[name]).astype("f8")
                    slopes[k] += float((found[name].cpu().numpy() * change).sum()) / _step(self._tunables[k], values[k])
        return [slopes[k] for k in self._numbers]

    @property
    def _tunables(self) -> Sequence[Tunable]:
        return self._candidates.tunables

    def _candidate(self, values: Sequence[Scalar]) -> Candidate:
        prepared = self._candidates.prepare(tuple(values))
        return Candidate.of(prepared.plan, prepared.inputs)

    def _learn(self, values: Sequence[Scalar], still: Candidate) -> None:
        """Find the tensors that each number changes, once for each method and set of models."""
        chosen = tuple(value for i, value in enumerate(values) if i not in self._numbers)
        if self._touched and chosen == self._chosen:
            return
        self._chosen = chosen
        for k in self._numbers:
            moved = self._candidate(_moved(self._tunables, values, [k])).tensors
            self._touched[k] = frozenset(name for name, own in still.tensors.items() if moved[name] != own)

    def _groups(self) -> list[list[int]]:
        """Group the numbers so that no two of a group change the same tensor."""
        groups: list[tuple[list[int], set[str]]] = []
        for k in self._numbers:
            own = self._touched[k]
            for group, names in groups:
                if names.isdisjoint(own):
                    group.append(k)
                    names |= own
                    break
            else:
                groups.append(([k], set(own)))
        return [group for group, _ in groups]


def _moved(tunables: Sequence[Tunable], values: Sequence[Scalar], numbers: Sequence[int]) -> list[Scalar]:
    return [float(v) + _step(tunables[i], v) if i in numbers else v for i, v in enumerate(values)]


def _step(each: Tunable, value: Scalar) -> float:
    """Inwards."""
    assert each.low is not None
    assert each.high is not None
    step = STEP * (each.high - each.low)
    return step if float(value) + step <= each.high else -step
