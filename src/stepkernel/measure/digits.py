"""Numbers for sentences and tables."""


def digits(value: float, count: int = 3) -> str:
    """`count` digits and never an exponent for large numbers: 0.831, 19.3, 1,652."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (count - 1) else f"{value:.{count}g}"
