"""The trials of a run as rows, for every table, chart, page and exported file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from cclsearch.charts.trials import BEST, CONFIRMED, ENDED_EARLY, FAILED, NOT_ADMITTED, RANKED, RUNNING, TrialPoint
from cclsearch.core.metrics import NUM_ACCELERATORS
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Provenance, Value, format_config, format_knob_value
from cclsearch.record.event import Purpose
from cclsearch.record.trial import Trial, TrialState, find_state
from cclsearch.report.evidence import list_files
from cclsearch.report.figures import ObjectiveFigure
from cclsearch.report.terminal import SOURCES, result_text
from cclsearch.run.folder import Run
from cclsearch.scoring.outcome import Outcome, Verdict
from cclsearch.space.table import count_ranks
from cclsearch.tasks.base import task_of

MAX_TEXT = 2000
KINDS = {
    TrialState.ADMITTED: RANKED,
    TrialState.REFUSED: NOT_ADMITTED,
    TrialState.PRUNED: ENDED_EARLY,
    TrialState.UNFINISHED: RUNNING,
}
"""State of a trial -> its word in charts, reports and exported files; any other state is a failure there."""


def clean(text: str) -> str:
    """The text as one safe line without secrets."""
    return one_line(redact(text), MAX_TEXT)


@dataclass(frozen=True)
class TrialRow:
    """One trial. All text is plain: no control characters, no secrets."""

    number: int
    config: Mapping[str, Value]
    proposer: str
    purpose: Purpose
    state: TrialState
    result: str = ""
    """Its figure, or how it failed."""
    reason: str = ""
    """Reason why it is not ranked; empty if it is, or runs."""
    failure_kind: str = ""
    figure: float | None = None
    """Measured figure of the objective, also of a trial that is not ranked; None if it has none."""
    value: float | None = None
    """The primary metric; None unless the trial is ranked."""
    violation: float | None = None
    """Excess over the objective's constraints, relative to their bounds; None if it has no result."""
    loss: float | None = None
    """None unless the trial is ranked."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    spread: float | None = None
    expected: Mapping[str, float] = field(default_factory=dict)
    """Metrics that were expected before the run."""
    seconds: float | None = None
    """Seconds from the submission to the end of all ended attempts; None if none ended."""
    wall_s: float | None = None
    """Seconds from proposal to end, queue time included; None while the trial runs or if nothing ran."""
    rationale: str = ""
    """Reason of the proposer; only `make_detailed_row` fills this field and the next ones."""
    checks: tuple[Verdict, ...] = ()
    """The rules of the admission gate."""
    notes: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()
    seconds_by_cause: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    """Folder of the trial's evidence, relative to the run folder."""
    files: tuple[str, ...] = ()
    """Files in that folder that readers open: logs, result, trace."""

    @property
    def score(self) -> float | None:
        """The figure; None unless the trial is ranked."""
        return None if self.loss is None else self.figure

    @property
    def by(self) -> str:
        """Its proposer, as people name it: `surrogate`, `LLM`."""
        return SOURCES.get(self.proposer, self.proposer)

    @property
    def kind(self) -> str:
        """`ranked`, `not admitted`, `ended early`, `failed` or `running`."""
        return KINDS.get(self.state, FAILED)

    @property
    def config_text(self) -> str:
        return format_config(self.config)

    @property
    def accelerator_hours(self) -> float | None:
        if self.wall_s is None:
            return None
        return self.wall_s * self.metrics.get(NUM_ACCELERATORS, count_ranks(self.config)) / 3600

    @cached_property
    def text(self) -> str:
        """Text that a filter searches: all columns, in lower case."""
        words = (self.number, self.config_text, self.by, self.purpose, self.state, self.result, self.reason)
        return " ".join(map(str, words)).lower()

    def cell(self, knob: str) -> str:
        """The value of a knob as tables print it; empty if the trial has none."""
        return format_knob_value(self.config[knob]) if knob in self.config else ""

    def as_point(self, best: int | None, value: float | None, expected: float | None = None) -> TrialPoint:
        """The trial in a chart of `value`; `best` is the number of the best trial."""
        kind = self.kind
        if self.number == best:
            kind = BEST
        elif kind == RANKED and self.purpose is Purpose.CONFIRMATION:
            kind = CONFIRMED
        note = f"{self.failure_kind} {self.reason}".strip()
        return TrialPoint(self.number, self.config, kind, value, self.spread, expected, self.by, note, self.metrics)


def make_row(trial: Trial, figure: ObjectiveFigure, primary: str, clean: Callable[[str], str] = clean) -> TrialRow:
    """The row of a trial without its details; `primary` names the task's primary metric."""
    outcome = trial.outcome
    failure, ranked = outcome.failure if outcome else None, trial.loss is not None
    metrics = dict(outcome.metrics) if outcome else {}
    return TrialRow(
        number=trial.number,
        config=dict(trial.config),
        proposer=clean(trial.proposer),
        purpose=trial.purpose,
        state=find_state(trial.outcome),
        result=clean(result_text(trial, figure)),
        reason=clean(trial.reason),
        failure_kind=failure.kind.value if failure else "",
        figure=figure.value(trial),
        value=metrics.get(primary) if ranked else None,
        violation=outcome.violation if outcome and not failure else None,
        loss=trial.loss,
        metrics=metrics,
        spread=outcome.spread if outcome else None,
        expected=trial.expects.metrics,
        seconds=sum(end_s - start_s for start_s, end_s in trial.spans) if trial.spans else None,
    )


def make_detailed_row(run: Run, trial: Trial, figure: ObjectiveFigure) -> TrialRow:
    """The row of a trial with its rationale, its verdicts, its diagnosis and its files."""
    outcome, folder = trial.outcome or Outcome(provenance=run.spec.provenance), run.trial_folder(trial.number)
    is_over = run.spec.provenance is Provenance.MEASURED and trial.finished_s is not None
    return replace(
        make_row(trial, figure, task_of(run.spec.card).primary),
        wall_s=(trial.finished_s or 0.0) - trial.proposed_s if is_over else None,
        rationale=clean(trial.rationale),
        checks=tuple(verdict.model_copy(update={"detail": clean(verdict.detail)}) for verdict in outcome.verdicts),
        notes=tuple(map(clean, (*trial.remarks, *outcome.notes))),
        diagnosis=tuple(map(clean, outcome.diagnosis)),
        seconds_by_cause={clean(k.replace("_", " ")): s for k, s in outcome.seconds_by_cause.items()},
        evidence=folder.relative_to(run.folder).as_posix(),
        files=list_files(folder),
    )
