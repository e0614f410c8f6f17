"""`ccl-search card`: list, show, copy or check workload cards, or write one from a model's config.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from cclsearch.card.hf_config import make_hf_card
from cclsearch.card.load import CardReport, inspect_card, require_stated
from cclsearch.card.model import StatedCard
from cclsearch.card.task import TASKS
from cclsearch.cli import EXIT_OK, EXIT_USAGE
from cclsearch.cli.content import run_content
from cclsearch.cli.output import complain, show
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError, require_writable
from cclsearch.core.text import plain
from cclsearch.space.framework import choose_framework, find_framework
from cclsearch.tasks.base import find_task


def run(args: argparse.Namespace) -> int:
    """Return exit code 0, or 2 if a card does not load."""
    if args.action == "check":
        return _check(args)
    if args.action == "show":
        return _show(inspect_card(args.card, args.overlay, args.set), as_json=args.json)
    return _write(args) if args.action == "from-hf" else run_content("workloads", args, "card")


def _check(args: argparse.Namespace) -> int:
    """Check each card on its own: one that does not load is one line on stderr."""
    failed = 0
    for name in args.card:
        try:
            report = inspect_card(name, args.overlay, args.set)
            card = require_stated(report)
            if report.card is not None and find_framework(card.framework):
                card = choose_framework(report.card)[0]
            inferred = [each.model_dump(mode="json") for each in card.inferred]
            facts = {"task": card.task, "inferred": inferred, "notes": card.notes, "open": report.say_open()}
            show({"card": name, **facts}, _describe_loaded(name, report, card), as_json=args.json)
        except UserError as error:
            failed += 1
            complain(str(error) if name in str(error) else f"{name}: {error}")
    if len(args.card) > 1 and not args.json:
        print(f"{len(args.card) - failed} of {len(args.card)} cards load")
    return EXIT_USAGE if failed else EXIT_OK


def _describe_loaded(name: str, report: CardReport, card: StatedCard) -> Iterator[str]:
    count, accelerator = card.hardware.num_accelerators, card.hardware.accelerator
    hardware = f"{count or '?'} x {accelerator or '?'}" if count or accelerator else "no hardware stated"
    framework = card.framework or "no framework named"
    yield f"ok  {name}: {card.task} of {card.family or card.title}, {hardware}, {framework}"
    if TASKS.find(card.task) is None:
        yield f"    {card.task} cannot be searched yet: only {', '.join(TASKS.names())} can"
    elif not report.open:
        yield from (f"    {line}" for line in find_task(card.task).remark(card))
    for remark in (*filter(None, [report.say_open()]), *card.remarks):
        yield f"    {remark}"


def _show(report: CardReport, *, as_json: bool) -> int:
    data = require_stated(report).model_dump(mode="json")
    if report.open:
        data["hardware"] = {name: value for name, value in data["hardware"].items() if value not in (None, False)}
        data["open"] = report.say_open()
    if as_json:
        print(json.dumps(data))
        return EXIT_OK
    shown = {name: value for name, value in data.items() if value not in (None, "", [], {})}
    print(plain(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=120)), end="")
    return EXIT_OK


def _write(args: argparse.Namespace) -> int:
    """Print or write a card with the model of a config.json; fields that it does not state are empty."""
    if args.out is not None:
        require_writable(args.out, "--out")
        if args.out.exists():
            raise UserError(f"--out {str(args.out)!r} exists already: name another file")
    data = make_hf_card(Path(args.config))
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
    if args.out is None:
        print(plain(text), end="")
    else:
        write_atomically(args.out, text)
        print(f"wrote {args.out}; fill in data, hardware and framework, then `ccl-search card check {args.out}`")
    return EXIT_OK
