"""The documented commands of `gcloud compute tpus`, as argument lists, workers reached through them, and unique names.

The arguments follow the reference pages of `tpu-vm ssh`, `tpu-vm scp`, `tpu-vm describe` and `queued-resources create`,
`describe`, `list`, `delete` (docs/tpu.md names them); answers are requested as JSON.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import parse_json
from cclsearch.core.text import one_line
from cclsearch.core.values import Model
from cclsearch.launch.base import write_model
from cclsearch.launch.fault_rules import read_refusals
from cclsearch.launch.ownership import RunPlace
from cclsearch.launch.tpu_vm.settings import QueuedResource, TpuSettings
from cclsearch.launch.tpu_vm.workers import (
    CALL_S,
    COPY_S,
    Unreachable,
    WorkerAnswers,
    read_answers,
    run_program,
    shorten_error,
)

GONE_NODE = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN", "NOT_FOUND"})
"""States of a TPU VM whose workers do not come back by themselves."""


class GcloudError(Exception):
    """A gcloud command failed; the message is gcloud's own error line."""

    def __init__(self, message: str, whole: str) -> None:
        super().__init__(message)
        found = [refusal.means for refusal in read_refusals("gcloud", whole)]
        self.is_not_found = "not_found" in found
        self.exists = "exists" in found
        self.is_denied = "denied" in found
        """Whether login or rights are missing; only the user can fix that."""
        self.is_permanent = self.is_denied or found[:1] == ["final"]
        """Whether a retry would fail again: quota, rights, a wrong name."""


class Gcloud:
    """Calls `gcloud` with the project and zone of the profile."""

    def __init__(self, settings: TpuSettings) -> None:
        self.settings = settings

    def run(self, *words: str, timeout_s: float = CALL_S) -> str:
        """Return what the command prints; raises GcloudError if it fails."""
        done = self.call(words, timeout_s)
        if done.returncode:
            raise GcloudError(explain_refusal(done.stderr, done.returncode), done.stderr)
        return done.stdout

    def call(self, words: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
        """Run a command on the profile's project and zone."""
        project = [f"--project={self.settings.project}"] if self.settings.project else []
        flags = [f"--zone={self.settings.zone}", *project, "--quiet"]
        return run_program([self.settings.gcloud, "compute", "tpus", *words, *flags], timeout_s=timeout_s)

    def find_default_project(self) -> str:
        """Return gcloud's default project; UserError if it has none."""
        done = run_program([self.settings.gcloud, "config", "get-value", "project", "--quiet"], timeout_s=CALL_S)
        lines = done.stdout.split()
        if done.returncode or len(lines) != 1 or lines[0] == "(unset)":
            why = f": {explain_refusal(done.stderr, done.returncode)}" if done.returncode else ""
            raise UserError(
                f"gcloud has no default project{why}; set `project:` in the profile,"
                " or run `gcloud config set project ID`"
            )
        return lines[0]

    def run_json(self, *words: str) -> Any:
        """Return the command's answer, parsed from JSON; raises GcloudError if it fails or is not JSON."""
        text = self.run(*words, "--format=json")
        try:
            return parse_json(text or "null")
        except ValueError:
            raise GcloudError(f"gcloud's answer is not JSON: {one_line(text, 100)}", "") from None

    def describe_node(self, name: str) -> Mapping[str, Any]:
        """Return the TPU VM; `state` is NOT_FOUND if it does not exist."""
        return self._describe("tpu-vm", name)

    def describe_queued(self, name: str) -> Mapping[str, Any]:
        """Return the queued resource; its `state` is NOT_FOUND if it does not exist."""
        found = self._describe("queued-resources", name)
        return {"state": {"state": "NOT_FOUND"}} if found["state"] == "NOT_FOUND" else found

    def create_queued(self, name: str, resource: QueuedResource, labels: Mapping[str, str]) -> None:
        """Request a queued resource with one TPU VM of the same name; succeeds if it exists already."""
        words = ["queued-resources", "create", name, f"--node-id={name}"]
        words += [f"--accelerator-type={resource.accelerator_type}", f"--runtime-version={resource.runtime_version}"]
        words += {"on-demand": [], "spot": ["--spot"], "reserved": ["--reserved"]}[resource.tier]
        words.append("--labels=" + ",".join(f"{key}={value}" for key, value in sorted(labels.items())))
        optional = {
            "valid-until-duration": resource.valid_until,
            "network": resource.network,
            "subnetwork": resource.subnetwork,
            "service-account": resource.service_account,
        }
        words += [f"--{flag}={value}" for flag, value in optional.items() if value is not None]
        words += ["--internal-ips"] if resource.internal_ips else []
        try:
            self.run(*words, timeout_s=600.0)
        except GcloudError as error:
            if not error.exists:
                raise

    def delete_queued(self, name: str) -> None:
        """Request the deletion of the queued resource and its TPU VM; succeeds if it does not exist."""
        try:
            self.run("queued-resources", "delete", name, "--force", "--async")
        except GcloudError as error:
            if not error.is_not_found:
                raise

    def list_queued(self) -> list[Mapping[str, Any]]:
        """Return every queued resource of the zone."""
        found = self.run_json("queued-resources", "list")
        return [item for item in (found if isinstance(found, list) else []) if isinstance(item, Mapping)]

    def _describe(self, kind: str, name: str) -> Mapping[str, Any]:
        try:
            found = self.run_json(kind, "describe", name)
        except GcloudError as error:
            if error.is_not_found:
                return {"state": "NOT_FOUND"}
            raise
        return found if isinstance(found, Mapping) and "state" in found else {"state": "UNKNOWN"}


class GcloudWorkerGroup:
    """The workers of a TPU VM, reached through `gcloud compute tpus tpu-vm ssh` and `scp`."""

    def __init__(self, gcloud: Gcloud, name: str, node: Mapping[str, Any]) -> None:
        self.gcloud, self.name = gcloud, name
        found = node.get("networkEndpoints")
        endpoints = found if isinstance(found, list) else []
        self.addresses = tuple(str(e["ipAddress"]) for e in endpoints if isinstance(e, Mapping) and "ipAddress" in e)

    def push(self, file: Path, name: str, processes: Sequence[int]) -> Mapping[int, str]:
        """Copy to every worker of the slice: `--worker` of `scp` takes one number or `all`."""
        done = self._run("scp", [str(file), f"{self._target()}:{name}", "--worker=all"], COPY_S)
        return {0: explain_refusal(done.stderr, done.returncode)} if done.returncode else {}

    def call(self, command: str, arguments: Sequence[str], processes: Sequence[int]) -> WorkerAnswers:
        whole = len(processes) == len(self.addresses)
        workers = "all" if whole else ",".join(map(str, processes))
        text = f"{command} {' '.join((*arguments, '--addresses', ','.join(self.addresses)))}"
        done = self._run("ssh", [self._target(), f"--worker={workers}", f"--command={text}"], CALL_S)
        answers = read_answers(done.stdout)
        why = explain_refusal(done.stderr, done.returncode)
        return WorkerAnswers(
            {process: answers[process] for process in processes if process in answers},
            {process: why for process in processes if process not in answers},
        )

    def pull(self, process: int, path: str, target: Path) -> None:
        done = self._run("scp", [f"{self._target()}:{path}", str(target), f"--worker={process}"], COPY_S)
        if done.returncode:
            raise Unreachable(explain_refusal(done.stderr, done.returncode))

    def explain_loss(self) -> str | None:
        try:
            state = str(self.gcloud.describe_node(self.name)["state"])
        except GcloudError as error:
            raise_if_denied(error, f"the TPU VM {self.name!r}")
            return None
        if state not in GONE_NODE:
            return None
        return f"the TPU VM {self.name!r} is {state}: it was preempted, stopped or deleted while the trial ran"

    def _target(self) -> str:
        user = self.gcloud.settings.user
        return f"{user}@{self.name}" if user else self.name

    def _run(self, program: str, words: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
        """Run `ssh` or `scp`; their flags are words without a space, as gcloud passes them on unchanged."""
        settings = self.gcloud.settings
        options = [f"ConnectTimeout={settings.connect_timeout_s}", "BatchMode=yes", *settings.ssh_options]
        flags = [f"--{program}-flag=-o{option}" for option in options]
        if settings.key_file is not None:
            flags.append(f"--ssh-key-file={Path(settings.key_file).expanduser()}")
        flags += ["--internal-ip"] if settings.internal_ip else []
        return self.gcloud.call(["tpu-vm", program, *words, *flags], timeout_s)


def explain_refusal(text: str, code: int) -> str:
    """Return gcloud's `ERROR:` line if there is one, else the last line."""
    lines = [line for line in text.splitlines() if line.startswith("ERROR:")]
    return one_line(lines[0].removeprefix("ERROR:").strip(), 400) if lines else shorten_error(text, code)


def raise_if_denied(error: GcloudError, what: str) -> None:
    """Raise UserError if the user must log in or get rights first; jobs on the workers keep running meanwhile."""
    if error.is_denied:
        raise UserError(
            f"gcloud denies access to {what}: {one_line(str(error), 300)}; log in (`gcloud auth login`) or fix the"
            " rights, then run `ccl-search resume RUN`, which adopts running jobs; until then the resource may cost"
            " money (`ccl-search clean RUN` deletes what the search created)"
        )


def require_gcloud(settings: TpuSettings) -> None:
    """Raise UserError if the gcloud command was not found."""
    if shutil.which(settings.gcloud) is None:
        raise UserError(
            f"{settings.gcloud!r} was not found here; install the Google Cloud CLI, set `gcloud:` to its path in the"
            " profile, or list the workers under `hosts:` to reach them over plain SSH"
        )


TOKEN_FILE = "tpu-identity.json"
_TOKEN_BYTES = 5
_STEM_LENGTH = 36


class RunToken(Model):
    """`tpu-identity.json` of a run: written once, before anything is created in the cloud or on workers.

    It distinguishes the run from another one of the same name.
    """

    token: str
    place: RunPlace


class CloudLocation(Model):
    """Project and zone of a resource, recorded because gcloud's defaults may change."""

    project: str | None = None
    zone: str | None = None


def read_token(run_dir: Path | None) -> str | None:
    """Return the run's token; None before it is made, when the run has no resource."""
    # A copy of a run gets its own: the original's resources and processes are not the copy's.
    record = RunToken.read(run_dir / TOKEN_FILE) if run_dir is not None else None
    return record.token if record is not None and run_dir and record.place.is_of(run_dir) else None


def make_token(run_dir: Path | None) -> str:
    """Return the run's token, made at the first call; empty without a run."""
    if run_dir is None:
        return ""
    token = read_token(run_dir)
    if token is None:
        token = secrets.token_hex(_TOKEN_BYTES)
        write_model(run_dir / TOKEN_FILE, RunToken(token=token, place=RunPlace.of(run_dir)))
    return token


def make_label(run_id: str, token: str) -> str:
    """Return the run's label: lower-case letters, digits and dashes, at most 51 (a label may have 63)."""
    stem = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:_STEM_LENGTH]
    return f"ccl-{stem}-{token}"


def name_resource(run_id: str, token: str, generation: int) -> str:
    """Return the name of a run's queued resource and of its TPU VM: valid in the cloud and unique to the run."""
    return f"{make_label(run_id, token)}-g{generation}"


def has_label_name(label: str, name: str) -> bool:
    """Whether that is the name of a queued resource made from that label."""
    return re.fullmatch(re.escape(label) + r"-g\d+", name) is not None


def with_location(settings: TpuSettings, location: CloudLocation | None) -> TpuSettings:
    """Return the settings with the recorded project and zone; unchanged if none are recorded."""
    recorded = location.model_dump(include={"project", "zone"}, exclude_none=True) if location is not None else {}
    return settings.model_copy(update=recorded)


def resolve_project(settings: TpuSettings) -> TpuSettings:
    """Return the settings with a project, by default gcloud's; UserError if gcloud has none."""
    if settings.project is not None:
        return settings
    return settings.model_copy(update={"project": Gcloud(settings).find_default_project()})
