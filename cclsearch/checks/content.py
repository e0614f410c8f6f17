"""The cards, profiles, objectives and policies that can be named here: listed with their files, shown and copied."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cclsearch.card.load import inspect_card, require_stated
from cclsearch.core.content import CONTENT_KINDS, FRAMEWORK_SUFFIX, find_content, list_content, project_root
from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.text import one_line
from cclsearch.core.trust import is_shipped
from cclsearch.launch.profile import load_profile
from cclsearch.scoring.objective import load_objective

MAX_CHARACTERS = 160
"""Length of a description in a list."""
_NEW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")


@dataclass(frozen=True)
class ContentItem:
    """One card, profile, objective or policy, as a list shows it."""

    name: str
    kind: str
    """Launcher of a profile, task of a card, or metric of an objective; empty for a policy."""
    description: str
    """The file's own description, or why the file cannot be read."""
    path: Path
    is_shipped: bool
    """Whether it is part of the package; otherwise it is in the project, or in a folder of `CCL_SEARCH_PATH`."""


def _describe_profile(path: Path) -> tuple[str, str]:
    profile = load_profile(str(path))
    return profile.launcher, profile.description


def _describe_card(path: Path) -> tuple[str, str]:
    card = require_stated(inspect_card(str(path)))
    return card.task, card.title


def _describe_objective(path: Path) -> tuple[str, str]:
    objective = load_objective(str(path))
    return ", ".join(objective.metrics), objective.description


def _describe_policy(path: Path) -> tuple[str, str]:
    try:
        return "", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"cannot be read: {error}") from None


_FOLDERS: Mapping[str, tuple[Callable[[Path], tuple[str, str]], tuple[str, ...]]] = {
    "launchers": (_describe_profile, (".yaml", ".yml")),
    "workloads": (_describe_card, (".yaml",)),
    "objectives": (_describe_objective, (".yaml", ".yml")),
    "policies": (_describe_policy, (".py",)),
}
"""Content folder -> what describes one of its files, and the suffixes of their names."""


def list_items(folder: str) -> list[ContentItem]:
    """Everything of one content folder (`launchers`, `workloads`, ...) that can be named, sorted by name."""
    items = []
    describe, suffixes = _FOLDERS[folder]
    for name in list_content(folder, *suffixes):
        if name.endswith(FRAMEWORK_SUFFIX):
            continue
        path = find_content(folder, name, *suffixes)
        try:
            kind, description = describe(path)
        except UserError as error:
            kind, description = "?", str(error)
        items.append(ContentItem(name, kind, one_line(description, MAX_CHARACTERS), path, is_shipped(path)))
    return items


def read_item(folder: str, name: str) -> str:
    """The text of its file; raises UserError if there is none, or if it cannot be used."""
    describe, suffixes = _FOLDERS[folder]
    path = find_content(folder, name, *suffixes)
    describe(path)
    return path.read_text(encoding="utf-8")


def copy_item(folder: str, name: str, new_name: str) -> Path:
    """Copy it into the project under a new name and return the file; never over one that exists."""
    _, suffixes = _FOLDERS[folder]
    if not _NEW_NAME.fullmatch(new_name) or new_name.endswith((FRAMEWORK_SUFFIX, *suffixes)):
        raise UserError(f"NEWNAME is {one_line(new_name, 60)!r}: give letters, digits, `.`, `_` and `-`, no suffix")
    text = read_item(folder, name)
    path = project_root() / folder / f"{new_name}{suffixes[0]}"
    with writing_to(path):
        path.parent.mkdir(exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            kind = CONTENT_KINDS[folder]
            raise UserError(f"{str(path)!r} exists already: give the {kind} another name, or remove it") from None
    return path
