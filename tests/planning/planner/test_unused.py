"""Keys and values that files hold for layers that use those of earlier ones: models merge with them and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.plan_help import LAYER, config, decoder, plan, problems, sources, warnings
from weightsmith._base.errors import MismatchError

KEYS = {"self_attn.k_proj.weight": (2, 4), "self_attn.v_proj.weight": (2, 4), "self_attn.k_norm.weight": (2,)}
GATE = {"per_layer_input_gate.weight": (3, 4)}
SHARING = {"model_type": "gemma4_text", "num_kv_shared_layers": 2}
OWN = [f"model.layers.{i}.{name}" for i in (2, 3) for name in KEYS]


def gemma(folder: Path, *, full: bool, seed: int = 0, settings: dict[str, Any] = SHARING) -> str:
    """A model of four layers, of which the last two share; `full`: Google's file, which has their own keys and values too."""
    extra = {f"model.layers.{i}.{name}": shape for i in range(4) for name, shape in (KEYS | GATE).items()}
    tensors = decoder(4, seed=seed, extra=extra, without=() if full else OWN)
    return str(write_checkpoint(folder, tensors, config(4, **settings)))


def linear(*models: str) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models]}


def test_the_donors_are_copied_and_others_left_out(tmp_path: Path) -> None:
    full, bare = gemma(tmp_path / "full", full=True), gemma(tmp_path / "bare", full=False, seed=1)
    first = plan(linear(full, bare))
    assert {name: sources(first)[name] for name in OWN} == {name: [(0, name)] for name in OWN}
    assert len(sources(first)["model.layers.1.self_attn.k_proj.weight"]) == 2
    said = "the last layers use the keys and values of earlier ones: 6 tensors of their own, which not all models store, "
    assert warnings(first) == [f"{OWN[2]}: {said}copied from {full}"]
    second = plan(linear(bare, full))
    assert not set(OWN) & sources(second).keys()
    assert {(d.model, d.tensor) for d in second.dropped} == {(1, name) for name in OWN}
    assert {d.reason for d in second.dropped} == {"its layer uses the keys and values of an earlier one"}
    assert warnings(second) == [f"{OWN[2]}: {said}left out"]


@pytest.mark.parametrize("full", [{"base"}, {"a"}, {"a", "b"}, {"base", "b"}])
def test_any_model_may_store_them(tmp_path: Path, full: set[str]) -> None:
    base, a, b = (gemma(tmp_path / name, full=name in full, seed=k) for k, name in enumerate(("base", "a", "b")))
    models = [{"model": m, "parameters": {"weight": 1, "density": 1}} for m in (a, b)]
    p = plan({"merge_method": "ties", "base_model": base, "models": models})
    assert [name for name in OWN if name in sources(p)] == (OWN if "base" in full else [])


def test_what_all_models_store_is_merged(tmp_path: Path) -> None:
    a, b = gemma(tmp_path / "a", full=True), gemma(tmp_path / "b", full=True, seed=1)
    p = plan(linear(a, b))
    assert all(len(sources(p)[name]) == 2 for name in OWN)
    assert not p.warnings


def test_bytes_are_the_mean_and_the_donors(tmp_path: Path) -> None:
    full, bare = gemma(tmp_path / "full", full=True), gemma(tmp_path / "bare", full=False, seed=1)
    weightsmith.merge(linear(full, bare) | {"dtype": "float32"}, tmp_path / "out", fsync=False)
    with (
        weightsmith.open_checkpoint(full) as a,
        weightsmith.open_checkpoint(bare) as b,
        weightsmith.open_checkpoint(tmp_path / "out") as out,
    ):
        for name in out.specs:
            first = a.read(name).astype(np.float32)
            expected = first if name in OWN else (first + b.read(name).astype(np.float32)) / 2
            np.testing.assert_allclose(out.read(name), expected, atol=1e-6)


def test_keys_that_a_model_uses_are_not_left_out(tmp_path: Path) -> None:
    bare = gemma(tmp_path / "bare", full=False)
    for k, settings in enumerate(({"num_kv_shared_layers": 0}, {"num_kv_shared_layers": 1}, {"model_type": "llama"})):
        full = gemma(tmp_path / f"full{k}", full=True, settings=settings)
        for order in ((full, bare), (bare, full)):
            assert {type(e) for e in problems(linear(*order))} == {MismatchError}
    queries = decoder(4, seed=1, extra={f"model.layers.{i}.{n}": s for i in range(4) for n, s in KEYS.items()})
    del queries["model.layers.3.self_attn.q_proj.weight"]
    other = str(write_checkpoint(tmp_path / "other", queries, config(4, **SHARING)))
    assert any("q_proj" in e.finding.where for e in problems(linear(other, gemma(tmp_path / "full", full=True))))


def test_slices_take_layers_from_either_file(tmp_path: Path) -> None:
    full, bare = gemma(tmp_path / "full", full=True), gemma(tmp_path / "bare", full=False, seed=1)
    for donor, other in ((full, bare), (bare, full)):
        slices = [
            {"sources": [{"model": donor, "layer_range": [0, 3]}]},
            {"sources": [{"model": other, "layer_range": [2, 4]}]},
        ]
        p = plan({"merge_method": "passthrough", "slices": slices})
        assert p.config is not None
        assert (p.config["num_hidden_layers"], p.config["num_kv_shared_layers"]) == (5, 3)


def test_files_without_a_config_share_as_one_of_them_visibly_does(tmp_path: Path) -> None:
    full, bare = gemma(tmp_path / "full", full=True), gemma(tmp_path / "bare", full=False, seed=1)
    p = plan(linear(f"{full}/model.safetensors", f"{bare}/model.safetensors"))
    assert all(sources(p)[name] == [(0, name)] for name in OWN)
    damaged = decoder(4, seed=1, extra={f"model.layers.{i}.{n}": s for i in range(4) for n, s in KEYS.items()}, without=OWN)
    whole = decoder(4, extra={f"model.layers.{i}.{n}": s for i in range(4) for n, s in KEYS.items()})
    for name, tensors in (("whole", whole), ("damaged", damaged)):  # no Gemma: nothing says that it shares
        write_checkpoint(tmp_path / name, tensors)
    assert set(LAYER) <= {name.split(".", 3)[3] for name in damaged if "layers.3" in name}
    assert problems(linear(str(tmp_path / "whole"), str(tmp_path / "damaged")))
