"""Workers in Google Cloud: an existing TPU VM, or a queued resource that the search creates and deletes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import BootMoment, Failure, FailureKind, Stage
from cclsearch.launch.base import Check, Leftover, submit_error, write_model
from cclsearch.launch.ownership import RunPlace
from cclsearch.launch.tpu_vm.gcloud import (
    GONE_NODE,
    CloudLocation,
    Gcloud,
    GcloudError,
    GcloudWorkerGroup,
    has_label_name,
    make_label,
    make_token,
    name_resource,
    raise_if_denied,
    read_token,
    require_gcloud,
    resolve_project,
    with_location,
)
from cclsearch.launch.tpu_vm.settings import QueuedResource, TpuSettings
from cclsearch.launch.tpu_vm.workers import (
    HostsSource,
    WorkersLost,
    WorkerSource,
    WorkersPending,
    WorkersReady,
    WorkersState,
)

RUN_LABEL = "ccl-run"
REQUEST_FILE = "queued-resource.json"
LOCATION_FILE = "tpu-site.json"
READY_CACHE_S = 60.0
"""Seconds that a ready slice is assumed to stay ready; a silent worker triggers a query at once."""
LIST_TIMEOUT_S = 120.0
"""Seconds that listing the zone is retried after the recorded resource was deleted."""
_PAUSE_S = 1.0
_WAITING = frozenset({"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"})
_OVER = frozenset({"SUSPENDING", "SUSPENDED", "DELETING", "NOT_FOUND"})


class QueuedResourceRecord(CloudLocation):
    """`queued-resource.json` of a run: written before the request, so that a kill during it leaves a record."""

    run_id: str
    generation: int
    """Counts requests: after a preemption or refusal, the next request has another name."""
    name: str
    moment: BootMoment
    deleted: bool = False
    place: RunPlace


class CloudSource(WorkerSource):
    """Workers in Google Cloud, in the recorded project and zone."""

    def __init__(self, settings: TpuSettings, run_dir: Path | None, location: CloudLocation | None) -> None:
        self.run_dir = run_dir
        self.settings = with_location(settings, location)
        self._ready: tuple[float, WorkersReady] | None = None

    @property
    def gcloud(self) -> Gcloud:
        """gcloud in the project and zone of the settings."""
        return Gcloud(self.settings)

    def _find(self, what: str, query: Callable[[], WorkersState]) -> WorkersState:
        """Return the state by a query of gcloud; ready workers count as ready for `READY_CACHE_S`."""
        if self._ready is not None and time.monotonic() - self._ready[0] < READY_CACHE_S:
            return self._ready[1]
        try:
            found = query()
        except GcloudError as error:
            raise_if_denied(error, what)
            note = f"gcloud does not answer: {one_line(str(error), 120)}"
            return WorkersPending(note, uncertain=True, unanswered=True)
        self._ready = (time.monotonic(), found) if isinstance(found, WorkersReady) else None
        return found

    def _check(self, name: str, *words: str) -> list[Check]:
        remedy = "install the Google Cloud CLI, or name it with `gcloud:` in the profile"
        program = Check.of_program("gcloud", self.settings.gcloud, remedy)
        return [program, _check_call(self.gcloud, name, *words)] if program.ok else [program]


class TpuVmSource(CloudSource):
    """An existing TPU VM: used, never deleted."""

    def __init__(self, settings: TpuSettings, run_dir: Path | None) -> None:
        super().__init__(settings, run_dir, CloudLocation.read(run_dir / LOCATION_FILE) if run_dir else None)
        self._name = str(settings.tpu)

    def request(self, run_id: str) -> None:
        require_gcloud(self.settings)
        self._record_project()
        try:
            state = str(self.gcloud.describe_node(self._name)["state"])
        except GcloudError as error:
            raise _refused(f"TPU VM {self._name!r}", error) from None
        if state in GONE_NODE:
            raise UserError(
                f"the TPU VM {self._name!r} in {self.settings.zone} is {state}; start it, or name another one"
            )

    def find_workers(self, run_id: str) -> WorkersState:
        return self._find(f"the TPU VM {self._name!r}", lambda: find_node_workers(self.gcloud, self._name))

    def _record_project(self) -> None:
        """Record the project once: gcloud's default may be another one when the search is resumed."""
        if self.settings.project is None:
            self.settings = resolve_project(self.settings)
            if self.run_dir is not None:
                location = CloudLocation(project=self.settings.project, zone=self.settings.zone)
                write_model(self.run_dir / LOCATION_FILE, location)

    def check(self) -> list[Check]:
        return self._check(f"TPU VM {self._name}", "tpu-vm", "describe", self._name)


class QueuedResourceSource(CloudSource):
    """One queued resource per search: named and labeled after the run, deleted when no job of it is left."""

    def __init__(self, settings: TpuSettings, resource: QueuedResource, run_dir: Path | None) -> None:
        self.resource, self.run_dir = resource, run_dir
        self._request: QueuedResourceRecord | None = None
        super().__init__(settings, run_dir, self._read_record())

    def request(self, run_id: str) -> None:
        require_gcloud(self.settings)
        record = self._read_record()
        if record is not None and not record.deleted:
            try:
                if self._is_usable(record.name):
                    return
                self._delete_until_gone([record.name])
            except GcloudError as error:
                raise _refused(f"queued resource {record.name!r}", error) from None
        self.settings = resolve_project(self.settings)
        generation, token = record.generation + 1 if record else 1, make_token(self.run_dir)
        name = name_resource(run_id, token, generation)
        self._ready = None
        if self.run_dir is None:
            raise ValueError("a queued resource must be recorded in a run's folder, but there is none")
        request = QueuedResourceRecord(
            run_id=run_id,
            generation=generation,
            name=name,
            moment=BootMoment.now(),
            place=RunPlace.of(self.run_dir),
            project=self.settings.project,
            zone=self.settings.zone,
        )
        self._write(self.run_dir, request)
        try:
            self.gcloud.create_queued(
                name, self.resource, {**self.resource.labels, RUN_LABEL: make_label(run_id, token)}
            )
        except GcloudError as error:
            raise _refused(f"queued resource {name!r} ({self.resource.accelerator_type})", error) from None

    def find_workers(self, run_id: str) -> WorkersState:
        record = self._read_record()
        if record is None or record.deleted:
            return _lost(FailureKind.PREEMPTED, "the search's queued resource was deleted")
        return self._find(
            f"the queued resource {record.name!r}",
            lambda: self._read_state(record, self.gcloud.describe_queued(record.name)),
        )

    def recorded_run(self) -> str | None:
        record = self._read_record()
        return record.run_id if record is not None and not record.deleted else None

    def release(self, run_id: str, *, thorough: bool = False) -> None:
        """Delete the recorded resource first, even if listing fails; then the run's others in the zone's list."""
        record = self._read_record()
        own = [record.name] if record is not None and not record.deleted else []
        if not own and not thorough:
            return
        deadline = time.monotonic() + self.settings.delete_patience_s
        problems: list[GcloudError] = []
        for is_listed in (False, True):
            try:
                self._delete_until_gone(self._list_ours(run_id) if is_listed else own, deadline)
            except GcloudError as error:
                problems.append(error)
        if problems:
            raise UserError(
                f"a queued resource of {run_id} may still exist and cost money: {problems[0]};"
                f" retry with `ccl-search clean {run_id}`, or see `gcloud compute tpus queued-resources list`"
            )
        self._ready = None
        if record is not None and self.run_dir is not None:
            self._write(self.run_dir, record.model_copy(update={"deleted": True}))

    def leftovers(self, run_id: str) -> list[Leftover]:
        """Return the zone's queued resources with this run's label or name, in any state."""
        require_gcloud(self.settings)
        try:
            return self._find_ours(run_id)
        except GcloudError as error:
            raise UserError(f"could not list the queued resources: {error}") from None

    def _find_ours(self, run_id: str) -> list[Leftover]:
        """Return the run's resources in the zone; none if it never requested any: another run may have its name."""
        record, token = self._read_record(), read_token(self.run_dir)
        if record is None and token is None:
            return []
        label = make_label(run_id, token) if token is not None else None
        found = []
        for item in self.gcloud.list_queued():
            name = str(item.get("name", "")).rpartition("/")[2]
            is_labeled = label is not None and (label in _labels(item) or has_label_name(label, name))
            if is_labeled or (record is not None and name == record.name):
                found.append(Leftover(kind="queued resource", name=name, state=_state(item)))
        return found

    def _list_ours(self, run_id: str) -> list[str]:
        """Return the names of the run's resources in the zone; retries, then raises GcloudError."""
        deadline = time.monotonic() + min(LIST_TIMEOUT_S, self.settings.delete_patience_s)
        while True:
            try:
                return [item.name for item in self._find_ours(run_id)]
            except GcloudError as error:
                if error.is_denied or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def check(self) -> list[Check]:
        return self._check(f"queue of {self.settings.zone}", "queued-resources", "list")

    def _is_usable(self, name: str) -> bool:
        state = _state(self.gcloud.describe_queued(name))
        if state == "ACTIVE":
            return str(self.gcloud.describe_node(name)["state"]) not in GONE_NODE
        return state not in _OVER and state != "FAILED"

    def _read_state(self, record: QueuedResourceRecord, found: Mapping[str, Any]) -> WorkersState:
        state, named = _state(found), f"queued resource {record.name!r}"
        if state == "ACTIVE":
            return find_node_workers(self.gcloud, record.name)
        if state in _OVER:
            return _lost(FailureKind.PREEMPTED, f"{named} is {state}: its TPU VM was preempted")
        if state == "FAILED":
            why = one_line(str(_look_up(found, "state", "failedData", "error", "message") or "no reason given"), 300)
            return _lost(FailureKind.LAUNCHER, f"{named} failed: {why}", Stage.SUBMIT)
        waited_min = record.moment.elapsed_s() / 60
        limit = self.settings.queue_limit_min
        if state in _WAITING and limit is not None and waited_min > limit:
            message = f"{named} was {state} for {waited_min:.0f} min, more than queue_limit_min ({limit:g})"
            try:
                self.release(record.run_id)
            except UserError as error:  # reported with the failed attempt; `close` retries
                message = f"{message}; {error}"
            return _lost(FailureKind.LAUNCHER, message, Stage.SUBMIT)
        return WorkersPending(f"{named}: {state}", uncertain=state not in _WAITING)

    def _delete_until_gone(self, names: list[str], deadline: float | None = None) -> None:
        """Request deletion until all are gone; raise GcloudError at the deadline, or at once without a login."""
        if deadline is None:
            deadline = time.monotonic() + self.settings.delete_patience_s
        pause_s = _PAUSE_S
        left = sorted(set(names))
        while left:
            problem: GcloudError | None = None
            for name in left:
                try:
                    self.gcloud.delete_queued(name)
                except GcloudError as error:
                    problem = error
            left = [name for name in left if not self._is_gone(name)]
            if not left:
                return
            if time.monotonic() > deadline or (problem is not None and problem.is_denied):
                raise problem or GcloudError(f"still listed after deletion: {', '.join(left)}", "")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 15.0)

    def _is_gone(self, name: str) -> bool:
        try:
            return _state(self.gcloud.describe_queued(name)) == "NOT_FOUND"
        except GcloudError:
            return False

    def _read_record(self) -> QueuedResourceRecord | None:
        """Return the recorded request, read from disk; the last one seen if the folder is unavailable for a while."""
        found = QueuedResourceRecord.read(self.run_dir / REQUEST_FILE) if self.run_dir else None
        if found is not None and self.run_dir and not found.place.is_of(self.run_dir):
            found = None  # the request of the run that this folder is a copy of
        self._request = found or self._request
        return self._request

    def _write(self, run_dir: Path, request: QueuedResourceRecord) -> None:
        self._request = request
        write_model(run_dir / REQUEST_FILE, request)


def make_worker_source(settings: TpuSettings, run_dir: Path | None) -> WorkerSource:
    """Return the source that the profile names: hosts, a TPU VM or a queued resource."""
    if settings.tpu is not None:
        return TpuVmSource(settings, run_dir)
    if settings.queued_resource is not None:
        return QueuedResourceSource(settings, settings.queued_resource, run_dir)
    return HostsSource(settings)


def find_node_workers(gcloud: Gcloud, name: str) -> WorkersState:
    """Return the state of a TPU VM's workers; raises GcloudError."""
    node = gcloud.describe_node(name)
    state = str(node["state"])
    if state in GONE_NODE:
        return _lost(FailureKind.PREEMPTED, f"the TPU VM {name!r} is {state}")
    group = GcloudWorkerGroup(gcloud, name, node)
    if state == "READY" and group.addresses:
        return WorkersReady(group, name)
    return WorkersPending(f"the TPU VM {name!r} is {state}", uncertain=state in {"UNKNOWN", "READY"})


def _look_up(item: Any, *names: str) -> Any:
    """Return a value of nested mappings; None if one of them is missing or something else."""
    for name in names:
        item = item.get(name) if isinstance(item, Mapping) else None
    return item


def _state(item: Mapping[str, Any]) -> str:
    state = item.get("state")
    return str((_look_up(state, "state") if isinstance(state, Mapping) else state) or "UNKNOWN")


def _labels(item: Mapping[str, Any]) -> list[str]:
    """Return the run labels of a queued resource's TPU VMs (the resource itself has no labels)."""
    return [str(_look_up(spec, "node", "labels", RUN_LABEL) or "") for spec in _look_up(item, "tpu", "nodeSpec") or []]


def _refused(what: str, error: GcloudError) -> Exception:
    """Return UserError if no retry can help (quota, rights), else TrialError (no capacity, service unavailable)."""
    if error.is_permanent:
        return UserError(f"{what} was refused: {one_line(str(error), 400)}")
    return submit_error(f"{what}: {one_line(str(error), 400)}")


def _lost(kind: FailureKind, message: str, stage: Stage = Stage.RUN) -> WorkersLost:
    return WorkersLost(Failure(stage=stage, kind=kind, message=message))


def _check_call(gcloud: Gcloud, name: str, *words: str) -> Check:
    try:
        answer = gcloud.run_json(*words)
    except GcloudError as error:
        return Check.of(name, False, one_line(str(error), 300), "check `gcloud auth list`, the project and the zone")
    state = str(answer.get("state", "")) if isinstance(answer, Mapping) else f"{len(answer or [])} requests"
    return Check.of(name, state not in GONE_NODE, state, "start it, or name another one")
