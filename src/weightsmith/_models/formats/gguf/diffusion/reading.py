"""GGUF files for ComfyUI that are read: single files of diffusion models, and T5 text encoders.

ComfyUI-GGUF (https://github.com/city96/ComfyUI-GGUF) stores a diffusion model under the names of its original file, without the
prefix `model.diffusion_model.`. `general.architecture` names the family, and no key says more. Rows of a block type must be a
multiple of its length, so the convolutions of UNets are stored as rows of 256 numbers. The key `comfy.gguf.orig_shape.NAME` has
the shape of such a tensor, in which its numbers are in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.gguf.diffusion.text_encoder import TEXT_ENCODERS, t5_name
from weightsmith._models.formats.gguf.header import GgufTensor
from weightsmith._models.formats.gguf.layout import DIFFUSION_ARCHITECTURES, MAX_DIFFUSION_DIMENSIONS

_SHAPE = "comfy.gguf.orig_shape."
_FOREIGN = ("pig", "cow")
"""What gguf-connector writes for models of all families."""
_PREFIXES = ("model.diffusion_model.", "double_blocks.", "joint_blocks.", "input_blocks.")
"""How names of tensors of diffusion models begin, in files that do not state an architecture."""
_ORIGINAL = "Use the model's original checkpoint, or a file that ComfyUI-GGUF's convert.py wrote"


def is_single_file(keys: Mapping[str, Any], tensors: Iterable[str], where: str) -> bool:
    """Whether a GGUF file holds a diffusion model or a T5 text encoder.

    tensors  their names

    Raises Unsupported for a diffusion model of another program.
    """
    name = keys.get("general.architecture")
    if name is not None and not isinstance(name, str):
        return False
    if name in _FOREIGN or (name is None and any(tensor.startswith(_PREFIXES) for tensor in tensors)):
        stated = (
            "without general.architecture, as stable-diffusion.cpp writes it" if name is None else f"of gguf-connector ({name})"
        )
        known = ", ".join(DIFFUSION_ARCHITECTURES)
        raise Unsupported(f"a GGUF file of a diffusion model {stated}", where=where, fix=f"{_ORIGINAL}: {known}.")
    return name in (*DIFFUSION_ARCHITECTURES, *TEXT_ENCODERS)


def single_file_spec(keys: Mapping[str, Any], tensor: GgufTensor, tensors: Mapping[str, GgufTensor], where: str) -> TensorSpec:
    """Name and shape of a tensor in the original file; F32 for blocks.

    Raises FormatError for a shape that does not fit, Unsupported for a tensor of T5 that is not read.
    """
    dtype = DTYPES["F32"] if tensor.dtype.block > 1 else tensor.dtype
    if keys["general.architecture"] in TEXT_ENCODERS:
        return TensorSpec(t5_name(tensor.name, tensors, where), dtype, tensor.shape)
    return TensorSpec(tensor.name, dtype, _shape(keys, tensor, where))


def single_file_dtype(tensors: Iterable[GgufTensor]) -> DType:
    """The dtype of the file that a GGUF file was made of.

    ComfyUI-GGUF's converter stores vectors of F16 files as F16, those of other files as F32. So F16 vectors mean F16. Matrices
    that are all F32 mean F32. F16 beside F32 means F16, because the converter keeps small matrices as F32. All else is BF16.
    """
    listed = list(tensors)
    matrices = {tensor.dtype.name for tensor in listed if len(tensor.shape) > 1}
    if matrices == {"F32"}:
        return DTYPES["F32"]
    if "F16" in matrices <= {"F16", "F32"}:
        return DTYPES["F16"]
    vectors = {tensor.dtype.name for tensor in listed if len(tensor.shape) == 1}
    return DTYPES["F16" if "F16" in vectors and "BF16" not in matrices else "BF16"]


def _shape(keys: Mapping[str, Any], tensor: GgufTensor, where: str) -> tuple[int, ...]:
    stated = keys.get(_SHAPE + tensor.name)
    if stated is None:
        return tensor.shape
    listed = stated.tolist() if isinstance(stated, np.ndarray) and stated.dtype.kind in "iu" else []
    if not 1 <= len(listed) <= MAX_DIFFUSION_DIMENSIONS or min(listed) < 1 or math.prod(listed) != math.prod(tensor.shape):
        what = f"{_SHAPE}{tensor.name} is {show(listed or stated)}, and the tensor has the shape {list(tensor.shape)}"
        raise FormatError(what, where=where, fix=DAMAGED)
    return tuple(listed)
