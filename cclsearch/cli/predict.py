"""`ccl-search predict`: predicted primary metric and memory of configurations, part by part; starts no job."""

from __future__ import annotations

import argparse
import json
import shlex

import numpy as np

from cclsearch.card.model import Card
from cclsearch.cli.space import read_asked
from cclsearch.core.errors import UserError, require_writable
from cclsearch.plan.forecast import estimate_search
from cclsearch.plan.subject import find_subject
from cclsearch.plan.warm_start import adapt_predictor
from cclsearch.report.predicted import add_compiled_memory, describe_prediction, describe_predictions, draw_predictions
from cclsearch.run.spec import DEFAULT_BUDGET
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import (
    ClosedForm,
    Derived,
    Prediction,
    Predictor,
    Rows,
    describe_none_fits,
    predict_space,
    predictor_of,
)
from cclsearch.tasks.base import task_of
from cclsearch.tasks.training.aot import find_topology, require_compiler


def run(args: argparse.Namespace) -> None:
    """Print the configurations that are predicted to be fastest and likely to fit, with their parts."""
    if args.png:
        require_writable(args.png, "--png")
    subject = find_subject(read_asked(args))
    card = subject.card
    topology = _find_topology(card, args.aot)
    space = subject.build_space()
    predictor, notes = predictor_of(card, space), list(subject.notes)
    if args.learn_from:
        predictor, note = adapt_predictor(card, space, subject.framework_name, args.learn_from, args.runs)
        notes.append(note)
    prediction = predict_space(card, space, predictor)
    if prediction is None:
        raise UserError(f"task {card.task!r} of {card.name} has no closed form: nothing is known before a trial runs")
    if predictor.refine is not None:
        thetas = {metric: form.prior.mean_P for metric, form in predictor.forms.items()}
        first = prediction.order(_match(space, args))
        predictor = predictor.refine(predictor, thetas, first)
        prediction = predict_space(card, space, predictor)
        assert prediction is not None
    rows = _choose(space, prediction, args)
    if predictor.num_refined:
        notes.append(
            f"waits and percentiles of the first {predictor.num_refined} configurations are simulated step by step;"
            " those of others follow from their median"
        )
    derived = {**predictor.derived, **_list_forms(predictor, prediction)}
    shown = [name for name in task_of(card).highlights if name in derived]
    described = [describe_prediction(space, prediction, row, {name: derived[name] for name in shown}) for row in rows]
    cost = None if args.config or subject.recording else estimate_search(card, space, DEFAULT_BUDGET, prediction)
    if topology is not None:
        add_compiled_memory(card, described, topology)
    if args.png:
        draw_predictions(args.png, described, card, prediction)
    if args.json:
        inferred = [each.model_dump(mode="json") for each in card.inferred]
        head = {"workload": card.name, "provenance": "simulated", "legal": len(space), "inferred": inferred}
        head |= {"notes": notes} if args.learn_from else {}
        more = {"search_node_hours": cost.node_hours, "search_cost": cost.describe()} if cost else {}
        fits = {"memory_limit_gib": card.hardware.memory_gib, "any_fits": not describe_none_fits(card, prediction)}
        print(json.dumps(head | fits | {"configurations": described} | more))
    else:
        formulas = {name: derived[name].formula for name in shown}
        for line in describe_predictions(card, space, described, prediction, formulas, notes):
            print(line)
        if cost is not None:
            print(f"  expected cost of a search on a cluster: {cost.describe()}")


def _list_forms(predictor: Predictor, prediction: Prediction) -> dict[str, Derived]:
    """Return the other metrics that have closed forms: they do not follow from the primary one."""

    def value(form: ClosedForm) -> Derived:
        return Derived(form.metric.name, lambda _, rows: form.expect(rows))

    return {name: value(form) for name, form in predictor.forms.items() if name != prediction.form.metric.name}


def _choose(space: Space, prediction: Prediction, args: argparse.Namespace) -> list[int]:
    """Return at most `--top` rows that match `--config`: first those likely to fit, each group fastest first."""
    return [int(row) for row in prediction.order(_match(space, args))[: args.top]]


def _match(space: Space, args: argparse.Namespace) -> Rows:
    """Return the rows that match `--config`; raises UserError if there are none."""
    matches = space.matching(parse_assignments(args.config, space.knobs) if args.config is not None else {})
    if not matches.any():
        options = [("--workload", args.workload), ("--recording", args.recording), ("--run", args.run)]
        options += [("--framework", args.framework), ("--launcher", args.launcher), ("--config", args.config)]
        options += [("--overlay", path) for path in args.overlay] + [("--set", pair) for pair in args.set]
        options += [("--knob", knob) for knob in args.knob]
        given = shlex.join([text for option, value in options if value is not None for text in (option, value)])
        why = f"run `ccl-search space explain {given}` to see which rule excludes it"
        raise UserError(f"no configuration in the search space matches --config {args.config!r}; {why}")
    return np.flatnonzero(matches)


def _find_topology(card: Card, asked: str | None) -> str | None:
    if asked is None:
        return None
    if card.task != "training":
        raise UserError(f"--aot compiles a training step, but {card.name} is a {card.task!r} workload: leave it out")
    topology = find_topology(card, asked)
    require_compiler()
    return topology
