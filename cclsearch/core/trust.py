"""Decide whose code may run: the package's, and a project's that asks for it and that this user confirmed here.

`trust_code: true` in a project's `ccl-search.yaml` is copied with the folder, so it alone means nothing: a record in
the user's state folder says that this user gave it for this folder on this machine. The record names the folder's real
path and its inode: another folder that is later put at the same path is asked about again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.content import (
    CODE_FOLDERS,
    CONTENT_KINDS,
    FRAMEWORK_SUFFIX,
    find_content,
    project_root,
    shipped_root,
)
from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.settings import SETTINGS_FILE, load_settings

LINE = "trust_code: true"
RUN_FILE = "search.yaml"
"""Makes a folder a run folder."""
_STATED = re.compile(r"^trust_code\s*:.*$", re.MULTILINE)


def is_shipped(path: Path) -> bool:
    """Whether a file is part of the package, after links are followed."""
    real, shipped = path.resolve(), shipped_root().resolve()
    inside = Path(__file__).resolve().parent.parent
    folders = (inside, *(shipped / folder for folder in CONTENT_KINDS))
    return any(real.is_relative_to(folder) for folder in folders)


def find_owner(path: Path) -> Path:
    """The project that a file belongs to, after links are followed: the nearest folder upwards with settings.

    Without settings, the folder that holds its `launchers/`, `policies/`, ...; else the file's own.
    """
    real = path.resolve()
    for folder in real.parents:
        if os.path.isfile(folder / SETTINGS_FILE):
            return folder
    return real.parent.parent if real.parent.name in CODE_FOLDERS else real.parent


def require_trust(path: Path, what: str) -> None:
    """Raise UserError, in one line with the remedy, unless the code in `path` may run; `what` describes that code."""
    if is_shipped(path):
        return
    owner = find_owner(path)
    settings = load_settings(owner)
    if _is_in_run(path.resolve(), owner, owner / settings.runs):
        raise UserError(
            f"{str(path)!r} is {what}, but in a folder of runs, which may have been copied: nothing there runs. Move it"
            f" to {str(owner)!r}"
        )
    says_so = settings.trust_code
    if says_so and _is_confirmed(owner):
        return
    lack = (
        f"{SETTINGS_FILE} there has `{LINE}`, but you have not confirmed it for this folder on this machine (it may"
        " have been copied)"
        if says_so
        else f"{str(owner / SETTINGS_FILE)!r} does not have `{LINE}`"
    )
    raise UserError(
        f"{str(path)!r} is {what} of the project {str(owner)!r}, and code of a project does not run by itself: {lack}."
        f" Look at it, then run `ccl-search trust {shlex.quote(str(owner))}`, which writes the line and confirms it"
    )


def find_code(folder: str, name: str, suffix: str) -> Path:
    """As `find_content`, for a file that will run; raises UserError unless it may."""
    path = find_content(folder, name, suffix)
    require_trust(path, f"a {CONTENT_KINDS[folder]}")
    return path


def is_trusted(path: Path) -> bool:
    """Whether the code in a file may run."""
    try:
        require_trust(path, "code")
    except UserError:
        return False
    return True


def trust_project(folder: Path) -> None:
    """Write `trust_code: true` into the settings of a project and confirm it for this user and folder."""
    owner = folder.resolve()
    load_settings(owner)  # a malformed file must not be edited
    file = owner / SETTINGS_FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    with writing_to(file):
        if not load_settings(owner).trust_code:
            changed = _STATED.sub(LINE, text)
            if changed == text:
                start = "" if text.strip() in ("", "{}") else text.removesuffix("\n") + "\n"
                changed = f"{start}{LINE}\n"
            write_atomically(file, changed)
    if not load_settings(owner).trust_code:
        raise UserError(f"cannot add `{LINE}` to {str(file)!r}: write it there as a line of its own")
    confirm(owner)


def confirm(folder: Path) -> None:
    """Record that this user trusts the code of the folder on this machine."""
    owner = folder.resolve()
    record = _record_of(owner)
    with writing_to(record):
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(record, json.dumps({"path": str(owner), "inode": owner.stat().st_ino}))


def withdraw_trust(folder: Path) -> bool:
    """Remove the record of a folder; returns whether there was one. Its settings stay as they are."""
    record = _record_of(folder.resolve())
    with writing_to(record):
        if not record.exists():
            return False
        record.unlink()
    return True


def list_code(folder: Path) -> Iterator[Path]:
    """The files of a project that may run or say which programs run: Python files, frameworks, launcher profiles."""
    for name in CODE_FOLDERS:
        with contextlib.suppress(OSError):
            for path in sorted((folder / name).iterdir()):
                is_launch = name == "launchers" and path.suffix in (".yaml", ".yml")
                if path.suffix == ".py" or is_launch or path.stem.endswith(FRAMEWORK_SUFFIX):
                    yield path


def current_project() -> Path:
    """The user's project, with links followed."""
    return project_root().resolve()


def _is_in_run(real: Path, owner: Path, runs: Path) -> bool:
    """Whether a file of the project is in its folder of runs, or in any run folder."""
    inside = [folder for folder in real.parents if folder.is_relative_to(owner)]
    return real.is_relative_to(runs.resolve()) or any(os.path.lexists(folder / RUN_FILE) for folder in inside)


def _is_confirmed(owner: Path) -> bool:
    try:
        record = json.loads(_record_of(owner).read_text(encoding="utf-8"))
        return bool(record == {"path": str(owner), "inode": owner.stat().st_ino})
    except (OSError, ValueError):
        return False


def _record_of(owner: Path) -> Path:
    """The record of a folder: one file each, so that two commands never write the same one."""
    base = os.environ.get("XDG_STATE_HOME", "")
    state = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return state / "ccl-search" / "trusted" / hashlib.sha256(os.fsencode(str(owner))).hexdigest()[:32]
