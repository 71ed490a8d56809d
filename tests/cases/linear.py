"""linear and passthrough."""

from __future__ import annotations

from tests.cases.case import Case, f64
from tests.kernels import reference

W = [{"weight": 0.7}, {"weight": -0.2}, {"weight": 1.3}]

CASES = (
    Case(
        "linear", "linear", {"normalize": True}, W,
        lambda a: reference.combine(f64(a), [0.7 / 1.8, -0.2 / 1.8, 1.3 / 1.8]), base=False, ulp=0.51,
    ),
    Case(
        "linear, sum", "linear", {"normalize": False}, W, lambda a: reference.combine(f64(a), [0.7, -0.2, 1.3]),
        base=False, ulp=0.51, identity=False,
    ),
    Case("linear, one", "linear", {"normalize": True}, W[:1], lambda a: f64(a)[0], base=False, ulp=0.51),
    Case(
        "passthrough, scaled", "passthrough", {}, [{"scale": 0.3}], lambda a: f64(a)[0] * 0.3,
        base=False, ulp=0.51, identity=False,
    ),
    Case("passthrough", "passthrough", {}, [{}], lambda a: f64(a)[0], base=False, ulp=0.51),
)  # fmt: skip
