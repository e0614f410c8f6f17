"""Explain why a job ended without a result, from Slurm's state, the job's records and its logs.

Everything but `read_ending` is a pure function.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.job_file import read_tail
from cclsearch.core.text import one_line
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.launch.collect import is_killed
from cclsearch.launch.log_reader import LogFault, read_log
from cclsearch.launch.slurm.commands import SLURM_WORDS
from cclsearch.launch.slurm.job_files import CANCELLED_FILE, END_FILE, STARTED_FILE, EndRecord, JobSpec, NodeReport

TAIL_BYTES = 64 * 1024

ENDED_STATES = frozenset(SLURM_WORDS["slurm_ended"])
WAITING_STATES = frozenset(SLURM_WORDS["slurm_waiting"])


@dataclass(frozen=True)
class Ending:
    """The evidence about a job that has ended. `state` is None if Slurm no longer lists the job."""

    job_id: str
    state: str | None
    step_states: tuple[str, ...]
    preempted: bool
    """Whether Slurm had started to preempt the job; its final state may be another one."""
    cancelled_by_us: bool
    started: bool
    """Whether the job claimed its attempt."""
    end: EndRecord | None
    reports: tuple[NodeReport, ...]
    batch_log: str
    """Last part of the job script's output, with lines of Slurm's daemons; never the trial's output."""
    bad_nodes: tuple[str, ...]

    @functools.cached_property
    def said(self) -> LogFault | None:
        """What Slurm's daemons say in the job script's log, which remains when Slurm has forgotten the job."""
        return read_log(self.batch_log)


def read_ending(
    spec: JobSpec,
    job_id: str,
    *,
    state: str | None,
    step_states: tuple[str, ...] = (),
    preempted: bool = False,
    bad_nodes: tuple[str, ...] = (),
    submission_folder: Path | None = None,
) -> Ending:
    """Read the attempt's files and return its ending."""
    folder = spec.folder
    reports = (NodeReport.read(path) for path in sorted(folder.glob("node-*.json")))
    logs = sorted(submission_folder.glob(f"slurm-{job_id}.log")) if submission_folder else []
    return Ending(
        job_id=job_id,
        state=state,
        step_states=step_states,
        preempted=preempted,
        cancelled_by_us=(folder / CANCELLED_FILE).exists(),
        started=(folder / STARTED_FILE).exists(),
        end=EndRecord.read(folder / END_FILE),
        reports=tuple(report for report in reports if report is not None),
        batch_log="".join(read_tail(path, TAIL_BYTES) for path in logs),
        bad_nodes=bad_nodes,
    )


def explain_infrastructure(ending: Ending, timeout_s: float, time_limit_min: int) -> Failure | None:
    """Return the end's cause outside the trial, or None: then the trial's own logs decide.

    Slurm's final state takes precedence, then its daemons' log, then the node program's record.
    """
    causes = (_list_slurms_causes(ending, timeout_s, time_limit_min), _list_outside(ending))
    return next((_fail(kind, message) for cause in causes for kind, message in cause), None)


def _list_slurms_causes(ending: Ending, timeout_s: float, time_limit_min: int) -> Iterator[tuple[FailureKind, str]]:
    job = f"job {ending.job_id}"
    if ending.cancelled_by_us:
        yield FailureKind.CANCELLED, f"{job} was cancelled by the search"
    if ending.preempted or _is(ending, "PREEMPTED"):
        yield FailureKind.PREEMPTED, f"Slurm gave the nodes of {job} to a job of higher priority (PREEMPTED)"
    if _is(ending, "NODE_FAIL", "BOOT_FAIL"):
        yield FailureKind.NODE_FAILED, f"a node of {job} failed ({ending.state}){_list_nodes(ending.bad_nodes)}"
    if _is(ending, "OUT_OF_MEMORY"):
        yield FailureKind.OUT_OF_MEMORY, f"Slurm ended {job} because a node ran out of memory (OUT_OF_MEMORY)"
    if any(state.startswith("OUT_OF_ME") for state in ending.step_states):
        yield FailureKind.OUT_OF_MEMORY, f"Slurm ended a step of {job} because a node ran out of memory"
    said = ending.said
    if said is not None and said.kind is FailureKind.OUT_OF_MEMORY:
        yield said.kind, said.message
    killed = [report for report in ending.reports if report.oom_kills and report.exit_code in (-9, 137)]
    if killed and _is(ending, "FAILED", "COMPLETED", None):
        yield FailureKind.OUT_OF_MEMORY, f"the kernel killed a process on {killed[0].node} because memory ran out"
    if said is not None and said.fault.ends_job:
        yield said.kind, f"{job}{_list_nodes(ending.bad_nodes)}: {said.message}"
    if _is(ending, "TIMEOUT", "DEADLINE"):
        yield FailureKind.TIMEOUT, f"Slurm ended {job} at its time limit of {time_limit_min} min"
    if ending.end is not None and ending.end.reason == "timeout":
        yield FailureKind.TIMEOUT, f"no result after {timeout_s:.0f} s, the trial's time limit"


def _list_outside(ending: Ending) -> Iterator[tuple[FailureKind, str]]:
    """Yield causes outside the trial: cancelled by someone, a node was lost, a step never started."""
    job, end = f"job {ending.job_id}", ending.end
    if _is(ending, "CANCELLED", "REVOKED"):
        who = re.search(r"by (\S+)", ending.state or "")
        by = f" by user {who.group(1)}" if who else ""
        yield FailureKind.CANCELLED, f"{job} was cancelled{by}, not by the search"
    if ending.bad_nodes:
        yield FailureKind.NODE_FAILED, f"nodes of {job} were lost{_list_nodes(ending.bad_nodes)}"
    yield from ((FailureKind.LAUNCHER, f"{r.unlaunched} (on {r.node})") for r in ending.reports if r.unlaunched)
    if end is not None and end.reason == "unlaunched":
        yield FailureKind.LAUNCHER, one_line(ending.batch_log, 300)
    if ending.said is not None and ending.said.kind is FailureKind.LAUNCHER:
        yield FailureKind.LAUNCHER, ending.said.message
    if end is not None and (end.signal or _was_signaled(ending)):
        name = end.signal or "SIGTERM"
        yield FailureKind.CANCELLED, f"{job} got {name} from outside; Slurm does not say who sent it"
    if not ending.started:
        log = one_line(ending.batch_log.strip() or "it left no output", 300)
        yield FailureKind.LAUNCHER, f"{job} ({ending.state or 'not listed'}) never started: {log}"
    if end is None and ending.state is None:
        yield FailureKind.LAUNCHER, f"{job} disappeared; neither its files nor Slurm say why"


def _was_signaled(ending: Ending) -> bool:
    """Whether a signal ended every node's task, so that none failed by itself."""
    ours = ending.end is not None and ending.end.reason in {"timeout", "lingered"}
    return bool(ending.reports) and not ours and all(report.terminated for report in ending.reports)


def find_exit_code(ending: Ending) -> int | None:
    """Return the exit code of the task that failed by itself, not of those that were ended because of it."""
    codes = [report.exit_code for report in ending.reports if report.exit_code not in (0, -15, 143)]
    if codes:
        return codes[0]
    return ending.end.exit_code if ending.end else None


def explain_end(ending: Ending, timeout_s: float, time_limit_min: int, own: Failure | None) -> Failure:
    """Return why there is no result; `own` is the failure in the trial's own files."""
    infrastructure = explain_infrastructure(ending, timeout_s, time_limit_min)
    if infrastructure is not None:
        return infrastructure
    if own is not None:
        counted = any(report.oom_kills for report in ending.reports)
        return own.model_copy(update={"kind": FailureKind.OUT_OF_MEMORY}) if counted and is_killed(own) else own
    return _fail(FailureKind.CRASHED, f"the run script of job {ending.job_id} ended without a result")


def _is(ending: Ending, *states: str | None) -> bool:
    if ending.state is None:
        return None in states
    return any(state is not None and ending.state.startswith(state) for state in states)


def _list_nodes(nodes: tuple[str, ...]) -> str:
    return f" ({', '.join(nodes)})" if nodes else ""


def _fail(kind: FailureKind, message: str) -> Failure:
    return Failure(stage=Stage.RUN, kind=kind, message=message)
