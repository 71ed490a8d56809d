"""Codes with scales, as several programs store them: the numbers that come out, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError, Unsupported, WeightsmithError
from weightsmith._models.checkpoint import open_checkpoint

E4M3, E8M0, BF16 = (np.dtype(d) for d in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16))
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
RANDOM = np.random.default_rng(3)

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32], "fmt": "e4m3"}
FP4 = {**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
MX8 = {**FP8, "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}
WHOLE = {**FP8, "weight_block_size": None, "activation_scheme": "static"}
MINIMAX = {**FP8, "fmt": "float8_e4m3fn"}
WIDE = {**FP8, "fmt": "e5m2"}
INVERSE = {"quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_method": "row", "weight_scale_semantics": "inverse"}
INVERSE_BLOCKS = {**INVERSE, "weight_scale_method": "block", "weight_block_size": [16, 32]}
ROWS = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
_GROUP = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "group", "group_size": 32}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp8-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _GROUP, "format": "mxfp8-quantized"}},
}


def quark(dtype: str, scheme: str, **weights: Any) -> dict[str, Any]:
    """Quark's entry of config.json."""
    layers = {"weight": {"dtype": dtype, "qscheme": scheme, "symmetric": True, **weights}, "input_tensors": None}
    export = {"weight_format": "real_quantized", "pack_method": "reorder"}
    return {"quant_method": "quark", "global_quant_config": layers, "layer_quant_config": {}, "export": export}


def rounded(packing: str, kind: str, bits: int, group: int) -> dict[str, Any]:
    """AutoRound's entry of config.json."""
    entry = {"quant_method": "auto-round", "packing_format": packing, "data_type": kind, "bits": bits}
    return {**entry, "group_size": group, "sym": True}


def codes8(*shape: int) -> np.ndarray:
    """Any codes but NaN."""
    codes = RANDOM.integers(0, 255, shape).astype(np.uint8)
    return np.where(codes & 0x7F == 0x7F, np.uint8(0), codes).view(E4M3)


def codes4(*shape: int) -> np.ndarray:
    """Pairs of codes in bytes; shape: of the bytes."""
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


def values(codes: np.ndarray) -> np.ndarray:
    """float64: of pairs of float4 twice as wide."""
    if codes.dtype in (E4M3, E5M2, np.dtype(np.int8)):
        return codes.astype(np.float64)
    pairs = np.stack([FLOAT4[codes & 15], FLOAT4[codes >> 4]], -1)
    return pairs.reshape(*codes.shape[:-1], -1).astype(np.float64)


def powers(*shape: int) -> np.ndarray:
    return RANDOM.integers(110, 130, shape).astype(np.uint8)


def numbers(*shape: int) -> np.ndarray:
    return (RANDOM.standard_normal(shape) * 0.01).astype(np.float32)


def scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32: each block of codes times its scale; the last two axes are those of a matrix."""
    decoded = values(codes)
    factors = 2.0 ** (scales.astype(np.float64) - 127) if scales.dtype == np.uint8 else scales.astype(np.float64)
    for axis in (-2, -1):
        factors = np.repeat(factors, -(-decoded.shape[axis] // factors.shape[axis]), axis)
    return (decoded * factors[..., : decoded.shape[-2], : decoded.shape[-1]]).astype(np.float32)


def opened(folder: Path, entry: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by name, decoded."""
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": dict(entry)}
    with open_checkpoint(write_checkpoint(folder, tensors, config)) as checkpoint:
        assert checkpoint.quantised is None
        return {name: checkpoint.read(name) for name in checkpoint.specs}


Q8, Q4 = codes8(48, 96), codes4(48, 64)
INT8 = RANDOM.integers(-127, 128, (48, 96)).astype(np.int8)
BLOCKS, EACH, GROUPS, GROUPS4 = powers(3, 3), numbers(48, 1), powers(48, 3), powers(48, 4)
ONE = numbers(1, 1)
TILES = numbers(3, 3)
ONE_INVERSE, EACH_INVERSE, TILES_INVERSE = (RANDOM.uniform(1000, 9000, a.shape).astype(np.float32) for a in (ONE, EACH, TILES))
"""Divisors of codes: GPTQModel takes one of at most 1 for a factor."""
Q8_WIDE = RANDOM.standard_normal((48, 96)).astype(E5M2)


def divided(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32: each block of codes, divided by its scale."""
    high, wide = (-(-n // m) for n, m in zip(codes.shape, scales.shape, strict=True))
    return codes.astype(np.float32) / scales.repeat(high, 0).repeat(wide, 1)[: len(codes), : codes.shape[1]]


CASES: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray]] = {
    "DeepSeek V3.1": (FP8, {"q.weight": Q8, "q.weight_scale_inv": BLOCKS}, scaled(Q8, BLOCKS)),
    "DeepSeek V4": (FP4, {"q.weight": Q8, "q.scale": BLOCKS.view(E8M0)}, scaled(Q8, BLOCKS)),
    "DeepSeek V4 experts": (FP4, {"q.weight": Q4.view(np.int8), "q.scale": GROUPS4.view(E8M0)}, scaled(Q4, GROUPS4)),
    "MiniMax M2": (MINIMAX, {"q.weight": Q8, "q.weight_scale_inv": TILES}, scaled(Q8, TILES)),
    "E5M2": (WIDE, {"q.weight": Q8_WIDE, "q.weight_scale_inv": TILES}, scaled(Q8_WIDE, TILES)),
    "GPTQModel FP8": (
        {**INVERSE, "weight_scale_method": "tensor"},
        {"q.weight": Q8, "q.weight_scale_inv": ONE_INVERSE[0, 0]},
        divided(Q8, ONE_INVERSE),
    ),
    "GPTQModel FP8 by row": (INVERSE, {"q.weight": Q8, "q.weight_scale_inv": EACH_INVERSE[:, 0]}, divided(Q8, EACH_INVERSE)),
    "GPTQModel FP8 by block": (
        INVERSE_BLOCKS,
        {"q.weight": Q8, "q.weight_scale_inv": TILES_INVERSE},
        divided(Q8, TILES_INVERSE),
    ),
    "GPTQModel FP8 of experts": (
        {**INVERSE, "weight_scale_method": "tensor"},
        {"q.weight": np.stack([Q8, Q8]), "q.weight_scale_inv": ONE_INVERSE[None].repeat(2, 0)},
        np.stack([divided(Q8, ONE_INVERSE)] * 2),
    ),
    "Mistral Large 4": (WHOLE, {"q.weight": Q8, "q.qscale_weight": ONE[0, 0], "q.qscale_act": ONE[0]}, scaled(Q8, ONE)),
    "MXFP8": (MX8, {"q.weight": Q8, "q.weight_scale_inv": GROUPS}, scaled(Q8, GROUPS)),
    "fbgemm": (ROWS, {"q.weight": Q8, "q.weight_scale": EACH, "q.input_scale_ub": ONE[0]}, scaled(Q8, EACH)),
    "compressed-tensors MXFP8": (COMPRESSED, {"q.weight": Q8, "q.weight_scale": GROUPS}, scaled(Q8, GROUPS)),
    "Quark FP8": (
        quark("fp8_e4m3", "per_tensor"),
        {"q.weight": Q8, "q.weight_scale": ONE[0, 0].astype(BF16), "q.input_scale": ONE[0], "q.output_scale": ONE[0]},
        scaled(Q8, ONE.astype(BF16)),
    ),
    "Quark FP8 by row": (
        quark("fp8_e4m3", "per_channel"),
        {"q.weight": Q8, "q.weight_scale": EACH[:, 0]},
        scaled(Q8, EACH),
    ),
    "Quark INT8": (
        quark("int8", "per_channel"),
        {"q.weight": INT8, "q.weight_scale": EACH[:, 0], "q.weight_zero_point": np.zeros(48, np.int8)},
        scaled(INT8, EACH),
    ),
    "Quark MXFP4": (
        quark("fp4", "per_group", group_size=32, scale_format="e8m0"),
        {"q.weight": Q4, "q.weight_scale": GROUPS4},
        scaled(Q4, GROUPS4),
    ),
    "AutoRound MXFP4": (
        rounded("auto_round:llm_compressor", "mx_fp", 4, 32),
        {"q.weight_packed": Q4, "q.weight_scale": GROUPS4},
        scaled(Q4, GROUPS4),
    ),
    "AutoRound MXFP8": (
        rounded("auto_round:llm_compressor", "mx_fp", 8, 32),
        {"q.weight": Q8, "q.weight_scale": GROUPS},
        scaled(Q8, GROUPS),
    ),
    "AutoRound NVFP4": (
        rounded("auto_round:llm_compressor", "nv_fp", 4, 16),
        {
            "q.weight_packed": Q4,
            "q.weight_scale": np.full((48, 8), 3, E4M3),
            "q.weight_global_scale": np.array([8], np.float32),
            "q.input_global_scale": np.ones(1, np.float32),
        },
        scaled(Q4, np.full((48, 8), 3 / 8)),
    ),
    "AutoRound FP8": (
        rounded("auto_round:fp8_static", "fp", 8, -1),
        {"q.weight": Q8, "q.weight_scale": EACH[:, 0], "q.input_scale": ONE[0]},
        scaled(Q8, EACH),
    ),
    "AutoRound FP8 by block": (
        rounded("auto_round:fp8_static", "fp", 8, [16, 32]),
        {"q.weight": Q8, "q.weight_scale_inv": numbers(3, 3)},
        np.zeros(0),
    ),
    "AutoRound FP8 of weights alone": (
        {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": -1},
        {"q.weight": Q8, "q.weight_scale": EACH},
        scaled(Q8, EACH),
    ),
    "FP8 embedding beside blocks": (FP8, {"q.weight": Q8, "q.weight_scale": ONE[0]}, scaled(Q8, ONE)),
    "fbgemm gate and up": (
        ROWS,
        {"q.weight": np.stack([Q8, Q8[::-1]]), "q.weight_scale": numbers(2, 1, 96)},
        np.zeros(0),
    ),
    "fbgemm down": (
        ROWS,
        {"q.weight": np.stack([codes8(48, 48)] * 2), "q.weight_scale": numbers(2, 48, 1)},
        np.zeros(0),
    ),
    "stacked experts": (
        FP8,
        {"q.weight": np.stack([Q8, Q8[::-1]]), "q.weight_scale_inv": np.stack([BLOCKS, BLOCKS + 1])},
        np.stack([scaled(Q8, BLOCKS), scaled(Q8[::-1], BLOCKS + 1)]),
    ),
    "stacked float4": (
        FP4,
        {"q.weight": np.stack([Q4, Q4[::-1]]).view(np.int8), "q.scale": np.stack([GROUPS4, GROUPS4]).view(E8M0)},
        np.stack([scaled(Q4, GROUPS4), scaled(Q4[::-1], GROUPS4)]),
    ),
    "gate and up stacked": (
        WHOLE,
        {"q.weight": Q8[None], "q.weight_scale_inv": numbers(2, 1)[None]},
        np.zeros(0),
    ),
}
for _name in ("gate and up stacked", "AutoRound FP8 by block", "fbgemm gate and up", "fbgemm down"):
    _entry, _stored, _ = CASES[_name]
    _codes, _scales = _stored.values()
    _scales = np.swapaxes(_scales, 1, 2) if _name == "fbgemm down" else _scales
    CASES[_name] = _entry, _stored, scaled(_codes, _scales)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_codes_times_scales(name: str, tmp_path: Path) -> None:
    entry, tensors, plain = CASES[name]
    weights = opened(tmp_path, entry, tensors)
    assert list(weights) == ["q.weight"]
    np.testing.assert_array_equal(weights["q.weight"], plain)


@pytest.mark.parametrize(
    "name", ["DeepSeek V3.1", "DeepSeek V4", "DeepSeek V4 experts", "MXFP8", "stacked experts", "stacked float4"]
)
def test_transformers_decodes_the_same_weights(name: str) -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    _, tensors, plain = CASES[name]
    codes, scales = (torch.from_numpy(np.array(a.view(np.uint8))) for a in tensors.values())
    codes = codes.view(torch.int8 if tensors["q.weight"].dtype == np.int8 else torch.float8_e4m3fn)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32).numpy()
    np.testing.assert_array_equal(theirs, plain)


def test_experts_may_be_stacked_without_the_end_of_the_name(tmp_path: Path) -> None:
    _, tensors, plain = CASES["stacked experts"]
    stored = {"experts.down_proj": tensors["q.weight"], "experts.down_proj_scale_inv": tensors["q.weight_scale_inv"]}
    stored["experts.down_proj_activation_scale"] = np.ones(2, np.float32)
    weights = opened(tmp_path, FP8, stored)
    assert list(weights) == ["experts.down_proj"]
    np.testing.assert_array_equal(weights["experts.down_proj"], plain)


def test_any_part_of_stacked_experts_is_the_same(tmp_path: Path) -> None:
    entry, tensors, plain = CASES["stacked experts"]
    config = {"model_type": "llama", "quantization_config": entry}
    with open_checkpoint(write_checkpoint(tmp_path, tensors, config)) as checkpoint:
        for start, size in ((0, 5), (4601, 97), (9000, 216)):
            out = np.empty(size, np.float32)
            checkpoint.read_into("q.weight", 4 * start, out)
            np.testing.assert_array_equal(out, plain.reshape(-1)[start : start + size])


REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], type[WeightsmithError], str]] = {
    "fp4 is not named": (
        FP8,
        {"q.weight": Q4.view(np.int8), "q.scale": GROUPS4},
        Unsupported,
        "only matrices of F8_E4M3 are read",
    ),
    "exponents without a weight": (
        FP8,
        {"q.weight": Q8, "q.weight_scale_inv": BLOCKS, "k.scale": BLOCKS.view(E8M0)},
        Unsupported,
        "'k.scale' is part of a weight that is not read",
    ),
    "few scales of experts": (
        FP8,
        {"q.weight": np.stack([Q8, Q8]), "q.weight_scale_inv": BLOCKS[None]},
        FormatError,
        r"no block for whole rows of each of 2 matrices",
    ),
    "blocks across experts": (
        {**FP8, "weight_block_size": [40, 32]},
        {"q.weight": np.stack([Q8, Q8]), "q.weight_scale_inv": powers(2, 2, 3)},
        FormatError,
        "no block for whole rows",
    ),
    "other scales": (
        {**INVERSE, "weight_scale_semantics": "direct"},
        {"q.weight": Q8, "q.weight_scale_inv": EACH[:, 0]},
        Unsupported,
        "weight_scale_semantics 'direct' are not read",
    ),
    "other floats": (
        {**FP8, "fmt": "e3m4"},
        {"q.weight": Q8, "q.weight_scale_inv": TILES},
        Unsupported,
        "fmt 'e3m4' are not read, only 'e4m3' and 'e5m2'",
    ),
    "E4M3 where config.json says E5M2": (
        WIDE,
        {"q.weight": Q8, "q.weight_scale_inv": TILES},
        Unsupported,
        "only matrices of F8_E5M2 are read",
    ),
    "fbgemm by tensor": (ROWS, {"q.weight": Q8, "q.weight_scale": ONE[0]}, FormatError, r"is \[1\], and its blocks need"),
    "Quark fp6": (
        quark("fp6_e2m3", "per_group"),
        {"q.weight": np.zeros((96, 6), np.uint8), "q.weight_scale": numbers(3, 48)},
        Unsupported,
        "'fp6_e2m3' 'per_group' are not read, only fp8_e4m3 per_tensor",
    ),
    "Quark fake": (
        {**quark("fp8_e4m3", "per_tensor"), "export": {"weight_format": "fake_quantized"}},
        {"q.weight": Q8, "q.weight_scale": ONE},
        Unsupported,
        "weight_format 'fake_quantized'",
    ),
    "Quark in stages": (
        {"quant_method": "quark", "layer_quant_config": {"*.q": {"weight": [{"dtype": "fp8_e4m3"}]}}},
        {"q.weight": Q8, "q.weight_scale": ONE},
        Unsupported,
        r"several stages are not read \('layer_quant_config\.\*\.q'\)",
    ),
    "AutoRound integers": (
        rounded("auto_round:llm_compressor", "mx_int", 4, 32),
        {"q.weight_packed": Q4, "q.weight_scale": GROUPS4},
        Unsupported,
        "data_type 'mx_int' are not read",
    ),
    "AutoRound rotated": (
        {**rounded("auto_round:llm_compressor", "mx_fp", 4, 32), "rotation_config": {"hadamard_type": "random"}},
        {"q.weight_packed": Q4, "q.weight_scale": GROUPS4},
        Unsupported,
        "rotation_config",
    ),
    "AutoRound packed otherwise": (
        rounded("auto_round:ark", "int", 4, 32),
        {"q.qweight": np.zeros((4, 4), np.int32)},
        Unsupported,
        "packing_format 'auto_round:ark' are not read",
    ),
    "AutoRound floats among integers": (
        rounded("auto_round:auto_gptq", "int", 4, 32),
        {"q.qweight": np.zeros((4, 4), np.int32), "k.weight": Q8, "k.weight_scale": EACH},
        Unsupported,
        "'k.weight' is not in the layout 'auto_round:auto_gptq'",
    ),
    "AutoRound integers among floats": (
        rounded("auto_round:llm_compressor", "mx_fp", 4, 32),
        {"q.qweight": np.zeros((4, 4), np.int32), "k.weight_packed": Q4, "k.weight_scale": GROUPS4},
        Unsupported,
        "'q.qweight' is not in the layout 'auto_round:llm_compressor'",
    ),
    "Quark by column": (
        quark("fp8_e4m3", "per_channel", ch_axis=1),
        {"q.weight": codes8(48, 48), "q.weight_scale": EACH[:, 0]},
        Unsupported,
        "ch_axis 1 are not read",
    ),
    "Quark rotated": (
        {**quark("fp8_e4m3", "per_tensor"), "algo_config": [{"name": "rotation", "r1": True, "r4": True}]},
        {"q.weight": Q8, "q.weight_scale": ONE},
        Unsupported,
        r"algo_config\.r4 are not read",
    ),
    "Quark with a rotation": (
        quark("fp8_e4m3", "per_tensor"),
        {"q.weight": Q8, "q.weight_scale": ONE, "q.input_rotation": np.ones((4, 4), np.int8)},
        Unsupported,
        "'q.input_rotation' changes the inputs",
    ),
    "Quark with shared rotations": (
        quark("fp8_e4m3", "per_tensor"),
        {"q.weight": Q8, "q.weight_scale": ONE, "shared_input_rotation_4": np.ones((4, 4), np.float32)},
        Unsupported,
        "'shared_input_rotation_4' changes the inputs",
    ),
    "Quark biases": (
        {**quark("int8", "per_tensor"), "layer_quant_config": {"*.q": {"bias": {"dtype": "int8"}}}},
        {"q.weight": INT8, "q.weight_scale": ONE, "q.bias": INT8[0], "q.bias_scale": ONE},
        Unsupported,
        r"quantised biases are not read \('layer_quant_config\.\*\.q'\)",
    ),
    "codes that no setting describes": (
        FP8,
        {"q.weight": Q8, "q.weight_scale_inv": BLOCKS, "k.weight": Q4},
        Unsupported,
        "'k.weight' is U8: config.json says nothing of such codes",
    ),
    "AutoRound without a packing": (
        {"quant_method": "auto-round", "bits": 4},
        {"q.qweight": np.zeros((4, 4), np.int32)},
        Unsupported,
        "packing_format None are not read",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    entry, tensors, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        opened(tmp_path, entry, tensors)


def test_zeros_of_activations_are_dropped(tmp_path: Path) -> None:
    zeros = {f"q.{end}_zero_point": np.zeros(1, np.int8) for end in ("weight", "input", "output")}
    weights = opened(tmp_path, quark("int8", "per_tensor"), {"q.weight": INT8, "q.weight_scale": ONE, **zeros})
    assert list(weights) == ["q.weight"]


CACHE_ONLY = {**COMPRESSED, "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}


MODELOPT_CACHE_ONLY = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize("entry", [CACHE_ONLY, MODELOPT_CACHE_ONLY])
def test_weights_may_be_plain_beside_the_scales_of_a_kv_cache(entry: dict[str, Any], tmp_path: Path) -> None:
    plain, config = RANDOM.standard_normal((4, 8)).astype(BF16), {"model_type": "llama", "quantization_config": entry}
    tensors = {"self_attn.k_proj.weight": plain, "self_attn.k_scale": ONE[0], "self_attn.v_scale": ONE[0]}
    with open_checkpoint(write_checkpoint(tmp_path, tensors, config)) as checkpoint:
        assert list(checkpoint.specs) == ["self_attn.k_proj.weight"]
        np.testing.assert_array_equal(checkpoint.read("self_attn.k_proj.weight"), plain)
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.notes[0].what.startswith("the KV cache's quantisation is dropped")


def test_an_entry_of_a_kv_cache_says_nothing_of_codes(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="says nothing of such codes"):
        opened(tmp_path, CACHE_ONLY, {"q.weight": Q8, "q.weight_scale": EACH, "self_attn.k_scale": ONE[0]})
