"""ModelOpt's weights as numbers. The package describes the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith._base.files import show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._models.formats.config import (
    damaged,
    dropped_scales,
    part_of,
    plain_dtype,
    quantisation_entry,
    setting,
    unsupported,
)
from weightsmith._models.formats.decoded import F32, Weight, bands, decoded, read_all
from weightsmith._models.formats.numbers import NVFP4_GROUP
from weightsmith.abc.stored import Config, Wrapped
from weightsmith.abc.tensors import Tensors

_ACTIVATIONS = ("input_scale", "output_scale", "k_scale", "v_scale", "k_bias", "v_bias")


@dataclass(frozen=True, slots=True)
class ModelOptWeight:
    """One weight: codes, scales, and for NVFP4 the factor of the scales."""

    spec: TensorSpec
    stored: tuple[str, ...]
    natural_dtype: DType
    preferred_rows: int = 1

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith._kernels.codes import TABLES
        from weightsmith._kernels.packed import dequantise_rows

        inputs, packed = self.spec.shape[1], len(self.stored) == 3
        bits, table, group = (4, TABLES["float4"], NVFP4_GROUP) if packed else (8, TABLES["float8"], inputs)
        width = inputs * bits // 8
        for row, bottom, skip, part in bands(first, values, inputs):
            words = np.empty((bottom - row) * width, np.uint8)
            stored.read_into(self.stored[0], row * width, words)
            if packed:
                scales = read_all(stored, self.stored[1], row * inputs // group, bottom * inputs // group).astype(np.float32)
                with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                    scales *= read_all(stored, self.stored[2])[0]
            else:
                scales = np.repeat(read_all(stored, self.stored[1]), bottom - row)
            dequantise_rows(words.view(np.uint32), width // 4, bits, table, group, scales, np.zeros_like(scales), skip, part)


def is_codes(spec: TensorSpec) -> bool:
    return spec.dtype.name in ("F8_E4M3", "U8") and spec.name.endswith(".weight")


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    _, entry = quantisation_entry(config, where)
    setting(entry, "quant_algo", None, ("FP8", "NVFP4", "MIXED_PRECISION"), where)
    specs, dtype = stored.specs, plain_dtype(config)
    smoothed = [name for name in specs if name.endswith(".pre_quant_scale")]
    if smoothed:
        raise unsupported(f"tensor {show(smoothed[0])} scales activations before its layer: such weights are not read", where)
    weights: list[Weight] = [_weight(specs, spec, dtype, where) for spec in specs.values() if is_codes(spec)]
    dropped = [name for name in specs if name.rpartition(".")[2] in _ACTIVATIONS and specs[name].size == 1]
    parts = (".weight", ".weight_scale", ".weight_scale_2")
    return decoded(
        stored, weights, config, where, kind="ModelOpt", parts=parts, dropped=dropped, notes=dropped_scales(dropped, where)
    )


def _weight(specs: Mapping[str, TensorSpec], codes: TensorSpec, dtype: DType, where: str) -> ModelOptWeight:
    outputs, width = part_of(specs, codes.name, ("F8_E4M3", "U8"), (None, None), where).shape
    packed = codes.dtype.name == "U8"
    inputs = 2 * width if packed else width
    if inputs % (NVFP4_GROUP if packed else 4):
        raise damaged(f"tensor {show(codes.name)} is {list(codes.shape)}: rows of {inputs:,} elements are not read", where)
    names = [codes.name, f"{codes.name}_scale"]
    if packed:
        part_of(specs, names[1], ("F8_E4M3",), (outputs, inputs // NVFP4_GROUP), where)
        names.append(f"{codes.name}_scale_2")
    last = specs.get(names[-1])
    part_of(specs, names[-1], ("F32",), (1,) if last is not None and last.shape == (1,) else (), where)
    return ModelOptWeight(TensorSpec(codes.name, F32, (outputs, inputs)), tuple(names), dtype)
