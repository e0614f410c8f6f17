"""Load workload cards (CCL-Bench v1 YAML, with overlays); what is inferred says its source, the rest is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cclsearch.card.check import check_values
from cclsearch.card.fields import (
    BY_NAME,
    FIELDS,
    MISSING,
    MODEL_FIELDS,
    OTHER_WORK_FIELDS,
    CardField,
    FieldProblem,
    look_up,
    read_field,
    settable_fields,
)
from cclsearch.card.infer import infer_phase, infer_values
from cclsearch.card.model import Card, Hardware, Inferred, KnobDeclaration, Phase, make_model
from cclsearch.card.template import read_configuration, read_template
from cclsearch.core.content import find_content
from cclsearch.core.errors import UserError
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.values import Config
from cclsearch.core.yaml_file import parse_yaml_value, read_yaml, validate_mapping
from cclsearch.plugins import TASKS

SUFFIXES = (".yaml", ".yml")
_GENERIC_STEMS = frozenset({"card", "workload", "workload_card"})


@dataclass(frozen=True)
class CardReport:
    """Content of a card file, usable or not."""

    name: str
    where: str
    """The file."""
    task: str
    """Name of its task, registered or not."""
    values: Mapping[str, Any]
    """Field name (`hidden_size`, `batch_size`, `accelerator`, ...) -> value, for each present and valid field."""
    problems: tuple[FieldProblem, ...]
    card: Card | None
    """None if there is a blocking problem."""

    @property
    def blocking(self) -> tuple[FieldProblem, ...]:
        return tuple(problem for problem in self.problems if problem.blocking)

    @property
    def notes(self) -> tuple[str, ...]:
        """Values that were ignored or looked up, one line each; the card is usable."""
        return tuple(f"{p}{f' ({p.remedy})' if p.remedy else ''}" for p in self.problems if not p.blocking)

    @property
    def inferred(self) -> tuple[Inferred, ...]:
        """Values that the file does not state."""
        return tuple(problem.inferred for problem in self.problems if problem.inferred is not None)


def load_card(name: str, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> Card:
    """The card of that name or path, with the cards in `overlays` and then the `FIELD=VALUE` settings applied.

    Raises UserError that names the file, every missing or invalid field, and the settings that would fix them.
    """
    report = inspect_card(name, overlays, sets)
    if report.values.get("phase") == Phase.INFERENCE and TASKS.find(report.task) is None:
        raise UserError(
            f"{report.where}: is an inference workload ({report.task}), which cannot be searched yet: only"
            f" {', '.join(TASKS.names())} can. `ccl-search card check` and `ccl-search score TRACE --card` read it"
        )
    return require_card(report)


def inspect_card(name: str | None, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> CardReport:
    """As `load_card`, but returns the valid fields and the problems of the others instead of raising.

    Without a name, the fields are those of the overlays and settings alone.
    """
    path = find_content("workloads", name, *SUFFIXES) if name is not None else Path("--set")
    data: Mapping[str, Any] = read_yaml(path) if name is not None else {"workload": {}}
    for overlay in overlays:
        data = _merge(data, read_yaml(find_content("workloads", overlay, *SUFFIXES)))
    for setting in sets:
        data = _apply_set(data, setting)
    return inspect_mapping(data, _card_name(path), str(path))


def card_from_mapping(data: Mapping[str, Any], name: str) -> Card:
    """The card in an already read mapping; raises UserError as `load_card` does."""
    return require_card(inspect_mapping(data, name, name))


def inspect_mapping(data: Mapping[str, Any], name: str, where: str) -> CardReport:
    """The report of an already read mapping, named `where` in messages; UserError if it is not a card at all."""
    if not isinstance(data.get("workload"), Mapping):
        raise UserError(
            f"{where!r} is not a workload card: it must have a `workload` section with model, data and hardware"
        )
    task_name = read_task(data, where)
    task = TASKS.find(task_name)
    fields = _fields_of(task)
    values, problems = _read_fields(data, fields)
    inferred = [*filter(None, [infer_phase(data)]), *infer_values(values, data)]
    values |= {note.inferred.field: note.inferred.value for note in inferred if note.inferred is not None}
    found = {BY_NAME[name].path for name in values if name in BY_NAME}
    problems = [p for p in problems if p.field not in found or not p.message.startswith(MISSING)]
    problems += [*inferred, *check_values(values, data)]
    knobs = _read_knobs(data, where)
    report = CardReport(name, where, task_name, values, tuple(problems), None)
    if report.blocking:
        return report
    return replace(report, card=_make_card(report, task_name, task, knobs, data))


def _read_fields(data: Mapping[str, Any], fields: Sequence[CardField]) -> tuple[dict[str, Any], list[FieldProblem]]:
    values: dict[str, Any] = {}
    problems: list[FieldProblem] = []
    for field in fields:
        value, problem = read_field(data, field)
        if value is not None:
            values[field.name] = value
        if problem is not None:
            problems.append(problem)
    return values, problems


def read_task(data: Mapping[str, Any], where: str) -> str:
    """The name of the card's task: its `workload.task`, else its phase."""
    named = look_up(data, "workload.task")
    if named is None:
        inferred = infer_phase(data)
        phase = inferred.inferred.value if inferred and inferred.inferred else look_up(data, "workload.model.phase")
        return one_line(str(phase or Phase.TRAINING.value), 40).lower()
    name = str(named).strip().lower()
    if TASKS.find(name) is None:
        raise UserError(
            f"{where}: workload.task must be one of {', '.join(TASKS.names())}, not {one_line(repr(named), 60)}"
        )
    return name


def _work_fields(task: Any) -> tuple[CardField, ...]:
    return OTHER_WORK_FIELDS if task is None else tuple(task.card_fields)


def _fields_of(task: Any) -> tuple[CardField, ...]:
    """The fields of a card of that task; those of the model are optional if the task needs none."""
    if task is None or task.needs_model:
        return (*FIELDS, *_work_fields(task))
    fields = (replace(f, required=f.required and f.name not in MODEL_FIELDS) for f in FIELDS)
    return (*fields, *_work_fields(task))


def require_card(report: CardReport) -> Card:
    """The report's card; raises UserError that names every missing or invalid field if it has none."""
    if report.card is not None:
        return report.card
    wrong = "; ".join(_gather_missing(report.blocking))
    remedies = " ".join(dict.fromkeys(problem.remedy for problem in report.blocking if problem.remedy))
    fix = f": give {remedies}, or add a second card with --overlay" if remedies else ""
    raise UserError(f"{report.where}: {wrong}{fix}")


def _gather_missing(problems: Sequence[FieldProblem]) -> list[str]:
    """One phrase per problem, but one for all missing fields of a section."""
    missing: dict[str, list[str]] = {}
    others = []
    for problem in problems:
        section, _, field = problem.field.rpartition(".")
        if problem.message == MISSING:
            missing.setdefault(section, []).append(field)
        else:
            others.append(str(problem))
    gathered = [
        f"{section}.{fields[0]} is missing" if len(fields) == 1 else f"{section} has no {', '.join(fields)}"
        for section, fields in missing.items()
    ]
    return [*gathered, *others]


def _make_card(
    report: CardReport, task_name: str, task: Any, knobs: tuple[KnobDeclaration, ...], data: Mapping[str, Any]
) -> Card:
    values, fields = report.values, _fields_of(task)
    hardware = {field: values[field] for field in Hardware.model_fields if field in values}
    hardware |= {"num_accelerators": values["total_count"], "accelerators_per_node": values["count_per_node"]}
    family = values.get("model_family", "")
    return Card(
        name=report.name,
        title=values.get("description", family or task_name),
        task=task_name,
        phase=values.get("phase"),
        family=family,
        model=make_model(values) if "num_layers" in values else None,
        work=Config({f.key or f.name: values[f.name] for f in _work_fields(task) if f.name in values}),
        precision=values.get("precision", ""),
        alternative_precisions=values.get("alternative_precisions", ()),
        hardware=Hardware(**hardware),
        framework=values.get("framework", ""),
        framework_version=values.get("framework_version", ""),
        knobs=knobs,
        recording=values.get("recording"),
        source=values.get("source", ""),
        licence=values.get("licence", ""),
        notes=tuple(str(p) for p in report.problems if p.inferred is None),
        inferred=report.inferred,
        configuration=read_configuration(data),
        template=read_template(data, fields),
    )


def _read_knobs(data: Mapping[str, Any], where: str) -> tuple[KnobDeclaration, ...]:
    entries = data.get("knobs")
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(
            f"{where}: knobs must be a list of `{{name: ..., choices: [...]}}`, not {one_line(repr(entries), 80)}"
        )
    return tuple(validate_mapping(KnobDeclaration, entry, f"{where}: knobs[{i}]") for i, entry in enumerate(entries))


def _card_name(path: Path) -> str:
    stem = path.stem
    return path.absolute().parent.name if stem in _GENERIC_STEMS and path.absolute().parent.name else stem


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        current = merged.get(key)
        if isinstance(current, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(current, value)
        elif value is not None:
            merged[key] = value
    return merged


def _apply_set(data: Mapping[str, Any], setting: str) -> dict[str, Any]:
    field, equals, text = setting.partition("=")
    field = field.strip()
    if not equals or not field or not text.strip():
        raise UserError(f"--set must be FIELD=VALUE (for example hidden_size=4096), not {one_line(setting, 80)!r}")
    settable = settable_fields(_fields_of(TASKS.find(read_task(data, "--set"))))
    if field not in settable:
        names = ", ".join(sorted(name for name in settable if "." not in name))
        guess = guess_name(field, settable)
        raise UserError(f"--set: a card has no field {one_line(field, 80)!r}{guess}; known: {names}")
    nested: Any = parse_yaml_value(text, f"--set {field}")
    for part in reversed(settable[field].split(".")):
        nested = {part: nested}
    return _merge(data, nested)
