"""Weights in several encodings, plain weights, heads: config.json as compressed-tensors and vLLM read it; what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests import zoo
from tests.calibration_help import TEXT, save_model
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.mini import write_checkpoint
from tests.models.formats.compressed_tensors.test_reading import write_model, write_transformer
from weightsmith._base.errors import PlanError
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.structure.projections import ENGINES_FUSED

TYPES = ("self_attn=fp8-dynamic", r"layers\.1\.mlp\.down_proj=plain", r"layers\.1\.self_attn=mxfp8")


def quantise(source: Path, out: Path, name: str, *types: str, **options: Any) -> Any:
    settings = {"progress": False, "fsync": False, "card": False, **options}
    return weightsmith.quantize(source, out, name, tensor_types=types, **settings)


def entry(folder: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return stored


def read(folder: Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as opened:
        return {name: opened.read(name) for name in opened.specs}


def groups_of(stored: dict[str, Any], module: str) -> list[str]:
    """The formats of the groups that a module is a target of, as compressed-tensors and vLLM match: from the beginning."""
    return [
        group["format"]
        for group in stored["config_groups"].values()
        for target in group["targets"]
        if (re.match(target[3:], module) if target.startswith("re:") else target == module)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixed") / "m")


def test_each_weight_is_stored_as_its_type_says(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q", "nvfp4a16", *TYPES)
    stored = entry(tmp_path / "q")
    assert stored["format"] == "mixed-precision"
    expected = {
        "model.layers.0.self_attn.q_proj": ["float-quantized"],
        "model.layers.1.self_attn.q_proj": ["mxfp8-quantized"],
        "model.layers.0.mlp.up_proj": ["nvfp4-pack-quantized"],
        "model.layers.1.mlp.up_proj": ["nvfp4-pack-quantized"],
    }
    assert {module: groups_of(stored, module) for module in expected} == expected
    assert groups_of(stored, "language_model.model.layers.0.self_attn.q_proj") == ["float-quantized"]  # another prefix
    assert "model.layers.1.mlp.down_proj" in stored["ignore"]
    assert "Linear" not in [target for group in stored["config_groups"].values() for target in group["targets"]]


@pytest.mark.long
def test_a_mixture_is_read_as_its_parts_are(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q", "nvfp4a16", *TYPES)
    whole = {"plain": read(model)}
    for name in ("nvfp4a16", "fp8-dynamic", "mxfp8"):
        quantise(model, tmp_path / name, name)
        whole[name] = read(tmp_path / name)
    for tensor, values in read(tmp_path / "q").items():
        kind = "mxfp8" if "1.self_attn" in tensor else "fp8-dynamic" if "self_attn" in tensor else "nvfp4a16"
        kind = "plain" if "layers.1.mlp.down" in tensor else kind
        np.testing.assert_array_equal(values, whole[kind][tensor], err_msg=tensor)


def test_the_last_type_that_fits_wins_and_one_type_for_all_is_no_mixture(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q", "w4a16", "self_attn=int8", ".=fp8-dynamic")
    quantise(model, tmp_path / "whole", "fp8-dynamic")
    assert entry(tmp_path / "q") == entry(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "types", "message"),
    [
        ("fp8-dynamic", ["self_attn"], "'self_attn' is not REGEX=FORMAT"),
        ("fp8-dynamic", ["self_attn=gptq-4bit"], "'gptq-4bit' cannot be mixed with formats of compressed-tensors"),
        ("fp8-dynamic", ["self_attn=nvfp4a61"], "(did you mean"),
        ("fp8-dynamic", ["(=int8"], "is not a regular expression"),
        ("fp8-dynamic", ["norm=int8"], "no weight that is quantised has a name that matches norm"),
        ("fp8-static", ["mlp=nvfp4"], "fp8-static and nvfp4 need different scales of activations"),
        ("fp8-dynamic", ["self_attn=fp8-static", "mlp=nvfp4"], "nvfp4 and fp8-static need different scales"),
        ("mlx-4bit", ["mlp=gptq-8bit"], "not a setting of mlx-4bit"),
    ],
)
def test_types_that_cannot_be_are_refused(name: str, types: list[str], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(weightsmith.WeightsmithError) as caught:
        quantise(model, tmp_path / "q", name, *types)
    assert message in str(caught.value)
    assert not (tmp_path / "q").exists()


@pytest.mark.long
def test_parts_of_a_joined_matrix_in_two_formats_are_a_warning_or_an_error(model: Path, tmp_path: Path) -> None:
    types = ("q_proj=fp8-dynamic", "up_proj=plain")
    done = quantise(model, tmp_path / "q", "w4a16", *types)
    (warning,) = [warning for warning in done.warnings if "join weights" in warning.what]
    assert "gate_proj w4a16, up_proj plain (4 layers)" in warning.what
    with pytest.raises(PlanError, match="join weights"):
        quantise(model, tmp_path / "v", "w4a16", *types, engine="vllm")
    with pytest.raises(PlanError, match="does not load mxfp4"):
        quantise(model, tmp_path / "s", "fp8-dynamic", "self_attn=mxfp4", engine="sglang")


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name", "types"),
    [("Llama", "nvfp4a16", TYPES), ("Qwen3Moe", "nvfp4a16", (r"experts=fp8-dynamic",)), ("Llama", "w4a16", ())],
)
def test_transformers_loads_the_weights_that_we_read(kind: str, name: str, types: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    import transformers

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96} if kind == "Qwen3Moe" else {}
    widths = {"intermediate_size": 104} if name == "w4a16" else {}  # a scale for each row of down_proj
    source = write_transformer(tmp_path / "m", kind, num_hidden_layers=2, **experts, **widths)
    quantise(source, tmp_path / "q", name, *types)
    # dequantize=True of transformers 5.24 takes one group for all layers that are no experts; otherwise the library decides
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if experts else {}
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weightsmith.dequantize(tmp_path / "q", tmp_path / "plain", progress=False, fsync=False)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    with torch.no_grad():
        loaded(torch.arange(8)[None])
    for tensor, values in ours.state_dict().items():
        assert torch.equal(loaded.state_dict()[tensor], values), tensor


@pytest.mark.slow
def test_a_text_calibrates_integers_and_gives_scales_of_activations(tmp_path: Path) -> None:
    source = save_model(tmp_path / "m")
    text = {"calibration": "built-in", "calibration_rows": 2, "calibration_tokens": 32}
    done = quantise(source, tmp_path / "q", "w4a16", "self_attn=fp8-static", **text)
    assert any("are rounded to nearest" in warning.what for warning in done.warnings)
    rounded, calibrated = read(tmp_path / "q"), tmp_path / "calibrated"
    with weightsmith.open_checkpoint(tmp_path / "q") as opened:
        assert not any(name.endswith("input_scale") for name in opened.specs)
    done = quantise(source, calibrated, "w4a16", "self_attn=fp8-dynamic", "layers.0.mlp=plain", **text)
    assert not any("are rounded to nearest" in warning.what for warning in done.warnings)
    chosen = read(calibrated)
    up = "model.layers.1.mlp.up_proj.weight"
    assert not np.array_equal(chosen[up], rounded[up])


# ---- a scale for each row


def write_narrow(folder: Path) -> Path:
    """Two layers whose down_proj has a width of 104, which no group size divides, and one that words do not hold: 36."""
    widths = {"self_attn.q_proj": 64, "mlp.up_proj": 64, "mlp.down_proj": 104, "mlp.experts.0.down_proj": 104, "odd_proj": 36}
    rng = np.random.default_rng(0)
    shapes = {f"model.layers.{i}.{part}.weight": (48, width) for i in range(2) for part, width in widths.items()}
    tensors = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    return write_checkpoint(folder, tensors, {"model_type": "llama", "num_hidden_layers": 2})


def strategies_of(stored: dict[str, Any], module: str) -> list[str]:
    """The strategies of the groups that a module is a target of."""
    return [
        group["weights"]["strategy"]
        for group in stored["config_groups"].values()
        for target in group["targets"]
        if re.match(target[3:], module)
    ]


@pytest.mark.parametrize(("bits", "odd"), [(4, False), (8, True)])
def test_weights_that_no_group_divides_have_a_scale_for_each_row(bits: int, odd: bool, tmp_path: Path) -> None:
    name, source = f"w{bits}a16", write_narrow(tmp_path / "m")
    done = quantise(source, tmp_path / "q", name)
    (warning,) = [warning for warning in done.warnings if "one scale for each row" in warning.what]
    assert warning.what.startswith(f"{4 if odd else 2} weights")
    assert warning.what.endswith("no group size divides the width 104")
    stored = entry(tmp_path / "q")
    assert stored["format"] == "pack-quantized"
    assert strategies_of(stored, "model.layers.1.mlp.down_proj") == ["channel"]
    assert strategies_of(stored, "model.layers.0.mlp.up_proj") == ["group"]
    assert strategies_of(stored, "model.layers.0.mlp.experts.0.down_proj") == []  # one format for all parts of an expert
    assert strategies_of(stored, "model.layers.0.odd_proj") == (["channel"] if odd else [])
    weights = {tensor: values for tensor, values in read(source).items() if tensor.endswith("mlp.down_proj.weight")}
    decoded = read(tmp_path / "q")
    for tensor, values in weights.items():
        steps = np.abs(values).max(1, keepdims=True) / (2 ** (bits - 1) - 0.5)
        assert (np.abs(decoded[tensor] - values) <= (0.53 if bits == 4 else 1) * steps).all()
        assert not np.array_equal(decoded[tensor], values)


@pytest.mark.long
def test_a_group_size_or_a_type_says_otherwise(tmp_path: Path) -> None:
    source = write_narrow(tmp_path / "m")
    done = quantise(source, tmp_path / "size", "w4a16", group_size=64)
    assert [warning for warning in done.warnings if "weights stored as they are: 6" in warning.what]
    assert list(entry(tmp_path / "size")["config_groups"]) == ["group_0"]
    done = quantise(source, tmp_path / "plain", "w4a16", r"mlp\.down_proj=plain")
    assert not [warning for warning in done.warnings if "one scale for each row" in warning.what]
    assert list(entry(tmp_path / "plain")["config_groups"]) == ["group_0"]
    quantise(source, tmp_path / "all", "w4a16", "up_proj=w4a16-channel")
    assert strategies_of(entry(tmp_path / "all"), "model.layers.0.mlp.up_proj") == ["channel"]


def test_compressed_tensors_decodes_rows_with_one_scale(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    quantise(write_narrow(tmp_path / "m"), tmp_path / "q", "w4a16")
    config = QuantizationConfig.model_validate(entry(tmp_path / "q"))
    (scheme,) = [scheme for scheme in config.config_groups.values() if scheme.weights.strategy == "channel"]
    module, state = "model.layers.1.mlp.down_proj", load_file(tmp_path / "q" / "model.safetensors")
    parts = {name.removeprefix(f"{module}."): array for name, array in state.items() if name.startswith(f"{module}.")}
    parts["weight_scale"] = parts["weight_scale"].float()  # it multiplies in the dtype of the scales
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)["weight"]
    np.testing.assert_array_equal(theirs.numpy(), read(tmp_path / "q")[f"{module}.weight"])


@pytest.mark.long
def test_rows_with_one_scale_are_calibrated(tmp_path: Path) -> None:
    text = {"calibration": "built-in", "calibration_rows": 2, "calibration_tokens": 32}
    source, down = save_model(tmp_path / "m", "narrow"), "model.layers.1.mlp.down_proj.weight"
    quantise(source, tmp_path / "rounded", "w4a16")
    quantise(source, tmp_path / "q", "w4a16", **text)
    assert strategies_of(entry(tmp_path / "q"), down.removesuffix(".weight")) == ["channel"]
    assert not np.array_equal(read(tmp_path / "rounded")[down], read(tmp_path / "q")[down])


# ---- the head


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind"), [("w4a16", "w8a16"), ("w4a16", "w4a16-g64"), ("fp8-dynamic", "w8a16")])
def test_transformers_loads_a_head_that_is_asked_for(name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    import transformers

    source = write_transformer(tmp_path / "m", "Llama", num_hidden_layers=2, tie_word_embeddings=False)
    quantise(source, tmp_path / "q", name, f"lm_head={kind}")
    stored = entry(tmp_path / "q")
    assert not any("lm_head" in ignored for ignored in stored["ignore"])
    assert [group["format"] for group in stored["config_groups"].values() if r"re:(.*\.)?lm_head$" in group["targets"]] == [
        "pack-quantized"
    ]
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weightsmith.dequantize(tmp_path / "q", tmp_path / "plain", progress=False, fsync=False)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    with torch.no_grad():
        loaded(torch.arange(8)[None])
    for tensor, values in ours.state_dict().items():
        assert torch.equal(loaded.state_dict()[tensor], values), tensor
    assert not np.array_equal(read(source)["lm_head.weight"], read(tmp_path / "q")["lm_head.weight"])


def test_the_head_is_in_a_group_of_all_weights_too(tmp_path: Path) -> None:
    source = write_transformer(tmp_path / "m", "Llama", tie_word_embeddings=False)
    done = quantise(source, tmp_path / "q", "w4a16", "lm_head=w4a16-g64")
    assert not [warning for warning in done.warnings if "a head" in warning.what]
    stored = entry(tmp_path / "q")
    assert stored["ignore"] == []
    assert list(stored["config_groups"]) == ["group_0"]
    assert r"re:(.*\.)?lm_head$" in stored["config_groups"]["group_0"]["targets"]
    assert "Linear" not in stored["config_groups"]["group_0"]["targets"]
    quantise(source, tmp_path / "all", "w4a16", ".=fp8-dynamic")  # of the layers
    assert "lm_head" in entry(tmp_path / "all")["ignore"]
    np.testing.assert_array_equal(read(source)["lm_head.weight"], read(tmp_path / "all")["lm_head.weight"])


@pytest.mark.long
def test_heads_that_cannot_be_quantised_are_refused(tmp_path: Path) -> None:
    tied = write_transformer(tmp_path / "tied", "Llama", tie_word_embeddings=True)
    with pytest.raises(PlanError, match="the head is tied to the embedding"):
        quantise(tied, tmp_path / "q", "w4a16", "lm_head=w8a16")
    config = json.loads((tied / "config.json").read_text())
    source = write_transformer(tmp_path / "stored", "Llama", tie_word_embeddings=False)  # a copy, which loaders ignore
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="the head is tied to the embedding"):
        quantise(source, tmp_path / "q", "w4a16", "lm_head=w8a16")
    source = write_transformer(tmp_path / "m", "Llama", tie_word_embeddings=False, vocab_size=128, hidden_size=128)
    with pytest.raises(PlanError, match="which is not measured for lm_head"):
        quantise(source, tmp_path / "q", "fp8-static", "lm_head=fp8-static")
    for engine, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        with pytest.raises(PlanError, match=f"{title} does not load a head stored as fp8-block"):
            quantise(source, tmp_path / "q", "fp8-dynamic", "lm_head=fp8-block", engine=engine)
    quantise(source, tmp_path / "sglang", "fp8-dynamic", "lm_head=fp8-dynamic", engine="sglang")
    done = quantise(source, tmp_path / "blocks", "fp8-dynamic", "lm_head=fp8-block")
    warned = [warning.what.split()[0] for warning in done.warnings if "a head stored as fp8-block" in warning.what]
    assert warned == ["vLLM", "SGLang"]


def looked_up(packed: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """All rows of an embedding as vLLM's kernel computes them (`_dequant_gather_kernel` of compressed_tensors_embedding.py)."""
    columns = np.arange(packed.shape[1] * 32 // bits)
    words = packed.view(np.uint32)[:, columns * bits // 32]
    codes = (words >> (columns * bits % 32).astype(np.uint32) & ((1 << bits) - 1)).astype(np.int64) - (1 << (bits - 1))
    group = len(columns) // scales.shape[1]
    return (codes * scales.astype(np.float32)[:, columns // group]).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "kind", "bits"), [("w4a16", "w8a16", 8), ("w4a16", "w4a16-g64", 4), ("fp8-dynamic", "w4a16-channel", 4)]
)
def test_vllm_and_compressed_tensors_decode_an_embedding_that_is_asked_for(
    name: str, kind: str, bits: int, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    source = write_transformer(tmp_path / "m", "Llama", num_hidden_layers=2, tie_word_embeddings=False)
    quantise(source, tmp_path / "q", name, f"embed_tokens={kind}")
    groups = QuantizationConfig.model_validate(entry(tmp_path / "q")).config_groups
    (scheme,) = [group for group in groups.values() if r"re:(.*\.)?embed_tokens$" in group.targets]
    state, module = load_file(tmp_path / "q" / "model.safetensors"), "model.embed_tokens."
    parts = {part.removeprefix(module): array for part, array in state.items() if part.startswith(module)}
    parts["weight_scale"] = parts["weight_scale"].float()  # it multiplies in the dtype of the scales
    ours = read(tmp_path / "q")["model.embed_tokens.weight"]
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)["weight"]
    np.testing.assert_array_equal(theirs.numpy(), ours)
    np.testing.assert_array_equal(looked_up(parts["weight_packed"].numpy(), parts["weight_scale"].numpy(), bits), ours)
    assert not np.array_equal(read(source)["model.embed_tokens.weight"], ours)


@pytest.mark.long
def test_embeddings_that_cannot_be_quantised_are_refused(tmp_path: Path) -> None:
    tied = write_transformer(tmp_path / "tied", "Llama", tie_word_embeddings=True)
    with pytest.raises(PlanError, match="the head is tied to the embedding"):
        quantise(tied, tmp_path / "q", "w4a16", "embed_tokens=w8a16")
    source = write_transformer(tmp_path / "m", "Llama", tie_word_embeddings=False, vocab_size=128, hidden_size=128)
    with pytest.raises(PlanError, match=r"no program looks up tokens in model.embed_tokens.weight stored as fp8-dynamic"):
        quantise(source, tmp_path / "q", "fp8-dynamic", "embed_tokens=fp8-dynamic")
    for engine, title in (("transformers", "transformers"), ("sglang", "SGLang")):
        with pytest.raises(PlanError, match=f"{title} does not load quantised embeddings"):
            quantise(source, tmp_path / "q", "fp8-dynamic", "embed_tokens=w8a16", engine=engine)
    done = quantise(source, tmp_path / "vllm", "fp8-dynamic", "embed_tokens=w8a16", engine="vllm")
    assert [warning.where for warning in done.warnings if "vLLM loads a quantised embedding" in warning.what] == [
        "model.embed_tokens.weight"
    ]
    done = quantise(source, tmp_path / "all", "w4a16", ".=w8a16")  # of the layers
    assert not [warning for warning in done.warnings if "embedding" in warning.what]


@pytest.mark.slow
def test_an_embedding_is_not_calibrated(tmp_path: Path) -> None:
    """Tokens enter it, and no activations."""
    text = {"calibration": "built-in", "calibration_rows": 2, "calibration_tokens": 32}
    source = save_model(tmp_path / "m")
    quantise(source, tmp_path / "rounded", "w4a16", "embed_tokens=w4a16-g64")
    quantise(source, tmp_path / "q", "w4a16", "embed_tokens=w4a16-g64", **text)
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(read(tmp_path / "rounded")[name], read(tmp_path / "q")[name])


@pytest.mark.parametrize(
    ("name", "types"), [("fp8-dynamic", ["embed_tokens=w4a16-g64"]), ("w4a16", ["layers=plain", "embed_tokens=w4a16-g64"])]
)
def test_a_text_for_an_embedding_alone_is_refused(name: str, types: list[str], tmp_path: Path) -> None:
    source = write_transformer(tmp_path / "m", "Llama", tie_word_embeddings=False)
    quantise(source, tmp_path / "q", name, *types)
    with pytest.raises(PlanError, match="reads no text without --kv-cache"):
        quantise(source, tmp_path / "text", name, *types, calibration="built-in")


def test_only_a_head_that_is_asked_for_is_warned_of(tmp_path: Path) -> None:
    source = write_transformer(tmp_path / "m", "Llama", tie_word_embeddings=False)
    done = quantise(source, tmp_path / "mlx", "mlx-4bit")
    assert not np.array_equal(read(source)["lm_head.weight"], read(tmp_path / "mlx")["lm_head.weight"])
    assert not [warning for warning in done.warnings if "a head" in warning.what]
    done = quantise(source, tmp_path / "plain", "w4a16", "lm_head=plain")
    assert not [warning for warning in done.warnings if "a head" in warning.what]


@pytest.mark.long
@pytest.mark.parametrize(("name", "head"), [("w4a16", "w4a16-g64"), ("fp8-dynamic", "w4a16-g64"), ("gptq-4bit", "gptq-4bit")])
def test_the_head_is_calibrated_for_what_enters_it(name: str, head: str, tmp_path: Path) -> None:
    text = {"calibration": "built-in", "calibration_rows": 2, "calibration_tokens": 32}
    source = save_model(tmp_path / "m")
    quantise(source, tmp_path / "rounded", name, f"lm_head={head}")
    quantise(source, tmp_path / "q", name, f"lm_head={head}", **text)
    assert not np.array_equal(read(tmp_path / "rounded")["lm_head.weight"], read(tmp_path / "q")["lm_head.weight"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-moe"])
def test_nemotron_h_is_calibrated_with_its_head(name: str, tmp_path: Path) -> None:
    """Its files call the model that has the layers `backbone`, its last norm is `norm_f`, and its experts have no gate."""
    sizes = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64} if name.endswith("moe") else {}
    source = zoo.save(name, tmp_path / "m", 1, vocab_size=262, hidden_size=64, **{"intermediate_size": 64, **sizes})
    for file, content in tokenizer_files(BYTE_LEVEL).items():
        (source / file).write_bytes(content)
    (tmp_path / "t.txt").write_text(TEXT)
    text = {"calibration": str(tmp_path / "t.txt"), "calibration_rows": 16, "calibration_tokens": 64}
    quantise(source, tmp_path / "rounded", "w4a16", "lm_head=w4a16-g32", group_size=32)
    done = quantise(source, tmp_path / "q", "w4a16", "lm_head=w4a16-g32", group_size=32, **text)
    encoded = {step.out.name for step in done.plan.steps if step.out.name.endswith("weight_packed")}
    plain, rounded, chosen = (read(folder) for folder in (source, tmp_path / "rounded", tmp_path / "q"))
    matrices = {f"{weight.removesuffix('_packed')}" for weight in encoded}
    assert {"lm_head.weight", "backbone.layers.0.mixer.in_proj.weight"} <= matrices
    reached = [weight for weight in matrices if not np.array_equal(rounded[weight], chosen[weight])]
    assert {weight for weight in matrices if ".experts." not in weight} <= {*reached}
    assert all(np.abs(chosen[weight] - plain[weight]).max() > 0 for weight in matrices)
    models = [str(tmp_path / folder) for folder in ("rounded", "q")]
    scores = weightsmith.evaluate(*models, text=tmp_path / "t.txt", tokens=64, reference=str(source), progress=False)
    divergences = [total.divergence.value for total in scores.totals if total.divergence is not None]
    assert divergences[1] < divergences[0]


# ---- weights that engines join, in other architectures

QWEN35 = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
"""vLLM and SGLang join in_proj_qkv with in_proj_z, and in_proj_b with in_proj_a (`stacked_params_mapping` of qwen3_5.py)."""


def layers_of(shapes: dict[str, tuple[int, int]], folder: Path, config: dict[str, Any]) -> Path:
    random = np.random.default_rng(1)
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (64, 128), "lm_head.weight": (64, 128)}
    growing = enumerate(names.items(), 1)
    tensors = {name: (number * random.standard_normal(shape)).astype(ml_dtypes.bfloat16) for number, (name, shape) in growing}
    norms = {f"model.layers.{i}.input_layernorm.weight": np.ones(128, ml_dtypes.bfloat16) for i in range(2)}
    return write_checkpoint(folder, {**tensors, **norms, "model.norm.weight": np.ones(128, ml_dtypes.bfloat16)}, config)


LINEAR_ATTENTION = {
    "linear_attn.in_proj_qkv": (256, 128),
    "linear_attn.in_proj_z": (128, 128),
    "linear_attn.in_proj_b": (32, 128),
    "linear_attn.in_proj_a": (32, 128),
    "linear_attn.out_proj": (128, 128),
    "mlp.gate_proj": (128, 128),
    "mlp.up_proj": (128, 128),
    "mlp.down_proj": (128, 128),
}


@pytest.mark.parametrize(
    ("shapes", "joined"),
    [
        (LINEAR_ATTENTION, ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"]),
        ({f"linear_attn.{part}_proj": (128, 128) for part in "qkvgo"}, [f"linear_attn.{part}_proj" for part in "qkvg"]),
        (
            {f"self_attn.{part}_proj": (32 if part == "b" else 128, 128) for part in ("q", "k", "v", "b", "f_a", "o")},
            [f"self_attn.{part}_proj" for part in ("q", "k", "v", "b", "f_a")],
        ),
        ({"mlp.c_fc_0": (128, 128), "mlp.c_fc_1": (128, 128), "mlp.c_proj": (128, 128)}, ["mlp.c_fc_0", "mlp.c_fc_1"]),
    ],
    ids=["Qwen3.5", "OLMo Hybrid", "Kimi Linear", "EXAONE"],
)
def test_weights_that_vllm_joins_share_their_scale(shapes: dict[str, Any], joined: list[str], tmp_path: Path) -> None:
    """vLLM takes the largest global scale of a joined matrix for all of its parts."""
    source = layers_of(shapes, tmp_path / "m", QWEN35)
    quantise(source, tmp_path / "q", "nvfp4a16")
    with open_checkpoint(tmp_path / "q", raw=True) as model:
        for layer in range(2):
            scales = [model.read(f"model.layers.{layer}.{name}.weight_global_scale") for name in joined]
            assert len({scale.tobytes() for scale in scales}) == 1
    first = re.escape(joined[0])
    with pytest.raises(PlanError, match="join weights of a layer, and need these in one format"):
        quantise(source, tmp_path / "mixed", "nvfp4a16", rf"{first}\.=fp8-dynamic", engine="vllm")


@pytest.mark.parametrize("name", ["fp8-block", "w4a16", "nvfp4a16", "gptq-4bit", "awq-4bit"])
def test_gates_of_linear_attention_stay_plain(name: str, tmp_path: Path) -> None:
    """As joined matrices of a few rows, they fit no block of FP8 and no tile of Marlin."""
    source = layers_of(LINEAR_ATTENTION, tmp_path / "m", QWEN35)
    done = quantise(source, tmp_path / "q", name, engine="vllm")
    assert not [warning for warning in done.warnings if "in_proj" in warning.where]
    with open_checkpoint(tmp_path / "q", raw=True) as model:
        kinds = [model.specs[f"model.layers.1.linear_attn.in_proj_{part}.weight"].dtype.name for part in "ab"]
        assert kinds == ["BF16", "BF16"]
        z = "model.layers.1.linear_attn.in_proj_z.weight"
        assert z not in model.specs or model.specs[z].dtype.name == "F8_E4M3"
    stored = entry(tmp_path / "q")
    parts = [f"model.layers.1.linear_attn.in_proj_{part}" for part in "ab"]
    if name == "gptq-4bit":  # SGLang looks for the joined module
        rules = [rule.removeprefix("-:") for rule in stored["dynamic"]]
        assert all(any(re.match(rule, module) for rule in rules) for module in [*parts, parts[0][:-1] + "ba"])
        assert not any(re.match(rule, "model.layers.1.linear_attn.in_proj_qkvz") for rule in rules)
    elif name == "awq-4bit":
        listed = stored["modules_to_not_convert"]
        assert all(any(rule in module for rule in listed) for module in [*parts, parts[0][:-1] + "ba"])
        assert not any(rule in "model.layers.1.linear_attn.in_proj_qkvz" for rule in listed)
    else:
        assert all(any(re.match(rule[3:], module) for rule in stored["ignore"] if rule[:3] == "re:") for module in parts)


def dtypes_in_layer(folder: Path, number: int, names: Iterable[str]) -> dict[str, str]:
    with open_checkpoint(folder, raw=True) as model:
        return {name: model.specs[f"model.layers.{number}.{name}.weight"].dtype.name for name in names}


def test_projections_of_mamba_are_named_for_vllm(tmp_path: Path) -> None:
    """`MambaMixer` of vLLM builds its layers without a quantisation."""
    shapes = {f"mamba.{name}": (128, 128) for name in ("in_proj", "x_proj", "dt_proj", "out_proj")}
    source = layers_of({**shapes, "feed_forward.up_proj": (128, 128)}, tmp_path / "m", {**QWEN35, "model_type": "jamba"})
    done = quantise(source, tmp_path / "q", "fp8-dynamic")
    warned = [warning for warning in done.warnings if "Mamba 1" in warning.what]
    assert [warning.where for warning in warned] == ["model.layers.0.mamba.in_proj.weight"]
    assert "vLLM" in warned[0].what
    assert "SGLang" not in warned[0].what
    assert dtypes_in_layer(tmp_path / "q", 1, shapes) == {
        "mamba.in_proj": "F8_E4M3",
        "mamba.x_proj": "BF16",
        "mamba.dt_proj": "BF16",
        "mamba.out_proj": "F8_E4M3",
    }
    with pytest.raises(PlanError, match="builds the layers of Mamba 1 without quantisation"):
        quantise(source, tmp_path / "no", "fp8-dynamic", engine="vllm")
    quantise(source, tmp_path / "vllm", "fp8-dynamic", "mamba=plain", engine="vllm")


def test_parts_of_an_indexer_that_engines_keep_plain_stay_plain(tmp_path: Path) -> None:
    """`wk_weights_proj` of DeepSeek V3.2 and GLM-5 has no quantisation in vLLM, whatever config.json says."""
    shapes = {f"self_attn.indexer.{name}": (128, 128) for name in ("wq_b", "wk", "weights_proj")}
    source = layers_of({**shapes, "self_attn.o_proj": (128, 128)}, tmp_path / "m", {**QWEN35, "model_type": "deepseek_v32"})
    quantise(source, tmp_path / "q", "fp8-dynamic")
    assert dtypes_in_layer(tmp_path / "q", 0, shapes) == {
        "self_attn.indexer.wq_b": "F8_E4M3",
        "self_attn.indexer.wk": "BF16",
        "self_attn.indexer.weights_proj": "BF16",
    }


@pytest.mark.parametrize("name", ["gptq-4bit", "awq-4bit"])
def test_fused_experts_are_plain_by_the_name_that_engines_give_them(name: str, tmp_path: Path) -> None:
    """vLLM and SGLang ask for `block_sparse_moe.experts`, in which they put GraniteMoE's `input_linear`."""
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2}
    source = write_transformer(tmp_path / "m", "GraniteMoe", **sizes, vocab_size=128)
    done = quantise(source, tmp_path / "q", name, group_size=32)
    stored, module = entry(tmp_path / "q"), "model.layers.1.block_sparse_moe.experts"
    if name == "awq-4bit":
        assert any(part in module for part in stored["modules_to_not_convert"])
        return
    assert any(re.match(rule.removeprefix("-:"), module) for rule in stored["dynamic"])
    assert [
        warning for warning in done.warnings if "SGLang" in warning.what and "loads all experts as quantised" in warning.what
    ]
    with pytest.raises(PlanError, match="loads all experts as quantised"):
        quantise(source, tmp_path / "no", name, group_size=32, engine="sglang")


# ---- SGLang


def sglang_scheme(stored: dict[str, Any], module: str, kind: str = "QKVParallelLinear") -> str | None:
    """The format that SGLang 0.5.23 finds for a module of a model without `packed_modules_mapping`; None: it is plain."""

    def is_named(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target[3:], module) is not None
        return target == module or module.endswith(f".{target}")

    if any(map(is_named, stored["ignore"])):
        return None
    for group in stored["config_groups"].values():
        if any(is_named(target) or target.lower() in kind.lower() for target in group["targets"]):
            return str(group["format"])
    raise ValueError(f"Unable to find matching target for {module}")


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (
            ["self_attn=fp8-dynamic"],
            {"self_attn.qkv_proj": "float-quantized", "mlp.gate_up_proj": "int-quantized", "mlp.down_proj": "int-quantized"},
        ),
        (["self_attn=plain"], {"self_attn.qkv_proj": None, "self_attn.o_proj": None, "mlp.gate_up_proj": "int-quantized"}),
        (["lm_head=int8"], {"self_attn.qkv_proj": "int-quantized", "mlp.gate_up_proj": "int-quantized"}),
        (
            [r"layers\.1\.self_attn=fp8-dynamic", r"layers\.0\.mlp=plain"],
            {"self_attn.qkv_proj": "int-quantized float-quantized", "mlp.gate_up_proj": "None int-quantized"},
        ),
    ],
)
def test_sglang_finds_the_modules_that_it_joins(types: list[str], expected: dict[str, str | None], tmp_path: Path) -> None:
    source = write_transformer(tmp_path / "m", "Llama", num_hidden_layers=2, tie_word_embeddings=False, vocab_size=128)
    quantise(source, tmp_path / "q", "int8", *types)
    stored = entry(tmp_path / "q")
    for module, formats in expected.items():
        layers = formats.split() if formats is not None and " " in formats else [str(formats)] * 2
        for number, format_ in enumerate(layers):
            assert str(sglang_scheme(stored, f"model.layers.{number}.{module}")) == format_, (number, module)
    parts = {"self_attn.qkv_proj": "q_proj", "mlp.gate_up_proj": "up_proj"}
    for module, part in parts.items():  # compressed-tensors and vLLM see the same for the parts
        for number in range(2):
            home = f"model.layers.{number}.{module.rpartition('.')[0]}"
            joined = sglang_scheme(stored, f"model.layers.{number}.{module}")
            assert sglang_scheme(stored, f"{home}.{part}", "Linear") == joined


# ---- decoders beside towers


def write_vision_model(folder: Path) -> Path:
    """A tiny Qwen3-VL, whose files have `model.language_model.layers`."""
    import torch
    import transformers

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4]}
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 128, "rope_scaling": rope}
    vision = {"hidden_size": 64, "depth": 2, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    ids = {f"{name}_token_id": 120 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    sections = {"text_config": text | heads, "vision_config": vision | {"deepstack_visual_indexes": [0]}}
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(**sections, **ids, tie_word_embeddings=False)
    transformers.Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_omni_model(folder: Path) -> Path:
    """Shaped like Qwen2.5-Omni, whose files have `thinker.model.layers`."""
    random = np.random.default_rng(0)
    parts = [*(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
    names = [f"thinker.model.layers.{number}.{part}" for number in range(3) for part in parts]
    names += ["thinker.model.embed_tokens", "thinker.lm_head", "thinker.visual.blocks.0.attn.proj"]
    tensors = {f"{name}.weight": random.standard_normal((128, 128)).astype(ml_dtypes.bfloat16) for name in names}
    tensors |= {f"thinker.model.layers.{i}.input_layernorm.weight": np.ones(128, ml_dtypes.bfloat16) for i in range(3)}
    text = {"num_hidden_layers": 3, "hidden_size": 128, "vocab_size": 128}
    config = {"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen2_5_omni_thinker", "text_config": text}}
    return write_checkpoint(folder, tensors, config)


HOMES = (
    (write_vision_model, "model.language_model.layers"),
    (write_vision_model, "language_model.model.layers"),
    (write_omni_model, "thinker.model.layers"),
    (write_omni_model, "language_model.model.layers"),
)
"""The layers of each model in transformers, and in vLLM and SGLang. vLLM renames Qwen2.5-Omni's (`hf_to_vllm_mapper`)."""


@pytest.mark.long
@pytest.mark.parametrize(("write", "home"), HOMES)
def test_a_layer_of_a_decoder_beside_a_tower_is_known_where_engines_have_it(
    write: Callable[[Path], Path], home: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "m")
    types = (r"layers\.0\.self_attn=fp8-dynamic",)
    quantise(source, tmp_path / "q", "w4a16", *types, group_size=32)
    stored = entry(tmp_path / "q")
    for number, kind in ((0, "float-quantized"), (1, "pack-quantized"), (2, "pack-quantized")):
        for name in ("q_proj", "qkv_proj", "o_proj"):
            assert groups_of(stored, f"{home}.{number}.self_attn.{name}") == [kind], (number, name)
        assert groups_of(stored, f"{home}.{number}.mlp.down_proj") == ["pack-quantized"]
    assert groups_of(stored, "model.visual.blocks.0.attn.proj") == []
    quantise(source, tmp_path / "g", "gptq-4bit", r"layers\.0\.self_attn=plain", group_size=32)
    rules = [rule.removeprefix("-:") for rule in entry(tmp_path / "g")["dynamic"]]
    for name in ("q_proj", "qkv_proj", "o_proj"):
        taken_out = [any(re.match(rule, f"{home}.{number}.self_attn.{name}") for rule in rules) for number in range(3)]
        assert taken_out == [True, False, False], name


# ---- GPTQ and AWQ

SIZES = {"vocab_size": 128, "hidden_size": 128}


def test_a_head_of_gptq_is_quantised_if_it_is_asked_for(tmp_path: Path) -> None:
    source = write_transformer(tmp_path / "m", "Llama", tie_word_embeddings=False, **SIZES)
    done = quantise(source, tmp_path / "q", "gptq-4bit", "lm_head=gptq-4bit", group_size=32)
    warned = [warning.what for warning in done.warnings if "a head" in warning.what]
    assert warned == [f"{name} is not known to load a head stored as gptq-4bit" for name in ("transformers", "ExLlamaV2")]
    stored = entry(tmp_path / "q")
    assert stored["lm_head"] is True
    assert not {"dynamic", "modules_in_block_to_quantize"} & set(stored)
    with open_checkpoint(tmp_path / "q", raw=True) as model:
        assert {name for name in model if name.startswith("lm_head")} == {
            f"lm_head.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
        }
    before, after = read(source)["lm_head.weight"].astype(np.float32), read(tmp_path / "q")["lm_head.weight"]
    assert 0 < np.linalg.norm(after - before) < 0.15 * np.linalg.norm(before)
    for engine in ("transformers", "exllamav2"):
        with pytest.raises(PlanError, match="not known to load a head stored as gptq-4bit"):
            quantise(source, tmp_path / "no", "gptq-4bit", "lm_head=gptq-4bit", group_size=32, engine=engine)
    quantise(source, tmp_path / "vllm", "gptq-4bit", "lm_head=gptq-4bit", group_size=32, engine="vllm")
    odd = write_transformer(tmp_path / "odd", "Llama", tie_word_embeddings=False, vocab_size=72, hidden_size=128)
    with pytest.raises(PlanError, match="vLLM loads a head stored as gptq-4bit if it has a multiple of 64 outputs, not 72"):
        quantise(odd, tmp_path / "no", "gptq-4bit", "lm_head=gptq-4bit", group_size=32, engine="vllm")


def gptq_kind_in_vllm(stored: dict[str, Any], module: str) -> bool:
    """Whether vLLM asks for codes of a module: no rule of `dynamic` takes it out, and the list has all parts of its name."""
    if any(re.match(rule.removeprefix("-:"), module) for rule in stored.get("dynamic", {})):
        return False
    (listed,) = stored.get("modules_in_block_to_quantize", [[""]])
    home, _, leaf = module.rpartition(".")
    parts = [f"{home}.{part}" for part in ENGINES_FUSED.get(leaf, [leaf])]
    kinds = {any(name in part for name in listed) for part in parts}
    assert len(kinds) == 1, (module, listed)
    return kinds.pop()


def test_plain_weights_of_gptq_and_its_head_are_named_for_vllm(tmp_path: Path) -> None:
    """`is_layer_gptq_quantized` of vLLM looks for an entry in the name of a module, the head's too; rules of `dynamic` are
    compared with the name of the joined module."""
    source = write_transformer(tmp_path / "m", "Llama", num_hidden_layers=2, tie_word_embeddings=False, **SIZES)
    types = (r"layers\.0\.self_attn=plain", r"layers\.1\.mlp=plain", "lm_head=gptq-8bit")
    quantise(source, tmp_path / "q", "gptq-8bit", *types, group_size=32)
    stored = entry(tmp_path / "q")
    with open_checkpoint(tmp_path / "q", raw=True) as model:
        codes = {name.removesuffix(".qweight") for name in model if name.endswith(".qweight")}
    for layer, coded, plain in ((0, "mlp", "self_attn"), (1, "self_attn", "mlp")):
        names = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
        joined = {"self_attn": "qkv_proj", "mlp": "gate_up_proj"}
        home = f"model.layers.{layer}"
        assert {f"{home}.{coded}.{name}" for name in names[coded]} <= codes
        assert not {f"{home}.{plain}.{name}" for name in names[plain]} & codes
        for module, is_coded in ((coded, True), (plain, False)):
            for name in (*names[module], joined[module]):
                assert gptq_kind_in_vllm(stored, f"{home}.{module}.{name}") == is_coded, (layer, module, name)
    assert "lm_head" in codes
    assert gptq_kind_in_vllm(stored, "lm_head")
    assert stored["lm_head"] is True


def test_a_head_of_gptq_under_another_name_is_said_to_be_quantised(tmp_path: Path) -> None:
    """vLLM looks at the class of a module: the head of GPT-NeoX is `embed_out`."""
    sizes = {"vocab_size": 128, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
    source = write_transformer(tmp_path / "m", "GPTNeoX", num_hidden_layers=2, tie_word_embeddings=False, **sizes)
    quantise(source, tmp_path / "q", "gptq-4bit", "embed_out=gptq-4bit", group_size=32)
    with open_checkpoint(tmp_path / "q", raw=True) as model:
        assert "embed_out.qweight" in set(model)
    assert entry(tmp_path / "q")["lm_head"] is True
    quantise(source, tmp_path / "plain", "gptq-4bit", group_size=32)
    assert entry(tmp_path / "plain")["lm_head"] is False


def test_gptq_and_awq_have_one_encoding_in_a_model(tmp_path: Path) -> None:
    source = write_transformer(tmp_path / "m", "Llama", tie_word_embeddings=False, **SIZES)
    with pytest.raises(PlanError, match="GPTQ in several widths or group sizes are not written"):
        quantise(source, tmp_path / "q", "gptq-4bit", "mlp=gptq-8bit-g32", group_size=32)
    with pytest.raises(PlanError, match="AWQ has one group size in a model, and no quantised head"):
        quantise(source, tmp_path / "q", "awq-4bit", "lm_head=awq-4bit-g32", group_size=32)
    quantise(source, tmp_path / "q", "awq-4bit", "down_proj=plain", group_size=32)
    assert "mlp.down_proj" in entry(tmp_path / "q")["modules_to_not_convert"]
    with open_checkpoint(tmp_path / "q", raw=True) as model:
        assert "model.layers.0.mlp.down_proj.weight" in set(model)
