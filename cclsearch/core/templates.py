"""Templates of text and of pages: a value that is missing is an error, and lines of statements leave no blank line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def open_templates(*folders: Path, autoescape: bool = False, **options: Any) -> Environment:
    """The templates of these folders, the first folder first; `autoescape` for HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, **options}
    return Environment(loader=FileSystemLoader(folders), autoescape=autoescape, **options)
