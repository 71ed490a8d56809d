"""GPTQ and AWQ as outputs: their bytes, and which modules readers take for quantised by what config.json says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightsmith
from tests.mini import write_checkpoint
from tests.models.formats.quantised import CASES, WEIGHT, pack
from weightsmith._app.api import run
from weightsmith._base.errors import NonFinite, PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats import encodings, find_encoding
from weightsmith._models.formats.matrices import half_scales

BF16 = np.dtype(ml_dtypes.bfloat16)
WRITTEN = {"gptq-8bit": "gptq-8-rounded", "gptq-4bit": "gptq-4-rounded", "awq-4bit": "awq-4-rounded"}
"""The case of `quantised.py` that each format stores, which GPTQModel decodes to the same numbers (`oracles.json`)."""
BOUNDS = {"gptq-8bit": 1.0, "gptq-4bit": 0.53, "awq-4bit": 0.57}
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The nibble of each of eight outputs in a word of AWQ's."""


def stored(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """What an encoding stores for a matrix."""
    spec, encoding = TensorSpec("q_proj.weight", DTYPES["BF16"], weight.shape), encodings()[name]
    outs = encoding.outs(spec)
    data = [np.zeros(out.nbytes, np.uint8) for out in outs]
    encoding.encode(spec, weight, 0, data, np.empty(0, np.float32))
    return {out.name: raw.view(out.dtype.numpy).reshape(out.shape) for out, raw in zip(outs, data, strict=True)}


def decoded(name: str, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales [outputs, inputs], float64, as the format is defined: no code of ours."""
    words, zeros, scales = (arrays[f"q_proj.{part}"] for part in ("qweight", "qzeros", "scales"))
    if name.startswith("awq"):
        of_words = [(packed.view(np.uint32)[..., None] >> (4 * np.array(ORDER, np.uint32))) & 15 for packed in (words, zeros)]
        codes, zero = (unpacked.reshape(len(unpacked), -1).astype(np.float64) for unpacked in of_words)
    else:
        bits = int(name[5])
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        unpacked = (words.view(np.uint32)[:, None, :] >> shifts[None, :, None]) & np.uint32((1 << bits) - 1)
        codes = unpacked.reshape(-1, words.shape[1]).astype(np.float64)
        unpacked = (zeros.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
        zero = unpacked.reshape(len(zeros), -1).astype(np.float64) + 1
    group = len(codes) // len(scales)
    steps = scales.astype(np.float64).repeat(group, 0)
    return ((codes - zero.repeat(group, 0)) * steps).T, steps.T


# ---- bytes


@pytest.mark.parametrize("name", WRITTEN)
def test_the_bytes_are_those_that_gptqmodel_decodes(name: str) -> None:
    case = CASES[WRITTEN[name]]()
    arrays = stored(f"{name}-g32", WEIGHT)
    assert list(arrays) == list(case.tensors)
    for tensor, array in case.tensors.items():
        assert (arrays[tensor].dtype, arrays[tensor].shape) == (array.dtype, array.shape)
        assert arrays[tensor].tobytes() == array.tobytes(), tensor


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), size=st.sampled_from([1e-6, 1e-3, 1.0, 1e4]), shift=st.sampled_from([0, 5, -0.3]))
def test_the_error_is_within_the_bound(name: str, seed: int, size: float, shift: float) -> None:
    weight = ((np.random.default_rng(seed).standard_normal((8, 128)) + shift) * size).astype(np.float32)
    values, scales = decoded(name, stored(name, weight))
    assert (np.abs(values - weight) <= (1 + 2.0**-20) * BOUNDS[name] * scales).all()


@given(st.floats(0, 2.0**15, width=32))
def test_scales_are_numbers_of_float16_and_of_bfloat16(extent: float) -> None:
    (scale,) = half_scales(np.array([extent], np.float32), 7.5)
    assert scale > 0
    assert np.float32(np.float16(scale)) == scale == np.float32(BF16.type(scale))
    assert extent <= 7.5 * scale * (1 + 2.0**-8)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_weight_that_no_scale_of_float16_fits_is_named(name: str) -> None:
    weight = np.full((8, 128), 3e7, np.float32)
    with pytest.raises(NonFinite, match=r"output tensor 'q_proj.weight'.*too large for a scale in float16"):
        stored(name, weight)


@pytest.mark.parametrize("name", WRITTEN)
def test_outputs_that_do_not_fill_words_are_refused(name: str) -> None:
    spec = TensorSpec("q_proj.weight", DTYPES["BF16"], (12, 128))
    assert find_encoding(name).refusal(spec) == "its outputs are 12, not a multiple of 8"


# ---- whole models


def random_model(folder: Path, seed: int) -> str:
    """Two layers, with a router and an embedding."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, 128), "model.norm.weight": (128,)}
    for i in range(2):
        sizes = {"self_attn.q_proj": 192, "mlp.gate_proj": 1024, "mlp.up_proj": 1024, "mlp.router": 4}
        shapes |= {f"model.layers.{i}.{part}.weight": (outputs, 128) for part, outputs in sizes.items()}
    tensors = {name: rng.standard_normal(shape).astype(BF16) for name, shape in shapes.items()}
    return str(write_checkpoint(folder, tensors, {"num_hidden_layers": 2, "dtype": "bfloat16"}))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_a_merge_stored_in_the_format_is_the_merge_and_then_the_format(name: str, tmp_path: Path) -> None:
    """And whatever the threads and the tiles, and in parts."""
    ties = {
        "merge_method": "ties",
        "base_model": random_model(tmp_path / "a", 0),
        "models": [{"model": random_model(tmp_path / "b", 1), "parameters": {"weight": 0.7, "density": 0.5}}],
    }
    quiet: dict[str, Any] = {"progress": False, "fsync": False}
    plan = weightsmith.merge(ties, tmp_path / "once", quantize=name, threads=2, **quiet).plan
    weightsmith.merge(ties, tmp_path / "merged", **quiet)
    weightsmith.quantize(tmp_path / "merged", tmp_path / "then", name, threads=1, max_memory_bytes=400 << 20, **quiet)
    for number in (1, 2):
        run(plan, tmp_path / "parts", part=(number, 2), fsync=False)
    run(plan, tmp_path / "parts", fsync=False)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("once", "then", "parts")]
    assert files[0] == files[1] == files[2]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("once", "then")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_read_back_as_the_format_defines_it(name: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "m", 0)
    weightsmith.quantize(model, tmp_path / "q", name, progress=False, fsync=False)
    with weightsmith.open_checkpoint(model) as plain, weightsmith.open_checkpoint(tmp_path / "q") as opened:
        assert list(opened.specs) == list(plain.specs)
        for tensor in opened.specs:
            if tensor.endswith("_proj.weight"):
                expected, _ = decoded(name, stored(name, plain.read(tensor).astype(np.float32)))
                np.testing.assert_array_equal(opened.read(tensor), expected.astype(np.float32), tensor)
            else:
                assert opened.read(tensor).tobytes() == plain.read(tensor).tobytes(), tensor


# ---- the modules in config.json


def write_model(folder: Path, shapes: Mapping[str, tuple[int, int]], **config: Any) -> str:
    tensors = {"model.embed_tokens.weight": np.ones((8, 64), BF16), "lm_head.weight": np.ones((8, 64), BF16)}
    tensors |= {f"model.layers.{name}.weight": np.ones(shape, BF16) for name, shape in shapes.items()}
    layers = 1 + max(int(name.partition(".")[0]) for name in shapes)
    return str(write_checkpoint(folder, tensors, {"num_hidden_layers": layers, "dtype": "bfloat16", **config}))


def entry_of(model: str, format: str, **options: Any) -> dict[str, Any]:
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": model}]}, quantize=format, **options)
    entry: dict[str, Any] = (plan.config or {})["quantization_config"]
    return json.loads(json.dumps(entry))  # type: ignore[no-any-return]


ATTENTION = {f"self_attn.{part}_proj": (64, 64) for part in "qkvo"}
DENSE = {**ATTENTION, "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}
EXPERTS = {
    f"mlp.experts.{e}.{part}": shape for e in range(2) for part, shape in (("gate_proj", (32, 64)), ("down_proj", (64, 32)))
}


def layers(*per_layer: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {f"{i}.{name}": shape for i, layer in enumerate(per_layer) for name, shape in layer.items()}


def in_gptq_of_sglang(entry: Mapping[str, Any], module: str) -> bool:
    """Whether SGLang 0.5.23, GPTQModel 7.6 and vLLM 0.33 leave a module plain, by its name there."""
    return any(re.match(pattern.removeprefix("-:"), module) for pattern in entry.get("dynamic", {}))


def in_gptq_of_optimum(entry: Mapping[str, Any], module: str) -> bool:
    """Whether optimum 2.3.0 leaves a linear layer of a decoder plain."""
    kept = entry.get("modules_in_block_to_quantize")
    return kept is not None and not any(module.endswith(name) for name in kept[0])


def in_gptq_of_vllm(entry: Mapping[str, Any], module: str) -> bool:
    """Whether vLLM 0.33.0 leaves a linear layer plain, besides `dynamic`."""
    kept = entry.get("modules_in_block_to_quantize")
    return kept is not None and not any(name in module for name in kept[0])


def in_awq_of_engines(entry: Mapping[str, Any], module: str) -> bool:
    """Whether vLLM 0.33.0 and SGLang 0.5.23 leave a module plain."""
    return any(name in module for name in entry["modules_to_not_convert"])


def in_awq_of_transformers(entry: Mapping[str, Any], module: str) -> bool:
    """Whether transformers 5.23.0 leaves a linear layer plain."""
    parts = entry["modules_to_not_convert"]
    return any(re.match(rf"(?:{part})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(part) for part in parts)


Plain = Callable[[Mapping[str, Any], str], bool]
READERS: list[tuple[str, Plain]] = [
    ("gptq-4bit", in_gptq_of_sglang),
    ("gptq-4bit", in_gptq_of_optimum),
    ("gptq-4bit", in_gptq_of_vllm),
    ("awq-4bit", in_awq_of_engines),
    ("awq-4bit", in_awq_of_transformers),
]


@pytest.mark.parametrize(("name", "plain"), READERS, ids=[plain.__name__ for _, plain in READERS])
def test_readers_leave_plain_what_is_plain(name: str, plain: Plain, tmp_path: Path) -> None:
    """A mixture whose first layer is dense, as DeepSeek's, so that `mlp.gate` is part of the name of a quantised module."""
    entry = entry_of(
        write_model(tmp_path / "m", layers(DENSE, {**ATTENTION, "mlp.gate": (2, 64), **EXPERTS})), name, group_size=32
    )
    assert plain(entry, "model.layers.1.mlp.gate")
    quantised = ["0.mlp.gate_proj", "0.self_attn.q_proj", "1.self_attn.o_proj"]
    if plain is not in_gptq_of_optimum:  # these are not nn.Linear
        quantised += ["1.mlp.experts.0.gate_proj", "1.mlp.experts"]
    if plain in (in_gptq_of_sglang, in_awq_of_engines):  # vLLM asks for the parts of joined modules
        quantised += ["0.mlp.gate_up_proj", "1.self_attn.qkv_proj"]
    for module in quantised:
        assert not plain(entry, f"model.layers.{module}"), module


@pytest.mark.parametrize(("name", "plain"), READERS, ids=[plain.__name__ for _, plain in READERS])
def test_readers_leave_plain_what_does_not_fit(name: str, plain: Plain, tmp_path: Path) -> None:
    """Groups of 32 do not divide the width of most."""
    shapes = {
        "self_attn.q_proj": (80, 80),
        "self_attn.k_proj": (80, 80),
        "self_attn.v_proj": (80, 80),
        "mlp.down_proj": (80, 96),
    }
    entry = entry_of(write_model(tmp_path / "m", layers(shapes, shapes)), name, group_size=32)
    assert plain(entry, "model.layers.1.self_attn.q_proj")
    assert not plain(entry, "model.layers.1.mlp.down_proj")
    if plain in (in_gptq_of_sglang, in_awq_of_engines):
        assert plain(entry, "model.layers.0.self_attn.qkv_proj")


def test_a_model_that_is_quantised_whole_needs_no_lists(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", layers(DENSE))
    entry = entry_of(model, "gptq-4bit", group_size=32)
    assert entry == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
    }
    assert entry_of(model, "awq-4bit", group_size=32)["modules_to_not_convert"] == ["lm_head"]


def test_fused_experts_are_plain_for_readers_that_ask_for_all_experts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", layers(ATTENTION))
    tensors = {f"model.layers.0.{name}.weight": np.ones(shape, BF16) for name, shape in ATTENTION.items()}
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = np.ones((2, 64, 64), BF16)
    config = {"num_hidden_layers": 1, "num_local_experts": 2, "dtype": "bfloat16"}
    model = str(write_checkpoint(tmp_path / "fused", tensors, config))
    assert in_gptq_of_sglang(entry_of(model, "gptq-4bit", group_size=32), "model.layers.0.mlp.experts")
    assert in_awq_of_engines(entry_of(model, "awq-4bit", group_size=32), "model.layers.0.mlp.experts")


def test_a_plain_module_whose_name_is_part_of_a_quantised_one_is_refused_by_awq_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", layers({**DENSE, "mlp.gate": (4, 64)}))
    with pytest.raises(PlanError, match=r"model.layers.0.mlp.gate: .*what contains its name for plain.*mlp.gate_proj"):
        entry_of(model, "awq-4bit", group_size=32)
    entry = entry_of(model, "gptq-4bit", group_size=32)
    assert in_gptq_of_sglang(entry, "model.layers.0.mlp.gate")
    assert not in_gptq_of_sglang(entry, "model.layers.0.mlp.gate_proj")


@pytest.mark.parametrize("name", ["gptq-4bit", "awq-4bit"])
def test_experts_of_which_only_some_projections_fit_are_refused(name: str, tmp_path: Path) -> None:
    """Entries name experts as a whole, so that readers would take the quantised projections for plain ones."""
    experts = {f"mlp.experts.0.{part}_proj": shape for part, shape in {"gate": (48, 64), "down": (64, 48)}.items()}
    model = write_model(tmp_path / "m", layers({**ATTENTION, **experts}))
    with pytest.raises(PlanError, match=r"model.layers.0.mlp.experts: .* for plain.* model.layers.0.mlp.experts.0.gate_proj"):
        entry_of(model, name, group_size=32)


def test_codes_are_packed_as_numpy_packs_them() -> None:
    from weightsmith._kernels.codes import pack_down

    codes = np.random.default_rng(0).integers(0, 8, (64, 5)).astype(np.uint8)
    words = np.empty((6, 5), np.uint32)
    pack_down(codes, 3, words)
    np.testing.assert_array_equal(words, pack(codes.T, 3).T)
