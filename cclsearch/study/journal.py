"""Appends to an Optuna journal (`JournalFileBackend`), which other programs may read and write at the same time.

Trials and studies of a journal are numbered in the order in which its lines create them, so this writer reads
what others appended before it appends, and keeps nothing else of the file in memory.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import orjson

from cclsearch.core.atomic_file import NEW_FILE_MODE

# Optuna's other writers hold the lock for milliseconds: an older one was left by a killed process.
LOCK_WAIT_S = 3.0
"""Seconds to wait for the lock."""
WORKER = "ccl-search"
Log = dict[str, Any]


class Operation(IntEnum):
    """Operation of a line of a journal: Optuna's `JournalOperation`."""

    CREATE_STUDY = 0
    DELETE_STUDY = 1
    SET_STUDY_USER_ATTR = 2
    SET_STUDY_SYSTEM_ATTR = 3
    CREATE_TRIAL = 4
    SET_TRIAL_STATE_VALUES = 6
    SET_TRIAL_INTERMEDIATE_VALUE = 7
    SET_TRIAL_USER_ATTR = 8


class DamagedJournal(ValueError):
    """A journal that Optuna cannot read, or that is not the file that was written before."""


class Journal:
    """A journal that is appended to; every method raises OSError, or DamagedJournal if it cannot be continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.studies: dict[int, str] = {}
        """Number -> name of the studies that were not deleted."""
        self.num_trials = 0
        self.num_studies = 0
        """Number of all studies, and so of the next one."""
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self, take: Callable[[Log], None] | None = None) -> None:
        """Read the whole journal from its start, giving each line to `take`; a last line that was cut off is removed.

        Creates the file if there is none.
        """
        self.studies, self.num_trials, self.num_studies, self._offset = {}, 0, 0, 0
        self._identity = None
        with self._locked(), self._opened() as file:
            self._follow(file, take)
            if os.fstat(file).st_size > self._offset:
                os.ftruncate(file, self._offset)

    def replace(self) -> None:
        """Move the file aside, as `study.log.damaged`, and begin an empty one."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path, self.path.with_name(f"{self.path.name}.damaged"))
        self.read()

    def append(self, make: Callable[[], Sequence[Log]]) -> None:
        """Append all that `make` returns, or nothing; `num_trials` and `studies` are up to date when it is called."""
        with self._locked(), self._opened() as file:
            self._follow(file, None)
            size = os.fstat(file).st_size
            if size != self._offset:
                raise DamagedJournal("its last line was cut off")
            logs = make()
            data = b"".join(orjson.dumps({**log, "worker_id": WORKER}) + b"\n" for log in logs)
            try:
                written = os.write(file, data)
                if written < len(data):
                    raise OSError(f"only {written} of {len(data)} bytes of {str(self.path)!r} could be written")
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size)
                raise
            self._offset += len(data)
            for log in logs:
                self._count(log)

    def _follow(self, file: int, take: Callable[[Log], None] | None) -> None:
        """Read the lines since the last call."""
        if os.fstat(file).st_size < self._offset:
            raise DamagedJournal("it was cut off")
        while chunk := self._read_lines(file):
            for line in chunk.split(b"\n")[:-1]:
                try:
                    log = orjson.loads(line)
                    self._count(log)
                    if take is not None:
                        take(log)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise DamagedJournal("a line is not one of an Optuna journal") from None
            self._offset += len(chunk)

    def _read_lines(self, file: int, size: int = 1 << 20) -> bytes:
        """Return whole lines from the present offset; empty at the end, or before a line that was cut off."""
        data = os.pread(file, size, self._offset)
        end = data.rfind(b"\n") + 1
        return self._read_lines(file, 2 * size) if not end and len(data) == size < 1 << 26 else data[:end]

    def _count(self, log: Log) -> None:
        """Count as Optuna does, by what the line creates."""
        match log["op_code"]:
            case Operation.CREATE_STUDY if log["study_name"] not in self.studies.values():
                self.studies[self.num_studies] = log["study_name"]
                self.num_studies += 1
            case Operation.DELETE_STUDY:
                self.studies.pop(log["study_id"], None)
            case Operation.CREATE_TRIAL if log["study_id"] in self.studies:
                self.num_trials += 1

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        create = os.O_CREAT if self._identity is None else 0
        try:
            file = os.open(self.path, flags | create, NEW_FILE_MODE)
        except FileNotFoundError:
            raise DamagedJournal("it was removed") from None
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{str(self.path)!r} is not a regular file")
            identity = (status.st_dev, status.st_ino)
            if self._identity not in (None, identity):
                raise DamagedJournal("it was replaced by another file")
            self._identity = identity
            yield file
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of Optuna's `JournalFileSymlinkLock`; one that stays for `LOCK_WAIT_S` is removed once."""
        lock = f"{self.path}.lock"
        deadline_s, is_forced = time.monotonic() + LOCK_WAIT_S, False
        while True:
            try:
                os.symlink(self.path.name, lock)
                break
            except FileExistsError:
                if time.monotonic() < deadline_s:
                    time.sleep(0.005)
                elif is_forced:
                    raise OSError(f"{lock!r} is held by another process") from None
                else:
                    os.unlink(lock)
                    is_forced, deadline_s = True, time.monotonic() + LOCK_WAIT_S
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(lock)
