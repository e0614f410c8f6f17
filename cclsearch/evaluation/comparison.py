"""Compares the measured trials of a search with each other: a trial that did other work than the rest is not ranked.

The verdict of a trial may change when others finish: a change is a `trial_revised` event, and the proposer learns the
trial's new state. If groups of trials disagree and no majority decides, reference trials outside the budget do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cclsearch.core.errors import UserError
from cclsearch.core.text import count_of
from cclsearch.core.values import Provenance
from cclsearch.evaluation.other_trials import find_baseline
from cclsearch.evaluation.reference import rank_references
from cclsearch.evaluation.trial_input import make_input
from cclsearch.propose.base import Proposal, SearchView
from cclsearch.record.event import Purpose, TrialRevised
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.spec import RunSpec
from cclsearch.run.trial_folder import write_outcome_files
from cclsearch.scoring.agreement import Agreement, Ballot, Group, Vote
from cclsearch.scoring.evaluate import replace_verdict
from cclsearch.scoring.outcome import Outcome, Verdict
from cclsearch.space.framework import load_framework
from cclsearch.tasks.base import task_of

MAX_REFERENCE_ATTEMPTS = 5
"""Reference trials of one kind that a search starts, failed ones included."""
UNDECIDED = "undecided: "
"""Start of the detail of a verdict that a reference trial may still change."""


class TrialComparison:
    """The groups of trials of one search that agree, by kind; computed from the ledger, in order of finishing."""

    def __init__(self, spec: RunSpec, agreement: Agreement, framework: Any) -> None:
        self._spec, self._agreement, self._framework = spec, agreement, framework
        self._ballots: dict[str, Ballot] = {}
        self._num_references: dict[str, int] = {}
        self._without_rows: set[str] = set()
        self._num_read = 0
        self._baseline: int | None = None

    def judge(self, trial: Trial, outcome: Outcome, state: RunState) -> Outcome:
        """Return the outcome with the verdict on the values that the trial shares with the search's other trials."""
        self._read(state)
        if outcome.admission is None or outcome.provenance is not Provenance.MEASURED:
            return outcome
        if trial.outcome is not None and trial.outcome.find_verdict(self._agreement.rule) is None:
            return outcome  # it ran under a version that compared nothing
        ballot, vote = self._ballot(self._kind(trial)), self._vote(trial, outcome)
        if vote is not None and trial.number not in ballot:
            ballot = ballot.with_vote(vote)
        return self._replace(outcome, self._verdict(trial, outcome, ballot), state)

    def revise(self, writer: RunWriter, now_s: Callable[[], float]) -> None:
        """Record the trials whose verdict has changed since others finished, and new scores if the baseline changed."""
        state = writer.state
        self._read(state)
        for ballot in [ballot for ballot in self._ballots.values() if len(ballot.groups) > 1]:
            for number in ballot.trials:
                trial = state.trials[number]
                assert trial.outcome is not None
                verdict = self._verdict(trial, trial.outcome, ballot)
                if _is_change(trial.outcome.find_verdict(verdict.rule), verdict):
                    outcome = self._replace(trial.outcome, verdict, state)
                    _record(writer, number, outcome, f"trial {number} is {_describe_change(outcome, verdict)}", now_s)
        self._rescore(writer, now_s)

    def is_undecided(self, state: RunState) -> bool:
        """Return whether trials disagree, and a reference trial that is not running yet may decide."""
        self._read(state)
        is_open = any(self._may_decide(kind, ballot) for kind, ballot in self._ballots.items())
        return is_open and not any(trial.purpose is Purpose.REFERENCE for trial in state.unfinished)

    def propose_reference(self, state: RunState, view: SearchView) -> Proposal | None:
        """Return the next reference trial; None if no configuration is left."""
        for kind in [kind for kind, ballot in self._ballots.items() if self._may_decide(kind, ballot)]:
            ballot = self._ballots[kind]
            voters = [state.trials[number].config for number in ballot.trials]
            for config in rank_references(view, voters, is_first=not ballot.num_references):
                if self._kind(replace(state.trials[ballot.trials[0]], config=config)) == kind:
                    text = f"decides whose {self._agreement.values} are right: {_name_groups(ballot)}"
                    return Proposal(config, "reference", text)
            self._without_rows.add(kind)
        return None

    def _read(self, state: RunState) -> None:
        """Take in the trials that have finished since the last call."""
        finished = state.trials.finish_order
        for number in finished[self._num_read :]:
            trial = state.trials[number]
            kind = self._kind(trial)
            if trial.purpose is Purpose.REFERENCE:
                self._num_references[kind] = self._num_references.get(kind, 0) + 1
            if trial.outcome is not None and (vote := self._vote(trial, trial.outcome)) is not None:
                self._ballots[kind] = self._ballot(kind)
                self._ballots[kind].add(vote)
        self._num_read = len(finished)

    def _kind(self, trial: Trial) -> str:
        return self._agreement.kind(make_input(self._spec, trial))

    def _ballot(self, kind: str) -> Ballot:
        bound = self._agreement.bound(self._framework, kind)
        return self._ballots.get(kind) or Ballot(math.inf if bound is None else bound)

    def _vote(self, trial: Trial, outcome: Outcome) -> Vote | None:
        """Return the trial's values if it is compared with others: not if its work is in question anyway."""
        harmless = {self._agreement.rule, *self._agreement.tolerated}
        violated = {verdict.rule for verdict in outcome.verdicts if verdict.ok is False}
        if outcome.failure is not None or not outcome.fingerprint or outcome.admission is None or violated - harmless:
            return None
        if self._agreement.find_missing(self._framework, make_input(self._spec, trial), len(outcome.fingerprint)):
            return None
        measure = self._agreement.measure(self._framework, self._kind(trial))
        return Vote(trial.number, outcome.fingerprint, trial.purpose is Purpose.REFERENCE, measure)

    def _may_decide(self, kind: str, ballot: Ballot) -> bool:
        """Return whether a further reference trial is needed and allowed."""
        tried = self._num_references.get(kind, 0)
        return ballot.needs_reference() and tried < MAX_REFERENCE_ATTEMPTS and kind not in self._without_rows

    def _verdict(self, trial: Trial, outcome: Outcome, ballot: Ballot) -> Verdict:
        rule, payload = self._agreement.rule, make_input(self._spec, trial)
        missing = self._agreement.find_missing(self._framework, payload, len(outcome.fingerprint))
        if missing:
            return Verdict(rule=rule, ok=False, detail=missing)
        measure = self._agreement.measure(self._framework, self._kind(trial))
        vote = Vote(trial.number, outcome.fingerprint, measure=measure)
        others = [group for group in ballot.groups if group.trials != [trial.number]]
        if not vote.values or not others:
            return Verdict(rule=rule, ok=None, detail="there is nothing to compare it with yet")
        if math.isinf(ballot.bound):
            reason = self._agreement.explain(self._framework, payload)
            return Verdict(rule=rule, ok=None, detail=f"{self._describe(payload, vote, others[0])}; {reason}")
        own, right = ballot.find(vote), ballot.find_right(is_last=not self._may_decide(self._kind(trial), ballot))
        if own is not None and own is right:
            return Verdict(rule=rule, ok=True, detail=self._describe(payload, vote, own))
        if right is not None:
            return Verdict(rule=rule, ok=False, detail=self._describe(payload, vote, right))
        other = next(group for group in sorted(others, key=lambda g: -len(g.votes)) if group is not own)
        detail = f"{UNDECIDED}{self._describe(payload, vote, other)}; no majority or reference trial has decided"
        return Verdict(rule=rule, ok=own is not None and own is ballot.largest, detail=detail)

    def _describe(self, payload: Any, vote: Vote, group: Group) -> str:
        """Describe how a trial's values compare with a group's: both figures at their largest difference."""
        other = next((each for each in group.votes if each.trial != vote.trial), group.first)
        found, names = vote.deviate(other), _name_trials([n for n in group.trials if n != vote.trial])
        if found.size <= 0:
            return f"its {self._agreement.values} equal those of {names}{found.note}"
        mine, theirs = (
            self._agreement.describe_value(payload, found.index, v.values[found.index]) for v in (vote, other)
        )
        bound = self._ballot(self._agreement.kind(payload)).bound
        most = "" if math.isinf(bound) else f", at most {bound:.1g} is allowed"
        verb = "agree with" if found.size <= bound and not math.isinf(bound) else "differ from"
        size = f"a {self._agreement.deviation} of {found.size:.1e}"
        figures = f"{mine}, {theirs.split(' ', 1)[0]} in trial {other.trial}: {size}"
        return f"its {self._agreement.values} {verb} those of {names}{found.note} ({figures}{most})"

    def _replace(self, outcome: Outcome, verdict: Verdict, state: RunState) -> Outcome:
        return replace_verdict(outcome, verdict, self._spec.objective, find_baseline(state))

    def _rescore(self, writer: RunWriter, now_s: Callable[[], float]) -> None:
        """Score every ranked trial anew if the objective compares with the baseline, since the baseline changed."""
        state, before = writer.state, self._baseline
        self._baseline = state.baseline.number if state.baseline else None
        if not self._spec.objective.needs_baseline or self._baseline in (None, before):
            return
        for number in [number for ballot in self._ballots.values() for number in ballot.trials]:
            old = state.trials[number].outcome
            verdict = old.find_verdict(self._agreement.rule) if old else None
            if old is None or verdict is None or not old.is_ranked:
                continue
            new = self._replace(old, verdict, state)
            if new.loss != old.loss:
                text = f"trial {number} is compared with trial {self._baseline} now, the first that is ranked"
                _record(writer, number, new, text, now_s)


def make_comparison(spec: RunSpec) -> TrialComparison | None:
    """Return the comparison of a search's trials; None if nothing is measured, or its task compares nothing."""
    agreement = task_of(spec.card).agreement
    if spec.provenance is not Provenance.MEASURED or agreement is None:
        return None
    try:
        return TrialComparison(spec, agreement, load_framework(spec.framework))
    except UserError:  # finished runs are also evaluated where their framework has no file
        return None


def _is_change(old: Verdict | None, new: Verdict) -> bool:
    """Return whether a verdict has changed, not only its words."""
    return old is None or _status(old) != _status(new)


def _status(verdict: Verdict) -> tuple[bool, bool]:
    """Return whether a verdict keeps a trial from being ranked, and whether a reference trial may change that."""
    is_out = verdict.ok is False
    return is_out, is_out and verdict.detail.startswith(UNDECIDED)


def _describe_change(outcome: Outcome, verdict: Verdict) -> str:
    """Return whether a trial is ranked now, and why: `not ranked now: its losses differ from ...`."""
    is_open = verdict.detail.startswith(UNDECIDED)
    change = "not ranked now" if not outcome.is_ranked else "ranked for now" if is_open else "ranked now"
    return f"{change}: {verdict.detail.removeprefix(UNDECIDED) if outcome.is_ranked else verdict.detail}"


def _record(writer: RunWriter, number: int, outcome: Outcome, text: str, now_s: Callable[[], float]) -> None:
    writer.record(TrialRevised(trial=number, outcome=outcome, text=text).at(now_s()))
    write_outcome_files(writer.trial_folder(number), outcome)


def _name_groups(ballot: Ballot) -> str:
    return " or ".join(f"those of {_name_trials(group.trials)}" for group in ballot.groups[:4])


def _name_trials(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"trial {numbers[0]}"
    shown, more = ", ".join(map(str, numbers[:5])), len(numbers) - 5
    return f"{count_of(len(numbers), 'trial')} ({shown}{f' and {more} more' if more > 0 else ''})"
