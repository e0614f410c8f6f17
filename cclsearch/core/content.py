"""Files and folders of a project by name: cards, policies, profiles and objectives, and the folders of runs and trials.

Order of a look-up: the user's project (the nearest folder upwards with a `ccl-search.yaml`, else the working
directory), then each folder of `CCL_SEARCH_PATH`, then the shipped content. Nothing here imports what reads the files,
so that lists and completion of names are fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.text import guess_name

CONTENT_KINDS = {
    "workloads": "workload",
    "launchers": "launcher profile",
    "objectives": "objective",
    "policies": "policy",
}
"""Content folder -> name of one item in it."""

MODULE_FOLDERS = ("metrics", "objectives")
"""Folders of a project whose Python files are imported, as the modules of an installed plugin are."""
CODE_FOLDERS = ("launchers", *MODULE_FOLDERS, "policies")
"""Folders of a project whose files may run, or say what runs."""

FRAMEWORK_SUFFIX = ".framework"
"""Suffix that separates framework files from launcher profiles, which are in the same folder."""


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
    """Every folder that may have content folders, in order of precedence, each once; `project` replaces the user's."""
    seen: set[Path] = set()
    extra = [Path(part) for part in os.environ.get("CCL_SEARCH_PATH", "").split(os.pathsep) if part]
    for root in (project or project_root(), *extra, shipped_root()):
        if root.resolve() not in seen:
            seen.add(root.resolve())
            yield root


def list_modules() -> list[Path]:
    """The Python files of the user's project and of `CCL_SEARCH_PATH` that define metrics."""
    roots = [root for root in content_roots() if root.resolve() != shipped_root().resolve()]
    return [path for root in roots for folder in MODULE_FOLDERS for path in sorted((root / folder).glob("*.py"))]


def find_content(folder: str, name: str, *suffixes: str, project: Path | None = None) -> Path:
    """Path of the content called `name` (a bare name, or a path with a separator or a suffix).

    Raises UserError that lists the known names. It uses `os.path`, which reports a path that cannot be examined (name
    too long for a file, unreadable folder) as missing instead of raising.
    """
    if os.sep in name or name.endswith(suffixes):
        roots = () if os.sep in name else content_roots(project)
        for path in (Path(name).expanduser(), *(root / folder / name for root in roots)):
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
    odd = [root / folder / f"{name}{suffix}" for root in content_roots(project) for suffix in suffixes]
    if found := next((path for path in odd if os.path.lexists(path)), None):
        raise UserError(f"{str(found)!r} is not a regular file, so there is no {CONTENT_KINDS[folder]} {name!r}")
    guess = guess_name(name, names)
    if os.path.exists(name):
        kind = "folder" if os.path.isdir(name) else f"file that does not end in {suffixes[0]}"
        guess = f" (here that name is a {kind})"
    raise UserError(f"there is no {CONTENT_KINDS[folder]} {name!r}{guess}; known: {', '.join(names) or 'none'}")


def list_content(folder: str, *suffixes: str, project: Path | None = None) -> list[str]:
    """Bare names of the content of one folder in all roots, sorted."""
    found = {
        path.name.removesuffix(suffix)
        for root in content_roots(project)
        for suffix in suffixes
        for path in (root / folder).glob(f"*{suffix}")
        if not path.name.startswith(".")
    }
    return sorted(found)


PROFILE_SUFFIXES = (".yaml", ".yml")
RECORDINGS_FOLDER = Path("workloads") / "recordings"
MAX_SETTINGS_BYTES = 1 << 16
"""A settings file that is larger is not read for a list of names."""


def list_profiles() -> list[str]:
    """Return the names of all launcher profiles, sorted."""
    return [name for name in list_content("launchers", *PROFILE_SUFFIXES) if not name.endswith(FRAMEWORK_SUFFIX)]


def list_frameworks() -> list[str]:
    """Return the names of all frameworks, sorted."""
    return list_content("launchers", f"{FRAMEWORK_SUFFIX}.yaml")


def list_recordings() -> list[str]:
    """Return the bare names of all recordings, sorted."""
    return sorted({p.name for root in content_roots() for p in (root / RECORDINGS_FOLDER).glob("*") if p.is_dir()})


def list_run_names() -> list[str]:
    """Return the names of the project's runs, sorted; none if its settings cannot be read."""
    import yaml

    settings = project_root() / "ccl-search.yaml"
    folder: object = "runs"
    if settings.is_file():
        with settings.open("rb") as file:
            text = file.read(MAX_SETTINGS_BYTES)
        try:
            stated = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError:
            return []
        folder = stated.get("runs", folder) if isinstance(stated, dict) else folder
    return sorted(path.parent.name for path in (project_root() / str(folder)).glob("*/search.yaml"))


TRIALS_FOLDER = "trials"


def trial_folder(run_dir: Path, number: int) -> Path:
    """`trials/0007` of the run folder: the evidence of trial 7."""
    return run_dir / TRIALS_FOLDER / f"{number:04d}"
