"""Evaluate a finished trial's folder: read the result file and the traces, and return the outcome."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from cclsearch.card.model import Card
from cclsearch.core.secrets.redact import redact
from cclsearch.core.values import Failure, Provenance
from cclsearch.evaluation.comparison import TrialComparison
from cclsearch.evaluation.control import find_window
from cclsearch.evaluation.judge import judge
from cclsearch.evaluation.other_trials import close_window, find_baseline, list_others
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import RESULT_FILE, TRACE_FOLDER, TrialInput
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.log_masking import EVIDENCE, LogMasker, scrub_logs, scrub_result
from cclsearch.run.spec import RunSpec
from cclsearch.run.trial_folder import hash_evidence, write_outcome_files
from cclsearch.scoring.evaluate import evaluate_evidence, evaluate_failure
from cclsearch.scoring.evidence import Evidence, TraceEvidence
from cclsearch.scoring.outcome import Outcome
from cclsearch.tasks.base import task_of


class TrialEvaluator:
    """Evaluates the finished trials of one search; `cclsearch.loop.jobs` calls it."""

    def __init__(
        self, spec: RunSpec, comparison: TrialComparison | None = None, masker: LogMasker | None = None
    ) -> None:
        self._spec, self._comparison, self._masker = spec, comparison, masker

    def __call__(self, trial: Trial, payload: TrialInput, writer: RunWriter, failure: Failure | None) -> Outcome:
        folder = writer.trial_folder(trial.number)
        has_job = self._spec.provenance is Provenance.MEASURED  # else no file there is from outside

        def evaluate() -> Outcome:
            if has_job:
                scrub_result(folder / RESULT_FILE)
            outcome = self._evaluate(folder, trial, payload, failure, writer.state)
            if has_job:
                with contextlib.suppress(PermissionError):  # masked later, it would no longer have its hash
                    scrub_logs(folder, EVIDENCE)
                outcome = outcome.model_copy(update={"evidence_sha256": hash_evidence(folder)})
            is_compared = self._comparison is not None and not outcome.is_pruned
            return self._comparison.judge(trial, outcome, writer.state) if is_compared and self._comparison else outcome

        outcome, traceback = judge(evaluate, self._spec.provenance)
        write_outcome_files(folder, outcome, traceback)
        if has_job:
            (scrub_logs if self._masker is None else self._masker.add)(folder)  # now no trace is read any more
        return outcome

    def _evaluate(
        self, folder: Path, trial: Trial, payload: TrialInput, failure: Failure | None, state: RunState
    ) -> Outcome:
        model = task_of(self._spec.card).result
        collected = collect_result(folder, model) if failure is None or (folder / RESULT_FILE).is_file() else failure
        if isinstance(collected, Failure):
            return evaluate_failure(redact_failure(failure or collected), self._spec.provenance)
        if collected.failure is not None:
            collected = collected.model_copy(update={"failure": redact_failure(collected.failure)})
        spec, card = self._spec, self._spec.card.for_trial(payload.config)
        task = task_of(card)
        collected = task.read_files(folder, collected)
        trace = read_traced(folder / TRACE_FOLDER, card, payload)
        evidence = Evidence(payload, collected, card, spec.provenance, trace)
        evidence = replace(evidence, attempt=close_window(trial), others=list_others(state, trial))
        outcome = evaluate_evidence(evidence, task, spec.objective, baseline=find_baseline(state))
        return outcome.model_copy(update={"window": find_window(spec, trial, evidence, state)})


def read_traced(folder: Path, card: Card, payload: TrialInput) -> TraceEvidence | None:
    """Return the evidence in a trial's traces; None if it writes none, as recorded and simulated trials do."""
    if not payload.wants_traces:
        return None
    from cclsearch.evaluation.trace_evidence import read_trace_evidence  # the trace toolkit, a fifth of the engine

    return read_trace_evidence(folder, card, payload)


def redact_failure(failure: Failure) -> Failure:
    """Return the failure with secrets in its message masked."""
    return failure.model_copy(update={"message": redact(failure.message)})
