"""The building blocks of the task-vector methods. `task_vectors.py` is the job."""

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
    """A method of the family and its parameters. Per-model parameters (weight, density to group) are in the models' order.

    sparsifier  `magnitude` keeps the largest deltas, `magnitude_outliers` the largest except for outliers, `random` each with
                probability density, `row_rank` each with a probability that grows with its rank in the row, `groups` the
                largest of each group of neighbours that no earlier model has kept
    weight      factor on a model's delta
    factor      lambda
    density     share of a delta to keep; () for `none`. The next three are also () if the sparsifier does not use them
    gamma       share of outliers, for `magnitude_outliers`
    epsilon     half of the range of probabilities, for `row_rank`
    group       group size, for `groups`
    scope       where magnitudes are ranked: in the tensor, each row, or all tensors of the model
    rescale     factor on the remaining delta: `l1` restores the tensor's L1 norm, `inv_density` is 1/density,
                `inv_probability` the inverse of each element's probability
    elect       drop contributions against the elected sign
    combine     `sum`; `mean`, divided by the sum of the weights (after an election, by the sum of |weight| of those that
                agree); `disjoint_mean`, divided by the number of contributing models; `absmax`, only the largest
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
