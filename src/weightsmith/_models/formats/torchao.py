"""torchao's weights in safetensors, as transformers saves them: quant_method torchao. They are read.

X._weight_qdata       F8_E4M3 or I8 [rows, cols]: of Float8Tensor, Int8Tensor and IntxUnpackedToInt8Tensor (1 to 8 bits, one
                      code in a byte)
X._weight_scale       F32, BF16 or F16: [] of the weight, or [n, m] of blocks, n a divisor of rows and m of cols; of integers, n
                      is 1 or rows
X._weight_zero_point  integers, of the shape of the scales; missing if they are all 0

A weight is (code - zero point) · scale. What enters a layer may be quantised while it runs, which leaves no tensor. Embeddings
are stored in the same way.

Refused are codes of 4 bits in the layouts of GPU kernels (Int4Tensor, Int4TilePackedTo4dTensor, Int4PlainInt32Tensor), MX
formats, NVFP4, and weights whose inputs are multiplied by `act_pre_scale` before the layer. Pickled files of torchao are no
plain tensors, and are refused where they are opened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import method_of, plain_dtype
from weightsmith._models.formats.decoded import F32, QuantisedModel, Weight, bands, read_all
from weightsmith._models.formats.scaled import FLOATS
from weightsmith.abc.stored import Config, Rows, Specs, StoredFormat, Wrapped, labelled
from weightsmith.abc.tensors import Tensors

METHOD, _TITLE = "torchao", "torchao"
_PREFIX = "._weight_"
_CODES, _SCALE, _ZERO = (_PREFIX + part for part in ("qdata", "scale", "zero_point"))
_DTYPES = ("F8_E4M3", "I8")
_INTEGERS = ("I8", "I16", "I32", "I64")


@dataclass(frozen=True, slots=True)
class TorchaoWeight(Weight):
    """A matrix of codes.

    stored  codes, scales, and zero points if there are some
    grid    blocks in a column, and in a row
    """

    grid: tuple[int, int]

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        (rows, cols), (down, across) = self.spec.shape, self.grid
        codes, *others = self.stored
        for top, end, skip, part in bands(first, values, cols):
            last = skip + part.size
            numbers = read_all(stored, codes, top * cols + skip, top * cols + last).astype(np.float32)
            start, stop = top * down // rows, (end - 1) * down // rows + 1
            factors = [read_all(stored, name, start * across, stop * across).astype(np.float32) for name in others]
            at = np.arange(skip, last)
            block = ((top + at // cols) * down // rows - start) * across + at % cols * across // cols
            if len(factors) == 2:
                numbers -= factors[1][block]
            with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                np.multiply(numbers, factors[0][block], out=part)


def recognises(config: Config, specs: Specs) -> bool:
    return method_of(config) == METHOD and any(_PREFIX in name for name in specs)


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    model = QuantisedModel(stored, config, where)
    for name in model.specs:
        if _PREFIX in name and not name.endswith((_CODES, _SCALE, _ZERO)):
            what = (
                f"tensor {show(name)} is part of a weight of torchao that is not read: the others are codes, scales and zeros"
            )
            raise model.unsupported(what)
    weights = [_weight(model, module) for module in model.modules(_CODES)]
    return model.decoded(weights, _TITLE, (_CODES, _SCALE, _ZERO))


def _weight(model: QuantisedModel, module: str) -> TorchaoWeight:
    codes = model.specs[module + _CODES]
    if codes.dtype.name not in _DTYPES or len(codes.shape) != 2 or not codes.size:
        what = f"tensor {show(codes.name)} is {list(codes.shape)} {codes.dtype}"
        raise model.unsupported(f"{what}; of torchao's codes, only matrices of {' and '.join(_DTYPES)} are read")
    scale = model.specs.get(module + _SCALE)
    if scale is None:
        raise model.damaged(f"tensor {show(module + _SCALE)} is missing, which a quantised weight needs")
    if scale.dtype.name not in FLOATS:
        raise model.unsupported(f"scale {show(scale.name)} is {scale.dtype}, and only {', '.join(FLOATS)} are read")
    rows, cols = codes.shape
    down, across = scale.shape if len(scale.shape) == 2 else (1, 1)
    # Int4Tensor has two codes in an I8, and scales [groups, rows]: they must not pass for blocks.
    fits = codes.dtype.name != "I8" or down in (1, rows)
    if len(scale.shape) not in (0, 2) or not down or not across or rows % down or cols % across or not fits:
        what = f"scale {show(scale.name)} of {show(codes.name)} {list(codes.shape)} is {list(scale.shape)}"
        raise model.damaged(f"{what}: its blocks do not divide the matrix")
    names = [codes.name, scale.name]
    if module + _ZERO in model.specs:
        names.append(model.part(module + _ZERO, _INTEGERS, scale.shape).name)
    spec = TensorSpec(f"{module}.weight", F32, codes.shape)
    return TorchaoWeight(spec, tuple(names), plain_dtype(model.config), (down, across))


FORMAT = StoredFormat("torchao", _TITLE, recognises, read, {_CODES: labelled(_TITLE)})
