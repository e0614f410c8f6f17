"""A real pseudo-terminal with a screen that can be read, for tests of what a person sees."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyte

ROOT = Path(__file__).parent.parent
Look = Callable[["Terminal"], bool]


class Terminal:
    """A `ccl-search` command that runs on a terminal of its own."""

    def __init__(self, *words: str, folder: Path, columns: int = 80, rows: int = 24, path: Path | None = None) -> None:
        self.screen: Any = pyte.Screen(columns, rows)
        self._stream: Any = pyte.ByteStream(self.screen)
        self.raw = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(folder)
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
                self._set_size(0, columns, rows)
                size = {"COLUMNS": "", "LINES": "", "TERM": "xterm-256color"}
                code = os.pathsep.join(map(str, filter(None, (ROOT, path))))
                environment = {**os.environ, **size, "PYTHONPATH": code, "NO_COLOR": ""}
                os.execve(sys.executable, [sys.executable, "-m", "cclsearch", *words], environment)
            finally:
                os._exit(127)

    @staticmethod
    def _set_size(descriptor: int, columns: int, rows: int) -> None:
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._set_size(self._fd, columns, rows)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait(self, look: Look, timeout_s: float = 90.0) -> list[str]:
        """The screen once `look` is true of it; an error with the screen if that does not happen in time."""
        end_s = time.monotonic() + timeout_s
        while not look(self):
            if time.monotonic() > end_s or not self._read(0.2):
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError("never seen; the screen is\n" + "\n".join(self.lines))
        return self.lines

    def finish(self, timeout_s: float = 90.0) -> int:
        """Read to the end; the exit code."""
        end_s = time.monotonic() + timeout_s
        while self._read(0.2):
            if time.monotonic() > end_s:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError("did not end; the screen is\n" + "\n".join(self.lines))
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self, wait_s: float) -> bool:
        """Take what has come; False once the command has closed the terminal."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)
