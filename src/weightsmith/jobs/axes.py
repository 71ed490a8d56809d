"""What the methods of the task-vector family are made of. `task_vectors.py` is the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Sparsifier = Literal["none", "magnitude", "magnitude_outliers", "random", "row_rank", "groups"]
Scope = Literal["tensor", "row", "model"]
Rescale = Literal["none", "l1", "inv_density", "inv_probability"]
Election = Literal["none", "sum", "count"]
Combine = Literal["sum", "mean", "disjoint_mean", "absmax"]


@dataclass(frozen=True, slots=True)
class Axes:
    """A method of the family, and its parameters. Those of each model (weight, density to group) are in the models' order.

    sparsifier  `magnitude` keeps the largest deltas, `magnitude_outliers` the largest but for the very largest, `random` each
                with probability density, `row_rank` each with a probability that grows with its rank in the row, `groups`
                the largest of each group of neighbours that no earlier model has kept
    weight      factor on a model's delta
    factor      lambda
    density     share of a delta that is kept; () for `none`, as the next three are where the sparsifier does not use them
    gamma       share that is too large, of `magnitude_outliers`
    epsilon     half of the range of probabilities, of `row_rank`
    group       neighbours in a group, of `groups`
    scope       what magnitudes are ranked among: the tensor, each row, or all tensors of the model
    rescale     what is left of a delta is multiplied by: `l1` what restores the tensor's L1 norm, `inv_density` 1/density,
                `inv_probability` the inverse of each element's probability
    elect       contributions against the elected sign are left out
    combine     `sum`; `mean`, divided by the sum of the weights, after an election of |weight| of those that agree;
                `disjoint_mean`, divided by the number of models that contributed; `absmax`, the largest alone
    """

    sparsifier: Sparsifier
    weight: Sequence[float]
    factor: float
    density: Sequence[float] = ()
    gamma: Sequence[float] = ()
    epsilon: Sequence[float] = ()
    group: Sequence[int] = ()
    scope: Scope = "tensor"
    rescale: Rescale = "none"
    elect: Election = "none"
    combine: Combine = "sum"
