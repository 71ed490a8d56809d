"""`--target kl=X`: the smallest size whose divergence, measured on another text, is at most X."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.calibration_help import TEXT, save_model
from tests.cli_help import Cli, cli
from weightsmith._base.errors import ParameterError, PlanError, Unsupported
from weightsmith._execution import second_plans
from weightsmith._execution.second_plans import SizeTrial, search
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.manifest import read_manifest

__all__ = ["cli"]

OTHER = " ".join(f"One {word} sees {n} others near the {word}." for n, word in enumerate("tree house river road".split() * 9))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "m", seed=3)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(OTHER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quantised(out: str, target: str, format: str = "gguf-q4_k_m", **options: Any) -> Any:
    all_options = {
        "calibration": "text.txt",
        "calibration_rows": 2,
        "calibration_tokens": 32,
        "evaluate": "other.txt",
        **options,
    }
    return weightsmith.quantize("m", out, format, target=target, progress=False, **all_options)


def divergence(out: str) -> float:
    [score] = weightsmith.evaluate(out, text="other.txt", reference="m", progress=False).scores[1:][0]
    assert score.divergence is not None
    return score.divergence.value


@pytest.mark.matrix("gguf-q4_k_m")
@pytest.mark.long
@pytest.mark.parametrize("format", ["gguf-q4_k_m", "exl2"])
def test_the_divergence_that_is_measured_meets_the_target(format: str, folder: Path) -> None:
    """The file is smaller than that of a stricter target; the manifest has all that was tried; nothing else is left."""
    options = {"head_bits": 8} if format == "exl2" else {}
    loose, strict = quantised("loose", "kl=2e-4", format, **options), quantised("strict", "kl=5e-5", format, **options)
    for out, target in (("loose", 2e-4), ("strict", 5e-5)):
        manifest = read_manifest(folder / out).data
        assert divergence(out) <= target
        trials = manifest["target"]["trials"]
        assert manifest["target"]["kl"] == target
        met = min(trial["nbytes"] for trial in trials if trial["divergence"] <= target)
        assert met == (loose if out == "loose" else strict).plan.layout.total_bytes
        assert all(trial["divergence"] > target for trial in trials if trial["nbytes"] < met)
    assert loose.plan.layout.total_bytes < strict.plan.layout.total_bytes
    assert {path.name for path in folder.iterdir()} == {"m", "text.txt", "other.txt", "loose", "strict"}


@pytest.mark.long
def test_a_target_out_of_reach_is_one_error_with_the_best(folder: Path) -> None:
    """The measurement is kept for the next target."""
    with pytest.raises(Unsupported, match=r"KL is .* on other.txt at the largest size, .* not 1e-12") as caught:
        quantised("out", "kl=1e-12")
    assert "the measurement is kept" in str(caught.value)
    assert not (folder / "out").exists()
    assert "measurement" in " ".join(path.name for path in folder.iterdir())


@pytest.mark.matrix
@pytest.mark.slow
def test_a_search_goes_on_with_what_was_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantised("whole", "kl=1e-4")
    (folder / "out.trials.jsonl").write_text("of a search by tune\n")
    before = {path.name for path in folder.iterdir()}
    evaluated, run_plan = list[str](), second_plans.run_plan

    def first_only(run: Any) -> Any:
        if evaluated:
            raise KeyboardInterrupt
        evaluated.append(str(run.request.out))
        return run_plan(run)

    monkeypatch.setattr(second_plans, "run_plan", first_only)
    with pytest.raises(KeyboardInterrupt):
        quantised("out", "kl=1e-4")
    assert {path.name for path in folder.iterdir()} - before == {staging_folder(folder / "out.measurement").name}
    again = list[str]()
    monkeypatch.setattr(
        second_plans,
        "run_plan",
        lambda run: (again.append(str(run.request.out)), run_plan(run))[1],
    )
    resumed = quantised("out", "kl=1e-4")
    assert evaluated[0] not in again
    assert (folder / "out/model.gguf").read_bytes() == (folder / "whole/model.gguf").read_bytes()
    assert resumed.plan.hash == whole.plan.hash
    assert {path.name for path in folder.iterdir()} - before == {"out"}
    assert (folder / "out.trials.jsonl").read_text() == "of a search by tune\n"


@pytest.mark.long
def test_a_merge_is_compared_with_the_plain_merge(folder: Path) -> None:
    """Not with the model that it is merged into."""
    save_model(folder / "n", seed=4)
    recipe = {
        "merge_method": "linear",
        "models": [{"model": "m"}, {"model": "n"}],
        "parameters": {"weight": 0.5},
        "dtype": "float32",
    }
    weightsmith.merge(recipe, "plain", progress=False)
    options = {"calibration": "text.txt", "calibration_rows": 2, "calibration_tokens": 32, "evaluate": "other.txt"}
    weightsmith.merge(recipe, "out", quantize="gguf-q4_k_m", target="kl=1e-4", progress=False, **options)
    [score] = weightsmith.evaluate("out", text="other.txt", reference="plain", progress=False).scores[1:][0]
    assert score.divergence is not None
    assert score.divergence.value == pytest.approx(
        read_manifest(folder / "out").data["evaluation"]["totals"][-1]["divergence"]["value"]
    )
    assert score.divergence.value <= 1e-4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "kl=0"}, "'kl=0' is not a divergence above 0"),
        ({"target": "perplexity=3"}, "'perplexity=3' is not a divergence above 0"),
        ({"target": "kl=0.1", "size_bytes": 10**6}, "the size follows from the target"),
        ({"target": "kl=0.1", "format": "fp8-dynamic"}, "not a setting of fp8-dynamic"),
        (
            {"target": "kl=0.1", "calibration": "none", "calibration_rows": None, "calibration_tokens": None},
            "measurement on a text",
        ),
        ({"target": "kl=0.1", "format": "exl2", "bits": 4}, "the size follows from the target"),
        ({"target": "kl=0.1", "format": "exl2", "uniform": True}, "a target needs a measurement on a text"),
        ({"target": "kl=0.1", "evaluate": None}, "the divergence is measured on a text, and none is named"),
        ({"target": "kl=0.1", "evaluate": "text.txt"}, "the settings are chosen by this text"),
    ],
)
def test_targets_that_cannot_be(options: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises((PlanError, ParameterError), match=words):
        quantised("out", **options)
    assert {path.name for path in folder.iterdir()} == {"m", "text.txt", "other.txt"}


def test_the_plan_says_what_is_tried(folder: Path, cli: Cli) -> None:
    ran = cli(
        "quantize",
        "m",
        "--format",
        "gguf-q4_k_m",
        "--target",
        "kl=0.01",
        "--calibration",
        "text.txt",
        "--plan",
        *("--calibration-rows", "2", "--calibration-tokens", "32"),
    )
    assert ran.code == 0, ran.err
    assert "sizes are tried until KL on the text of --evaluate is at most 0.01" in " ".join(ran.out.split())
    assert (
        json.loads(
            cli(
                "quantize",
                "m",
                "--format",
                "gguf-q4_k_m",
                "--target",
                "kl=0.01",
                "--plan",
                "--json",
                *("--calibration", "text.txt", "--calibration-rows", "2", "--calibration-tokens", "32"),
            ).out
        )["then"]["settings"]["target"]
        == "kl=0.01"
    )


@pytest.mark.parametrize("target", [0.0003, 0.001, 0.02, 0.1, 0.249])
def test_a_search_ends_close_above_the_smallest_size(target: float) -> None:
    """Sizes come in steps, and the divergence is not that of the first guess."""

    def evaluated(asked: int) -> SizeTrial:
        nbytes = asked // 7 * 7
        return SizeTrial(asked, nbytes, 3.0 ** -(nbytes / 1000))

    trials = search(target, 1001, evaluated, lambda: (8001, 9000))
    best = min(trial.nbytes for trial in trials if trial.divergence <= target)
    smallest = next(size for size in range(1001, 8001, 7) if 3.0 ** -(size / 1000) <= target)
    assert smallest <= best <= smallest + 60
    assert len(trials) <= second_plans.MOST_TRIALS


@pytest.mark.parametrize(("target", "asked"), [(1e-9, 8001), (0.9, 1001)])
def test_a_search_looks_at_the_ends(target: float, asked: int) -> None:
    trials = search(target, 1001, lambda asked: SizeTrial(asked, asked, 3.0 ** -(asked / 1000)), lambda: (8001, 9000))
    assert trials[-1].asked == asked
