"""slerp: spherical interpolation between two checkpoints."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from weightsmith._methods.method import merge_method
from weightsmith.abc.job import Job, Matrix


def slerp_coefficients(gram: np.ndarray, t: float, *, lerp_above: float) -> np.ndarray:
    """Coefficients of (a, b) from their inner products, float64 [2, 2] → float64 [2].

    Interpolates linearly when |cos| > lerp_above, or when a norm is too small to have a direction.

    >>> slerp_coefficients(np.eye(2), 0.5, lerp_above=0.9995).round(4)
    array([0.7071, 0.7071])
    """
    norms = np.sqrt(np.diag(gram))
    # mergekit divides by a norm only above 1e-8, so a zero tensor gives cos = 0; the sine form then has θ = π/2.
    scale = np.where(norms > 1e-8, norms, 1.0)
    cosine = min(1.0, max(-1.0, float(gram[0, 1] / (scale[0] * scale[1]))))
    if abs(cosine) > lerp_above:
        return np.array([1.0 - t, t])
    theta = math.acos(cosine)
    return np.array([math.sin((1.0 - t) * theta), math.sin(t * theta)]) / math.sin(theta)


@merge_method(
    title="spherical interpolation of two models",
    family="sphere",
    summary="""Moves from the base (t = 0) to the other model (t = 1) along the arc between them, where each tensor is one
long vector. Fine-tunes of one base lie so close together (cos > 0.9995) that this is plain linear interpolation for most
tensors. `t` may be a gradient over the layers and differ by filter, which is its most common use.""",
    use="""For two models, with `t` by layer and by attention and MLP. For fine-tunes of one base, it is linear interpolation
in all but name; it differs for models that lie far apart.""",
    passes="Two: inner products, then the result.",
    source="Shoemake 1985, Animating rotation with quaternion curves, section 3.3",
    formula="out = sin((1-t)θ)/sin θ · A + sin(tθ)/sin θ · B,  cos θ = A·B/(|A||B|);  (1-t)A + tB when |cos θ| > 0.9995",
    max_models=1,
    example="""merge_method: slerp
base_model: ./fr
models:
  - model: ./fr
  - model: ./de
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5
dtype: bfloat16
""",
)
def slerp(matrix: Matrix, t: Annotated[float, "0 is the base, 1 the other model; not clamped."]) -> Job:
    from weightsmith._methods.jobs.combination import GramJob

    return GramJob(matrix, lambda gram: slerp_coefficients(gram, t, lerp_above=0.9995))
