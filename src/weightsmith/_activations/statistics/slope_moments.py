"""The mean of ggᵀ over all tokens of the text, float32 [N, N]: g the gradients of log p of the next tokens, as in `slopes`.

The factor of the outputs in a Kronecker product that approximates the curvature of the loss (Martens and Grosse 2015,
https://arxiv.org/abs/1503.05671); that of the inputs is `second_moments`.
"""

from __future__ import annotations

from typing import Any

from weightsmith.abc.statistic import Statistic


def _add(total: Any, part: slice, x: Any, g: Any) -> None:
    total[part].addmm_(g[:, part].T, g)


def _finish(total: Any, reached: int, tokens: int) -> Any:
    return total.div_(tokens)


STATISTIC = Statistic(lambda n, _k: (n, n), _add, _finish, gradients=True, labels="text", tile=512)
