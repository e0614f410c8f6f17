"""Find the workers: the base class, and hosts named in the profile (`cloud_source` has the TPU VMs)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

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
        programs = [Check.of_program(name, name, "install an OpenSSH client") for name in ("ssh", "scp")]
        return [*programs, *self._check_hosts()]

    def _check_hosts(self) -> Sequence[Check]:
        checks = []
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
