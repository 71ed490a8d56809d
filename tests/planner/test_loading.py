"""Stacks, mixtures and surgery are compared with what transformers builds, before anything is written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests import plan_help, zoo
from tests.plan_help import only, plan, warnings
from weightsmith.errors import Finding, LayerError, PlanError
from weightsmith.planner import loading
from weightsmith.planner.loading import check_loading
from weightsmith.tensors import DTYPES, TensorSpec

OUTPUT = {"model_type": "output"}, [TensorSpec("w", DTYPES["BF16"], (2, 3))]
DONOR = {"model_type": "donor"}, [TensorSpec("w", DTYPES["BF16"], (2, 2))]
RIGHT: dict[str, Any] = {"differences": []}


def asked(monkeypatch: pytest.MonkeyPatch, output: Mapping[str, Any], donor: Mapping[str, Any] = RIGHT) -> list[str]:
    """transformers gives these answers; the list of what it was asked for."""
    questions: list[str] = []

    def ask(checkpoint: Any) -> Mapping[str, Any]:
        questions.append(checkpoint[0]["model_type"])
        return output if questions[-1] == "output" else donor

    monkeypatch.setattr(loading, "_ask", ask)
    monkeypatch.setattr(loading, "installed", lambda: True)
    return questions


def test_what_loads_is_not_mentioned_and_the_donor_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = asked(monkeypatch, RIGHT)
    assert check_loading(OUTPUT, DONOR, "a", where="r.yml:2:1") is None
    assert questions == ["output"]


def test_differences_are_an_error_with_the_first_three(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [["missing", "l.0.a", ""], ["unexpected", "l.1.b", ""], ["shape", "c", "[2], and the model class builds [3]"]]
    asked(monkeypatch, {"differences": [*found, ["missing", "l.1.a", ""], ["missing", "l.2.a", ""]]})
    error = check_loading(OUTPUT, DONOR, "a", where="r.yml:2:1")
    assert isinstance(error, LayerError)
    assert str(error) == (
        "r.yml:2:1: transformers could not load the output: its config.json would build a model with other tensors\n"
        "  l.0.a: not in the output\n"
        "  l.1.b: the model class has no such tensor\n"
        "  c: [2], and the model class builds [3]\n"
        "  and 2 more\n"
        "  -> Choose other layers; to write it all the same, use --no-check-loading (check_loading=False)."
    )


def test_what_the_donor_misses_too_is_not_the_outputs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = {"differences": [["unexpected", "mtp.3.w", ""]]}
    asked(monkeypatch, {"differences": [["unexpected", "mtp.5.w", ""]]}, donor)
    assert check_loading(OUTPUT, DONOR, "a", where="") is None
    asked(monkeypatch, {"differences": [["unexpected", "mtp.5.w", ""], ["missing", "mtp.5.w", ""]]}, donor)
    assert isinstance(check_loading(OUTPUT, DONOR, "a", where=""), LayerError)


def test_a_config_that_cannot_be_built_is_an_error_unless_the_donors_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, {"failed": "ValueError: no"})
    error = check_loading(OUTPUT, DONOR, "a", where="")
    assert isinstance(error, LayerError)
    assert error.finding.details == ("ValueError: no",)
    asked(monkeypatch, {"failed": "ValueError: no"}, {"failed": "ValueError: neither"})
    note = check_loading(OUTPUT, DONOR, "a", where="")
    assert isinstance(note, Finding)
    assert "transformers cannot load a itself: ValueError: neither" in note.what


def test_what_transformers_does_not_know_is_written_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, {"unknown": "model_type 'x'"})
    assert check_loading(OUTPUT, DONOR, "a", where="") == Finding(
        "the output's config.json was not checked: transformers has no model_type 'x'",
        fix="load the output with its own software before you publish it",
    )


def fails(error: Exception) -> Callable[..., Any]:
    def run(*_args: object, **_options: object) -> None:
        raise error

    return run


@pytest.mark.loading
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (subprocess.TimeoutExpired("python", 120), "cannot load a itself: not built after 120 seconds"),
        (subprocess.CalledProcessError(-9, "python", stderr=""), "the process ended with status -9"),
        (subprocess.CalledProcessError(1, "python", stderr="x\nMemoryError\n"), "MemoryError"),
        (OSError("no processes"), "no processes"),
    ],
)
def test_a_process_that_fails_is_a_warning(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "installed", lambda: True)
    monkeypatch.setattr(subprocess, "run", fails(error))
    note = check_loading(OUTPUT, DONOR, "a", where="")
    assert isinstance(note, Finding)
    assert said in note.what


def test_only_what_has_a_new_config_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = asked(monkeypatch, {"differences": [["missing", "x", ""]]})
    a, b = (plan_help.model(tmp_path / n, seed=i, settings={"model_type": "output"}) for i, n in enumerate("ab"))
    models = [{"model": m} for m in (a, b)]
    plan({"merge_method": "linear", "models": models, "parameters": {"weight": 1}})
    whole = {"merge_method": "passthrough", "slices": [{"sources": [{"model": a, "layer_range": [0, 2]}]}]}
    plan(whole)
    assert questions == []
    stack = {"merge_method": "passthrough", "slices": [{"sources": [{"model": a, "layer_range": [0, 1]}]}]}
    plan(stack, check_loading=False)
    assert questions == []
    monkeypatch.setattr(loading, "check_loading", lambda *_args, **_where: LayerError("transformers could not load it"))
    assert "transformers could not load it" in str(only(stack))
    with pytest.raises(PlanError):
        weightsmith.merge(stack, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


# ---- asking transformers


@pytest.mark.slow
@pytest.mark.loading
def test_a_stack_that_transformers_loads_and_one_of_an_unknown_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = zoo.save("llama", tmp_path / "a", 1)
    stack = {"merge_method": "passthrough", "slices": [{"sources": [{"model": str(model), "layer_range": [0, 2]}]}] * 2}
    assert warnings(plan(stack)) == []
    # Code that a model brings with it is never executed, whatever its config says.
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "configuration_mine.C", "AutoModelForCausalLM": "modeling_mine.M"},
    }
    (model / "config.json").write_text(json.dumps(config))
    for name in ("configuration_mine.py", "modeling_mine.py"):
        (model / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    assert any("was not checked: transformers has no model_type 'mine'" in text for text in warnings(plan(stack)))
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
@pytest.mark.loading
def test_a_config_that_asks_for_a_model_of_any_size_costs_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setattr(loading, "TIMEOUT_SECONDS", 5)
    vast = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9}
    note = check_loading((vast, []), (vast, []), "a", where="")
    assert isinstance(note, Finding)
    assert "transformers cannot load a itself: not built after 5 seconds" in note.what
