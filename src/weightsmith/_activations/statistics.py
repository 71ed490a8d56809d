"""Statistics of a text: sums or maxima over its tokens for each linear layer of a model.

To add one, add a `Statistic` here and a line to `STATISTICS`; or a package with an entry point of the group
`weightsmith.statistics`. No package of a calibration is imported here, because plans are made without them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weightsmith._base.plugins import Plugins
from weightsmith.abc.product import Statistic

# ---- Products of inputs


TILE = 128
"""Columns that one thread sums."""


def _add_gram(total: Any, part: slice, x: Any) -> None:
    total[part.start :, part].addmm_(x[:, part.start :].T, x[:, part])


def _mirror(total: Any, reached: int, tokens: int) -> Any:
    for start in range(0, len(total), TILE):
        part, rest = slice(start, start + TILE), slice(start + TILE, None)
        lower = total[part, part].tril(-1)
        total[part, part].tril_().add_(lower.T)
        total[part, rest] = total[rest, part].T
    return total


def _mirrored_mean(total: Any, reached: int, tokens: int) -> Any:
    return _mirror(total, reached, tokens).div_(tokens)


GRAM = Statistic(lambda _n, k: (k, k), _add_gram, _mirror, tile=TILE)
"""The Gram matrix of what enters a linear layer: Σ xxᵀ, float32 [K, K]. GPTQ's Hessian, and RegMean's inner products.

Only its lower triangle is summed; the upper one is its mirror image.
"""

SECOND_MOMENTS = replace(GRAM, finish=_mirrored_mean)
"""The mean of xxᵀ of what enters a linear layer, over all tokens of the text: float32 [K, K]. RegMean's inner products.

The sum is that of `GRAM`. It is divided by the tokens of the text, not by those that reach the layer: an expert that few tokens
reach has small values.
"""


# ---- Numbers of each input feature, over the tokens that reach the layer


def _add_squares(total: Any, part: slice, x: Any) -> None:
    total.add_(x.double().square_().sum(0))


def _add_magnitudes(total: Any, part: slice, x: Any) -> None:
    total.add_(x.double().abs_().sum(0))


def _mean_of_reached(total: Any, reached: int, tokens: int) -> Any:
    return total / reached


def _largest(total: Any, part: slice, x: Any) -> None:
    if len(x):
        total.copy_(total.maximum(x.abs().amax(0)))


def _unchanged(total: Any, reached: int, tokens: int) -> Any:
    return total


MOMENTS = Statistic(lambda _n, k: (k,), _add_squares, _mean_of_reached, precise=True)
"""The mean square: float32 [K]. llama.cpp's importances of columns."""

MAGNITUDES = replace(MOMENTS, add=_add_magnitudes)
"""The mean magnitude: float32 [K]. AIM's importances of columns."""

MAXIMA = Statistic(lambda _n, k: (k,), _largest, _unchanged)
"""The largest magnitude: float32 [K]. Static scales of activations come from it. Zeros, if no token reaches the layer."""


# ---- Gradients


def _add_squared_gradients(total: Any, part: slice, x: Any, g: Any) -> None:
    total[part].add_((g[:, part].T @ x).square_())


def _add_slopes(total: Any, part: slice, x: Any, g: Any) -> None:
    columns = x.shape[1]
    total[part, :columns].addmm_(g[:, part].T, x)
    total[part, columns:].addmm_(g[:, part].T, g)


def _mean(total: Any, reached: int, tokens: int) -> Any:
    return total.div_(tokens)


FISHER = Statistic(lambda n, k: (n, k), _add_squared_gradients, _mean, gradients=True, tile=512)
"""The diagonal of the Fisher information of a weight: the mean square of gradients of log p(label), float32 [N, K].

    F_ij = Σ_rows (Σ_t g_ti x_tj)² / tokens

with labels drawn from the model's predictions, as the definition asks (Kunstner et al. 2019, https://arxiv.org/abs/1905.12558).
The gradients of the labels of a row are independent and have mean zero, so the square of their sum is, on average, the sum of
their squares: F is what one token tells of a weight. A small change δ of the weight changes predictions by about ½ Σ δ² F nats
for each token. The mean is over all tokens of the text, so experts that few tokens reach have small values.
"""

SLOPES = Statistic(lambda n, k: (n, k + n), _add_slopes, _mean, gradients=True, labels="text", tile=512)
"""How a weight makes the text likelier, and the curvature at its outputs: the means of gxᵀ and ggᵀ, float32 [N, K + N].

    [ Σ gxᵀ, Σ ggᵀ ] / tokens

g are the gradients of log p of the next tokens at the outputs of the layer, so the first K columns are the gradient of the mean
log-likelihood with respect to the weight. The others are the factor of the outputs in a Kronecker product that approximates
the curvature of the loss (Martens and Grosse 2015, https://arxiv.org/abs/1503.05671); that of the inputs is `SECOND_MOMENTS`.
They are one array, so that the text runs back through the layer once for both.
"""


NAMES = ("gram", "second_moments", "moments", "magnitudes", "maxima", "fisher", "slopes")

STATISTICS = Plugins(
    "statistic",
    "weightsmith.statistics",
    Statistic,
    {name: f"weightsmith._activations.statistics:{name.upper()}" for name in NAMES},
)
"""`StatisticRequest.kind` → the statistic."""

find_statistic = STATISTICS.get
