"""The earlier nights of a job, read from its runs' ledgers: what each configuration took, night by night."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.launch.contract import RESULT_FILE
from cclsearch.record.trial import Trial
from cclsearch.run.folder import Run, load_run
from cclsearch.run.spec import SPEC_FILE, RunSpec

STAMP = r"\d{8}-\d{6}"
MAX_NIGHTS = 30
"""Nights back that comparisons and charts look."""


def name_run(name: str, stamp: str, key: str) -> str:
    """The run's name: series, night and job."""
    return f"{name}-{stamp}-{key}"


def find_runs(runs: Path, name: str, key: str) -> list[Path]:
    """Run folders of a job, the oldest night first; links and what is no run are left out."""
    form = re.compile(rf"{re.escape(name)}-({STAMP})-{re.escape(key)}")
    return sorted(folder for folder in list_folders(runs) if form.fullmatch(folder.name))


def find_series(runs: Path, name: str) -> dict[str, list[Path]]:
    """Night's stamp -> run folders of the series, the oldest night first."""
    form = re.compile(rf"{re.escape(name)}-({STAMP})-.+")
    found: dict[str, list[Path]] = {}
    for folder in sorted(list_folders(runs)):
        if match := form.fullmatch(folder.name):
            found.setdefault(match[1], []).append(folder)
    return dict(sorted(found.items()))


def list_folders(runs: Path) -> list[Path]:
    """Run folders that really lie in the runs folder: no links."""
    if not runs.is_dir():
        return []
    return [p for p in runs.iterdir() if not p.is_symlink() and p.is_dir() and (p / SPEC_FILE).is_file()]


def stamp_of(folder: Path) -> str:
    """The night of a run, by its name."""
    match = re.search(rf"-({STAMP})-", folder.name)
    return match[1] if match else ""


def is_same_work(one: RunSpec, other: RunSpec) -> bool:
    """Whether figures of two searches compare: the same model, work, hardware, framework, objective and provenance."""
    return all(ours == theirs for ours, theirs in zip(_work_of(one), _work_of(other), strict=True))


def _work_of(spec: RunSpec) -> tuple[object, ...]:
    card, recording = spec.card, spec.recording
    return (
        card.arch, card.global_batch_size, card.seq_len, card.precision, card.hardware, spec.framework,
        spec.objective.model_copy(update={"description": ""}),
        spec.profile.launcher, spec.profile.name, spec.provenance, recording.sha256 if recording else None,
    )  # fmt: skip


@dataclass(frozen=True)
class RankedRun:
    """One ranked run of one configuration."""

    trial: int
    value: float
    """What is compared: the loss; seconds per step where losses of two searches do not compare."""
    time_s: float
    folder: Path
    """Its evidence."""


@dataclass(frozen=True)
class Night:
    """What one run of a job found, or what it found since a moment."""

    stamp: str
    run: Run
    samples: Mapping[Config, tuple[RankedRun, ...]]
    failures: Mapping[Config, Trial] = field(default_factory=dict)
    """Configurations that failed by their own fault, and never ranked."""
    num_lost: int = 0
    """Trials that the infrastructure failed."""
    failed: tuple[Trial, ...] = ()
    """Trials that failed by their own fault."""
    refused: tuple[Trial, ...] = ()
    """Trials that ran and were not admitted, so that they rank nowhere."""
    unfinished: tuple[Trial, ...] = ()
    """Trials that were begun and have no end."""

    @property
    def num_trials(self) -> int:
        """That have ended, confirmations included."""
        return sum(map(len, self.samples.values())) + len(self.failed) + len(self.refused) + self.num_lost

    @property
    def best(self) -> Config | None:
        """The configuration with the least mean."""
        return min(self.samples, key=lambda config: mean_of(self.samples[config]), default=None)


def mean_of(samples: Iterable[RankedRun]) -> float:
    """Geometric mean where all are above 0, as noise is relative; else the arithmetic."""
    values = [sample.value for sample in samples]
    if all(value > 0 for value in values):
        return math.exp(sum(map(math.log, values)) / len(values))
    return sum(values) / len(values)


def describe_figure(spec: RunSpec) -> str:
    """What is compared from night to night."""
    if _by_step_time(spec):
        return "step_time_s"
    metrics = spec.objective.metrics
    return metrics[0] if len(metrics) == 1 and metrics[0] == "step_time_s" else f"loss of {spec.objective.name}"


def _by_step_time(spec: RunSpec) -> bool:
    return spec.objective.is_multi or spec.objective.needs_baseline


def read_night(run: Run, since_s: float = 0.0) -> Night:
    """What a run found since a moment."""
    samples: dict[Config, list[RankedRun]] = {}
    failed: list[Trial] = []
    refused: list[Trial] = []
    unfinished: list[Trial] = []
    lost = 0
    for trial in run.state.trials.values():
        if trial.outcome is None:
            unfinished.append(trial)
            continue
        if (trial.finished_s or 0.0) < since_s:
            continue
        value = trial.loss
        if value is not None and _by_step_time(run.spec):
            value = trial.outcome.metrics.get("step_time_s")
        if value is not None:
            sample = RankedRun(trial.number, value, trial.finished_s or 0.0, run.trial_folder(trial.number))
            samples.setdefault(trial.config, []).append(sample)
        elif trial.outcome.failure and trial.outcome.failure.kind.is_infrastructure:
            lost += 1
        elif trial.outcome.failure:
            failed.append(trial)
        else:
            refused.append(trial)
    return Night(
        stamp=stamp_of(run.folder),
        run=run,
        samples={config: tuple(found) for config, found in samples.items()},
        failures={trial.config: trial for trial in failed if trial.config not in samples},
        num_lost=lost,
        failed=tuple(failed),
        refused=tuple(refused),
        unfinished=tuple(unfinished),
    )


def read_earlier(folders: Iterable[Path], spec: RunSpec) -> list[Night]:
    """The last nights on the same work, the oldest first; a run that cannot be read is left out."""
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
    """Up to `count` configurations worth another measurement: nights' bests, by the mean over all their runs."""
    nights = list(nights)
    winners = dict.fromkeys(night.best for night in nights if night.best is not None)
    pooled = {config: mean_of(s for n in nights for s in n.samples.get(config, ())) for config in winners}
    return tuple(sorted(pooled, key=pooled.__getitem__)[:count])


def read_surroundings(sample: RankedRun) -> dict[str, str]:
    """What a trial ran on, from its result file: versions, hosts, devices; empty where its evidence is gone."""
    try:
        data = json.loads((sample.folder / RESULT_FILE).read_text(encoding="utf-8"))
        versions = data.get("versions") or {}
        facts = {str(name): str(version) for name, version in versions.items()}
        for name in ("hosts", "devices"):
            facts[name] = ", ".join(sorted({str(item) for item in data.get(name) or ()}))
        return facts
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
