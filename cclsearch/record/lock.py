"""A lock for one writer per folder that works on file systems without locks, and after a kill or a reboot.

The lock is a file created by an atomic link; it names host, boot, PID namespace, process and the process's start time.
On the same host its holder is checked exactly: in the same PID namespace by its process id, in another (a container)
because the holder also has the file locked. Elsewhere, on another host or a file system without locks, a lock is stale
if not refreshed for ten minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import stat
import time
from pathlib import Path
from types import TracebackType

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, read_job_text
from cclsearch.core.lock_file import hold_file, is_held
from cclsearch.core.processes import ProcessIdentity, boot_clock_s

STALE_AFTER_S = 600.0
REFRESH_EVERY_S = 60.0


class FolderLock:
    """Context manager that locks a folder by `folder/lock`; raises UserError if a running process has the lock."""

    def __init__(self, folder: Path, *, purpose: str = "search") -> None:
        self.path = folder / "lock"
        own = ProcessIdentity.of(os.getpid())
        place = {"host": socket.gethostname(), "boot": own.boot, "pid_ns": own.pid_ns}
        self._own = {**place, "pid": own.pid, "start": own.start, "purpose": purpose}
        self._refreshed = 0.0
        self._held: int | None = None

    @property
    def _own_text(self) -> str:
        return json.dumps({**self._own, "held": self._held is not None}, sort_keys=True)

    def __enter__(self) -> FolderLock:
        for _ in range(20):
            if self._try_create():
                self._refreshed = time.monotonic()
                return self
            holder = _read(self.path)
            if holder is not None and _is_alive(holder, self.path):
                raise UserError(
                    f"{str(self.path.parent)!r} is in use by process {holder.get('pid')} on"
                    f" {holder.get('host')} ({holder.get('purpose', 'search')}{_explain_place(holder)})."
                    " Wait for it, or stop it"
                )
            self._remove_stale(holder)
        raise UserError(f"cannot lock {str(self.path.parent)!r}: other processes keep taking {str(self.path)!r}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            if _read_text(self.path) == self._own_text:
                self.path.unlink()
        self._release()

    def check_held(self) -> None:
        """Raise UserError if another process took the lock over; recreate a lock file that was deleted.

        A process that was suspended so long that it counted as dead must not write while another one continues the run.
        """
        try:
            holder = _read_text(self.path)
        except FileNotFoundError:
            if self._try_create():
                return
            holder = ""
        except OSError:
            return  # the file system is unavailable: the next write reports it
        if holder != self._own_text:
            found = _read(self.path) or {}
            raise UserError(
                f"{str(self.path.parent)!r} was taken over by process {found.get('pid')} on {found.get('host')}"
            )

    def refresh(self) -> None:
        """Update the lock's time stamp if it is due; to be called regularly while the lock is in use."""
        if time.monotonic() - self._refreshed > REFRESH_EVERY_S:
            self._refreshed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def _try_create(self) -> bool:
        own = self._name_beside()
        try:
            self._release()
            self._held = hold_file(own)
            own.write_text(self._own_text)
            try:
                os.link(own, self.path)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links: use exclusive creation
                self._release()
                with self.path.open("x") as file:
                    self._held = hold_file(self.path)
                    file.write(self._own_text)
            return True
        except FileExistsError:
            self._release()
            return False
        except OSError as error:
            raise UserError(f"cannot write in {str(self.path.parent)!r}: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                own.unlink()

    def _name_beside(self) -> Path:
        """Return a new name: host and process id may be the same in another PID namespace."""
        return self.path.with_name(f"lock.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}")

    def _release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _remove_stale(self, holder: dict[str, object] | None) -> None:
        """Rename the stale lock first, so that only one of two processes that find it stale removes it."""
        if holder is None and self.path.exists() and time.time() - self.path.stat().st_mtime < 2:
            time.sleep(0.1)  # being written right now, on a file system without hard links
            return
        aside = self._name_beside()
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        moved = _read(aside)
        if moved is not None and moved != holder and _is_alive(moved, aside):
            with contextlib.suppress(OSError):
                os.link(aside, self.path)
        with contextlib.suppress(OSError):
            aside.unlink()


def is_locked(folder: Path) -> bool:
    """Whether a running process has the folder's lock."""
    return _find_holder(folder) is not None


def name_holder(folder: Path) -> tuple[str, int] | None:
    """Host and process id of the running process that has the folder's lock; None if there is none."""
    holder = _find_holder(folder)
    return None if holder is None else (str(holder.get("host")), _identify(holder).pid)


def interrupt_holder(folder: Path) -> None:
    """Send SIGINT, as Ctrl-C does, to the process that has the folder's lock.

    Others may have written the lock, so the process that it names must have the folder's lock or ledger open to write.
    Raises UserError if there is none, or if it is not a process of this machine that can be recognized.
    """
    holder = _find_holder(folder)
    if holder is None:
        raise UserError("no running process has this run")
    pid, where = holder.get("pid"), f"process {holder.get('pid')} on {holder.get('host')}"
    if not isinstance(pid, int) or holder.get("host") != socket.gethostname() or not _identify(holder).is_running():
        raise UserError(f"the search is {where}, which cannot be stopped from here: press Ctrl-C there")
    try:
        process = os.pidfd_open(pid)  # the number cannot become another process's while this is open
        try:
            if not _identify(holder).is_running() or not _writes_to(pid, folder):
                raise UserError(f"the lock names {where}, which does not write to this run: it was not stopped")
            signal.pidfd_send_signal(process, signal.SIGINT)
        finally:
            os.close(process)
    except OSError as error:
        raise UserError(f"cannot stop {where}: {error.strerror}") from None


def _writes_to(pid: int, folder: Path) -> bool:
    """Whether a process of this user has the folder's lock or ledger open to write."""
    wanted = [os.lstat(folder / name) for name in ("lock", "ledger.jsonl") if os.path.lexists(folder / name)]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.lstat().st_mode & stat.S_IWUSR and any(os.path.samestat(link.stat(), file) for file in wanted):
                return True
    return False


def _identify(holder: dict[str, object]) -> ProcessIdentity:
    """Return the process that a lock names; its number is 0 if the lock names none."""
    pid, boot, start, pid_ns = (holder.get(name) for name in ("pid", "boot", "start", "pid_ns"))
    number = pid if isinstance(pid, int) else 0
    return ProcessIdentity(number, str(boot or ""), str(start or ""), str(pid_ns or ""))


def _read_text(path: Path) -> str:
    """The content of a lock; "" unless it is a regular file: reading a FIFO would block."""
    try:
        return read_job_text(path)
    except JobFileError:
        return ""


def _read(path: Path) -> dict[str, object] | None:
    try:
        holder = json.loads(_read_text(path))
    except (OSError, ValueError):
        return None
    return holder if isinstance(holder, dict) else None


def _find_holder(folder: Path) -> dict[str, object] | None:
    """Return what the folder's lock says of the running process that has it; None if there is none."""
    holder = _read(folder / "lock")
    return holder if holder is not None and _is_alive(holder, folder / "lock") else None


def _is_alive(holder: dict[str, object], path: Path) -> bool:
    if holder.get("host") != socket.gethostname():
        return _is_fresh(path)
    process = _identify(holder)
    if not process.is_of_this_boot:
        # refreshed after this machine started: another machine with the same name does that
        return _is_fresh(path, min(boot_clock_s(), STALE_AFTER_S))
    if process.is_elsewhere:
        held = is_held(path) if holder.get("held") is True else None
        return _is_fresh(path) if held is None else held
    pid = holder.get("pid")
    if not isinstance(pid, int):
        return False
    now = ProcessIdentity.of(pid)
    if now.start:
        return now.start == process.start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc").is_dir()


def _explain_place(holder: dict[str, object]) -> str:
    process = _identify(holder)
    is_here = holder.get("host") == socket.gethostname() and process.is_of_this_boot
    return ", in another PID namespace, such as a container" if is_here and process.is_elsewhere else ""


def _is_fresh(path: Path, age_s: float = STALE_AFTER_S) -> bool:
    """Whether the lock was refreshed in the last minutes."""
    try:
        return time.time() - path.stat().st_mtime < age_s
    except OSError:
        return False
