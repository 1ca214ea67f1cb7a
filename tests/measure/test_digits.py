"""Numbers for sentences: digits enough, no exponents."""

import pytest

from stepkernel.measure.digits import digits


@pytest.mark.parametrize(
    ("value", "count", "text"),
    [
        (0.8314, 3, "0.831"),
        (19.321, 3, "19.3"),
        (99.96, 3, "100"),
        (999.6, 3, "1,000"),
        (1652.4, 3, "1,652"),
        (11238.0, 4, "11,238"),
        (117.12, 4, "117.1"),
        (-1652.4, 3, "-1,652"),
    ],
)
def test_digits(value: float, count: int, text: str) -> None:
    assert digits(value, count) == text
