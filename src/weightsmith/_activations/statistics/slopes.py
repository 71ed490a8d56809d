"""How a weight makes the text likelier: the mean of gxᵀ, float32 [N, K], g the gradients of log p of the next tokens.

The gradient of the mean log-likelihood of the text, over all tokens, with respect to the weight.
"""

from __future__ import annotations

from typing import Any

from weightsmith.abc.statistic import Statistic


def _add(total: Any, part: slice, x: Any, g: Any) -> None:
    total[part].addmm_(g[:, part].T, x)


def _finish(total: Any, reached: int, tokens: int) -> Any:
    return total.div_(tokens)


STATISTIC = Statistic(lambda n, k: (n, k), _add, _finish, gradients=True, labels="text", tile=512)
