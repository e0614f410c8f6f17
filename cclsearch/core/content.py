"""Where cards, policies, profiles and objectives are found by a bare name.

Order: the user's project (the working directory, or the nearest folder above it that has one of the content folders
and a `ccl-search.yaml` or `pyproject.toml`), then each folder of `CCL_SEARCH_PATH`, then what is shipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cclsearch.core.errors import UserError

CONTENT_KINDS = {
    "workloads": "workload",
    "launchers": "launcher profile",
    "objectives": "objective",
    "policies": "policy",
}
"""Content folder -> what one thing in it is called."""

FRAMEWORK_SUFFIX = ".framework"
"""What the name of a framework ends with, which lies beside the launcher profiles and is none."""


def shipped_root() -> Path:
    """The folder that holds the shipped content folders: `cclsearch/_content` in a wheel, the repository otherwise."""
    inside = Path(__file__).parent.parent / "_content"
    return inside if inside.is_dir() else Path(__file__).parent.parent.parent


def project_root() -> Path:
    """The user's project: the nearest folder upwards from here with `ccl-search.yaml`, else the working directory."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "ccl-search.yaml").is_file():
            return folder
    return here


def content_roots(project: Path | None = None) -> Iterator[Path]:
    """Every folder that may hold content folders, first come first served, each once; `project`: as seen from there."""
    seen: set[Path] = set()
    extra = [Path(part) for part in os.environ.get("CCL_SEARCH_PATH", "").split(os.pathsep) if part]
    for root in (project or project_root(), *extra, shipped_root()):
        if root.resolve() not in seen:
            seen.add(root.resolve())
            yield root


def find_content(folder: str, name: str, *suffixes: str, project: Path | None = None) -> Path:
    """Path of the content called `name` (a bare name, or a path with a separator or a suffix).

    Raises UserError that lists the names there are. `os.path` looks, for which what cannot be looked at is not there: a
    name too long for a file, or a folder that may not be read, raises nothing.
    """
    if os.sep in name or name.endswith(suffixes):
        path = Path(name).expanduser()
        if os.path.isfile(path):
            return path
        raise UserError(f"there is no {CONTENT_KINDS[folder]} file {name!r}")
    for root in content_roots(project):
        for suffix in suffixes:
            path = root / folder / f"{name}{suffix}"
            if os.path.isfile(path):
                return path
    known = list_content(folder, *suffixes, project=project)
    names = [each for each in known if not each.endswith(FRAMEWORK_SUFFIX)]
    here = _describe_path(Path(name), suffixes[0])
    raise UserError(f"there is no {CONTENT_KINDS[folder]} {name!r}{here}; there are: {', '.join(names) or 'none'}")


def _describe_path(path: Path, suffix: str) -> str:
    """Why what lies at a path that was given without its suffix is not meant; empty where nothing lies there."""
    if os.path.isdir(path):
        return " (what lies here under that name is a folder)"
    return f" (the file here of that name does not end in {suffix})" if path.name and os.path.exists(path) else ""


def list_content(folder: str, *suffixes: str, project: Path | None = None) -> list[str]:
    """Bare names of the content of one folder over all roots, sorted."""
    found = {
        path.name.removesuffix(suffix)
        for root in content_roots(project)
        for suffix in suffixes
        for path in (root / folder).glob(f"*{suffix}")
        if not path.name.startswith(".")
    }
    return sorted(found)
