"""Where the workers come from: hosts that are named, or (through `gcloud`) a TPU VM that exists or is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cclsearch.core.values import Failure
from cclsearch.launch.base import Check, Leftover
from cclsearch.launch.tpu_vm.settings import TpuSettings
from cclsearch.launch.tpu_vm.worker_group import (
    SshWorkerGroup,
    WorkerGroup,
    is_permanent_error,
    run_program,
    shorten_error,
)


@dataclass(frozen=True)
class WorkersReady:
    """The workers are there; `name` tells them from later ones."""

    group: WorkerGroup
    name: str


@dataclass(frozen=True)
class WorkersPending:
    """Not yet."""

    note: str
    uncertain: bool = False
    """Whether it could not be told: a job that runs there is not given up for it before its time is over."""
    unanswered: bool = False
    """Whether that is because nobody answered."""


@dataclass(frozen=True)
class WorkersLost:
    """They will not come, or are gone."""

    failure: Failure


WorkersState = WorkersReady | WorkersPending | WorkersLost


class WorkerSource(Protocol):
    """The source of a search's workers. `run_id` labels whatever is created."""

    def request(self, run_id: str) -> None:
        """See that workers are there or asked for; UserError where that can never work, TrialError where not now."""
        ...

    def find_workers(self, run_id: str) -> WorkersState:
        """How it stands; UserError where the user must log in first."""
        ...

    def recorded_run(self) -> str | None:
        """The run whose request is remembered here and not known to be deleted."""
        ...

    def release(self, run_id: str, *, thorough: bool = False) -> None:
        """Delete what was created for the run, until it is gone; UserError where it cannot be.

        `thorough` looks for the run's label too, where nothing here remembers a request.
        """
        ...

    def leftovers(self, run_id: str) -> list[Leftover]:
        """What was created for the run and still exists."""
        ...

    def check(self) -> list[Check]:
        """Whether it works from here."""
        ...


class HostsSource:
    """Hosts named in the profile: always there, never ours to delete."""

    def __init__(self, settings: TpuSettings) -> None:
        self.settings = settings
        self._group = SshWorkerGroup(settings)

    def request(self, run_id: str) -> None:
        """Nothing has to be asked for."""

    def find_workers(self, run_id: str) -> WorkersState:
        return WorkersReady(self._group, "")

    def recorded_run(self) -> str | None:
        return None

    def release(self, run_id: str, *, thorough: bool = False) -> None:
        """Nothing was created."""

    def leftovers(self, run_id: str) -> list[Leftover]:
        return []

    def check(self) -> list[Check]:
        return [*(self._check_program(name) for name in ("ssh", "scp")), *self._check_hosts()]

    def _check_program(self, name: str) -> Check:
        import shutil

        found = shutil.which(name)
        remedy = "" if found else "install an OpenSSH client"
        return Check(name=name, ok=found is not None, detail=found or f"{name} is not to be found", remedy=remedy)

    def _check_hosts(self) -> Sequence[Check]:
        checks = []
        for process, host in enumerate(self.settings.hosts):
            command = [*self._group.ssh_command(process), "python3 -c 'import sys; print(sys.version.split()[0])'"]
            done = run_program(command, timeout_s=60.0)
            ok = done.returncode == 0
            detail = f"{host.host}: python3 {done.stdout.strip()}"
            if not ok:
                detail = f"{host.host}: {shorten_error(done.stderr, done.returncode)}"
            remedy = "" if ok else "see that `ssh` to it works without a password, and that it has python3"
            if is_permanent_error(done.stderr):
                remedy = "correct `user`, `key_file` or the host's name; accept its host key once by hand"
            checks.append(Check(name=f"worker {process}", ok=ok, detail=detail, remedy=remedy))
        return checks
