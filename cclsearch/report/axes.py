"""What several charts share: their size, the scale below rows of bars, and legends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cclsearch.draw.axes import Scale, make_ticks, show_number
from cclsearch.draw.scene import Item, Mark, Path, Text

WIDTH, LEFT, RIGHT = 880.0, 76.0, 20.0


def draw_bar_scale(x: Scale, top: float, bottom: float, title: str, suffix: str = "") -> list[Item]:
    """Vertical grid lines over rows of bars, with their numbers and a title (the last item) below."""
    ticks = make_ticks(x, 6)
    return [
        *(Path(((x(t), top), (x(t), bottom)), "grid") for t in ticks),
        *(Text(x(t), bottom + 18, show_number(t) + suffix, 11.5, "middle", "muted") for t in ticks),
        Text((x.start + x.end) / 2, bottom + 38, title, 12.5, "middle"),
    ]


def draw_legend(
    entries: Sequence[tuple[str, Mark]], x: float, y: float, *, gap: float = 12, step: float = 34
) -> list[Item]:
    """Labels with their marks from left to right; `step` is the width of an entry without its label."""
    items: list[Item] = []
    for label, mark in entries:
        items.append(replace(mark, x=x, y=y - 4))
        items.append(Text(x + gap, y, label, 12, "start", "muted"))
        x += step + 6.6 * len(label)
    return items
