"""`ccl-search run`: search for the fastest configuration of a workload."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cclsearch.cli.arguments import (
    add_card_changes,
    add_runs_folder,
    add_use_fewer,
    positive_float,
    positive_int,
    seed_number,
    whole_number,
)

if TYPE_CHECKING:
    from cclsearch.core.settings import Settings
    from cclsearch.plan.plan import Plan
    from cclsearch.plan.request import SearchRequest

EXAMPLE = "ccl-search run --workload wl2 --budget 15\n  ccl-search run -w tiny --budget 8 --confirm 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--workload", required=True, metavar="NAME", help="workload card: a name, or a YAML file")
    parser.add_argument("-b", "--budget", type=positive_int, metavar="N", help="trials (default: 15)")
    add_search_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show search space, first proposals and job script; run nothing"
    )
    add_drive_arguments(parser)
    add_runs_folder(parser)


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` and `sweep` share."""
    add_card_changes(parser)
    add_use_fewer(parser)
    parser.add_argument("-l", "--launcher", metavar="PROFILE", help="where jobs run: a profile in launchers/")
    parser.add_argument("--in-allocation", action="store_true", help="run trials inside this shell's allocation")
    parser.add_argument("--recording", metavar="FOLDER", help="replay this recording instead of running trials")
    parser.add_argument("-o", "--objective", metavar="NAME", help="what to optimize (default: the task's)")
    parser.add_argument(
        "--constraint",
        action="append",
        default=[],
        metavar="'METRIC <= X'",
        help="rank only trials that satisfy this; may be given again",
    )
    names = "how to search: default, gp, grid, heuristic, pareto, random or tpe; with --llm hybrid (its default) or llm"
    parser.add_argument("--strategy", metavar="NAME", help=names)
    parser.add_argument(
        "--llm", metavar="SPEC", help="anthropic:MODEL, openai:MODEL, or the URL of a compatible server"
    )
    parser.add_argument("--llm-mode", choices=("configs", "policy"), help="what the LLM writes (default: configs)")
    parser.add_argument("--seed-policy", metavar="NAME", help="policy program to start from: a name or a file")
    parser.add_argument("--seed", type=seed_number, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument(
        "--parallel", type=positive_int, default=1, metavar="N", help="simultaneous trials (default: 1)"
    )
    parser.add_argument(
        "--timeout-min", type=positive_float, default=30.0, metavar="M", help="timeout of a trial (default: 30 minutes)"
    )
    parser.add_argument("--max-hours", type=positive_float, metavar="H", help="time limit of the search in hours")
    parser.add_argument(
        "--learn-from",
        action="extend",
        nargs="+",
        default=[],
        metavar="RUN",
        help="warm start from earlier runs; `auto`: all measured runs of the same work on the same cluster",
    )
    parser.add_argument("--name", metavar="ID", help="name of the run (default: workload, date, time)")


def add_drive_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run`, `sweep` and `resume` share."""
    confirm = "run the N best configurations again at the end"
    parser.add_argument("--confirm", type=whole_number, default=0, metavar="N", help=confirm)
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="limit on the LLM's tokens")
    parser.add_argument("--max-usd", type=positive_float, metavar="X", help="limit on the LLM's cost in US dollars")
    parser.add_argument("--json", action="store_true", help="print JSON (one object per event)")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    parser.add_argument(
        "--on-interrupt", choices=("cancel", "leave"), default="cancel", help="effect of Ctrl-C on running jobs"
    )


def run(args: argparse.Namespace) -> int:
    from cclsearch.plan.plan import plan_search
    from cclsearch.run.catalog import runs_folder
    from cclsearch.run.folder import create_run

    with naming_settings(args):
        plan = add_warm_starts(plan_search(make_request(args)), args)
    runs = runs_folder(args.runs)
    if args.dry_run:
        from cclsearch.cli.dry_run import show_plan

        return show_plan(plan, runs, as_json=args.json)
    from cclsearch.cli.drive import drive_search

    folder = create_run(plan.spec, runs)
    return drive_search(folder, args)


@contextlib.contextmanager
def naming_settings(args: argparse.Namespace) -> Iterator[None]:
    """Add the settings file's name to a UserError about a value that comes from it and was not typed."""
    from cclsearch.core.errors import UserError
    from cclsearch.core.settings import SETTINGS_FILE, load_settings

    try:
        yield
    except UserError as error:
        settings = load_settings()
        for name in ("launcher", "llm", "objective"):
            value = getattr(settings, name)
            if value and getattr(args, name) in (None, value) and repr(value) in str(error):
                raise UserError(f"{error} (`{name}` in {SETTINGS_FILE})") from None
        raise


def add_warm_starts(plan: Plan, args: argparse.Namespace) -> Plan:
    """Return the plan, with the runs that `--learn-from auto` finds as a warm start."""
    from cclsearch.plan.warm_start import AUTO, add_comparable_runs
    from cclsearch.run.catalog import list_runs

    if AUTO not in args.learn_from:
        return plan
    return replace(plan, spec=add_comparable_runs(plan.spec, list_runs(args.runs)))


def _refuse_unused_llm_options(args: argparse.Namespace, settings: Settings) -> None:
    """Raise UserError for LLM options of a search without an LLM."""
    from cclsearch.core.errors import UserError

    if args.llm and args.strategy not in (None, "hybrid", "llm"):
        raise UserError(
            f"--strategy {args.strategy} does not use an LLM, but --llm {args.llm} names one: omit one of them"
        )
    options = ("llm_mode", "max_tokens", "max_usd", "seed_policy")
    given = [f"--{name.replace('_', '-')}" for name in options if getattr(args, name) is not None]
    takes_part = args.llm or (settings.llm and args.strategy in (None, "hybrid", "llm"))
    if given and not takes_part:
        raise UserError(f"{' and '.join(given)}: no LLM is used; add one with `--llm SPEC`")


def make_request(args: argparse.Namespace) -> SearchRequest:
    """Return the search request; options that were not given come from the project's settings."""
    from cclsearch.core.settings import load_settings
    from cclsearch.plan.request import SearchRequest
    from cclsearch.plan.warm_start import AUTO
    from cclsearch.run.catalog import find_run
    from cclsearch.run.spec import SearchLimits
    from cclsearch.space.parse import parse_knob

    settings = load_settings()
    _refuse_unused_llm_options(args, settings)
    options = {
        "mode": args.llm_mode,
        "max_tokens": args.max_tokens,
        "max_usd": args.max_usd,
        "seed_policy": args.seed_policy,
    }
    return SearchRequest(
        workload=args.workload,
        limits=SearchLimits(
            budget=args.budget or settings.budget or 15,
            parallel=args.parallel,
            confirm=args.confirm,
            trial_timeout_s=args.timeout_min * 60,
            max_hours=args.max_hours,
        ),
        overlays=tuple(args.overlay),
        sets=tuple(args.set),
        launcher=args.launcher or (None if args.recording else settings.launcher),
        in_allocation=args.in_allocation,
        recording=args.recording,
        framework=args.framework,
        objective=args.objective or settings.objective,
        constraints=tuple(args.constraint),
        strategy=args.strategy,
        llm=args.llm or (settings.llm if args.strategy in (None, "hybrid", "llm") else None),
        llm_options={name: value for name, value in options.items() if value is not None},
        seed=args.seed,
        use_fewer=args.use_fewer,
        learn_from=tuple(str(find_run(name, args.runs)) for name in args.learn_from if name != AUTO),
        knobs=tuple(parse_knob(text) for text in args.knob),
        run_id=args.name,
    )
