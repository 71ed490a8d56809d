"""Python files that a model brings are never run by transformers, and nobody is asked whether they may be."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsmith._base.errors import WeightsmithError

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "examples", "benchmarks", "scripts")


def loading_calls(source: str) -> Iterator[ast.Call]:
    """The calls that load with transformers; those of scripts that are texts in a file count.

    PEFT's own classes load adapters of models that are loaded already, and have no such argument.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.search(r"^from transformers import .*\n", node.value, re.M)
        ):
            yield from loading_calls(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("from_pretrained", "from_config") and owner not in ("PeftModel", "PeftConfig"):
                yield node


def is_safe(call: ast.Call) -> bool:
    return any(
        k.arg == "trust_remote_code" and isinstance(k.value, ast.Constant) and k.value.value is False for k in call.keywords
    )


@pytest.mark.long
def test_every_call_says_that_code_is_not_trusted() -> None:
    calls = {
        f"{path.relative_to(ROOT)}: {ast.unparse(call)}": is_safe(call)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if ".venv" not in str(path)
        for call in loading_calls(path.read_text(encoding="utf-8"))
    }
    assert len(calls) > 10, "the calls are found"
    assert [name for name, safe in calls.items() if not safe] == []


def test_a_call_that_does_not_say_it_is_found() -> None:
    script = "from transformers import A\nA.from_config(b)"
    text = f"AutoModel.from_pretrained(a)\nX({script!r})\nA.from_config(c, trust_remote_code=False)"
    assert [is_safe(call) for call in loading_calls(text)] == [False, True, False]
    assert not is_safe(next(loading_calls("A.from_pretrained(a, trust_remote_code=yes)")))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "mine"])
def test_code_of_a_model_is_neither_run_nor_asked_about(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    import weightsmith
    from tests.calibration_help import quantise, save_model, settings
    from weightsmith._reports.judge import Judge

    model = save_model(tmp_path / "m")
    marks = tmp_path / "run", tmp_path / "asked"
    for name in ("configuration_mine", "modeling_mine", "tokenization_mine"):
        (model / f"{name}.py").write_text(f"open({str(marks[0])!r}, 'w')\n")
    config = json.loads((model / "config.json").read_text())
    classes = {"AutoConfig": "configuration_mine.C", "AutoModelForCausalLM": "modeling_mine.M", "AutoModel": "modeling_mine.M"}
    own_tokenizer = {"AutoTokenizer": ["tokenization_mine.T", "tokenization_mine.T"]}
    config |= {"model_type": model_type, "auto_map": classes | own_tokenizer}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": own_tokenizer}))

    def yes(prompt: str = "") -> str:
        marks[1].touch()
        return "y"

    monkeypatch.setattr(builtins, "input", yes)
    prompts = [{"source_model": str(model), "positive_prompts": [text]} for text in ("a b", "c d")]
    moe = {"base_model": str(model), "gate_mode": "hidden", "experts": prompts, "architecture": "mixtral"}
    stack = {"merge_method": "passthrough", "slices": [{"sources": [{"model": str(model), "layer_range": [0, 1]}]}]}
    done = 0
    for call in (
        lambda: weightsmith.merge(stack, tmp_path / "stack", fsync=False),
        lambda: weightsmith.moe(moe, tmp_path / "moe", fsync=False),
        lambda: quantise(model, tmp_path / "exl2", settings(tmp_path)),
        lambda: Judge.of_folder(model),
        lambda: Judge.of_tensors({}, model, "m"),
    ):
        try:
            call()
            done += 1
        except (WeightsmithError, ValueError) as error:  # the latter is transformers' own refusal
            print(error)
        assert [mark.name for mark in marks if mark.exists()] == []
    assert done >= (2 if model_type == "llama" else 1), "some need no code of the model"
