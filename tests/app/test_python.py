"""Python as its users meet it: dtypes in any spelling, plans that can be looked at, a bar where somebody watches."""

from __future__ import annotations

import os
import re
import sys
import types
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weightsmith
from tests.cli_help import LINEAR, make_adapter, make_models
from weightsmith._base.errors import PlanError
from weightsmith._base.text import is_terminal
from weightsmith._execution import progress as meters
from weightsmith._models.checkpoint import locate
from weightsmith._outputs.bucket import parse_bucket_address
from weightsmith._outputs.hub_repository import parse_hub_address


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    make_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    return {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "parameters": {"weight": 1}}


# ---- dtypes

SPELLINGS = ["float16", "torch.float16", torch.float16, np.float16, np.dtype("float16")]


@pytest.mark.parametrize("dtype", SPELLINGS, ids=repr)
def test_a_dtype_may_be_text_numpys_or_torchs(recipe: dict[str, Any], dtype: object) -> None:
    assert {step.out.dtype.name for step in weightsmith.plan(recipe, out_dtype=dtype).steps} == {"F16"}
    assert {step.out.dtype.name for step in weightsmith.plan(recipe | {"dtype": dtype}).steps} == {"F16"}


def test_bfloat16_too(recipe: dict[str, Any]) -> None:
    plan = weightsmith.plan(recipe | {"dtype": torch.bfloat16})
    assert {step.out.dtype.name for step in plan.steps} == {"BF16"}
    assert "dtype: bfloat16" in plan.recipe


def test_what_is_no_dtype_is_an_error(recipe: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"--out-dtype \(out_dtype\): must be one of bfloat16, .* \(did you mean 'float16'\?\)"):
        weightsmith.plan(recipe, out_dtype="float17")
    with pytest.raises(PlanError, match="int8 would round every weight"):
        weightsmith.plan(recipe | {"dtype": np.int8})


# ---- plans


def test_commands_that_change_one_model_are_planned_without_writing(recipe: dict[str, Any], tmp_path: Path) -> None:
    """As `weightsmith.plan` for recipes: the plan is the one that runs."""
    before = sorted(tmp_path.rglob("*"))
    assert weightsmith.plan_quantize("a", "fp8-dynamic").encodings == ("fp8-dynamic",)
    plain = weightsmith.plan_dequantize("a")
    extracted = weightsmith.plan_extract_lora("a", "b", max_rank=2, out_dtype="float32")
    assert extracted.then is not None
    assert extracted.then.settings["out_dtype"] == "float32"
    lora = make_adapter(tmp_path / "lora")
    converted = weightsmith.plan_convert_lora(lora, layout="mlx")
    assert [path for path in sorted(tmp_path.rglob("*")) if path != lora and lora not in path.parents] == before
    assert weightsmith.dequantize("a", "plain", progress=False, fsync=False).plan.hash == plain.hash
    assert weightsmith.convert_lora(lora, "mlx", layout="mlx", progress=False, fsync=False).plan.hash == converted.hash
    with pytest.raises(TypeError, match="no option 'threads'"):
        weightsmith.plan_extract_lora("a", "b", threads=1)
    with pytest.raises(PlanError, match="fp8"):
        weightsmith.plan_quantize("a", "fp9-dynamic")


# ---- recipes


@pytest.mark.parametrize("source", [None, 3, b"merge_method: linear\n", ["a"]])
def test_what_is_no_recipe_is_a_clear_error(source: Any) -> None:
    name = type(source).__name__
    wrong = rf"a recipe is the path of a file, YAML text, a mapping or a list of mappings, not {name}. An example"
    with pytest.raises(TypeError, match=wrong):
        weightsmith.plan(source)
    with pytest.raises(TypeError, match=wrong):
        weightsmith.merge(source, "out")
    with pytest.raises(TypeError, match=wrong):
        weightsmith.moe(source, "out")


def test_values_are_put_into_the_recipe(recipe: dict[str, Any]) -> None:
    plan = weightsmith.plan(recipe, settings={"models[0].parameters.weight": 3})
    assert [model_settings["weight"] for model_settings in plan.settings[-1].models] == [3, 1]
    assert "weight: 3" in plan.recipe


def test_a_problem_in_a_text_shows_its_line(recipe: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        weightsmith.plan(LINEAR.replace("0.25", "heavy"))
    assert "    4 |     parameters: {weight: heavy}\n      |                          ^^^^^\n" in str(caught.value)


# ---- plans


def test_a_plan_has_a_short_repr_and_an_html_one(recipe: dict[str, Any]) -> None:
    recipe["models"][0]["model"] = "./a"
    plan = weightsmith.plan(recipe)
    assert repr(plan) == "<Plan linear of 2 models: 6 tensors, 400 bytes>"
    html = plan._repr_html_()
    assert html.startswith("<table>")
    assert "<th>method</th><td>linear</td>" in html
    assert "<th>models</th><td>./a, b</td>" in html
    assert "<th>by linear</th><td>6 tensors, 400 bytes</td>" in html


def test_html_of_hostile_names_is_escaped(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "<b>").symlink_to(tmp_path / "a")
    recipe["models"][0]["model"] = "./<b>"
    assert "&lt;b&gt;" in weightsmith.plan(recipe)._repr_html_()


# ---- progress


def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels that the meter of a Python call gets."""
    labels: list[str] = []

    class Recorder(meters.Silent):
        def show(self, reading: meters.Reading) -> None:
            labels.append(reading.label)

    monkeypatch.setattr("weightsmith._execution.progress.watched_meter", Recorder)
    return labels


def test_progress_is_shown_by_default_and_can_be_turned_off(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = shown(monkeypatch)
    weightsmith.merge(recipe, tmp_path / "first", fsync=False)
    assert labels[-1] == "saving to disk"
    labels.clear()
    weightsmith.merge(recipe, tmp_path / "second", progress=False, fsync=False)
    seen: list[int] = []
    weightsmith.merge(recipe, tmp_path / "third", progress=lambda p: seen.append(p.tensors), fsync=False)
    assert labels == []
    assert seen[-1] == 6


def test_a_call_clears_its_own_bar_and_leaves_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[meters.Meter] = []

    class Counted(meters.Silent):
        def close(self) -> None:
            closed.append(self)

    call_bar, callers = Counted(), Counted()
    monkeypatch.setattr("weightsmith._execution.progress.watched_meter", lambda: call_bar)
    with meters.shown_meter(callers) as shown:
        assert shown is callers
    with meters.shown_meter(False) as shown:
        assert shown is not call_bar
    assert closed == []
    with meters.shown_meter(True) as shown:
        assert shown is call_bar
    assert closed == [call_bar]


def test_the_meter_is_a_bar_on_a_terminal_a_cell_in_a_notebook_and_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_terminal(sys.stderr)
    assert isinstance(meters.watched_meter(), meters.Silent)
    monkeypatch.setattr(meters, "is_terminal", lambda stream: True)
    with meters.watched_meter() as bar:
        assert isinstance(bar, meters.Bar)
    drawn: list[str] = []
    handle = types.SimpleNamespace(update=lambda html: drawn.append(html.data))
    display = types.ModuleType("IPython.display")
    display.HTML = lambda text: types.SimpleNamespace(data=text)  # type: ignore[attr-defined]
    display.display = lambda html, display_id: handle  # type: ignore[attr-defined]
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = type("ZMQInteractiveShell", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with meters.watched_meter() as cell:
        assert isinstance(cell, meters.Cell)
        cell.show(meters.Reading("<merging>", 1, 4, 1))
        cell.show(meters.Reading("<merging>", 2, 4, 2))
    assert drawn == ["<progress value='0.250' max='1'></progress> &lt;merging&gt;:  25%, 1 bytes of 4 bytes", ""]


# ---- results


@pytest.fixture
def plain(recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The recipe, of models whose tokenizers can be left out: those of `make_models` cannot be read."""
    for file in tmp_path.glob("*/tokenizer.json"):
        file.unlink()
    return recipe


def test_a_result_is_its_models_path_and_its_tensors_by_name(plain: dict[str, Any], tmp_path: Path) -> None:
    merged = weightsmith.merge(plain, "out", progress=False, fsync=False)
    with weightsmith.open_checkpoint(merged) as model, weightsmith.open_checkpoint("out") as same:
        assert list(model) == list(merged) == list(merged.keys()) == list(same)
        assert len(model) == len(merged) == 6
        name = next(iter(merged))
        assert name in merged
        assert name in model
        assert "nothing" not in merged
        np.testing.assert_array_equal(merged[name], model[name])
        np.testing.assert_array_equal(dict(model.items())[name], same.read(name))
    assert os.fspath(merged) == str(merged.out) == str(tmp_path / "out")
    assert weightsmith.diff(merged, "out", progress=False).total.changed == 0
    assert weightsmith.plan(plain | {"models": [{"model": merged}, {"model": "b"}]}).models[0].ref == str(merged.out)
    with pytest.raises(weightsmith.NotFound, match="no tensor 'lm_heat'"):
        merged["lm_heat"]
    with merged.open() as opened:
        assert opened.specs == merged.specs


def test_looking_at_names_reads_no_tensor(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    merged = weightsmith.merge(recipe, "out", progress=False, fsync=False)
    reads: list[str] = []
    monkeypatch.setattr(weightsmith.Checkpoint, "read", lambda self, name, rows=None: reads.append(name))
    assert [*merged, len(merged), bool(merged), "x" in merged][-1] is False
    items = iter(merged.items())
    assert reads == []
    next(items)
    assert reads == [next(iter(merged))]


@pytest.mark.long
def test_results_have_a_short_repr_and_an_html_one(plain: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "<b>").symlink_to(tmp_path / "b")
    plain["models"][1]["model"] = "./<b>"
    silent: dict[str, Any] = {"progress": False}
    results = {
        f"<Merged {tmp_path / 'out'}: 6 tensors, 400 bytes in ": weightsmith.merge(plain, "out", fsync=False, **silent),
        "<Inspection of ./<b>: ": weightsmith.inspect("./<b>"),
        "<Difference of a and ./<b>: ": weightsmith.diff("a", "./<b>", **silent),
        "<Comparison of a, ./<b> with base out: 6 tensors>": weightsmith.diff("a", "./<b>", base="out", **silent),
        "<Preview of linear on ": weightsmith.preview(plain, **silent),
    }
    for start, result in results.items():
        assert repr(result).startswith(start)
        assert len(repr(result)) < 150 + len(str(tmp_path))
        frame = result._repr_html_()
        assert frame.startswith("<iframe sandbox=")
        assert frame.count("<") == 2
        assert "./<b>" not in result.report().to_html()
        assert result.report().to_html() in unescape(frame)
        assert len(frame) < 100_000
    assert "&amp;lt;b&amp;gt;" in results["<Inspection of ./<b>: "]._repr_html_()
    assert "Merged with weightsmith" in results[f"<Merged {tmp_path / 'out'}: 6 tensors, 400 bytes in "].report().verdict


# ---- options


def test_a_size_may_be_text(recipe: dict[str, Any]) -> None:
    sharded = weightsmith.plan(recipe, max_shard_bytes="0.2kB")
    assert sharded.hash == weightsmith.plan(recipe, max_shard_bytes=200).hash != weightsmith.plan(recipe).hash
    with pytest.raises(PlanError, match="must be a size such as 800MB, 5GB or 2GiB, or a number of bytes, not 'many'"):
        weightsmith.plan(recipe, max_shard_bytes="many")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plan", ["out_dtype", "quantize", "bits"]),
        ("merge", ["out_dtype", "threads", "max_memory_bytes", "push"]),
        ("quantize", ["bits", "imatrix"]),
        ("dequantize", ["max_shard_bytes"]),
        ("extract_lora", ["max_rank", "energy"]),
        ("convert_lora", ["layout", "base"]),
        ("transplant_tokenizer", ["approximation", "k"]),
        ("run", ["threads"]),
        ("preview", ["out_dtype"]),
        ("evaluate", ["rows", "device"]),
    ],
)
def test_help_lists_the_options_that_a_function_takes(name: str, options: list[str]) -> None:
    text = getattr(weightsmith, name).__doc__
    listed = re.findall(r"^    (\w+) +[A-Z]", text.partition("\nOptions:\n")[2], flags=re.MULTILINE)
    assert set(options) <= set(listed)
    assert len(set(listed)) == len(listed)
    with pytest.raises(TypeError, match="has no option 'nonsense'"):
        getattr(weightsmith, name)(
            *["x"] * {"plan": 1, "preview": 1, "extract_lora": 3, "transplant_tokenizer": 3}.get(name, 2),
            **{"text": "t"} if name == "evaluate" else {},
            **({"format": "fp8-dynamic"} if name == "quantize" else {}),
            nonsense=1,
        )


# ---- models in memory


@pytest.mark.long
def test_modules_are_merged_as_their_state_dicts(recipe: dict[str, Any]) -> None:
    a, b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    merged = weightsmith.merge_state_dicts("linear", [a, b], weight=0.5)
    expected = weightsmith.merge_state_dicts("linear", [a.state_dict(), b.state_dict()], weight=0.5)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    a.load_state_dict(weightsmith.merge_state_dicts("slerp", [a, b], base=a, t=1.0))
    torch.testing.assert_close(a.weight, b.weight)


def test_the_address_of_an_output_is_opened_like_its_text() -> None:
    for text, parse in (("hf://org/merged@v2", parse_hub_address), ("s3://bucket/merged", parse_bucket_address)):
        address = parse(text)
        assert os.fspath(address) == str(address) == text
        assert locate(address) == locate(text)
