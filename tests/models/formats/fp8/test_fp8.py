"""FP8 checkpoints as inputs: what config.json and the headers say, and the numbers that come out."""

from __future__ import annotations

import copy
import itertools
import tracemalloc
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import weightsmith
from tests import plan_help
from tests.mini import NUMPY, write_checkpoint
from tests.plan_help import prepare
from weightsmith._base.errors import FormatError, NotFound, ParameterError, PlanError, Unsupported
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._engine.reader import Reader
from weightsmith._engine.resources import ALIGNED_BYTES, Resources
from weightsmith._engine.results import Results
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats import compressed_tensors, fp8
from weightsmith._models.formats.decoded import CHUNK_ELEMENTS, DecodedTensors
from weightsmith._models.formats.scaled import ScaledWeight
from weightsmith._planning.planner.reopen import reopen
from weightsmith.abc.stored import Wrapped
from weightsmith.abc.tensors import Tensors
from weightsmith.testing import SourceCase, SourceTests

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "observer": "minmax", "group_size": None}


class Stored:
    """A source of arrays in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.specs = {name: TensorSpec(name, NUMPY[a.dtype], a.shape) for name, a in arrays.items()}
        self.identity, self.state = "who", "when"
        self.paths = (Path("model.safetensors"),)
        self.calls: list[str] = []

    def read_into(self, name: str, start_byte: int, out: memoryview | np.ndarray) -> None:
        raw = self.arrays[name].reshape(-1).view(np.uint8)
        target = np.frombuffer(out, np.uint8)
        assert 0 <= start_byte <= start_byte + target.size <= raw.size
        target[:] = raw[start_byte : start_byte + target.size]

    def location(self, name: str) -> tuple[int, int] | None:
        return 3, list(self.arrays).index(name)

    def preferred_rows(self, name: str) -> int:
        return 5

    def natural_dtype(self, name: str) -> DType:
        return self.specs[name].dtype

    def check_unchanged(self) -> None:
        self.calls.append("check_unchanged")

    def close(self) -> None:
        self.calls.append("close")


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' entry of config.json."""
    group = {"targets": ["Linear"], "weights": {**EIGHT_BITS, "strategy": strategy, **weights}, "format": "float-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"FP8": group},
        "ignore": ["lm_head"],
        "transform_config": {},
        "kv_cache_scheme": None,
    }


def config_of(entry: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    return {"hidden_size": 8, "dtype": "bfloat16", "quantization_config": copy.deepcopy(entry), **keys}


def codes_of(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Any codes but NaN."""
    codes = np.random.default_rng(seed).integers(0, 255, (rows, cols)).astype(np.uint8)
    return np.where(codes & 0x7F == 0x7F, np.uint8(0), codes).view(E4M3)


def scales_of(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(7).standard_normal(shape) * 0.01).astype(dtype)


FORMATS = {"fp8": fp8.FORMAT, "compressed-tensors": compressed_tensors.FORMAT}


def wrapped(entry: Mapping[str, Any], stored: Any, **keys: Any) -> Wrapped:
    """stored: a source, or arrays by name."""
    source = Stored(stored) if isinstance(stored, dict) else stored
    return FORMATS[entry["quant_method"]].read(source, config_of(entry, **keys), "m")


def weights_of(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray], **keys: Any) -> list[ScaledWeight]:
    source = wrapped(entry, arrays, **keys).source
    assert isinstance(source, DecodedTensors)
    return [weight for weight in source._weights.values() if isinstance(weight, ScaledWeight)]


def source_of(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Tensors:
    return wrapped(entry, arrays).source


def read(source: Tensors, name: str, start: int = 0, n: int | None = None) -> np.ndarray:
    """Bytes start … start + n of a tensor."""
    out = np.full(source.specs[name].nbytes - start if n is None else n, 0xAB, np.uint8)
    source.read_into(name, start, out)
    return out


def exact(codes: np.ndarray, scales: np.ndarray, high: int, wide: int) -> np.ndarray:
    """float32 [rows, cols]: the products in float64, rounded once."""
    i, j = np.indices(codes.shape)
    return (codes.astype(np.float64) * scales.astype(np.float64)[i // high, j // wide]).astype(np.float32)


BLOCK_ARRAYS = {
    "norm.weight": np.ones(8, BF16),
    "q.weight": codes_of(300, 200),
    "q.weight_scale_inv": scales_of(3, 2),
}

CASES = {
    "deepseek": (DEEPSEEK, (300, 200), (3, 2), "weight_scale_inv", (128, 128)),
    "deepseek-small": (DEEPSEEK, (64, 100), (1, 1), "weight_scale_inv", (64, 100)),
    "fp8-tensor": (
        {**DEEPSEEK, "weight_block_size": None, "activation_scheme": "static"},
        (9, 7),
        (),
        "weight_scale_inv",
        (9, 7),
    ),
    "tensor": (compressed("tensor"), (9, 7), (1,), "weight_scale", (9, 7)),
    "tensor-scalar": (compressed("tensor"), (9, 7), (), "weight_scale", (9, 7)),
    "channel": (compressed("channel"), (9, 7), (9, 1), "weight_scale", (1, 7)),
    "channel-vector": (compressed("channel"), (9, 7), (9,), "weight_scale", (1, 7)),
    "block": (compressed("block", block_structure=[16, 32]), (40, 70), (3, 3), "weight_scale", (16, 32)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_a_dequantised_weight_is_its_codes_times_the_scales(case: str, dtype: Any) -> None:
    entry, shape, grid, suffix, block = CASES[case]
    codes, scales = codes_of(*shape), scales_of(*grid, dtype=dtype)
    arrays = {"q.weight": codes, f"q.{suffix}": scales}
    source: Tensors = source_of(entry, arrays)
    assert weights_of(entry, arrays)[0].block == block
    assert {name: str(spec) for name, spec in source.specs.items()} == {"q.weight": f"q.weight {list(shape)} F32"}
    full = scales.reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    decoded = read(source, "q.weight").view(np.float32).reshape(shape)
    np.testing.assert_array_equal(decoded, exact(codes, full, *block))


@pytest.mark.long
@given(st.data())
def test_any_range_of_bytes_is_the_same(data: st.DataObject) -> None:
    source = source_of(DEEPSEEK, BLOCK_ARRAYS)
    whole = read(source, "q.weight")
    start = data.draw(st.integers(0, whole.size))
    n = data.draw(st.integers(0, whole.size - start))
    assert read(source, "q.weight", start, n).tobytes() == whole[start : start + n].tobytes()


@pytest.mark.parametrize(("rows", "cols"), [(700, 1000), (3, CHUNK_ELEMENTS + 77)])
def test_tensors_of_many_chunks(rows: int, cols: int) -> None:
    codes, scales = codes_of(rows, cols), scales_of(-(-rows // 128), -(-cols // 128))
    source = source_of(DEEPSEEK, {"q.weight": codes, "q.weight_scale_inv": scales})
    assert codes.size > 2 * CHUNK_ELEMENTS
    expected = exact(codes, scales, 128, 128).reshape(-1).view(np.uint8)
    assert read(source, "q.weight", 3, expected.size - 7).tobytes() == expected[3:-4].tobytes()


def test_memory_of_a_read_does_not_grow_with_the_tensor() -> None:
    arrays = {"q.weight": codes_of(4096, 1024), "q.weight_scale_inv": scales_of(32, 8)}
    source = source_of(DEEPSEEK, arrays)
    out = np.empty(4096 * 1024 * 4, np.uint8)
    source.read_into("q.weight", 0, out[:4096])  # compiles
    tracemalloc.start()
    try:
        source.read_into("q.weight", 0, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * CHUNK_ELEMENTS  # codes and float32, and not the 16 MB of the tensor


def test_what_is_not_fp8_is_the_other_sources() -> None:
    stored = Stored(BLOCK_ARRAYS)
    source: Tensors = wrapped(DEEPSEEK, stored).source
    assert list(source.specs) == ["norm.weight", "q.weight"]
    assert read(source, "norm.weight", 2, 6).tobytes() == BLOCK_ARRAYS["norm.weight"].tobytes()[2:8]
    assert (source.location("norm.weight"), source.location("q.weight")) == ((3, 0), None)
    assert (source.preferred_rows("norm.weight"), source.preferred_rows("q.weight")) == (5, 128)
    assert (source.natural_dtype("norm.weight").name, source.natural_dtype("q.weight").name) == ("BF16", "BF16")
    assert source.paths == stored.paths
    source.check_unchanged()
    source.close()
    assert stored.calls == ["check_unchanged", "close"]


@pytest.mark.parametrize("case", ["tensor", "channel"])
def test_rows_are_read_singly_where_blocks_are_not_tall(case: str) -> None:
    entry, shape, grid, suffix, _ = CASES[case]
    source = source_of(entry, {"q.weight": codes_of(*shape), f"q.{suffix}": scales_of(*grid)})
    assert source.preferred_rows("q.weight") == 1


def test_identity_and_state_follow_the_other_source_and_the_blocks() -> None:
    arrays = {"q.weight": codes_of(64, 64), "q.weight_scale": scales_of(2, 2)}
    by_32, by_40 = (compressed("block", block_structure=[side, side]) for side in (32, 40))
    stored, changed = Stored(arrays), Stored(arrays)
    changed.identity, changed.state = "other", "later"
    sources = [
        wrapped(by_32, stored).source,
        wrapped(by_40, stored).source,
        wrapped(by_32, changed).source,
    ]
    assert len({source.identity for source in sources} | {"who"}) == 4
    assert len({source.state for source in sources} | {"when"}) == 4
    assert wrapped(by_32, Stored(arrays)).source.identity == sources[0].identity


def test_reads_out_of_bounds_and_of_unknown_tensors() -> None:
    source = source_of(DEEPSEEK, BLOCK_ARRAYS)
    nbytes = 300 * 200 * 4
    for start, n in ((-4, 4), (nbytes - 3, 4), (nbytes + 1, 0)):
        with pytest.raises(ParameterError, match=r"not inside tensor 'q\.weight'"):
            read(source, "q.weight", start, n)
    for name in ("q.weight_scale_inv", "nothing"):
        with pytest.raises(NotFound, match=f"no tensor '{name}'"):
            source.read_into(name, 0, np.empty(4, np.uint8))
        with pytest.raises(NotFound):
            source.natural_dtype(name)


def test_nan_codes_and_scales_come_out_as_nan() -> None:
    arrays = {"q.weight": np.array([[0x7F, 0xFF, 0x30]], np.uint8).view(E4M3), "q.weight_scale": scales_of(1)}
    decoded = read(source_of(compressed("tensor"), arrays), "q.weight").view(np.float32)
    assert np.isnan(decoded).tolist() == [True, True, False]
    arrays["q.weight_scale"] = np.array([np.nan], np.float32)
    assert np.isnan(read(source_of(compressed("tensor"), arrays), "q.weight").view(np.float32)).all()


# --- what config.json and the headers say --------------------------------------------------------------------------------


def test_the_config_of_the_plain_model_and_the_dtype_it_is_written_as() -> None:
    opened = wrapped(DEEPSEEK, BLOCK_ARRAYS, text_config={"quantization_config": DEEPSEEK, "dtype": "float16", "layers": 2})
    assert opened.config == {"hidden_size": 8, "dtype": "bfloat16", "text_config": {"dtype": "float16", "layers": 2}}
    assert opened.notes == ()
    for config, dtype in (
        ({"dtype": "float16"}, "F16"),
        ({"torch_dtype": "float32", "dtype": None}, "F32"),
        ({"dtype": None, "text_config": {"dtype": "float16"}}, "F16"),
        ({"dtype": "float8_e4m3fn"}, "BF16"),
        ({"dtype": ["float16"]}, "BF16"),
        ({"dtype": None}, "BF16"),
    ):
        assert weights_of(DEEPSEEK, BLOCK_ARRAYS, **config)[0].natural_dtype.name == dtype


@pytest.mark.parametrize("path", [("text_config",), ("thinker_config", "text_config"), ("a", "b", "c", "d")])
def test_an_entry_in_a_sub_config_alone(path: tuple[str, ...], tmp_path: Path) -> None:
    nested: dict[str, Any] = {"quantization_config": DEEPSEEK, "layers": 2}
    plain: dict[str, Any] = {"layers": 2}
    for key in reversed(path):
        nested, plain = {key: nested}, {key: plain}
    with open_checkpoint(write_checkpoint(tmp_path, BLOCK_ARRAYS, nested)) as checkpoint:
        assert checkpoint.config == plain
        expected = read(wrapped(DEEPSEEK, BLOCK_ARRAYS).source, "q.weight")
        assert np.array_equal(checkpoint.read("q.weight").reshape(-1).view(np.uint8), expected)


def test_scales_of_activations_and_of_the_kv_cache_are_dropped_with_a_note() -> None:
    entry = compressed("tensor") | {"kv_cache_scheme": EIGHT_BITS}
    one = np.ones(1, np.float32)
    arrays = {
        "attn.k_proj.weight": codes_of(4, 4),
        "attn.k_proj.weight_scale": one,
        "attn.k_proj.input_scale": one,
        "attn.k_scale": one,
        "norm.weight": one,
    }
    opened = wrapped(entry, arrays)
    assert list(opened.source.specs) == ["attn.k_proj.weight", "norm.weight"]
    text = "\n".join(map(str, opened.notes))
    assert "KV cache's quantisation is dropped" in text
    assert "2 scale(s) of activations or of the KV cache are dropped" in text


def test_a_learned_scale_beside_a_plain_weight_is_a_tensor() -> None:
    arrays = {**BLOCK_ARRAYS, "z.weight": np.ones((2, 2), BF16), "z.weight_scale": np.ones(2, BF16)}
    assert "z.weight_scale" in source_of(DEEPSEEK, arrays).specs


def test_groups_may_have_different_structures() -> None:
    entry = compressed("channel")
    entry["config_groups"]["other"] = compressed("block", block_structure=[4, 4])["config_groups"]["FP8"]
    arrays = {
        "a.weight": codes_of(9, 8),
        "a.weight_scale": scales_of(9, 1),
        "b.weight": codes_of(9, 8),
        "b.weight_scale": scales_of(3, 2),
    }
    assert [weight.block for weight in weights_of(entry, arrays)] == [(1, 8), (4, 4)]


def changed(entry: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """The entry with one value of it changed."""
    result = copy.deepcopy(dict(entry))
    *parts, last = path.split("/")
    at: Any = result
    for part in parts:
        at = at[part]
    at[last] = value
    return result


CHANNEL = compressed("channel")
_W = "config_groups/FP8/weights"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (changed(DEEPSEEK, "fmt", "e3m4"), "fmt 'e3m4'"),
        (changed(DEEPSEEK, "expert_dtype", "int4"), "expert_dtype 'int4'"),
        (changed(CHANNEL, "quantization_status", "initialized"), "quantization_status 'initialized'"),
        (changed(CHANNEL, "transform_config", {"config_groups": {"u": {}}}), "transform_config"),
        (changed(CHANNEL, "sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config"),
        (changed(CHANNEL, "config_groups", {}), "without config_groups"),
        (changed(CHANNEL, "config_groups", {"FP8": ["Linear"]}), "not an object"),
        (changed(CHANNEL, "config_groups/FP8/format", "mxfp6-quantized"), "'mxfp6-quantized'"),
        (changed(CHANNEL, _W, 3), "not an object"),
        (changed(CHANNEL, _W + "/num_bits", 4), "num_bits 4"),
        (changed(CHANNEL, _W + "/num_bits", True), "num_bits True"),
        (changed(CHANNEL, _W + "/type", "int"), "type 'int'"),
        (changed(CHANNEL, _W + "/symmetric", False), "symmetric False"),
        (changed(CHANNEL, _W + "/dynamic", True), "dynamic True"),
        (changed(CHANNEL, _W + "/strategy", "attn_head"), "strategy 'attn_head'"),
    ],
)
def test_other_quantisations_are_refused_by_name(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported) as caught:
        wrapped(entry, BLOCK_ARRAYS)
    assert message in str(caught.value)
    assert "unquantised checkpoint" in str(caught.value)


def test_two_entries_that_differ_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"quantization_config and text_config\.quantization_config .* different"):
        wrapped(DEEPSEEK, BLOCK_ARRAYS, text_config={"quantization_config": CHANNEL})


@pytest.mark.parametrize(
    "block", [[128], [128, 0], [128, -1], [128, 1.5], [True, True], "128x128", 128, {"a": 1, "b": 2}, "ab"]
)
def test_block_sizes_are_two_positive_integers(block: object) -> None:
    with pytest.raises(FormatError, match="not two positive integers"):
        wrapped(DEEPSEEK | {"weight_block_size": block}, BLOCK_ARRAYS)


def test_huge_blocks_are_the_matrix() -> None:
    arrays = {"q.weight": codes_of(6, 5), "q.weight_scale_inv": scales_of(1, 1)}
    entry = DEEPSEEK | {"weight_block_size": [10**30, 2**63]}
    assert weights_of(entry, arrays)[0].block == (6, 5)
    decoded = read(source_of(entry, arrays), "q.weight").view(np.float32).reshape(6, 5)
    np.testing.assert_array_equal(decoded, exact(arrays["q.weight"], arrays["q.weight_scale_inv"], 6, 5))


def test_an_empty_matrix_has_no_scales() -> None:
    arrays = {"q.weight": codes_of(0, 256), "q.weight_scale_inv": scales_of(0, 2)}
    assert read(source_of(DEEPSEEK, arrays), "q.weight").size == 0


@pytest.mark.parametrize(
    ("arrays", "kind", "message"),
    [
        ({"q.weight": codes_of(4, 4)}, FormatError, "has no scale 'q.weight_scale_inv' or 'q.weight_scale'"),
        ({"q.weight_scale_inv": scales_of(1, 1), "q.weight": np.ones((4, 4), BF16)}, FormatError, "no tensor is F8_E4M3"),
        ({**BLOCK_ARRAYS, "q.weight_scale_inv": scales_of(2, 3)}, FormatError, r"is \[2, 3\], and its blocks need \[3, 2\]"),
        ({**BLOCK_ARRAYS, "q.weight_scale_inv": scales_of(6)}, FormatError, r"is \[6\], and its blocks need \[3, 2\]"),
        ({**BLOCK_ARRAYS, "q.weight_scale_inv": np.ones((3, 2), np.int8)}, Unsupported, "is I8, and only F32, BF16, F16"),
        ({**BLOCK_ARRAYS, "z.weight_scale_inv": scales_of(1, 1)}, FormatError, "'z.weight_scale_inv' has no quantised weight"),
        (
            {**BLOCK_ARRAYS, "z.weight": np.ones((2, 2), BF16), "z.weight_scale_inv": scales_of(1, 1)},
            FormatError,
            "'z.weight_scale_inv' has no quantised weight",
        ),
        ({**BLOCK_ARRAYS, "z.weight_scale": scales_of(1, 1)}, FormatError, "'z.weight_scale' has no quantised weight"),
        ({**BLOCK_ARRAYS, "z.weight_packed": np.ones((2, 2), np.int32)}, Unsupported, "config.json says nothing of such codes"),
        ({**BLOCK_ARRAYS, "z.weight_zero_point": scales_of(1)}, Unsupported, "'z.weight_zero_point' is part of a weight"),
        (
            {**BLOCK_ARRAYS, "z.weight": np.ones((2, 2), ml_dtypes.float8_e5m2)},
            Unsupported,
            "only matrices of F8_E4M3",
        ),
        ({**BLOCK_ARRAYS, "z.weight": codes_of(4, 4).reshape(4, 4, 1, 1)}, Unsupported, r"\[4, 4, 1, 1\] F8_E4M3; only mat"),
    ],
)
def test_tensors_that_do_not_fit_are_errors(arrays: dict[str, np.ndarray], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        wrapped(DEEPSEEK, arrays)


def test_a_scale_that_fits_two_structures_is_an_error() -> None:
    entry = compressed("block", block_structure=[4, 4])
    entry["config_groups"]["other"] = compressed("block", block_structure=[5, 4])["config_groups"]["FP8"]
    arrays = {"a.weight": codes_of(9, 8), "a.weight_scale": scales_of(2, 2)}  # 9 rows: three blocks of 4, two of 5
    assert weights_of(entry, arrays)[0].block == (5, 4)
    arrays = {"a.weight": codes_of(8, 8), "a.weight_scale": scales_of(2, 2)}
    with pytest.raises(FormatError, match=r"fits float8 in blocks of \[4, 4\] and float8 in .* \[5, 4\]"):
        wrapped(entry, arrays)


# --- other programs --------------------------------------------------------------------------------------------------------


def test_transformers_dequantises_a_block_checkpoint_to_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    config.tie_word_embeddings = False
    stored: dict[str, np.ndarray] = {}
    for seed, (name, tensor) in enumerate(transformers.LlamaForCausalLM(config).state_dict().items()):
        stored[name] = tensor.float().numpy().astype(BF16)
        if name.endswith("_proj.weight"):
            stored[name] = codes_of(*tensor.shape, seed=seed)
            stored[f"{name}_scale_inv"] = scales_of(tensor.shape[0] // 128, tensor.shape[1] // 128)
    full = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "quantization_config": DEEPSEEK}
    write_checkpoint(tmp_path / "m", stored, full)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        quantised = [name for name in checkpoint.specs if stored[name].dtype == E4M3]
        assert len(quantised) == 7
        for name in quantised:
            theirs = loaded.get_parameter(name).detach().float().numpy()
            np.testing.assert_array_equal(checkpoint.read(name).astype(BF16).astype(np.float32), theirs)


# --- as inputs -------------------------------------------------------------------------------------------------------------


class TestScaled(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        arrays = {
            "a.weight": codes_of(300, 70),
            "a.weight_scale_inv": scales_of(3, 1, dtype=BF16),
            "b.weight": codes_of(5, 200, seed=1),
            "b.weight_scale_inv": scales_of(1, 2),
            "norm": np.arange(5).astype(BF16),
        }
        write_checkpoint(tmp_path / "a", arrays, config_of(DEEPSEEK), max_shard_bytes=20_000)
        write_checkpoint(tmp_path / "b", {n: a for n, a in arrays.items() if n[0] != "b"}, config_of(DEEPSEEK))
        expected = {
            "a.weight": exact(arrays["a.weight"], arrays["a.weight_scale_inv"], 128, 128),
            "b.weight": exact(arrays["b.weight"], arrays["b.weight_scale_inv"], 128, 128),
            "norm": arrays["norm"],
        }
        return SourceCase(lambda: open_checkpoint(tmp_path / "a"), expected, lambda: open_checkpoint(tmp_path / "b"))


def fp8_model(folder: Path, seed: int, entry: Mapping[str, Any] = DEEPSEEK) -> tuple[Path, Path]:
    """A model with FP8 projections, and the same with every tensor as float32: each code times its scale, rounded once."""
    random = np.random.default_rng(seed)
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    inner, hidden = 300, 160
    parts = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8, hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (8, hidden)
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{layer}mlp.{part}_proj.weight": shape for part, shape in parts.items()}
    for name, shape in shapes.items():
        if not name.endswith("_proj.weight"):
            stored[name] = random.standard_normal(shape).astype(BF16)
            plain[name] = stored[name].astype(np.float32)
            continue
        high, wide = (128, 128) if entry is DEEPSEEK else (1, shape[1])
        codes = codes_of(*shape, seed=int(random.integers(1000)))
        scales = (random.standard_normal((-(-shape[0] // high), -(-shape[1] // wide))) * 0.01).astype(np.float32)
        stored |= {name: codes, f"{name}_scale_inv" if entry is DEEPSEEK else f"{name}_scale": scales}
        plain[name] = exact(codes, scales, high, wide)
    settings = {**plan_help.config(), "hidden_size": hidden, "intermediate_size": inner}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
    write_checkpoint(folder / "fp8", stored, {**settings, "dtype": "bfloat16", "quantization_config": dict(entry)})
    write_checkpoint(folder / "plain", plain, {**settings, "dtype": "float32"})
    return folder / "fp8", folder / "plain"


@pytest.mark.matrix("linear-*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "entry"), [("linear", compressed("channel")), ("ties", DEEPSEEK)], ids=["linear-channels", "ties-blocks"]
)
def test_a_merge_of_fp8_models_has_the_bytes_of_that_of_their_float32_twins(
    method: str, entry: Mapping[str, Any], tmp_path: Path
) -> None:
    """Float32, not bf16: inputs are merged as they are stored, and rounded to the output's dtype once, at the end."""
    pairs = [fp8_model(tmp_path / f"m{k}", k, entry) for k in range(2)]
    contents = []
    for out, models, dtype in (
        ("fp8", [pair[0] for pair in pairs], {}),
        ("plain", [pair[1] for pair in pairs], {"dtype": "bfloat16"}),
        ("mixed", [pairs[0][0], pairs[1][1]], {"dtype": "bfloat16"}),
    ):
        recipe: dict[str, Any] = {"merge_method": method, "models": [{"model": str(m)} for m in models], **dtype}
        recipe["parameters"] = {"weight": 0.5} | ({"density": 0.5} if method == "ties" else {})
        if method == "ties":
            recipe["base_model"] = str(models[0])
        result = weightsmith.merge(recipe, tmp_path / out, fsync=False)
        assert result.plan.config is not None
        assert result.plan.config["dtype"] == "bfloat16"
        assert "quantization_config" not in result.plan.config
        reopen(result.plan).close()
        contents.append((tmp_path / out / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] == contents[2]


def test_an_fp8_model_alone_is_written_as_bf16(tmp_path: Path) -> None:
    """Each code times its scale in float32, then rounded to bf16: what other programs that dequantise a checkpoint write."""
    fp8, plain = fp8_model(tmp_path / "m", 3)
    weightsmith.merge({"merge_method": "passthrough", "models": [{"model": str(fp8)}]}, tmp_path / "out", fsync=False)
    with open_checkpoint(tmp_path / "out") as checkpoint, open_checkpoint(plain) as expected:
        assert list(checkpoint.specs) == list(expected.specs)
        for name in checkpoint.specs:
            assert checkpoint.read(name).tobytes() == expected.read(name).astype(BF16).tobytes(), name


@pytest.mark.long
def test_a_mixture_of_fp8_models(tmp_path: Path) -> None:
    pairs = [fp8_model(tmp_path / f"m{k}", k) for k in range(3)]
    contents = []
    for out, which in (("fp8", 0), ("plain", 1)):
        base, *experts = (str(pair[which]) for pair in pairs)
        recipe = {"base_model": base, "gate_mode": "random", "dtype": "bfloat16"}
        weightsmith.moe({**recipe, "experts": [{"source_model": e} for e in experts]}, tmp_path / out, fsync=False)
        contents.append((tmp_path / out / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.long
@pytest.mark.parametrize(("cols", "without", "preferred"), [(8192, 32, 128), (3000, 84, 147), (512, 512, 512), (40_000, 6, 6)])
def test_tiles_have_the_rows_that_an_input_prefers_and_the_bytes_do_not_depend_on_it(
    cols: int, without: int, preferred: int, tmp_path: Path
) -> None:
    """Rows of a tile, rounded up to grains: of 8192 columns 8 rows are a grain, of 3000 columns 21."""
    n = max(140, 2 * preferred + 5)
    arrays = {"q.weight": codes_of(n, cols), "q.weight_scale_inv": scales_of(-(-n // 128), -(-cols // 128))}
    model = write_checkpoint(tmp_path / "m", arrays, config_of(DEEPSEEK, model_type="x"))
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model)}]}
    with prepare(recipe) as prepared:
        (step,) = prepared.plan.steps

        def rows(tile_bytes: int, aligned_bytes: int) -> int:
            resources = Resources(tile_bytes=tile_bytes, aligned_bytes=aligned_bytes)
            reader = Reader(prepared.plan, prepared.inputs, Results(prepared.plan), resources)
            cuts = reader.cuts(step)
            assert sum(cut.size for cut in cuts) == n * cols
            return cuts[1].start // cols

        assert rows(1 << 20, 0) == without
        assert rows(1 << 20, ALIGNED_BYTES) == preferred
        if cols == 8192:
            assert rows(5 << 20, 0) == 128  # whole blocks, and no more memory
    contents = []
    for k, options in enumerate(({}, {"threads": 1}, {"max_memory_bytes": 10**9})):
        weightsmith.merge(recipe, tmp_path / f"out{k}", fsync=False, **options)
        contents.append((tmp_path / f"out{k}" / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] == contents[2]


def test_a_memory_bound_leaves_the_tiles_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_checkpoint(
        tmp_path / "m", {"q.weight": codes_of(4, 4), "q.weight_scale_inv": scales_of(1, 1)}, config_of(DEEPSEEK)
    )
    alignments: list[int] = []
    original, names = Reader.__init__, signature(Reader.__init__)

    def init(self: Reader, *args: Any, **kwargs: Any) -> None:
        alignments.append(names.bind(self, *args, **kwargs).arguments["resources"].aligned_bytes)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Reader, "__init__", init)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model)}]}
    weightsmith.merge(recipe, tmp_path / "a", fsync=False)
    weightsmith.merge(recipe, tmp_path / "b", fsync=False, max_memory_bytes=10**9)
    assert alignments == [ALIGNED_BYTES, 0]


def test_what_other_encodings_hold_is_refused_when_a_recipe_names_them(tmp_path: Path) -> None:
    packed = {"q.weight_packed": np.zeros((4, 2), np.uint8), "q.weight_scale": scales_of(4, 1, dtype=E4M3)}
    for name, arrays, entry, message in (
        (
            "mxfp6",
            packed,
            changed(CHANNEL, "config_groups/FP8/format", "mxfp6-quantized"),
            "'mxfp6-quantized' is not",
        ),
        ("int8", {"q.weight": np.zeros((4, 4), np.int8)}, changed(CHANNEL, _W + "/type", "int"), "type 'int' are not read"),
        ("hqq", {"q.qweight": np.zeros((4, 4), np.int32)}, {"quant_method": "hqq", "bits": 4}, "is quantised"),
        ("bare", BLOCK_ARRAYS, None, "is quantised"),
    ):
        model = write_checkpoint(tmp_path / name, arrays, {"model_type": "x"} if entry is None else config_of(entry))
        with pytest.raises(PlanError, match=message):
            weightsmith.plan({"merge_method": "passthrough", "models": [{"model": str(model)}]})
        with open_checkpoint(model, raw=True) as checkpoint:
            assert list(checkpoint.specs) == sorted(arrays)
            assert checkpoint.quantised


def fp8_mixture(folder: Path, seed: int = 0) -> tuple[Path, dict[str, np.ndarray]]:
    """A mixture of four FP8 experts in one layer, and its tensors as they are stored."""
    random = np.random.default_rng(seed)
    block = "model.layers.0.mlp."
    tensors: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": random.standard_normal((8, 16)).astype(BF16),
        f"{block}gate.weight": random.standard_normal((4, 16)).astype(BF16),
    }
    for expert, (part, shape) in itertools.product(range(4), {"gate": (24, 16), "up": (24, 16), "down": (16, 24)}.items()):
        name = f"{block}experts.{expert}.{part}_proj.weight"
        tensors |= {name: codes_of(*shape, seed=int(random.integers(1000))), f"{name}_scale_inv": scales_of(1, 1) + expert}
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 16}
    config |= {"moe_intermediate_size": 24, "vocab_size": 8, "dtype": "bfloat16", "quantization_config": DEEPSEEK}
    return write_checkpoint(folder, tensors, config), tensors


def test_pruned_experts_keep_their_codes_and_scales(tmp_path: Path) -> None:
    model, before = fp8_mixture(tmp_path / "model")
    done = weightsmith.moe({"model": str(model), "prune_experts": {"keep": [2, 1]}}, tmp_path / "out", fsync=False)
    assert done.plan.config is not None
    assert done.plan.config["quantization_config"] == DEEPSEEK
    with reopen(done.plan) as again:
        assert again.inputs[0].quantised
    with open_checkpoint(tmp_path / "out", raw=True) as after:
        for new, old in enumerate([2, 1]):
            for part in ("gate_proj.weight", "gate_proj.weight_scale_inv", "down_proj.weight"):
                actual = after.read(f"model.layers.0.mlp.experts.{new}.{part}")
                expected = before[f"model.layers.0.mlp.experts.{old}.{part}"]
                assert (actual.dtype, actual.tobytes()) == (expected.dtype, expected.tobytes())


def test_merged_experts_are_averaged_as_numbers(tmp_path: Path) -> None:
    model, before = fp8_mixture(tmp_path / "model")
    recipe = {"model": str(model), "merge_experts": {"groups": [[0, 1], [2, 3]]}}
    done = weightsmith.moe(recipe, tmp_path / "out", fsync=False)
    assert done.plan.config is not None
    assert "quantization_config" not in done.plan.config
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(2)]
    values = [exact(before[name], before[f"{name}_scale_inv"], 128, 128).astype(np.float64) for name in names]
    with open_checkpoint(tmp_path / "out") as after:
        actual = after.read(names[0])
        assert actual.dtype == BF16
        np.testing.assert_array_equal(actual, (values[0] / 2 + values[1] / 2).astype(np.float32).astype(BF16))
