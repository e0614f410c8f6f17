"""Renders a scene as SVG. Colors are CSS variables of the page, so that dark mode needs no second drawing."""

from __future__ import annotations

from html import escape

from cclsearch.draw.scene import PALETTE, Item, Mark, Path, Rect, Scene, Text, outline


def render_svg(scene: Scene, *, standalone: bool = False) -> str:
    """The scene as an `<svg>` element with title and description; `standalone` includes the colors."""
    size = f'viewBox="0 0 {_num(scene.width)} {_num(scene.height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="{scene.name}-t {scene.name}-d"'
    fixed = f' width="{_num(scene.width)}" height="{_num(scene.height)}"' if standalone else ""
    body = "\n".join(_render(item) for item in scene.items)
    style = f"<style>{palette_css()}</style>" if standalone else ""
    paper = f'<rect width="100%" height="100%" style="fill:{_color("paper")}"/>' if standalone else ""
    return (
        f'{head}{fixed} style="font-family:system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif">'
        f'<title id="{scene.name}-t">{escape(scene.title)}</title>'
        f'<desc id="{scene.name}-d">{escape(scene.summary)}</desc>'
        f"{style}{paper}\n{body}\n</svg>"
    )


def palette_css() -> str:
    """CSS that defines the color of every role, light and dark."""
    light = ";".join(f"--{role}:{colors[0]}" for role, colors in PALETTE.items())
    dark = ";".join(f"--{role}:{colors[1]}" for role, colors in PALETTE.items())
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def _render(item: Item) -> str:
    match item:
        case Path():
            return _path(item)
        case Rect():
            box = f'x="{_num(item.x)}" y="{_num(item.y)}" width="{_num(item.width)}" height="{_num(item.height)}"'
            return _with_tip("rect", f'{box} style="fill:{_color(item.fill)}"', item.tip)
        case Mark():
            return _mark(item)
        case Text():
            turn = f' transform="rotate(-90 {_num(item.x)} {_num(item.y)})"' if item.upright else ""
            bold = ' font-weight="600"' if item.bold else ""
            position = (
                f'x="{_num(item.x)}" y="{_num(item.y)}" font-size="{_num(item.size)}" text-anchor="{item.anchor}"'
            )
            return f'<text {position}{bold}{turn} style="fill:{_color(item.color)}">{escape(item.text)}</text>'


def _path(path: Path) -> str:
    points = " ".join(f"{_num(x)},{_num(y)}" for x, y in path.points)
    style = f"fill:{_color(path.fill) if path.fill else 'none'}"
    if path.color:
        style += f";stroke:{_color(path.color)};stroke-width:{_num(path.width)}"
    if path.dash:
        style += f";stroke-dasharray:{_num(path.dash[0])} {_num(path.dash[1])}"
    if path.opacity < 1:
        style += f";opacity:{_num(path.opacity)}"
    return _with_tip("polygon" if path.fill else "polyline", f'points="{points}" style="{style}"', path.tip)


def _mark(mark: Mark) -> str:
    color = _color(mark.color)
    hollow = mark.hollow or mark.shape == "ring"
    paint = f"fill:{_color('paper')};stroke:{color};stroke-width:1.8" if hollow else f"fill:{color}"
    if mark.shape in ("circle", "ring"):
        shape = f'cx="{_num(mark.x)}" cy="{_num(mark.y)}" r="{_num(mark.size / 2)}" style="{paint}"'
        return _with_tip("circle", shape, mark.tip)
    if mark.shape == "cross":
        r = mark.size / 2
        arms = (
            f"M{_num(mark.x - r)} {_num(mark.y - r)}L{_num(mark.x + r)} {_num(mark.y + r)}"
            f"M{_num(mark.x - r)} {_num(mark.y + r)}L{_num(mark.x + r)} {_num(mark.y - r)}"
        )
        return _with_tip("path", f'd="{arms}" style="fill:none;stroke:{color};stroke-width:2.2"', mark.tip)
    points = " ".join(f"{_num(x)},{_num(y)}" for x, y in outline(mark))
    return _with_tip("polygon", f'points="{points}" style="{paint}"', mark.tip)


def _with_tip(tag: str, attributes: str, tip: str) -> str:
    if not tip:
        return f"<{tag} {attributes}/>"
    return f"<{tag} {attributes}><title>{escape(tip)}</title></{tag}>"


def _color(role: str) -> str:
    return f"var(--{role})"


def _num(number: float) -> str:
    return f"{number:.1f}".rstrip("0").rstrip(".") if number % 1 else str(int(number))
