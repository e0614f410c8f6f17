"""Text from outside as the pages show it: plain, on one line, without secrets."""

from __future__ import annotations

import os
from functools import cache, lru_cache

from cclsearch.core.secrets.names import is_secret_name
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line

MAX_TEXT = 2000


@cache
def _environment() -> dict[str, str]:
    """Variables of this process that may hold secrets; they do not change while the server runs."""
    return {name: value for name, value in os.environ.items() if is_secret_name(name) or "://" in value}


@lru_cache(maxsize=20_000)
def clean(text: str) -> str:
    """The text as one safe line without secrets; most texts of a table recur."""
    return one_line(redact(text, _environment()), MAX_TEXT)
