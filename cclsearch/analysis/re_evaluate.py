"""Re-evaluates the trials of a run from the evidence on disk, and compares the result with the ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import hash_job_file
from cclsearch.core.values import Failure
from cclsearch.evaluation.comparison import TrialComparison, make_comparison
from cclsearch.evaluation.evaluate import read_traced, redact_failure
from cclsearch.evaluation.judge import is_judging_error, judge
from cclsearch.evaluation.other_trials import find_baseline, list_others
from cclsearch.evaluation.trial_input import make_input
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import RESULT_FILE, TRACE_FOLDER
from cclsearch.record.event import TrialRevised
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import Run
from cclsearch.run.spec import SPEC_FILE, hash_file
from cclsearch.run.trial_folder import hash_evidence, write_outcome_files
from cclsearch.scoring.evaluate import evaluate_evidence, evaluate_failure
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.outcome import Outcome, Verdict
from cclsearch.tasks.base import task_of


@dataclass(frozen=True)
class ReEvaluation:
    """One trial: its outcome in the ledger, and its outcome from the present evidence."""

    trial: Trial
    then: Outcome
    now: Outcome
    changed: str = ""
    """What happened to its evidence since it was judged; then `now` is `then`, by the values in the ledger."""

    @property
    def is_lost(self) -> bool:
        """Whether it is ranked in the ledger, but no longer by its evidence."""
        return self.then.is_ranked and not self.now.is_ranked and not self.is_unjudged

    @property
    def is_unjudged(self) -> bool:
        """Whether judging failed now: an error of ccl-search, which says nothing about the trial."""
        return is_judging_error(self.now)

    @property
    def is_revised(self) -> bool:
        """Whether it is ranked in the ledger, but not by its evidence, or the other way around; or judged only now."""
        changed = self.then.is_ranked != self.now.is_ranked or is_judging_error(self.then)
        return changed and not self.is_unjudged

    def describe(self) -> str:
        """The change in one line."""
        change = "ranked now" if self.now.is_ranked else f"not ranked now: {self.reason}"
        return f"trial {self.trial.number} is {change}"

    @property
    def reason(self) -> str:
        """Reason why it is not ranked now, in one line; empty if it is."""
        if self.now.admission and self.now.admission.reasons:
            return "; ".join(self.now.admission.reasons)
        if self.now.failure:
            return f"{self.now.failure.kind.value}: {self.now.failure.message}"
        return ""


def re_evaluate_run(run: Run) -> list[ReEvaluation]:
    """Re-evaluate every finished trial, ordered by number. Changes nothing on disk."""
    finished = [trial for trial in run.state.trials.values() if trial.outcome is not None]
    comparison = make_comparison(run.spec)
    return [re_evaluate_trial(run, trial, comparison) for trial in finished]


def re_evaluate_trial(run: Run, trial: Trial, comparison: TrialComparison | None = None) -> ReEvaluation:
    """Re-evaluate one finished trial from `result.json` and its traces, with hashes checked against the ledger.

    It is compared with the other trials of the run as the ledger has them; `comparison` saves reading them again.
    """
    assert trial.outcome is not None
    then = trial.outcome
    folder, is_sealed = run.trial_folder(trial.number), not is_judging_error(then)
    found = hash_job_file(folder / RESULT_FILE)
    changed = ""
    if is_sealed and trial.result_sha256 not in (None, found):
        what = "is missing, but its hash is" if found is None else "was changed after its hash was recorded"
        changed = f"result.json {what} in the ledger"
    elif is_sealed and then.evidence_sha256 not in ("", hash_evidence(folder)):
        changed = "its traces or its request log were changed after their hash was recorded in the ledger"
    if changed:  # perhaps by another trial's job: the ledger has what it was judged by
        return ReEvaluation(trial, then, _mark_changed(then, changed), changed)
    compared = comparison or make_comparison(run.spec)
    now, _ = judge(lambda: _evaluate_again(run, trial, then, found, compared), run.spec.provenance)
    return ReEvaluation(trial, then, now)


def _mark_changed(outcome: Outcome, changed: str) -> Outcome:
    """Return the outcome as it was, with a verdict that says what happened to its evidence."""
    if outcome.admission is None:
        return outcome
    others = (verdict for verdict in outcome.verdicts if verdict.rule != "unedited")
    verdicts = (*others, Verdict(rule="unedited", ok=False, detail=changed))
    return outcome.model_copy(update={"admission": outcome.admission.model_copy(update={"verdicts": verdicts})})


def _evaluate_again(
    run: Run, trial: Trial, then: Outcome, found: str | None, comparison: TrialComparison | None
) -> Outcome:
    """The outcome from the present evidence; `found` is the hash of `result.json`."""
    folder, spec, was_judged = run.trial_folder(trial.number), run.spec, not is_judging_error(then)
    if found is None and trial.result_sha256 is None and was_judged:
        return then
    result = collect_result(folder, task_of(spec.card).result)
    if isinstance(result, Failure):
        return then if then.failure and was_judged else evaluate_failure(redact_failure(result), spec.provenance)
    payload = make_input(spec, trial)
    card = spec.card.for_trial(trial.config)
    task = task_of(card)
    result = task.read_files(folder, result)
    trace = read_traced(folder / TRACE_FOLDER, card, payload)
    evidence = Evidence(payload, result, card, spec.provenance, trace)
    others = list_others(run.state, trial)
    evidence = replace(evidence, attempt=then.attempt, others=others, is_sealed=trial.result_sha256 is not None)
    now = evaluate_evidence(evidence, task, spec.objective, baseline=find_baseline(run.state))
    if comparison is not None and now.failure is None and not now.is_pruned:
        now = comparison.judge(trial, now, run.state)
    has_failed = then.failure is not None and not trial.revisions and was_judged
    if has_failed and now.failure is None and found == trial.result_sha256:
        return then  # the launcher's reason (a timeout, a lost node) overrides the files that the script left
    return now


def is_spec_unchanged(run: Run) -> bool:
    """Whether the frozen inputs of the run are the ones with which the ledger started."""
    return run.state.spec_sha256 in ("", hash_file(run.folder / SPEC_FILE))


def write_revisions(run: Run, re_evaluated: list[ReEvaluation]) -> None:
    """Record each verdict that has changed in the ledger; rewrite `admission.json` and `metrics.json` of every trial.

    Raises UserError, and writes nothing, if another process writes to the run or has changed a verdict since it was
    read, or if a verdict has changed, but the frozen inputs too.
    """
    revised = [entry for entry in re_evaluated if entry.is_revised]
    if not revised:
        _write_files(run, re_evaluated)
        return
    with RunWriter(run.folder) as writer:
        if not is_spec_unchanged(run):
            path = run.folder / SPEC_FILE
            raise UserError(f"{str(path)!r} was changed after the search started: restore it, then run `admit --write`")
        stale = [e.trial.number for e in re_evaluated if writer.state.trials[e.trial.number].outcome != e.then]
        if stale:
            raise UserError(f"another process revised trial {stale[0]} in the meantime: run `admit --write` again")
        for entry in revised:
            event = TrialRevised(trial=entry.trial.number, outcome=entry.now, text=entry.describe())
            writer.record(event.at(time.time()))
        _write_files(run, re_evaluated)


def _write_files(run: Run, re_evaluated: list[ReEvaluation]) -> None:
    for entry in re_evaluated:
        if not entry.is_unjudged and not entry.changed:
            write_outcome_files(run.trial_folder(entry.trial.number), entry.now)
