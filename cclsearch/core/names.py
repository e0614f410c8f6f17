"""Names that exist in a project's folders, found without importing what reads the files: for lists and completion."""

from __future__ import annotations

from pathlib import Path

from cclsearch.core.content import FRAMEWORK_SUFFIX, content_roots, list_content, project_root

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
