"""The workers of a slice: run commands on them, copy files; their sources, and those over plain SSH."""

from __future__ import annotations

import contextlib
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from pydantic import Base64Bytes, ConfigDict

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import public_environment
from cclsearch.core.text import one_line
from cclsearch.core.values import Failure, Model
from cclsearch.launch.base import Check, Leftover
from cclsearch.launch.fault_rules import read_refusals
from cclsearch.launch.tpu_vm.settings import HostTarget, TpuSettings

MARK = "CCL-WORKER "
CALL_S = 120.0
COPY_S = 1800.0


class Unreachable(Exception):
    """A worker, or the connection to it, does not answer."""


class WorkerState(StrEnum):
    """State of a worker's process of a job."""

    ABSENT = "absent"
    RUNNING = "running"
    ENDED = "ended"
    VANISHED = "vanished"


class WorkerAnswer(Model):
    """One worker's answer about its process of a job."""

    model_config = ConfigDict(extra="ignore")

    process: int
    state: WorkerState
    port: int = 0
    code: int | None = None
    reason: str = ""
    oom: bool = False
    more: bool = False
    stdout: Base64Bytes = b""
    stderr: Base64Bytes = b""


@dataclass(frozen=True)
class WorkerAnswers:
    """Answers of one round: process -> answer, or process -> why there is none."""

    by_process: Mapping[int, WorkerAnswer]
    silent: Mapping[int, str] = field(default_factory=dict)


class WorkerGroup(Protocol):
    """The workers of one slice, in order of their process numbers."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which the workers reach each other."""

    def push(self, file: Path, name: str, processes: Sequence[int]) -> Mapping[int, str]:
        """Copy a file into the home folder of these workers; return process -> error for failed copies."""

    def call(self, command: str, arguments: Sequence[str], processes: Sequence[int]) -> WorkerAnswers:
        """Run the shell text `command`, which ends in a call of `worker.py`, with these arguments on each worker."""

    def pull(self, process: int, path: str, target: Path) -> None:
        """Copy one file from a worker; raises Unreachable."""

    def explain_loss(self) -> str | None:
        """Return why the workers were lost (preempted, deleted); None if unknown."""


def run_program(command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program without shell, secrets or terminal; one that exceeds the timeout is killed and returns 255."""
    gcloud_login = {name: value for name, value in os.environ.items() if name.startswith("CLOUDSDK_")}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**public_environment(), **gcloud_login},  # which no worker gets
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 255, "", f"no answer within {timeout_s:g} s")
    except FileNotFoundError:
        raise UserError(f"{command[0]!r} was not found here; install it, or put it on PATH") from None
    except OSError as error:
        raise UserError(f"{command[0]!r} could not be run: {error}") from None


def read_answers(text: str) -> dict[int, WorkerAnswer]:
    """Return every worker's answer in the text, which may contain other output."""
    found = {}
    for line in text.splitlines():
        start = line.find(MARK)
        if start >= 0:
            with contextlib.suppress(ValueError):
                answer = WorkerAnswer.model_validate_json(line[start + len(MARK) :])
                found[answer.process] = answer
    return found


def shorten_error(text: str, code: int) -> str:
    """Return the last meaningful line of a program's error output."""
    lines = [line for line in text.splitlines() if line.strip() and "Permanently added" not in line]
    return one_line(lines[-1], 300) if lines else f"exit code {code} and no message"


def is_permanent_error(text: str) -> bool:
    """Whether a retry cannot help: the key, the host name or the options are wrong."""
    return bool(read_refusals("ssh", text))


class SshWorkerGroup:
    """Hosts over plain SSH, without a cloud."""

    def __init__(self, settings: TpuSettings) -> None:
        self.settings = settings
        self.hosts = settings.hosts
        self.addresses = tuple(host.address or host.host for host in self.hosts)

    def push(self, file: Path, name: str, processes: Sequence[int]) -> Mapping[int, str]:
        errors = _map(lambda process: self._copy(process, str(file), self._place(process, name)), processes)
        return {process: error for process, error in errors.items() if error}

    def call(self, command: str, arguments: Sequence[str], processes: Sequence[int]) -> WorkerAnswers:
        def query(process: int) -> tuple[WorkerAnswer | None, str]:
            text = f"{command} {' '.join((*arguments, '--process', str(process)))}"
            done = run_program([*self.ssh_command(process), text], timeout_s=CALL_S)
            return read_answers(done.stdout).get(process), shorten_error(done.stderr, done.returncode)

        replies = _map(query, processes)
        answers = {process: answer for process, (answer, _) in replies.items() if answer is not None}
        return WorkerAnswers(answers, {process: why for process, (answer, why) in replies.items() if answer is None})

    def pull(self, process: int, path: str, target: Path) -> None:
        error = self._copy(process, self._place(process, path), str(target))
        if error:
            raise Unreachable(error)

    def explain_loss(self) -> str | None:
        return None

    def ssh_command(self, process: int) -> list[str]:
        """Return the ssh command for that host, to which a shell text is appended."""
        host = self.hosts[process]
        return ["ssh", *self._options(host, "-p"), "-T", "--", self._target(host)]

    def _copy(self, process: int, source: str, target: str) -> str:
        """Copy a file from or to that host; return the error, empty if there is none."""
        options = self._options(self.hosts[process], "-P")
        done = run_program(["scp", *options, "-q", "--", source, target], timeout_s=COPY_S)
        return shorten_error(done.stderr, done.returncode) if done.returncode else ""

    def _place(self, process: int, path: str) -> str:
        return f"{self._target(self.hosts[process])}:{path}"

    def _target(self, host: HostTarget) -> str:
        user = host.user or self.settings.user
        return f"{user}@{host.host}" if user else host.host

    def _options(self, host: HostTarget, port_flag: str) -> list[str]:
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.settings.connect_timeout_s}"]
        options += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ForwardAgent=no"]
        options += [word for option in self.settings.ssh_options for word in ("-o", option)]
        if self.settings.key_file is not None:
            options += ["-i", str(Path(self.settings.key_file).expanduser()), "-o", "IdentitiesOnly=yes"]
        if host.port is not None:
            options += [port_flag, str(host.port)]
        return options


def _map(function: Any, processes: Iterable[int]) -> dict[int, Any]:
    """Call the function for every process in parallel; return process -> result."""
    wanted = list(processes)
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(wanted)))) as pool:
        return dict(zip(wanted, pool.map(function, wanted), strict=True))


@dataclass(frozen=True)
class WorkersReady:
    """The workers are ready; `name` distinguishes them from later ones."""

    group: WorkerGroup
    name: str


@dataclass(frozen=True)
class WorkersPending:
    """The workers are not ready yet."""

    note: str
    uncertain: bool = False
    """Whether the state is unknown: a job that runs there is then kept until its time limit has passed."""
    unanswered: bool = False
    """Whether the state is unknown because gcloud did not answer."""


@dataclass(frozen=True)
class WorkersLost:
    """The workers will not become ready, or were lost."""

    failure: Failure


WorkersState = WorkersReady | WorkersPending | WorkersLost


class WorkerSource(ABC):
    """The source of a search's workers. `run_id` labels everything that is created; by default, nothing is."""

    @abstractmethod
    def find_workers(self, run_id: str) -> WorkersState:
        """Return the state of the workers; UserError if the user must log in first."""

    @abstractmethod
    def check(self) -> list[Check]:
        """Check whether the workers can be reached from here."""

    def request(self, run_id: str) -> None:  # noqa: B027
        """Request workers unless they exist; UserError if that can never work, TrialError if it fails now."""

    def recorded_run(self) -> str | None:
        """Return the run whose recorded request may still exist, or None."""
        return None

    def release(self, run_id: str, *, thorough: bool = False) -> None:  # noqa: B027
        """Delete the run's resources and wait until they are gone; UserError if that fails.

        `thorough` also searches by the run's label if no request is recorded.
        """

    def leftovers(self, run_id: str) -> list[Leftover]:
        """Return the run's resources that still exist."""
        return []


class HostsSource(WorkerSource):
    """Hosts named in the profile: always there, never deleted."""

    def __init__(self, settings: TpuSettings) -> None:
        self.settings = settings
        self._group = SshWorkerGroup(settings)

    def find_workers(self, run_id: str) -> WorkersState:
        return WorkersReady(self._group, "")

    def check(self) -> list[Check]:
        checks = [Check.of_program(name, name, "install an OpenSSH client") for name in ("ssh", "scp")]
        for process, host in enumerate(self.settings.hosts):
            command = [*self._group.ssh_command(process), "python3 -c 'import sys; print(sys.version.split()[0])'"]
            done = run_program(command, timeout_s=60.0)
            ok = done.returncode == 0
            detail = f"python3 {done.stdout.strip()}" if ok else shorten_error(done.stderr, done.returncode)
            remedy = "check that `ssh` to it works without a password and that it has python3"
            if is_permanent_error(done.stderr):
                remedy = "correct `user`, `key_file` or the host's name, or accept its host key once by hand"
            checks.append(Check.of(f"worker {process}", ok, f"{host.host}: {detail}", remedy))
        return checks
