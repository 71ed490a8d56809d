"""compressed-tensors' formats as sources: what an encoding wrote is read back, and what is damaged or unknown is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.models.formats.test_codes import decoded
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._models.formats import encodings
from weightsmith._models.formats.config import config_entries
from weightsmith._plans import plan_from_json

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("fp8-block", "int8", "w4a16", "w8a16", "nvfp4a16", "mxfp4", "mxfp8")
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "dtype": "bfloat16"}
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
Q, K = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk")


def write_model(folder: Path, seed: int = 0, width: int = 128) -> Path:
    """Two layers of matrices of different sizes, and an embedding, a norm and a router."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, width), "model.norm.weight": (width,)}
    for i in range(2):
        shapes |= {f"model.layers.{i}.{part}.weight": (160 + 32 * k, width) for k, part in enumerate(PARTS)}
        shapes[f"model.layers.{i}.mlp.gate.weight"] = (4, width)
    tensors = {name: (rng.standard_normal(shape) * (1 + k)).astype(BF16) for k, (name, shape) in enumerate(shapes.items())}
    return write_checkpoint(folder, tensors, CONFIG)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `m`, and one for each format in a folder of its name."""
    folder = tmp_path_factory.mktemp("scaled")
    write_model(folder / "m")
    for name in FORMATS:
        weightsmith.quantize(folder / "m", folder / name, name, progress=False, fsync=False, card=False)
    return folder


def read(folder: Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as opened:
        return {name: opened.read(name) for name in opened.specs}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_what_was_quantised_is_read_as_the_format_defines_it(name: str, models: Path, tmp_path: Path) -> None:
    plain, weights = read(models / "m"), read(models / name)
    assert list(weights) == list(plain)
    joined = {tensor: np.abs(array.astype(np.float32)).max() for tensor, array in plain.items()}
    for i in range(2):
        for one, other in (("self_attn.q_proj", "self_attn.k_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            both = [f"model.layers.{i}.{part}.weight" for part in (one, other)]
            joined |= dict.fromkeys(both, max(joined[tensor] for tensor in both))
    for tensor, array in weights.items():
        if array.dtype != np.float32:
            np.testing.assert_array_equal(array, plain[tensor], tensor)
            continue
        expected, _ = decoded(name, plain[tensor].astype(np.float32), "BF16", joined[tensor])
        np.testing.assert_allclose(array, expected, rtol=2.0**-23, err_msg=tensor)
    assert sum(array.dtype == np.float32 for array in weights.values()) == 2 * len(PARTS)
    weightsmith.dequantize(models / name, tmp_path / "plain", progress=False, fsync=False)
    for tensor, array in read(tmp_path / "plain").items():
        np.testing.assert_array_equal(array, weights[tensor].astype(BF16), tensor)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config == {**CONFIG, "torch_dtype": "bfloat16"} or config == CONFIG
    weightsmith.verify(models / name)


@pytest.mark.parametrize("name", FORMATS)
def test_any_range_of_bytes_is_the_same(name: str, models: Path) -> None:
    rng = np.random.default_rng(0)
    with weightsmith.open_checkpoint(models / name) as opened:
        whole = opened.read(K).reshape(-1).view(np.uint8)
        for _ in range(20):
            start, end = sorted(int(n) for n in rng.integers(0, whole.size, 2))
            out = np.zeros(end - start, np.uint8)
            opened.source.read_into(K, start, out)
            np.testing.assert_array_equal(out, whole[start:end])


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", [*FORMATS, "mlx-4bit"])
def test_a_merge_stored_in_a_format_is_the_merge_and_then_the_format(name: str, models: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", seed=1)
    ties = {
        "merge_method": "ties",
        "base_model": str(models / "m"),
        "models": [{"model": str(tmp_path / "other"), "parameters": {"weight": 0.7, "density": 0.5}}],
    }
    weightsmith.merge(ties, tmp_path / "once", quantize=name, progress=False, fsync=False, threads=2)
    weightsmith.merge(ties, tmp_path / "merged", progress=False, fsync=False)
    weightsmith.quantize(tmp_path / "merged", tmp_path / "then", name, progress=False, fsync=False, threads=1)
    once = (tmp_path / "once" / "model.safetensors").read_bytes()
    assert once == (tmp_path / "then" / "model.safetensors").read_bytes()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("once", "then")]
    assert configs[0] == configs[1]
    assert config_entries(configs[0])


def test_a_plan_in_parts_and_from_json_has_the_same_global_scales(models: Path, tmp_path: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": str(models / "m")}]}
    plan = plan_from_json(json.loads(json.dumps(weightsmith.plan(recipe, quantize="nvfp4a16").to_json())))
    weightsmith.run(plan, tmp_path / "q", part=(1, 2), progress=False, fsync=False)
    weightsmith.run(plan, tmp_path / "q", part=(2, 2), progress=False, fsync=False)
    weightsmith.run(plan, tmp_path / "q", progress=False, fsync=False)
    assert (tmp_path / "q/model.safetensors").read_bytes() == (models / "nvfp4a16/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("products", "message"),
    [
        (lambda first: [], "needs"),
        (lambda first: [first | {"settings": {"sets": [["x"]]}}], "not a partition"),
        (lambda first: [first | {"settings": {"sets": 3}}], "not lists of names"),
    ],
)
def test_a_plan_without_its_global_scales_is_refused(products: Any, message: str, models: Path, tmp_path: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": str(models / "m")}]}
    data = weightsmith.plan(recipe, quantize="nvfp4a16").to_json()
    data["products"][:1] = products(data["products"][0])
    with pytest.raises(weightsmith.WeightsmithError, match=message):
        weightsmith.run(plan_from_json(data), tmp_path / "bad", progress=False)


def damaged(models: Path, folder: Path, name: str, change: Any) -> Path:
    """A model in a format whose tensors and config were changed: change(tensors, weights entry of config.json)."""
    with weightsmith.open_checkpoint(models / name, raw=True) as opened:
        tensors = {tensor: opened.read(tensor) for tensor in opened.specs}
        config = json.loads((models / name / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    change(tensors, group["weights"])
    return write_checkpoint(folder, tensors, config)


def put(name: str, value: Any) -> Any:
    return lambda tensors, weights: tensors.update({f"{Q.removesuffix('.weight')}.{name}": value})


def drop(name: str) -> Any:
    return lambda tensors, weights: tensors.pop(f"{Q.removesuffix('.weight')}.{name}")


def say(**values: Any) -> Any:
    return lambda tensors, weights: weights.update(values)


@pytest.mark.parametrize(
    ("name", "change", "kind", "message"),
    [
        ("w4a16", drop("weight_scale"), FormatError, "has no scale"),
        ("w4a16", drop("weight_shape"), FormatError, r"weight_shape' is missing, .* need it to be \[2\] I64"),
        ("w4a16", drop("weight_packed"), FormatError, "weight_scale' has no quantised weight"),
        ("w4a16", put("weight_shape", np.zeros(3, np.int64)), FormatError, r"weight_shape' is \[3\] I64"),
        ("w4a16", put("weight_packed", np.zeros((160, 40), np.int32)), FormatError, r"its blocks need \[160, 3\]"),
        ("w4a16", put("weight_g_idx", np.zeros(127, np.int32)), FormatError, r"weight_g_idx' is \[127\] I32"),
        ("w4a16", put("weight_zero_point", np.zeros((20, 1), np.int32)), Unsupported, "weight_zero_point' is part of"),
        ("w4a16", say(symmetric=False), FormatError, r"weight_zero_point' is missing, .* need it to be \[40, 1\] I32"),
        ("w4a16", say(symmetric=False, strategy="tensor"), Unsupported, "symmetric False"),
        ("int8", say(symmetric=False), Unsupported, "int-quantized weights with symmetric False"),
        *(("w4a16", say(num_bits=n), Unsupported, f"num_bits {n} are not read, only num_bits 1 and 2 and") for n in (0, 9)),
        ("w4a16", say(group_size=0), FormatError, "not a positive integer"),
        ("w4a16", say(group_size=True), FormatError, "not a positive integer"),
        ("w4a16", say(type="float"), Unsupported, "type 'float'"),
        ("w4a16", say(num_bits=[4]), Unsupported, "num_bits"),
        ("int8", put("weight_scale", np.ones((7, 1), BF16)), FormatError, r"is \[7, 1\], and its blocks need \[160, 1\]"),
        ("nvfp4a16", drop("weight_global_scale"), FormatError, "weight_global_scale' is missing"),
        ("nvfp4a16", put("weight_global_scale", np.ones(2, np.float32)), FormatError, r"is \[2\] F32"),
        ("nvfp4a16", put("weight_scale", np.ones((160, 8), BF16)), Unsupported, "is BF16, and only F8_E4M3 are read"),
        ("mxfp4", put("weight_scale", np.ones((160, 4), BF16)), Unsupported, "is BF16, and only U8 are read"),
    ],
)  # fmt: skip
def test_what_is_damaged_or_not_read_is_one_error(
    name: str, change: Any, kind: type[Exception], message: str, models: Path, tmp_path: Path
) -> None:
    model = damaged(models, tmp_path / "bad", name, change)
    with pytest.raises(kind, match=message):
        weightsmith.open_checkpoint(model)


def test_a_stored_shape_that_is_not_that_of_the_codes(models: Path, tmp_path: Path) -> None:
    model = damaged(models, tmp_path / "bad", "w4a16", put("weight_shape", np.array([160, 127])))
    with weightsmith.open_checkpoint(model) as opened:
        with pytest.raises(FormatError, match=r"is \[160, 127\], .* \[160, 128\]") as caught:
            opened.read(Q)
    assert str(model) in caught.value.finding.where


def test_scales_without_a_value_are_errors_when_they_are_quantised_again(models: Path, tmp_path: Path) -> None:
    for name, change, value in (
        ("mxfp4", put("weight_scale", np.full((160, 4), 255, np.uint8)), "nan"),
        ("nvfp4a16", put("weight_global_scale", np.zeros(1, np.float32)), "(nan|-?inf)"),
    ):
        model = damaged(models, tmp_path / name, name, change)
        with pytest.raises(weightsmith.NonFinite, match=f"is {value}"):
            weightsmith.quantize(model, tmp_path / f"{name}-int8", "int8", progress=False)


# ---- codes with zero points


def write_asymmetric(
    folder: Path, bits: int, group: int | None, rows: int = 163
) -> tuple[Path, dict[str, np.ndarray], dict[str, Any]]:
    """A checkpoint of one matrix; its tensors, and its entry of config.json."""
    rng, cols = np.random.default_rng(bits), 192
    groups = 1 if group is None else cols // group

    def packed(codes: np.ndarray) -> np.ndarray:
        """Codes [n, m] → int32 [n, words], the first in the lowest bits."""
        per_word = 32 // bits
        padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).astype(np.uint32).reshape(len(codes), -1, per_word)
        return np.bitwise_or.reduce(padded << np.arange(0, 32, bits, dtype=np.uint32), axis=2).view(np.int32)

    codes, zeros = rng.integers(0, 1 << bits, (rows, cols)), rng.integers(0, 1 << bits, (rows, groups))
    scales = rng.uniform(0.001, 0.02, (rows, groups)).astype(BF16)
    tensors = {
        "weight_packed": packed(codes),
        "weight_scale": scales,
        "weight_shape": np.array([rows, cols]),
        "weight_zero_point": np.ascontiguousarray(packed(zeros.T).T),
    }
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "dynamic": False, **strategy}
    entry = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": weights}}}
    stored = {f"{Q.removesuffix('weight')}{name}": array for name, array in tensors.items()}
    plain = (codes - zeros.repeat(cols // groups, 1)).astype(np.float32) * scales.astype(np.float32).repeat(cols // groups, 1)
    write_checkpoint(folder, stored, {**CONFIG, "quantization_config": entry})
    return folder, {**tensors, "plain": plain}, weights


@pytest.mark.parametrize("group", [None, 64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [160, 163], ids=["words filled", "last word not filled"])
def test_zero_points_are_subtracted(rows: int, bits: int, group: int | None, tmp_path: Path) -> None:
    model, tensors, _ = write_asymmetric(tmp_path / "m", bits, group, rows)
    with weightsmith.open_checkpoint(model) as opened:
        np.testing.assert_array_equal(opened.read(Q), tensors["plain"])
        whole = tensors["plain"].reshape(-1).view(np.uint8)
        for start in range(0, whole.size, 9001):
            out = np.zeros(min(7001, whole.size - start), np.uint8)
            opened.source.read_into(Q, start, out)
            np.testing.assert_array_equal(out, whole[start : start + out.size])


@pytest.mark.parametrize("group", [None, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_subtracts_the_same_zero_points(bits: int, group: int | None, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    _, tensors, weights = write_asymmetric(tmp_path / "m", bits, group)
    plain = tensors.pop("plain")
    tensors["weight_scale"] = tensors["weight_scale"].astype(np.float32)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {name: torch.tensor(array) for name, array in tensors.items()}
    back = BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)["weight"]
    np.testing.assert_array_equal(back.numpy(), plain)


# ---- groups


def test_the_group_is_the_largest_that_stores_the_most_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "m", width=192)
    quantised = weightsmith.quantize(tmp_path / "m", tmp_path / "q", "w4a16", progress=False, fsync=False)
    assert quantised.plan.encodings == ("w4a16-g64",)
    assert "groups of 64 are used" in quantised.warnings[0].what
    entry = (quantised.plan.config or {})["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert entry["group_size"] == 64
    with pytest.raises(PlanError, match="w4a16 has groups of 32, 64, 128, not of 48"):
        weightsmith.quantize(tmp_path / "m", tmp_path / "q2", "w4a16", group_size=48, progress=False)
    with pytest.raises(PlanError, match="its width 192 is not a multiple of 128"):
        weightsmith.quantize(tmp_path / "m", tmp_path / "q2", "w4a16", group_size=128, progress=False)


def test_weights_of_other_widths_are_stored_as_they_are_with_a_warning(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{i}.mlp.{p}_proj.weight": np.ones((8, w), BF16) for i in range(2) for p, w in (("up", 64), ("down", 40))
    }
    write_checkpoint(tmp_path / "m", tensors, CONFIG)
    quantised = weightsmith.quantize(tmp_path / "m", tmp_path / "q", "mxfp4", progress=False, fsync=False)
    (warning,) = quantised.warnings
    assert warning.what == "weights stored as they are: 2; its width 40 is not a multiple of 32"
    assert r"re:.*\.mlp\.down_proj$" in (quantised.plan.config or {})["quantization_config"]["ignore"]


def test_mlx_quantises_the_vocabulary_too(models: Path, tmp_path: Path) -> None:
    quantised = weightsmith.quantize(models / "m", tmp_path / "q", "mlx-4bit", progress=False, fsync=False)
    stored = {step.out.name for step in quantised.plan.steps if step.encoding != "plain"}
    assert "model.embed_tokens.weight" in stored
    assert "model.layers.0.mlp.gate.weight" not in stored
    assert (quantised.plan.config or {})["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert set(encodings()) >= set(quantised.plan.encodings)


# ---- transformers


MISREAD = ("fp8-block", "int8", "nvfp4a16", "mxfp8")
"""Formats whose experts transformers cannot read."""


def write_transformer(folder: Path, kind: str, **settings: Any) -> Path:
    """A tiny model of transformers. Groups and blocks of 128 do not divide the width of one of its weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 67, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes | heads | settings)
    getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["untied", "tied", "experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers") / request.param
    if request.param == "experts":
        return write_transformer(folder, "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)
    return write_transformer(folder, "Llama", tie_word_embeddings=request.param == "tied")


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # compressed-tensors warns of rows that are no multiple of a block
@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("untied", name) for name in ("fp8-dynamic", *FORMATS)),
        ("tied", "w4a16"),
        *(("experts", name) for name in ("fp8-dynamic", *MISREAD)),
    ],
    indirect=["model"],
)
def test_transformers_loads_the_weights_that_we_read(name: str, model: Path, tmp_path: Path) -> None:
    """Every weight is ours, and it runs; without the list of ignored modules a head would be missing its scales."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    import transformers

    quantised = weightsmith.quantize(model, tmp_path / "q", name, progress=False, fsync=False)
    warned = [warning.what for warning in quantised.warnings if "transformers" in warning.what]
    if model.name == "experts" and name in MISREAD:
        assert warned
        return
    assert not warned

    def load(**options: Any) -> Any:
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True, **options
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        return loaded.eval()

    dequantised = load(quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    weightsmith.dequantize(tmp_path / "q", tmp_path / "plain", progress=False, fsync=False)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
    for tensor, values in ours.state_dict().items():
        assert torch.equal(dequantised.state_dict()[tensor], values), tensor
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected, actual = ours(tokens).logits, load()(tokens).logits
    rounded = name in ("fp8-dynamic", "fp8-block", "int8", "mxfp8")  # activations too
    assert (actual - expected).norm() <= (0.1 if rounded else 0) * expected.norm()


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MISREAD)
def test_transformers_does_not_read_these_experts(name: str, tmp_path: Path) -> None:
    """If this fails, transformers reads them now: take back the warning."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import transformers

    source = write_transformer(tmp_path / "m", "Qwen3Moe", num_experts=4, moe_intermediate_size=256)
    weightsmith.quantize(source, tmp_path / "q", name, progress=False, fsync=False)

    def experts(folder: Path, **options: Any) -> Any:
        state = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).state_dict()
        return state["model.layers.0.mlp.experts.down_proj"]

    dequantised = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    if name == "nvfp4a16":
        assert experts(tmp_path / "q", **dequantised).norm() > 10 * experts(source).norm()
    else:
        with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
            experts(tmp_path / "q", **dequantised)
