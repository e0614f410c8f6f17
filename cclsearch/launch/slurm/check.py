"""`launcher check` of Slurm: whether the cluster accepts and runs a profile's jobs, and what to do if not."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cclsearch.core.content import shipped_root
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line, read_tail
from cclsearch.launch.base import Check, JobState, JobStatus
from cclsearch.launch.contract import RESULT_FILE, STDERR_FILE
from cclsearch.launch.slurm.commands import SlurmRefusal, SlurmUnavailable, parse_duration, run_slurm, try_script
from cclsearch.launch.slurm.ending import TAIL_BYTES
from cclsearch.launch.slurm.job_files import (
    JobSpec,
    RunScript,
    attempt_folder,
    classify_trial,
    link_scratch,
    prepare_folder,
)
from cclsearch.launch.slurm.limits import find_max_array, find_max_jobs
from cclsearch.launch.slurm.refusal import suggest_remedy
from cclsearch.launch.slurm.script import choose_shape, container_prefix, mounted_folders, srun_arguments
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.launch.slurm.submit import Submitter, overridden_defaults, render_chunk
from cclsearch.launch.slurm.watch import QueueCache, Watcher, cancel_attempts

PROBE = Path(__file__).with_name("probe.py")
SCRIPT_VARIABLE = "CCL_CHECKED_SCRIPT"
"""Names the run script, which the probe must find on the compute node."""
WAIT_S = 900.0
"""Seconds that the check's own job may wait and run."""
JOB_S = 300.0


def check_cluster(settings: SlurmSettings, run_script: RunScript, ranks: int, folder: Path) -> list[Check]:
    """Run every check in order; after a failure, skip the checks that depend on it.

    `folder` is the runs folder: the check's job works in a subfolder of it, which is kept if the job fails.
    """
    checks = [_check_commands()]
    if not checks[0].ok:
        return checks
    checks.append(_check_controller(settings))
    if not checks[-1].ok:
        return checks
    checks.extend(_check_partition(settings))
    folder.mkdir(parents=True, exist_ok=True)
    work_dir = Path(tempfile.mkdtemp(prefix=".launcher-check-", dir=folder))
    spec = _make_probe(settings, run_script, ranks, work_dir)
    checks.append(_check_script(spec, settings))
    may_run = checks[-1].ok
    if may_run:
        (work_dir / "needs.json").write_text(
            json.dumps([need.model_dump() for need in run_script.needs]), encoding="utf-8"
        )
        checks.extend(_check_job(spec, settings, run_script))
    if not may_run or all(check.ok for check in checks):
        if settings.scratch is not None:
            shutil.rmtree(Path(settings.scratch).expanduser() / spec.name, ignore_errors=True)
        shutil.rmtree(work_dir, ignore_errors=True)
    return checks


def _check_commands() -> Check:
    missing = [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        return Check(
            name="commands",
            ok=False,
            detail=f"not found on the PATH: {', '.join(missing)}",
            remedy="run this on a login node of the cluster",
        )
    unavailable = [name for name in ("scontrol", "sacct", "sacctmgr", "sinfo") if shutil.which(name) is None]
    return Check(
        name="commands",
        ok=True,
        detail="found" + (f"; not found, but optional: {', '.join(unavailable)}" if unavailable else ""),
    )


def _check_controller(settings: SlurmSettings) -> Check:
    try:
        version = run_slurm(["squeue", "--version"], timeout_s=20.0).strip()
        run_slurm(["squeue", "--noheader", "--user=root", "--states=pending"], timeout_s=60.0)
    except (SlurmUnavailable, SlurmRefusal) as error:
        return Check(
            name="controller",
            ok=False,
            detail=str(error),
            remedy="try again later, or ask the cluster's administrators",
        )
    limits = f"at most {find_max_jobs(settings)} jobs at a time and {find_max_array()} tasks per array"
    return Check(name="controller", ok=True, detail=f"{version} answers; {limits}")


def _check_partition(settings: SlurmSettings) -> Iterator[Check]:
    """Check that the partition exists and allows the profile's time limit."""
    selection = [f"--partition={settings.partition}"] if settings.partition else []
    with contextlib.suppress(SlurmUnavailable, SlurmRefusal):
        text = run_slurm(["sinfo", "--noheader", *selection, "--format=%P|%a|%l|%D"], timeout_s=30.0)
        rows = [line.split("|") for line in text.splitlines()]
        if settings.partition is None:
            rows = [row for row in rows if row[0].endswith("*")]
        if not rows:
            name = repr(settings.partition) if settings.partition else "the cluster's default"
            yield Check(
                name="partition", ok=False, detail=f"partition not found: {name}", remedy="`sinfo -s` lists them"
            )
            return
        name, state, limit, _ = rows[0]
        limit_s = parse_duration(limit)
        nodes = sum(int(row[3]) for row in rows if row[3].isdigit())
        if state != "up":
            yield Check(name="partition", ok=False, detail=f"{name} is {state}", remedy="choose another `partition`")
        elif limit_s is not None and settings.time_limit * 60 > limit_s:
            detail = f"{name} allows {limit}, but the profile's time_limit is {settings.time_limit} min"
            yield Check(name="partition", ok=False, detail=detail, remedy=f"set time_limit to at most {limit}")
        else:
            yield Check(name="partition", ok=True, detail=f"{name.rstrip('*')}: {nodes} nodes, limit {limit}")


def _make_probe(settings: SlurmSettings, run_script: RunScript, ranks: int, work_dir: Path) -> JobSpec:
    """Return a one-node job that checks torch; it is built like a trial's job."""
    folder = attempt_folder(work_dir, 1)
    shape = choose_shape(ranks, ranks, JOB_S, settings)
    script = (run_script.path or shipped_root() / "launchers" / "common.py").absolute()
    folders = mounted_folders(settings, work_dir.parent, script)
    environment = {**run_script.environment, "CCL_TRIAL_DIR": str(work_dir), SCRIPT_VARIABLE: str(script)}
    return JobSpec(
        run_id="launcher-check",
        trial=1,
        attempt=1,
        name=f"ccl-launcher-check-{uuid.uuid4().hex[:6]}",
        trial_dir=work_dir,
        folder=folder,
        shape=shape,
        nodes=1,
        num_ranks=ranks,
        ranks_per_node=ranks,
        runner="torchrun",
        python=settings.default_python(),
        host_python=settings.default_host_python(),
        program=folder / "node.py",
        script=work_dir / PROBE.name,
        prefix=container_prefix(settings, folders, environment),
        srun_arguments=srun_arguments(settings, folders),
        environment=environment,
        timeout_s=JOB_S,
    )


def _check_script(spec: JobSpec, settings: SlurmSettings) -> Check:
    """Run `sbatch --test-only`: Slurm checks account, partition, QOS and request; nothing is submitted."""
    script = spec.trial_dir / "test-only.sbatch"
    script.write_text(render_chunk([spec], spec.trial_dir, settings), encoding="utf-8")
    try:
        try_script(script, without=overridden_defaults(settings))
    except SlurmUnavailable as error:
        return Check(name="sbatch --test-only", ok=False, detail=str(error), remedy="try again")
    except SlurmRefusal as refusal:
        detail = str(refusal)
        return Check(name="sbatch --test-only", ok=False, detail=detail, remedy=suggest_remedy(detail))
    return Check(name="sbatch --test-only", ok=True, detail="Slurm would accept such a job")


def _check_job(spec: JobSpec, settings: SlurmSettings, run_script: RunScript) -> list[Check]:
    """Run a real job on one node: check that it sees this folder, has torch, and its ranks reach each other."""
    work_dir = spec.trial_dir
    token = uuid.uuid4().hex
    (work_dir / "token").write_text(token, encoding="utf-8")
    shutil.copyfile(PROBE, spec.script)
    prepare_folder(spec)
    if settings.scratch is not None:
        try:
            link_scratch(spec, Path(settings.scratch).expanduser())
        except UserError as error:
            return [Check(name="scratch", ok=False, detail=str(error), remedy="correct `scratch` in the profile")]
    submitter = Submitter(settings)
    try:
        submitter.submit([spec])
    except UserError as error:
        return [Check(name="job", ok=False, detail=str(error), remedy=suggest_remedy(str(error)))]
    job_id = submitter.ids.get(spec.folder)
    if job_id is None:
        return [
            Check(name="job", ok=False, detail=submitter.waiting_for, remedy="try again when other jobs have ended")
        ]
    status = _wait_for_job(spec, job_id, settings)
    result = _read_result(work_dir)
    if result is None:
        return [_explain_job(status, job_id, work_dir)]
    shared, seen = result.get("token") == token, result.get("sees_script") is True
    script = Path(spec.environment[SCRIPT_VARIABLE])
    return [
        Check(name="job", ok=True, detail=f"job {job_id} ran on {result.get('node')}, python {result.get('python')}"),
        Check(
            name="shared folder",
            ok=shared,
            detail=f"{work_dir.parent} is {'the same folder' if shared else 'another folder'} on the compute node",
            remedy="" if shared else "put the runs folder on a file system that all nodes mount",
        ),
        Check(
            name="run script",
            ok=seen,
            detail=f"the ranks {'can' if seen else 'cannot'} read {script.parent}",
            remedy="" if seen else "install ccl-search, or put the script, on a file system that all nodes mount",
        ),
        *_check_torch(result, spec),
        *check_needs(result, run_script),
    ]


def _wait_for_job(spec: JobSpec, job_id: str, settings: SlurmSettings) -> JobStatus:
    """Return the job's last status: when it is done, or after the time limit. The job is then cancelled in any case."""
    watcher = Watcher(settings, classify_trial, QueueCache(min(2.0, settings.poll_s)))
    deadline = time.monotonic() + WAIT_S
    status = JobStatus(state=JobState.QUEUED)
    while time.monotonic() < deadline and status.state is not JobState.DONE:
        time.sleep(0.5)
        status = watcher.poll([(spec, job_id)])[0]
    with contextlib.suppress(SlurmUnavailable):
        cancel_attempts([(spec, job_id)])
    return status


def _explain_job(status: JobStatus, job_id: str, work_dir: Path) -> Check:
    if status.state is not JobState.DONE:
        detail = f"job {job_id} was still {status.state} after {WAIT_S:.0f} s ({status.note}) and was cancelled"
        return Check(
            name="job", ok=False, detail=detail, remedy="try again later, or name a partition with a shorter queue"
        )
    message = status.failure.message if status.failure else "the job left no result"
    remedy = f"its logs are in {work_dir}"
    log = read_tail(work_dir / STDERR_FILE, TAIL_BYTES) + message
    if "No module named" in log or "No such file or directory" in log:
        remedy = f"set `python` to an interpreter with torch on the compute nodes, or set `modules`; {remedy}"
    return Check(name="job", ok=False, detail=one_line(message, 300), remedy=remedy)


def _check_torch(result: dict[str, Any], spec: JobSpec) -> Iterator[Check]:
    if "torch_error" in result:
        remedy = "set `python`, `modules` or `container` in the profile so that torch is available"
        yield Check(name="torch", ok=False, detail=str(result["torch_error"]), remedy=remedy)
        return
    devices = [str(device) for device in result.get("devices", [])]
    wanted = spec.shape.gpus_per_node
    enough = len(devices) >= min(wanted, spec.num_ranks)
    seen = f"{len(devices)} x {devices[0]}" if devices else "no accelerator"
    yield Check(
        name="torch",
        ok=enough,
        detail=f"torch {result.get('torch')}, {seen}",
        remedy="" if enough else f"the job requested {wanted}: correct `gpu_request` or `modules`, or set `cpu_only`",
    )
    reached, backend = str(result.get("reduced_over", "")), str(result.get("backend"))
    fine = reached == str(spec.num_ranks)
    yield Check(
        name=backend,
        ok=fine,
        detail=f"all-reduce over {reached} ranks" if fine else one_line(str(result.get("reduce_error", reached)), 300),
        remedy="" if fine else "set `NCCL_DEBUG: INFO` in `environment` and read the job's logs",
    )


def check_needs(result: dict[str, Any], run_script: RunScript) -> Iterator[Check]:
    """Yield a check for each variable that the framework needs, from what the node reported.

    Without a named framework, a variable that is not set passes: only trials of its framework would need it.
    """
    for need in run_script.needs:
        seen = result.get("needs", {}).get(need.env, {})
        value, is_met = seen.get("value"), bool(seen.get("is_met"))
        ok = is_met or (value is None and run_script.path is None)
        detail = f"on the compute node: {need.describe(value, is_met=is_met)}"
        yield Check(name=need.env, ok=ok, detail=detail, remedy="" if ok else need.remedy)


def _read_result(work_dir: Path) -> dict[str, Any] | None:
    try:
        result = json.loads((work_dir / RESULT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None
