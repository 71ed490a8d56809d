"""Types of the tensors of diffusion models, compared with ComfyUI-GGUF's."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsmith
from tests.comfyui_gguf import build_rules, module, needs_comfyui_gguf, needs_compiler, types_by_rules
from tests.diffusion_zoo import ZOO, ZooModel, read_numbers
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.gguf.diffusion.families import FAMILIES
from weightsmith._models.formats.gguf.diffusion.names import CLASSES, single_file_tensors
from weightsmith._models.formats.gguf.diffusion.types import MIXTURES, folded, types_of
from weightsmith._models.formats.gguf.types import MIXTURES as ALL
from weightsmith._models.formats.gguf.types import read_types
from weightsmith._models.formats.gguf.writing import PLAIN

BY_NAME = {mixture.name: mixture for mixture in ALL}
FAMILY = {family.name: family for family in FAMILIES}
BLOCKS = sorted(MIXTURES - {*PLAIN})


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
@needs_comfyui_gguf
@needs_compiler
@pytest.mark.parametrize("model", [m for m in ZOO if m.family != "qwen_image"], ids=lambda model: f"{model.name}-{len(model.config)}")
def test_matrices_have_the_types_of_the_patch(model: ZooModel, rules: Path) -> None:
    family, listed = FAMILY[model.family], [spec for spec in specs(model) if len(spec.shape) < 5]
    shapes = [(spec.name, folded(family, spec.shape)) for spec in listed]
    for name in BLOCKS:
        ours = types_of(BY_NAME[name], family, listed)
        theirs = types_by_rules(rules, model.family, name, BY_NAME[name].default, shapes)
        for (tensor, shape), own, other in zip(shapes, ours, theirs, strict=True):
            if BY_NAME[name].default.endswith("_0") and shape[-1] % 32:
                continue  # llama-quantize aborts
            assert own == other if other != "-" else own in ("BF16", "F32"), (name, tensor, shape)


@pytest.mark.reader
@needs_comfyui_gguf
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("model", [m for m in ZOO if m.family != "qwen_image"], ids=lambda model: f"{model.name}-{len(model.config)}")
def test_other_tensors_have_the_types_of_the_converter(
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
    shapes = [{key: [*map(int, f.contents())] for key, f in r.fields.items() if key.startswith("comfy.")} for r in (ours, theirs)]
    assert shapes[0] == shapes[1]
    for key in ("general.architecture", "general.quantization_version", "general.file_type"):
        assert ours.fields[key].contents() == theirs.fields[key].contents()
    own = {tensor.name: tensor for tensor in ours.tensors}
    for tensor in theirs.tensors:
        same = own.pop(tensor.name)
        assert same.shape.tolist() == tensor.shape.tolist()
        if same.tensor_type != tensor.tensor_type:
            assert (same.tensor_type.name, tensor.tensor_type.name) == ("F32", "BF16")
            assert not tensor.name.endswith((".weight", ".bias"))
        else:
            assert same.data.tobytes() == tensor.data.tobytes(), tensor.name
    assert {(len(tensor.shape), tensor.tensor_type.name) for tensor in own.values()} <= {(5, "F32")}

