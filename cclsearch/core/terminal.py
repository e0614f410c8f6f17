"""Printing for people: on a terminal, lines are broken between words; into a file or pipe they stay whole."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

from cclsearch.core.text import plain

_INDENT = "      "


def is_terminal() -> bool:
    """Whether the output is a terminal; False for a process without an output."""
    return sys.stdout is not None and sys.stdout.isatty()


def can_redraw() -> bool:
    """Whether printed text can be replaced: the output is a terminal whose cursor can move."""
    return is_terminal() and os.environ.get("TERM") != "dumb"


def print_wrapped(line: str) -> None:
    """Print a line, made plain; on a terminal it is broken between words, and continued lines are indented."""
    text = plain(line)
    width = shutil.get_terminal_size().columns
    if is_terminal() and len(text) > width > len(_INDENT) + 20:
        text = wrap_words(text, width)
    print(text, flush=True)


def wrap_words(text: str, width: int) -> str:
    """The line broken between words; a word that is longer than a line, such as a path, stays whole."""
    return textwrap.fill(
        text,
        width,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
