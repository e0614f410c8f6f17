"""Compares the measured trials of a search with each other: a trial that did other work than the rest is not ranked.

The verdict of a trial may change when others finish: a change is a `trial_revised` event, and the proposer learns the
trial's new state. If groups of trials disagree and no majority decides, reference trials outside the budget do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from cclsearch.card.model import PRECISION
from cclsearch.core.errors import UserError
from cclsearch.core.text import count_of
from cclsearch.core.values import Config, Provenance, format_knob_value
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
MAX_RECOMPUTATIONS = 2
"""Reference trials that compute the timed window of one trial again, failed ones included."""
MIN_COMPARED = 2
"""Ranked configurations from which a search has a best one that is worth another run."""
RECOMPUTED_RULE = "recomputed"
"""The verdict that keeps a trial with a nonce that was known before from being ranked."""
UNDECIDED = "undecided: "
"""Start of the detail of a verdict that a reference trial may still change."""


class TrialComparison:
    """The groups of trials of one search that agree, by kind; computed from the ledger, in order of finishing."""

    def __init__(self, spec: RunSpec, agreement: Agreement, framework: Any) -> None:
        self._spec, self._agreement, self._framework = spec, agreement, framework
        self._ballots: dict[str, Ballot] = {}
        self._num_references: dict[str, int] = {}
        self._without_rows: set[str] = set()
        self._configs: dict[int, Config] = {}
        self._num_read = 0
        self._baseline: int | None = None

    def judge(self, trial: Trial, outcome: Outcome, state: RunState) -> Outcome:
        """Return the outcome with the verdict on the values that the trial shares with the search's other trials."""
        self._read(state)
        if outcome.admission is None or outcome.provenance is not Provenance.MEASURED:
            return outcome
        if trial.outcome is not None and trial.outcome.find_verdict(self._agreement.rule) is None:
            return outcome  # it ran under a version that compared nothing
        outcome = self._replace(outcome, self._verdict(trial, outcome, self._can_vote(trial, outcome)), state)
        if trial.recomputes is None:
            return outcome
        text = f"it recomputes trial {trial.recomputes} with its nonce, which was known before: it is never ranked"
        return self._replace(outcome, Verdict(rule=RECOMPUTED_RULE, ok=False, detail=text), state)

    def revise(self, writer: RunWriter, now_s: Callable[[], float]) -> None:
        """Record the trials whose verdict has changed since others finished, and new scores if the baseline changed."""
        state = writer.state
        self._read(state)
        for ballot in self._ballots.values():
            if len(ballot.groups) < 2 and not self._changes(self._configs[ballot.trials[0]]):
                continue
            for number in ballot.trials:
                trial = state.trials[number]
                assert trial.outcome is not None
                verdict = self._verdict(trial, trial.outcome)
                if _is_change(trial.outcome.find_verdict(verdict.rule), verdict):
                    outcome = self._replace(trial.outcome, verdict, state)
                    _record(writer, number, outcome, f"trial {number} is {_describe_change(outcome, verdict)}", now_s)
        self._rescore(writer, now_s)

    def is_undecided(self, state: RunState) -> bool:
        """Return whether trials disagree, and a reference trial that is not running yet may decide."""
        self._read(state)
        is_open = any(self._may_decide(kind, ballot) for kind, ballot in self._ballots.items())
        return is_open and not any(trial.purpose is Purpose.REFERENCE for trial in state.unfinished)

    def propose_reference(self, state: RunState, view: SearchView) -> tuple[Proposal, int | None] | None:
        """Return the next reference trial, and the trial that it recomputes; None if no configuration is left."""
        for kind in [kind for kind, ballot in self._ballots.items() if self._may_decide(kind, ballot)]:
            ballot = self._ballots[kind]
            text = f"decides whose {self._agreement.values} are right: {_name_groups(ballot)}"
            voters = [state.trials[number] for number in ballot.trials]
            recomputed = next((trial.number for trial in voters if trial.recomputes is None), None)
            if " " in kind and recomputed is not None:
                return Proposal(self._choose_other(state, view, voters), "reference", text), recomputed
            for config in rank_references(view, [t.config for t in voters], is_first=not ballot.num_references):
                if self._kinds(replace(voters[0], config=config))[0] == kind:
                    return Proposal(config, "reference", text), None
            self._without_rows.add(kind)
        return None

    def propose_recomputation(self, state: RunState, view: SearchView, trial: Trial) -> Proposal | None:
        """Return a run that computes the timed window of this trial, the best one, again, in another layout.

        None if it cannot or need not be: it opened none, it would refuse nothing, or another trial has its nonce.
        """
        self._read(state)
        *_, kind = self._kinds(trial)
        changes, tried = self._changes(trial.config), self._num_references.get(kind, 0)
        is_bounded = bool(self._spec.card.max_loss_deviation or self._agreement.max_deviation)
        may_prove = bool(changes) and is_bounded and tried < MAX_RECOMPUTATIONS
        if may_prove and trial.outcome is not None and self._judge_numerics(trial, trial.outcome) is None:
            text = f"trains as trial {trial.number} without {', '.join(changes)}, on equal data and weights"
            return Proposal(self._framework.undo_numerics(self._spec.card, trial.config), "reference", text)
        if len(state.losses_by_config()) < MIN_COMPARED or trial.outcome is None:
            return None
        ballot = self._ballots.get(kind)
        is_done = ballot is None or len(ballot.trials) > 1 or self._num_references.get(kind, 0) >= MAX_RECOMPUTATIONS
        is_spent = sum(self._num_references.values()) >= max(self._spec.limits.budget, MAX_REFERENCE_ATTEMPTS)
        if not trial.outcome.nonce or math.isinf(self._bound(kind)) or is_done or is_spent:
            return None
        text = f"computes the timed window of trial {trial.number} again, with its nonce"
        return Proposal(self._choose_other(state, view, [trial]), "reference", text)

    def _choose_other(self, state: RunState, view: SearchView, voters: Sequence[Trial]) -> Config:
        """Return the ranked configuration that differs in the most knobs from these trials, the fastest of equal ones.

        A ranked one has already run here. Without another, an untried one; without that, the first trial's own.
        """
        losses, kind = state.losses_by_config(), self._kinds(voters[0])[0]

        def count(config: Config) -> int:
            return min(sum(config[knob] != trial.config.get(knob) for knob in config) for trial in voters)

        own = {trial.config for trial in voters}
        others = [config for config in losses if config not in own]
        others.sort(key=lambda config: (-count(config), min(losses[config])))
        untried = rank_references(view, [trial.config for trial in voters], is_first=True)
        is_alike = (c for c in chain(others, untried) if self._kinds(replace(voters[0], config=c))[0] == kind)
        return next(is_alike, voters[0].config)

    def _read(self, state: RunState) -> None:
        """Take in the trials that have finished since the last call."""
        finished = state.trials.finish_order
        for number in finished[self._num_read :]:
            trial = state.trials[number]
            *_, kind = self._kinds(trial)
            if trial.recomputes is not None:
                *_, kind = self._kinds(state.trials[trial.recomputes])
            if trial.purpose is Purpose.REFERENCE:
                self._num_references[kind] = self._num_references.get(kind, 0) + 1
            self._configs[number] = trial.config
            if trial.outcome is not None and self._can_vote(trial, trial.outcome):
                for kind, vote in self._votes(trial, trial.outcome).items():
                    self._ballots[kind] = self._ballot(kind)
                    self._ballots[kind].add(vote)
        self._num_read = len(finished)

    def _kinds(self, trial: Trial) -> tuple[str, ...]:
        """Return the kind of the trial and, after a blank, with the nonce of its timed window, if it has one."""
        kind, nonce = self._agreement.kind(make_input(self._spec, trial)), trial.outcome.nonce if trial.outcome else ""
        kind += "".join(f"+{change}" for change in self._changes(trial.config) if not change.startswith(PRECISION))
        return (kind, f"{kind} {nonce}") if nonce else (kind,)

    def _changes(self, config: Config) -> list[str]:
        """Return `NAME=VALUE` of each knob by which a configuration computes other numbers than the card states."""
        own = self._framework.undo_numerics(self._spec.card, config)
        return [f"{name}={format_knob_value(value)}" for name, value in config.items() if own[name] != value]

    def _judge_numerics(self, trial: Trial, outcome: Outcome) -> Verdict | None:
        """Return whether other numbers than the card's keep its losses; None without a trial to compare with."""
        limit = self._spec.card.max_loss_deviation or self._agreement.max_deviation
        own = replace(trial, config=self._framework.undo_numerics(self._spec.card, trial.config), outcome=outcome)
        if not limit or own.config == trial.config:
            return None
        for kind, vote in reversed(list(zip(self._kinds(own), self._votes(trial, outcome).values(), strict=False))):
            votes, is_free = [v for g in self._ballot(kind).groups for v in g.votes], math.isinf(self._bound(kind))
            # where the framework promises nothing, weights may depend on the layout
            for other in (v for v in votes if not is_free or self._configs[v.trial] == own.config):
                size, what = vote.deviate(other).size, f"{self._agreement.values} have a {self._agreement.deviation}"
                detail = (
                    f"with {', '.join(self._changes(trial.config))}, its {what} of {size:.1e} from those of trial"
                    f" {other.trial} in {kind.partition(' ')[0]}; at most {limit:.1e} is allowed (max_loss_deviation)"
                )
                return Verdict(rule=self._agreement.rule, ok=size <= limit, detail=detail)
        return None

    def _bound(self, kind: str) -> float:
        bound = self._agreement.bound(self._framework, kind.partition(" ")[0].partition("+")[0])
        return math.inf if bound is None else bound

    def _ballot(self, kind: str) -> Ballot:
        return self._ballots.get(kind) or Ballot(self._bound(kind))

    def _can_vote(self, trial: Trial, outcome: Outcome) -> bool:
        """Return whether the trial's values are compared with others: not if its work is in question anyway."""
        harmless = {self._agreement.rule, RECOMPUTED_RULE, *self._agreement.tolerated}
        violated = {verdict.rule for verdict in outcome.verdicts if verdict.ok is False}
        if outcome.failure is not None or not outcome.fingerprint or outcome.admission is None or violated - harmless:
            return False
        payload = make_input(self._spec, trial)
        return not self._agreement.find_missing(self._framework, payload, len(outcome.fingerprint))

    def _votes(self, trial: Trial, outcome: Outcome) -> dict[str, Vote]:
        """Return the trial's values by kind: those that every trial has, and all, for trials with its nonce."""
        payload, kinds = make_input(self._spec, trial), self._kinds(replace(trial, outcome=outcome))
        known = self._agreement.count_known(payload) if len(kinds) > 1 else None
        measure = self._agreement.measure(self._framework, kinds[0])
        values = dict(zip(kinds, (outcome.fingerprint[:known], outcome.fingerprint), strict=False))
        is_reference = trial.purpose is Purpose.REFERENCE
        return {kind: Vote(trial.number, value, is_reference, measure) for kind, value in values.items() if value}

    def _may_decide(self, kind: str, ballot: Ballot) -> bool:
        """Return whether a further reference trial is needed and allowed."""
        tried = self._num_references.get(kind, 0)
        most = MAX_RECOMPUTATIONS if " " in kind else MAX_REFERENCE_ATTEMPTS
        return ballot.needs_reference() and tried < most and kind not in self._without_rows

    def _verdict(self, trial: Trial, outcome: Outcome, is_counted: bool = False) -> Verdict:
        """Return the verdict on the values of a trial; the worst, if it is compared with two kinds of trials.

        `is_counted`: its own vote counts, although it is not among the finished trials yet.
        """
        missing = self._agreement.find_missing(self._framework, make_input(self._spec, trial), len(outcome.fingerprint))
        if missing:
            return Verdict(rule=self._agreement.rule, ok=False, detail=missing)
        votes = self._votes(trial, outcome)
        verdicts = [self._judge_vote(trial, kind, vote, is_counted) for kind, vote in votes.items()]
        if len(verdicts) > 1 and verdicts[0].ok:
            detail = f"before the timed window, {verdicts[0].detail}"
            verdicts[0] = verdicts[0].model_copy(update={"detail": detail})
        if (numerics := self._judge_numerics(trial, outcome)) is not None:
            verdicts.append(numerics)
        nothing = Verdict(rule=self._agreement.rule, ok=None, detail="there is nothing to compare it with yet")
        return min(reversed(verdicts), key=lambda verdict: (False, True, None).index(verdict.ok), default=nothing)

    def _judge_vote(self, trial: Trial, kind: str, vote: Vote, is_counted: bool) -> Verdict:
        rule, payload, ballot = self._agreement.rule, make_input(self._spec, trial), self._ballot(kind)
        if is_counted and trial.number not in ballot:
            ballot = ballot.with_vote(vote)
        others = [group for group in ballot.groups if group.trials != [trial.number]]
        if not vote.values or not others:
            return Verdict(rule=rule, ok=None, detail="there is nothing to compare it with yet")
        if math.isinf(ballot.bound):
            reason = self._agreement.explain(self._framework, payload)
            return Verdict(rule=rule, ok=None, detail=f"{self._describe(payload, vote, others[0])}; {reason}")
        own, right = ballot.find(vote), ballot.find_right(is_last=not self._may_decide(kind, ballot))
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
        bound = self._bound(self._agreement.kind(payload))
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
