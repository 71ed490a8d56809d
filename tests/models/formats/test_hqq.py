"""HQQ's weights: in safetensors, in the pickle of `qmodel.pt`, with scales and zeros that are quantised; what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.models.formats.quantised import Case, hqq, hqq_array
from tests.models.formats.test_quantised import QuantisedWithShapes, changed, opened
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.formats.hqq import _runs

WEIGHT = "model.layers.0.mlp.up_proj.weight"
MODULE = WEIGHT.removesuffix(".weight")


class TestHqq(QuantisedWithShapes):
    cases = hqq((37, 192), bits=3, group=64, name="a"), hqq((300, 128), bits=3, group=64, axis=0, name="b", seed=1)


class TestHqqBytes(QuantisedWithShapes):
    cases = hqq((40, 192), bits=4, group=64, axis=0, name="a"), hqq((304, 128), group=None, name="b", seed=1)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_group_may_be_a_row_or_a_column(axis: int, tmp_path: Path) -> None:
    case = hqq((48, 96), group=None, axis=axis)
    with opened(tmp_path, case) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])


def test_a_weight_may_have_one_scale(tmp_path: Path) -> None:
    """Its codes lie as the weight does, whatever the size of a group: three bits are packed otherwise then."""
    case = hqq((52, 96), bits=3, group=None)
    one = {"q_proj.scale": np.array(0.5, np.float16), "q_proj.zero": np.array(3, np.float16)}
    stated = {"q_proj.group_size": np.array(32, np.int32), "q_proj.channel_wise": np.array(0, np.uint8)}
    words = case.tensors["q_proj.W_q"]
    codes = np.concatenate([words >> shift & 7 for shift in range(27, -1, -3)])[:52]
    with opened(tmp_path, changed(case, {**one, **stated})) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), (codes - 3).astype(np.float32) * np.float32(0.5))


def test_modules_may_have_settings_of_their_own(tmp_path: Path) -> None:
    cases = [
        hqq(bits=bits, group=group, axis=axis, name=f"m{bits}") for bits, group, axis in ((8, 96, 1), (3, 16, 0), (1, 8, 1))
    ]
    case = replace(
        cases[0],
        tensors={name: a for case in cases for name, a in case.tensors.items()} | {"m8.bias": np.ones(48, np.float16)},
        plain={name: a for case in cases for name, a in case.plain.items()},
    )
    with opened(tmp_path, case) as checkpoint:
        assert sorted(checkpoint.specs) == ["m1.weight", "m3.weight", "m8.bias", "m8.weight"]
        for name, plain in case.plain.items():
            np.testing.assert_array_equal(checkpoint.read(name), plain)


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "hqq"}}], ids=["not named", "named"])
def test_config_json_need_not_say_so(config: dict[str, Any], tmp_path: Path) -> None:
    """hqq's save_to_safetensors writes the config of the plain model."""
    case = hqq()
    with opened(tmp_path, replace(case, config={"model_type": "llama", **config})) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])
        assert checkpoint.quantised is None


# ---- qmodel.pt


def write_pickle(folder: Path, modules: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint as hqq's save_quantized writes it."""
    import torch

    def value(key: str, stated: Any) -> Any:
        if isinstance(stated, np.ndarray):
            return torch.from_numpy(stated.copy())
        if key == "shape":
            return torch.Size(stated)
        if isinstance(stated, str) and stated.startswith("torch."):
            return getattr(torch, stated.removeprefix("torch."))
        return {k: value(k, v) for k, v in stated.items()} if isinstance(stated, dict) else stated

    folder.mkdir(parents=True)
    state = {name: {key: value(key, stated) for key, stated in module.items()} for name, module in modules.items()}
    torch.save(state, folder / "qmodel.pt")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, **(config or {})}))
    return folder


def pickled(
    shape: tuple[int, int] = (48, 96), bits: int = 4, axis: int = 1, **settings: Any
) -> tuple[dict[str, Any], np.ndarray]:
    """A module, and its weight."""
    words, meta, plain = hqq_array(shape, bits, 32, axis, np.random.default_rng(3), np.float16)
    meta |= {"compute_dtype": "torch.float16", "quant_scale": False, "quant_zero": False, "offload_meta": None}
    return {"W_q": words, **meta, "bias": np.ones(shape[0], np.float16), **settings}, plain


NORM = {"model.norm": {"weight": np.arange(96, dtype=np.float16)}}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_a_pickle_of_modules_is_read_as_data(bits: int, named: bool, tmp_path: Path) -> None:
    module, plain = pickled(bits=bits)
    config = {"quantization_config": {"quant_method": "hqq", "quant_config": {}}} if named else {}
    model = write_pickle(tmp_path / "m", {**NORM, MODULE: module}, config)
    with weightsmith.open_checkpoint(model) as checkpoint:
        assert sorted(checkpoint.specs) == sorted([WEIGHT, f"{MODULE}.bias", "model.norm.weight"])
        np.testing.assert_array_equal(checkpoint.read(WEIGHT), plain)
        assert "quantization_config" not in (checkpoint.config or {})
    weightsmith.dequantize(model, tmp_path / "plain", progress=False, fsync=False)
    with weightsmith.open_checkpoint(tmp_path / "plain") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(WEIGHT), plain.astype(np.float16))


def test_older_pickles_have_settings_in_a_dict(tmp_path: Path) -> None:
    module, plain = pickled()
    meta = {key: module.pop(key) for key in list(module) if key not in ("W_q", "bias")}
    model = write_pickle(tmp_path / "m", {**NORM, MODULE: {**module, "meta": meta}})
    with weightsmith.open_checkpoint(model) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(WEIGHT), plain)


def quantised_numbers(
    values: tuple[int, int], group: int | None, axis: int, seed: int
) -> tuple[np.ndarray, dict[str, Any], np.ndarray]:
    words, meta, plain = hqq_array(values, 8, group, axis, np.random.default_rng(seed), np.float16)
    if group is None:  # one scale and zero for all, as channel_wise False gives
        codes = words.astype(np.float32)
        meta["scale"], meta["zero"] = np.array(0.01, np.float16), np.array(100, np.float16)
        plain = (codes - np.float32(100)) * np.float32(np.float16(0.01))
    return words, meta, plain


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_scales_and_zeros_may_be_quantised(axis: int, offloaded: bool, tmp_path: Path) -> None:
    """The settings of hqq's first releases: zeros with one scale, scales in groups of 48."""
    module, _ = pickled(axis=axis)
    shape = (144, 1) if axis == 1 else (1, 144)
    zero_words, zero_meta, zeros = quantised_numbers(shape, None, 1, 1)
    scale_words, scale_meta, scales = quantised_numbers(shape, 48, 0, 2)
    for key in ("scale", "zero"):
        module.pop(key)
    module |= {"quant_scale": True, "quant_zero": True, "meta_scale": scale_meta, "meta_zero": zero_meta}
    codes = np.concatenate([module["W_q"] >> 4, module["W_q"] & 15]).astype(np.float32)
    plain = ((codes - zeros) * scales.reshape(shape)).reshape(48, 96)
    if offloaded:
        module["zero_scale"] = np.stack([zero_words.reshape(shape), scale_words.reshape(shape)])
    else:
        module |= {"zero_q": zero_words, "scale_q": scale_words}
    with weightsmith.open_checkpoint(write_pickle(tmp_path / "m", {**NORM, MODULE: module})) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(WEIGHT), plain)
        part = np.empty(100, np.float32)
        checkpoint.source.read_into(WEIGHT, 4 * 777, part)
        np.testing.assert_array_equal(part, plain.reshape(-1)[777:877])


@pytest.mark.long
def test_modules_that_share_their_values_are_bounded(tmp_path: Path) -> None:
    """A small pickle of very many entries."""
    import torch

    folder = write_pickle(tmp_path / "m", {MODULE: pickled()[0]})
    shared = {**{f"x{k}": 0 for k in range(2000)}, "W_q": torch.ones(4)}
    torch.save({f"m{k}": shared for k in range(600)}, folder / "qmodel.pt")
    with pytest.raises(Unsupported, match="more than 1,000,000 entries"):
        weightsmith.open_checkpoint(folder)


# ---- what is refused

PLAIN = hqq()
REFUSED: dict[str, tuple[Case, type[Exception], str]] = {
    "packing": (changed(PLAIN, {"q_proj.packing": np.frombuffer(b"5bit_u8", np.uint8)}), Unsupported, "packing '5bit_u8'"),
    "no packing": (changed(PLAIN, {"q_proj.packing": None}), FormatError, r"q_proj\.packing' is missing"),
    "no shape": (changed(PLAIN, {"q_proj.shape": None}), FormatError, r"q_proj\.shape' is missing"),
    "shape": (changed(PLAIN, {"q_proj.shape": np.array([48, 96, 1])}), FormatError, r"is \[48, 96, 1\], not two whole numbers"),
    "negative": (changed(PLAIN, {"q_proj.shape": np.array([-48, -96])}), FormatError, "not two whole numbers"),
    "other shape": (changed(PLAIN, {"q_proj.shape": np.array([48, 64])}), FormatError, "has 2,304 bytes, and 3,072 codes"),
    "shape of floats": (changed(PLAIN, {"q_proj.shape": np.ones(2, np.float32)}), FormatError, "not a setting of HQQ's"),
    "long text": (changed(PLAIN, {"q_proj.packing": np.ones(65, np.uint8)}), FormatError, "not a setting of HQQ's"),
    "axis": (changed(PLAIN, {"q_proj.axis": np.array(2, np.int32)}), FormatError, r"axis' is 2, not 0 or 1"),
    "group": (changed(PLAIN, {"q_proj.group_size": np.array(31, np.int32)}), FormatError, "31, not a whole number"),
    "no group": (changed(PLAIN, {"q_proj.group_size": np.array(0, np.int32)}), FormatError, "0, not a whole number"),
    "no scale": (changed(PLAIN, {"q_proj.scale": None}), FormatError, r"q_proj\.scale' is missing"),
    "few scales": (changed(PLAIN, {"q_proj.scale": np.ones((7, 1), np.float16)}), FormatError, r"is \[7, 1\], .* 144 groups"),
    "integer zeros": (changed(PLAIN, {"q_proj.zero": np.ones((144, 1), np.uint8)}), Unsupported, "is U8, and only F32"),
    "both": (changed(PLAIN, {"q_proj.zero_scale": np.ones((2, 7), np.float16)}), FormatError, "not zeros and scales of 144"),
    "both codes": (changed(PLAIN, {"q_proj.zero_scale": np.ones((2, 144), np.uint8)}), FormatError, "meta_zero.shape' is"),
    "no codes": (
        changed(PLAIN, {f"k_proj.{key}": np.array(4, np.int32) for key in ("nbits", "group_size")}),
        FormatError,
        "'k_proj.nbits' is part of a quantised weight, and 'k_proj.W_q' is missing",
    ),
    "transposed": (replace(PLAIN, config={**PLAIN.config, "model_type": "gpt2"}), Unsupported, r"\[inputs, outputs\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_layouts_and_damaged_checkpoints_are_refused_when_opened(name: str, tmp_path: Path) -> None:
    case, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        opened(tmp_path, case).close()
    assert type(caught.value) is kind


def test_runs() -> None:
    assert list(_runs(0, 8, 4)) == [(0, 4), (4, 8)]
    assert list(_runs(5, 5, 4)) == []
