"""`ccl-search space`: the search space of a workload, and which rule rejects a configuration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.text import count_of, plain
from cclsearch.core.values import Value, format_config, format_knob_value
from cclsearch.plan.subject import RECORDED, Asked, Subject, find_subject
from cclsearch.plan.target import read_names
from cclsearch.report.launch_form import make_launch
from cclsearch.score.objective import find_task_metric
from cclsearch.space.build import RuleVerdict, resolve_knobs
from cclsearch.space.framework import FrameworkKnob
from cclsearch.space.knobs import meaning_of
from cclsearch.space.parse import parse_assignments
from cclsearch.space.rule import KIND_WORDS, Rule
from cclsearch.space.table import Knob, Space
from cclsearch.stats.closed_form import predict_space


def run(args: argparse.Namespace) -> int:
    """Print the space, or the verdicts on one configuration; return 1 if that is not in the space."""
    if args.rows < 0:
        raise UserError(f"--rows must be 0 or more, not {args.rows}")
    if (args.action == "explain") != (args.config is not None):
        raise UserError("`space explain` needs --config (for example tp=2,dp=8), and `space list` does not accept it")
    if args.launch and args.config is None:
        raise UserError("--launch needs one configuration: `ccl-search space explain ... --config tp=2,... --launch`")
    subject = find_subject(read_asked(args))
    if args.action == "explain":
        return _explain(args, subject)
    return _list(args, subject)


def read_asked(args: argparse.Namespace) -> Asked:
    """Return the options that name a workload, a recording or a run, and change a workload."""
    workload, recording = read_names(args.workload, args.recording, args.launcher)
    return Asked(
        workload=workload,
        recording=recording,
        run=args.run,
        runs=args.runs,
        overlays=args.overlay,
        sets=args.set,
        framework=args.framework,
        launcher=args.launcher,
        tuning_config=args.tuning_config,
        knobs=args.knob,
        use_fewer=args.use_fewer,
    )


def _list(args: argparse.Namespace, subject: Subject) -> int:
    space, card, framework = subject.build_space(), subject.card, subject.framework
    rules = framework.make_rules(card, space.knobs, use_fewer=subject.use_fewer) if framework is not None else ()
    given = {knob.name for knob in space.knobs}
    listed = framework.list_optional(card) if framework is not None else ()
    optional = [knob for knob in listed if knob.name not in given]
    rows = [dict(space.config(row)) for row in range(min(args.rows, len(space)))]
    if args.json:
        answer = {
            "workload": card.name,
            "framework": subject.framework_name,
            "legal": len(space),
            "raw": space.num_raw,
            "knobs": [{"name": k.name, "choices": k.choices, "description": k.description} for k in space.knobs],
            "optional_knobs": [
                {"name": k.name, "choices": k.resolve(card).choices, "description": k.description} for k in optional
            ],
            "rules": [{"name": r.name, "summary": r.summary, "kind": r.kind, "source": r.source} for r in rules],
            "rows": rows,
            "inferred": [each.model_dump(mode="json") for each in card.inferred],
            "stated": dict(card.configuration),
        }
        print(json.dumps(answer))
        return 0
    if subject.recording is not None:
        print(f"{subject.title} ({subject.framework_name}): {len(space)} measured configurations, its search space")
    else:
        size = f"{len(space)} configurations of {space.num_raw} combinations"
        print(f"{subject.title} under {subject.framework_name}: {size}")
    if card.recording is not None and args.workload is not None:
        print(f"(without a launcher, `run` replays the recording {card.recording}; its rows are the search space)")
    for note in subject.notes:
        print(f"note: {note}")
    _print_stated(card, space)
    print("\nknobs")
    for knob in space.knobs:
        separator = " < " if knob.ordered_choices and not knob.is_numeric else ", "
        choices = separator.join(map(format_knob_value, knob.ordered_choices or knob.choices))
        print(f"  {knob.name:<26}{choices} {meaning_of(knob.name).unit}".rstrip())
    _print_optional(card, optional)
    _print_rules(rules, with_sources=args.rules)
    if rows:
        print("\nconfigurations")
    for row in range(len(rows)):
        print(f"  {space.config(row)}")
    return 0


def _print_stated(card: Card, space: Space) -> None:
    """Say how many configurations have the parallel plan that the card's file states, if it states one."""
    known = {name: value for name, value in card.configuration.items() if space.has(name)}
    others = {name: value for name, value in card.configuration.items() if name not in known and value != 1}
    if known:
        beside = f" (this space has no knob for {format_config(others)})" if others else ""
        number = count_of(int(space.matching(known).sum()), "configuration")
        print(f"the plan in the card's file is {format_config(known)}{beside}: {number} of the search space")


def _print_optional(card: Card, optional: Sequence[FrameworkKnob]) -> None:
    """List the knobs that this space does not have, as arguments that add them."""
    if optional:
        print("\nfurther knobs of the framework, with the argument that adds each")
    for knob in optional:
        choices = ",".join(map(format_knob_value, knob.resolve(card).choices))
        print(f"  --knob {knob.name + '=' + choices:<52}{knob.description or meaning_of(knob.name).words}")


def _print_rules(rules: Sequence[Rule], *, with_sources: bool) -> None:
    print("\nrules" if rules else "\nrules: none")
    for rule in rules:
        print(f"  {rule.name:<36}{rule.summary}")
        if with_sources:
            print(f"  {'':<36}{KIND_WORDS[rule.kind]}{': ' if rule.source else ''}{rule.source}")
    if rules and not with_sources:
        print("(`--rules` shows where the framework refuses what violates a rule)")


def _explain(args: argparse.Namespace, subject: Subject) -> int:
    card = subject.card
    knobs: Sequence[Knob] = subject.recording.space.knobs if subject.recording is not None else ()
    if subject.framework is not None:
        knobs = resolve_knobs(card, subject.framework, subject.knobs, subject.use_fewer)
    config = parse_assignments(args.config, knobs)
    config |= {knob.name: knob.choices[0] for knob in knobs if len(knob.choices) == 1 and knob.name not in config}
    space, empty_reason, completions = None, "", 0
    try:
        space = subject.build_space()
    except UserError as error:
        empty_reason = str(error)
    if space is not None:
        completions = int(space.matching(config).sum())
        config = dict(space.config(int(space.matching(config).argmax()))) if completions == 1 else config
    verdicts = subject.explain(config)
    rejected = [verdict for verdict in verdicts if verdict.ok is False]
    is_complete = all(knob.name in config for knob in knobs)
    prediction = _predict(card, space, config) if space is not None and is_complete else None
    legal = not rejected and completions > 0
    launch = None
    if args.launch:
        _require_complete(config, knobs)
    if args.launch and legal:
        launch = make_launch(card, subject.framework_name, config)
    if args.json:
        answer = {
            "workload": card.name,
            "framework": subject.framework_name,
            "config": config,
            "legal": legal,
            "verdicts": [verdict.model_dump() for verdict in verdicts],
            "completions": completions,
            "prediction": prediction,
            "note": empty_reason,
        }
        if launch is not None:
            answer["launch"] = launch.model_dump(mode="json")
        print(json.dumps(answer))
        return 0 if legal else 1
    _print_explanation(config, verdicts, completions, is_complete)
    if empty_reason:
        print(empty_reason)
    if prediction is not None:
        _print_prediction(prediction, card)
    if launch is not None:
        print(f"\n{plain(launch.as_shell())}")
    return 0 if legal else 1


def _require_complete(config: Mapping[str, Value], knobs: Sequence[Knob]) -> None:
    """Raise UserError with the knobs that the configuration lacks."""
    missing = [knob.name for knob in knobs if knob.name not in config]
    if missing:
        raise UserError(f"--launch needs a value of every knob; --config lacks {', '.join(missing)}")


def _print_explanation(
    config: Mapping[str, Value], verdicts: tuple[RuleVerdict, ...], completions: int, is_complete: bool
) -> None:
    print(format_config(config))
    for verdict in verdicts:
        mark = {True: "ok", False: "NO", None: "? "}[verdict.ok]
        print(f"  {mark}  {verdict.rule:<36}{verdict.detail}")
        if verdict.ok is False:
            print(f"      {'':<36}required: {verdict.summary}")
            if verdict.rule not in ("choices", RECORDED):
                print(f"      {'':<36}{KIND_WORDS[verdict.kind]}{': ' if verdict.source else ''}{verdict.source}")
    rejected = [verdict.rule for verdict in verdicts if verdict.ok is False]
    if rejected:
        print(f"not in the search space: violates rule{'s' if len(rejected) > 1 else ''} {', '.join(rejected)}")
    elif is_complete:
        print("in the search space")
    elif completions:
        print(f"{completions} configurations of the search space match")
    else:
        print("not in the search space for any values of the other knobs")


def _predict(card: Card, space: Space, config: Mapping[str, Value]) -> dict[str, Any] | None:
    """The closed-form prediction, not calibrated because nothing was measured yet; None if not in the space."""
    row = space.row(config)
    if row is None:
        return None
    prediction = predict_space(card, space)
    if prediction is None:
        return None
    parts = {name: float(part[row]) for name, part in prediction.memory_parts_gib.items()}
    figures = {name: value for name, value in prediction.describe(row).items() if name != "fits"}
    return {**figures, "memory_parts_gib": parts}


def _print_prediction(prediction: Mapping[str, Any], card: Card) -> None:
    parts = ", ".join(f"{name.replace('_', ' ')} {gib:.2f}" for name, gib in prediction["memory_parts_gib"].items())
    if parts:
        figure = f"{prediction['memory_gib']:.2f} of {card.hardware.memory_gib:g} GiB per device ({parts})"
        print(f"predicted, not measured: memory {figure}")
    metric = find_task_metric(card.task)
    print(f"predicted, not measured: {metric.words} {prediction[metric.name]:.3g} {metric.unit or ''}".rstrip())
