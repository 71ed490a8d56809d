"""Types of the tensors of diffusion models, compared with ComfyUI-GGUF's."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsmith
from tests.comfyui_gguf import build_rules, module, needs_comfyui_gguf, needs_rules, types_by_rules
from tests.diffusion_zoo import ZOO, ZooModel, read_numbers
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.gguf.diffusion.families import FAMILIES, MIXTURES, folded, types_of
from weightsmith._models.formats.gguf.types import MIXTURES as ALL
from weightsmith._models.formats.gguf.types import read_types
from weightsmith._models.formats.gguf.writing import PLAIN
from weightsmith._models.structure.diffusers_names import CLASSES, single_file_tensors

BY_NAME = {mixture.name: mixture for mixture in ALL}
FAMILY = {family.name: family for family in FAMILIES}
BLOCKS = sorted(MIXTURES - {*PLAIN})
RULED = [model for model in ZOO if model.family != "qwen_image" and model.name != "WanVACETransformer3DModel"]
"""Models that ComfyUI-GGUF's tools write: not two convolutions over time, either."""
each_with_rules = pytest.mark.parametrize("model", RULED, ids=lambda model: f"{model.name}-{len(model.config)}")


def specs(model: ZooModel, dtype: str = "BF16") -> list[TensorSpec]:
    """The tensors of a single file, with all their columns."""
    shapes = model.shapes()
    tensors = single_file_tensors(CLASSES[model.name], list(shapes), model.name)
    return [
        TensorSpec(tensor.name, DTYPES[dtype], (sum(shapes[part][0] for part in tensor.parts), *shapes[tensor.parts[0]][1:]))
        for tensor in tensors
    ]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_rules(tmp_path_factory.mktemp("rules"))


@pytest.mark.reader
@needs_rules
@each_with_rules
def test_matrices_have_the_types_of_the_patch(model: ZooModel, rules: Path) -> None:
    family, listed = FAMILY[model.family], [spec for spec in specs(model) if len(spec.shape) < 5]
    shapes = [(spec.name, folded(family, spec.shape)) for spec in listed]
    for name in BLOCKS:
        ours = types_of(BY_NAME[name], family, listed)
        theirs = types_by_rules(rules, model.family, name, BY_NAME[name].default, shapes)
        for (tensor, shape), kind, other in zip(shapes, ours, theirs, strict=True):
            if BY_NAME[name].default[-2:] in ("_0", "_1") and shape[-1] % 32:
                continue  # llama-quantize aborts
            assert kind == other if other != "-" else kind in ("BF16", "F32"), (name, tensor, shape)


@pytest.mark.reader
@needs_comfyui_gguf
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@each_with_rules
def test_other_tensors_have_the_types_and_bytes_of_the_converter(
    model: ZooModel, dtype: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model.save(tmp_path / "transformer", model.arrays(cols=40, dtype=dtype))
    weightsmith.quantize(folder, tmp_path / "plain", format="gguf-f32", fsync=False)
    single = {name: values.astype(dtype) for name, values in read_numbers(tmp_path / "plain" / "model.gguf").items()}
    save_file(single, tmp_path / "single.safetensors")
    kind = "bf16" if dtype is ml_dtypes.bfloat16 else "f16"
    weightsmith.quantize(tmp_path / "single.safetensors", tmp_path / "out", format=f"gguf-{kind}", fsync=False)
    monkeypatch.chdir(tmp_path)
    module("tools.convert").convert_file("single.safetensors", "theirs.gguf", interact=False)
    ours, theirs = gguf.GGUFReader(tmp_path / "out" / "model.gguf"), gguf.GGUFReader(tmp_path / "theirs.gguf")
    assert shapes_in(ours) == shapes_in(theirs)
    for key in ("general.architecture", "general.quantization_version", "general.file_type"):
        assert ours.fields[key].contents() == theirs.fields[key].contents()
    rest = {tensor.name: tensor for tensor in ours.tensors}
    for tensor in theirs.tensors:
        same = rest.pop(tensor.name)
        assert same.shape.tolist() == tensor.shape.tolist()
        if same.tensor_type != tensor.tensor_type:
            assert (same.tensor_type.name, tensor.tensor_type.name) == ("F32", "BF16")
            assert not tensor.name.endswith((".weight", ".bias"))
        else:
            assert same.data.tobytes() == tensor.data.tobytes(), tensor.name
    assert {(len(tensor.shape), tensor.tensor_type.name) for tensor in rest.values()} <= {(5, "F32")}


def shapes_in(reader: gguf.GGUFReader) -> dict[str, list[int]]:
    """The shapes of folded tensors."""
    return {key: [*map(int, field.contents())] for key, field in reader.fields.items() if key.startswith("comfy.")}


TENSORS = {
    "flux": {
        "double_blocks.0.img_attn.qkv.weight": (768, 256),
        "double_blocks.0.img_mlp.0.weight": (64, 256),
        "double_blocks.0.img_mlp.2.weight": (256, 96),
        "double_blocks.0.img_mod.lin.bias": (768,),
        "img_in.weight": (3072, 64),
    },
    "wan": {
        **{f"blocks.{i}.self_attn.v.weight": (256, 256) for i in range(5)},
        "blocks.0.ffn.2.weight": (256, 512),
        "blocks.0.modulation": (1, 6, 256),
        "patch_embedding.weight": (256, 16, 1, 2, 2),
    },
    "lumina2": {"layers.0.attention.qkv.weight": (768, 256), "x_pad_token": (1, 2048), "cap_embedder.1.weight": (256, 256)},
    "hidream": {
        "double_stream_blocks.0.block.ff_i.experts.3.w2.weight": (256, 256),
        "double_stream_blocks.0.block.ff_i.gate.weight": (4, 2560),
    },
    "sd1": {"input_blocks.1.0.in_layers.2.weight": (320, 320, 3, 3), "out.2.weight": (4, 320, 3, 3)},
}
EXPECTED = {
    ("flux", "Q4_K_M", "BF16"): ["Q5_K", "Q4_K", "F16", "F32", "BF16"],
    ("flux", "Q4_0", "BF16"): ["Q4_0", "Q4_0", "Q4_0", "F32", "BF16"],
    ("flux", "Q8_0", "F16"): ["Q8_0", "Q8_0", "Q8_0", "F16", "F16"],
    ("flux", "F16", "F32"): ["F16", "F16", "F16", "F32", "F16"],
    ("flux", "BF16", "F16"): ["BF16", "BF16", "BF16", "F32", "BF16"],
    ("flux", "F32", "F16"): ["F32"] * 5,
    ("wan", "Q4_K_S", "BF16"): ["Q5_K"] * 4 + ["Q4_K", "Q5_K", "F32", "F32"],
    ("wan", "Q3_K_M", "BF16"): ["Q5_K"] * 2 + ["Q4_K"] * 4 + ["F32", "F32"],
    ("wan", "Q5_0", "F32"): ["Q5_0"] * 5 + ["Q5_1", "F32", "F32"],
    ("lumina2", "Q5_K_M", "BF16"): ["Q6_K", "F32", "BF16"],
    ("lumina2", "Q5_K_M", "F16"): ["Q6_K", "F16", "F16"],
    ("hidream", "Q4_K_M", "BF16"): ["Q6_K", "F32"],
    ("sd1", "Q4_K_M", "F16"): ["Q4_K", "F16"],
}


@pytest.mark.parametrize(("family", "mixture", "dtype"), EXPECTED)
def test_types(family: str, mixture: str, dtype: str) -> None:
    listed = [TensorSpec(name, DTYPES[dtype], shape) for name, shape in TENSORS[family].items()]
    assert types_of(BY_NAME[mixture], FAMILY[family], listed) == EXPECTED[family, mixture, dtype]


def test_types_that_are_asked_for_are_those_of_weights_alone() -> None:
    chosen, problems = read_types(["img_=q6_k", "qkv=q4_0"])
    assert not problems
    listed = [TensorSpec(name, DTYPES["BF16"], shape) for name, shape in TENSORS["flux"].items()]
    assert types_of(BY_NAME["Q8_0"], FAMILY["flux"], listed, chosen) == ["Q4_0", "Q6_K", "F16", "F32", "F16"]
