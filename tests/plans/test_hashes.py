"""Hashes of the parts of a plan: equal for equal bytes, and different where anything changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._plans import ModelInput, OwnCode, Plan, Product, Provenance, Read, Settings, Step, Table
from weightsmith._plans.parts import PartHashes

ONE, TWO = (TensorSpec(name, DTYPES["F32"], (2, 3)) for name in "ab")
PRODUCT = Product("limits", "thresholds", (TensorSpec("limit", DTYPES["F64"], (1,)),), {"density": 0.5})
STEPS = (
    Step(ONE, "ties", (Read(0, "a"), Read(1, "a")), base=True, settings=0, needs=("limits",)),
    Step(TWO, "ties", (Read(0, "b"), Read(1, "b")), base=True, settings=1),
)
SETTINGS = Settings({"lambda": 1.0}, ({}, {"weight": 1.0})), Settings({"lambda": 0.5}, ({}, {"weight": 1.0}))
MODELS = ModelInput("base", "", "same"), ModelInput("fr", "", "same")
PLAN = Plan(Provenance("ties"), MODELS, STEPS, SETTINGS, (PRODUCT,), recipe="one")


def hashes(plan: Plan) -> tuple[str, str, str]:
    parts = PartHashes(plan)
    return parts.tensors()["a"], parts.tensors()["b"], parts.product("limits")


CHANGES: dict[str, tuple[Callable[[], Plan], str]] = {
    "a parameter": (lambda: replace(PLAN, settings=(SETTINGS[1], SETTINGS[1])), "a limits"),
    "a parameter of the other tensor": (lambda: replace(PLAN, settings=(SETTINGS[0], SETTINGS[0])), "b"),
    "a product": (lambda: replace(PLAN, products=(replace(PRODUCT, settings={"density": 0.4}),)), "a limits"),
    "a model of the same shape": (lambda: replace(PLAN, models=(MODELS[0], replace(MODELS[1], ref="de"))), "a b limits"),
    "the seed": (lambda: replace(PLAN, seed=1), "a b limits"),
    "own code": (lambda: replace(PLAN, provenance=Provenance("ties", code=OwnCode("f.py:f", "", "0"))), "a b limits"),
    "a table": (lambda: replace(PLAN, tables=(Table.of([1]),)), "a b limits"),
    "the number of its settings": (
        lambda: replace(PLAN, settings=SETTINGS[::-1], steps=tuple(replace(s, settings=1 - s.settings) for s in STEPS)),
        "",
    ),
    "the recipe's text": (lambda: replace(PLAN, recipe="two", provenance=Provenance("ties", title="other")), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hashes_change_with_what_changes_bytes(change: str) -> None:
    make, changed = CHANGES[change]
    pairs = zip(("a", "b", "limits"), hashes(PLAN), hashes(make()), strict=True)
    assert [name for name, before, after in pairs if before != after] == changed.split()
