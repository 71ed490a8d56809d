"""ramplus_tl: ram, with unique deltas strengthened tensor by tensor."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt

from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith._methods.ram import Epsilon
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="ram, with unique deltas strengthened tensor by tensor",
    family="delta",
    summary="""RAM, with the delta of a model that is active alone multiplied by λᵢ. A model that shares more of its changes
loses more by averaging, so its own part is strengthened more. Positions are counted within each tensor, as in mergekit. With
the defaults, λᵢ is at most 1.02. `ramplus` is the authors' form.""",
    use="Like ram; with mergekit's defaults, the difference from ram is at most 2% of a delta.",
    passes="Two: counts, then the result.",
    source="Yuan et al. 2026, Behavior Knowledge Merge in Reinforced Agentic Models (RAM+), https://arxiv.org/abs/2601.13572; "
    "tensor by tensor as in mergekit",
    formula="λᵢ = 1 + r · clip(sharedᵢ / uniqueᵢ, 0, alpha);  ram with λᵢδᵢ where only model i is active",
    example=example_recipe("ramplus_tl"),
)
def ramplus_tl(
    matrix: Matrix,
    r: Annotated[float, "How much the ratio of shared to unique strengthens."] = 0.1,
    alpha: Annotated[float, "Limit of the ratio.", Bounds(0.0)] = 0.2,
    epsilon: Epsilon = 1e-5,
) -> Job:
    from weightsmith._methods.jobs.elementwise import ActiveJob

    def alone(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        ratio = counts[:, 1] / np.maximum(counts[:, 0], max(epsilon, 1e-300))
        return np.asarray(1.0 + r * np.clip(ratio, 0.0, alpha), np.float64)

    return ActiveJob(matrix, epsilon, alone)
