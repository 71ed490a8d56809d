"""Stacks, mixtures and surgery are compared with what transformers builds, before anything is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests import architectures, plan_help, zoo
from tests.plan_help import only, plan, warnings
from weightsmith._base.errors import Finding, LayerError, PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.local import Progress, Run
from weightsmith._planning.planner import loading, transformers_script
from weightsmith._planning.planner.loading import Check, Question, check_loading

SPECS = (TensorSpec("w", DTYPES["BF16"], (2, 3)),)
STACK = Question(({"model_type": "output"}, SPECS), ({"model_type": "donor"}, SPECS), "a", "r.yml:2:1")
RIGHT: dict[str, Any] = {"differences": []}


def asked(monkeypatch: pytest.MonkeyPatch, output: Mapping[str, Any], donor: Mapping[str, Any] = RIGHT) -> list[str]:
    """transformers gives these answers; the list of what it was asked for."""
    questions: list[str] = []

    def ask(checkpoint: Any, _began: object) -> Mapping[str, Any]:
        questions.append(checkpoint[0]["model_type"])
        return output if questions[-1] == "output" else donor

    monkeypatch.setattr(loading, "_compare", ask)
    monkeypatch.setattr(loading, "installed", lambda: True)
    return questions


def test_what_loads_is_not_mentioned_and_the_donor_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = asked(monkeypatch, RIGHT)
    assert check_loading(STACK) is None
    assert questions == ["output"]


def test_differences_are_an_error_with_the_first_three(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = [["missing", "l.0.a", ""], ["unexpected", "l.1.b", ""], ["shape", "c", "[2], and the model class builds [3]"]]
    asked(monkeypatch, {"differences": [*differences, ["missing", "l.1.a", ""], ["missing", "l.2.a", ""]]})
    error = check_loading(STACK)
    assert isinstance(error, LayerError)
    assert str(error) == (
        "r.yml:2:1: transformers could not load the output: its config.json would build a model with other tensors\n"
        "  l.0.a: not in the output\n"
        "  l.1.b: the model class has no such tensor\n"
        "  c: [2], and the model class builds [3]\n"
        "  and 2 more\n"
        "  -> Choose other layers; to write it all the same, use --no-check-loading (check_loading=False)."
    )


def test_what_the_models_of_a_stack_lack_is_named_beside_the_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "model.embed_tokens.weight"
    answers = {2: RIGHT, 4: {"differences": [["missing", missing, ""]]}}
    monkeypatch.setattr(loading, "installed", lambda: True)
    monkeypatch.setattr(loading, "_compare", lambda checkpoint, _: answers[checkpoint[0]["num_hidden_layers"]])
    a, b = plan_help.model(tmp_path / "a", without=[missing]), plan_help.model(tmp_path / "b", seed=1)
    slices = [{"sources": [{"model": model, "layer_range": [0, 2]}]} for model in (a, b)]
    finding = only({"merge_method": "passthrough", "slices": slices}).finding
    assert finding.details == (f"{missing}: not in the output", f"{a} has no embedding of its tokens")
    assert finding.fix.endswith("Download or save a model again, if it should have what it lacks.")


def test_what_the_donor_misses_too_is_not_the_outputs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = {"differences": [["unexpected", "mtp.3.w", ""]]}
    asked(monkeypatch, {"differences": [["unexpected", "mtp.5.w", ""]]}, donor)
    assert check_loading(STACK) is None
    asked(monkeypatch, {"differences": [["unexpected", "mtp.5.w", ""], ["missing", "mtp.5.w", ""]]}, donor)
    assert isinstance(check_loading(STACK), LayerError)


def test_layers_that_the_donors_model_leaves_out_are_no_excuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """LongCat with num_hidden_layers = num_layers: transformers builds half of the layers, of the donor and of the output."""
    donor = {"differences": [["unexpected", "l.2.w", ""], ["unexpected", "l.3.w", ""]], "loaded": ["l.N.w"]}
    asked(monkeypatch, {"differences": [["unexpected", "l.4.w", ""]], "loaded": ["l.N.w"]}, donor)
    error = check_loading(STACK)
    assert isinstance(error, LayerError)
    assert error.finding.details == ("l.4.w: the model class has no such tensor",)


def test_prediction_layers_that_transformers_never_builds_are_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = {"differences": [["unexpected", "l.3.w", ""]], "loaded": ["l.N.w"]}
    output = {"differences": [["unexpected", "l.5.w", ""]], "loaded": ["l.N.w"]}
    asked(monkeypatch, output, donor)
    assert check_loading(replace(STACK, extra=("l.5.",))) is None
    assert isinstance(check_loading(replace(STACK, extra=("l.6.",))), LayerError)


def test_prediction_layers_are_those_after_the_outputs_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[Question] = []
    monkeypatch.setattr(loading, "installed", lambda: True)
    monkeypatch.setattr(loading, "check_loading", lambda question, *_: questions.append(question))
    mtp = {"model.layers.2.eh_proj.weight": (4, 8)}
    a = plan_help.model(tmp_path / "a", 2, extra=mtp, settings={"num_nextn_predict_layers": 1})
    plan({"merge_method": "passthrough", "slices": [{"sources": [{"model": a, "layer_range": [0, 2]}]}] * 2})
    assert [question.extra for question in questions] == [("model.layers.4.",)]


def test_a_config_that_cannot_be_built_is_an_error_unless_the_donors_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, {"failed": "ValueError: no"})
    error = check_loading(STACK)
    assert isinstance(error, LayerError)
    assert error.finding.details == ("ValueError: no",)
    asked(monkeypatch, {"failed": "ValueError: no"}, {"failed": "ValueError: neither"})
    note = check_loading(STACK)
    assert isinstance(note, Finding)
    assert "transformers cannot load a itself: ValueError: neither" in note.what


def test_what_transformers_does_not_know_is_written_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, {"unknown": "model_type 'x'"})
    assert check_loading(STACK) == Finding(
        "the output's config.json was not checked: transformers has no model_type 'x'",
        fix="load the output with its own software before you publish it",
    )


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """A folder, of a process that takes the place of transformers: it may write there."""
    monkeypatch.setattr(loading, "installed", lambda: True)
    monkeypatch.setattr(loading, "SCRIPT", tmp_path / "script.py")
    head = f"import os, sys, time\nfrom pathlib import Path\nhere = Path({str(tmp_path)!r})\n"
    loading.SCRIPT.write_text(f"{head}question = sys.stdin.read()\n{text}\n")
    return tmp_path


HANGS = "(here / 'pid').write_text(str(os.getpid())); (here / 'began').touch(); time.sleep(60)"
REFUSES = """
donor = '"num_hidden_layers": 2' in question
print('{"differences": %s}' % ("[]" if donor else '[["missing", "x", ""]]'))"""


def ended(folder: Path) -> bool:
    """Whether the process that hangs is gone."""
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("os.kill(os.getpid(), 9)", "the process ended with status -9"),
        ("sys.exit('x\\nMemoryError')", "MemoryError"),
        ("pass", "answer: Expecting value"),
    ],
)
def test_a_process_that_fails_is_a_warning(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, text)
    note = check_loading(STACK)
    assert isinstance(note, Finding)
    assert said in note.what


@pytest.mark.process
@pytest.mark.slow
def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, HANGS)
    monkeypatch.setattr(loading, "TIMEOUT_SECONDS", 0.5)
    began: list[subprocess.Popen[str]] = []
    note = check_loading(STACK, began.append)
    assert isinstance(note, Finding)
    assert "transformers has no answer after 0.5 seconds" in note.what
    assert [process.returncode for process in began] == [-signal.SIGKILL]


@pytest.mark.parametrize("output", [{"failed": "ValueError: no"}, {"differences": [["missing", "norm", ""]]}])
def test_a_donor_that_takes_too_long_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch, output: dict[str, Any]) -> None:
    answers = iter([output, {"unknown": "answer after 120 seconds"}])
    monkeypatch.setattr(loading, "_compare", lambda *_: next(answers))
    note = check_loading(STACK)
    assert isinstance(note, Finding)
    assert "transformers has no answer after 120 seconds for a" in note.what


def test_a_check_that_is_closed_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, HANGS)
    with Check(STACK) as check:
        wait_for(tmp_path / "began")
        check.poll()
    assert ended(tmp_path)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_was_asked_before_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, """print('{"differences": []}')""")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "key_of", lambda *_question: "key")
    processes: list[object] = []
    assert check_loading(STACK, processes.append) is None
    assert check_loading(STACK, processes.append) is None
    assert len(processes) == 1


# ---- beside a merge


def stack_of(tmp_path: Path) -> dict[str, Any]:
    model = plan_help.model(tmp_path / "a", settings={"model_type": "llama"})
    return {"merge_method": "passthrough", "slices": [{"sources": [{"model": model, "layer_range": [0, 1]}]}]}


def leftovers(tmp_path: Path) -> list[str]:
    """What a merge has written."""
    return sorted(path.name for path in tmp_path.iterdir() if path.name.strip(".").startswith("out"))


@pytest.mark.slow
def test_a_check_that_fails_ends_a_merge_that_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, REFUSES)

    def endless(run: Run, _task: object, _buffers: object) -> None:
        while run._scheduler.error is None:
            time.sleep(0.01)

    monkeypatch.setattr(Run, "_do", endless)
    with pytest.raises(PlanError, match="x: not in the output") as caught:
        weightsmith.merge(stack_of(tmp_path), tmp_path / "out", progress=False)
    assert str(caught.value).endswith("Nothing was written. (1 problem)")
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_nothing_is_published_before_the_check_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, f"while not (here / 'merged').exists(): time.sleep(0.01)\n{REFUSES}")

    def progress(reached: Progress) -> None:
        if reached.tensors == reached.total_tensors:
            (tmp_path / "merged").touch()

    with pytest.raises(PlanError, match="x: not in the output"):
        weightsmith.merge(stack_of(tmp_path), tmp_path / "out", progress=progress)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_check_that_fails_leaves_the_work_of_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, REFUSES)
    stack, out = stack_of(tmp_path), tmp_path / "out"

    def interrupt(reached: Progress) -> None:
        if reached.tensors == reached.total_tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(stack, out, progress=interrupt, check_loading=False)
    with pytest.raises(PlanError, match="what an earlier run has finished is kept") as caught:
        weightsmith.merge(stack, out, progress=False)
    assert "Nothing was written" not in str(caught.value)
    merged = weightsmith.merge(stack, out, progress=False, check_loading=False)
    assert merged.resumed == len(merged.plan.steps)


def test_an_interrupted_merge_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, HANGS)

    def interrupt(_reached: Progress) -> None:
        wait_for(tmp_path / "began")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(stack_of(tmp_path), tmp_path / "out", progress=interrupt)
    assert ended(tmp_path)


@pytest.mark.slow
def test_a_merge_that_waits_for_the_check_says_so_and_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, HANGS)

    def interrupt(reached: Progress) -> None:
        if reached.checking:
            assert reached.tensors == reached.total_tensors
            wait_for(tmp_path / "began")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(stack_of(tmp_path), tmp_path / "out", progress=interrupt)
    assert ended(tmp_path)


def test_what_is_not_known_is_a_warning_of_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, """print('{"unknown": "such model"}')""")
    merged = weightsmith.merge(stack_of(tmp_path), tmp_path / "out", progress=False)
    assert "transformers has no such model" in str(merged.warnings[-1])


# ---- when it is asked


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
    monkeypatch.setattr(loading, "check_loading", lambda *_args: LayerError("transformers could not load it"))
    assert "transformers could not load it" in str(only(stack))
    with pytest.raises(PlanError):
        weightsmith.merge(stack, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


# ---- asking transformers


def ask_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers in this process: another one would import it anew."""
    monkeypatch.setattr(loading, "ask_script", lambda text, _began: transformers_script.compare(*json.loads(text)[1:]))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.loading
def test_a_stack_that_transformers_loads_and_one_of_an_unknown_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    model = zoo.save("llama", tmp_path / "a", 1)
    stack = {"merge_method": "passthrough", "slices": [{"sources": [{"model": str(model), "layer_range": [0, 2]}]}] * 2}
    assert warnings(plan(stack)) == []
    ask_here(monkeypatch)
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
def test_a_stack_of_a_model_of_which_transformers_builds_half_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_hidden_layers should be twice num_layers: the donor loads with two of four layers, and no stack of it is right."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    ask_here(monkeypatch)
    sizes = dict.fromkeys(("hidden_size", "ffn_hidden_size", "expert_ffn_hidden_size", "q_lora_rank", "kv_lora_rank"), 16)
    heads = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "head_dim", "v_head_dim"), 8)
    experts = {"n_routed_experts": 2, "zero_expert_num": 1, "moe_topk": 1}
    config = transformers.LongcatFlashConfig(num_layers=4, vocab_size=16, num_attention_heads=2, **sizes, **heads, **experts)
    built = architectures.build(config, transformers.LongcatFlashForCausalLM)
    assert built is not None
    model = architectures.write(tmp_path / "a", {**built[0], "num_hidden_layers": 4}, built[1])
    stack = {"merge_method": "passthrough", "slices": [{"sources": [{"model": model, "layer_range": [0, 3]}]}]}
    problem = str(only(stack))
    assert "transformers could not load the output" in problem
    assert "the model class has no such tensor" in problem


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.loading
def test_a_config_that_asks_for_a_model_of_any_size_costs_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setattr(loading, "TIMEOUT_SECONDS", 3)
    vast = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9}
    note = check_loading(Question((vast, ()), (vast, ()), "a", ""))
    assert isinstance(note, Finding)
    assert "transformers has no answer after 3 seconds" in note.what
