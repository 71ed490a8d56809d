"""FP8 on the way out: kernels against their numpy twins, the encoding against its bound, and other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels import reference
from tests.mini import write_checkpoint
from weightsmith._base.errors import Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._kernels.codecs import BLOCK
from weightsmith._kernels.codes import TABLES, block_maxima, dequantise, quantise_float8
from weightsmith._models.formats import Encoding, encodings
from weightsmith.abc.stored import Modules
from weightsmith.testing import EncodingTests

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
ANY_FLOAT = st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


def spec_of(rows: int, cols: int, dtype: str = "BF16", name: str = "x.weight") -> TensorSpec:
    return TensorSpec(name, DTYPES[dtype], (rows, cols))


def encoded(rows: np.ndarray, encoding: str = "fp8-dynamic", dtype: str = "BF16") -> list[np.ndarray]:
    """The stored tensors of a matrix, encoded in one call."""
    spec = spec_of(*rows.shape, dtype)
    outs = encodings()[encoding].outs(spec)
    buffers = [np.zeros(out.nbytes, np.uint8) for out in outs]
    encodings()[encoding].encode(spec, rows, 0, buffers, np.empty(0, np.float32))
    return [raw.view(out.dtype.numpy).reshape(out.shape) for raw, out in zip(buffers, outs, strict=True)]


@st.composite
def matrices(draw: st.DrawFn, elements: st.SearchStrategy[Any]) -> np.ndarray:
    """float32 [rows, cols]: drawn elements, beside normal ones of a drawn size; some rows are longer than a block."""
    rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 40) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 3]))
    size = 10.0 ** draw(st.integers(-44, 37))
    normal = np.random.default_rng(draw(st.integers(0, 99))).standard_normal((rows, cols)) * size
    matrix = normal.astype(np.float32)
    head = draw(hnp.arrays(np.float32, (rows, min(cols, 12)), elements=elements))
    if draw(st.booleans()):
        matrix[:, : head.shape[1]] = head
    return matrix


@pytest.mark.slow
@settings(max_examples=30)
@given(matrices(ANY_FLOAT))
def test_row_maxima_are_those_of_numpy(rows: np.ndarray) -> None:
    maxima = np.empty(len(rows), np.float32)
    block_maxima(rows.reshape(-1), rows.shape[1], 1, rows.shape[1], maxima)
    expected = np.where(np.isnan(rows), np.float32(0), np.abs(rows)).max(1)
    np.testing.assert_array_equal(maxima, expected)


@pytest.mark.long
@settings(max_examples=30)
@given(matrices(ANY_FLOAT), st.data())
def test_quantise_is_its_twin_bit_for_bit(rows: np.ndarray, data: st.DataObject) -> None:
    positive = st.floats(2.0**-126, 2.0**120, width=32)
    scales = data.draw(hnp.arrays(np.float32, len(rows), elements=positive))
    codes = np.zeros(rows.size, np.uint8)
    quantise_float8(rows.reshape(-1), rows.shape[1], 1, rows.shape[1], scales, codes)
    with np.errstate(all="ignore"):
        expected = reference.quantise_fp8(rows, scales[:, None], (1, rows.shape[1])).reshape(-1)
    is_nan = expected & 0x7F == 0x7F
    np.testing.assert_array_equal(codes & 0x7F == 0x7F, is_nan)
    np.testing.assert_array_equal(codes[~is_nan], expected[~is_nan])


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 10), st.integers(1, 310), st.data())
def test_dequantise_is_its_twin_bit_for_bit(rows: int, cols: int, high: int, wide: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    codes = rng.integers(0, 256, (rows, cols), np.uint8)
    scales = rng.standard_normal((-(-rows // high), -(-cols // wide))).astype(np.float32)
    expected = reference.dequantise(codes, TABLES["float8"], scales, (high, wide)).reshape(-1)
    first = data.draw(st.integers(0, codes.size))
    end = data.draw(st.integers(first, codes.size))
    out = np.zeros(end - first, np.float32)
    below = scales[first // cols // high :].reshape(-1)
    dequantise(codes.reshape(-1)[first:end], TABLES["float8"], first, cols, below, scales.shape[1], high, wide, out)
    np.testing.assert_array_equal(out, expected[first:end])


@pytest.mark.parametrize("block", [(128, 128), (1, 300), (300, 200), (64, 200), (7, 13)])
def test_dequantise_is_float64_arithmetic_rounded_once(block: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 127, (300, 200)).astype(np.uint8)
    scales = rng.random((-(-300 // block[0]), -(-200 // block[1]))).astype(np.float32)
    out = np.zeros(codes.size, np.float32)
    dequantise(codes.reshape(-1), TABLES["float8"], 0, 200, scales.reshape(-1), scales.shape[1], *block, out)
    i, j = np.indices(codes.shape)
    exact = codes.view(E4M3).astype(np.float64) * scales.astype(np.float64)[i // block[0], j // block[1]]
    np.testing.assert_array_equal(out.reshape(codes.shape), exact.astype(np.float32))


@pytest.mark.slow
@settings(max_examples=30)
@given(matrices(FINITE))
def test_the_error_of_fp8_dynamic_is_within_its_bound(rows: np.ndarray) -> None:
    codes, scales = encoded(rows)
    x, s = rows.astype(np.float64), scales.astype(np.float64)
    error = np.abs(codes.astype(np.float64) * s - x)
    assert np.isfinite(error).all()
    assert (error <= 2.0**-4 * np.abs(x) + 2.0**-10 * s).all()


@pytest.mark.slow
@settings(max_examples=30)
@given(matrices(FINITE))
def test_scales_are_the_largest_magnitude_over_448_in_bfloat16(rows: np.ndarray) -> None:
    _, scales = encoded(rows)
    with np.errstate(all="ignore"):
        top = np.abs(rows).max(1, keepdims=True)
        at_least = np.maximum(top / np.float32(448), np.float32(2.0**-126))
        expected = np.where(top == 0, np.float32(2.0**-7), at_least).astype(BF16)
    np.testing.assert_array_equal(scales, expected)


@pytest.mark.long
@settings(max_examples=30)
@given(matrices(FINITE))
def test_codes_are_the_nearest_to_the_rows_over_the_scales_as_they_are_stored(rows: np.ndarray) -> None:
    codes, scales = encoded(rows)
    quotients = rows / scales.astype(np.float32)
    expected = np.clip(quotients, -448, 448).astype(E4M3)
    np.testing.assert_array_equal(codes.view(np.uint8), expected.view(np.uint8))


def test_zeros_saturation_and_subnormals() -> None:
    rows = np.array([[0, -0.0, 0, 0], [1, -1, 2**-9 / 448, 2**-12], [1e-40, -1e-40, 5e-41, 0]], np.float32)
    codes, scales = encoded(rows)
    assert scales[0] == 2.0**-7
    assert codes[0].astype(np.float32).tolist() == [0, 0, 0, 0]
    assert codes[1, :2].astype(np.float32).tolist() == [448, -448]  # bf16(1/448) is below 1/448: the quotient is above 448
    assert np.float32(1) / np.float32(scales[1, 0]) > 448
    assert codes[1, 2].astype(np.float32) == 2.0**-9  # the smallest subnormal
    assert scales[2] == 2.0**-126
    np.testing.assert_allclose(codes[2].astype(np.float64) * 2.0**-126, rows[2], rtol=2**-4, atol=2.0**-136)


def test_what_is_not_finite_is_encoded_without_a_crash() -> None:
    codes, scales = encoded(np.array([[np.nan, 1, -2], [np.inf, 1, -2], [np.nan] * 3], np.float32))
    assert np.isnan(codes[0, 0])
    np.testing.assert_allclose(codes[0, 1:].astype(np.float32) * scales[0].astype(np.float32), [1, -2], rtol=2**-4)
    assert np.isnan(codes[1, 0])
    assert np.isinf(scales[1])
    assert np.isnan(codes[2]).all()


@pytest.mark.parametrize("name", encodings())
class TestEncodings(EncodingTests):
    """Every encoding, by the rules of all."""

    @pytest.fixture
    def encoding(self, name: str) -> Encoding:
        return encodings()[name]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_plain_is_the_cast_of_numpy(dtype: str) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    (actual,) = encoded(rows, "plain", dtype)
    np.testing.assert_array_equal(actual, rows.astype(DTYPES[dtype].numpy))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec("x.bias", DTYPES["BF16"], (4, 4)), "does not end in .weight"),
        (TensorSpec("x.weight", DTYPES["BF16"], (4,)), "not a matrix"),
        (TensorSpec("experts.weight", DTYPES["BF16"], (2, 4, 4)), "not a matrix"),
        (TensorSpec("x.weight", DTYPES["I64"], (4, 4)), "I64, not 16-bit"),
        (TensorSpec("x.weight", DTYPES["F8_E4M3"], (4, 4)), "F8_E4M3, not 16-bit or 32-bit floating point"),
        (TensorSpec("x.weight", DTYPES["F64"], (4, 4)), "F64, not 16-bit or 32-bit floating point"),
        (TensorSpec("x.weight", DTYPES["BF16"], (4, 0)), "has no elements"),
    ],
)
def test_what_fp8_dynamic_does_not_take_is_refused_with_the_reason(spec: TensorSpec, reason: str) -> None:
    assert reason in encodings()["fp8-dynamic"].refusal(spec)
    with pytest.raises(Unsupported, match=reason):
        encodings()["fp8-dynamic"].outs(spec)


# --- other programs ---------------------------------------------------------------


def normal_rows() -> np.ndarray:
    """float32 [64, 96] of bfloat16 values, a row of zeros among them."""
    rows = (np.random.default_rng(1).standard_normal((64, 96)) * 0.02).astype(BF16).astype(np.float32)
    rows[7] = 0
    return rows


@pytest.mark.reader
@pytest.mark.slow
def test_compressed_tensors_makes_the_same_codes_and_scales() -> None:
    """Its own scales and codes, computed in float32 as ours are. (From bfloat16 weights it divides in bfloat16.)"""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import FP8_DYNAMIC
    from compressed_tensors.quantization.utils import calculate_qparams

    rows = normal_rows()
    codes, scales = encoded(rows)
    weight = torch.tensor(rows)
    scheme = QuantizationScheme(targets=["Linear"], **FP8_DYNAMIC)
    low, high = weight.amin(1, keepdim=True).bfloat16(), weight.amax(1, keepdim=True).bfloat16()
    their_scales, _ = calculate_qparams(low, high, scheme.weights)
    assert their_scales.dtype == torch.bfloat16
    assert their_scales.view(torch.int16).numpy().tobytes() == scales.tobytes()
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    state = {"weight": weight, "weight_scale": their_scales.float()}
    theirs = compressor.compress(state, scheme)["weight"].view(torch.uint8).numpy()
    np.testing.assert_array_equal(theirs, codes.view(np.uint8))
    state = {"weight": torch.tensor(codes.view(np.uint8)).view(torch.float8_e4m3fn), "weight_scale": their_scales.float()}
    back = compressor.decompress(state, scheme)["weight"].numpy()
    np.testing.assert_array_equal(back, codes.astype(np.float32) * scales.astype(np.float32))


@pytest.mark.reader
@pytest.mark.slow
def test_transformers_loads_a_model_of_ours(tmp_path: Path) -> None:
    """Loaded weights are our codes times our scales, and the logits those of the same model in plain bfloat16."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config.tie_word_embeddings = False
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items():
        rows = tensor.bfloat16().float().numpy()
        stored[name] = plain[name] = rows.astype(BF16)
        if name.endswith("_proj.weight"):
            codes, scales = stored[name], stored[f"{name}_scale"] = encoded(rows)
            plain[name] = (codes.astype(np.float32) * scales.astype(np.float32)).astype(BF16)
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    write_checkpoint(tmp_path / "plain", plain, described)
    write_checkpoint(tmp_path / "fp8", stored, {**described, **encodings()["fp8-dynamic"].config(Modules(["lm_head"]))})

    def logits(folder: str, **options: Any) -> torch.Tensor:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True, **options
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        with torch.no_grad():
            result: torch.Tensor = model.eval()(torch.arange(48)[None] * 7 % 128).logits.float()
        for name in plain:  # the first forward has decompressed them
            assert model.get_parameter(name).detach().float().numpy().tobytes() == plain[name].astype(np.float32).tobytes(), (
                name
            )
        return result

    expected = logits("plain")
    dequantised = transformers.CompressedTensorsConfig(dequantize=True)
    assert torch.equal(logits("fp8", quantization_config=dequantised), expected)
    # As it is meant to run, the activations are rounded to FP8 too: a few percent in the norm.
    difference = float((logits("fp8") - expected).norm() / expected.norm())
    print(f"logits with FP8 activations: relative difference {difference:.4f}")
    assert 0 < difference < 0.1
