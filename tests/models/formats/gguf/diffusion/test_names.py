"""Folders of diffusers in the names of single files, compared with diffusers' converters."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import weightsmith
from tests.diffusion_zoo import ZOO, ZooModel, read_numbers


@pytest.mark.reader
@pytest.mark.parametrize("model", ZOO, ids=lambda model: f"{model.name}-{len(model.config)}")
def test_diffusers_converts_the_file_back(model: ZooModel, tmp_path: Path) -> None:
    arrays = model.arrays()
    folder = model.save(tmp_path / "transformer", arrays)
    weightsmith.quantize(folder, tmp_path / "out", format="gguf-f32", fsync=False)
    assert gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields["general.architecture"].contents() == model.family
    converted = model.to_diffusers(read_numbers(tmp_path / "out" / "model.gguf"))
    assert converted.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(converted[name], values, err_msg=name)
