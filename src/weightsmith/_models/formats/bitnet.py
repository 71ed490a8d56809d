"""BitNet's ternary weights, as transformers loads them: quant_method bitnet. They are read.

X.weight        U8 [rows / 4, cols]: row r is in row r mod (rows / 4), in the bits from 2 · (r div (rows / 4)). 0, 1 and 2 are
                -1, 0 and 1
X.weight_scale  [1] or []: codes are divided by it (linear_class bitlinear, the default), or multiplied (autobitlinear)

Layers round what enters them to 8 bits while they run. The plain model does not.

Refused are models whose layers have a norm of their own (use_rms_norm), and weights that are rounded while the model runs
(quantization_mode online): theirs are no codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsmith._base.errors import FormatError
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import plain_dtype, recogniser
from weightsmith._models.formats.decoded import F32, QuantisedModel, Weight, bands, read_all, reader
from weightsmith._models.formats.scaled import FLOATS
from weightsmith.abc.stored import Rows, StoredFormat
from weightsmith.abc.tensors import Tensors

METHOD = "bitnet"
_WEIGHT, _SCALE = ".weight", ".weight_scale"
_CODES_OF_A_BYTE = 4
_DIVIDED = {"bitlinear": True, "autobitlinear": False}
"""linear_class → whether codes are divided by the scale."""


@dataclass(frozen=True, slots=True)
class TernaryWeight(Weight):
    """A matrix of ternary codes.

    stored   codes, and the scale
    divided  whether codes are divided by the scale
    """

    divided: bool

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        (rows, cols), (name, scale) = self.spec.shape, self.stored
        quarter = rows // _CODES_OF_A_BYTE
        factor = read_all(stored, scale).astype(np.float32)[0]
        for top, end, skip, part in bands(first, values, cols):
            codes = np.empty((end - top, cols), np.uint8)
            for row in _starts(top, end, quarter):
                stop, inside = min(end, (row // quarter + 1) * quarter), row % quarter
                packed = read_all(stored, name, inside * cols, (inside + stop - row) * cols).reshape(-1, cols)
                codes[row - top : stop - top] = packed >> (2 * (row // quarter)) & 3
            if codes.max() > 2:
                raise FormatError(f"{show(name)} holds the code 3, and codes are 0, 1 and 2", fix=DAMAGED)
            numbers = codes.reshape(-1)[skip : skip + part.size].astype(np.float32) - np.float32(1)
            with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                part[:] = numbers / factor if self.divided else numbers * factor


def _starts(top: int, end: int, quarter: int) -> list[int]:
    """Where runs of rows begin that lie in the same bits of their bytes.

    >>> _starts(3, 9, 4)
    [3, 4, 8]
    """
    return [top, *range((top // quarter + 1) * quarter, end, quarter)]


def is_codes(spec: TensorSpec) -> bool:
    return spec.dtype.name == "U8" and spec.name.endswith(_WEIGHT)


def weights(model: QuantisedModel) -> list[Weight]:
    model.setting("quantization_mode", "offline", ("offline",))
    model.setting("use_rms_norm", False, (False,))
    divided = _DIVIDED[model.setting("linear_class", "bitlinear", tuple(_DIVIDED))]
    return [_weight(model, spec.name, divided=divided) for spec in model.specs.values() if is_codes(spec)]


def _weight(model: QuantisedModel, name: str, *, divided: bool) -> TernaryWeight:
    codes = model.part(name, ("U8",), (None, None))
    scale = model.specs.get(name + "_scale")
    shape = scale.shape if scale is not None and scale.shape in ((), (1,)) else (1,)
    model.part(name + "_scale", FLOATS, shape)
    spec = TensorSpec(name, F32, (_CODES_OF_A_BYTE * codes.shape[0], codes.shape[1]))
    return TernaryWeight(spec, (name, name + "_scale"), plain_dtype(model.config), divided)


FORMAT = StoredFormat("bitnet", "BitNet", recogniser(is_codes, METHOD), reader("BitNet", (_WEIGHT, _SCALE), weights))
