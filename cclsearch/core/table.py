"""Tables of text, for a terminal and for a file."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def format_table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], *, right: Collection[int] = (), indent: str = ""
) -> str:
    """Columns as wide as their widest cell, left-aligned except those in `right`; without heads if they are empty."""
    lines = [[str(cell) for cell in row] for row in ([heads, *rows] if heads else rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def align(place: int, cell: str) -> str:
        return cell.rjust(widths[place]) if place in right else cell.ljust(widths[place])

    return "\n".join(f"{indent}{'  '.join(align(n, cell) for n, cell in enumerate(line))}".rstrip() for line in lines)
