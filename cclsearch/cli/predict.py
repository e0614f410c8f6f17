"""`ccl-search predict`: predicted primary metric and memory of configurations, part by part; starts no job."""

from __future__ import annotations

import argparse
import json
import shlex

import numpy as np

from cclsearch.card.model import Card
from cclsearch.cli.space import read_asked
from cclsearch.core.errors import UserError, require_writable
from cclsearch.plan.capacity import describe_capacity
from cclsearch.plan.forecast import estimate_search
from cclsearch.plan.subject import find_subject
from cclsearch.plan.warm_start import learn_about
from cclsearch.report.predicted import add_compiled_memory, describe_prediction, describe_predictions, draw_predictions
from cclsearch.run.spec import DEFAULT_BUDGET
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Rows, describe_none_fits
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
    learned = learn_about(subject, space, args.learn_from, args.runs)
    matches = _match(space, args)
    prediction, predictor = learned.predict(matches)
    known = learned.describe(predictor)
    notes = [*subject.notes, *known]
    if subject.recording is None and not args.config:
        notes += describe_capacity(learned.view)
    rows = [int(row) for row in prediction.order(matches)[: args.top]]
    if predictor.num_refined:
        notes.append(
            f"waits and percentiles of the first {predictor.num_refined} configurations are simulated step by step;"
            " those of others follow from their median"
        )
    limits = learned.view.objective.constraints
    wanted = dict.fromkeys([*(c.metric for c in limits), *task_of(card).highlights])
    shown = [name for name in wanted if name in predictor.derived or name in prediction.others]
    described = [describe_prediction(space, prediction, row, predictor.derived, limits) for row in rows]
    cost = None if args.config or subject.recording else estimate_search(card, space, DEFAULT_BUDGET, prediction)
    if topology is not None:
        add_compiled_memory(card, described, topology)
    if args.png:
        draw_predictions(args.png, described, card, prediction)
    if args.json:
        inferred = [each.model_dump(mode="json") for each in card.inferred]
        head = {"workload": card.name, "provenance": "simulated", "legal": len(space), "inferred": inferred}
        head |= {"notes": notes} if known else {}
        more = {"search_node_hours": cost.node_hours, "search_cost": cost.describe()} if cost else {}
        fits = {"memory_limit_gib": card.hardware.memory_gib, "any_fits": not describe_none_fits(card, prediction)}
        print(json.dumps(head | fits | {"configurations": described} | more))
    else:
        formulas = {name: predictor.derived[name].formula if name in predictor.derived else "" for name in shown}
        for line in describe_predictions(card, space, described, prediction, formulas, notes):
            print(line)
        if cost is not None:
            print(f"  expected cost of a search on a cluster: {cost.describe()}")


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
