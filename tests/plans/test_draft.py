"""Drafts of plans: what `finish` rejects, and that nothing else makes a plan."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from weightsmith._base.errors import FormatError, StoreError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._plans import (
    COPY,
    PRODUCTS,
    Block,
    Dropped,
    Gather,
    ModelInput,
    PlanDraft,
    Product,
    Provenance,
    Read,
    Settings,
    StatisticRead,
    Step,
    Table,
    plan_from_json,
)

SOURCE = Path(weightsmith.__file__).parent
WEIGHT = TensorSpec("w", DTYPES["F32"], (2, 3))
ARRAY = TensorSpec("array", DTYPES["F32"], (2, 3))
PRODUCT = Product("made", "router", (ARRAY,), {})


def draft(*steps: Step, **changes: Any) -> PlanDraft:
    """One model, one setting, and one step that copies its tensor, unless others are given."""
    all_steps = list(steps) or [Step(WEIGHT, COPY, (Read(0, "w"),))]
    plan_draft = PlanDraft(Provenance("test"), [ModelInput("a", "", "")], all_steps, [Settings({}, ({},))])
    for name, value in changes.items():
        setattr(plan_draft, name, value)
    return plan_draft


def statistics(number: int, read: Read) -> Step:
    """A step that uses a statistic of its input of this number."""
    return Step(WEIGHT, COPY, (Read(0, "w"),), statistics=(StatisticRead("gram", number, read),))


def test_a_draft_becomes_a_plan_once() -> None:
    one = draft(files={"a.txt": b"a"}, carried=["b.txt"], config={"a": 1})
    assert one.held == {"a.txt", "b.txt", "config.json"}
    plan = one.finish()
    assert plan.steps == tuple(one.steps)
    with pytest.raises(AssertionError):
        one.finish()


def test_tensors_of_any_of_the_models_may_be_dropped() -> None:
    assert draft(dropped=[Dropped(0, "v", "unused")]).finish().dropped == (Dropped(0, "v", "unused"),)
    with pytest.raises(FormatError, match="there are 1 models"):
        draft(dropped=[Dropped(1, "v", "unused")]).finish()


def test_a_draft_of_a_plan_is_equal_to_it_and_apart_from_it() -> None:
    plan = draft(files={"a.txt": b"a"}, tables=[Table.of([1, 0])], products=[PRODUCT], recipe="x").finish()
    other = PlanDraft.of(plan)
    other.steps.append(replace(plan.steps[0], out=replace(WEIGHT, name="v")))
    other.files["b.txt"] = b"b"
    assert len(plan.steps) == 1
    assert list(plan.files) == ["a.txt"]
    assert PlanDraft.of(plan).finish() == plan
    assert plan_from_json(plan.to_json()) == plan
    copied = PlanDraft.of(other)
    copied.steps.clear()
    assert len(other.steps) == 2


def test_equal_settings_tables_and_warnings_are_stored_once() -> None:
    plan_draft = draft()
    assert [plan_draft.add_settings(Settings({"a": n}, ())) for n in (1, 2, 1)] == [1, 2, 1]
    assert [plan_draft.add_table(Table.of(numbers)) for numbers in ([1], [2], [1])] == [0, 1, 0]
    for what in ("one", "two", "one"):
        plan_draft.warn(what, "here", fix="do it")
    assert [finding.what for finding in plan_draft.finish().warnings] == ["one", "two"]


WRONG: dict[str, tuple[Callable[[], PlanDraft], str]] = {
    "donor": (lambda: draft(donor=1), "there is no model 1"),
    "model": (lambda: draft(Step(WEIGHT, COPY, (Read(3, "w"),))), "there is no model 3"),
    "settings": (lambda: draft(Step(WEIGHT, COPY, (Read(0, "w"),), settings=1)), "there are no settings 1"),
    "pieces": (lambda: draft(Step(WEIGHT, "join", ())), "a join must have pieces"),
    "stored": (lambda: draft(Step(WEIGHT, COPY, (Read(0, "w"),), encoding="int8")), "must list its stored tensors"),
    "array": (lambda: draft(Step(WEIGHT, COPY, (Read(PRODUCTS, "array"),))), "no product provides 'array'"),
    "table": (
        lambda: draft(Step(WEIGHT, COPY, (Read(0, "w", Gather(0, Block(0, 2, 3, 3))),))),
        "there is no table 0",
    ),
    "statistic of no input": (lambda: draft(statistics(1, Read(PRODUCTS, "array")), products=[PRODUCT]), "is not of an input"),
    "statistic of a model": (lambda: draft(statistics(0, Read(0, "w"))), "no product's array"),
    "importances of a plain tensor": (
        lambda: draft(Step(WEIGHT, COPY, (Read(0, "w"),), weighted=0), tables=[Table.of([1])]),
        "no encoding that takes it",
    ),
    "need of a step": (lambda: draft(Step(WEIGHT, COPY, (Read(0, "w"),), needs=("made",))), "which are not all products"),
    "need of a join": (
        lambda: draft(Step(WEIGHT, "join", (), pieces=(Step(WEIGHT, COPY, (Read(0, "w"),)),), needs=("made",))),
        "which are not all products",
    ),
    "order": (lambda: draft(products=[replace(PRODUCT, needs=("later",))]), "which are not defined before it"),
    "products": (lambda: draft(products=[PRODUCT, replace(PRODUCT, outs=())]), "duplicate product 'made'"),
    "arrays": (lambda: draft(products=[PRODUCT, replace(PRODUCT, name="other")]), "duplicate array 'array'"),
    "transient": (
        lambda: draft(Step(ARRAY, COPY, (Read(PRODUCTS, "array"),)), products=[replace(PRODUCT, transient=True)]),
        "it needs a transient product",
    ),
    "file": (lambda: draft(files={"../x": b""}), "is not a file name"),
    "both": (lambda: draft(files={"x": b""}, carried=["x"]), "is carried too"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_draft_is_one_error(name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(FormatError, match=words):
        make().finish()


def test_names_are_checked_where_they_are_stored() -> None:
    twice = [Step(WEIGHT, COPY, (Read(0, "w"),))] * 2
    with pytest.raises(StoreError, match="two tensors have this name"):
        draft(*twice).finish()
    assert len(draft(*twice).finish(stored=False).steps) == 2


@pytest.mark.long
def test_drafts_alone_make_plans_and_none_is_changed_afterwards() -> None:
    """`Plan(…)` is called in `PlanDraft.finish` alone, and no `replace(….plan, …)` makes one of another."""
    calls = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"\bPlan\(|\breplace\(\s*[\w.]*plan\b", text) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                first = ast.unparse(node.args[0]) if node.args else ""
                if node.func.id == "Plan" or (node.func.id == "replace" and first.rpartition(".")[2] == "plan"):
                    calls.append(f"{path.relative_to(SOURCE)}: {ast.unparse(node)[:60]}")
    assert calls == ["_plans/draft.py: Plan(**values)"]
