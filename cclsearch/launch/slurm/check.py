"""`launcher check` of Slurm: check whether the cluster accepts and runs a profile's jobs, with a remedy if not."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cclsearch.core.content import shipped_root
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import read_tail
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.launch.base import Check, Job, JobState, JobStatus
from cclsearch.launch.contract import RESULT_FILE, STDERR_FILE, TrialInput
from cclsearch.launch.slurm.commands import (
    SlurmError,
    SlurmUnavailable,
    ask_slurm,
    parse_duration,
    run_slurm,
    suggest_remedy,
    try_script,
)
from cclsearch.launch.slurm.ending import TAIL_BYTES
from cclsearch.launch.slurm.job_files import (
    JobSpec,
    RunScript,
    link_scratch,
    make_job_spec,
    prepare_folder,
    read_object,
    remove_scratch,
)
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.launch.slurm.submit import Submitter, find_max_array, find_max_jobs, overridden_defaults, render_chunk
from cclsearch.launch.slurm.watch import QueueCache, Watcher, cancel_attempts

PROBE = Path(__file__).with_name("probe.py")
SCRIPT_VARIABLE = "CCL_CHECKED_SCRIPT"
"""Variable with the run script's path, which the probe must find on the compute node."""
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
        remove_scratch(spec, settings)
        shutil.rmtree(work_dir, ignore_errors=True)
    return checks


def _check_commands() -> Check:
    missing = [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        detail = f"not found on the PATH: {', '.join(missing)}"
        return Check.of("commands", False, detail, "run this on a login node of the cluster")
    unavailable = [name for name in ("scontrol", "sacct", "sacctmgr", "sinfo") if shutil.which(name) is None]
    optional = f"; not found, but optional: {', '.join(unavailable)}" if unavailable else ""
    return Check.of("commands", True, f"found{optional}")


def _check_controller(settings: SlurmSettings) -> Check:
    try:
        version = run_slurm(["squeue", "--version"], timeout_s=20.0).strip()
        run_slurm(["squeue", "--noheader", "--user=root", "--states=pending"], timeout_s=60.0)
    except SlurmError as error:
        return Check.of("controller", False, str(error), "try again later, or ask the cluster's administrators")
    limits = f"at most {find_max_jobs(settings)} jobs at a time and {find_max_array()} tasks per array"
    return Check.of("controller", True, f"{version} answers; {limits}")


def _check_partition(settings: SlurmSettings) -> Iterator[Check]:
    """Check that the partition exists and allows the profile's time limit."""
    selection = [f"--partition={settings.partition}"] if settings.partition else []
    text = ask_slurm(["sinfo", "--noheader", *selection, "--format=%P|%a|%l|%D"])
    if text is None:
        return
    rows = [line.split("|") for line in text.splitlines()]
    if settings.partition is None:
        rows = [row for row in rows if row[0].endswith("*")]
    if not rows:
        name = repr(settings.partition) if settings.partition else "the cluster's default"
        yield Check.of("partition", False, f"partition not found: {name}", "`sinfo -s` lists them")
        return
    name, state, limit, _ = rows[0]
    limit_s = parse_duration(limit)
    nodes = sum(int(row[3]) for row in rows if row[3].isdigit())
    if state != "up":
        yield Check.of("partition", False, f"{name} is {state}", "choose another `partition`")
    elif limit_s is not None and settings.time_limit * 60 > limit_s:
        detail = f"{name} allows {limit}, but the profile's time_limit is {settings.time_limit} min"
        yield Check.of("partition", False, detail, f"set time_limit to at most {limit}")
    else:
        yield Check.of("partition", True, f"{name.rstrip('*')}: {nodes} nodes, limit {limit}")


def _make_probe(settings: SlurmSettings, run_script: RunScript, ranks: int, work_dir: Path) -> JobSpec:
    """Return a one-node job that checks torch; it is built like a trial's job."""
    run_id, script = "launcher-check", (run_script.path or shipped_root() / "launchers" / "common.py").absolute()
    environment = {**run_script.environment, SCRIPT_VARIABLE: str(script)}
    probed = replace(run_script, path=script, runner="torchrun", environment=environment)
    payload = TrialInput(run_id=run_id, trial=1, config=Config(), precision="", num_ranks=ranks, ranks_per_node=ranks)
    job = Job(run_id=run_id, trial=1, attempt=1, trial_dir=work_dir, payload=payload, timeout_s=JOB_S)
    own = {"name": f"ccl-launcher-check-{uuid.uuid4().hex[:6]}", "script": work_dir / PROBE.name}
    return make_job_spec(job, probed, settings).model_copy(update=own)


def _check_script(spec: JobSpec, settings: SlurmSettings) -> Check:
    """Run `sbatch --test-only`: Slurm checks account, partition, QOS and request; nothing is submitted."""
    script = spec.trial_dir / "test-only.sbatch"
    script.write_text(render_chunk([spec], spec.trial_dir, settings), encoding="utf-8")
    try:
        try_script(script, without=overridden_defaults(settings))
    except SlurmError as error:
        remedy = "try again" if isinstance(error, SlurmUnavailable) else suggest_remedy(str(error))
        return Check.of("sbatch --test-only", False, str(error), remedy)
    return Check.of("sbatch --test-only", True, "Slurm would accept such a job")


def _check_job(spec: JobSpec, settings: SlurmSettings, run_script: RunScript) -> list[Check]:
    """Run a real job on one node: check that it sees this folder, has torch, and its ranks reach each other."""
    work_dir = spec.trial_dir
    token = uuid.uuid4().hex
    (work_dir / "token").write_text(token, encoding="utf-8")
    shutil.copyfile(PROBE, spec.script)
    prepare_folder(spec)
    try:
        link_scratch(spec, settings)
    except UserError as error:
        return [Check.of("scratch", False, str(error), "correct `scratch` in the profile")]
    submitter = Submitter(settings)
    try:
        submitter.submit([spec])
    except UserError as error:
        return [Check.of("job", False, str(error), suggest_remedy(str(error)))]
    job_id = submitter.ids.get(spec.folder)
    if job_id is None:
        return [Check.of("job", False, submitter.waiting_for, "try again when other jobs have ended")]
    status = _wait_for_job(spec, job_id, settings)
    result = read_object(work_dir / RESULT_FILE)
    if not result:
        return [_explain_job(status, job_id, work_dir)]
    shared, seen = result.get("token") == token, result.get("sees_script") is True
    script = Path(spec.environment[SCRIPT_VARIABLE])
    return [
        Check.of("job", True, f"job {job_id} ran on {result.get('node')}, python {result.get('python')}"),
        Check.of(
            "shared folder",
            shared,
            f"{work_dir.parent} is {'the same folder' if shared else 'another folder'} on the compute node",
            "put the runs folder on a file system that all nodes mount",
        ),
        Check.of(
            "run script",
            seen,
            f"the ranks {'can' if seen else 'cannot'} read {script.parent}",
            "install ccl-search, or put the script, on a file system that all nodes mount",
        ),
        *_check_torch(result, spec),
        *check_needs(result, run_script),
    ]


def _wait_for_job(spec: JobSpec, job_id: str, settings: SlurmSettings) -> JobStatus:
    """Return the job's last status: when it is done, or after the time limit. The job is then cancelled in any case."""
    watcher = Watcher(settings, QueueCache(min(2.0, settings.poll_s)))
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
        return Check.of("job", False, detail, "try again later, or name a partition with a shorter queue")
    message = status.failure.message if status.failure else "the job left no result"
    remedy = f"its logs are in {work_dir}"
    log = read_tail(work_dir / STDERR_FILE, TAIL_BYTES) + message
    if "No module named" in log or "No such file or directory" in log:
        remedy = f"set `python` to an interpreter with torch on the compute nodes, or set `modules`; {remedy}"
    return Check.of("job", False, one_line(message, 300), remedy)


def _check_torch(result: dict[str, Any], spec: JobSpec) -> Iterator[Check]:
    if "torch_error" in result:
        remedy = "set `python`, `modules` or `container` in the profile so that torch is available"
        yield Check.of("torch", False, str(result["torch_error"]), remedy)
        return
    devices = [str(device) for device in result.get("devices", [])]
    wanted = spec.shape.gpus_per_node
    enough = len(devices) >= min(wanted, spec.num_ranks)
    seen = f"{len(devices)} x {devices[0]}" if devices else "no accelerator"
    remedy = f"the job requested {wanted}: correct `gpu_request` or `modules`, or set `cpu_only`"
    yield Check.of("torch", enough, f"torch {result.get('torch')}, {seen}", remedy)
    reached, backend = str(result.get("reduced_over", "")), str(result.get("backend"))
    fine = reached == str(spec.num_ranks)
    detail = f"all-reduce over {reached} ranks" if fine else one_line(str(result.get("reduce_error", reached)), 300)
    yield Check.of(backend, fine, detail, "set `NCCL_DEBUG: INFO` in `environment` and read the job's logs")


def check_needs(result: dict[str, Any], run_script: RunScript) -> Iterator[Check]:
    """Yield a check for each variable that the framework needs, from the node's report.

    Without a named framework, a variable that is not set passes: only trials of its framework would need it.
    """
    for need in run_script.needs:
        seen = result.get("needs", {}).get(need.env, {})
        value, is_met = seen.get("value"), bool(seen.get("is_met"))
        ok = is_met or (value is None and run_script.path is None)
        detail = f"on the compute node: {need.describe(value, is_met=is_met)}"
        yield Check.of(need.env, ok, detail, need.remedy)
