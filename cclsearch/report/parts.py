"""Predicted step time and memory of a few configurations as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cclsearch.draw.axes import Scale, make_ticks
from cclsearch.draw.scene import SERIES, Item, Path, Rect, Scene, Text

WIDTH = 980.0
LABELS = 330.0
"""Pixels left of the bars."""
ROW = 24.0
SMALL_SHARE = 0.02
"""Parts below this share of every bar are merged into `other`."""


@dataclass(frozen=True)
class PartsBar:
    """One configuration: its label and its parts in drawing order."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def draw_parts(bars: Sequence[PartsBar], memory_bars: Sequence[PartsBar], memory_limit_gib: float, words: str) -> Scene:
    """Two panels: what `words` name above, and GiB of the device with the most memory in use, with its limit, below."""
    upper, bottom = _panel(bars, 40.0, f"predicted {words}", None)
    lower, end = _panel(memory_bars, bottom + 60, "predicted GiB of the device that uses most", memory_limit_gib)
    summary = f"{len(bars)} configurations; best predicted: {bars[0].label} with {bars[0].total:.3g} {words}"
    return Scene("parts", "Predicted time and memory by part", summary, WIDTH, end + 20, (*upper, *lower))


def _panel(bars: Sequence[PartsBar], top: float, title: str, limit: float | None) -> tuple[list[Item], float]:
    bars = _merge_small(bars)
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    x = Scale(0.0, 1.04 * max([bar.total for bar in bars] + ([limit] if limit else [])), LABELS, WIDTH - 30)
    body = top + 30
    bottom = body + ROW * len(bars)
    items: list[Item] = _legend(names, top + 8)
    items += [Path(((x(t), body - 4), (x(t), bottom)), "grid") for t in make_ticks(x)]
    for row, bar in enumerate(bars):
        y = body + ROW * row
        items.append(Text(LABELS - 8, y + 15, bar.label, 11, "end"))
        reached = 0.0
        for name, value in bar.parts.items():
            if value > 0:
                tip = f"{name}: {value:.3g} of {bar.total:.3g}"
                width = x(reached + value) - x(reached)
                items.append(Rect(x(reached), y + 3, width, ROW - 6, _color(names, name), tip=tip))
            reached += value
    if limit:
        items.append(Path(((x(limit), body - 6), (x(limit), bottom + 2)), "ink", 1.4, dash=(4, 3)))
        items.append(Text(x(limit), bottom + 30, f"limit {limit:g}", 11, "middle", "muted"))
    items += [Text(x(t), bottom + 16, f"{t:g}", 11, "middle", "muted") for t in make_ticks(x)]
    items.append(Text((LABELS + WIDTH) / 2, bottom + (46 if limit else 34), title, 12.5, "middle"))
    return items, bottom + 50


def _merge_small(bars: Sequence[PartsBar]) -> list[PartsBar]:
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    large = [n for n in names if any(bar.parts.get(n, 0.0) > SMALL_SHARE * bar.total for bar in bars)]
    large = sorted(large, key=lambda n: -sum(bar.parts.get(n, 0.0) for bar in bars))[: len(SERIES) + 4]
    merged = []
    for bar in bars:
        kept = {name: bar.parts.get(name, 0.0) for name in names if name in large}
        merged.append(PartsBar(bar.label, kept | {"other": bar.total - sum(kept.values())}))
    return merged


def _color(names: Sequence[str], name: str) -> str:
    palette = (*SERIES, "scale2", "scale3", "scale4", "scale5", "scale1")
    return palette[list(names).index(name) % len(palette)]


def _legend(names: Sequence[str], y: float) -> list[Item]:
    items: list[Item] = []
    x = 20.0
    for name in names:
        items.append(Rect(x, y - 9, 10, 10, _color(names, name)))
        items.append(Text(x + 14, y, name, 11, "start", "muted"))
        x += 30 + 6.4 * len(name)
    return items
