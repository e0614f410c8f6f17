"""The subject of `space` and `predict`: a workload, a recording, or the inputs of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.values import Value, format_config
from cclsearch.launch.profile import load_profile
from cclsearch.plan.hardware import resolve_hardware
from cclsearch.plan.request import load_workload
from cclsearch.plan.target import find_recording
from cclsearch.recording.load import Recording, load_recording
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import load_run
from cclsearch.run.spec import RunSpec
from cclsearch.space.build import RuleVerdict, build_space, explain_config, require_known_knobs
from cclsearch.space.framework import Framework, choose_framework
from cclsearch.space.parse import parse_knobs, read_tuning_config
from cclsearch.space.table import Space
from cclsearch.tasks.base import task_of

RECORDED = "recorded"
"""The rule of a recording's space: the configuration is one of its rows."""


@dataclass(frozen=True)
class Asked:
    """The options that name the subject and change it; a run and a recording cannot be changed."""

    workload: str | None = None
    recording: str | None = None
    run: str | None = None
    runs: Path | None = None
    overlays: Sequence[str] = ()
    sets: Sequence[str] = ()
    framework: str | None = None
    launcher: str | None = None
    tuning_config: Path | None = None
    knobs: Sequence[str] = ()
    use_fewer: bool = False


@dataclass(frozen=True)
class Subject:
    """A card, its framework and the choices of its knobs; with a recording, its rows are the search space."""

    title: str
    card: Card
    framework_name: str
    framework: Framework | None
    """None for a recording: rules do not make its space."""
    knobs: tuple[KnobDeclaration, ...] = ()
    use_fewer: bool = False
    recording: Recording | None = None
    notes: tuple[str, ...] = ()

    def build_space(self) -> Space:
        """Return the search space; raises UserError if it is empty."""
        if self.recording is not None:
            return self.recording.space
        assert self.framework is not None
        return build_space(self.card, self.framework, self.knobs, self.use_fewer)

    def explain(self, config: Mapping[str, Value]) -> tuple[RuleVerdict, ...]:
        """Return each rule's verdict on a complete or partial configuration, or whether the recording has it."""
        if self.recording is None:
            assert self.framework is not None
            return explain_config(self.card, self.framework, config, self.knobs, self.use_fewer)
        return (_look_up(self.recording, config),)


def find_subject(asked: Asked) -> Subject:
    """Return the subject that the options name; raises UserError for none, several, or a change to a frozen one."""
    if asked.run is not None:
        others = (("--workload", asked.workload), ("--recording", asked.recording), *_changes(asked))
        _refuse(others, f"--run {asked.run} means the frozen inputs of that run")
        return _read_run(load_run(find_run(asked.run, asked.runs)).spec)
    if asked.recording is not None:
        _refuse((("--workload", asked.workload), *_changes(asked)), "--recording has a card and a space of its own")
        return _read_recording(load_recording(find_recording(asked.recording)))
    if asked.workload is None:
        raise UserError("nothing is named: give --workload NAME, --recording NAME, or --run RUN")
    return _place(asked, asked.workload)


def _place(asked: Asked, workload: str) -> Subject:
    """The workload on the hardware of the launcher profile, if one is named, else on its own."""
    profile = load_profile(asked.launcher) if asked.launcher is not None else None
    if profile is not None and profile.launcher == "replay":
        raise UserError(f"--launcher {asked.launcher} replays a recording: name it with --recording instead")
    card = load_workload(workload, asked.overlays, asked.sets, profile)
    looked_up: tuple[str, ...] = ()
    if profile is not None:
        hardware, looked_up = resolve_hardware(card, profile)
        card = card.model_copy(update={"hardware": hardware})
    card, framework = choose_framework(card, asked.framework or (profile.framework if profile is not None else None))
    extra = (*read_tuning_config(asked.tuning_config), *parse_knobs(asked.knobs))
    declared = profile.knobs if profile is not None else ()
    require_known_knobs(extra, card, framework, declared)
    task = task_of(card)
    notes, knobs = (*looked_up, *card.remarks, *task.remark(card)), (*declared, *extra)
    use_fewer = asked.use_fewer or task.primary in task.per_accelerator  # as a search for it does
    return Subject(card.name, card, framework.name, framework, knobs, use_fewer, notes=notes)


def locate_recording(spec: RunSpec) -> RunSpec:
    """Return the spec with the present folder of its recording, found by name if it has moved."""
    if spec.recording is None or spec.recording.folder.is_dir():
        return spec
    folder = find_recording(spec.recording.name)
    recording = spec.recording.model_copy(update={"folder": folder})
    profile = spec.profile.model_copy(update={"settings": {**spec.profile.settings, "recording": str(folder)}})
    return spec.model_copy(update={"recording": recording, "profile": profile})


def _changes(asked: Asked) -> tuple[tuple[str, object], ...]:
    return (
        ("--overlay", asked.overlays),
        ("--set", asked.sets),
        ("--framework", asked.framework),
        ("--launcher", asked.launcher),
        ("--tuning-config", asked.tuning_config),
        ("--knob", asked.knobs),
        ("--use-fewer", asked.use_fewer),
    )


def _refuse(options: Sequence[tuple[str, object]], why: str) -> None:
    given = [name for name, value in options if value]
    if given:
        raise UserError(f"{' and '.join(given)}: {why}; leave {'it' if len(given) == 1 else 'them'} out")


def _read_run(spec: RunSpec) -> Subject:
    if spec.recording is not None:
        folder = locate_recording(spec).recording
        assert folder is not None
        recorded = _read_recording(load_recording(folder.folder))
        return Subject(
            f"run {spec.run_id}", spec.card, spec.framework, None, recording=recorded.recording, notes=recorded.notes
        )
    card, framework = choose_framework(spec.card, spec.framework)
    return Subject(
        f"run {spec.run_id}", card, framework.name, framework, spec.knobs, spec.use_fewer, notes=card.remarks
    )


def _read_recording(recording: Recording) -> Subject:
    card = recording.card
    notes = (*recording.notes, *card.remarks)
    return Subject(f"recording {recording.name}", card, card.framework, None, recording=recording, notes=notes)


def _look_up(recording: Recording, config: Mapping[str, Value]) -> RuleVerdict:
    """Return whether the recording has the configuration, with its measurement."""
    rows = recording.space.matching(config).nonzero()[0]
    summary = "the search space of a recording is its rows"
    if not len(rows):
        return RuleVerdict(rule=RECORDED, ok=False, detail=_describe_near(recording, config), summary=summary)
    detail = f"{len(rows)} rows match"
    if all(knob.name in config for knob in recording.space.knobs):
        row, metric = recording.rows[int(rows[0])], recording.primary
        value = row.metrics.get(metric.name)
        measured = f"{metric.words} {value:g} {metric.unit or ''}".strip() if value is not None else row.status.value
        detail = f"measured: {measured} (recorded)"
    return RuleVerdict(rule=RECORDED, ok=True, detail=detail, summary=summary)


def _describe_near(recording: Recording, config: Mapping[str, Value]) -> str:
    """Say that nothing was measured, and name the single value that would have to differ."""
    for name in reversed(list(config)):
        rest = {knob: value for knob, value in config.items() if knob != name}
        rows = recording.space.matching(rest).nonzero()[0]
        if len(rows):
            values = sorted(
                {str(recording.rows[int(row)].config[name]) for row in rows}, key=lambda text: (len(text), text)
            )
            return f"was not measured; with {format_config(rest) or 'any values'} there are {name}={','.join(values)}"
    return "was not measured"
