"""The shared tests of sources, on EXL2 weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats.exl2.layout import SUFFIXES
from weightsmith._models.formats.exl2.writing import dequantise_matrix, quantise_matrix
from weightsmith._models.formats.hessians import Group
from weightsmith.testing import SourceCase, SourceTests


def write(folder: Path, seed: int, outputs: int, left_out: str = "") -> dict[str, np.ndarray]:
    """A checkpoint of two EXL2 matrices, [outputs, 64] and a padded head, and a norm; returns its plain tensors."""
    rng = np.random.default_rng(seed)
    stored, plain = {"model.norm.weight": np.ones(64, np.float16)}, {"model.norm.weight": np.ones(64, np.float16)}
    for name, n in (("model.layers.0.mlp.up_proj", outputs), ("lm_head", 40)):
        weight = (rng.standard_normal((n, 64)) * 0.05).astype(np.float32)
        matrix = quantise_matrix(weight, None, (Group(5, 32), Group(3, 32)))
        stored |= {f"{name}.{suffix}": array for suffix, array in zip(SUFFIXES, matrix.arrays, strict=True)}
        plain[f"{name}.weight"] = dequantise_matrix(matrix).astype(np.float32)
    stored = {name: array for name, array in stored.items() if name != left_out}
    write_checkpoint(folder, stored, {"vocab_size": 40, "quantization_config": {"quant_method": "exl2"}})
    return plain


class TestExl2Weights(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        plain = write(tmp_path / "a", 0, 96)
        write(tmp_path / "b", 1, 64)
        order = sorted(plain)
        return SourceCase(
            lambda: open_checkpoint(tmp_path / "a").source,
            {name: plain[name] for name in order},
            lambda: open_checkpoint(tmp_path / "b").source,
        )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_matrix_without_one_of_its_tensors_is_refused_when_opened(suffix: str, tmp_path: Path) -> None:
    name = f"lm_head.{suffix}"
    write(tmp_path, 0, 96, left_out=name)
    with pytest.raises(FormatError, match=f"'{name}' is missing"):
        open_checkpoint(tmp_path).close()
