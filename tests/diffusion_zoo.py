"""Diffusion models of diffusers with the names and numbers of blocks of real ones, and few columns, so that they are small.

diffusers converts single files into its own names. It is asked for the way back: what we write, it converts to the model
that we were given.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

Arrays = dict[str, npt.NDArray[Any]]

_COLS = 2


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of diffusers.

    name       its class
    family     general.architecture
    config     of the class: as many blocks as names need
    convert    diffusers' function that converts a single file; "" if the names are the same
    """

    name: str
    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    convert: str = ""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors."""
        torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # diffusers' own, of its Chroma
            model = getattr(diffusers, self.name)(**self.config)
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def arrays(self, *, cols: int = _COLS, dtype: type = np.float32) -> Arrays:
        """Random tensors. cols: at most so many columns of matrices, and places in other dimensions but the first."""
        rng = np.random.default_rng(0)
        small = {name: (shape[0], *(min(n, cols) for n in shape[1:])) for name, shape in self.shapes().items()}
        return {name: rng.standard_normal(shape).astype(dtype) for name, shape in small.items()}

    def save(self, folder: Path, arrays: Arrays) -> Path:
        """A folder of one part."""
        folder.mkdir(parents=True)
        save_file(arrays, folder / "diffusion_pytorch_model.safetensors")
        (folder / "config.json").write_text(json.dumps({"_class_name": self.name, "_diffusers_version": "0.42.1"}))
        return folder

    def to_diffusers(self, single: Arrays) -> Arrays:
        """A single file as diffusers converts it: float32."""
        torch = pytest.importorskip("torch")
        utils = pytest.importorskip("diffusers.loaders.single_file_utils")
        if not self.convert:
            return single
        checkpoint = {name: torch.from_numpy(values.astype(np.float32)) for name, values in single.items()}
        converted = getattr(utils, self.convert)(checkpoint)
        return {name: tensor.numpy() for name, tensor in converted.items() if tensor is not None}


def read_numbers(path: Path) -> Arrays:
    """The tensors of a GGUF file of plain float32."""
    reader = gguf.GGUFReader(path)
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32"}
    folded = {key: field.contents() for key, field in reader.fields.items() if key.startswith("comfy.")}
    shapes = {tensor.name: folded.get(f"comfy.gguf.orig_shape.{tensor.name}", tensor.shape[::-1]) for tensor in reader.tensors}
    return {tensor.name: tensor.data.reshape([*map(int, shapes[tensor.name])]) for tensor in reader.tensors}


_BLOCKS = {"num_layers": 2, "num_single_layers": 2}
ZOO = (
    ZooModel(
        "FluxTransformer2DModel",
        "flux",
        {**_BLOCKS, "guidance_embeds": True},
        "convert_flux_transformer_checkpoint_to_diffusers",
    ),
    ZooModel("Flux2Transformer2DModel", "flux", _BLOCKS, "convert_flux2_transformer_checkpoint_to_diffusers"),
    ZooModel("ChromaTransformer2DModel", "flux", _BLOCKS, "convert_chroma_transformer_checkpoint_to_diffusers"),
    ZooModel(
        "SD3Transformer2DModel",
        "sd3",
        {"num_layers": 3, "qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
        "convert_sd3_transformer_checkpoint_to_diffusers",
    ),
    ZooModel(
        "AuraFlowTransformer2DModel",
        "aura",
        {"num_mmdit_layers": 4, "num_single_dit_layers": 2},
        "convert_auraflow_transformer_checkpoint_to_diffusers",
    ),
    ZooModel(
        "Lumina2Transformer2DModel",
        "lumina2",
        {"num_layers": 2, "hidden_size": 2304, "num_attention_heads": 24, "num_kv_heads": 8},
        "convert_lumina2_to_diffusers",
    ),
    ZooModel("ZImageTransformer2DModel", "lumina2", {"n_layers": 2}, "convert_z_image_transformer_checkpoint_to_diffusers"),
    ZooModel("WanTransformer3DModel", "wan", {"num_layers": 2}, "convert_wan_transformer_to_diffusers"),
    ZooModel(
        "WanTransformer3DModel",
        "wan",
        {"num_layers": 2, "image_dim": 1280, "added_kv_proj_dim": 5120},
        "convert_wan_transformer_to_diffusers",
    ),
    ZooModel(
        "WanVACETransformer3DModel", "wan", {"num_layers": 2, "vace_layers": [0, 1]}, "convert_wan_transformer_to_diffusers"
    ),
    ZooModel("HunyuanVideoTransformer3DModel", "hyvid", _BLOCKS, "convert_hunyuan_video_transformer_to_diffusers"),
    ZooModel("LTXVideoTransformer3DModel", "ltxv", {"num_layers": 28}, "convert_ltx_transformer_checkpoint_to_diffusers"),
    ZooModel(
        "CosmosTransformer3DModel",
        "cosmos",
        {"num_layers": 2, "extra_pos_embed_type": None},
        "convert_cosmos_transformer_checkpoint_to_diffusers",
    ),
    ZooModel(
        "HiDreamImageTransformer2DModel",
        "hidream",
        {"num_layers": 1, "num_single_layers": 1, "caption_channels": [4096, 4096], "patch_size": 2, "in_channels": 16}
        | {"attention_head_dim": 128, "num_attention_heads": 20, "text_emb_dim": 2048, "num_routed_experts": 4}
        | {"num_activated_experts": 2, "axes_dims_rope": (64, 32, 32), "max_resolution": (128, 128), "llama_layers": [0, 1]},
    ),
    ZooModel("QwenImageTransformer2DModel", "qwen_image", {"num_layers": 2}),
    ZooModel("UNet2DConditionModel", "sd1", {"cross_attention_dim": 768}),
)
