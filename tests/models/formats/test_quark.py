"""Quark's integers: every layout, several in one model, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.formats.quantised import Case, quark
from tests.models.formats.test_quantised import Quantised, changed, opened
from tests.models.formats.test_scaled import CASES
from weightsmith._base.errors import FormatError, Unsupported

NAME = "q_proj.weight"


class TestGroups(Quantised):
    cases = quark((40, 192), name="a"), quark((304, 128), name="b", seed=1)


class TestRows(Quantised):
    cases = quark((40, 192), "uint4", "per_channel", name="a"), quark((304, 128), "uint4", "per_channel", name="b", seed=1)


class TestBytes(Quantised):
    cases = quark((37, 192), "uint8", name="a"), quark((300, 128), "uint8", name="b", seed=1)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("qscheme", ["per_group", "per_channel", "per_tensor"])
def test_zeros_that_are_not_stored_are_0(dtype: str, qscheme: str, tmp_path: Path) -> None:
    case = quark(dtype=dtype, qscheme=qscheme, zeros=False)
    with opened(tmp_path, case) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(NAME), case.plain[NAME])


def test_outputs_need_not_fill_words(tmp_path: Path) -> None:
    case = quark((37, 96))
    with opened(tmp_path, case) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(NAME), case.plain[NAME])


def joined(*cases: Case) -> Case:
    """One model; each has its settings."""
    entries = [case.config["quantization_config"] for case in cases]
    layers = {f"*{next(iter(case.plain))[0]}": entry["global_quant_config"] for case, entry in zip(cases, entries, strict=True)}
    entry = {**entries[0], "layer_quant_config": layers}
    tensors = {name: array for case in cases for name, array in case.tensors.items()}
    plain = {name: array for case in cases for name, array in case.plain.items()}
    return replace(cases[0], tensors=tensors, plain=plain, config={**cases[0].config, "quantization_config": entry})


def test_a_model_may_have_several(tmp_path: Path) -> None:
    entry, tensors, plain = CASES["Quark FP8"]
    floats = Case(
        {f"c.{n[2:]}": a for n, a in tensors.items()}, {"quantization_config": entry}, {"c.weight": plain}, plain.dtype
    )
    packed = quark(name="a"), quark((32, 64), "int8", "per_channel", symmetric=True, name="b")
    case = joined(*packed, floats)
    case = replace(case, tensors={**case.tensors, "a.bias": np.ones(48, np.float32), "a.input_scale": np.ones((), np.float32)})
    with opened(tmp_path, case) as checkpoint:
        assert sorted(checkpoint.specs) == ["a.bias", "a.weight", "b.weight", "c.weight"]
        for name, values in case.plain.items():
            np.testing.assert_array_equal(checkpoint.read(name), values)


def test_scales_of_activations_are_dropped(tmp_path: Path) -> None:
    scales = {"q_proj.input_scale": np.ones((), np.float32), "q_proj.k_scale": np.ones((), np.float32)}
    with opened(tmp_path, changed(quark(), scales)) as checkpoint:
        assert list(checkpoint.specs) == [NAME]
        assert [note.what[:9] for note in checkpoint.notes] == ["2 scale(s"]


WEIGHT, SCALE, ZERO = (f"q_proj.weight{end}" for end in ("", "_scale", "_zero_point"))
REFUSED: dict[str, tuple[Case, type[Exception], str]] = {
    "zeros of floats": (quark(zero_point_type="float32"), Unsupported, "zero_point_type 'float32' are not read"),
    "no scale": (changed(quark(), {SCALE: None}), FormatError, "scales are missing"),
    "few scales": (changed(quark(), {SCALE: np.ones((2, 48), np.float32)}), FormatError, "scales are missing"),
    "narrow scales": (changed(quark(), {SCALE: np.ones((3, 40), np.float32)}), FormatError, "scales are missing"),
    "integer scales": (changed(quark(), {SCALE: np.ones((3, 48), np.int32)}), FormatError, "scales are missing"),
    "few zeros": (changed(quark(), {ZERO: np.ones((3, 5), np.int32)}), FormatError, r"is \[3, 5\], .* require \[3, 6\]"),
    "zeros of bytes": (changed(quark(), {ZERO: np.ones((3, 6), np.int8)}), Unsupported, "is I8, and only I32"),
    "zeros of rows": (
        changed(quark(dtype="int4", qscheme="per_channel"), {ZERO: np.ones(48, np.int32)}),
        FormatError,
        r"is \[48\], .* require \[6\]",
    ),
    "stacked": (changed(quark(), {WEIGHT: np.ones((2, 96, 6), np.int32)}), FormatError, "scales are missing"),
    "signs": (joined(quark(name="a"), quark(dtype="uint4", name="b")), Unsupported, "fits several settings of config.json"),
}  # fmt: skip


def settings(case: Case, **values: Any) -> Case:
    """The case with other settings of its weights."""
    entry = case.config["quantization_config"]
    layers = {"weight": {**entry["global_quant_config"]["weight"], **values}}
    return changed(case, global_quant_config=layers)


REFUSED["columns"] = settings(quark(qscheme="per_channel"), ch_axis=1), Unsupported, "ch_axis 1 are not read"
REFUSED["rows of groups"] = settings(quark(), ch_axis=0), Unsupported, "ch_axis 0 are not read"
REFUSED["no group"] = settings(quark(), group_size=None), Unsupported, "group_size None are not read"
REFUSED["2 bits"] = settings(quark(), dtype="uint2"), Unsupported, "'uint2' 'per_group' are not read"
REFUSED["packed otherwise"] = changed(quark(), export={"pack_method": "tiled"}), Unsupported, "pack_method 'tiled' are not read"


@pytest.mark.parametrize("name", REFUSED)
def test_other_layouts_and_damaged_checkpoints_are_refused_when_opened(name: str, tmp_path: Path) -> None:
    case, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        opened(tmp_path, case).close()
    assert type(caught.value) is kind
