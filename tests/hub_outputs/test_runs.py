"""Merges into models on the Hub: the bytes of local ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.buckets.test_runs import MODELS, RECIPES
from tests.fake_hub import FakeHub
from tests.store_help import tree

OUT = "hf://org/out"


def run(case: str, out: str = OUT, **more: Any) -> weightsmith.Merged:
    function, recipe, options = RECIPES[case]
    return getattr(weightsmith, function)(recipe, out, progress=False, **{**options, **more})  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", RECIPES)
def test_the_files_are_those_of_a_local_run_that_is_pushed(here: Path, hub: FakeHub, case: str) -> None:
    merged = run(case, max_shard_bytes=100_000)
    assert str(merged.out) == OUT
    assert merged.url == f"{hub.url}/org/out"
    assert {path.name for path in here.iterdir()} == {*MODELS}
    assert len(hub.written["org/out"].commits) == 2
    streamed = hub.written.pop("org/out").files()
    run(case, "out", push="org/out", max_shard_bytes=100_000)
    assert hub.pushed == {"org/out": streamed}
    assert tree(here / "out") == streamed
    assert hub.leaked == []
