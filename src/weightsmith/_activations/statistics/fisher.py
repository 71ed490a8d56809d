"""The diagonal of the Fisher information of a weight: the mean square of gradients of log p(label), float32 [N, K].

    F_ij = Σ_rows (Σ_t g_ti x_tj)² / tokens

with labels drawn from the model's predictions, as the definition asks (Kunstner et al. 2019, https://arxiv.org/abs/1905.12558).
The gradients of the labels of a row are independent and have mean zero, so the square of their sum is, on average, the sum of
their squares: F is what one token tells of a weight. A small change δ of the weight changes predictions by about ½ Σ δ² F nats
for each token. The mean is over all tokens of the text, so experts that few tokens reach have small values.
"""

from __future__ import annotations

from typing import Any

from weightsmith.abc.product import Statistic


def _add(total: Any, part: slice, x: Any, g: Any) -> None:
    total[part].add_((g[:, part].T @ x).square_())


def _finish(total: Any, reached: int, tokens: int) -> Any:
    return total.div_(tokens)


STATISTIC = Statistic(lambda n, k: (n, k), _add, _finish, gradients=True, tile=512)
