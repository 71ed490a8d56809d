"""`--size` of a GGUF format: types that a measurement chooses, so that the file has a size."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.calibration_help import TEXT, prepared_for, quantise, save_model, settings
from tests.cli_help import Cli, cli
from weightsmith._base.errors import PlanError
from weightsmith._features.quantisation.calibration import costs
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats import find_encoding
from weightsmith._models.formats.gguf import prepare
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.formats.gguf.writing import TYPES

__all__ = ["cli"]


def sized(folder: Path, nbytes: int, **options: Any) -> QuantizeSettings:
    return settings(folder, bits=None, uniform=False, size_bytes=nbytes, **options)


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.dtype.name for tensor in read_gguf_header(path).tensors}


@pytest.mark.slow
def test_the_types_of_a_plan_are_those_of_least_loss_that_fit(tmp_path: Path) -> None:
    """A weight that matters more gets more bits, the embedding and the head too."""
    model = save_model(tmp_path / "m")
    plain = Path(str(weightsmith.quantize(model, tmp_path / "p", "gguf-q4_0", progress=False).out)) / "model.gguf"
    size = plain.stat().st_size
    quantised = quantise(model, tmp_path / "q", sized(tmp_path, size + 12_000), name="gguf-q4_0")
    path = Path(str(quantised.out)) / "model.gguf"
    assert path.stat().st_size <= size + 12_000
    types, before = kinds(path), kinds(plain)
    linear = {name for name in types if ".attn_" in name or ".ffn_" in name if "norm" not in name}
    assert len({types[name] for name in linear}) > 1
    ends = {"token_embd.weight", "output.weight"}
    assert ends <= types.keys()
    rest = types.keys() - linear - ends
    assert {name: types[name] for name in rest} == {name: before[name] for name in rest}
    assert (tmp_path / "q" / "imatrix.dat").is_file()


@pytest.mark.long
def test_all_that_fits_is_chosen_and_types_that_are_asked_for_stay(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m")
    options = {"calibration_rows": 30, "calibration_tokens": 32}  # of few tokens, errors cancel by chance
    quantize_settings = sized(tmp_path, 10**9, tensor_types=("attn_q=Q5_0",), **options)
    types = kinds(Path(str(quantise(model, tmp_path / "q", quantize_settings, name="gguf-q4_k_m").out)) / "model.gguf")
    assert {kind for name, kind in types.items() if "attn_q." in name} == {"Q5_0"}
    assert {kind for name, kind in types.items() if "attn_k." in name or "ffn_up" in name} == {"Q8_0"}
    assert {types["token_embd.weight"], types["output.weight"]} == {"Q8_0"}


@pytest.mark.long
def test_what_an_error_is_depends_on_the_importances() -> None:
    rng = np.random.default_rng(0)
    weight, inputs = rng.standard_normal((64, 256)).astype(np.float32), rng.standard_normal((500, 256)).astype(np.float32)
    inputs[:, :16] *= 20

    def loss(kind: str, importances: Any = costs.NO_IMPORTANCES) -> float:
        error = costs._error(weight, find_encoding(f"gguf-{kind.lower()}"), importances)
        return float(np.square(inputs @ error.T).mean())

    squares = np.square(inputs).mean(0)
    losses = {kind: loss(kind, squares) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")}
    assert sorted(losses, key=lambda kind: -losses[kind]) == list(losses)
    assert loss("Q3_K", squares) < loss("Q3_K")


def test_every_weight_is_measured_once_with_types_that_fit(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", "mixtral")
    with prepared_for(model, sized(tmp_path, 10**9), name="gguf-q4_k_m") as prepared:
        tried = [product.settings["candidates"] for product in prepared.plan.products if product.op.startswith("scored_")]
    assert len(tried) == 3
    names = [name for trial in tried for name in trial]
    assert len(names) == len(set(names)) == 2 * (4 + 4 * 3) + 2
    assert {kind for trial in tried for types in trial.values() for kind in types} == {
        f"gguf-{kind.lower()}" for kind in prepare._NARROW
    }
    assert set(prepare._NARROW) | set(prepare._WIDE) <= set(TYPES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size_bytes": 1000}, r"the file has at least [\d,]+ bytes with the types that are tried, not 1,000"),
        ({"size_bytes": 10**6, "calibration": "none"}, "types for a size are chosen by a measurement on a text"),
    ],
)
def test_sizes_that_cannot_be(options: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "m")
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(PlanError, match=words):
        prepared_for(model, replace(sized(tmp_path, 1), **options), name="gguf-q4_k_m")


@pytest.mark.long
def test_a_plan_for_a_size_can_be_run_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """With all its settings."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "m")
    (tmp_path / "text.txt").write_text(TEXT)
    flags = [
        "--calibration",
        "text.txt",
        "--calibration-rows",
        "2",
        "--calibration-tokens",
        "32",
        "--tensor-type",
        "attn_q=Q5_0",
    ]
    quantize = ["quantize", "m", "--format", "gguf-q4_k_m", "--size", "120kB", *flags]
    planned = cli(*quantize, "--plan", "--json")
    assert planned.code == 0, planned.err
    (tmp_path / "plan.json").write_text(planned.out)
    ran = cli("run", "plan.json", "later", "--quiet")
    assert ran.code == 0, ran.err
    assert cli(*quantize, "now", "--quiet").code == 0
    assert (tmp_path / "later/model.gguf").read_bytes() == (tmp_path / "now/model.gguf").read_bytes()
    assert {kind for name, kind in kinds(tmp_path / "now/model.gguf").items() if "attn_q." in name} == {"Q5_0"}


def test_only_types_that_our_kernels_lack_need_libgguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan required it for every type."""
    model = save_model(tmp_path / "m")
    with_it = Path(str(weightsmith.quantize(model, tmp_path / "a", "gguf-q4_k_m", progress=False).out))
    monkeypatch.setitem(sys.modules, "libgguf", None)
    without = Path(str(weightsmith.quantize(model, tmp_path / "b", "gguf-q4_k_m", progress=False).out))
    assert (without / "model.gguf").read_bytes() == (with_it / "model.gguf").read_bytes()
    wide = ("token_embd=F16", "output=F16")
    with pytest.raises(PlanError, match="libgguf, which encodes and decodes ggml's types of blocks, is not installed"):
        quantise(model, tmp_path / "c", sized(tmp_path, 10**9, tensor_types=wide), name="gguf-q4_k_m")
