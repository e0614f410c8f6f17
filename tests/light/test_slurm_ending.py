"""Why a job ended, from Slurm's state and the job's files; and what Slurm's refusals mean."""

from __future__ import annotations

from typing import Any

import pytest

from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.launch.slurm.commands import Reaction, classify_refusal, never_starts, suggest_remedy
from cclsearch.launch.slurm.ending import Ending, explain_end, find_exit_code
from cclsearch.launch.slurm.job_files import EndRecord, NodeReport

CRASH = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="RuntimeError: own message")


def end(reason: str = "finished", code: int = 1, signal: str | None = None) -> EndRecord:
    return EndRecord(job_id="7", started_at=0, ended_at=9, exit_code=code, reason=reason, signal=signal)


def report(code: int, *, oom: int = 0, terminated: bool = False) -> NodeReport:
    return NodeReport(node="n1", exit_code=code, oom_kills=oom, terminated=terminated)


def ending(**facts: Any) -> Ending:
    known: dict[str, Any] = {
        "job_id": "7",
        "state": "FAILED",
        "step_states": (),
        "preempted": False,
        "cancelled_by_us": False,
        "started": True,
        "end": end(),
        "reports": (report(1),),
        "batch_log": "",
        "bad_nodes": (),
    }
    return Ending(**{**known, **facts})


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({}, FailureKind.CRASHED),
        ({"state": "PREEMPTED"}, FailureKind.PREEMPTED),
        ({"preempted": True}, FailureKind.PREEMPTED),
        (
            {"batch_log": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO PREEMPTION ***"},
            FailureKind.PREEMPTED,
        ),
        ({"state": "NODE_FAIL"}, FailureKind.NODE_FAILED),
        ({"state": "BOOT_FAIL"}, FailureKind.NODE_FAILED),
        ({"bad_nodes": ("n2",)}, FailureKind.NODE_FAILED),
        ({"batch_log": "srun: error: Node failure on n2"}, FailureKind.NODE_FAILED),
        ({"state": "OUT_OF_MEMORY"}, FailureKind.OUT_OF_MEMORY),
        ({"step_states": ("FAILED", "OUT_OF_MEMORY")}, FailureKind.OUT_OF_MEMORY),
        ({"batch_log": "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0."}, FailureKind.OUT_OF_MEMORY),
        ({"batch_log": "slurmstepd: error: Exceeded job memory limit"}, FailureKind.OUT_OF_MEMORY),
        ({"reports": (report(-9, oom=2),)}, FailureKind.OUT_OF_MEMORY),
        ({"reports": (report(1, oom=2),)}, FailureKind.CRASHED),
        ({"state": "TIMEOUT"}, FailureKind.TIMEOUT),
        ({"state": "DEADLINE"}, FailureKind.TIMEOUT),
        ({"end": end("timeout", -15)}, FailureKind.TIMEOUT),
        ({"state": None, "batch_log": "*** JOB 7 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***"}, FailureKind.TIMEOUT),
        ({"state": "CANCELLED by 1000"}, FailureKind.CANCELLED),
        ({"cancelled_by_us": True, "state": "CANCELLED"}, FailureKind.CANCELLED),
        ({"state": None, "end": end(signal="SIGTERM")}, FailureKind.CANCELLED),
        ({"state": None, "reports": (report(-15, terminated=True),)}, FailureKind.CANCELLED),
        ({"reports": (report(1), report(-15, terminated=True))}, FailureKind.CRASHED),
        ({"batch_log": "srun: error: Unable to create step for job 7: x"}, FailureKind.ALLOCATION_ENDED),
        ({"batch_log": "srun: error: Task launch for 7.0 failed on node n1: x"}, FailureKind.LAUNCHER),
        ({"started": False, "end": None, "batch_log": "python: not found"}, FailureKind.LAUNCHER),
        ({"state": None, "end": None, "reports": ()}, FailureKind.LAUNCHER),
        ({"end": end("unlaunched", 127), "batch_log": "cannot start srun"}, FailureKind.LAUNCHER),
        ({"reports": (NodeReport(node="n", exit_code=127, oom_kills=0, unlaunched="no py"),)}, FailureKind.LAUNCHER),
    ],
)
def test_each_ending_has_its_failure_kind(facts, kind):
    assert explain_end(ending(**facts), 600.0, 12, CRASH).kind is kind


def test_the_trials_own_failure_is_kept_if_slurm_reports_no_cause():
    assert explain_end(ending(), 600.0, 12, CRASH) == CRASH
    killed = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="rank 1 died of Signal 9 (SIGKILL)")
    assert explain_end(ending(), 600.0, 12, killed).kind is FailureKind.CRASHED
    counted = explain_end(ending(reports=(report(1, oom=1),)), 600.0, 12, killed)
    assert (counted.kind, counted.message) == (FailureKind.OUT_OF_MEMORY, killed.message)


def test_the_exit_code_is_that_of_the_task_that_failed_first():
    reports = (report(-15, terminated=True), report(3), report(143))
    assert find_exit_code(ending(reports=reports, end=end(code=143))) == 3
    assert find_exit_code(ending(reports=(), end=end(code=5))) == 5
    assert find_exit_code(ending(reports=(), end=None)) is None


POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("message", "queued", "meaning"),
    [
        (f"QOSMaxSubmitJobPerUserLimit {POLICY}", True, Reaction.WAIT),
        (f"AssocMaxSubmitJobLimit {POLICY}", True, Reaction.WAIT),
        (f"AssocGrpSubmitJobsLimit {POLICY}", True, Reaction.WAIT),
        (f"AssocGrpSubmitJobsLimit {POLICY}", False, Reaction.NEVER),
        (f"AssocMaxSubmitJobLimit {POLICY}", False, Reaction.NEVER),
        (f"QOSMaxWallDurationPerJobLimit {POLICY}", True, Reaction.NEVER),
        (f"AssocMaxNodePerJobLimit {POLICY}", True, Reaction.NEVER),
        (POLICY, True, Reaction.WAIT),
        (POLICY, False, Reaction.NEVER),
        ("Invalid job array specification", False, Reaction.SMALLER_ARRAY),
        ("Invalid account or account/partition combination specified", True, Reaction.NEVER),
        ("Invalid qos specification", True, Reaction.NEVER),
        ("Requested node configuration is not available", True, Reaction.NEVER),
        ("Slurm temporarily unable to accept job, sleeping and retrying", False, Reaction.WAIT),
    ],
)
def test_a_limit_is_waited_for_and_an_impossible_job_is_not(message, queued, meaning):
    assert classify_refusal(message, others_queued=queued) is meaning


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("Invalid account or x", "account"),
        ("Invalid qos", "qos"),
        ("invalid partition", "partition"),
        ("odd", "scontrol"),
    ],
)
def test_a_refusal_has_a_remedy(message, word):
    assert word in suggest_remedy(message)


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("Resources", False),
        ("Priority", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("AssocGrpNodeLimit", False),
        ("ReqNodeNotAvail, Reserved for maintenance", False),
        ("PartitionTimeLimit", True),
        ("QOSMaxNodePerJobLimit", True),
        ("AssocMaxWallDurationPerJobLimit", True),
        ("JobHeldUser", True),
        ("launch failed requeued held", True),
        ("BadConstraints", True),
        ("QOSMinGRES", True),
        ("QOSMinCpuNotSatisfied", True),
        ("QOSMaxCpuPerNode", True),
        ("QOSMaxGRESPerUser", False),
        ("QOSGrpCpuLimit", False),
        ("ReservationDeleted", True),
    ],
)
def test_a_pending_job_that_can_never_start_is_recognized_by_its_reason(reason, never):
    assert never_starts(reason) is never
