"""From a finished trial's folder to its outcome: reads the result file and the traces, then evaluates them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cclsearch.core.redact import redact
from cclsearch.core.values import Failure
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import RESULT_FILE, TRACE_FOLDER, TrialInput
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.spec import RunSpec
from cclsearch.run.trial_folder import ADMISSION_FILE, JUDGING_ERROR_FILE, METRICS_FILE, replace_file, scrub_logs
from cclsearch.score.evaluate import evaluate_failure, evaluate_trial
from cclsearch.score.outcome import Outcome
from cclsearch.search.judge import judge
from cclsearch.search.trace_evidence import read_trace_evidence
from cclsearch.tasks.base import task_of


class TrialEvaluator:
    """Evaluates the finished trials of one search; `cclsearch.search.jobs` calls it."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    def __call__(self, trial: Trial, payload: TrialInput, writer: RunWriter, failure: Failure | None) -> Outcome:
        folder = writer.trial_folder(trial.number)

        def evaluate() -> Outcome:
            scrub_logs(folder)
            return self._evaluate(folder, payload, failure, find_baseline(writer.state))

        outcome, traceback = judge(evaluate, self._spec.provenance)
        write_outcome_files(folder, outcome, traceback)
        return outcome

    def _evaluate(
        self, folder: Path, payload: TrialInput, failure: Failure | None, baseline: Mapping[str, float] | None
    ) -> Outcome:
        model = task_of(self._spec.card).result
        collected = collect_result(folder, model) if failure is None or (folder / RESULT_FILE).is_file() else failure
        if isinstance(collected, Failure):
            return evaluate_failure(redact_failure(failure or collected), self._spec.provenance)
        if collected.failure is not None:
            collected = collected.model_copy(update={"failure": redact_failure(collected.failure)})
        spec, card = self._spec, self._spec.card.for_trial(payload.config)
        trace = read_trace_evidence(folder / TRACE_FOLDER, card, payload)
        return evaluate_trial(
            payload, collected, card, spec.objective, provenance=spec.provenance, trace=trace, baseline=baseline
        )


def find_baseline(state: RunState) -> Mapping[str, float] | None:
    """Return the metrics of the baseline, which is the first ranked trial; None before there is one."""
    trial = state.baseline
    return trial.outcome.metrics if trial and trial.outcome else None


def write_outcome_files(folder: Path, outcome: Outcome, traceback: str = "") -> None:
    """Write `metrics.json` and `admission.json` into the trial's folder, for readers; the ledger has the same facts.

    `traceback` is that of an error in judging; `judging_error.txt` has it until the trial is judged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / METRICS_FILE, outcome.model_dump_json(indent=1, exclude={"admission"}) + "\n")
    if outcome.admission:
        replace_file(folder / ADMISSION_FILE, outcome.admission.model_dump_json(indent=1) + "\n")
    if traceback:
        replace_file(folder / JUDGING_ERROR_FILE, traceback)


def redact_failure(failure: Failure) -> Failure:
    """Return the failure with secrets in its message masked."""
    return failure.model_copy(update={"message": redact(failure.message)})
