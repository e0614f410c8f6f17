"""Sections of a prompt, shortened to a number of bytes: each leaves out its last lines, and counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEFT_OUT_BYTES = 60
"""Size of the line that counts the lines left out of a section."""


@dataclass(frozen=True)
class Section:
    """A title and its lines. If the prompt is too long, the last lines are left out; a higher weight keeps more."""

    title: str
    lines: Sequence[str]
    weight: float


def fit_sections(sections: Sequence[Section], limit_bytes: int) -> str:
    """The sections, each within its share; bytes that short sections do not use go to the long ones."""
    sizes = [len(render_section(section, None).encode()) + 2 for section in sections]
    shares = _share([section.weight for section in sections], sizes, limit_bytes)
    return "\n\n".join(render_section(section, share) for section, share in zip(sections, shares, strict=True))


def render_section(section: Section, limit_bytes: int | None) -> str:
    """The section, in at most `limit_bytes` if that is not None."""
    lines = [section.title, *section.lines]
    whole = "\n".join(lines)
    if limit_bytes is None or len(whole.encode()) <= limit_bytes:
        return whole
    kept: list[str] = []
    left = limit_bytes - LEFT_OUT_BYTES
    for line in lines:
        left -= len(line.encode()) + 1
        if left < 0:
            break
        kept.append(line)
    missing = len(lines) - len(kept)
    return "\n".join([*kept, f"({missing} of {len(lines) - 1} left out: size limit)"] if missing else kept)


def _share(weights: Sequence[float], sizes: Sequence[int], left: int) -> list[int]:
    shares = [0] * len(sizes)
    waiting = list(range(len(sizes)))
    while waiting:
        total = sum(weights[i] for i in waiting)
        short = [i for i in waiting if sizes[i] <= left * weights[i] / total]
        if not short:
            for i in waiting:
                shares[i] = int(left * weights[i] / total)
            break
        for i in short:
            shares[i] = sizes[i]
            left -= sizes[i]
        waiting = [i for i in waiting if i not in short]
    return shares
