"""Warm starts: trials of earlier searches as a prior for this one (`--learn-from`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.values import Provenance
from cclsearch.propose.base import Observation
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.run.spec import RunSpec, read_spec

AUTO = "auto"
"""Accepted in place of a run's name: all comparable runs of the project."""


def load_warm_start(spec: RunSpec) -> tuple[Observation, ...]:
    """Return the observations of the runs in `spec.learn_from`; raises UserError if one is not comparable.

    Figures of different provenance never mix: a measured search does not learn from recorded or simulated runs.
    """
    prior: list[Observation] = []
    for name in spec.learn_from:
        folder = Path(name)
        _check_comparable(spec, read_spec(folder), folder)
        prior.extend(_read_observations(folder))
    return tuple(prior)


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
        if earlier.provenance is not Provenance.MEASURED or _find_differences(spec, earlier):
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
    return hardware.accelerator, hardware.accelerators_per_node, hardware.memory_gib, spec.framework


def _read_observations(folder: Path) -> list[Observation]:
    state = fold_ledger(folder / LEDGER_FILE)
    return [replace(observation, row=None) for observation in state.trials.observe()]


def _check_comparable(spec: RunSpec, earlier: RunSpec, folder: Path) -> None:
    differs = _find_differences(spec, earlier)
    if differs:
        raise UserError(
            f"--learn-from {str(folder)!r} is not comparable with this search: different {', '.join(differs)};"
            " name runs with the same work, model, accelerator and framework"
        )


def _find_differences(spec: RunSpec, earlier: RunSpec) -> list[str]:
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
