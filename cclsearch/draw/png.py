"""Renders a scene as PNG with Pillow, without browser or display. Draws at twice the size for smooth edges."""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from cclsearch.draw.scene import PALETTE, Item, Mark, Path, Rect, Scene, Text, outline

if TYPE_CHECKING:
    from PIL import ImageDraw

OVERSAMPLE = 2
Point = tuple[float, float]


def write_png(scene: Scene, path: FilePath, *, scale: float = 2.0, dark: bool = False) -> None:
    """Write the scene as a PNG with `scale` pixels per unit, on a light or dark background."""
    from PIL import Image, ImageDraw

    factor = scale * OVERSAMPLE
    size = (round(scene.width * factor), round(scene.height * factor))
    image = Image.new("RGB", size, _color("paper", dark))
    brush = _Brush(ImageDraw.Draw(image), factor, dark)
    for item in scene.items:
        brush.paint(item)
    small = image.resize((round(scene.width * scale), round(scene.height * scale)), Image.Resampling.LANCZOS)
    small.save(path, format="PNG", optimize=True)


class _Brush:
    """Draws items on one image."""

    def __init__(self, draw: ImageDraw.ImageDraw, factor: float, dark: bool) -> None:
        self.draw, self.factor, self.dark = draw, factor, dark

    def paint(self, item: Item) -> None:
        match item:
            case Path():
                self._path(item)
            case Rect():
                box = [self._scale(v) for v in (item.x, item.y, item.x + item.width, item.y + item.height)]
                if box[2] > box[0] and box[3] > box[1]:
                    self.draw.rectangle(box, fill=self._color_of(item.fill))
            case Mark():
                self._mark(item)
            case Text():
                self._text(item)

    def _path(self, path: Path) -> None:
        points = [(self._scale(x), self._scale(y)) for x, y in path.points]
        if path.fill and len(points) > 2:
            self.draw.polygon(points, fill=self._blend(path.fill, path.opacity))
        if not path.color or len(points) < 2:
            return
        color = self._blend(path.color, path.opacity)
        if path.fill:
            points.append(points[0])
        if path.dash is None:
            self.draw.line(points, fill=color, width=self._line_width(path.width), joint="curve")
            return
        for start, end in _dashes(points, self._scale(path.dash[0]), self._scale(path.dash[1])):
            self.draw.line([start, end], fill=color, width=self._line_width(path.width))

    def _mark(self, mark: Mark) -> None:
        color, r = self._color_of(mark.color), mark.size / 2
        box = [self._scale(v) for v in (mark.x - r, mark.y - r, mark.x + r, mark.y + r)]
        hollow = mark.hollow or mark.shape == "ring"
        if mark.shape in ("circle", "ring"):
            fill = self._color_of("paper") if hollow else color
            self.draw.ellipse(box, fill=fill, outline=color, width=self._line_width(1.8))
        elif mark.shape == "cross":
            left, top, right, bottom = box
            self.draw.line([(left, top), (right, bottom)], fill=color, width=self._line_width(2.2))
            self.draw.line([(left, bottom), (right, top)], fill=color, width=self._line_width(2.2))
        else:
            points = [(self._scale(x), self._scale(y)) for x, y in outline(mark)]
            self.draw.polygon(points, fill=self._color_of("paper") if hollow else color)
            if hollow:
                self.draw.line([*points, points[0]], fill=color, width=self._line_width(1.8), joint="curve")

    def _text(self, text: Text) -> None:
        from PIL import Image, ImageDraw

        font = _font(round(text.size * self.factor))
        stroke = max(1, round(text.size * self.factor / 45)) if text.bold else 0
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[text.anchor]
        color = self._color_of(text.color)
        position = (self._scale(text.x), self._scale(text.y))
        if not text.upright:
            self.draw.text(
                position, text.text, fill=color, font=font, anchor=anchor, stroke_width=stroke, stroke_fill=color
            )
            return
        left, top, right, bottom = font.getbbox(text.text, anchor="ls")
        width, height = round(right - left) + 4, round(bottom - top) + 4
        stencil = Image.new("L", (width, height), 0)
        ImageDraw.Draw(stencil).text((2 - left, 2 - top), text.text, fill=255, font=font, anchor="ls")
        turned = stencil.rotate(90, expand=True)
        shift = {"start": turned.height, "middle": turned.height / 2, "end": 0}[text.anchor]
        corner = (round(position[0] + top), round(position[1] - shift))
        self.draw.bitmap(corner, turned, fill=color)

    def _blend(self, role: str, opacity: float) -> str:
        from PIL import ImageColor

        if opacity >= 1:
            return self._color_of(role)
        front, back = (ImageColor.getrgb(self._color_of(name)) for name in (role, "paper"))
        mixed = (round(f * opacity + b * (1 - opacity)) for f, b in zip(front, back, strict=True))
        return "#" + "".join(f"{part:02x}" for part in mixed)

    def _color_of(self, role: str) -> str:
        return _color(role, self.dark)

    def _scale(self, length: float) -> float:
        return length * self.factor

    def _line_width(self, width: float) -> int:
        return max(1, round(width * self.factor))


def _dashes(points: list[Point], on: float, off: float) -> list[tuple[Point, Point]]:
    """The dashes of a line through the points."""
    pieces: list[tuple[Point, Point]] = []
    drawn = True
    left = on
    for (x1, y1), (x2, y2) in itertools.pairwise(points):
        length, at = math.hypot(x2 - x1, y2 - y1), 0.0
        while at < length:
            to = min(length, at + left)
            if drawn:
                ends = [(x1 + (x2 - x1) * d / length, y1 + (y2 - y1) * d / length) for d in (at, to)]
                pieces.append((ends[0], ends[1]))
            left -= to - at
            at = to
            if left <= 1e-9:
                drawn = not drawn
                left = on if drawn else off
    return pieces


@cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _color(role: str, dark: bool) -> str:
    return PALETTE[role][1 if dark else 0]
