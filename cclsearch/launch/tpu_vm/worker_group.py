"""Workers as the launcher sees them: commands to all, files out, one archive back; and those over plain SSH."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cclsearch.core.errors import UserError
from cclsearch.core.redact import public_environment
from cclsearch.core.text import one_line
from cclsearch.launch.tpu_vm.settings import HostTarget, TpuSettings

MARK = "CCL-WORKER "
CALL_S = 120.0
COPY_S = 1800.0

_PERMANENT = (
    "permission denied",
    "could not resolve hostname",
    "host key verification failed",
    "identity file",
    "bad configuration option",
    "name or service not known",
)


class Unreachable(Exception):
    """A worker, or the way to it, does not answer."""


@dataclass(frozen=True)
class WorkerAnswer:
    """What one worker said of its process of a job."""

    state: str
    """absent, running, ended, vanished."""
    port: int = 0
    code: int | None = None
    reason: str = ""
    oom: bool = False
    at: float = 0.0
    more: bool = False
    stdout: bytes = b""
    stderr: bytes = b""


@dataclass(frozen=True)
class WorkerAnswers:
    """One round: process -> answer, and process -> why there is none."""

    by_process: Mapping[int, WorkerAnswer]
    silent: Mapping[int, str] = field(default_factory=dict)


class WorkerGroup(Protocol):
    """The workers of one slice, in order."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where workers reach each other."""
        ...

    def push(self, file: Path, name: str, processes: Sequence[int]) -> Mapping[int, str]:
        """Copy a file into the home folder of these workers; process -> why it failed."""
        ...

    def call(self, command: str, arguments: Sequence[str], processes: Sequence[int]) -> WorkerAnswers:
        """Run a shell command and then `worker.py` with these arguments on each; `command` is a fixed text."""
        ...

    def pull(self, process: int, path: str, target: Path) -> None:
        """Copy one file back; raises Unreachable."""
        ...

    def explain_loss(self) -> str | None:
        """Why workers may be gone (preempted, deleted); None where nothing is known."""
        ...


def run_program(command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run without a shell, without secrets, without a terminal; a program that hangs is ended and told as 255."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=_tool_environment(),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 255, "", f"no answer within {timeout_s:g} s")
    except FileNotFoundError:
        raise UserError(f"{command[0]!r} is not to be found here: install it, or put it on PATH") from None
    except OSError as error:
        raise UserError(f"{command[0]!r} cannot be run: {error}") from None


def _tool_environment() -> dict[str, str]:
    """Without secrets, but with what gcloud itself is signed in by; neither ssh nor gcloud hands it to a worker."""
    own = {name: value for name, value in os.environ.items() if name.startswith("CLOUDSDK_")}
    return {**public_environment(), **own}


def read_answers(text: str) -> dict[int, WorkerAnswer]:
    """Every worker's answer among whatever else stands in the text."""
    found = {}
    for line in text.splitlines():
        start = line.find(MARK)
        if start >= 0:
            try:
                data = json.loads(line[start + len(MARK) :])
                found[int(data["process"])] = _read_answer(data)
            except (ValueError, KeyError, TypeError):
                continue
    return found


def _read_answer(data: Mapping[str, Any]) -> WorkerAnswer:
    code = data.get("code")
    return WorkerAnswer(
        state=str(data["state"]),
        port=int(data.get("port", 0)),
        code=None if code is None else int(code),
        reason=str(data.get("reason", "")),
        oom=bool(data.get("oom", False)),
        at=float(data.get("at", 0.0)),
        more=bool(data.get("more", False)),
        stdout=base64.b64decode(data.get("stdout", "")),
        stderr=base64.b64decode(data.get("stderr", "")),
    )


def shorten_error(text: str, code: int) -> str:
    """The last telling line of what a program said."""
    lines = [line for line in text.splitlines() if line.strip() and "Permanently added" not in line]
    return one_line(lines[-1], 300) if lines else f"exit code {code} and no message"


def is_permanent_error(text: str) -> bool:
    """Whether trying again would not help: the key, the name or the options are wrong."""
    return any(mark in text.lower() for mark in _PERMANENT)


class SshWorkerGroup:
    """Hosts over plain SSH; no cloud."""

    def __init__(self, settings: TpuSettings) -> None:
        self.settings = settings
        self.hosts = settings.hosts

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(host.address or host.host for host in self.hosts)

    def push(self, file: Path, name: str, processes: Sequence[int]) -> Mapping[int, str]:
        def copy(process: int) -> str:
            host = self.hosts[process]
            target = f"{_target(host, self.settings)}:{name}"
            done = run_program(["scp", *self._options(host, "-P"), "-q", "--", str(file), target], timeout_s=COPY_S)
            return shorten_error(done.stderr, done.returncode) if done.returncode else ""

        return {process: error for process, error in _map(copy, processes).items() if error}

    def call(self, command: str, arguments: Sequence[str], processes: Sequence[int]) -> WorkerAnswers:
        def ask(process: int) -> tuple[WorkerAnswer | None, str]:
            text = f"{command} {' '.join((*arguments, '--process', str(process)))}"
            done = run_program([*self.ssh_command(process), text], timeout_s=CALL_S)
            return read_answers(done.stdout).get(process), shorten_error(done.stderr, done.returncode)

        told = _map(ask, processes)
        answers = {process: answer for process, (answer, _) in told.items() if answer is not None}
        return WorkerAnswers(answers, {process: why for process, (answer, why) in told.items() if answer is None})

    def pull(self, process: int, path: str, target: Path) -> None:
        host = self.hosts[process]
        source = f"{_target(host, self.settings)}:{path}"
        done = run_program(["scp", *self._options(host, "-P"), "-q", "--", source, str(target)], timeout_s=COPY_S)
        if done.returncode:
            raise Unreachable(shorten_error(done.stderr, done.returncode))

    def explain_loss(self) -> str | None:
        return None

    def ssh_command(self, process: int) -> list[str]:
        """The command that runs a shell text on that host, without the text."""
        host = self.hosts[process]
        return ["ssh", *self._options(host, "-p"), "-T", "--", _target(host, self.settings)]

    def _options(self, host: HostTarget, port_flag: str) -> list[str]:
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.settings.connect_timeout_s}"]
        options += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ForwardAgent=no"]
        options += [word for option in self.settings.ssh_options for word in ("-o", option)]
        if self.settings.key_file is not None:
            options += ["-i", str(Path(self.settings.key_file).expanduser()), "-o", "IdentitiesOnly=yes"]
        if host.port is not None:
            options += [port_flag, str(host.port)]
        return options


def _target(host: HostTarget, settings: TpuSettings) -> str:
    user = host.user or settings.user
    return f"{user}@{host.host}" if user else host.host


def _map(function: Any, processes: Iterable[int]) -> dict[int, Any]:
    """The function of every process at once."""
    wanted = list(processes)
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(wanted)))) as pool:
        return dict(zip(wanted, pool.map(function, wanted), strict=True))
