"""Statistics of a text: sums or maxima over its tokens for each linear layer of a model. One file for each.

To add one, add a file with a `STATISTIC` and its name to `NAMES`; or a package with an entry point of the group
`weightsmith.statistics`.
"""

from __future__ import annotations

from weightsmith._base.plugins import Plugins
from weightsmith.abc.product import Statistic

NAMES = ("gram", "second_moments", "moments", "magnitudes", "maxima", "fisher", "slopes")

STATISTICS = Plugins(
    "statistic",
    "weightsmith.statistics",
    Statistic,
    {name: f"weightsmith._activations.statistics.{name}:STATISTIC" for name in NAMES},
)
"""`StatisticRequest.kind` → the statistic, imported when a plan first uses it."""

find_statistic = STATISTICS.get
