"""`ccl-search run`: search for the fastest configuration of a workload."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cclsearch.cli.arguments import add_runs_folder, positive_float, positive_int, seed_number, whole_number

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
        "--dry-run", action="store_true", help="show space, first proposals and job script; run nothing"
    )
    add_output_arguments(parser)
    add_runs_folder(parser)


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """What a search is made of; `run` and `sweep` share it."""
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="set a field of the card")
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help="a second card over the first")
    parser.add_argument("-l", "--launcher", metavar="NAME", help="profile in launchers/: where jobs run")
    parser.add_argument("--in-allocation", action="store_true", help="run trials as steps of the allocation held here")
    parser.add_argument("--recording", metavar="FOLDER", help="replay this recorded landscape instead of running")
    parser.add_argument("--framework", metavar="NAME", help="run script, in place of the card's framework")
    parser.add_argument("--knob", action="append", default=[], metavar="NAME=A,B", help="add a knob, or limit one")
    parser.add_argument("--use-fewer", action="store_true", help="also try fewer accelerators than there are")
    parser.add_argument("-o", "--objective", metavar="NAME", help="what is minimised (default: step_time)")
    parser.add_argument("--strategy", metavar="NAME", help="who proposes (default: `default`; with --llm: hybrid)")
    parser.add_argument(
        "--llm", metavar="SPEC", help="anthropic:MODEL, openai:MODEL, or the URL of a compatible server"
    )
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="tokens that the LLM may use in all")
    parser.add_argument("--max-usd", type=positive_float, metavar="X", help="money that the LLM may cost in all")
    parser.add_argument("--llm-mode", choices=("configs", "policy"), help="what the LLM writes (default: configs)")
    parser.add_argument("--seed-policy", metavar="NAME", help="policy program to start from: a name, or a file")
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="N", help="makes the search reproducible (default: 0)"
    )
    parser.add_argument("--parallel", type=positive_int, default=1, metavar="N", help="trials in flight (default: 1)")
    parser.add_argument("--confirm", type=whole_number, default=0, metavar="N", help="run N finalists again at the end")
    parser.add_argument(
        "--timeout-min", type=positive_float, default=30.0, metavar="M", help="minutes a trial may take (default: 30)"
    )
    parser.add_argument("--max-hours", type=positive_float, metavar="H", help="hours the search may take")
    parser.add_argument(
        "--learn-from",
        action="extend",
        nargs="+",
        default=[],
        metavar="RUN",
        help="earlier runs used as a prior; `auto`: every one that was measured on the same cluster for the same work",
    )
    parser.add_argument("--name", metavar="ID", help="name of the run (default: workload, date and time)")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """How a search shows itself; `run` and `resume` share it."""
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    parser.add_argument(
        "--on-interrupt", choices=("cancel", "leave"), default="cancel", help="what Ctrl-C does with running jobs"
    )


def run(args: argparse.Namespace) -> int:
    from cclsearch.plan.plan import plan_search
    from cclsearch.run.catalog import runs_folder
    from cclsearch.run.folder import create_run

    with naming_settings(args):
        plan = add_earlier(plan_search(make_request(args)), args)
    place = runs_folder(args.runs)
    if args.dry_run:
        from cclsearch.cli.dry_run import show_plan

        return show_plan(plan, place, as_json=args.json)
    from cclsearch.cli.drive import drive_search

    folder = create_run(plan.spec, place)
    return drive_search(folder, args)


@contextlib.contextmanager
def naming_settings(args: argparse.Namespace) -> Iterator[None]:
    """Around planning: a UserError about a value that nobody typed says that the project's settings hold it."""
    from cclsearch.core.errors import UserError
    from cclsearch.core.settings import SETTINGS_FILE, load_settings

    try:
        yield
    except UserError as error:
        settings = load_settings()
        for name in ("launcher", "llm", "objective"):
            value = getattr(settings, name)
            if value and getattr(args, name) in (None, value) and repr(value) in str(error):
                raise UserError(f"{error} ({name} of {SETTINGS_FILE})") from None
        raise


def add_earlier(plan: Plan, args: argparse.Namespace) -> Plan:
    """The plan with the runs as a prior that `--learn-from auto` finds, where that was asked for."""
    from cclsearch.plan.warm_start import AUTO, find_warm_starts
    from cclsearch.run.catalog import list_runs

    if AUTO not in args.learn_from:
        return plan
    return replace(plan, spec=find_warm_starts(plan.spec, list_runs(args.runs)))


def _refuse_unheard(args: argparse.Namespace, settings: Settings) -> None:
    """Refuse what is said to an LLM that takes no part: nobody would hear it."""
    from cclsearch.core.errors import UserError

    if args.llm and args.strategy not in (None, "hybrid", "llm"):
        raise UserError(
            f"--strategy {args.strategy} asks no LLM, and --llm {args.llm} names one: leave one of them out"
        )
    options = ("llm_mode", "max_tokens", "max_usd", "seed_policy")
    given = [f"--{name.replace('_', '-')}" for name in options if getattr(args, name) is not None]
    takes_part = args.llm or (settings.llm and args.strategy in (None, "hybrid", "llm"))
    if given and not takes_part:
        raise UserError(f"{' and '.join(given)}: no LLM takes part; `--llm anthropic:MODEL` or `openai:MODEL` adds one")


def make_request(args: argparse.Namespace) -> SearchRequest:
    """The request that the arguments make, with the project's settings for what was left out."""
    from cclsearch.core.settings import load_settings
    from cclsearch.plan.request import SearchRequest
    from cclsearch.plan.warm_start import AUTO
    from cclsearch.run.catalog import find_run
    from cclsearch.run.spec import SearchLimits
    from cclsearch.space.parse import parse_knob

    settings = load_settings()
    _refuse_unheard(args, settings)
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
        strategy=args.strategy,
        llm=args.llm or (settings.llm if args.strategy in (None, "hybrid", "llm") else None),
        llm_options={name: value for name, value in options.items() if value is not None},
        seed=args.seed,
        use_fewer=args.use_fewer,
        learn_from=tuple(str(find_run(name, args.runs)) for name in args.learn_from if name != AUTO),
        knobs=tuple(parse_knob(text) for text in args.knob),
        run_id=args.name,
    )
