"""Numbers as people read them."""

from __future__ import annotations


def show_number(value: float) -> str:
    """The number with about three significant digits: `0.0123`, `1.23`, `123`, `12,300`, `1.2e+09`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e9 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
