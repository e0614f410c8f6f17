"""The output that commands share: one JSON value with `--json`, else lines for a person."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from cclsearch.core.text import plain


def say(*lines: str) -> None:
    """Print the lines without terminal escapes."""
    for line in lines:
        print(plain(line))


def complain(text: str) -> None:
    """Print one line about what is wrong, without secrets, on stderr."""
    from cclsearch.core.secrets.redact import redact

    print(f"ccl-search: {redact(text)}", file=sys.stderr)


def show(data: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print the data as JSON, or the lines without terminal escapes; lines of a generator are made only if printed."""
    if as_json:
        print(json.dumps(data))
    else:
        say(*lines)
