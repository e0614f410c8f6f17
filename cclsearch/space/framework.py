"""Frameworks: `launchers/<name>.framework.yaml` declares the run script, its knobs and the rules of its space."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from cclsearch.card.model import FEATURES, PRECISION, Card
from cclsearch.card.task import TASKS, list_declared
from cclsearch.core.content import content_roots, find_content, list_frameworks
from cclsearch.core.errors import UserError
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.trust import require_trust
from cclsearch.core.values import Config, Model, Value, format_knob_value
from cclsearch.core.yaml_file import read_yaml, validate_mapping
from cclsearch.space import degree_rules  # noqa: F401  importing registers its rules
from cclsearch.space.built import fit_model
from cclsearch.space.framework_knob import FrameworkKnob
from cclsearch.space.inert import InertWhen
from cclsearch.space.knobs import canonical_name, meaning_of
from cclsearch.space.numbers import LIMITS, check_number
from cclsearch.space.promises import Behaviour, LossBounds, RequiredVariable
from cclsearch.space.rule import PARAMETERS, RULES, Rule, find_inert, make_effect_rules
from cclsearch.space.table import Knob
from cclsearch.space.variables import load_catalogue, variable_text

SUFFIX = ".framework.yaml"
FOLDER = "launchers"


class Framework(Model):
    """A framework as declared in its file."""

    name: str
    title: str = ""
    aliases: tuple[str, ...] = ()
    """Other names that cards use for it."""
    script: str | None = None
    """Run script in the same folder (`cpu.py`); None if there is none: then only recordings can be searched."""
    runner: Literal["torchrun", "process"] = "torchrun"
    """Start of ranks: one process per rank under torchrun, or one process per host that drives all its devices."""
    forks_ranks: bool = False
    """Whether the script, when started without a rank, starts the ranks of one node itself."""
    shows_launch: bool = False
    """Whether the script answers `--show-launch`: it prints how the framework alone runs a configuration."""
    cpu_only: bool = False
    """Whether the script uses CPUs even on machines with other accelerators."""
    package: str | None = None
    """The Python package that the script needs, for checks."""
    use_fewer: bool | Literal["cpu"] = False
    """Whether configurations that leave accelerators idle are in the space by default; `cpu`: only on CPUs."""
    knobs: tuple[FrameworkKnob, ...]
    optional_knobs: tuple[FrameworkKnob, ...] = ()
    """Knobs that a space has only if a card, a profile, the user or a growth names them. A configuration without the
    knob has its first choice.
    """
    no_knobs: dict[str, str] = {}
    """Knobs of other frameworks that this one cannot have -> the reason and the alternative, one line each."""
    libraries: tuple[str, ...] = ()
    """Libraries of its processes whose variables a search may open: names in `variables.yaml`."""
    builds: tuple[str, ...] = ()
    """Features of models (`FEATURES` of the card) that its run script builds, also with one value
    (`router_balance=bias`) or for one kind of models (`sliding_window:dense`, `:experts`); what is not listed is left
    out of the model that trials train, and said."""
    cannot: dict[str, str] = {}
    """Model features that its run script cannot build (names of `LIMITS`) -> the remedy, one line each."""
    precisions: tuple[str, ...] = ()
    """Precisions that its run script supports; empty means any."""
    precision_chips: dict[str, tuple[str, ...]] = {}
    """Precision -> the accelerators that compute it, by the start of their names; any if it is not named."""
    precision_options: dict[str, str] = {}
    """Precision -> words that it adds to the framework's options, such as those of an FP8 recipe."""
    records: tuple[str, ...] = ()
    """Optional fields of `result.json` that its run script writes."""
    caps_power: bool = False
    """Whether its run script sets `power_cap_w` and `gpu_clock_mhz` before a trial and restores them after it."""
    same_losses: LossBounds = LossBounds()
    """Bound on the difference of losses between its configurations; without one, deviations are shown but refuse
    nothing.
    """
    same_answers: LossBounds = LossBounds()
    """Share of answers that may differ between configurations; without a bound, only first tokens count."""
    opens_window: bool = False
    """Whether its run script asks for a nonce when its timed window opens, which chooses the data of the window."""
    behaviour: Behaviour = Behaviour()
    """Behaviour in training that no knob decides."""
    needs: tuple[RequiredVariable, ...] = ()
    rules: tuple[str | dict[str, Any], ...] = ()
    """Names of rules, or `{rule: NAME, source: ..., ...parameters}`, in addition to those of the card's task; an entry
    for a rule of the task gives it parameters and a source."""
    tasks: tuple[str, ...] = ()
    """The tasks that the run script does; any if it is empty."""
    source: str = ""
    """Source of the rules: documentation and version."""
    path: Path | None = None
    """File of the framework."""
    read_from: Path | None = None
    """That file after links were followed, once, when it was read."""

    @model_validator(mode="after")
    def _has_knobs(self) -> Framework:
        if self.script is not None and not self.knobs:
            raise ValueError("knobs: must not be empty")
        return self

    @field_validator("cannot")
    @classmethod
    def _check_cannot(cls, cannot: dict[str, str]) -> dict[str, str]:
        _refuse_unknown("there is no limit", cannot, LIMITS)
        if not all(way.strip() for way in cannot.values()):
            raise ValueError("each limit needs one line that says what to do")
        return cannot

    @field_validator("builds")
    @classmethod
    def _check_builds(cls, builds: tuple[str, ...]) -> tuple[str, ...]:
        _refuse_unknown("there is no feature", [re.split("[=:]", name)[0] for name in builds], {*FEATURES, "lora_rank"})
        return builds

    @field_validator("libraries")
    @classmethod
    def _check_libraries(cls, libraries: tuple[str, ...]) -> tuple[str, ...]:
        _refuse_unknown("there is no library", libraries, load_catalogue().libraries)
        return libraries

    @field_validator("records")
    @classmethod
    def _check_records(cls, records: tuple[str, ...]) -> tuple[str, ...]:
        known = list_declared(records, lambda task: (metric.needs for metric in task.metrics)) - {""}
        _refuse_unknown("no metric needs", records, sorted(known))
        return records

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, rules: tuple[str | dict[str, Any], ...]) -> Any:
        for entry in rules:
            _check_rule(entry)
        return rules

    @property
    def all_knobs(self) -> tuple[FrameworkKnob, ...]:
        """Every knob that the file declares."""
        return (*self.knobs, *self.optional_knobs)

    @property
    def script_path(self) -> Path:
        """Path of the run script; raises UserError if the framework has none."""
        folder = self.path.parent if self.path is not None else Path()
        if self.script is None or not (folder / self.script).is_file():
            what = f"its run script {self.script!r} is missing" if self.script else "it has no run script"
            raise UserError(f"framework {self.name!r} cannot run here: {what}; only recordings of it can be searched")
        return self.require_trust() or folder / self.script

    def require_trust(self) -> Path | None:
        """The real path of its run script, or None without a file.

        Raises UserError unless the script, and the file that defines the script's input, may run.
        """
        if self.path is None or self.script is None:
            return None
        script = require_trust(self.path.parent / self.script, "a run script")
        if require_trust(self.path, "a framework file") != (self.read_from or self.path.resolve()):
            raise UserError(f"{str(self.path)!r} was replaced since it was read: run the command again")
        return script

    def require_buildable(self, card: Card) -> None:
        """Raises UserError that names the card's field if the run script cannot do its task or build its model."""
        if self.tasks and card.task not in self.tasks:
            raise UserError(
                f"{card.name} cannot run under {self.name}: its task is {card.task}, and the run script does"
                f" {', '.join(self.tasks)}: choose another with --framework"
            )
        for name, way in self.cannot.items() if card.model else ():
            value = LIMITS[name].read(card.arch)
            if value is not None:
                raise UserError(
                    f"{card.name} cannot run under {self.name}: its run script cannot build"
                    f" {LIMITS[name].field} {value} ({name}): {one_line(way, 200)}"
                )
        unsupported = [precision for precision in card.precisions if precision not in self.precisions]
        if self.precisions and unsupported:
            field = "precision" if card.precision in unsupported else "alternative_precisions"
            raise UserError(
                f"{card.name} cannot run under {self.name}: workload.model.{field} must be one of"
                f" {', '.join(self.precisions)}, not {unsupported[0]!r}: choose another with --framework or --set"
            )

        chip = card.hardware.chip.name
        for precision in card.precisions:
            if not chip.startswith(chips := self.precision_chips.get(precision, ("",))):
                raise UserError(f"{card.name}: {self.name} computes {precision} on {', '.join(chips)}, not on {chip}")

    def can_run(self, card: Card) -> bool:
        """Whether its run script builds the card's model, on accelerators such as the card's."""
        try:
            self.require_buildable(card)
        except UserError:
            return False
        kind = card.hardware.chip.kind
        needs_other = (self.cpu_only and kind != "cpu") or (kind == "tpu" and "torch_cuda" in self.libraries)
        return self.script is not None and not needs_other

    def find_optional(self, name: str) -> FrameworkKnob | None:
        """The knob of that name that is not in every space."""
        optional = (*self.optional_knobs, *(knob for knob in self.knobs if knob.if_at_least))
        return next((knob for knob in optional if knob.name == name), None)

    def list_optional(self, card: Card) -> list[FrameworkKnob]:
        """The knobs that spaces of this card have only if a card, a profile or the user names them."""
        conditional = [knob for knob in self.knobs if knob.if_at_least and not knob.is_offered(card)]
        return [knob for knob in (*conditional, *self.optional_knobs) if knob.suits(card)]

    @property
    def levers(self) -> tuple[FrameworkKnob, ...]:
        """The knobs that a search opens by itself near its best layouts."""
        return tuple(knob for knob in self.all_knobs if knob.lever)

    def list_options(self, card: Card, config: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the words that precision and knobs add to the framework's own options, for the card of a trial."""
        texts = [self.precision_options.get(card.precision, "")]
        for knob in (knob for knob in self.all_knobs if knob.adds and knob.suits(card)):
            value = self._find_value(knob, {PRECISION: card.precision, **config})
            texts.append(knob.adds.get(value, knob.adds.get("*", "") if value else "").replace("{value}", value))
        return tuple(" ".join(texts).split())

    def undo_numerics(self, card: Card, config: Mapping[str, Value]) -> Config:
        """Return the configuration with the card's own numbers: its precision, and first choices of such knobs."""
        firsts = {PRECISION: card.precision, **{knob.name: knob.first for knob in self.all_knobs if knob.numerics}}
        return Config({name: firsts.get(name, value) for name, value in config.items()})

    def _find_value(self, knob: FrameworkKnob, config: Mapping[str, Value]) -> str:
        """Return the text of a knob's value in a configuration; empty where it has no effect."""
        given = {**{lever.name: lever.first for lever in self.levers}, **config}
        has_effect = all(given.get(other, meaning_of(other).neutral) in values for other, values in knob.where.items())
        return format_knob_value(config.get(knob.name, knob.first)) if has_effect else ""

    def _where_rules(self, knobs: Sequence[Knob]) -> list[dict[str, Any]]:
        """Return the rules `implies` that leave a knob one value where it has no effect."""
        choices, rules = {knob.name: knob.choices for knob in knobs}, []
        for knob in (knob for knob in self.all_knobs if knob.name in choices):
            keep = knob.first if knob.first in choices[knob.name] else choices[knob.name][0]
            for other, values in knob.where.items():
                when, then = {other: [v for v in choices.get(other, ()) if v not in values]}, {knob.name: keep}
                name = f"{knob.name}_where_{other}"
                rules += [{"rule": "implies", "name": name, "same": True, "when": when, "then": then}] * bool(
                    when[other]
                )
        return rules

    def knob_environment(self, config: Mapping[str, Value]) -> dict[str, str]:
        """Environment variables set by knobs with an `env`, and by opened variables of the framework's libraries.

        A knob at `default` does not set its variable.
        """
        written: dict[str, list[str]] = {}
        for knob in self.all_knobs:
            is_set = knob.env is not None and (knob.lever or knob.name in config)
            value = self._find_value(knob, config) if is_set else "default"
            if knob.env and value not in ("", "default"):
                written.setdefault(knob.env, []).append(knob.writes.get(value, value))
        declared = {knob.name for knob in self.all_knobs}
        for name, chosen in config.items():
            opened = None if name in declared else variable_text(name, chosen, self.libraries)
            if opened is not None:
                written.setdefault(opened[0], []).append(opened[1])
        return {name: " ".join(texts) for name, texts in written.items()}

    def find_inert(self, knob: str, knobs: Sequence[Knob] = ()) -> tuple[InertWhen, ...]:
        """Return the conditions under which this knob of a space changes nothing: rules `implies` with `same: true`."""
        return find_inert((*self.rules, *self._where_rules(knobs)), knob)

    def make_rules(self, card: Card, knobs: Sequence[Knob], *, use_fewer: bool) -> tuple[Rule, ...]:
        """The rules for that card and a space of these knobs, those of the card's task first.

        Rules that do not apply to the card, or need a knob that the space does not have, are left out. The last rules
        leave out values of knobs that change nothing.
        """
        present = {knob.name for knob in knobs}
        fewer = card.hardware.chip.kind == "cpu" if self.use_fewer == "cpu" else self.use_fewer
        common = {"use_fewer": use_fewer or fewer, "knobs": present}
        own = [
            {"rule": entry} if isinstance(entry, str) else entry for entry in (*self.rules, *self._where_rules(knobs))
        ]
        of_task = {name: {"rule": name} for name in TASKS.get(card.task).rules}
        of_task |= {entry["rule"]: entry for entry in own if entry["rule"] in of_task}
        entries = [*of_task.values(), *(entry for entry in own if entry["rule"] not in of_task)]
        made = [RULES[e["rule"]](card, {**common, **e}) for e in entries]
        applied = [rule for rule in made if rule is not None and present.issuperset(rule.needs)]
        applied += [
            _need_experts(knob.name) for knob in self.all_knobs if knob.name in present and not knob.suits(card)
        ]
        return (*applied, *make_effect_rules({knob.name: knob.choices for knob in knobs}))


def _need_experts(knob: str) -> Rule:
    """Return the rule of a knob of experts, which a user named, for a model without them."""
    neutral = meaning_of(knob).neutral
    summary = f"{knob} is {format_knob_value(neutral)}: the model has no experts"
    return Rule(
        f"{knob}_needs_experts", (knob,), summary, lambda at: at.equals(knob, (neutral,)), lambda c: f"{knob} {c[knob]}"
    )


def choose_framework(card: Card, chosen: str | None = None) -> tuple[Card, Framework]:
    """Return the chosen framework, else the card's, and the card, which then names it.

    Raises UserError, which lists the frameworks that can run the card, if the name is unknown.
    """
    found = find_framework(card.framework)
    if chosen is not None and (asked := load_framework(chosen)) != found:
        card, found = card.model_copy(update={"framework": asked.name, "framework_version": ""}), asked
    if found is not None:
        return fit_model(card, found.name, found.builds), found
    able = [framework.name for framework in _read_all() if framework.can_run(card)]
    named = (
        f"the framework {one_line(card.framework, 60)!r}, for which there is no run script" if card.framework else ""
    )
    choose = f"choose one that can run it with --framework ({', '.join(able)}), or " if able else ""
    raise UserError(f"{card.name} names {named or 'no framework'}: {choose}describe yours in {FOLDER}/NAME{SUFFIX}")


def load_framework(name: str) -> Framework:
    """The framework of that name or alias (case and underscores ignored); UserError lists the known names otherwise."""
    framework = find_framework(name)
    if framework is None:
        raise UserError(
            f"there is no framework {one_line(name, 60)!r}{guess_name(name, list_frameworks())}; known:"
            f" {', '.join(list_frameworks())}"
            f" (choose one with --framework, or describe yours in {FOLDER}/NAME{SUFFIX})"
        )
    return framework


def find_framework(name: str) -> Framework | None:
    """The framework of that name or alias (case and underscores ignored), if it is known."""
    wanted = _normalize(name)
    named = next((candidate for candidate in list_frameworks() if _normalize(candidate) == wanted), None)
    if named is not None:
        return _read(named)
    return next((each for each in _read_all() if wanted in map(_normalize, each.aliases)), None)


def find_behaviour(name: str) -> Behaviour:
    """Return the framework's behaviour in training that no knob decides; all fields unknown for an unknown name."""
    framework = _find_known(name, tuple(content_roots()))
    return framework.behaviour if framework is not None else Behaviour()


def has_knob(name: str, meaning: str) -> bool:
    """Whether the framework has a knob of that meaning. If a space leaves it out, the run script takes the neutral
    choice.
    """
    framework = _find_known(name, tuple(content_roots()))
    return framework is not None and any(canonical_name(knob.name) == meaning for knob in framework.all_knobs)


def find_levers(name: str) -> dict[str, FrameworkKnob]:
    """Return the levers of a framework by name; none for an unknown one."""
    framework = _find_known(name, tuple(content_roots()))
    return {} if framework is None else {lever.name: lever for lever in framework.levers}


@lru_cache(maxsize=64)
def _find_known(name: str, roots: tuple[Path, ...]) -> Framework | None:
    """The framework in these content folders, if it can be read: predictions ask for it often, and files are slow."""
    with contextlib.suppress(UserError):
        return find_framework(name) if name else None
    return None


def _read_all() -> Iterator[Framework]:
    """The frameworks that can be read: a broken file of another one harms only those that name it."""
    for name in list_frameworks():
        with contextlib.suppress(UserError):
            yield _read(name)


def _read(name: str) -> Framework:
    path = find_content(FOLDER, name, SUFFIX)
    real = path.resolve()
    return validate_mapping(Framework, {**read_yaml(real), "name": name, "path": path, "read_from": real}, str(path))


def _refuse_unknown(start: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError that begins with `start` if a name is not known."""
    if unknown := sorted(set(names).difference(known)):
        raise ValueError(f"{start} {', '.join(map(repr, unknown))}; known: {', '.join(known)}")


def _normalize(name: str) -> str:
    return re.sub(r"[\s_/]+", "-", name.strip().lower())


def _check_rule(entry: str | dict[str, Any]) -> None:
    name = entry if isinstance(entry, str) else entry.get("rule")
    if name not in RULES:
        TASKS.entries()  # a task registers its rules when it is imported
    if name not in RULES:
        known = ", ".join(sorted(RULES))
        raise ValueError(f"there is no rule {name!r} (docs/rules.md describes every rule); known: {known}")
    entry = {"rule": name} if isinstance(entry, str) else entry
    types = {"rule": str, "source": str, **PARAMETERS[str(name)]}
    for key, value in entry.items():
        if key not in types:
            raise ValueError(f"rule {name!r} has no parameter {key}; known: {', '.join(list(types)[1:])}")
        if type(value) is not types[key]:
            raise ValueError(f"parameter {key} of rule {name!r} must be {TYPE_WORDS[types[key]]}, not {value!r}")
    if name in _NEEDED and not all(entry.get(key) for key in _NEEDED[name][0]):
        raise ValueError(f"rule {name!r} needs {_NEEDED[name][1]}")
    if name == "divides":
        check_number(entry["number"])


_NEEDED = {
    "implies": (("name", "when", "then"), "`name`, `when: {knob: value}` and `then: {knob: value}`"),
    "divides": (("name", "knobs", "number"), "`name`, `knobs: [knob, ...]` and `number`"),
}
"""Rule -> its parameters that a framework file must give, and how."""


TYPE_WORDS = {
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a mapping of knobs to values",
}
