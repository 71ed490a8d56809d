"""`weightsmith tune` of Hub models that are not in the cache: all that it opens can be read, the mean and the base too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import weightsmith
from tests.fake_hub import COMMIT, FakeHub, serve, use
from tests.reports.auto.test_hub import files_of, weights_sent
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._reports.tuning.measure import TextMeasure
from weightsmith._reports.tuning.result import Judged, Tuning

ARGS: dict[str, Any] = {"text": "t.txt", "report_text": "u.txt", "tokens": 32, "rows": 4, "budget": 2, "progress": False}
MODELS = ("a", "b", "c")


@pytest.fixture
def hub(work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has the models as org/a, org/b and org/c, and an empty cache."""
    with serve({(f"org/{name}", COMMIT): files_of(Path(name).resolve()) for name in MODELS}) as hub:
        use(hub, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(work / "cache"))
        yield hub


def tune(prefix: str, **options: Any) -> Tuning:
    base, *fine_tunes = [f"{prefix}{name}" for name in MODELS]
    models = [{"model": name, "parameters": {"weight": {"tune": [0, 1]}}} for name in fine_tunes]
    recipe = {"merge_method": "task_arithmetic", "base_model": base, "models": models}
    return weightsmith.tune(recipe, "hub.yml" if prefix else "local.yml", **ARGS, **options)


@pytest.mark.matrix("streamed-gradient")
@pytest.mark.long
@pytest.mark.parametrize("search", ["cma", "gradient"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "downloaded"])
def test_models_of_an_empty_cache_are_tuned_as_local_ones(stream: bool, search: str, hub: FakeHub) -> None:
    tuned, local = tune("org/", stream=stream, search=search), tune("", search=search)
    assert tuned.judged.keys() == {"tuned", "start", "mean", "base"}
    assert tuned.judged == local.judged
    assert weights_sent(hub) == (0 if stream else len(MODELS))


@pytest.mark.long
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "downloaded"])
def test_a_branch_that_moves_meanwhile_changes_no_comparison(
    stream: bool, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, judge = "d" * 40, TextMeasure.judge
    for name in MODELS:
        hub.repos[f"org/{name}", other] = hub.repos["org/c", COMMIT]

    def move_main(measure: TextMeasure, best: Prepared) -> Judged:
        hub.refs["main"] = other
        return judge(measure, best)

    with monkeypatch.context() as patch:
        patch.setattr(TextMeasure, "judge", move_main)
        tuned = tune("org/", stream=stream)
    assert tuned.judged == tune("").judged
    assert other not in "".join(seen.path for seen in hub.seen)
