"""Answers of `ccl-search space`: the search space of a workload, and the rule that rejects a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.text import count_of, plain
from cclsearch.core.values import Value, format_config, format_knob_value
from cclsearch.plan.subject import RECORDED, Subject
from cclsearch.plan.warm_start import Learned, learn_about
from cclsearch.propose.bayes.prediction import predict_posterior
from cclsearch.report.figures import show_interval
from cclsearch.report.launch_form import LaunchForm, make_launch
from cclsearch.space.build import RuleVerdict, resolve_knobs
from cclsearch.space.framework_knob import FrameworkKnob
from cclsearch.space.knobs import meaning_of
from cclsearch.space.parse import parse_assignments
from cclsearch.space.rule import KIND_WORDS, Rule
from cclsearch.space.table import Knob, Space


@dataclass(frozen=True)
class SpaceListing:
    """A search space with its rules, and the knobs of the framework that it does not have."""

    subject: Subject
    space: Space
    rules: Sequence[Rule]
    optional: Sequence[FrameworkKnob]

    def as_data(self, *, num_rows: int = 0) -> dict[str, Any]:
        """Return the output of `--json`."""
        card, space = self.subject.card, self.space
        return {
            "workload": card.name,
            "framework": self.subject.framework_name,
            "legal": len(space),
            "raw": space.num_raw,
            "knobs": [{"name": k.name, "choices": k.choices, "description": k.description} for k in space.knobs],
            "optional_knobs": [
                {"name": k.name, "choices": k.resolve(card).choices, "description": k.description}
                for k in self.optional
            ],
            "rules": [{"name": r.name, "summary": r.summary, "kind": r.kind, "source": r.source} for r in self.rules],
            "rows": [dict(space.config(row)) for row in range(min(num_rows, len(space)))],
            "inferred": [each.model_dump(mode="json") for each in card.inferred],
            "stated": dict(card.configuration),
        }

    def as_lines(self, *, num_rows: int = 0, with_sources: bool = False, replays: bool = False) -> list[str]:
        """Return the listing for a terminal; `replays` says that a search would replay the card's recording."""
        subject, card, space = self.subject, self.subject.card, self.space
        if subject.recording is not None:
            size = f"({subject.framework_name}): {len(space)} measured configurations, its search space"
        else:
            size = f"under {subject.framework_name}: {len(space)} configurations of {space.num_raw} combinations"
        lines = [f"{subject.title} {size}"]
        if card.recording is not None and replays:
            lines.append(
                f"(without a launcher, `run` replays the recording {card.recording}; its rows are the search space)"
            )
        lines += [f"note: {note}" for note in subject.notes]
        lines += [*_describe_stated(card, space), "", "knobs"]
        for knob in space.knobs:
            separator = " < " if knob.ordered_choices and not knob.is_numeric else ", "
            choices = separator.join(map(format_knob_value, knob.ordered_choices or knob.choices))
            lines.append(f"  {knob.name:<26}{choices} {meaning_of(knob.name).unit}".rstrip())
        lines += [*_describe_optional(card, self.optional), *_describe_rules(self.rules, with_sources=with_sources)]
        rows = [f"  {space.config(row)}" for row in range(min(num_rows, len(space)))]
        return [*lines, "", "configurations", *rows] if rows else lines


def list_space(subject: Subject) -> SpaceListing:
    """Return the search space of the subject; raises UserError if it is empty."""
    space, card, framework = subject.build_space(), subject.card, subject.framework
    rules = framework.make_rules(card, space.knobs, use_fewer=subject.use_fewer) if framework is not None else ()
    given = {knob.name for knob in space.knobs}
    listed = framework.list_optional(card) if framework is not None else ()
    return SpaceListing(subject, space, rules, [knob for knob in listed if knob.name not in given])


def _describe_stated(card: Card, space: Space) -> list[str]:
    """Say how many configurations have the parallel plan that the card's file states, if it states one."""
    known = {name: value for name, value in card.configuration.items() if space.has(name)}
    if not known:
        return []
    others = {name: value for name, value in card.configuration.items() if name not in known and value != 1}
    beside = f" (this space has no knob for {format_config(others)})" if others else ""
    number = count_of(int(space.matching(known).sum()), "configuration")
    return [f"the plan in the card's file is {format_config(known)}{beside}: {number} of the search space"]


def _describe_optional(card: Card, optional: Sequence[FrameworkKnob]) -> list[str]:
    """List the knobs that this space does not have, as arguments that add them."""
    lines = ["", "further knobs of the framework, with the argument that adds each"] if optional else []
    for knob in optional:
        choices = ",".join(map(format_knob_value, knob.resolve(card).choices))
        lines.append(f"  --knob {knob.name + '=' + choices:<52}{knob.description or meaning_of(knob.name).words}")
    return lines


def _describe_rules(rules: Sequence[Rule], *, with_sources: bool) -> list[str]:
    lines = ["", "rules" if rules else "rules: none"]
    for rule in rules:
        lines.append(f"  {rule.name:<36}{rule.summary}")
        if with_sources:
            lines.append(f"  {'':<36}{KIND_WORDS[rule.kind]}{': ' if rule.source else ''}{rule.source}")
    if rules and not with_sources:
        lines.append("(`--rules` shows where the framework refuses what violates a rule)")
    return lines


@dataclass(frozen=True)
class ConfigAnswer:
    """Verdicts of the rules on one configuration, complete or partial, and the prediction for it."""

    subject: Subject
    config: Mapping[str, Value]
    verdicts: tuple[RuleVerdict, ...]
    num_completions: int
    """Configurations of the search space that have these values."""
    is_complete: bool
    prediction: Mapping[str, Any] | None
    launch: LaunchForm | None
    why_empty: str
    """Reason why the search space is empty; "" if it is not."""

    @property
    def is_legal(self) -> bool:
        """Whether the search space has it, or a completion of it."""
        return self.num_completions > 0 and not any(verdict.ok is False for verdict in self.verdicts)

    def as_data(self) -> dict[str, Any]:
        """Return the output of `--json`."""
        answer = {
            "workload": self.subject.card.name,
            "framework": self.subject.framework_name,
            "config": self.config,
            "legal": self.is_legal,
            "verdicts": [verdict.model_dump() for verdict in self.verdicts],
            "completions": self.num_completions,
            "prediction": self.prediction,
            "note": self.why_empty,
        }
        return answer | ({"launch": self.launch.model_dump(mode="json")} if self.launch is not None else {})

    def as_lines(self) -> list[str]:
        """Return the verdicts, the prediction and the launch for a terminal."""
        lines = [format_config(self.config)]
        for verdict in self.verdicts:
            mark = {True: "ok", False: "NO", None: "? "}[verdict.ok]
            lines.append(f"  {mark}  {verdict.rule:<36}{verdict.detail}")
            if verdict.ok is False:
                lines.append(f"      {'':<36}required: {verdict.summary}")
                if verdict.rule not in ("choices", RECORDED):
                    source = f"{': ' if verdict.source else ''}{verdict.source}"
                    lines.append(f"      {'':<36}{KIND_WORDS[verdict.kind]}{source}")
        lines.append(self._describe_standing())
        lines += [self.why_empty] if self.why_empty else []
        lines += _describe_prediction(self.prediction, self.subject.card) if self.prediction is not None else []
        return [*lines, "", plain(self.launch.as_shell())] if self.launch is not None else lines

    def _describe_standing(self) -> str:
        rejected = [verdict.rule for verdict in self.verdicts if verdict.ok is False]
        if rejected:
            return f"not in the search space: violates rule{'s' if len(rejected) > 1 else ''} {', '.join(rejected)}"
        if self.is_complete:
            return "in the search space"
        if self.num_completions:
            return f"{self.num_completions} configurations of the search space match"
        return "not in the search space for any values of the other knobs"


def answer_config(
    subject: Subject,
    assignments: str,
    *,
    with_launch: bool = False,
    sources: Sequence[str] = (),
    runs: Path | None = None,
) -> ConfigAnswer:
    """Return the rules' verdicts on `tp=2,dp=8`; values that follow from these are filled in."""
    knobs: Sequence[Knob] = subject.recording.space.knobs if subject.recording is not None else ()
    if subject.framework is not None:
        knobs = resolve_knobs(subject.card, subject.framework, subject.knobs, subject.use_fewer)
    config = parse_assignments(assignments, knobs)
    config |= {knob.name: knob.choices[0] for knob in knobs if len(knob.choices) == 1 and knob.name not in config}
    space, why_empty, num_completions = None, "", 0
    try:
        space = subject.build_space()
    except UserError as error:
        why_empty = str(error)
    if space is not None:
        num_completions = int(space.matching(config).sum())
        if num_completions == 1:
            config = dict(space.config(int(space.matching(config).argmax())))
    verdicts = subject.explain(config)
    missing = [knob.name for knob in knobs if knob.name not in config]
    is_known = space is not None and not missing
    prediction = _predict(learn_about(subject, space, sources, runs), config) if is_known else None  # type: ignore[arg-type]
    if with_launch and missing:
        raise UserError(f"--launch needs a value of every knob; --config lacks {', '.join(missing)}")
    answer = ConfigAnswer(subject, config, verdicts, num_completions, not missing, prediction, None, why_empty)
    if not with_launch or not answer.is_legal:
        return answer
    return replace(answer, launch=make_launch(subject.card, subject.framework_name, config))


def _predict(learned: Learned, config: Mapping[str, Value]) -> dict[str, Any] | None:
    """The prediction by all that earlier trials teach; None if it is not in the space, or if there is none."""
    row = learned.view.space.row(config)
    found = None if row is None else predict_posterior(learned.view, np.array([row]))
    if row is None or found is None:
        return None
    parts = {name: float(part[row]) for name, part in found[0].memory_parts_gib.items()}
    figures = {name: value for name, value in found[0].describe(row).items() if name != "fits"}
    return {**figures, "origin": found[0].origin(row), "notes": list(learned.notes), "memory_parts_gib": parts}


def _describe_prediction(prediction: Mapping[str, Any], card: Card) -> list[str]:
    parts = ", ".join(f"{name.replace('_', ' ')} {gib:.2f}" for name, gib in prediction["memory_parts_gib"].items())
    metric, lines = TASKS.get(card.task).primary_metric, [f"note: {note}" for note in prediction["notes"]]
    origin = "predicted, not measured" if prediction["origin"] == "predicted" else "measured"
    if parts:
        figure = f"{show_interval(prediction, 'memory_gib', '{:.2f}'.format)} of {card.hardware.memory_gib:g} GiB"
        lines.append(f"predicted, not measured: memory {figure} per device ({parts})")
    time = f"{metric.words} {show_interval(prediction, metric.name, '{:.3g}'.format)} {metric.unit or ''}"
    return [*lines, f"{origin}: {time}".rstrip()]
