"""Codes that no format decodes: found beside scales of any name, and refused; plain numbers and tables are not."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from weightsmith._base.errors import PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.opening import are_plain, describe_codes

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
X = "model.layers.0.mlp.up_proj"


def described(**tensors: tuple[str, tuple[int, ...]]) -> str | None:
    """`describe_codes` of tensors: name → dtype and shape."""
    return describe_codes({name: TensorSpec(name, DTYPES[dtype], shape) for name, (dtype, shape) in tensors.items()})


@pytest.mark.parametrize(
    "scale",
    [
        *(".scale", ".scales", ".w_scale", ".wscales", ".fp8_scale", ".qscale_weight", ".weights_scaling_factor", ".s"),
        *(".weight.scale", ".weight._scale", ".weight_scales", ".weight_amax", ".weight_s", "_scale", "_weight_scale"),
    ],
)
@pytest.mark.parametrize(("codes", "shape"), [("F8_E4M3", (64, 32)), ("F8_E5M2", (64, 32)), ("F8_E4M3", (8, 4, 3, 3))])
def test_float8_beside_a_scale_of_any_name_is_codes(scale: str, codes: str, shape: tuple[int, ...]) -> None:
    description = described(**{f"{X}.weight": (codes, shape), X + scale: ("F32", ()), f"{X}.bias": ("BF16", (64,))})
    assert description is not None
    assert f"{codes} codes" in description
    assert f"'{X}{scale}' F32 []" in description
    assert f"(tensor '{X}.weight')" in description


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
def test_scales_of_any_float_count(dtype: str) -> None:
    assert described(**{f"{X}.weight": ("F8_E4M3", (64, 32)), f"{X}.factor": (dtype, (64, 1))})


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": ("F8_E4M3", (8, 8)), "scale": ("F32", ())},
        {f"{X}.weight": ("F8_E4M3FNUZ", (8, 8)), f"{X}.weight_scale": ("F32", ())},
        {f"{X}._weight_qdata": ("F8_E4M3", (8, 8)), f"{X}._weight_scale": ("F32", (8, 1))},
        {f"{X}._weight_qdata": ("I8", (8, 8)), f"{X}._weight_scale": ("BF16", (8, 1))},
        {"mlp.experts.gate_up_proj": ("F8_E4M3", (4, 8, 8)), "mlp.experts.gate_up_proj_scale": ("F32", (4, 1, 8))},
        {"mlp.experts.gate_up_proj": ("I8", (4, 8, 8)), "mlp.experts.gate_up_proj_scale": ("F32", (4, 1, 8))},
        {"mlp.experts.w13_weight": ("F8_E4M3", (4, 8, 8)), "mlp.experts.w13_scale": ("F32", (4,))},
        {f"{X}.weight": ("F8_E4M3", (8, 8)), f"{X}.weight.s": ("F8_E8M0", (8, 1))},
        {f"{X}.weight": ("I8", (8, 8)), f"{X}.weight_scales": ("F16", (8,))},
        {f"{X}.W_q": ("U8", (8, 8)), f"{X}.scale": ("BF16", (8, 1)), f"{X}.zero": ("BF16", (8, 1))},
        {f"{X}.codes": ("I16", (8, 8, 1)), f"{X}.codebooks": ("F16", (1, 256, 1, 8)), f"{X}.scales": ("F16", (8, 1, 1, 1))},
        {f"{X}.data": ("I32", (8, 8)), f"{X}.absmax": ("F32", (8,))},
        {f"{X}.B": ("I32", (4, 128)), f"{X}.s_channel": ("F32", (1, 64))},  # QQQ
        {"block.0.mlp.mlp1_weight.blocks": ("U8", (2, 64, 2, 16)), "block.0.mlp.mlp1_weight.scales": ("U8", (2, 64, 2))},
        {f"{X}.weight._data": ("F8_E4M3", (8, 8)), f"{X}.weight._scale": ("BF16", (8, 1))},  # Quanto
        {f"{X}.dense_weights": ("I64", (64,)), f"{X}.row_offsets": ("I32", (65,)), f"{X}.col_vals": ("I32", (30,))},  # SpQR
        {f"{X}.indices": ("I32", (1, 8, 8)), f"{X}.centroids.weight": ("BF16", (1, 2048)), f"{X}.perm": ("I16", (64,))},  # VPTQ
        {f"{X}.dqweight": ("BF16", (8, 8)), f"{X}.forward_hadamard_matrix": ("BF16", (32, 32))},  # FP-Quant
    ],
    ids=lambda tensors: " ".join(tensors),
)
def test_codes_of_other_programs_are_found(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    assert described(**tensors)


def test_weights_in_a_dtype_that_is_not_decoded_are_named() -> None:
    named = f"numbers in F8_E4M3FNUZ, which are not decoded (tensor '{X}.weight')"
    assert described(**{f"{X}.weight": ("F8_E4M3FNUZ", (8, 8))}) == named
    assert not described(**{f"{X}.scale": ("F8_E4M3FNUZ", (8,))})


@pytest.mark.parametrize("dtype", ["I8", "U8", "I16", "I32", "U32", "I64"])
@pytest.mark.parametrize("leaf", ["weight", "gate_up_proj", "in_proj_weight", "weight_scale"])
def test_a_matrix_of_integers_under_the_name_of_a_weight_is_codes(dtype: str, leaf: str) -> None:
    description = described(**{f"{X}.{leaf}": (dtype, (8, 8))})
    assert description == f"{dtype} codes in an unknown layout (tensor '{X}.{leaf}')"


@pytest.mark.parametrize(
    "tensors",
    [
        # 8-bit floats without a scale are numbers, whatever else plain modules hold.
        {f"{X}.weight": ("F8_E4M3", (8, 8))},
        {f"{X}.weight": ("F8_E4M3", (8, 8)), f"{X}.bias": ("BF16", (8,)), "norm.weight": ("BF16", (8,))},
        {"norm.weight": ("F8_E4M3", (8,)), "norm.scale": ("BF16", (8,))},
        {"mlp.gate.weight": ("F8_E4M3", (8, 8)), "mlp.gate.e_score_correction_bias": ("F32", (8,))},
        {"attn.q.weight": ("F8_E5M2", (8, 8)), "attn.q_norm.weight": ("F32", (8,)), "attn.q_bias": ("F32", (8,))},
        {"experts.gate_up_proj": ("F8_E4M3", (4, 8, 8)), "experts.down_proj": ("BF16", (4, 8, 4))},
        {"positional_embedding": ("F8_E4M3", (7, 8)), "logit_scale": ("F32", ())},
        {"router.proj.weight": ("F8_E4M3", (8, 8)), "router.scale": ("F32", (8,))},
        {"conv.weight_v": ("F8_E4M3", (8, 8, 3)), "conv.weight_g": ("F16", (8, 1, 1))},
        {f"{X}.weight": ("F8_E4M3", (8, 8)), f"{X}.scale": ("F8_E4M3", (8,))},
        # Integers that are tables, positions, masks and counters.
        {"embeddings.position_ids": ("I64", (1, 50)), "embeddings.class_embedding": ("F32", (8,))},
        {"attn.relative_position_index": ("I32", (49, 49)), "attn.relative_position_bias_table": ("F32", (169, 3))},
        {"attn.relative_position_index": ("I32", (49, 49)), "attn.logit_scale": ("F32", (3, 1, 1))},
        {"attn.bias": ("U8", (1, 1, 8, 8)), "attn.masked_bias": ("F32", ())},
        {"mlp.gate.tid2eid": ("I32", (100, 6)), "mlp.gate.weight": ("BF16", (8, 8)), "mlp.gate.scale": ("F32", ())},
        {"attn.rel_weight_index": ("I64", (49, 49)), "attn.weight_mask": ("U8", (8, 8))},
        {"d2t": ("I64", (50,)), "t2d": ("BOOL", (100,)), "bn.num_batches_tracked": ("I64", ()), "bn.weight": ("F32", (8,))},
        {f"{X}.weight_shape": ("I64", (2,)), f"{X}.weight": ("I8", (0, 8))},
    ],
    ids=lambda tensors: " ".join(tensors),
)
def test_plain_numbers_and_tables_are_no_codes(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    assert described(**tensors) is None


@pytest.mark.parametrize(
    ("tensors", "plain"),
    [
        ({"q.weight": ("BF16", (8, 8)), "q.bias": ("F32", (8,))}, True),
        ({"q.weight": ("BF16", (8, 8)), "embeddings.position_ids": ("I64", (1, 8)), "mask": ("BOOL", (8, 8))}, True),
        ({"q.weight": ("F16", (8, 8)), "attn.relative_position_index": ("I32", (8, 8))}, True),
        ({"q.weight": ("F8_E4M3", (8, 8))}, False),
        ({"q.weight": ("U8", (8, 8))}, False),
        ({"q.packed": ("I32", (8, 8))}, False),
        *(({f"q.{leaf}": ("F32", (8, 8))}, False) for leaf in ("codebooks", "codes", "scales", "W_q", "qweight", "absmax")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_weights_are_plain_if_nothing_can_be_codes(tensors: dict[str, tuple[str, tuple[int, ...]]], plain: bool) -> None:
    assert are_plain({name: TensorSpec(name, DTYPES[dtype], shape) for name, (dtype, shape) in tensors.items()}) is plain


@pytest.mark.parametrize("command", ["merge", "dequantize", "quantize"])
def test_codes_of_an_unknown_layout_are_refused_by_name(command: str, tmp_path: Path) -> None:
    tensors = {f"{X}.weight": np.ones((16, 16), E4M3), f"{X}.wscales": np.float32([0.5]), "norm.weight": np.ones(16, BF16)}
    model = write_checkpoint(tmp_path / "m", tensors, {"model_type": "llama"})
    out = tmp_path / "out"
    run = {
        "merge": lambda: weightsmith.merge({"merge_method": "passthrough", "models": [{"model": str(model)}]}, out),
        "dequantize": lambda: weightsmith.dequantize(model, out),
        "quantize": lambda: weightsmith.quantize(model, out, "fp8-dynamic"),
    }
    with pytest.raises(PlanError, match="F8_E4M3 codes in an unknown layout") as refused:
        run[command]()
    assert f"beside '{X}.wscales' F32 [1] (tensor '{X}.weight')" in str(refused.value)
    assert not out.exists()


def test_float8_without_scales_is_merged_as_numbers(tmp_path: Path) -> None:
    weights = np.array([[1, 2], [3, 4]], E4M3), np.array([[3, 2], [1, 8]], E4M3)
    for name, weight in zip("ab", weights, strict=True):
        write_checkpoint(tmp_path / name, {f"{X}.weight": weight, f"{X}.bias": np.ones(2, np.float32)}, {"model_type": "llama"})
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in "ab"]
    merged = weightsmith.merge({"merge_method": "linear", "models": models}, tmp_path / "out", progress=False)
    with weightsmith.open_checkpoint(merged.out) as checkpoint:
        assert checkpoint.read(f"{X}.weight").astype(np.float32).tolist() == [[2, 2], [2, 6]]
