"""The lowest point of a curve that was measured at a few places."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def lowest(points: Mapping[float, float], low: float, high: float) -> float:
    """The lowest point of the parabola through the three points around the lowest one, between two bounds.

    points  value by place, one or more

    Where there are fewer than three, or they do not curve upwards, the place of the lowest point.

    >>> lowest({0.0: 1.25, 1.0: 0.25, 2.0: 1.25}, 0.0, 1.5)
    1.0
    >>> lowest({0.0: 3.0, 0.5: 2.0, 1.0: 1.0}, 0.0, 1.5)
    1.0
    """
    places = sorted(points)
    at = min(range(len(places)), key=lambda i: points[places[i]])
    if len(places) < 3:
        return places[at]
    first = min(max(at - 1, 0), len(places) - 3)
    x = np.array(places[first : first + 3])
    y = np.array([points[each] for each in x])
    slopes = np.diff(y) / np.diff(x)
    curve = (slopes[1] - slopes[0]) / (x[2] - x[0])
    if not curve > 1e-12:
        return places[at]
    return float(np.clip((x[0] + x[1]) / 2 - slopes[0] / (2 * curve), low, high))
