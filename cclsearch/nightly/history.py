"""The earlier nights of a job, read from the ledgers of its runs: results of each configuration, night by night."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import RESULT_BYTES, read_job_json
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.values import Config
from cclsearch.launch.contract import RESULT_FILE
from cclsearch.record.trial import Trial, TrialState, find_state
from cclsearch.report.figures import find_figure
from cclsearch.run.folder import Run, load_run
from cclsearch.run.spec import SPEC_FILE, RunSpec
from cclsearch.tasks.base import task_of

STAMP = r"\d{8}-\d{6}"
MAX_NIGHTS = 30
"""Number of earlier nights in comparisons and charts."""


def name_run(name: str, stamp: str, key: str) -> str:
    """The name of a run: series, night and job."""
    return f"{name}-{stamp}-{key}"


def find_runs(runs: Path, name: str, key: str) -> list[Path]:
    """Run folders of a job, the oldest night first; links and folders that are not runs are left out."""
    series = find_series(runs, name).items()
    return [folder for stamp, folders in series for folder in folders if folder.name == name_run(name, stamp, key)]


def find_series(runs: Path, name: str) -> dict[str, list[Path]]:
    """Run folders of the series by the night's stamp, the oldest night first; links are left out."""
    form = re.compile(rf"{re.escape(name)}-({STAMP})-.+")
    found: dict[str, list[Path]] = {}
    for folder in sorted(runs.glob("*/")):
        is_run = not folder.is_symlink() and (folder / SPEC_FILE).is_file()
        if is_run and (match := form.fullmatch(folder.name)):
            found.setdefault(match[1], []).append(folder)
    return dict(sorted(found.items()))


def is_same_work(one: RunSpec, other: RunSpec) -> bool:
    """Whether two searches are comparable: equal task, model, work, hardware, framework, objective and provenance."""
    return all(ours == theirs for ours, theirs in zip(_work_of(one), _work_of(other), strict=True))


def _work_of(spec: RunSpec) -> tuple[object, ...]:
    card, recording = spec.card, spec.recording
    no_text = {"missing": ""}  # sentences may differ between versions
    terms = tuple(term.model_copy(update=no_text) for term in spec.objective.terms)
    bounds = tuple(bound.model_copy(update=no_text) for bound in spec.objective.constraints)
    objective = spec.objective.model_copy(update={"description": "", "terms": terms, "constraints": bounds})
    return (
        card.task, card.model, card.work, card.precision, card.hardware, spec.framework,
        objective, spec.profile.launcher, spec.profile.name, spec.provenance, recording.sha256 if recording else None,
        spec.simulated_cluster,
    )  # fmt: skip


@dataclass(frozen=True)
class RankedRun:
    """One ranked run of one configuration."""

    trial: int
    value: float
    """The compared figure, converted so that less is better."""
    folder: Path
    """Folder of its evidence."""


@dataclass(frozen=True)
class Night:
    """Results of one run of a job, or its results since a moment."""

    run: Run
    samples: Mapping[Config, tuple[RankedRun, ...]]
    failures: Mapping[Config, Trial] = field(default_factory=dict)
    """Configurations that failed for their own reasons and never ranked."""
    ends: Counter[TrialState] = field(default_factory=Counter)
    """Number of finished trials of the night by their end."""
    failed: tuple[Trial, ...] = ()
    """Trials that failed for their own reasons."""
    refused: tuple[Trial, ...] = ()
    """Trials that ran and were not admitted, so they are not ranked."""
    unfinished: tuple[Trial, ...] = ()
    """Trials that started and have not finished."""

    @property
    def figure(self) -> NightFigure:
        """The figure that is compared from night to night."""
        return choose_figure(self.run.spec)

    @property
    def num_trials(self) -> int:
        """Number of finished trials, confirmations included."""
        return self.ends.total()

    @property
    def best(self) -> Config | None:
        """The configuration with the lowest mean."""
        return min(self.samples, key=lambda config: mean_of(self.samples[config]), default=None)


def mean_of(samples: Iterable[RankedRun]) -> float:
    """Geometric mean if all values are above 0, because noise is relative; else the arithmetic mean."""
    values = [sample.value for sample in samples]
    if all(value > 0 for value in values):
        return math.exp(sum(map(math.log, values)) / len(values))
    return sum(values) / len(values)


@dataclass(frozen=True)
class NightFigure:
    """The figure that nights are compared by: the objective's, or the primary metric."""

    name: str
    metric: MetricInfo
    is_negated: bool = False
    """Whether the compared value is its negative, as it may be 0 or below; else its inverse, if greater is better."""

    @property
    def unit(self) -> str:
        return self.metric.unit or ""

    def show(self, value: float) -> float:
        """The figure of a run whose compared value, of which less is better, is this; its own inverse."""
        if self.is_negated:
            return -value
        return 1.0 / value if self.metric.greater_is_better else value


def choose_figure(spec: RunSpec) -> NightFigure:
    """The figure of the objective; the primary metric if losses of two searches are not comparable."""
    primary, objective = task_of(spec.card).primary_metric, spec.objective
    is_primary = objective.metrics == (primary.name,) and objective.terms[0].reciprocal == primary.greater_is_better
    if is_primary or _has_own_losses(spec):
        return NightFigure(primary.name, primary)
    metric, term = find_figure(spec).metric, objective.terms[0]
    is_inverse = objective.is_weighted or term.reciprocal
    if metric.greater_is_better and not is_inverse:
        return NightFigure(metric.name, metric, is_negated=True)
    return NightFigure(metric.name, metric)


def _has_own_losses(spec: RunSpec) -> bool:
    """Whether losses of two searches are not comparable."""
    return spec.objective.is_multi or spec.objective.needs_baseline


def read_night(run: Run, since_s: float = 0.0) -> Night:
    """Results of a run since a moment."""
    samples: dict[Config, list[RankedRun]] = {}
    found: dict[TrialState, list[Trial]] = {state: [] for state in TrialState}
    figure = choose_figure(run.spec)
    for trial in run.state.trials.values():
        if trial.outcome is not None and (trial.finished_s or 0.0) < since_s:
            continue
        found[find_state(trial.outcome)].append(trial)
        value = run.state.corrected_loss(trial.number)
        if value is not None and trial.outcome is not None and _has_own_losses(run.spec):
            measured = trial.outcome.metrics.get(figure.name)
            value = figure.show(measured) if measured else None
        if value is not None:
            sample = RankedRun(trial.number, value, run.trial_folder(trial.number))
            samples.setdefault(trial.config, []).append(sample)
    unfinished, failed = found.pop(TrialState.UNFINISHED), found[TrialState.FAILED]
    return Night(
        run=run,
        samples={config: tuple(runs) for config, runs in samples.items()},
        failures={trial.config: trial for trial in failed if trial.config not in samples},
        ends=Counter(state for state, ended in found.items() for trial in ended if trial.recomputes is None),
        failed=tuple(failed),
        refused=tuple(found[TrialState.REFUSED]),
        unfinished=tuple(unfinished),
    )


def read_earlier(folders: Iterable[Path], spec: RunSpec) -> list[Night]:
    """The latest nights of the same work, the oldest first; unreadable runs are left out."""
    nights = []
    for folder in list(folders)[-MAX_NIGHTS:]:
        try:
            run = load_run(folder)
        except UserError:
            continue
        if is_same_work(run.spec, spec):
            nights.append(read_night(run))
    return nights


def pick_bests(nights: Iterable[Night], count: int) -> tuple[Config, ...]:
    """Up to `count` configurations to measure again: the best of each night, ordered by the mean of all their runs."""
    nights = list(nights)
    winners = dict.fromkeys(night.best for night in nights if night.best is not None)
    pooled = {config: mean_of(s for n in nights for s in n.samples.get(config, ())) for config in winners}
    return tuple(sorted(pooled, key=pooled.__getitem__)[:count])


def read_surroundings(sample: RankedRun) -> dict[str, str]:
    """Versions, hosts and devices of a trial, from its result file; empty if its evidence is gone."""
    try:
        data = read_job_json(sample.folder / RESULT_FILE, RESULT_BYTES)
        versions = data.get("versions") or {}
        facts = {str(name): str(version) for name, version in versions.items()}
        for name in ("hosts", "devices"):
            facts[name] = ", ".join(sorted({str(item) for item in data.get(name) or ()}))
        return {name: fact for name, fact in facts.items() if fact}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
