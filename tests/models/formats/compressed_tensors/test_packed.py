"""compressed-tensors' packed integers: codes of 1 to 8 bits, rows that do not fill their words, groups of columns anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.models.formats.quantised import Case, compressed
from tests.models.formats.test_quantised import Quantised, QuantisedWithShapes
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.formats.matrices import is_loose

WEIGHT = "q_proj.weight"


def write(folder: Path, case: Case, **changed: np.ndarray | None) -> Path:
    """The checkpoint; changed: some tensors of the weight, None to leave one out."""
    tensors: Mapping[str, Any] = case.tensors | {f"q_proj.{name}": array for name, array in changed.items()}
    return write_checkpoint(folder, {name: array for name, array in tensors.items() if array is not None}, case.config)


def read(folder: Path) -> np.ndarray:
    with weightsmith.open_checkpoint(folder) as opened:
        assert list(opened.specs) == [WEIGHT]
        return opened.read(WEIGHT)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", [None, 32], ids=["by row", "by group"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_compressed_tensors_decodes_the_same_weights(bits: int, group: int | None, symmetric: bool, tmp_path: Path) -> None:
    case = compressed((37, 203 if group is None else 96), bits=bits, group_size=group, symmetric=symmetric)
    np.testing.assert_array_equal(read(write(tmp_path, case)), case.plain[WEIGHT])
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weights = case.config["quantization_config"]["config_groups"]["group_0"]["weights"]
    state = {name.removeprefix("q_proj."): torch.tensor(array) for name, array in case.tensors.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)["weight"]
    np.testing.assert_array_equal(theirs.numpy(), case.plain[WEIGHT])


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_older_releases_put_no_code_into_two_words(bits: int, tmp_path: Path) -> None:
    for number, (group, symmetric) in enumerate(((None, True), (32, True), (None, False), (32, False))):
        case = compressed((75, 96), bits=bits, group_size=group, symmetric=symmetric, loose=True)
        np.testing.assert_array_equal(read(write(tmp_path / f"{number}", case)), case.plain[WEIGHT])


class TestPacked(Quantised):
    cases = (
        compressed((37, 192), bits=3, symmetric=False, ordered=False, name="a"),
        compressed((300, 96), bits=3, symmetric=False, loose=True, name="b", seed=1),
    )


class TestOddWidths(QuantisedWithShapes):
    cases = compressed((37, 203), group_size=None, name="a"), compressed((301, 77), group_size=None, name="b", seed=1)


def test_an_index_that_was_not_filled_in_means_groups_in_order(tmp_path: Path) -> None:
    case = compressed((8, 96))
    np.testing.assert_array_equal(read(write(tmp_path, case, weight_g_idx=np.full(96, -1, np.int32))), case.plain[WEIGHT])


ODD, THREE = compressed((8, 203), group_size=None), compressed((8, 203), bits=3, group_size=None)


@pytest.mark.parametrize(
    ("case", "changed", "kind", "message"),
    [
        (compressed((8, 96)), {"weight_g_idx": np.zeros(95, np.int32)}, FormatError, r"_g_idx' is \[95\] I32, .* be \[96\]"),
        (compressed((8, 96)), {"weight_g_idx": np.zeros(96)}, FormatError, r"_g_idx' is \[96\] F64, .* be \[96\] I32"),
        (THREE, {"weight_shape": np.array([8, 150])}, FormatError, r"_shape' is \[8, 150\]: codes of 3 bits cannot have this"),
        (THREE, {"weight_shape": np.array([7, 203])}, FormatError, r"_shape' is \[7, 203\]: codes of 3 bits cannot have this"),
        (THREE, {"weight_shape": np.array([8, -203])}, FormatError, r"_shape' is \[8, -203\]: codes of 3 bits cannot"),
        (THREE, {"weight_shape": None}, FormatError, "_shape' is missing: codes of 3 bits cannot"),
        (compressed((8, 99), bits=3, group_size=None), {}, Unsupported, "may be stored in two ways"),
    ],
)
def test_shapes_that_codes_cannot_have_are_refused_when_opened(
    case: Case, changed: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        weightsmith.open_checkpoint(write(tmp_path, case, **changed))


@pytest.mark.parametrize("index", [np.arange(96) // 24, np.arange(96) // 32 - 2])
def test_groups_that_a_weight_does_not_have_are_refused_when_it_is_read(index: np.ndarray, tmp_path: Path) -> None:
    model = write(tmp_path, compressed((8, 96)), weight_g_idx=index.astype(np.int32))
    with weightsmith.open_checkpoint(model) as opened, pytest.raises(FormatError, match=r"holds groups .* weight has 3"):
        opened.read(WEIGHT)


def test_the_shape_of_the_stored_codes_must_be_true(tmp_path: Path) -> None:
    model = write(tmp_path, ODD, weight_shape=np.array([8, 150]))
    with weightsmith.open_checkpoint(model) as opened, pytest.raises(FormatError, match=r"is \[8, 150\], .* \[8, 208\]"):
        opened.read(WEIGHT)


def test_codes_beside_an_index_must_be_packed(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
    entry = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": {"weights": weights}}}
    tensors = {"weight": np.ones((8, 16), np.int8), "weight_scale": np.ones((8, 1), np.float32)}
    stored = {f"q.{name}": array for name, array in {**tensors, "weight_g_idx": np.zeros(16, np.int32)}.items()}
    model = write_checkpoint(tmp_path, stored, {"model_type": "llama", "quantization_config": entry})
    with pytest.raises(Unsupported, match="weight_g_idx' is part of a weight that is not read"):
        weightsmith.open_checkpoint(model)


def test_what_is_loose() -> None:
    for bits in range(1, 9):
        for codes in range(1, 300):
            dense, loose = -(-codes * bits // 32), -(-codes // (32 // bits))
            alike = 32 % bits == 0 or codes <= 32 // bits
            assert is_loose(codes, bits, dense) is (False if alike or dense != loose else None)
            assert is_loose(codes, bits, loose) is (False if alike else True if dense != loose else None)
            assert is_loose(codes, bits, loose + 1) is None


def test_a_merge_reads_any_of_them(tmp_path: Path) -> None:
    case = compressed((37, 203), bits=3, group_size=None)
    weightsmith.dequantize(write(tmp_path / "m", case), tmp_path / "plain", out_dtype="float32", progress=False, fsync=False)
    np.testing.assert_array_equal(read(tmp_path / "plain"), replace(case).plain[WEIGHT])
