"""The lowest point of a measured curve."""

from __future__ import annotations

import numpy as np
import pytest

from weightsmith._reports.tuning.search import lowest


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ({0.0: 4.0, 0.5: 1.0, 1.0: 2.0}, 0.625),
        ({1.0: 2.0, 0.0: 4.0, 0.5: 1.0}, 0.625),  # in any order
        ({0.0: 9.0, 0.33: 4.0, 0.6: 1.0, 1.0: 2.0}, None),  # the three around 0.6
        ({0.0: 1.0, 0.4: 2.0, 0.8: 5.0}, 0.0),  # the base is best
        ({0.0: 4.0, 0.5: 2.0, 1.0: 1.9}, None),
        ({0.0: 3.0, 0.5: 2.5}, 0.5),
        ({0.0: 3.0, 0.5: 2.5, 1.0: 2.0}, 1.0),  # a straight line: the lowest of the points
        ({0.0: 3.0, 0.5: 2.0, 1.0: 1.5, 1.5: 1.25}, 1.5),
    ],
)
def test_it_is_the_lowest_point_of_the_parabola_around_the_lowest_point(
    points: dict[float, float], expected: float | None
) -> None:
    place = lowest(points, 0.0, 1.5)
    if expected is None:
        x = sorted(points)[-3:]
        a, b, _ = np.polyfit(x, [points[position] for position in x], 2)
        expected = -b / 2 / a
    assert place == pytest.approx(expected, abs=1e-9)
