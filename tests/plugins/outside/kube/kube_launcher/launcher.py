"""`launcher: kube` in a profile: each attempt at a trial is a pod."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cclsearch.core.values import FailureKind, Model, Provenance
from cclsearch.launch.base import Check, Handle, Job, JobState, JobStatus
from cclsearch.launch.collect import clear_results
from cclsearch.launch.contract import RESULT_FILE, STDERR_FILE, STDOUT_FILE, trial_environment
from cclsearch.launch.environment import render_script
from cclsearch.launch.profile import Profile
from cclsearch.plugins import LAUNCHERS
from cclsearch.space.framework import load_framework
from kube_launcher.cluster import Pod, StubCluster


class KubeSettings(Model):
    """The launcher's fields of a profile."""

    cluster: Path
    """Folder of the stub."""
    python: str = sys.executable
    max_pods: int = 2


@LAUNCHERS.register("kube")
class KubeLauncher:
    """Runs trials as pods."""

    name = "kube"
    provenance = Provenance.MEASURED
    poll_interval_s = 0.2

    def __init__(self, profile: Profile, settings: KubeSettings) -> None:
        self.profile, self.settings, self.max_parallel = profile, settings, settings.max_pods
        self.cluster = StubCluster(settings.cluster)

    @classmethod
    def from_profile(cls, profile: Profile) -> KubeLauncher:
        """Return the launcher; starts nothing."""
        return cls(profile, profile.read_settings(KubeSettings))

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Create one pod per job."""
        handles = []
        for job in jobs:
            clear_results(job.trial_dir)
            self.cluster.apply(self._make_pod(job))
            handles.append(make_handle(job.name, job.trial_dir))
        return handles

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Return the statuses, from one list of all pods."""
        pods = {pod["metadata"]["name"]: pod for pod in self.cluster.list()}
        return [read_status(pods.get(handle.job_id), handle) for handle in handles]

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Delete the pods and wait until they have ended."""
        for handle in handles:
            self.cluster.delete(handle.job_id)

    def find(self, run_id: str) -> list[Handle]:
        """Return the pods with the run's label."""
        pods = self.cluster.list(run=run_id)
        return [make_handle(pod["metadata"]["name"], Path(pod["metadata"]["labels"]["trial"])) for pod in pods]

    def render(self, job: Job) -> str:
        """Return the pod's command as a script."""
        [container] = self._make_pod(job)["spec"]["containers"]
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        return render_script(variables, container["command"], comment=f"pod {job.name}")

    def check(self) -> list[Check]:
        """Check that the cluster's folder can be written."""
        folder = self.settings.cluster
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return [Check.of("cluster", os.access(existing, os.W_OK), str(folder), "set `cluster` to a writable folder")]

    def close(self) -> None:
        """Nothing is open."""

    def _make_pod(self, job: Job) -> Pod:
        framework = load_framework(self.profile.require_framework())
        knobs = framework.knob_environment(job.payload.config)
        variables = {"PATH": os.defpath, **self.profile.environment, **knobs}
        variables |= trial_environment(job.trial_dir, job.payload)
        container = {
            "name": "trial",
            "command": [self.settings.python, str(framework.script_path)],
            "workingDir": str(job.trial_dir),
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "stdout": str(job.trial_dir / STDOUT_FILE),
            "stderr": str(job.trial_dir / STDERR_FILE),
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": job.name, "labels": {"run": job.run_id, "trial": str(job.trial_dir)}},
            "spec": {"activeDeadlineSeconds": job.timeout_s, "restartPolicy": "Never", "containers": [container]},
        }


def make_handle(name: str, trial_dir: Path) -> Handle:
    """Return the handle of a pod, whose name is the job's."""
    return Handle(launcher="kube", job_name=name, job_id=name, trial_dir=trial_dir)


def read_status(pod: Pod | None, handle: Handle) -> JobStatus:
    """Return the status of a job from its pod; None if the pod is gone."""
    if pod is None:
        return JobStatus.failed(FailureKind.CANCELLED, "the pod does not exist any more")
    status = pod["status"]
    if status["phase"] in ("Pending", "Running"):
        return JobStatus(state=JobState.QUEUED if status["phase"] == "Pending" else JobState.RUNNING)
    if status["reason"] == "DeadlineExceeded":
        limit_s = pod["spec"]["activeDeadlineSeconds"]
        return JobStatus.failed(FailureKind.TIMEOUT, f"the pod was over its limit of {limit_s:g} s")
    if status["reason"] == "Deleted":
        return JobStatus.failed(FailureKind.CANCELLED, "the pod was deleted")
    if (handle.trial_dir / RESULT_FILE).is_file():
        return JobStatus(state=JobState.DONE)
    return JobStatus.failed(FailureKind.CRASHED, f"the container ended with exit code {status['exitCode']}")
