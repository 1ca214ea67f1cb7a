"""The front of points that no other point beats in both directions."""

from collections.abc import Sequence

Point = tuple[float, float]


def front(points: Sequence[Point]) -> list[Point]:
    """Non-dominated points, more being better in both coordinates, by the first coordinate; equal ones once.

    The second coordinate falls along the front, so straight lines between its points are a monotone interpolation.
    """
    found: list[Point] = []
    for point in sorted(set(points), reverse=True):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found[::-1]
