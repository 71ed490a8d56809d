"""Pages of what was found: the numbers of the values, at the places of the tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import weightsmith
from tests.reports.look.models import LAYERS, changed, is_linear, low_rank, save, weights
from weightsmith._base.report.blocks import Curves, HeatMap, Mark, Report, Table, written
from weightsmith._base.report.html import to_html
from weightsmith._reports.look.reports import comparison_report, difference_report, inspection_report, preview_report


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("look") / "base", weights())


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as model:
        return {name: model.read(name) for name in model.specs}


def maps(page: Report) -> dict[str, HeatMap]:
    return {block.title: block for block in page.blocks if isinstance(block, HeatMap)}


def table(page: Report, name: str) -> Table:
    (block,) = (block for block in page.blocks if isinstance(block, Table) and name in (block.name, block.title))
    return block


@pytest.mark.long
def test_a_difference_by_layer_and_part(base: Path, tmp_path: Path) -> None:
    difference = weightsmith.diff(base, changed(tmp_path / "b", low_rank(8, 0)), progress=False)
    page = difference_report(difference)
    assert page.summary == difference.reading
    moved, ranks = maps(page).values()
    assert (moved.prefix, moved.columns) == ("model.layers.", tuple(map(str, range(LAYERS))))
    tensors = {tensor.place: tensor for tensor in difference.tensors}
    for place, tensor in tensors.items():
        if place.stack:
            i, j = moved.rows.index(place.part), moved.columns.index(str(place.layer))
            assert moved.values[i][j] == (pytest.approx(tensor.share) if tensor.changed else Mark.SAME)
            assert (ranks.values[i][j] is not Mark.NOTHING) == is_linear(tensor.name)
    rows = table(page, moved.detail)
    assert [(row[0], where) for row, where in zip(rows.rows, rows.places, strict=True)] == [
        (tensor.name, (place.group, place.part)) for place, tensor in tensors.items()
    ]
    by_layer, spectra = (block for block in page.blocks if isinstance(block, Curves))
    assert by_layer.series[0][1] == pytest.approx([group.share for group in difference.layers[1:]])
    assert len({name.split(".", 3)[3] for name, _ in spectra.series}) == len(spectra.series) == 7
    assert all(values[6] > 10 * values[12] for _, values in spectra.series)  # a step at rank 8
    assert page.to_json() == difference.to_json()
    to_html(page)


def test_equal_models_have_no_heat_map(base: Path) -> None:
    page = difference_report(weightsmith.diff(base, base, progress=False))
    assert maps(page) == {}
    assert "The same weights" in to_html(page)


@pytest.mark.slow
def test_nan_is_no_colour_and_no_error(base: Path, tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    page = difference_report(weightsmith.diff(base, save(tmp_path / "b", tensors), progress=False))
    moved = maps(page)["How far the weights moved"]
    assert moved.values[moved.rows.index("mlp.up_proj")][:3] == (Mark.SAME, Mark.NAN, Mark.SAME)
    assert to_html(page).count("<td class=m-nan>") == 2  # the distance and the rank
    assert page.summary[0] == "B has NaN in 1 element of 1 tensor, the first model.layers.1.mlp.up_proj.weight."
    assert [name for name, _ in page.numbers][2].endswith(f"(of {len(tensors) - 1:,} finite ones)")


@pytest.mark.slow
def test_an_inspection_with_and_without_statistics(base: Path) -> None:
    plain = inspection_report(weightsmith.inspect(base, progress=False))
    assert maps(plain) == {}
    assert len(table(plain, "tensors").rows) == len(weights())
    page = inspection_report(weightsmith.inspect(base, stats=True, progress=False))
    deviation = maps(page)["Standard deviation"]
    weight = weights()["model.layers.2.self_attn.q_proj.weight"].astype(np.float64)
    assert deviation.values[deviation.rows.index("self_attn.q_proj")][2] == pytest.approx(weight.std(), rel=1e-6)
    peak = maps(page)["Largest element"]
    assert peak.values[peak.rows.index("self_attn.q_proj")][2] == pytest.approx(np.abs(weight).max() / weight.std(), rel=1e-6)
    to_html(plain), to_html(page)


@pytest.mark.long
def test_task_vectors_by_pair(base: Path, tmp_path: Path) -> None:
    models = [changed(tmp_path / name, low_rank(4, seed)) for seed, name in enumerate("xyz")]
    difference = weightsmith.diff(*models, base=base, progress=False)
    page = comparison_report(difference)
    conflicts = maps(page)["Conflicts of signs"]
    cosine = maps(page)["Cosine of A and C"]
    for tensor in difference.tensors:
        if tensor.place is not None and tensor.place.stack:
            i, j = cosine.rows.index(tensor.place.part), cosine.columns.index(str(tensor.place.layer))
            assert conflicts.values[i][j] == (pytest.approx(tensor.conflict_share) if tensor.shared else Mark.NOTHING)
            assert cosine.values[i][j] == (pytest.approx(tensor.cosines[1]) if tensor.norms[0] else Mark.NOTHING)
    assert [row[:2] for row in table(page, "Pairs").rows] == [
        (pair, difference.total.cosines[k]) for k, pair in enumerate(("A and B", "A and C", "B and C"))
    ]
    assert page.to_json() == difference.to_json()
    to_html(page)


@pytest.mark.slow
def test_a_preview_by_model(base: Path, tmp_path: Path) -> None:
    models = [
        {"model": str(changed(tmp_path / n, low_rank(4, s))), "parameters": {"weight": w}}
        for s, (n, w) in enumerate({"x": 1, "y": 0.2}.items())
    ]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(base), "models": models}
    previewed = weightsmith.preview(recipe, progress=False)
    page = preview_report(previewed)
    x, y = maps(page)["What survives of A"], maps(page)["What survives of B"]
    kept = dict(previewed.cells)
    for place, group in kept.items():
        if place.stack and is_linear(place.part):
            i, j = x.rows.index(place.part), x.columns.index(str(place.layer))
            assert [m.values[i][j] for m in (x, y)] == [m.survives for m in group.models if m is not None]
    assert sum(group.elements for group in kept.values()) == previewed.elements
    assert [row[1] for row in table(page, "What survives of the models").rows] == [
        m.survives for m in previewed.total.models if m
    ]
    summary = previewed.summary
    assert page.to_json()["merge"] == {
        "read_bytes_at_most": summary.read_bytes,
        "write_bytes": weightsmith.plan(recipe).summary().write_bytes,
        "peak_memory_bytes": summary.memory.peak_bytes,
        "threads": summary.memory.threads,
    }
    to_html(page)


@pytest.mark.long
def test_the_numbers_of_a_report_are_those_that_torch_computes(base: Path, tmp_path: Path) -> None:
    """The first screen's, a map's, and the histogram and the singular values of the drawer, from the page's own data."""
    torch = pytest.importorskip("torch")
    difference = weightsmith.diff(base, changed(tmp_path / "b", low_rank(8, 0)), progress=False)
    page = difference_report(difference)
    a, b = (
        {name: torch.from_numpy(x.astype(np.float64)) for name, x in weights_of(folder).items()}
        for folder in (base, tmp_path / "b")
    )
    delta = {name: b[name] - a[name] for name in a}
    every, old, new = (torch.cat([x.reshape(-1) for x in tensors.values()]) for tensors in (delta, a, b))
    cosine = float(torch.nn.functional.cosine_similarity(old, new, dim=0))
    assert [number for _, number in page.numbers] == [
        written(float(every.norm() / old.norm()), "share"),
        written(float((every != 0).double().mean()), "share"),
        written(cosine, "cosine"),
    ]
    name = "model.layers.1.mlp.up_proj.weight"
    content = re.search(r'<script type="application/json" id="content">(.*?)</script>', to_html(page))
    assert content
    data = json.loads(content[1])
    moved = data["charts"][0]
    value = moved["values"][moved["rows"].index("mlp.up_proj")][1]
    assert value == pytest.approx(float(delta[name].norm() / a[name].norm()), rel=1e-5)
    row = [tensor.name for tensor in difference.tensors].index(name)
    pictures = next(one for one in data["tables"] if one["name"] == "tensors")["pictures"]
    exact = torch.linalg.svdvals(delta[name])[:8]
    codes = [ord(c) - 35 for c in pictures["values"][row][: 3 * 7]]
    ratios = [(8100 * x + 90 * y + z) / 728999 for x, y, z in zip(codes[::3], codes[1::3], codes[2::3], strict=True)]
    shown = [pictures["first"][row], *(pictures["first"][row] * 1e8**-ratio for ratio in ratios)]
    assert shown == pytest.approx(exact.tolist(), rel=0.02)  # estimates, a little below
    sample = delta[name].reshape(-1)[:1024]  # one tile
    powers = torch.floor(torch.log2(sample[sample != 0].abs())).int()
    counts = torch.bincount(powers - powers.min())
    assert pictures["lowest"][row] == int(powers.min())
    assert [ord(c) - 35 for c in pictures["histograms"][row]] == torch.ceil(counts / counts.max() * 89).int().tolist()


def test_what_a_config_says_is_written_as_json(base: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "b", weights())
    config = json.loads((other / "config.json").read_text()) | {"tie_word_embeddings": None, "use_cache": True, "name": "x"}
    (other / "config.json").write_text(json.dumps(config))
    rows = {
        row[0]: row[2] for row in table(difference_report(weightsmith.diff(base, other, progress=False)), "config.json").rows
    }
    assert (rows["use_cache"], rows["name"]) == ("true", "x")


def test_the_verdict_of_an_inspection_names_nan_first(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    tensors["model.layers.2.mlp.up_proj.weight"][0, :2] = np.inf
    page = inspection_report(weightsmith.inspect(save(tmp_path / "m", tensors), stats=True, progress=False))
    assert page.summary[0] == "The weights have NaN in 1 element of 1 tensor and infinities in 2 elements of 1 tensor."
    assert [name for name, _ in page.numbers] == ["parameters", "weight files", "layers"]
    assert maps(page)["Standard deviation"].values[maps(page)["Standard deviation"].rows.index("mlp.up_proj")][1:3] == (
        Mark.NAN,
        Mark.INFINITE,
    )
