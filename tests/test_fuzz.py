"""The fuzzer, shortly: every kind of input, and that it notices what it is for. `make fuzz` runs more of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import weightsmith
from scripts.fuzz import KINDS, mutators
from scripts.fuzz.plans import PRODUCTS
from scripts.fuzz.running import main, problem_of
from tests.sampling import sampled
from weightsmith._base.errors import PlanError

CASES = 4
SAMPLE = {"config", "gguf", "journal", "plan", "recipe"}
"""Kinds that every run mutates: one for each way of mutating. `make fuzz` and the sweeps take all."""

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc"),
]


@pytest.mark.parametrize("kind", sampled(KINDS, SAMPLE))
def test_mutated_input_is_taken_or_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = {"pytorch": ["torch"], "gguf": ["libgguf"], "imatrix": ["libgguf", "transformers"], "calibration": ["tokenizers"]}
    for package in (needed | {"products": ["transformers", "scipy", "libgguf"]}).get(kind, ()):
        pytest.importorskip(package)
    status = main(["--kinds", kind, "--cases", str(CASES), "--seed", "1"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"{CASES} files" in said


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("traceback", "KeyError"),
        ("hang", "Hang: too long of processor time"),
        ("memory", " MB (memory)"),
        ("death", "the process died with status 3"),
        ("message", "a message of "),
    ],
)
def test_what_must_not_happen_is_noticed(kind: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kinds", kind, "--cases", "2", "--seconds", "0.5" if kind == "hang" else "10"]) == 1
    out = capsys.readouterr().out
    assert "2 failures of 1 sorts" in out
    assert said.replace("3", "\N{HORIZONTAL ELLIPSIS}") in out.replace("3", "\N{HORIZONTAL ELLIPSIS}")


def test_a_line_of_a_recipe_may_have_tabs() -> None:
    with pytest.raises(PlanError, match="\t") as refused:
        weightsmith.plan("merge_method:\tties\nbase: [")
    assert not problem_of(refused.value)


def test_every_kind_of_product_is_in_a_plan_that_is_mutated() -> None:
    from weightsmith._engine import products

    assert sorted(op for ops in PRODUCTS.values() for op in ops) == sorted(products.KINDS.names)


def test_a_case_depends_on_its_numbers_alone() -> None:
    data = b'{"a": [1, 2, {"b": null}], "c": "d"}'
    for mutate in (mutators.mutate_json, mutators.mutate_bytes):
        mutated = [[mutate(random.Random(f"{seed}"), data) for seed in range(200)] for _ in range(2)]
        assert mutated[0] == mutated[1]
        assert len(set(mutated[0])) > 100
