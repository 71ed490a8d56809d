"""Pages of what was found: the numbers of the values, at the places of the tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import weightsmith
from tests.look.models import LAYERS, changed, is_linear, low_rank, save, weights
from weightsmith.look.pages import difference_page, inspection_page
from weightsmith.pages import Curves, HeatMap, Page, Table, to_html


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("look") / "base", weights())


def maps(page: Page) -> dict[str, HeatMap]:
    return {block.title: block for block in page.blocks if isinstance(block, HeatMap)}


def table(page: Page, name: str) -> Table:
    (found,) = (block for block in page.blocks if isinstance(block, Table) and name in (block.name, block.title))
    return found


def test_a_difference_by_layer_and_part(base: Path, tmp_path: Path) -> None:
    found = weightsmith.diff(base, changed(tmp_path / "b", low_rank(8, 0)), progress=False)
    page = difference_page(found)
    assert page.summary == found.reading
    moved, ranks = maps(page).values()
    assert moved.rows == tuple(f"model.layers.{i}" for i in range(LAYERS))
    tensors = {tensor.place: tensor for tensor in found.tensors}
    for place, tensor in tensors.items():
        if place.stack:
            i, j = moved.rows.index(place.group), moved.columns.index(place.part)
            assert moved.values[i][j] == pytest.approx(tensor.share)
            assert (ranks.values[i][j] is not None) == is_linear(tensor.name)
    rows = table(page, moved.detail)
    assert [(row[0], where) for row, where in zip(rows.rows, rows.places, strict=True)] == [
        (tensor.name, (place.group, place.part)) for place, tensor in tensors.items()
    ]
    by_layer, spectra = (block for block in page.blocks if isinstance(block, Curves))
    assert by_layer.series[0][1] == pytest.approx([group.share for group in found.layers[1:]])
    assert len({name.split(".", 3)[3] for name, _ in spectra.series}) == len(spectra.series) == 7
    assert all(values[6] > 10 * values[12] for _, values in spectra.series)  # a step at rank 8
    assert page.data == found.to_json()
    to_html(page)


def test_equal_models_have_no_heat_map(base: Path) -> None:
    page = difference_page(weightsmith.diff(base, base, progress=False))
    assert maps(page) == {}
    assert "The same weights" in to_html(page)


def test_nan_is_no_colour_and_no_error(base: Path, tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    page = difference_page(weightsmith.diff(base, save(tmp_path / "b", tensors), progress=False))
    moved = maps(page)["How far the weights moved"]
    assert math.isnan(moved.values[1][moved.columns.index("mlp.up_proj")] or 0)
    assert 'data-v="nan"' not in to_html(page)
    assert "model.layers.1, mlp.up_proj:" not in to_html(page)
    assert "model.layers.2, mlp.up_proj:" in to_html(page)


def test_an_inspection_with_and_without_statistics(base: Path) -> None:
    plain = inspection_page(weightsmith.inspect(base, progress=False))
    assert maps(plain) == {}
    assert len(table(plain, "tensors").rows) == len(weights())
    page = inspection_page(weightsmith.inspect(base, stats=True, progress=False))
    deviation = maps(page)["Standard deviation"]
    own = weights()["model.layers.2.self_attn.q_proj.weight"].astype(np.float64)
    assert deviation.values[2][deviation.columns.index("self_attn.q_proj")] == pytest.approx(own.std(), rel=1e-6)
    peak = maps(page)["Largest element"]
    assert peak.values[2][peak.columns.index("self_attn.q_proj")] == pytest.approx(np.abs(own).max() / own.std(), rel=1e-6)
    to_html(plain), to_html(page)
