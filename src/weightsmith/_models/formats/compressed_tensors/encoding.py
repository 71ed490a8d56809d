"""Encodings from what config.json says of their weights: the same function that reads it decides what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.compressed_tensors.config import quantization_config, scheme_of
from weightsmith._models.formats.matrices import MatrixEncoding
from weightsmith.abc.stored import Bytes, Rows

Fill = Callable[[TensorSpec, Rows, Sequence[Bytes], Rows], None]


def compressed(
    name: str,
    format: str,
    weights: Mapping[str, Any],
    fill: Fill,
    *,
    activations: Mapping[str, Any] | None = None,
    scale: str = "BF16",
    product: str = "",
) -> MatrixEncoding:
    """An encoding of one of compressed-tensors' formats.

    weights, activations  arguments of their quantisation, as in config.json
    fill                  see `MatrixEncoding`
    scale                 dtype of the scales
    product               see `Encoding`
    """
    scheme = scheme_of(format, weights, name, name)
    high, wide = scheme.block
    return MatrixEncoding(
        name,
        partial(scheme.tensors, scale=scale),
        fill,
        partial(quantization_config, format, weights, activations),
        group=wide or 1,
        align_rows=high or 1,
        whole=scheme.shaped + scheme.divided,
        product=product,
    )
