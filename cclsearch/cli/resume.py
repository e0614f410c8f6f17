"""`ccl-search resume`: continue a search that was stopped or killed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cclsearch.cli.arguments import take
from cclsearch.cli.drive import drive_in_terminal
from cclsearch.core.errors import UserError
from cclsearch.core.terminal import is_terminal
from cclsearch.core.values import Provenance
from cclsearch.loop.session import Changes, check_growth
from cclsearch.loop.unknown_trials import UnknownPolicy, find_unknown_trials
from cclsearch.propose.agent.memory.history import limits_event
from cclsearch.propose.agent.providers.cost import LlmLimits
from cclsearch.propose.agent.providers.spec import parse_spec, refuse_without_price
from cclsearch.propose.events import LlmLimitsSet
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import Run, load_run
from cclsearch.run.spec import read_spec
from cclsearch.space.parse import parse_wanted


def run(args: argparse.Namespace) -> int:
    folder = find_run(args.run, args.runs)
    events = _read_limits(folder, args)
    loaded = load_run(folder)
    total = max(loaded.spec.limits.budget, loaded.state.budget_raised_to)
    if 0 < args.budget < total:
        raise UserError(f"--budget {args.budget}: the search has a budget of {total} trials, which can only be raised")
    unknown = UnknownPolicy(args.unknown_trials) if args.unknown_trials else _ask(loaded, args)
    if args.max_node_hours is not None and loaded.spec.provenance is not Provenance.MEASURED:
        raise UserError(f"--max-node-hours: a {loaded.spec.provenance.value} search uses no nodes")
    wanted = parse_wanted(args.extend_knob)
    if wanted:
        check_growth(folder, loaded.state, wanted)  # before anything is recorded
    changes = Changes(
        **take(args, "budget", "confirm", "keep_going", "stop_early", "max_node_hours"),
        events=events,
        unknown=unknown,
        wanted=wanted,
    )
    return drive_in_terminal(folder, args, changes)


def _ask(run: Run, args: argparse.Namespace) -> UnknownPolicy | None:
    """Ask the user what to do with trials that the ledger does not contain; None without a terminal."""
    found = find_unknown_trials(run.folder, run.state)
    if not found or args.json or args.quiet or not (sys.stdin and sys.stdin.isatty() and is_terminal()):
        return None
    print(f"{found.describe()}.")
    print("adopt: judge their results; leave: continue without them, their configurations may run again")
    answer = input("adopt, leave, or stop? [stop] ").strip().lower()
    if answer not in tuple(UnknownPolicy):
        raise UserError("stopped; nothing was changed")
    return UnknownPolicy(answer)


def _read_limits(folder: Path, args: argparse.Namespace) -> tuple[LlmLimitsSet, ...]:
    """Return new limits on the LLM as events for the ledger; raises UserError if no LLM takes part."""
    if args.max_tokens is None and args.max_usd is None:
        return ()
    spec = read_spec(folder)
    if spec.llm is None:
        raise UserError("--max-tokens and --max-usd limit an LLM, but none takes part in this search")
    refuse_without_price(parse_spec(spec.llm).name, {**spec.llm_options, "max_usd": args.max_usd})
    return (limits_event(LlmLimits(max_tokens=args.max_tokens, max_usd=args.max_usd)),)
