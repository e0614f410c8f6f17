"""Before and beside the trials: the expected cost, the limit of node-hours, and the user's baseline."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_launcher import MeasuredLauncher, failed, ran
from scripted_search import open_search

from cclsearch.card.load import load_card
from cclsearch.cli import main
from cclsearch.core.values import FailureKind, Provenance
from cclsearch.loop.loop import run_search
from cclsearch.loop.meter import keep_node_hours
from cclsearch.loop.session import Changes, begin_or_resume
from cclsearch.plan.forecast import estimate_search
from cclsearch.record.event import EndKind, Purpose
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.report.summary import summarize_run
from cclsearch.run.folder import load_run, resume_command
from cclsearch.run.usage import sum_node_hours
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework

REPLAY = ["run", "--workload", "wl2", "--launcher", "replay", "--name", "r", "--quiet"]
SLURM = ["run", "--workload", "wl2", "--launcher", "slurm-generic", "--dry-run"]
SLOW = "tp=4,pp=4,dp=1,zero_stage=0,micro_batch_size=1"
CRASHED = "tp=1,pp=1,dp=16,zero_stage=0,micro_batch_size=1"


def test_a_baseline_runs_first_costs_no_budget_and_is_compared_with(project, capsys):
    assert main([*REPLAY, "--budget", "3", "--baseline", SLOW]) == 0
    state = load_run(Path("runs") / "r").state
    assert [trial.purpose for trial in state.trials.values()] == [Purpose.BASELINE] + [Purpose.SEARCH] * 3
    assert state.num_spent == 3
    assert state.baseline.number == 1
    assert "x faster than your baseline (trial 1: " in capsys.readouterr().out
    assert main(["resume", "r", "--budget", "5", "--quiet"]) == 0
    state = load_run(Path("runs") / "r").state
    assert sum(trial.purpose is Purpose.BASELINE for trial in state.trials.values()) == 1
    for command in (["status", "r"], ["best", "r"]):
        assert main(command) == 0
        assert "than your baseline (trial 1: " in capsys.readouterr().out


def test_the_expected_improvement_is_a_share_of_the_best_so_far(project):
    slow = "tp=2,dp=2,pp=4,ep=1,micro_batch_size=1,activation_checkpointing=none,zero_stage=0,virtual_pipeline=1"
    search = ["run", "--workload", "wl5", "--launcher", "simulate", "--budget", "1", "--name", "r", "--quiet"]
    assert main([*search, "--baseline", slow]) == 0
    rationale = load_run(Path("runs") / "r").state.trials[2].rationale
    found = re.search(r"expected improvement ([0-9.]+)% of the best so far", rationale)
    assert 50 < float(found[1]) < 100  # ten times as fast: a logarithm of 2.2


def test_a_baseline_that_fails_is_said_and_the_search_goes_on(project, cli):
    said = cli.out([*REPLAY, "--budget", "3", "--baseline", CRASHED])
    assert "your baseline has no result (trial 1, " in said
    assert "the baseline (" not in said
    assert "than your baseline" not in said
    assert len(load_run(Path("runs") / "r").state.trials) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*SLURM, "--baseline", "tp=8,dp=2,pp=3"], "--baseline tp=8 dp=2 pp=3: rule choices: pp=3 is not one of"),
        ([*SLURM, "--baseline", "tp=2,dp=4"], "--baseline tp=2 dp=4: "),
        ([*SLURM, "--baseline", "speed=9"], "--baseline: there is no knob 'speed'"),
        ([*REPLAY, "--baseline", "tp=2,pp=1,dp=1"], "the recording has no such configuration"),
        ([*REPLAY, "--baseline", "tp=8,pp=1"], "configurations of the search space match; give "),
    ],
)
def test_a_baseline_outside_the_space_is_refused_before_anything_is_written(options, said, project, cli):
    error = cli.err(options)
    assert said in error
    assert error.count("\n") == 1
    assert not (project / "runs").exists()


def test_the_cost_is_said_before_a_search_on_a_cluster_and_never_for_a_replay(project, cli):
    said = cli.out([*SLURM, "--budget", "8", "--max-node-hours", "0.1"])
    assert "expected cost: about " in said
    assert "8 trials x (120 s start + 10 steps x " in said
    assert "more than --max-node-hours 0.1" in said
    assert "node-hours" not in cli.out([*REPLAY[:-1], "--dry-run"])


def test_node_hours_grow_with_trials_and_nodes():
    card = load_card("wl2")
    space = build_space(card, load_framework("megatron"))
    one, ten = estimate_search(card, space, 1), estimate_search(card, space, 10)
    assert one.nodes == 4, "16 accelerators in nodes of 4"
    assert one.node_hours == pytest.approx(4 * (120 + 10 * one.unit_s) / 3600)
    assert ten.node_hours > 9.9 * one.node_hours


def run_limited(project: Path, decide: object, limit: float, *, baseline: bool = False) -> tuple[RunState, Path]:
    folder, session = open_search(project, MeasuredLauncher(decide), budget=4)
    config = session.space.config(0) if baseline else None
    spec = session.spec.model_copy(update={"baseline": config})
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        begin_or_resume(writer, session, Changes(max_node_hours=limit))
        with keep_node_hours(writer, replace(session, spec=spec)) as limited:
            run_search(writer, limited)
        return writer.state, folder


def test_no_trial_starts_whose_estimate_passes_the_limit(project):
    state, folder = run_limited(project, lambda job: ran(job, simulated=False), 1e-4)
    assert len(state.trials) == 0
    assert state.ended.kind is EndKind.NODE_HOURS
    assert "the next trial would use about " in state.ended.reason
    assert "of the limit of 0.0001" in state.ended.reason
    assert resume_command(load_run(folder).spec, state, "r") == "ccl-search resume r --max-node-hours 0.0002"


def test_real_use_counts_from_submission_to_end_of_each_attempt(project):
    attempts: list[float] = []

    def decide(job: object) -> object:
        attempts.append(time.time())
        time.sleep(0.05)
        first = getattr(job, "attempt", 1) == 1
        return failed(FailureKind.PREEMPTED) if first else ran(job, simulated=False)  # type: ignore[arg-type]

    state, folder = run_limited(project, decide, 100.0)
    spec = load_run(folder).spec.model_copy(update={"provenance": Provenance.MEASURED})
    used = sum_node_hours(spec, state, time.time())
    assert len(attempts) == 2 * len(state.trials) > 0
    assert len(attempts) * 0.05 / 3600 <= used <= (time.time() - attempts[0]) / 3600, "one node"
    lines = summarize_run(spec, state, folder)
    assert any("of at most 100 node-hours used" in line for line in lines)


def test_a_baseline_lost_to_infrastructure_runs_again_when_the_search_resumes(project):
    state, _ = run_limited(project, lambda job: failed(FailureKind.PREEMPTED), 100.0, baseline=True)
    assert state.own_baseline is not None
    assert state.stopped.kind is EndKind.INFRASTRUCTURE_FAILURES
    assert {trial.purpose for trial in state.trials.values()} == {Purpose.BASELINE}
    assert state.num_spent == 0


def test_predict_shows_mfu_and_throughput_with_their_formula(cli):
    answer = cli.json(["predict", "--workload", "wl2", "--top", "1", "--json"])
    [row] = answer["configurations"]
    assert row["tokens_per_s"] == pytest.approx(32 * 1024 / row["step_time_s"])
    assert row["tokens_per_s_per_accelerator"] == pytest.approx(row["tokens_per_s"] / 16)
    # 8.03 billion parameters, 0.53 billion of them the input embedding; 32 layers of 32 heads of 128 over 1024 tokens
    flops = 6 * (8.03e9 - 128256 * 4096) + 12 * 32 * 32 * 128 * 1024
    assert row["mfu"] == pytest.approx(row["tokens_per_s_per_accelerator"] * flops / 312e12, rel=2e-3)
    assert answer["search_node_hours"] > 0
    shown = cli.out(["predict", "--workload", "wl2", "--top", "1"])
    assert "MFU = tokens/s per accelerator x (6 x parameters" in shown
    assert "appendix B" in shown
    assert "expected cost of a search on a cluster: about " in shown


def test_predict_says_that_nothing_fits(cli):
    shown = cli.out(["predict", "--workload", "wl2", "--set", "total_count=2", "--top", "1"])
    assert "note: no configuration is likely to fit into memory: the smallest needs about " in shown
