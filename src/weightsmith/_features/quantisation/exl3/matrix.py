"""One matrix as EXL3: error compensation, and decoding.

LDLQ (Tseng et al. 2024, https://arxiv.org/abs/2406.11235): the Hessian of the inputs, rotated like the weight, is L D Lᵀ with
blocks of 16 x 16. Rows of 16 inputs are encoded from the last to the first, and what the errors of later rows cause is added to
those before, times L. Then only D weighs the errors.

torch computes the factorisation and the products of matrices.

**Determinism.** As for EXL2 (`exl2/matrix.py`). Output features do not depend on each other, so those of a matrix are encoded
on several threads, always the same ones together.
"""

from __future__ import annotations

import numpy as np

from weightsmith._base.one_thread import Tensor, one_thread
from weightsmith._features.quantisation.exl2.matrix import MIN_DAMPING, Unread, check_hessian, damped_cholesky
from weightsmith._models.formats.exl3.layout import BLOCK, Floats, Halves, Rate, values_of
from weightsmith._models.formats.exl3.writing import (
    Encoder,
    Exl3Matrix,
    Words,
    encode_plainly,
    find_scales,
    rotated,
    store,
)

ROWS = 16
"""Inputs that are encoded at once: those of a tile."""

DAMPING = 0.025
"""Share of the rotated Hessian's mean diagonal that is added to it."""


def quantise_matrix(weight: Floats | Unread, hessian: Floats | None, rate: Rate, threads: int = 1) -> Exl3Matrix:
    """Quantise the weight of a linear layer.

    weight   float32 [N, K], or what reads it; not modified
    hessian  float32 [K, K]: Σ xxᵀ over the inputs x; any scale. None: the nearest streams
    threads  the result does not depend on them

    Raises NonFinite; ParameterError for a Hessian that no damping makes positive definite.

    Cost: about 25 million operations on integers of 16 bits for each weight's 65,536 states; with a Hessian N K² / 2 + K³ / 3
    multiplications. Memory besides weight and result: 12 K bytes and 0.5 to 17 MB for each thread's outputs, and those of
    `factorise`.
    """
    plain = weight if isinstance(weight, np.ndarray) else weight.read()[0]
    scales = find_scales(plain, rate)
    if hessian is None:
        return store(plain, rate, scales, encode_plainly, threads)
    factor = factorise(hessian, scales.inputs)

    def columns(target: Floats, encoder: Encoder, words: Words) -> None:
        _compensate(target, factor, encoder, words)

    with one_thread():
        return store(plain, rate, scales, columns, threads)


def factorise(hessian: Floats, inputs: Halves) -> Tensor:
    """L of the rotated Hessian: torch float32 [K padded, K padded], unit lower triangular in blocks of 16.

    inputs  float16 [K padded]: the scales of the weight's inputs. Errors are multiplied by them

    Raises as `quantise_matrix`.
    """
    import torch

    check_hessian(hessian)
    scales = inputs.astype(np.float32)
    k = len(scales)
    with one_thread():
        turned = rotated(hessian, scales, scales)
        work = torch.empty(k, k, dtype=torch.float64)
        damping = max(DAMPING * float(turned.diagonal().mean(dtype=np.float64)), MIN_DAMPING * float(np.square(scales).mean()))
        damped_cholesky(work, lambda: work.copy_(torch.from_numpy(turned)), damping)
        for first in range(0, k, ROWS):
            part = work[first:, first : first + ROWS]
            own = part[:ROWS].clone()
            torch.linalg.solve_triangular(own, part.clone(), upper=False, left=False, out=part)
        return work.float()


def _compensate(target: Floats, factor: Tensor, encoder: Encoder, words: Words) -> None:
    """Encode rotated weights [K, n] from the last rows to the first. factor: L; only what is below its diagonal is used."""
    import torch

    wanted = torch.from_numpy(target)
    errors, caused = torch.empty_like(wanted), torch.zeros_like(wanted)
    for end in range(len(target), 0, -BLOCK):
        begin = end - BLOCK
        for first in range(end - ROWS, begin - 1, -ROWS):
            last = first + ROWS
            rows = wanted[first:last]
            moved = rows + caused[first:last]
            if last < end:
                moved.addmm_(factor[last:end, first:last].T, errors[last:end])
            values = encoder.encode(moved.numpy(), words[first // ROWS])
            torch.sub(rows, torch.from_numpy(np.ascontiguousarray(values)), out=errors[first:last])
        if begin:
            caused[:begin].addmm_(factor[begin:end, :begin].T, errors[begin:end])


def dequantise_matrix(matrix: Exl3Matrix, shape: tuple[int, int], rate: Rate) -> Floats:
    """The weight as it is read: float32 [N, K]. Nothing is used but the stored tensors."""
    from weightsmith._kernels.trellis import dequantise_trellis

    found = np.empty(shape, np.float32)
    inputs, outputs = matrix.scales.inputs.astype(np.float32), matrix.scales.outputs.astype(np.float32)
    for top in range(0, shape[0], BLOCK):
        words = np.ascontiguousarray(matrix.words[:, top // 16 : (top + BLOCK) // 16]).reshape(-1)
        own = outputs[top : top + BLOCK]
        dequantise_trellis(words, rate.steps, values_of("mul1"), inputs, own, top, 0, shape, 0, found.reshape(-1))
    return found
