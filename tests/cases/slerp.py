"""slerp and nuslerp."""

from __future__ import annotations

from tests.cases.case import Case, f64
from tests.kernels import reference

PAIR = [{"weight": 3.0}, {"weight": 1.0}]
FLAT = {"nuslerp_flatten": True, "nuslerp_row_wise": False}

CASES = (
    Case("slerp", "slerp", {"t": 0.3}, [{}, {}], lambda a: reference.slerp(*f64(a), 0.3)),
    Case("nuslerp", "nuslerp", FLAT, PAIR, lambda a: reference.nuslerp(*f64(a), 0.25), base=False),
    Case(
        "nuslerp, base", "nuslerp", FLAT, [{}, *PAIR],
        lambda a: f64(a)[0] + reference.nuslerp(f64(a)[1] - f64(a)[0], f64(a)[2] - f64(a)[0], 0.25),
    ),
    Case(
        "nuslerp, rows", "nuslerp", {"nuslerp_flatten": False, "nuslerp_row_wise": True}, PAIR,
        lambda a: reference.nuslerp(*f64(a), 0.25, axis=-1), base=False, dims=(2,),
    ),
    Case(
        "nuslerp, columns", "nuslerp", {"nuslerp_flatten": False, "nuslerp_row_wise": False}, [{}, *PAIR],
        lambda a: f64(a)[0] + reference.nuslerp(f64(a)[1] - f64(a)[0], f64(a)[2] - f64(a)[0], 0.25, axis=0), dims=(2,),
    ),
)  # fmt: skip
