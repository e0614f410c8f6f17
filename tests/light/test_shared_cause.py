"""A search whose configurations all end for the same reason ends early, and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_launcher import Ending, MeasuredLauncher, ScriptedLauncher, ran
from scripted_search import open_search, run_session

from cclsearch.cli import main
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.launch.base import Handle, Job, JobState, JobStatus
from cclsearch.launch.collect import collect_end
from cclsearch.loop import drive
from cclsearch.loop.shared_cause import normalize_message
from cclsearch.record.event import EndKind
from cclsearch.record.state import RunState
from cclsearch.run.folder import load_run


def crash(message: str, kind: FailureKind = FailureKind.CRASHED) -> Failure:
    return Failure(stage=Stage.RUN, kind=kind, message=message)


def search(project: Path, decide: Callable[[Job], Ending], **limits: int) -> RunState:
    limits = {"budget": 8, "parallel": 1, "max_attempts": 1, **limits}
    return run_session(*open_search(project, MeasuredLauncher(decide), **limits))


def crash_alike(job: Job) -> Failure:
    return crash(
        f"RuntimeError: rank {job.trial} cannot read /data/{job.trial}/shard-{job.trial * 7}.bin at 0x7f{job.trial}e0"
    )


def end_of(state: RunState) -> tuple[EndKind | None, int]:
    end = state.stopped or state.ended
    return (end.kind if end else None, len(state.trials))


def test_three_configurations_with_the_same_root_exception_end_the_search(project):
    state = search(project, crash_alike)
    assert end_of(state) == (EndKind.SHARED_CAUSE, 3)
    reason = state.stopped.reason
    for part in ("trials 1, 2 and 3", "RuntimeError: rank 3 cannot read", "trials/0003", "resume r --keep-going"):
        assert part in reason
    assert "cancelled" not in reason


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"exit_code": 3}, "exited with 3"),
        ({"exit_code": 0}, "exited with 0 but wrote no"),
        ({"signal": 11}, "SIGSEGV"),
    ],
)
def test_three_configurations_that_end_alike_without_an_exception_end_the_search(project, end, words):
    def decide(job: Job) -> Failure:
        (job.trial_dir / "stderr.log").write_text(f"rank {job.trial} of {job.trial_dir}\n")
        failure = collect_end(job.trial_dir, **end)
        assert isinstance(failure, Failure)
        return failure

    state = search(project, decide)
    assert end_of(state) == (EndKind.SHARED_CAUSE, 3)
    assert words in state.stopped.reason


@pytest.mark.parametrize("names", [("KeyError: alpha", "ValueError: beta"), ("KeyError: a", "OSError: b", "TypeError")])
def test_different_exceptions_in_turn_do_not_end_it(project, names):
    state = search(project, lambda job: crash(names[job.trial % len(names)]))
    assert end_of(state) == (EndKind.BUDGET_USED, 8)


@pytest.mark.parametrize(
    "message", ["srun: error: gpu2: task 5: Killed (SIGKILL)", "rank 3 exits with return code = -9", "exitcode: -9"]
)
def test_processes_that_were_killed_never_end_it_for_memory_is_the_likely_reason(project, message):
    assert end_of(search(project, lambda job: crash(message))) == (EndKind.BUDGET_USED, 8)


def test_once_a_trial_was_admitted_the_surrogate_learns_instead(project):
    launcher = MeasuredLauncher(lambda job: ran(job, simulated=False) if job.trial == 1 else crash_alike(job))
    search = open_search(project, launcher, admits=True, budget=6, parallel=1, max_attempts=1)
    assert end_of(run_session(*search)) == (EndKind.BUDGET_USED, 6)


def test_three_refusals_by_one_rule_end_it_whatever_their_figures(project):
    state = search(project, lambda job: ran(job, simulated=False, warmup_steps=0, step_times_s=(0.1 * job.trial,) * 5))
    assert end_of(state) == (EndKind.SHARED_CAUSE, 3)
    assert state.stopped.reason.startswith("admission rule ")


def test_out_of_memory_and_the_infrastructure_are_passed_over(project):
    kinds = {2: FailureKind.OUT_OF_MEMORY, 3: FailureKind.NODE_FAILED}

    def decide(job: Job) -> Failure:
        return crash("the same words", kinds.get(job.trial, FailureKind.CRASHED))

    assert end_of(search(project, decide)) == (EndKind.SHARED_CAUSE, 5)


def test_out_of_memory_alone_never_ends_it(project):
    state = search(project, lambda job: crash("out of memory", FailureKind.OUT_OF_MEMORY), budget=5)
    assert end_of(state) == (EndKind.BUDGET_USED, 5)


def test_what_a_simulation_answers_is_not_counted(project):
    state = run_session(*open_search(project, ScriptedLauncher(crash_alike), budget=5, parallel=1))
    assert end_of(state) == (EndKind.BUDGET_USED, 5)


class FourthRunsLonger(MeasuredLauncher):
    """Reports the fourth job as running until the others have ended."""

    def poll(self, handles: list[Handle]) -> list[JobStatus]:  # type: ignore[override]
        statuses = super().poll(handles)
        return [
            JobStatus(state=JobState.RUNNING) if len(handles) > 1 and h.job_name.endswith("t0004-a1") else s
            for h, s in zip(handles, statuses, strict=True)
        ]


def test_a_trial_that_still_runs_is_waited_for_and_may_refute_the_cause(project):
    launcher = FourthRunsLonger(lambda job: crash("KeyError: other") if job.trial == 4 else crash_alike(job))
    state = run_session(*open_search(project, launcher, budget=5, parallel=4, max_attempts=1))
    assert launcher.cancelled == []
    assert end_of(state) == (EndKind.BUDGET_USED, 5)


def test_the_exit_code_is_its_own_and_keep_going_continues(project, monkeypatch, cli):
    folder, session = open_search(project, MeasuredLauncher(crash_alike), budget=7, parallel=1, max_attempts=1)
    monkeypatch.setattr(drive, "open_session", lambda *_, **__: session)
    assert "continue: ccl-search resume r\n" in cli.out(["resume", "r"], 3)
    session.stop.__init__()  # type: ignore[misc]
    assert main(["resume", "r", "--quiet"]) == 3, "three more: what failed before the resume is not counted again"
    assert len(load_run(folder).state.trials) == 6
    session.stop.__init__()  # type: ignore[misc]
    assert main(["resume", "r", "--quiet", "--keep-going"]) == 1
    assert end_of(load_run(folder).state) == (EndKind.BUDGET_USED, 7)


def test_a_search_that_used_up_its_budget_needs_a_greater_one_to_continue(project, cli):
    state = search(project, crash_alike, budget=3)
    assert "run `ccl-search resume r --budget 6`" in state.stopped.reason
    assert cli.out(["status", "r"]).endswith("continue: ccl-search resume r --budget 6\n")


def test_keep_going_is_one_of_the_frozen_inputs(project):
    state = search(project, crash_alike, budget=5, keep_going=True)
    assert end_of(state) == (EndKind.BUDGET_USED, 5)
    assert "keep_going: true" in (project / "runs" / "r" / "search.yaml").read_text()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("OSError: /a/b/c.bin: No such file", "OSError: /x/y.bin: No such file"),
        ("rank 3: device 0x7ffe12 at 10.0.0.3:29500", "rank 12: device 0x11 at 10.0.0.44:1"),
        ("job 4f2a90bc-11aa-4c3d-9f10-000000000001 died", "job 9f2a90bc-22aa-4c3d-9f10-00000000000f died"),
        ("needs 1.5e+03 MiB,  has -2", "needs 7 MiB, has 12.25"),
    ],
)
def test_messages_are_compared_without_what_varies(one, other):
    assert normalize_message(one) == normalize_message(other)


def test_words_still_distinguish_messages():
    assert normalize_message("KeyError: 'alpha'") != normalize_message("KeyError: 'beta'")
    assert normalize_message("ValueError: facade") != normalize_message("ValueError: decade")
