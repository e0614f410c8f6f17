"""The words of the agent, from `messages.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cclsearch.core.yaml_file import read_yaml

WORDS: dict[str, Any] = read_yaml(Path(__file__).with_name("messages.yaml"))
"""`system`, `tools`, `faults`: name -> sentence, and single sentences; `{name}` in a sentence is filled in."""
