"""Trials of one search are compared with each other: what is refused later, what a reference decides, what is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_launcher import Ending, MeasuredLauncher, ScriptedLauncher, failed, ran
from scripted_search import admit_all, open_search, run_session

from cclsearch.core.values import Config, Failure, FailureKind, Provenance, Stage
from cclsearch.evaluation.comparison import MAX_REFERENCE_ATTEMPTS, TrialComparison, make_comparison
from cclsearch.evaluation.reference import rank_references
from cclsearch.launch.base import Job
from cclsearch.loop.session import Session
from cclsearch.propose.base import Proposal, Proposer, SearchView
from cclsearch.record.event import Purpose, TrialRevised
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.scoring.agreement import MAX_REFERENCES, Vote
from cclsearch.scoring.objective import load_objective
from cclsearch.scoring.outcome import Admission, Outcome, Verdict
from cclsearch.space.framework import load_framework
from cclsearch.space.promises import LossBounds
from cclsearch.tasks.training.task import SameLosses

HONEST = (6.98009, 6.89341, 6.86549, 6.70390, 6.64752, 6.52565, 6.36004, 6.51139, 6.33425)
CHEATING = (6.98009, 6.89341, 6.79549, 6.66390, 6.61752, 6.49565, 6.31004, 6.50139, 6.29425)


class Listed(Proposer):
    """Proposes the configurations of a list, the first ones first."""

    name = "listed"

    def __init__(self, configs: Sequence[Config]) -> None:
        self._configs, self.views = list(configs), list[SearchView]()
        self.losses: list[dict[int, float | None]] = []

    def propose(self, view: SearchView, count: int) -> list[Proposal]:
        self.views.append(view)
        self.losses.append({observation.trial: observation.loss for observation in view.observations})
        taken = {view.space.config(int(row)) for row in view.taken_N.nonzero()[0]}
        return [Proposal(config, self.name) for config in self._configs if config not in taken][:count]


def run(
    project: Path,
    decide: Callable[[Job], Ending],
    *,
    first: Callable[[Config], bool] = lambda config: False,
    num_first: int = 3,
    framework: object = None,
    objective: str = "step_time",
    **limits: int,
) -> tuple[RunState, Session, list[str]]:
    """Run a search over the `tiny` card, first some configurations with `first`; return also what was revised."""
    folder, session = open_search(project, MeasuredLauncher(decide), **limits)
    spec = session.spec.model_copy(update={"objective": load_objective(objective)})
    comparison = TrialComparison(spec, SameLosses(), framework or load_framework("cpu"))
    configs = [session.space.config(row) for row in range(len(session.space))]
    early = [config for config in configs if first(config)][:num_first]
    proposer = Listed([*early, *(config for config in configs if config not in early)])
    session = admit_all(session, spec=spec, comparison=comparison, proposer=proposer)
    evaluate = session.jobs.evaluate

    def judge(trial: Trial, payload: object, writer: RunWriter, failure: Failure | None) -> Outcome:
        return comparison.judge(trial, evaluate(trial, payload, writer, failure), writer.state)

    session = replace(session, jobs=replace(session.jobs, evaluate=judge))
    state = run_session(folder, session)
    return state, session, [event.text for event in state.reported if isinstance(event, TrialRevised)]


def train(cheats: Callable[[Config], bool]) -> Callable[[Job], Ending]:
    """A script that does less work, and is faster, in some configurations; rounding differs between all."""

    def decide(job: Job) -> Ending:
        is_cheat = cheats(job.payload.config)
        losses = tuple(loss * (1 + 2e-8 * job.trial) for loss in (CHEATING if is_cheat else HONEST))
        return ran(job, 0.5 if is_cheat else 1.0 + job.trial / 100, losses=losses, simulated=False)

    return decide


def verdict_of(state: RunState, number: int) -> Verdict:
    return state.trials[number].outcome.find_verdict("same_losses")


def purposes(state: RunState) -> list[Purpose]:
    return [trial.purpose for trial in state.trials.values()]


def is_light(config: Config) -> bool:
    return config["micro_batch_size"] == 4


def test_honest_trials_agree_and_nothing_is_revised(project):
    state, _, revised = run(project, train(lambda config: False), budget=6)
    assert purposes(state) == [Purpose.SEARCH] * 6
    assert revised == []
    assert all(trial.loss is not None for trial in state.trials.values())
    assert verdict_of(state, 1) == Verdict(
        rule="same_losses", ok=None, detail="there is nothing to compare it with yet"
    )
    assert verdict_of(state, 6).ok
    assert "its losses agree with those of 5 trials (1, 2, 3, 4, 5)" in verdict_of(state, 6).detail


def test_a_cheat_that_was_best_is_refused_later_and_the_strategy_unlearns_it(project):
    """Trial 1 cheats and is ranked until an honest trial disagrees; reference trials decide and cost no budget."""
    state, session, revised = run(project, train(is_light), first=is_light, budget=14)
    light = [trial for trial in state.trials.values() if is_light(trial.config)]
    assert light[0].number == 1
    assert len(light) >= 3
    assert all(trial.loss is None for trial in light)
    assert all(trial.loss is not None for trial in state.trials.values() if not is_light(trial.config))
    assert state.num_spent == 14
    references = [trial for trial in state.trials.values() if trial.purpose is Purpose.REFERENCE]
    assert 1 <= len(references) <= MAX_REFERENCES
    assert not any(is_light(trial.config) for trial in references)
    assert not is_light(state.best.config)
    assert not is_light(state.baseline.config)
    assert any(text.startswith("trial 1 is not ranked now: its losses differ from those of") for text in revised)
    assert "6.79549 at step 3 (timed)" in verdict_of(state, 1).detail, "both figures and the step are named"
    assert "6.86549 in trial 4" in verdict_of(state, 1).detail
    seen = session.proposer.losses  # type: ignore[attr-defined]
    assert seen[1][1] == 0.5
    assert seen[-1][1] is None, "what the surrogate learns from no longer has the cheat"


def test_references_overturn_a_majority_of_cheats(project):
    """A strategy goes where it is fast: five cheats agree before the first honest trial."""

    def skips_reduction(config: Config) -> bool:
        return config.as_int("dp") > 1

    state, _, _ = run(project, train(skips_reduction), first=skips_reduction, num_first=5, budget=7)
    ranked = [trial for trial in state.trials.values() if trial.loss is not None]
    assert ranked
    assert not any(skips_reduction(trial.config) for trial in ranked)
    cheats = [trial.number for trial in state.trials.values() if skips_reduction(trial.config)]
    assert len(cheats) >= 5
    assert all(verdict_of(state, number).ok is False for number in cheats)


def test_losses_that_differ_in_every_run_rank_nothing_and_the_search_ends(project):
    def decide(job: Job) -> Ending:
        return ran(job, losses=tuple(loss + job.trial / 10 for loss in HONEST), simulated=False)

    state, _, _ = run(project, decide, budget=5)
    assert state.ended is not None
    assert purposes(state).count(Purpose.REFERENCE) == MAX_REFERENCES
    assert state.best is None
    assert verdict_of(state, 1).detail.startswith("undecided: its losses differ from those of")


def test_references_that_fail_are_bounded_and_equal_groups_stay_unranked(project):
    def decide(job: Job) -> Ending:
        return train(is_light)(job) if job.trial <= 2 else failed(FailureKind.OUT_OF_MEMORY)

    state, _, _ = run(project, decide, first=is_light, num_first=1, budget=2)
    assert purposes(state) == [Purpose.SEARCH] * 2 + [Purpose.REFERENCE] * MAX_REFERENCE_ATTEMPTS
    assert state.ended is not None
    assert state.best is None
    assert "no majority or reference trial has decided" in verdict_of(state, 1).detail


def test_two_trials_that_disagree_at_the_end_of_the_budget_are_decided(project):
    state, _, revised = run(project, train(is_light), first=is_light, num_first=1, budget=2)
    assert state.num_spent == 2
    assert purposes(state) == [Purpose.SEARCH] * 2 + [Purpose.REFERENCE] * 2, "until three agree"
    assert [trial.number for trial in state.trials.values() if trial.loss is not None] == [2, 3, 4]
    assert verdict_of(state, 1).ok is False
    assert len(revised) == 3, "trial 1 is unranked, trial 2 ranked, and trial 1 refused for good"


def test_a_script_must_report_all_losses_if_its_framework_declares_a_bound(project):
    state, _, _ = run(project, lambda job: ran(job, losses=HONEST[:4], simulated=False), budget=2)
    assert state.best is None
    assert verdict_of(state, 2).detail == (
        "the run script reported the losses of 4 of 9 steps, but cpu declares a bound for them"
    )


@pytest.mark.parametrize(
    ("declared", "words"),
    [({}, "cpu declares no bound"), ({"none": "each layout has other data"}, "each layout has other data")],
)
def test_without_a_bound_a_deviation_is_shown_and_refuses_nothing(project, declared, words):
    framework = load_framework("cpu").model_copy(update={"same_losses": LossBounds.model_validate(declared)})
    state, _, revised = run(project, train(is_light), first=is_light, framework=framework, budget=12)
    assert purposes(state) == [Purpose.SEARCH] * 12
    assert revised == []
    assert is_light(state.best.config)
    shown = [verdict_of(state, number) for number, trial in state.trials.items() if not is_light(trial.config)]
    assert shown
    for verdict in shown:
        assert verdict.ok is None
        assert "its losses differ from those of" in verdict.detail
        assert words in verdict.detail


def test_a_resumed_search_reaches_the_same_verdicts(project):
    """The groups follow from the ledger alone; a verdict that a kill kept from being written is written then."""
    state, session, _ = run(project, train(is_light), first=is_light, budget=12)
    again = TrialComparison(session.spec, SameLosses(), load_framework("cpu"))
    for trial in state.trials.values():
        judged = again.judge(trial, trial.outcome, state)
        assert judged.is_ranked == trial.outcome.is_ranked
        assert judged.loss == trial.outcome.loss


def test_scores_follow_the_baseline_when_the_baseline_was_a_cheat(project):
    """`composite` compares with the baseline: trial 1 was it, so every later trial is scored again."""
    state, session, revised = run(project, train(is_light), first=is_light, objective="composite", budget=12)
    assert not is_light(state.baseline.config)
    for trial in state.trials.values():
        if trial.loss is not None:
            expected = session.spec.objective.loss(trial.outcome.metrics, state.baseline.outcome.metrics)
            assert trial.loss == pytest.approx(expected)
    assert any("is compared with trial" in text for text in revised)


def test_recorded_trials_are_not_compared(project):
    _, session = open_search(project, ScriptedLauncher(ran))
    assert session.spec.provenance is Provenance.SIMULATED
    assert make_comparison(session.spec) is None


def test_the_first_reference_is_the_simplest_and_the_next_the_most_unlike(project):
    state, session, _ = run(project, train(lambda config: False), first=is_light, budget=3)
    view = session.proposer.views[-1]  # type: ignore[attr-defined]
    voters = [trial.config for trial in state.trials.values()]
    first = next(rank_references(view, voters, is_first=True))
    assert dict(first) == {
        "tp": 1, "dp": 1, "pp": 1, "micro_batch_size": 1, "activation_checkpointing": "none", "zero_stage": 0,
    }  # fmt: skip
    unlike = next(rank_references(view, voters, is_first=False))
    assert not is_light(unlike)
    assert first not in voters
    assert unlike not in voters


def test_a_trial_has_no_vote_if_its_work_is_in_question_anyway(project):
    """A trial has no vote if it failed, has no losses, was not judged, or was refused by another rule."""
    state, session, _ = run(project, train(lambda config: False), budget=1)
    trial, outcome = state.trials[1], state.trials[1].outcome

    def vote(ok: bool | None = True, **changes: object) -> Vote | None:
        verdicts = (*outcome.verdicts, Verdict(rule="other", ok=ok, detail=""))
        judged = outcome.model_copy(update={"admission": Admission(admitted=ok is not False, verdicts=verdicts)})
        changed = judged.model_copy(update=changes)
        found = session.comparison._votes(trial, changed) if session.comparison._can_vote(trial, changed) else {}
        return found.get("fp32")

    assert vote() == vote(ok=None) == Vote(1, outcome.fingerprint, False)
    assert vote(ok=False) is None
    failure = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")
    assert vote(failure=failure) is vote(fingerprint=()) is vote(admission=None) is None
