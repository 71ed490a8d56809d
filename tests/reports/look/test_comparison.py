"""`diff` with a base: task vectors side by side, as torch has them in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import weightsmith
from tests.reports.look.models import LAYERS, changed, is_linear, low_rank, save, trained, weights
from weightsmith._base.errors import ParameterError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._plans import COPY, Read, Step
from weightsmith._reports.look.diff import KIND, alignments

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A base; a and b of low rank; c, which goes back half of a's way; d, ten times a."""
    folder = tmp_path_factory.mktemp("side by side")
    a = low_rank(6, 1)
    return {
        "base": save(folder / "base", weights()),
        "a": changed(folder / "a", a, np.float32),
        "b": changed(folder / "b", lambda name, x: low_rank(6, 2)(name, x) + 0.5 * trained(name, x), np.float32),
        "c": changed(folder / "c", lambda name, x: -0.5 * a(name, x), np.float32),
        "d": changed(folder / "d", lambda name, x: 10 * a(name, x), np.float32),
    }


def deltas(folders: Mapping[str, Path], names: str, tensor: str) -> list[np.ndarray]:
    with weightsmith.open_checkpoint(folders["base"]) as base:
        start = base.read(tensor).astype(np.float32)
    arrays = []
    for name in names:
        with weightsmith.open_checkpoint(folders[name]) as model:
            arrays.append((model.read(tensor).astype(np.float32) - start).astype(np.float64))
    return arrays


def compare(folders: Mapping[str, Path], names: str, **options: object) -> weightsmith.Comparison:
    models = [folders[name] for name in names]
    return weightsmith.diff(*models, base=folders["base"], progress=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.long
def test_norms_cosines_and_conflicts_are_those_of_the_deltas(folders: Mapping[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    comparison = compare(folders, "abc")
    for tensor in comparison.tensors:
        flat = [torch.from_numpy(d).reshape(-1) for d in deltas(folders, "abc", tensor.name)]
        assert tensor.norms == pytest.approx([float(d.norm()) for d in flat], rel=1e-6)
        for (i, j), cosine in zip(comparison.pairs, tensor.cosines, strict=True):
            norms = float(flat[i].norm() * flat[j].norm())
            assert (cosine == pytest.approx(float(flat[i] @ flat[j]) / norms, abs=1e-6)) if norms else np.isnan(cosine)
        signs = torch.stack([d.sign() for d in flat])
        assert tensor.shared == int(((signs != 0).sum(0) > 1).sum())
        assert tensor.conflicts == int(((signs > 0).any(0) & (signs < 0).any(0)).sum())


@pytest.mark.long
def test_overlaps_are_of_the_largest_hundredth(folders: Mapping[str, Path]) -> None:
    up_projection = {tensor.name: tensor for tensor in compare(folders, "abc").tensors}[UP]
    flat = [np.abs(d).reshape(-1) for d in deltas(folders, "abc", UP)]
    large = [d >= np.sort(d)[-round(0.01 * d.size)] for d in flat]
    expected = [(large[i] & large[j]).sum() / large[i].sum() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert up_projection.overlaps == pytest.approx(expected, abs=0.02)
    assert up_projection.overlaps[1] == pytest.approx(1, abs=0.05)


@pytest.mark.long
def test_subspaces_are_those_of_the_leading_singular_vectors(folders: Mapping[str, Path]) -> None:
    comparison = compare(folders, "abd")
    for tensor in comparison.tensors:
        if not is_linear(tensor.name):
            assert np.isnan(tensor.subspaces).all()
            continue
        a, b = (np.linalg.svd(x)[0] for x in deltas(folders, "ab", tensor.name))
        true = float(np.square(np.linalg.svd(a[:, :6].T @ b[:, :8])[1]).mean())
        assert tensor.subspaces[0] == pytest.approx(true, abs=0.15)
        assert tensor.subspaces[1] > 0.7  # of a and d; two of the eight directions are noise


@pytest.mark.long
def test_layers_parts_and_the_total_are_sums(folders: Mapping[str, Path]) -> None:
    comparison = compare(folders, "ab")
    for groups in (comparison.layers, comparison.parts, [comparison.total]):
        assert sum(group.tensors for group in groups) == len(comparison.tensors)
        assert sum(group.conflicts for group in groups) == sum(tensor.conflicts for tensor in comparison.tensors)
    parts = [[d.reshape(-1) for d in deltas(folders, "ab", tensor.name)] for tensor in comparison.tensors]
    a, b = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
    assert comparison.total.cosines[0] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-6)
    assert [group.name for group in comparison.layers][1:] == [f"model.layers.{i}" for i in range(LAYERS)]


@pytest.mark.matrix
@pytest.mark.slow
def test_the_result_does_not_depend_on_threads_and_is_json(folders: Mapping[str, Path]) -> None:
    one, three = (json.dumps(compare(folders, "abc", threads=n).to_json(), allow_nan=False) for n in (1, 3))
    assert one == three


@pytest.mark.long
def test_what_the_numbers_mean_in_words(folders: Mapping[str, Path]) -> None:
    reading = " ".join(compare(folders, "abcd").reading)
    assert "Much the same was learned by A and D (cosine 1.00)" in reading
    assert "Opposed are A and C (cosine -1.00)" in reading
    assert "times as long as that of C: at equal weights it dominates." in reading
    (kind, *_) = compare(folders, "ab").reading
    assert kind.startswith("The task vectors are nearly orthogonal: cosines are at most 0.0")
    assert compare(folders, "ab", tensors=["model.norm.weight"]).reading[0] == "A: no difference from the base."


def test_one_model_with_a_base_is_an_error(folders: Mapping[str, Path]) -> None:
    with pytest.raises(ParameterError, match="--base compares two or more models, but got 1"):
        compare(folders, "a")


def test_a_product_that_does_not_fit_its_steps_is_rejected() -> None:
    spec = TensorSpec("w", DTYPES["BF16"], (8, 8))
    reads = tuple(Read(k, "w") for k in range(3))
    assert KIND.check(alignments("d", [Step(spec, COPY, reads)])) == ""
    assert "two or more" in KIND.check(alignments("d", [Step(spec, COPY, reads[:2])]))


@pytest.mark.long
def test_a_table_has_a_row_for_each_group(folders: Mapping[str, Path]) -> None:
    comparison = compare(folders, "abc")
    rows = comparison.table()
    assert [row["name"] for row in rows] == [tensor.name for tensor in comparison.tensors]
    a, _, c = (str(folders[name]) for name in "abc")
    assert rows[3][f"norm {a}"] == comparison.tensors[3].norms[0]
    assert rows[3][f"cosine {a}, {c}"] == comparison.tensors[3].cosines[1]
    assert [row["name"] for row in comparison.table(by="layer")] == [layer.name for layer in comparison.layers]
    assert len(comparison.table("part")) == len(comparison.parts)
    with pytest.raises(ParameterError, match="by must be one of tensor, layer, part, not 'modul'"):
        comparison.table("modul")  # type: ignore[arg-type]
