"""Patterns in the messages of other programs, from YAML files beside the modules that use them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from cclsearch.core.yaml_file import read_yaml


@functools.cache
def read_patterns(path: Path) -> dict[str, re.Pattern[str]]:
    """Return meaning -> pattern of a file with lists of regular expressions; case does not matter."""
    return {meaning: re.compile("|".join(parts), re.IGNORECASE) for meaning, parts in read_yaml(path).items()}
