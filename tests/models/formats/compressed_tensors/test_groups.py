"""Models with several groups in config.json: which weight belongs to which, where scales fit more than one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError
from weightsmith._models.formats.compressed_tensors import FORMAT
from weightsmith._models.formats.compressed_tensors.config import Targets
from weightsmith.abc.tensors import Tensors

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
RANDOM = np.random.default_rng(5)
LAYER = "model.layers.0"


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, m] → int32 [n, words], the first in the lowest bits."""
    per_word = 32 // bits
    words = codes.astype(np.uint32).reshape(len(codes), -1, per_word) << np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(words, axis=2).view(np.int32)


def weight(name: str, bits: int, group: int, shape: tuple[int, int], dtype: Any, *, zeros: bool = False) -> Any:
    """The stored tensors of a weight, and the weight."""
    rows, cols = shape
    codes, scales = RANDOM.integers(0, 1 << bits, shape), RANDOM.uniform(0.01, 1, (rows, cols // group)).astype(BF16)
    offsets = RANDOM.integers(0, 1 << bits, scales.shape) if zeros else np.full(scales.shape, 1 << (bits - 1))
    tensors = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": np.array(shape, dtype)}
    if zeros:
        tensors["weight_zero_point"] = np.ascontiguousarray(packed(offsets.T, bits).T)
    plain = (codes - offsets.repeat(group, 1)) * scales.astype(np.float32).repeat(group, 1)
    return {f"{name}.{part}": array for part, array in tensors.items()}, {f"{name}.weight": plain.astype(np.float32)}


def group(bits: int, size: int | None, targets: object, *, symmetric: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy}
    return {"weights": weights, "targets": targets}


def write(folder: Path, groups: list[dict[str, Any]], tensors: dict[str, np.ndarray]) -> Path:
    named = {f"group_{k}": group for k, group in enumerate(groups)}
    entry = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": named}
    return write_checkpoint(folder, tensors, {"model_type": "llama", "quantization_config": entry})


MLP, ATTENTION = f"{LAYER}.mlp.up_proj", f"{LAYER}.self_attn.q_proj"
BY_NAME = (["re:.*mlp.*"], ["re:.*self_attn.*"])


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.uint32])
@pytest.mark.parametrize("targets", [BY_NAME, (["re:.*mlp.*"], ["Linear"]), (["Linear"], ["Linear"]), (None, None)])
@pytest.mark.parametrize("sizes", [(None, None), (128, 64)], ids=["channel-wise", "128 and 64"])
def test_the_stored_shape_tells_4_bits_from_8(sizes: Any, targets: Any, dtype: Any, tmp_path: Path) -> None:
    """Rows of W4 with 256 columns and of W8 with 128 have the same words and the same scales."""
    four, plain4 = weight(MLP, 4, sizes[0] or 256, (32, 256), dtype)
    eight, plain8 = weight(ATTENTION, 8, sizes[1] or 128, (32, 128), dtype)
    model = write(tmp_path, [group(4, sizes[0], targets[0]), group(8, sizes[1], targets[1])], {**four, **eight})
    with weightsmith.open_checkpoint(model) as opened:
        for name, plain in {**plain4, **plain8}.items():
            np.testing.assert_array_equal(opened.read(name), plain)


@pytest.mark.parametrize("reverse", [False, True])
def test_zero_points_tell_symmetric_groups_from_others(reverse: bool, tmp_path: Path) -> None:
    with_zeros, plain1 = weight(MLP, 4, 64, (32, 128), np.int64, zeros=True)
    without, plain2 = weight(ATTENTION, 4, 64, (32, 128), np.int64)
    groups = [group(4, 64, "Linear", symmetric=False), group(4, 64, "Linear")]
    model = write(tmp_path, groups[::-1] if reverse else groups, {**with_zeros, **without})
    with weightsmith.open_checkpoint(model) as opened:
        for name, plain in {**plain1, **plain2}.items():
            np.testing.assert_array_equal(opened.read(name), plain)


def test_a_stored_shape_that_fits_no_group_is_an_error(tmp_path: Path) -> None:
    tensors, _ = weight(MLP, 4, 256, (32, 256), np.int64)
    tensors[f"{MLP}.weight_shape"] = np.array([32, 64])
    model = write(tmp_path, [group(4, None, "Linear"), group(8, None, "Embedding")], tensors)
    with pytest.raises(FormatError, match=r"fits offset4 in blocks of \[1, 256\] and offset8 in .*, and nothing tells which"):
        weightsmith.open_checkpoint(model)


def test_targets_tell_blocks_of_different_heights(tmp_path: Path) -> None:
    """Two rows of scales fit blocks of 4 rows and of 5, and 8-bit floats have no stored shape."""
    tensors, plain = {}, {}
    for name, high in ((MLP, 4), (ATTENTION, 5)):
        codes, scales = RANDOM.standard_normal((8, 8)).astype(E4M3), RANDOM.uniform(0.1, 1, (2, 2)).astype(np.float32)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scales}
        plain[f"{name}.weight"] = codes.astype(np.float32) * scales.repeat(high, 0)[:8].repeat(4, 1)
    blocks = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "block"}
    groups = [
        {"weights": {**blocks, "block_structure": [high, 4]}, "format": "float-quantized", "targets": targets}
        for high, targets in zip((4, 5), BY_NAME, strict=True)
    ]
    with weightsmith.open_checkpoint(write(tmp_path, groups, tensors)) as opened:
        for name, values in plain.items():
            np.testing.assert_array_equal(opened.read(name), values)


class Elsewhere:
    """A source on another machine: nothing may be read from it while it is opened."""

    def __init__(self, stored: Tensors) -> None:
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[str, ...]:
        return (f"{name}: {nbytes}",)

    def read_into(self, name: str, start_byte: int, out: Any) -> None:
        raise AssertionError(name)


@pytest.mark.parametrize("targets", [BY_NAME, (["re:.*mlp.*"], ["Linear"]), ([MLP], [ATTENTION])])
def test_targets_tell_4_bits_from_8_if_the_shape_is_on_another_machine(targets: Any, tmp_path: Path) -> None:
    four, _ = weight(MLP, 4, 256, (32, 256), np.int64)
    eight, _ = weight(ATTENTION, 8, 128, (32, 128), np.int64)
    model = write(tmp_path, [group(4, None, targets[0]), group(8, None, targets[1])], {**four, **eight})
    with weightsmith.open_checkpoint(model, raw=True) as raw:
        specs = FORMAT.read(Elsewhere(raw.source), raw.config or {}, "m").source.specs
        assert {name: spec.shape for name, spec in specs.items()} == {
            f"{MLP}.weight": (32, 256),
            f"{ATTENTION}.weight": (32, 128),
        }


# ---- targets

MODULES = [
    *(f"model.layers.{i}.{part}" for i in range(2) for part in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")),
    *("lm_head", "model.embed_tokens", "model.layers.1.mlp.experts.10.up_proj"),
]
TARGETS: list[dict[str, Any]] = [
    {"a": ["re:.*mlp.*"], "b": ["re:.*self_attn.*", "lm_head"]},
    {"a": ["Linear"], "b": [r"re:model\.layers\.1\..*"]},
    {"a": ["Linear"], "b": ["model.layers.0.mlp.up_proj", "lm_head"], "c": ["Embedding"]},
    {"a": ["re:.*up_proj"], "b": ["re:.*layers.1.*"], "c": ["re:.*experts.*"]},
    {"a": ["re:mlp"], "b": ["re:model"]},
    {"a": ["LlamaMLP", "Module"], "b": [r"re:.*(gate|up|down)_proj"]},
    {"a": []},
]


@pytest.mark.parametrize("groups", TARGETS, ids=str)
def test_groups_are_those_that_compressed_tensors_finds(groups: dict[str, list[str]]) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    from compressed_tensors.utils.match import match_targets

    ours = Targets(groups, "m")
    group_of = {target: name for name, targets in groups.items() for target in targets}
    for name in MODULES:
        module = torch.nn.Embedding(2, 2) if "embed" in name else torch.nn.Linear(2, 2)
        matches = match_targets(name, module, group_of)
        assert ours.group_of(name) == (group_of[matches[0]] if matches else ""), name


@pytest.mark.parametrize(
    ("groups", "module", "group"),
    [
        (TARGETS[0], "model.layers.0.mlp.up_proj", "a"),
        (TARGETS[0], "lm_head", "b"),
        (TARGETS[0], "model.embed_tokens", ""),
        (TARGETS[1], "model.layers.1.mlp.up_proj", "b"),
        (TARGETS[2], "model.layers.0.mlp.up_proj", "b"),
        (TARGETS[2], "model.embed_tokens", "c"),
        (TARGETS[3], "model.layers.1.mlp.experts.10.up_proj", "c"),
        (TARGETS[4], "model.layers.0.mlp.up_proj", "b"),
        ({"a": ["re:.*_proj$"], "b": ["re:.*_proj$", "Linear"]}, "model.layers.0.mlp.up_proj", ""),
        ({"a": ["Linear"], "b": ["Linear"]}, "model.layers.0.mlp.up_proj", ""),
        ({"a": None}, "q_proj", "a"),
        ({"a": "Linear"}, "q_proj", "a"),
    ],
    ids=str,
)
def test_names_come_before_expressions_and_expressions_before_classes(groups: Any, module: str, group: str) -> None:
    assert Targets(groups, "m").group_of(module) == group


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([3], r"config_groups.a.targets holds 3, not a text"),
        (["re:("], r"a target 're:\(' that is not read: missing \)"),
        (["re:(?!mlp).*"], r"'\(\?' is not read"),
        (["re:" + "a" * 2000], "2,000 characters, at most 1,000"),
        ([f"re:{n}" for n in range(101)], "has 101 regular expressions, and at most 100"),
        (["re:" + "(a|b|c){900}" * 80], "take too long"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_targets_that_are_not_read_are_one_error(targets: list[Any], message: str) -> None:
    with pytest.raises(FormatError, match=message) as refused:
        list(map(Targets({"a": targets}, "the model").group_of, (f"model.layers.{n}.mlp.up_proj" for n in range(1000))))
    assert "the model" in str(refused.value)


def test_names_beyond_ascii_are_not_compared_with_expressions() -> None:
    with pytest.raises(FormatError, match="which is not ASCII"):
        Targets({"a": ["re:.*"]}, "m").group_of("Schicht.ü")
