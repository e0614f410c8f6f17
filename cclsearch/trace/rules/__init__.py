"""Rule tables kept as data."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any


@cache
def read_table(name: str) -> Any:
    """Return the content of a YAML file of this package."""
    import yaml

    return yaml.safe_load(resources.files(__name__).joinpath(name).read_text("utf-8"))
