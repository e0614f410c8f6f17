"""Decide whose code may run: the package's, and a project's that asks for it and that this user confirmed here.

`trust_code: true` in a project's `ccl-search.yaml` is copied with the folder, so it alone means nothing: a record in
the user's state folder says that this user gave it for this folder on this machine. The record has the folder's real
path, the identities (device, inode, birth time) of the folder and of a mark in it, and the mark's random token. A
folder that was made again has another birth time; one that was emptied and filled lost its mark, and a copied mark is
another file. If the file system gives no birth time, or nothing can be written there, the record counts for a day.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import secrets
import shlex
import struct
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.content import (
    CODE_FOLDERS,
    CONTENT_KINDS,
    FRAMEWORK_SUFFIX,
    find_content,
    shipped_root,
)
from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.job_file import JobFileError, read_job_text
from cclsearch.core.settings import SETTINGS_FILE, load_settings

_HERE = -100
"""`AT_FDCWD`: a relative path is one of the working directory."""
_BIRTH, _MOUNT = 0x800, 0x1000
"""`STATX_BTIME` and `STATX_MNT_ID` of statx(2)."""
_FIELDS = struct.Struct("<I28xQ40xqI52xQ104x")
"""Mask, inode, seconds and nanoseconds of the birth, mount: their places in the 256 bytes of statx(2)."""


class FileIdentity(NamedTuple):
    """One file or folder, as long as it exists; JSON keeps it as a list."""

    device: int
    inode: int
    born_ns: int | None
    """None where the file system or Python cannot say."""


def identify(path: Path) -> tuple[FileIdentity, int | None]:
    """The identity of what is at the path, links followed, and the number of its mount if known; OSError if missing.

    A bind mount has the device of its source, but a mount number of its own.
    """
    found = os.stat(path)
    born_s, mount = getattr(found, "st_birthtime", None), None
    born_ns = None if born_s is None else int(born_s * 1e9)
    buffer = ctypes.create_string_buffer(_FIELDS.size)
    call = _find_statx()
    if call is not None and call(_HERE, os.fsencode(path), 0, _BIRTH | _MOUNT, buffer) == 0:
        mask, inode, seconds, nanoseconds, number = _FIELDS.unpack(buffer.raw)
        if inode == found.st_ino:
            born_ns = seconds * 10**9 + nanoseconds if mask & _BIRTH else None
            mount = number if mask & _MOUNT else None
    return FileIdentity(found.st_dev, found.st_ino, born_ns), mount


@cache
def _find_statx() -> Any:
    """`statx` of the C library; None without it (Linux before 4.11, macOS)."""
    try:
        return ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return None


LINE = "trust_code: true"
RUN_FILE = "search.yaml"
"""Makes a folder a run folder."""
DAY_S = 24 * 3600.0
"""Seconds for which a record counts whose folder cannot be told from a later one."""
_MARK = f".ccl-search-{os.getuid()}"
"""Folder of this user's mark in a project. git ignores it, and each user of a shared project has one."""
_REPOSITORY = (".git", ".hg", ".jj", ".svn")
_STATED = re.compile(r"^trust_code\s*:.*$", re.MULTILINE)


def is_shipped(path: Path) -> bool:
    """Whether a file is part of the package, after links are followed."""
    real, shipped = path.resolve(), shipped_root().resolve()
    inside = Path(__file__).resolve().parent.parent
    folders = (inside, *(shipped / folder for folder in CONTENT_KINDS))
    return any(real.is_relative_to(folder) for folder in folders)


def find_owner(path: Path) -> Path:
    """The project that a file belongs to, after links are followed: the nearest of the folders upwards that counts.

    One counts if it has settings, is a repository, or holds the `launchers/`, `policies/`, ... in which the file is: a
    clone below a trusted folder is a project of its own. Else the file's own folder.
    """
    real = path.resolve()
    for folder in real.parents:
        if any(os.path.lexists(folder / name) for name in (SETTINGS_FILE, *_REPOSITORY)):
            return folder
        if folder.name in CODE_FOLDERS:
            return folder.parent
    return real.parent


def require_trust(path: Path, what: str) -> Path:
    """The real path of the code in `path`, which may run; `what` describes that code.

    Raises UserError, in one line with the remedy, if it may not. A caller that runs the returned path runs what was
    checked, even if a link on the way is changed meanwhile.
    """
    real = path.resolve()
    if is_shipped(real):
        return real
    owner = find_owner(real)
    settings = load_settings(owner)
    if brought := _find_foreign(real, owner, owner / settings.runs):
        why = f"{str(path)!r} is {what}, but {brought}"
        raise UserError(f"{why}: nothing of others runs. Put your own copy into {str(owner)!r}")
    lack = f"{str(owner / SETTINGS_FILE)!r} does not have `{LINE}`"
    if settings.trust_code:
        if _is_confirmed(owner):
            return real
        unsure = "you have not confirmed it for this folder on this machine (it may have been copied)"
        lack = f"{SETTINGS_FILE} there has `{LINE}`, but {unsure}"
    raise UserError(
        f"{str(path)!r} is {what} of the project {str(owner)!r}, and code of a project does not run by itself: {lack}."
        f" Look at it, then run `ccl-search trust {shlex.quote(str(owner))}`, which writes the line and confirms it"
    )


def find_code(folder: str, name: str, suffix: str) -> Path:
    """As `find_content`, for a file that will run, with links followed; raises UserError unless it may."""
    return require_trust(find_content(folder, name, suffix), f"a {CONTENT_KINDS[folder]}")


def find_trusted(path: Path) -> Path | None:
    """The real path of a file whose code may run; None if it may not."""
    try:
        return require_trust(path, "code")
    except UserError:
        return None


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
    token, mark = secrets.token_hex(16), owner / _MARK
    with contextlib.suppress(OSError):  # a folder that is only read has no mark
        mark.mkdir(exist_ok=True, mode=0o700)
        write_atomically(mark / ".gitignore", "*\n")
        write_atomically(mark / "trust", token)
    known = {"path": str(owner), "folder": identify(owner)[0], "mark": _read_mark(owner), "time_s": time.time()}
    with writing_to(record):
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(record, json.dumps(known))


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


def _find_foreign(real: Path, owner: Path, runs: Path) -> str:
    """Why what is at the path is not the project's own although the path is the project's; empty if it is."""
    inside = [folder for folder in real.parents if folder.is_relative_to(owner)]
    if real.is_relative_to(runs.resolve()) or any(os.path.lexists(folder / RUN_FILE) for folder in inside):
        return "it is in a folder of runs, which may have been copied"
    with contextlib.suppress(OSError):
        found = os.stat(real)
        if found.st_nlink > 1 and found.st_uid not in (0, os.getuid()):
            return "it is also the file of another user (a hard link)"
        if identify(real)[1] != identify(owner)[1]:
            return f"it is mounted into the project {str(owner)!r} from elsewhere"
    return ""


_DAILY: set[tuple[Path, FileIdentity]] = set()
"""Folders that this process asked about: a search that began does not end after a day."""


def _is_confirmed(owner: Path) -> bool:
    try:
        known = json.loads(_record_of(owner).read_text(encoding="utf-8"))
        folder, mark = identify(owner)[0], known["mark"]
        # A restart may renumber the devices, so the device counts only where the file system gives no birth time.
        first = 0 if folder.born_ns is None else 1
        pairs = [(known["folder"], [*folder])] + ([(mark, _read_mark(owner) or [])] if mark else [])
        if known["path"] != str(owner) or any(then[first:] != now[first:] for then, now in pairs):
            return False
        is_sure = mark and folder.born_ns is not None
        if is_sure or 0 <= time.time() - known["time_s"] < DAY_S:
            _DAILY.add((owner, folder))
        return (owner, folder) in _DAILY
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_mark(owner: Path) -> list[object] | None:
    """The identity and the token of this user's mark in a project; None without one."""
    path = owner / _MARK / "trust"
    try:
        return [*identify(path)[0], read_job_text(path)]
    except (OSError, JobFileError):
        return None


def _record_of(owner: Path) -> Path:
    """The record of a folder: one file each, so that two commands never write the same one."""
    base = os.environ.get("XDG_STATE_HOME", "")
    state = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return state / "ccl-search" / "trusted" / hashlib.sha256(os.fsencode(str(owner))).hexdigest()[:32]
