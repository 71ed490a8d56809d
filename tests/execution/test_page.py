"""`--report`: a page beside the weights, with the distances of the manifest, and two pictures in the card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from weightsmith._base.report.blocks import written
from weightsmith._execution.report import BY_LAYER_NAME, MOVED_NAME, PAGE_NAME

LAYERS = 3
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": 32}
PICTURES = {MOVED_NAME, BY_LAYER_NAME}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models a, b and c, of which b and c differ from a in their layers."""
    for seed, name in enumerate("abc"):
        rng = np.random.default_rng(0)
        tensors = {"model.embed_tokens.weight": rng.normal(size=(64, 32))}
        tensors |= {
            f"model.layers.{i}.mlp.{p}_proj.weight": rng.normal(size=(48, 32)) for i in range(LAYERS) for p in ("up", "gate")
        }
        random = np.random.default_rng(seed)
        for tensor in list(tensors.values())[1:] if seed else ():
            tensor += random.normal(size=tensor.shape) / 50
        write_checkpoint(tmp_path / name, {n: t.astype(np.float32) for n, t in tensors.items()}, CONFIG)
    (tmp_path / "ties.yml").write_text(
        "merge_method: ties\nbase_model: ./a\nmodels:\n"
        "  - {model: ./b, parameters: {weight: 1, density: 0.5}}\n  - {model: ./c, parameters: {weight: 1, density: 0.5}}\n"
    )
    (tmp_path / "linear.yml").write_text(
        "merge_method: linear\nmodels: [{model: ./b, parameters: {weight: 1}}, {model: ./c, parameters: {weight: 1}}]\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


@pytest.mark.slow
def test_a_report_has_the_distances_of_the_manifest_and_belongs_to_the_output(here: Path) -> None:
    weightsmith.merge("ties.yml", "plain", fsync=False)
    merged = weightsmith.merge("ties.yml", "out", report="out/report.html", fsync=False)
    page = (here / "out" / PAGE_NAME).read_text()
    manifest = json.loads((here / "out/weightsmith.json").read_text())
    distances, by_layer = data_of(page)["charts"]
    moved = {one["name"]: one["delta_norm"] / one["base_norm"] for one in manifest["distance_from_base"]}
    layers = [share for name, share in moved.items() if name[-1].isdigit()]
    assert by_layer["series"][0]["values"] == pytest.approx(layers, rel=1e-3)
    assert f" is {written(merged.distance[0].share, 'share')} away from its base" in page
    assert [len(row) for row in distances["values"]] == [LAYERS] * 2
    assert "merge_method: ties" in page
    card = (here / "out/README.md").read_text()
    assert all(f"({name})" in card for name in (PAGE_NAME, *PICTURES))
    assert {f.name for f in (here / "out").iterdir()} - {f.name for f in (here / "plain").iterdir()} == {PAGE_NAME, *PICTURES}
    assert (here / "out/model.safetensors").read_bytes() == (here / "plain/model.safetensors").read_bytes()
    weightsmith.verify("out")
    assert weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "./out"}]}).warnings == ()
    weightsmith.merge("linear.yml", "out", overwrite=True, fsync=False)  # all of it is ours
    assert not (here / "out" / PAGE_NAME).exists()


def test_a_report_without_a_base_has_no_pictures(here: Path) -> None:
    weightsmith.merge("linear.yml", "out", report="out/report.html", fsync=False)
    assert "Distance from the base" not in (here / "out" / PAGE_NAME).read_text()
    assert PICTURES.isdisjoint(f.name for f in (here / "out").iterdir())
    assert PAGE_NAME not in (here / "out/README.md").read_text()


@pytest.mark.long
def test_a_report_is_the_same_for_any_threads_and_in_a_resumed_run(here: Path) -> None:
    weightsmith.merge("ties.yml", "whole/out", report="whole/out/report.html", threads=1, fsync=False)

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge("ties.yml", "again/out", progress=stop, fsync=False)
    merged = weightsmith.merge("ties.yml", "again/out", report="again/out/report.html", threads=2, fsync=False)
    assert merged.resumed
    for name in (PAGE_NAME, *PICTURES):
        assert (here / "again/out" / name).read_bytes() == (here / "whole/out" / name).read_bytes()


def test_a_report_outside_of_the_output_is_the_same_page_and_no_part_of_it(here: Path) -> None:
    weightsmith.merge("ties.yml", "one/out", report="one/out/report.html", fsync=False)
    weightsmith.merge("ties.yml", "two/out", report=Path("pages/new/page.html"), fsync=False)
    assert (here / "pages/new/page.html").read_bytes() == (here / "one/out/report.html").read_bytes()
    assert not {PAGE_NAME, *PICTURES} & {f.name for f in (here / "two/out").iterdir()}
    assert PAGE_NAME not in (here / "two/out/README.md").read_text()
    weightsmith.verify("two/out")


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ("out/page.html", "a report in the output has the name report.html"),
        ("s3://bucket/page.html", "a report is a local file"),
        ("linear.yml", "the file exists, and is no report of weightsmith"),
        ("linear.yml/page.html", "is no folder"),
        ("a", "it is a folder or a device"),
    ],
)
def test_a_report_that_cannot_be_written_is_an_error_before_the_merge(here: Path, report: str, said: str) -> None:
    with pytest.raises(weightsmith.WeightsmithError) as caught:
        weightsmith.merge("linear.yml", "out", report=report, fsync=False)
    assert said in str(caught.value)
    assert caught.value.state == "Nothing was written."
    assert not (here / "out").exists()


def test_a_quantised_copy_says_how_its_tensors_are_stored(here: Path) -> None:
    weightsmith.quantize("a", "q", format="int8", report="q/report.html", fsync=False)
    page = (here / "q" / PAGE_NAME).read_text()
    assert page.count("<td>int8</td>") == LAYERS * 2
    assert "<td>F32</td>" in page


def test_infinite_constants_leave_the_distance_defined(here: Path) -> None:
    """They are the same in all models, and copied. What is equal to the base, and what has no base, has a mark."""
    bound = "model.layers.0.mlp.clip_max"
    for name in "abc":
        with weightsmith.open_checkpoint(name) as model:
            tensors = {spec: model.read(spec).astype(np.float32) for spec in model.specs}
        write_checkpoint(here / name, tensors | {bound: np.float32([np.inf, "abc".index(name)])}, CONFIG)
    merged = weightsmith.merge("ties.yml", "out", report="out/report.html", fsync=False)
    assert 0 < merged.distance[0].share < 1
    page = (here / "out" / PAGE_NAME).read_text()
    assert f" is {written(merged.distance[0].share, 'share')} away from its base" in page
    (distances, *_) = data_of(page)["charts"]
    assert distances["values"][distances["rows"].index("mlp.clip_max")][0] == "new"
    rows = dict(
        re.findall(
            r"<td>([\w.]+)</td>.*?>([^<]*)</td></tr>", re.split('id="tensors-[0-9]+"', page)[1].partition("</section>")[0]
        )
    )
    assert (rows[bound], rows["model.embed_tokens.weight"]) == ("new", "same")
    json.loads((here / "out/weightsmith.json").read_text(), parse_constant=pytest.fail)


def test_a_merge_that_moves_a_zero_base_has_no_share(here: Path) -> None:
    with weightsmith.open_checkpoint("a") as model:
        zeros = {name: np.zeros(spec.shape, np.float32) for name, spec in model.specs.items()}
    write_checkpoint(here / "a", zeros, CONFIG)
    merged = weightsmith.merge("ties.yml", "out", report="out/report.html", fsync=False)
    assert merged.distance[0].percent() == "?"
    for name in (PAGE_NAME, "README.md"):
        text = (here / "out" / name).read_text()
        assert not re.search(r"\b(inf|nan) ?%", text)
    assert "away from its base" not in (here / "out" / PAGE_NAME).read_text()
