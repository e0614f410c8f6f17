"""Load workload cards (CCL-Bench v1 YAML, with overlays); each inferred value names its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cclsearch.card.check import check_values
from cclsearch.card.fields import (
    BY_NAME,
    CHIP_FIELDS,
    COUNT_FIELDS,
    EXECUTORS,
    FIELDS,
    MISSING,
    MODEL_FIELDS,
    OTHER_WORK_FIELDS,
    CardField,
    FieldProblem,
    infer,
    look_up,
    read_fields,
    read_number,
    settable_fields,
)
from cclsearch.card.groups import Groups, fill_from_groups, read_groups
from cclsearch.card.infer import infer_phase, infer_values
from cclsearch.card.model import (
    Card,
    Hardware,
    Inferred,
    KnobDeclaration,
    Phase,
    StatedCard,
    StatedHardware,
    make_model,
)
from cclsearch.card.task import TASKS
from cclsearch.core.content import find_content
from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.values import Config, Value
from cclsearch.core.yaml_file import parse_yaml_value, read_yaml, validate_mapping

SUFFIXES = (".yaml", ".yml")
_HARDWARE_SECTION = "workload.hardware."
NEEDED_HARDWARE = ("accelerator", *COUNT_FIELDS)
"""Fields that a card may leave to a launcher profile."""
A_PROFILE = "a profile whose `hardware` has it (--launcher NAME)"
_GENERIC_STEMS = frozenset({"card", "workload", "workload_card"})


class UnknownFieldError(UserError):
    """A field that no card has, as `--set` names it."""

    def __init__(self, field: str, guess: str, known: str) -> None:
        super().__init__(f"--set: a card has no field {field!r}{guess}; known: {known}")
        self.field = field


@dataclass(frozen=True)
class GivenHardware:
    """Hardware for a card that does not state its own, and the name of its owner."""

    values: Mapping[str, Any]
    """Field of `Hardware` -> value."""
    source: str

    def fill(self, values: dict[str, Any]) -> Iterator[FieldProblem]:
        """Give a card the values that its file lacks; an accelerator's numbers only together with its name."""
        fields = COUNT_FIELDS if "accelerator" in values else (*CHIP_FIELDS, *COUNT_FIELDS)
        for name in fields:
            value = self.values.get(BY_NAME[name].target)
            if value is not None and name not in values:
                shown = next(iter(value.values())) if isinstance(value, Mapping) else value
                yield infer(values, name, shown, self.source)
                values[name] = dict(value) if isinstance(value, Mapping) else value


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
    stated: StatedCard | None = None
    """None if the card does not load: there is a blocking problem that is not `open`."""

    @property
    def card(self) -> Card | None:
        """The card if nothing is missing; None else."""
        return None if self.stated is None or self.open else Card(**dict(self.stated))

    @property
    def open(self) -> tuple[FieldProblem, ...]:
        """Hardware and numbers of the work that the card leaves open: a search must be given them."""
        paths = {field.path for field in self._may_be_open}
        return tuple(p for p in self.blocking if p.field in paths and p.message.startswith(MISSING))

    @property
    def _may_be_open(self) -> tuple[CardField, ...]:
        return (*(BY_NAME[name] for name in NEEDED_HARDWARE), *_work_fields(TASKS.find(self.task)))

    def say_open(self) -> str:
        """One line with the fields that the card leaves open and where each comes from; empty if it is complete."""
        if not self.open:
            return ""
        paths = {problem.field for problem in self.open}
        names = [field.name for field in self._may_be_open if field.path in paths]
        hardware = [name for name in names if name in NEEDED_HARDWARE]
        work = [name for name in names if name not in hardware]
        what = ["hardware" if len(hardware) == len(NEEDED_HARDWARE) else ", ".join(hardware)] if hardware else []
        profile = f", or for the hardware {A_PROFILE}" if hardware else ""
        return f"states no {' and no '.join([*what, *work])}: give {_list_remedies(self.open)}{profile}"

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


def load_card(
    name: str, overlays: Sequence[str] = (), sets: Sequence[str] = (), given: GivenHardware | None = None
) -> Card:
    """The card of that name or path, with the cards in `overlays` and then the `FIELD=VALUE` settings applied.

    `given` has hardware for a card that states none. Raises UserError that names the file, every missing or invalid
    field, and the settings that would fix them.
    """
    report = inspect_card(name, overlays, sets, given)
    return require_card(report, takes_profile=given is not None)


def inspect_card(
    name: str | None, overlays: Sequence[str] = (), sets: Sequence[str] = (), given: GivenHardware | None = None
) -> CardReport:
    """As `load_card`, but returns the valid fields and the problems of the others instead of raising.

    Without a name, only the overlays and settings give fields. `given` has hardware for a card without.
    """
    path = find_content("workloads", name, *SUFFIXES) if name is not None else Path("--set")
    data: Mapping[str, Any] = read_yaml(path) if name is not None else {"workload": {}}
    for overlay in overlays:
        data = _merge(data, read_yaml(find_content("workloads", overlay, *SUFFIXES)))
    for setting in sets:
        data = _apply_set(data, setting)
    folder = path.absolute().parent.name  # a file `card.yaml` is named by its folder
    return inspect_mapping(data, folder if folder and path.stem in _GENERIC_STEMS else path.stem, str(path), given)


def card_from_mapping(data: Mapping[str, Any], name: str) -> Card:
    """The card in an already read mapping; raises UserError as `load_card` does."""
    return require_card(inspect_mapping(data, name, name))


def inspect_mapping(data: Mapping[str, Any], name: str, where: str, given: GivenHardware | None = None) -> CardReport:
    """The report of an already read mapping, named `where` in messages; UserError if it is not a card at all."""
    if not isinstance(data.get("workload"), Mapping):
        raise UserError(
            f"{where!r} is not a workload card: it must have a `workload` section with model, data and hardware"
        )
    task_name = read_task(data, where)
    task = TASKS.find(task_name)
    fields = _fields_of(task)
    values, problems = read_fields(data, fields)
    groups = _read_groups(data, values, where)
    filled = list(given.fill(values)) if given is not None and not groups else []
    inferred = [*filter(None, [infer_phase(data)]), *infer_values(values, data)]
    values |= {note.inferred.field: note.inferred.value for note in inferred if note.inferred is not None}
    found = {BY_NAME[name].path for name in values if name in BY_NAME}
    problems = [p for p in problems if p.field not in found or not p.message.startswith(MISSING)]
    problems += [*filled, *inferred, *check_values(values, data)]
    knobs = _read_knobs(data, where)
    report = CardReport(name, where, task_name, values, tuple(problems))
    if len(report.blocking) > len(report.open):
        return report
    return replace(report, stated=_make_card(report, task, knobs, groups, data))


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
    """The fields of a card of that task; the model's fields are optional if the task needs no model."""
    if task is None or task.needs_model:
        return (*FIELDS, *_work_fields(task))
    fields = (replace(f, required=f.required and f.name not in MODEL_FIELDS) for f in FIELDS)
    return (*fields, *_work_fields(task))


def require_card(report: CardReport, *, takes_profile: bool = False) -> Card:
    """The report's card; raises UserError that names every missing or invalid field if it has none."""
    if (card := report.card) is not None:
        return card
    wrong = "; ".join(_gather_missing(report.blocking))
    remedies = _list_remedies(report.blocking)
    profile = takes_profile and any(problem.field.startswith(_HARDWARE_SECTION) for problem in report.open)
    second = f"{A_PROFILE}, or a second card with --overlay" if profile else "add a second card with --overlay"
    fix = f": give {remedies}, or {second}" if remedies else ""
    raise UserError(f"{report.where}: {wrong}{fix}")


def _list_remedies(problems: Sequence[FieldProblem]) -> str:
    return " ".join(dict.fromkeys(problem.remedy for problem in problems if problem.remedy))


def require_stated(report: CardReport) -> StatedCard:
    """The report's card, which may lack hardware; raises UserError as `require_card` if anything else is wrong."""
    return report.stated or require_card(report)


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


_SAME = (
    "phase",
    "alternative_precisions",
    "max_loss_deviation",
    "weight_block",
    "framework",
    "framework_version",
    "precision",
    "recording",
    "source",
    "licence",
)
"""Fields that a card has under the name that they have in its file."""


def _make_card(
    report: CardReport, task: Any, knobs: tuple[KnobDeclaration, ...], groups: Groups, data: Mapping[str, Any]
) -> StatedCard:
    values, fields = report.values, _fields_of(task)
    stated = StatedHardware.model_fields
    hardware = {f.target: values[f.name] for f in FIELDS if f.target in stated and f.name in values}
    hardware |= {"groups": groups} if groups else {}
    family = values.get("model_family", "")
    return StatedCard(
        name=report.name,
        title=values.get("description", family or report.task),
        task=report.task,
        family=family,
        model=make_model(values) if "num_layers" in values else None,
        work=Config({f.target: values[f.name] for f in _work_fields(task) if f.name in values}),
        hardware=StatedHardware(**hardware) if report.open else Hardware(**hardware),
        knobs=knobs,
        notes=tuple(str(p) for p in report.problems if p.inferred is None and not p.blocking),
        inferred=report.inferred,
        configuration=read_configuration(data),
        template=read_template(data, fields),
        **{"precision": "", "framework": "", **{name: values[name] for name in _SAME if name in values}},
    )


def _read_groups(data: Mapping[str, Any], values: dict[str, Any], where: str) -> Groups:
    """The groups of unlike hardware; the fields of `values` that follow from them are set."""
    groups = read_groups(look_up(data, "workload.hardware.groups"), where)
    if groups:
        names = {field.target: field.name for field in FIELDS}
        stated = {target: values[name] for target, name in names.items() if name in values}
        values |= {names[target]: value for target, value in fill_from_groups(groups, stated, where).items()}
    return groups


def _read_knobs(data: Mapping[str, Any], where: str) -> tuple[KnobDeclaration, ...]:
    entries = data.get("knobs")
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(
            f"{where}: knobs must be a list of `{{name: ..., choices: [...]}}`, not {one_line(repr(entries), 80)}"
        )
    return tuple(validate_mapping(KnobDeclaration, entry, f"{where}: knobs[{i}]") for i, entry in enumerate(entries))


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
        raise UnknownFieldError(one_line(field, 80), guess_name(field, settable), names)
    nested: Any = parse_yaml_value(text, f"--set {field}")
    for part in reversed(settable[field].split(".")):
        nested = {part: nested}
    return _merge(data, nested)


PLAN = "model_plan_parallelization"
_KEPT = ("version", "hf_url", "trace_url", "contributor", "contact", "workload", *EXECUTORS, "metric_source")
"""Sections of the template; other sections (the runs of an agent, sources, knobs) are not."""
_MAX_FIELDS, _MAX_TEXT = 200, 500
_KNOBS = {"pp_mb": "micro_batch_size", "micro_batch": "micro_batch_size"}
_PLAN_FIELDS = ("tp", "dp", "pp", "ep", "cp", "dp_replicate", "dp_shard", "pp_mb", "micro_batch", "micro_batch_size")


def read_template(data: Mapping[str, Any], fields: tuple[CardField, ...]) -> Config:
    """Dotted path -> value of every other field of the template, secrets masked; at most 200 of them."""
    read = {path for field in fields for path in field.paths if field.name != "source"}
    kept: dict[str, Value] = {}
    for section in _KEPT:
        for path, value in _flatten(section, data.get(section)):
            if path not in read and f".{PLAN}." not in path and len(kept) < _MAX_FIELDS:
                kept[path] = value
    return Config(kept)


def read_configuration(data: Mapping[str, Any]) -> Config:
    """The parallel plan of the card: degrees that it states as whole numbers above 0; `dp` is replicas x shards."""
    plan = next((found for root in EXECUTORS if isinstance(found := look_up(data, f"{root}.{PLAN}"), Mapping)), {})
    stated: dict[str, Value] = {}
    for name in _PLAN_FIELDS:
        number = read_number(plan.get(name))
        if number is not None and number.is_integer() and number < 1e6:
            stated.setdefault(_KNOBS.get(name, name), int(number))
    shards = [int(stated[name]) for name in ("dp_replicate", "dp_shard") if name in stated]
    if "dp" not in stated and shards:
        stated = {"dp": math.prod(shards), **stated}
    return Config(stated)


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flatten(f"{path}.{one_line(str(name), 80)}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value[:50]):
            yield from _flatten(f"{path}.{index}", item)
    elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        yield path, value
    elif isinstance(value, str) and value.strip():
        name = path.rpartition(".")[2]
        yield path, one_line(redact(f"{name}={value}").removeprefix(f"{name}="), _MAX_TEXT)
