"""A drawing as plain data: shapes in pixels, colors by role. It is rendered as SVG (light and dark) or PNG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Role = str
"""Purpose of a color: a key of `PALETTE`."""

PALETTE: dict[Role, tuple[str, str]] = {
    "paper": ("#ffffff", "#12161c"),
    "ink": ("#1b1f24", "#e6e9ee"),
    "muted": ("#57606a", "#9aa5b1"),
    "grid": ("#dde2e8", "#2d343d"),
    "blue": ("#0072b2", "#5ab4e8"),
    "orange": ("#d55e00", "#f0883e"),
    "green": ("#00795a", "#2fbf96"),
    "purple": ("#9c4f87", "#d991c2"),
    "yellow": ("#8f7000", "#e9d44d"),
    "gray": ("#7b8490", "#8a939d"),
    "brown": ("#7a4a32", "#c9a58f"),
    "scale0": ("#e3eef8", "#1d3347"),
    "scale1": ("#bcd7ee", "#24496a"),
    "scale2": ("#8dbce2", "#2e618d"),
    "scale3": ("#559ccf", "#3c7cb3"),
    "scale4": ("#2b7bb9", "#5a9bd2"),
    "scale5": ("#14568e", "#8bbde6"),
    "onscale": ("#ffffff", "#0b1016"),
}
"""Role -> color on a light and on a dark background. The series hues are Okabe and Ito's, which color-blind people can
distinguish, darkened or lightened to a contrast of 4.5:1. Marks also differ in shape: color alone means nothing."""

SERIES: tuple[Role, ...] = ("blue", "orange", "green", "purple", "yellow", "gray", "brown")
SCALE: tuple[Role, ...] = tuple(f"scale{n}" for n in range(6))

Shape = Literal["circle", "square", "triangle", "diamond", "cross", "star", "ring"]
SHAPES: tuple[Shape, ...] = ("circle", "square", "triangle", "diamond", "ring", "cross")
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Path:
    """A line through points; closed and filled if `fill` is set."""

    points: tuple[tuple[float, float], ...]
    color: Role | None = "ink"
    width: float = 1.0
    dash: tuple[float, float] | None = None
    fill: Role | None = None
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True)
class Rect:
    """A box; `x` and `y` are its top left corner."""

    x: float
    y: float
    width: float
    height: float
    fill: Role = "blue"
    tip: str = ""


@dataclass(frozen=True)
class Mark:
    """A symbol of about `size` pixels around a point."""

    x: float
    y: float
    shape: Shape = "circle"
    size: float = 8.0
    color: Role = "blue"
    hollow: bool = False
    tip: str = ""


@dataclass(frozen=True)
class Text:
    """One line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: Anchor = "start"
    color: Role = "ink"
    bold: bool = False
    upright: bool = False
    """Rotated by 90 degrees, read from bottom to top."""


Item = Path | Rect | Mark | Text


@dataclass(frozen=True)
class Scene:
    """A whole drawing."""

    name: str
    """Stem of its file name: letters, digits and dashes."""
    title: str
    summary: str
    """Text alternative for people who cannot see the drawing."""
    width: float
    height: float
    items: tuple[Item, ...]


def outline(mark: Mark) -> tuple[tuple[float, float], ...]:
    """Corners of a mark's shape; empty for a circle, a ring and a cross."""
    r, x, y = mark.size / 2, mark.x, mark.y
    if mark.shape == "square":
        r *= 0.88
        return ((x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r))
    if mark.shape == "diamond":
        r *= 1.15
        return ((x, y - r), (x + r, y), (x, y + r), (x - r, y))
    if mark.shape == "triangle":
        r *= 1.1
        return ((x, y - r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r))
    if mark.shape == "star":
        points = []
        for n in range(10):
            length, angle = (1.35 * r if n % 2 == 0 else 0.58 * r), math.pi * n / 5
            points.append((x + length * math.sin(angle), y - length * math.cos(angle)))
        return tuple(points)
    return ()
