"""`weightsmith auto` of Hub models that are not in the cache: they are downloaded once, after everything else was checked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

import weightsmith
from tests.fake_hub import COMMIT, CUT, FakeHub, Fault, Files, Seen, serve, use
from tests.reports.auto.test_auto import FINE_TUNES, pristine, work
from weightsmith._base.errors import CheckpointError, NoSpace, ParameterError, PlanError
from weightsmith._execution.progress import Silent
from weightsmith._reports.auto import auto as module
from weightsmith._reports.auto.pool import Choice, Models, Pool, RowScores
from weightsmith._reports.auto.result import Auto

__all__ = ["pristine", "work"]

MODELS = ("base", *FINE_TUNES)
WEIGHTS = "model.safetensors"


def files_of(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has the models as org/base, org/fr and org/de, and an empty cache."""
    with serve({(f"org/{name}", COMMIT): files_of(Path(name).resolve()) for name in MODELS}) as hub:
        use(hub, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(work / "cache"))
        yield hub


def auto(out: str = "merged", **overrides: Any) -> Auto:
    texts = {name: f"{name}.txt" for name in FINE_TUNES}
    models = overrides.pop("models", [f"org/{name}" for name in FINE_TUNES])
    options = {"text": texts, "progress": False, "budget": 1, "threads": 1} | overrides
    return weightsmith.auto(options.pop("base", "org/base"), models, out, **options)


def weights_sent(hub: FakeHub) -> int:
    """How often a whole file of weights was asked for."""
    return sum(seen.method == "GET" and seen.path.endswith(WEIGHTS) and not seen.range for seen in hub.seen)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"text": None}, {"stream": True}], ids=["texts", "own", "streamed"])
def test_models_of_an_empty_cache_merge_as_local_ones(options: dict[str, Any], hub: FakeHub) -> None:
    auto(**options)
    assert weights_sent(hub) == (0 if options.get("stream") else len(MODELS))
    auto("local", base="base", models=list(FINE_TUNES), **{k: v for k, v in options.items() if k != "stream"})
    assert Path("merged", WEIGHTS).read_bytes() == Path("local", WEIGHTS).read_bytes()


@pytest.mark.long
def test_the_plan_counts_the_download_and_downloads_no_weights(
    hub: FakeHub, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [f"org/{name}" for name in FINE_TUNES]
    plan = weightsmith.plan_auto("org/base", models, "merged")
    assert weights_sent(hub) == 0
    weights = sum(Path(name, WEIGHTS).stat().st_size for name in MODELS)
    assert weights <= plan.download_bytes < weights + 10_000
    assert "download" in str(plan.report())
    local = weightsmith.plan_auto("base", FINE_TUNES, "merged")
    assert local.download_bytes == 0
    assert plan.needed_bytes == local.needed_bytes + plan.download_bytes
    for place in ("_reports.auto.cost", "_outputs.disk"):
        monkeypatch.setattr(f"weightsmith.{place}.available_bytes", lambda _folder: plan.needed_bytes - 1)
    with pytest.raises(NoSpace):
        auto()
    assert weights_sent(hub) == 0


@pytest.mark.long
def test_a_copy_of_the_base_is_refused_after_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any, **_more: Any) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr(module, "Pool", fail)
    hub.repos["org/de", COMMIT] = hub.repos["org/base", COMMIT]
    with pytest.raises(PlanError, match="org/de: its weights are those of org/base"):
        auto()
    shutil.rmtree("cache")
    with pytest.raises(PlanError, match="org/de: its weights are those of base"):
        auto(base="base", models=["fr", "org/de"])
    assert not Path("merged.auto").exists()


class Told(Silent):
    """Notes what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.long
def test_a_resumed_call_downloads_nothing_again(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = Told(), Told()
    with monkeypatch.context() as patch:
        patch.setattr(module, "choose", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            auto(progress=first)
    assert any(text.startswith("downloading 3 files, ") for text in first.said)
    scores = Path("merged.auto/scores.jsonl").read_bytes()
    hub.seen.clear()
    auto(progress=again)
    assert hub.downloads() == set()
    assert not any("downloading" in text for text in again.said)
    assert Path("merged.auto/scores.jsonl").read_bytes() == scores


def _interrupt(*_given: Any, **_more: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.long
def test_a_lost_connection_is_one_error_and_the_next_call_goes_on(hub: FakeHub) -> None:
    def fault(seen: Seen) -> Fault:
        return CUT if seen.path == f"/org/de/resolve/{COMMIT}/{WEIGHTS}" and not seen.range else None

    hub.fault = fault
    with pytest.raises(CheckpointError, match="org/de: the download stopped") as error:
        auto()
    assert "Run the same command again to resume" in str(error.value)
    assert not Path("merged").exists()
    hub.fault = lambda _seen: None
    hub.seen.clear()
    auto()
    assert weights_sent(hub) == 1


@pytest.mark.long
def test_without_the_network_the_cache_is_enough_and_needed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PlanError, match="HF_HUB_OFFLINE=1 forbids downloading it"):
        auto()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with monkeypatch.context() as patch:
        patch.setattr(module, "Pool", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            auto()
    hub.seen.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    auto()
    assert hub.seen == []


@pytest.mark.matrix("True")
@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_a_branch_that_moves_meanwhile_changes_nothing(hub: FakeHub, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    other, refer = "d" * 40, Pool.refer
    for name in MODELS:
        hub.repos[f"org/{name}", other] = hub.repos["org/base", COMMIT]

    def move_main(pool: Pool, models: Models) -> list[RowScores]:
        hub.refs["main"] = other
        return refer(pool, models)

    monkeypatch.setattr(Pool, "refer", move_main)
    monkeypatch.setattr(module, "choose", lambda *_scored, **_given: Choice(module.REGMEAN_TSV, "the test says so"))
    auto(base="org/base@main", stream=stream)
    assert other not in "".join(seen.path for seen in hub.seen)
    auto("local", base="base", models=list(FINE_TUNES))
    assert Path("merged", WEIGHTS).read_bytes() == Path("local", WEIGHTS).read_bytes()
    recipe = yaml.safe_load(Path("merged/recipe.yml").read_text())
    assert recipe["base_model"] == f"org/base@{COMMIT}"
    assert [entry["model"] for entry in recipe["models"]] == [f"org/{name}@{COMMIT}" for name in FINE_TUNES]
    weightsmith.merge("merged/recipe.yml", "again", stream=stream, progress=False)
    assert Path("again", WEIGHTS).read_bytes() == Path("merged", WEIGHTS).read_bytes()


def test_two_names_of_one_commit_are_refused(hub: FakeHub) -> None:
    with pytest.raises(ParameterError, match="org/fr@main: a model is named twice"):
        auto(models=["org/fr", "org/fr@main", "org/de"], text=None)
    assert not Path("merged.auto").exists()


def test_a_gated_model_is_refused_before_any_download(hub: FakeHub) -> None:
    with pytest.raises(PlanError, match="this Hub model is gated"):
        auto(models=["org/fr", "org/gated"], text=None)
    assert weights_sent(hub) == 0
