"""The work and its search space: card, framework and configurations, of a recording or of the target's hardware."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.values import Provenance
from cclsearch.launch.contract import RunStatus
from cclsearch.plan.hardware import check_power_knobs, list_power_knobs, resolve_hardware
from cclsearch.plan.request import SearchRequest, refuse_unlike
from cclsearch.plan.target import IN_PROCESS, SIMULATE, Target
from cclsearch.recording.load import Recording, load_recording
from cclsearch.recording.table import RecordedRow, RowStatus, find_table
from cclsearch.run.spec import RecordingRef, hash_file
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.objective import Objective, require_measurable
from cclsearch.scoring.trial_metric import derive_by_code
from cclsearch.space.build import build_space, require_known_knobs
from cclsearch.space.framework import choose_framework
from cclsearch.space.table import Space
from cclsearch.stats.simulated import SimulatedCluster, SimulatedSettings
from cclsearch.tasks.base import task_of

OTHER_FORMULA = 0.02
"""Relative difference between a recording's figure and the task's own that rounding cannot explain."""


@dataclass(frozen=True)
class ResolvedWorkload:
    """Card, framework and search space on the target."""

    card: Card
    """With the hardware of the target."""
    framework: str
    space: Space
    space_sha256: str
    knobs: tuple[KnobDeclaration, ...] = ()
    """Knobs that the profile or the user added."""
    recording: RecordingRef | None = None
    use_fewer: bool = False
    """Whether configurations may leave accelerators idle."""
    notes: tuple[str, ...] = ()


def resolve_workload(request: SearchRequest, card: Card, target: Target, objective: Objective) -> ResolvedWorkload:
    """Return the work and the search space on this target.

    Raises UserError if the request does not fit them, or if no trial could have the metrics that the objective needs.
    """
    if target.recording is not None:
        return _resolve_recorded(request, card, target.recording, objective)
    hardware, looked_up = resolve_hardware(card, target.profile)
    card = card.model_copy(update={"hardware": hardware})
    card, framework = choose_framework(card, request.framework or target.profile.framework)
    offered = (*target.profile.knobs, *list_power_knobs(target.profile))
    require_known_knobs(request.knobs, card, framework, offered)
    knobs = (*target.profile.knobs, *request.knobs)
    rewarding = [term.metric for term in objective.terms if term.metric in task_of(card).per_accelerator]
    use_fewer = request.use_fewer or bool(rewarding)
    space = build_space(card, framework, extra_knobs=knobs, use_fewer=use_fewer)
    check_power_knobs(card, framework, space.knobs, target.profile)
    if target.profile.launcher == SIMULATE:
        _require_simulated(objective, card, SimulatedCluster.of(SimulatedSettings(), card, space))
    elif target.profile.launcher != IN_PROCESS:  # what a function returns is not known before it is called
        require_measurable(objective, framework, card.task)
    is_said = rewarding and not request.use_fewer and card.hardware.num_accelerators > 1
    fewer = () if not is_said else (_describe_fewer(card, rewarding[0]),)
    return ResolvedWorkload(
        card, framework.name, space, hash_space(space), knobs, use_fewer=use_fewer, notes=(*looked_up, *fewer)
    )


def _describe_fewer(card: Card, metric: str) -> str:
    most = card.hardware.num_accelerators
    return f"configurations may use fewer than the {most} accelerators, as with --use-fewer: the objective has {metric}"


def hash_space(space: Space) -> str:
    """Return the SHA-256 of knobs, choices and rows: equal for equal search spaces."""
    digest = hashlib.sha256(repr([(knob.name, knob.choices) for knob in space.knobs]).encode())
    digest.update(space.codes_NK.tobytes())
    return digest.hexdigest()


def _resolve_recorded(request: SearchRequest, card: Card, folder: Path, objective: Objective) -> ResolvedWorkload:
    recording = load_recording(folder)
    if recording.card.task != card.task:
        raise UserError(
            f"{card.name} is a {card.task} workload, but the recording {recording.name!r} is of {recording.card.task}:"
            " choose another with `--recording FOLDER`"
        )
    refuse_unlike(request, recording.card, recording.name)
    _refuse_changes(request, recording.card.framework)
    _require_recorded(objective, recording)
    return ResolvedWorkload(
        recording.card,
        recording.card.framework,
        recording.space,
        hash_space(recording.space),
        recording=RecordingRef(name=recording.name, folder=folder, sha256=hash_file(find_table(folder))),
        notes=(
            *_describe_recording(card, recording.card, len(recording.rows)),
            *recording.notes,
            *_describe_own_figures(recording),
        ),
    )


def _refuse_changes(request: SearchRequest, framework: str) -> None:
    """Raise UserError for options that would change a recorded space, which consists of the recording's rows."""
    ways = "replay it unchanged, or choose where to run trials (`--launcher NAME`)"
    if request.framework not in (None, framework):
        raise UserError(f"--framework {request.framework!r}: the recording was measured with {framework!r}; {ways}")
    if request.knobs:
        names = ", ".join(knob.name for knob in request.knobs)
        raise UserError(f"--knob {names}: a recording has a fixed search space, its rows; {ways}")


def _require_recorded(objective: Objective, recording: Recording) -> None:
    known = _measure_rows(recording)
    for metric in objective.needed_metrics:
        if metric not in known:
            raise UserError(
                f"{objective.what_needs(metric)}: needs {metric}, but the recording {recording.name!r} has no {metric}"
                f"{_explain_code(metric, recording)}; choose another (it has {', '.join(known)}), or choose where"
                " to run trials (`--launcher NAME`)"
            )


def _explain_code(metric: str, recording: Recording) -> str:
    """Explain why the project's code gives no value of that metric for the recording's best row; empty if none computes
    it.
    """
    row = recording.rows[recording.best_row]
    failed = derive_by_code(_measure_row(recording.card, row), row.config, recording.card)[1]
    return "".join(f" ({note})" for note in failed if note.startswith(f"{metric} "))


def _require_simulated(objective: Objective, card: Card, cluster: SimulatedCluster) -> None:
    """Raise UserError if simulated trials lack a metric that the objective needs."""
    task = task_of(card)
    payload = task.make_input(card, cluster.space.config(0), is_measured=False, run_id="", trial=1)
    metrics = dict.fromkeys(cluster.metrics, 1.0)
    result = task.make_result(card, metrics, status=RunStatus.OK, simulated=True)
    known = task.measure(Evidence(payload, result, card, Provenance.SIMULATED, None))[0]
    known |= derive_by_code(known, payload.config, card)[0]
    for metric in objective.needed_metrics:
        if metric not in known:
            raise UserError(
                f"{objective.what_needs(metric)}: needs {metric}, but simulated trials have only {', '.join(known)}:"
                " choose one of them, or where to run trials (`--launcher NAME`)"
            )


def _measure_rows(recording: Recording) -> list[str]:
    """The metrics that the trials of a replay have, in order."""
    rows = {tuple(row.metrics): row for row in recording.rows if row.status is RowStatus.OK}
    known: dict[str, float] = {}
    for row in rows.values():
        known |= _measure_row(recording.card, row)
    return list(known)


def _measure_row(card: Card, row: RecordedRow) -> dict[str, float]:
    task = task_of(card)
    payload = task.make_input(card, row.config, is_measured=False, run_id="", trial=1)
    loads = {"loads": row.loads} if row.loads else {}
    result = task.make_result(card, row.metrics, status=RunStatus.OK, recorded=True, **loads)
    metrics = task.measure(Evidence(payload, result, card, Provenance.RECORDED, None))[0]
    return metrics | derive_by_code(metrics, row.config, card)[0]


def _describe_own_figures(recording: Recording) -> tuple[str, ...]:
    """Name the metrics that the recording computes by another formula than its task, whose values are shown."""
    own, task = recording.rows[recording.best_row].metrics, task_of(recording.card)
    shown = _measure_row(recording.card, recording.rows[recording.best_row])
    both = [name for name in own if name in shown]
    return tuple(
        f"{task.metric(name).words} is shown as computed from the {task.primary_metric.words}; the recording's own"
        f" column {name} has another formula (of its best row: {own[name]:.4g}, shown {shown[name]:.4g})"
        for name in both
        if abs(own[name] - shown[name]) > OTHER_FORMULA * abs(shown[name])
    )


def _describe_recording(asked: Card, recorded: Card, num_rows: int) -> tuple[str, ...]:
    """Describe a replayed recording for banner, table and report: its source, and how it differs from the card."""
    work = task_of(recorded).describe_work(recorded)
    lines = [
        f"recorded measurements, no trial runs here: {num_rows} configurations of {work} on"
        f" {_describe_hardware(recorded)} with {recorded.framework}, from: {recorded.source or 'an unnamed source'}"
        f" ({recorded.licence or 'no licence named'})"
    ]
    if asked.name != recorded.name:
        pairs: list[tuple[str, object, object]] = [
            ("model", asked.family, recorded.family),
            ("work", task_of(asked).describe_work(asked), task_of(recorded).describe_work(recorded)),
            ("accelerators", _describe_hardware(asked), _describe_hardware(recorded)),
            ("framework", asked.framework, recorded.framework),
        ]
        if asked.model and recorded.model:
            pairs.append(("vocabulary", asked.model.vocab_size, recorded.model.vocab_size))
            pairs.append(("KV heads", asked.model.num_kv_heads, recorded.model.num_kv_heads))
        differs = [f"{what} {theirs} (not {ours})" for what, ours, theirs in pairs if ours != theirs]
        how = f": {', '.join(differs)}" if differs else ", which describes the same work"
        lines.append(
            f"the search uses the recording's card {recorded.name}, not {asked.name}{how}. To search {asked.name}"
            f" itself, use `--launcher {SIMULATE}`, which simulates its trials, or name a cluster"
        )
    return tuple(lines)


def _describe_hardware(card: Card) -> str:
    return f"{card.hardware.num_accelerators} x {card.hardware.accelerator}"
