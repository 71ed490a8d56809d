"""The weights of a folder and of its subfolders are one source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightsmith._base.errors import FormatError
from weightsmith._models.formats.plain import open_safetensors
from weightsmith._models.sources.composed import Foldered
from weightsmith.abc.tensors import Tensors
from weightsmith.testing import SourceCase, SourceTests

MAIN = {"a": np.arange(12, dtype=np.float32).reshape(4, 3), "layers.10.w": np.arange(4, dtype=np.float16)}
INNER = {"linear.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}


def opened(folder: Path) -> Tensors:
    main, inner = (open_safetensors([folder / name], None, "here").source for name in ("m.safetensors", "d/m.safetensors"))
    return Foldered(main, {"2_Dense": inner}, "here")


def write(folder: Path, main: dict[str, np.ndarray], inner: dict[str, np.ndarray]) -> Path:
    (folder / "d").mkdir(parents=True)
    save_file(main, folder / "m.safetensors")
    save_file(inner, folder / "d" / "m.safetensors")
    return folder


class TestFoldered(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        one = write(tmp_path / "one", MAIN, INNER)
        other = write(tmp_path / "other", MAIN, {"linear.bias": INNER["linear.weight"]})
        return SourceCase(lambda: opened(one), {"2_Dense/linear.weight": INNER["linear.weight"], **MAIN}, lambda: opened(other))


def test_a_tensor_that_pretends_to_be_in_a_subfolder_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"2_Dense/linear.weight": INNER["linear.weight"]}, INNER)
    with pytest.raises(FormatError, match="as if it were in 2_Dense"):
        opened(folder)
