"""What `run --command` searches: a card of the task `command` unless one is named, and what is read as objective."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

from cclsearch.card.load import card_from_mapping
from cclsearch.core.errors import UserError
from cclsearch.launch.command import Command
from cclsearch.scoring.declaration import ObjectiveDeclaration
from cclsearch.scoring.objective import build_objective, choose_objective
from cclsearch.space.knobs import rank_degrees
from cclsearch.space.parse import parse_knobs


def plan_command(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a search request for the command's options; UserError for what no trial could start with."""
    knobs = parse_knobs(args.knob)
    reads = {}
    for text in args.read:
        name, equals, pattern = text.partition("=")
        if not equals or not name.strip().isidentifier() or not pattern:
            raise UserError(f"--read is written METRIC='REGULAR EXPRESSION' or METRIC=json:FILE#KEY, not {text!r}")
        reads[name.strip()] = pattern
    command = Command(
        text=args.command,
        reads=reads,
        folder=os.getcwd(),
        template=args.template,
        timeout_s=args.timeout_min * 60,
    )
    own: dict[str, Any] = {"command": command, "threads": args.parallel}
    if args.workload is not None:
        own["objective"] = args.objective
        return own
    if not args.command.strip():
        raise UserError("--command: it is empty; write the program to run, as 'python train.py --tp {tp}'")
    if not knobs:
        raise UserError("--command: give what to vary, as --knob NAME=A,B, and write {NAME} into the command")
    accelerators = math.prod(max(k.choices) for k in knobs if k.name in rank_degrees() and k.name != "precision")
    xpu = {"type": "CPU", "model": "cpu", "memory_gb": 1, "total_count": accelerators, "count_per_node": accelerators}
    card = {
        "name": "command",
        "description": args.command,
        "workload": {
            "task": "command",
            "data": {"command": args.command},
            "hardware": {"xpu_spec": xpu},
        },
        "Model-executor": {"framework": {"name": "command"}},
    }
    own["card"] = card_from_mapping(card, "command").model_copy(update={"knobs": knobs})
    best = "maximize" if args.maximize else "minimize"
    if args.objective is None and reads:
        metric = {"name": next(iter(reads)), "direction": best, "source": "script"}
        declared = ObjectiveDeclaration.model_validate(
            {"version": 1, "description": "What is read.", "metrics": [metric]}
        )
        own["objective"] = build_objective(declared, metric["name"], {}, "--read", "command")
    else:
        own["objective"] = choose_objective(args.objective, (), task="command")
    return own
