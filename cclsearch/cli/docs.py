"""`ccl-search docs [PAGE]`: the documentation, without a browser or a network."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cclsearch.cli import EXIT_FAILED, EXIT_OK
from cclsearch.cli.output import show
from cclsearch.core.content import shipped_root
from cclsearch.core.errors import UserError
from cclsearch.core.terminal import is_terminal
from cclsearch.core.text import format_table, guess_name

FOLDER = "docs"


def run(args: argparse.Namespace) -> int:
    pages = find_pages()
    if args.find:
        return _find(pages, args.find, as_json=args.json)
    if args.page is None:
        titles = {name: read_title(path) for name, path in pages.items()}
        lines = [format_table((), list(titles.items())), "", "read one with: ccl-search docs PAGE"]
        show(titles, lines, as_json=args.json)
        return EXIT_OK
    name = args.page.removesuffix(".md")
    if name not in pages:
        raise UserError(f"there is no page {args.page!r}{guess_name(name, pages)}; pages: {', '.join(pages)}")
    text = pages[name].read_text(encoding="utf-8")
    if args.json:
        print(json.dumps({"page": name, "title": read_title(pages[name]), "text": text}))
    elif is_terminal():
        _print_page(text)
    else:
        sys.stdout.write(text)
    return EXIT_OK


def find_pages() -> dict[str, Path]:
    """Return name -> file of each page, `index` first. Raises UserError if this installation has none."""
    found = {path.stem: path for path in sorted((shipped_root() / FOLDER).glob("*.md"))}
    if "index" not in found:
        raise UserError("this installation has no documentation: install the package again")
    return {"index": found.pop("index"), **found}


def read_title(page: Path) -> str:
    """Return the first heading of a page, as plain text."""
    first = next((line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# ")), page.stem)
    return first.removeprefix("# ").replace("`", "")


def _find(pages: dict[str, Path], text: str, *, as_json: bool) -> int:
    """Print every line that contains the text, in any case."""
    found = [
        (name, number, line.strip())
        for name, path in pages.items()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if text.lower() in line.lower()
    ]
    lines = [f"{name}:{number}: {line}" for name, number, line in found] or [f"no page has {text!r}"]
    show([{"page": name, "line": number, "text": line} for name, number, line in found], lines, as_json=as_json)
    return EXIT_OK if found else EXIT_FAILED


def _print_page(text: str) -> None:
    """Print a page as a terminal shows it; a long one through the pager."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    page = Markdown(text, hyperlinks=False)
    if len(text.splitlines()) < console.height:
        console.print(page)
    else:
        with console.pager(styles=True):
            console.print(page)
