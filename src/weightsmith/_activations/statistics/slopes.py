"""How a weight makes the text likelier, and the curvature at its outputs: the means of gxᵀ and ggᵀ, float32 [N, K + N].

    [ Σ gxᵀ, Σ ggᵀ ] / tokens

g are the gradients of log p of the next tokens at the outputs of the layer, so the first K columns are the gradient of the mean
log-likelihood with respect to the weight. The others are the factor of the outputs in a Kronecker product that approximates
the curvature of the loss (Martens and Grosse 2015, https://arxiv.org/abs/1503.05671); that of the inputs is `second_moments`.
They are one array, so that the text runs back through the layer once for both.
"""

from __future__ import annotations

from typing import Any

from weightsmith.abc.product import Statistic


def _add(total: Any, part: slice, x: Any, g: Any) -> None:
    columns = x.shape[1]
    total[part, :columns].addmm_(g[:, part].T, x)
    total[part, columns:].addmm_(g[:, part].T, g)


def _finish(total: Any, reached: int, tokens: int) -> Any:
    return total.div_(tokens)


STATISTIC = Statistic(lambda n, k: (n, k + n), _add, _finish, gradients=True, labels="text", tile=512)
