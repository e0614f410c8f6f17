"""What further trials may still bring, and when they are not worthwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm.players import own_turn, prompt_candidates
from llm.turns import Scripted, submit
from paths import ROOT
from scripted_launcher import MeasuredLauncher, ran
from scripted_search import open_search, run_session

from cclsearch import cli
from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.arbiter.proposer import Arbiter
from cclsearch.propose.agent.arbiter.rules import ArbiterSettings
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.prompt.surrogate_table import describe_noise
from cclsearch.propose.agent.providers.types import Answer, CompletionRequest
from cclsearch.propose.base import Note, Observation, Proposal, Proposer, SearchView
from cclsearch.propose.bayes.acquisition import MAX_FAILURE_PENALTY, choose_batch
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.propose.events import NOTHING_LEFT
from cclsearch.propose.study.proposer import SurrogateProposer
from cclsearch.record.event import EndKind, Purpose
from cclsearch.record.state import RunState
from cclsearch.recording.load import Recording, load_recording
from cclsearch.run.folder import load_run

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "vtrain-h1024-l12-g8-b8"


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load_recording(LANDSCAPE)


def measured(recording: Recording, rows: Sequence[int], factors: dict[int, float] | None = None) -> list[Observation]:
    """Return trials of these rows; the time of some is multiplied by a factor."""
    seen = []
    for trial, row in enumerate(rows, start=1):
        time_s = recording.rows[row].metrics["step_time_s"] * (factors or {}).get(row, 1.0)
        seen.append(Observation(trial, recording.rows[row].config, row, time_s, metrics={"step_time_s": time_s}))
    return seen


def view_of(recording: Recording, seen: list[Observation], **fields: object) -> SearchView:
    view = SearchView(recording.card, recording.space, tuple(seen), frozenset(), 5, seed=0)
    return replace(view, **fields)  # type: ignore[arg-type]


def sorted_rows(recording: Recording) -> list[int]:
    times = {n: row.metrics["step_time_s"] for n, row in enumerate(recording.rows) if "step_time_s" in row.metrics}
    return sorted(times, key=times.__getitem__)


@pytest.fixture(scope="module")
def decided(recording: Recording) -> list[Observation]:
    """The fastest rows are measured, so that no other is likely to win."""
    return measured(recording, sorted_rows(recording)[:12])


def test_the_best_is_repeated_once_if_nothing_else_is_likely_to_win(recording, decided):
    proposer = DefaultProposer()
    first = proposer.propose(view_of(recording, decided, can_repeat=True), 2)
    assert [proposal.is_repeat for proposal in first] == [True, False]
    assert first[0].config == decided[0].config
    (note,) = proposer.take_events()
    assert isinstance(note, Note)
    assert note.topic == NOTHING_LEFT
    again = replace(decided[0], trial=13, is_confirmation=True)
    later = view_of(recording, [*decided, again], can_repeat=True, events=(note,))
    assert not proposer.propose(later, 1)[0].is_repeat
    assert not proposer.take_events(), "the ledger has the note"


def test_a_recording_is_not_repeated(recording, decided):
    assert not SurrogateProposer().propose(view_of(recording, decided), 1)[0].is_repeat


def test_the_search_ends_with_a_reason_if_the_user_wants_that(recording, decided):
    proposer = SurrogateProposer()
    assert not proposer.propose(view_of(recording, decided, ends_without_chance=True), 1)
    assert "likely to beat the best by 1%" in (proposer.ending() or "")
    assert proposer.propose(view_of(recording, decided[3:5], ends_without_chance=True), 1), "others may still win"
    assert proposer.ending() is None


@pytest.mark.parametrize("num_measured", [1, 4])
def test_few_trials_that_are_far_faster_than_predicted_do_not_end_a_search(recording, num_measured):
    """The closed form may be wrong by any factor on a machine or framework that it does not know."""
    rows = sorted_rows(recording)[:5]
    seen = measured(recording, rows, dict.fromkeys(rows, 0.05))
    early = view_of(recording, seen[:num_measured], can_repeat=True, ends_without_chance=True)
    (proposal,) = DefaultProposer().propose(early, 1)
    assert not proposal.is_repeat


@pytest.mark.parametrize("factor", [50.0, 1 / 3])
@pytest.mark.parametrize("name", ["nanotron-8b-4n", "nanotron-3b-8n", "nanotron-1b-16n"])
def test_a_trial_that_the_others_contradict_is_measured_once_more(name, factor):
    recording = load_recording(LANDSCAPE.parent / name)
    rows = sorted_rows(recording)[:8]
    seen = measured(recording, rows, {rows[0]: factor})
    (proposal,) = DefaultProposer().propose(view_of(recording, seen, can_repeat=True), 1)
    assert proposal.is_repeat
    assert recording.space.row(proposal.config) == rows[0]
    assert "measured once more" in proposal.rationale
    seen.append(replace(seen[0], trial=9, is_confirmation=True))
    again = DefaultProposer().propose(view_of(recording, seen, can_repeat=True), 1)
    assert recording.space.row(again[0].config) != rows[0], "once is enough"


def test_two_runs_that_contradict_each_other_get_a_third_if_the_better_one_would_win(recording):
    rows = sorted_rows(recording)[:8]
    seen = measured(recording, rows, {rows[0]: 8.0})
    right = measured(recording, rows[:1])[0]
    seen.append(replace(right, trial=9, is_confirmation=True))
    (third,) = DefaultProposer().propose(view_of(recording, seen, can_repeat=True), 1)
    assert (third.is_repeat, recording.space.row(third.config)) == (True, rows[0])
    assert third.rationale == "its trials 1 and 9 differ by more than the noise: a third run decides"
    seen.append(replace(right, trial=10, is_confirmation=True))
    (after,) = DefaultProposer().propose(view_of(recording, seen, can_repeat=True), 1)
    assert recording.space.row(after.config) != rows[0]
    slow = measured(recording, rows, {rows[-1]: 20.0})
    slow.append(replace(slow[-1], trial=9, loss=slow[0].loss * 2, is_confirmation=True))
    (other,) = DefaultProposer().propose(view_of(recording, slow, can_repeat=True), 1)
    assert recording.space.row(other.config) != rows[-1], "its better run would not win"


def test_a_slow_trial_of_a_configuration_that_would_not_win_anyway_is_not_repeated(recording):
    rows = sorted_rows(recording)[:7]
    slow = sorted_rows(recording)[-1]
    seen = measured(recording, [*rows, slow], {slow: 50.0})
    (proposal,) = DefaultProposer().propose(view_of(recording, seen, can_repeat=True), 1)
    assert not proposal.is_repeat or recording.space.row(proposal.config) != slow


class _Repeating(Proposer):
    """Proposes the first configuration of the space, and then always to repeat it."""

    name = "repeating"

    def propose(self, view: SearchView, count: int) -> list[Proposal]:
        return [Proposal(view.space.config(0), self.name, is_repeat=bool(view.observations))]


def search(project: Path, proposer: Proposer, first_s: float = 1.0) -> RunState:
    launcher = MeasuredLauncher(
        lambda job: ran(job, first_s if job.name.endswith("t0001-a1") else 1.0, simulated=False)
    )
    folder, session = open_search(project, launcher, admits=True, budget=3)
    return run_session(folder, replace(session, proposer=proposer))


def test_a_repeat_is_recorded_costs_budget_and_counts_as_a_run_of_its_configuration(tmp_path):
    state = search(tmp_path, _Repeating())
    assert [trial.purpose for trial in state.trials.values()] == [Purpose.SEARCH, Purpose.REPEAT, Purpose.REPEAT]
    assert state.num_spent == 3
    assert len(state.runs_of(state.best.config)) == 3
    assert state.ended.kind is EndKind.BUDGET_USED


def test_a_first_run_that_two_repeats_contradict_is_not_compared(tmp_path):
    state = search(tmp_path, _Repeating(), first_s=8.0)
    assert state.list_outliers() == [1]
    assert state.best.number == 2
    assert state.losses_by_trial() == {2: [1.0, 1.0]}
    assert len(state.runs_of(state.best.config)) == 3, "it stays a ranked run"


def test_an_llm_that_doubts_a_trial_runs_its_configuration_once_more(tmp_path):
    """Answers: a configuration; the same again, with doubt; the same a third time, which is refused; then another."""
    asked: list[CompletionRequest] = []

    def choose(request: CompletionRequest) -> Answer:
        asked.append(request)
        first, second = prompt_candidates(request)[:2] if len(asked) == 1 else (None, None)
        if first is not None:
            chosen.extend([dict(first["config"]), dict(second["config"])])
        return submit(chosen[1] if len(asked) > 3 else chosen[0], doubts=[1])

    chosen: list[dict[str, Any]] = []
    agent = Agent(Scripted(choose), options=AgentOptions())
    state = search(tmp_path, Arbiter(agent, _Repeating(), rules=ArbiterSettings(num_seeds=0)))
    assert [(trial.proposer, trial.purpose) for trial in state.trials.values()] == [
        ("llm", Purpose.SEARCH),
        ("llm", Purpose.REPEAT),
        ("llm", Purpose.SEARCH),
    ]
    assert state.trials[1].config == state.trials[2].config != state.trials[3].config
    assert "trial 1 is doubted" not in own_turn(asked[2]).messages[0].text, "it has run again"


def test_the_noise_is_called_unknown_until_a_configuration_ran_twice(recording, decided):
    assert describe_noise(view_of(recording, decided), "").startswith("unknown")
    first = decided[0]
    again = replace(first, trial=13, loss=1.1 * (first.loss or 0.0), is_confirmation=True)
    assert "differ by up to 10.0%" in describe_noise(view_of(recording, [*decided, again]), "scatter")


def test_a_resumed_search_ends_early_if_asked(project, capsys):
    """Without the option, the search goes on until the budget is used or nothing is left."""
    assert cli.main(["run", "--workload", "wl2", "--budget", "14", "--name", "r", "--quiet"]) == 0
    assert cli.main(["resume", "r", "--budget", "60", "--stop-early", "--quiet"]) == 0
    capsys.readouterr()
    state = load_run(project / "runs" / "r").state
    assert state.ended.kind is EndKind.PROPOSER_ENDED
    assert "likely to beat the best" in state.ended.reason
    assert 14 <= state.num_spent < 60


def posterior_of(log_times: list[float], p_success: list[float]) -> CandidatePosterior:
    """Return a posterior of candidates with these expected log times over the best one's, known to 1 %."""
    recording = load_recording(LANDSCAPE)
    seen = Observation(1, recording.rows[0].config, 0, recording.rows[0].metrics["step_time_s"])
    view = SearchView(recording.card, recording.space, (seen,), frozenset(), 10, seed=0)
    posterior = fit_posterior(view)
    assert posterior.best is not None
    size = len(log_times)
    return replace(
        posterior,
        rows_m=posterior.rows_m[:size],
        weight_k=np.ones(1),
        mean_km=posterior.best + np.array([log_times]),
        sd_km=np.full((1, size), 0.01),
        p_success_m=np.array(p_success),
        p_satisfies_m=np.ones(size),
        shortfall_m=np.zeros(size),
        pending_kp=np.zeros((1, 0)),
    )


def chosen(posterior: CandidatePosterior, count: int = 1) -> list[int]:
    return [m for m, _ in choose_batch(posterior, count, MAX_FAILURE_PENALTY)]


def test_a_safe_configuration_that_is_ten_times_slower_does_not_displace_one_that_may_win():
    assert chosen(posterior_of([2.3, 0.0, 2.5], [1.0, 0.5, 1.0])) == [1]


def test_of_two_that_may_win_the_safe_one_is_chosen():
    assert chosen(posterior_of([0.0, 0.0], [0.5, 0.99])) == [1]


@pytest.mark.parametrize(("log_time", "row"), [(0.05, 1), (0.3, 1), (30.0, 0)])
def test_among_the_hopeless_the_larger_chance_wins_until_no_chance_is_left(log_time, row):
    assert chosen(posterior_of([log_time + 0.05, log_time], [1.0, 0.7])) == [row]


def test_a_batch_holds_each_configuration_once():
    assert sorted(chosen(posterior_of([0.0, 0.01, 3.0, 4.0], [0.9, 0.8, 1.0, 1.0]), 4)) == [0, 1, 2, 3]


def test_once_nothing_is_likely_to_win_the_safer_configuration_is_chosen():
    posterior = posterior_of([0.1, 0.05], [1.0, 0.7])
    assert [m for m, _ in choose_batch(posterior, 1, MAX_FAILURE_PENALTY, is_won=True)] == [0]
