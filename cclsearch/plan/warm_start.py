"""Warm starts: trials of earlier searches, or measurements of one's own, as a prior for this one (`--learn-from`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Failure, Provenance, Stage
from cclsearch.launch.contract import RunStatus
from cclsearch.launch.replay import RECORDED_FAILURES
from cclsearch.propose.base import Observation
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.recording.load import load_recording
from cclsearch.recording.table import RecordedRow, RowStatus, find_table
from cclsearch.run.spec import RunSpec, hash_file, read_spec
from cclsearch.scoring.evaluate import evaluate_trial
from cclsearch.tasks.base import task_of

AUTO = "auto"
"""Accepted in place of a run's name: all comparable runs of the project."""


def load_warm_start(spec: RunSpec) -> tuple[Observation, ...]:
    """Return the observations of the runs and recordings in `spec.learn_from`; UserError if one is not comparable.

    Runs of different provenance never mix: a measured search does not learn from recorded or simulated runs. A
    recording that the user names is a table of measurements: it may teach where to search, and is never ranked.
    """
    prior: list[Observation] = []
    for name in spec.learn_from:
        folder = Path(name)
        if is_recording(folder):
            prior.extend(_read_recording(spec, folder))
            continue
        _check_comparable(spec, _Earlier.of(read_spec(folder)), folder)
        prior.extend(_read_observations(folder))
    return tuple(prior)


def set_apart_other_work(spec: RunSpec) -> tuple[RunSpec, list[Path]]:
    """Return the spec without the named runs whose times are not comparable, and those of them that still teach.

    A run of another model, batch or precision teaches how the framework runs on the cluster (`plan/earlier.py`).
    """
    own: list[str] = []
    other: list[str] = []
    for name in spec.learn_from:
        folder = Path(name)
        is_other = not is_recording(folder) and _differs_only_in_work(spec, _Earlier.of(read_spec(folder)))
        (other if is_other else own).append(name)
    return spec.model_copy(update={"learn_from": tuple(own)}), [Path(name) for name in other]


def _differs_only_in_work(spec: RunSpec, earlier: _Earlier) -> bool:
    differs = set(_find_differences(spec, earlier))
    return bool(differs) and not differs & {"task", "accelerator", "framework", "provenance", "simulated cluster"}


def is_recording(folder: Path) -> bool:
    """Whether the folder is a recording rather than a run."""
    return find_table(folder).is_file()


@dataclass(frozen=True)
class _Earlier:
    """What is compared of an earlier run, or of a recording."""

    card: Card
    framework: str
    provenance: Provenance
    simulated_cluster: str = ""

    @classmethod
    def of(cls, spec: RunSpec) -> _Earlier:
        return cls(spec.card, spec.framework, spec.provenance, spec.simulated_cluster)


def _read_recording(spec: RunSpec, folder: Path) -> list[Observation]:
    """The rows of a recording as observations, judged by this search's objective as if they were its trials."""
    recording = load_recording(folder)
    if spec.recording is not None and spec.recording.sha256 == hash_file(find_table(folder)):
        raise UserError(f"--learn-from {str(folder)!r} is the recording that this search replays: leave it out")
    provenance = Provenance.RECORDED if spec.provenance is Provenance.SIMULATED else spec.provenance
    _check_comparable(spec, _Earlier(recording.card, recording.card.framework, provenance), folder)
    baseline = dict(recording.rows[recording.best_row].metrics)
    return [_observe(spec, recording.card, row, baseline) for row in recording.rows]


def _observe(spec: RunSpec, card: Card, row: RecordedRow, baseline: Mapping[str, float]) -> Observation:
    if row.status is not RowStatus.OK:
        kind, message = RECORDED_FAILURES[row.status]
        failure = Failure(stage=Stage.RUN, kind=kind, message=message)
        return Observation(0, row.config, None, None, failure, metrics=row.metrics)
    task = task_of(card)
    payload = task.make_input(card, row.config, is_measured=False, run_id="", trial=1)
    result = task.make_result(card, row.metrics, status=RunStatus.OK, recorded=True)
    outcome = evaluate_trial(
        payload, result, card, spec.objective, provenance=Provenance.RECORDED,
        baseline=baseline if spec.objective.needs_baseline else None,
    )  # fmt: skip
    violation = spec.objective.violation(outcome.metrics)
    return Observation(
        0, row.config, None, outcome.loss, outcome.failure,
        metrics=outcome.metrics, loads=row.loads, violation=violation,
    )  # fmt: skip


def add_comparable_runs(spec: RunSpec, folders: Iterable[Path]) -> RunSpec:
    """Return the spec with all comparable runs added as a prior, and a note that names them.

    Comparable means measured (not recorded or simulated) with the same work, accelerator, memory, accelerators per
    node and framework. Runs that cannot be read or have no finished trial are skipped.
    """
    known = set(spec.learn_from)
    taken = [
        folder.resolve() for folder in folders if str(folder.resolve()) not in known and _is_comparable(spec, folder)
    ]
    names = ", ".join(folder.name for folder in taken)
    note = f"warm start from {len(taken)} earlier run{'s' * (len(taken) > 1)}: {names}" if taken else _why_none(spec)
    learn_from = (*spec.learn_from, *(str(folder) for folder in taken))
    return spec.model_copy(update={"learn_from": learn_from, "banner": (*spec.banner, note)})


def _is_comparable(spec: RunSpec, folder: Path) -> bool:
    try:
        earlier = read_spec(folder)
        if earlier.provenance is not Provenance.MEASURED or _find_differences(spec, _Earlier.of(earlier)):
            return False
        return _fingerprint(spec) == _fingerprint(earlier) and bool(_read_observations(folder))
    except (UserError, OSError):
        return False


def _why_none(spec: RunSpec) -> str:
    if spec.provenance is not Provenance.MEASURED:
        return f"no warm start: `--learn-from auto` uses measured runs, but this search is {spec.provenance.value}"
    hardware = spec.card.hardware
    return (
        f"no warm start: no earlier run was measured on {hardware.accelerator} ({hardware.memory_gib:g} GiB,"
        f" {hardware.accelerators_per_node} per node) with {spec.framework} for the same work"
    )


def _fingerprint(spec: RunSpec) -> tuple[object, ...]:
    """What must be equal for figures of two clusters to be comparable."""
    hardware = spec.card.hardware
    return (
        *(hardware.accelerator, hardware.accelerators_per_node, hardware.memory_gib, hardware.groups),
        spec.framework,
    )


def _read_observations(folder: Path) -> list[Observation]:
    state = fold_ledger(folder / LEDGER_FILE)
    return [replace(observation, row=None) for observation in state.trials.observe()]


def _check_comparable(spec: RunSpec, earlier: _Earlier, folder: Path) -> None:
    differs = _find_differences(spec, earlier)
    if differs:
        raise UserError(
            f"--learn-from {str(folder)!r} is not comparable with this search: different {', '.join(differs)};"
            " name runs or recordings with the same work, model, accelerator and framework"
        )


def _find_differences(spec: RunSpec, earlier: _Earlier) -> list[str]:
    names = {**spec.card.work, **earlier.card.work}
    pairs = {
        "task": (spec.card.task, earlier.card.task),
        "model": (spec.card.model, earlier.card.model),
        **{name.replace("_", " "): (spec.card.work.get(name), earlier.card.work.get(name)) for name in names},
        "precision": (spec.card.precision, earlier.card.precision),
        "accelerator": (spec.card.hardware.accelerator, earlier.card.hardware.accelerator),
        "framework": (spec.framework, earlier.framework),
        "provenance": (spec.provenance, earlier.provenance),
        "simulated cluster": (spec.simulated_cluster, earlier.simulated_cluster),
    }
    return [name for name, (ours, theirs) in pairs.items() if ours != theirs]
