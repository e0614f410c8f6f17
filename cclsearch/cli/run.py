"""`ccl-search run`: search for the fastest configuration of a workload."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cclsearch.cli.arguments import take
from cclsearch.core.content import list_recordings
from cclsearch.core.errors import UserError
from cclsearch.core.settings import SETTINGS_FILE, load_settings
from cclsearch.core.terminal import is_terminal, print_wrapped
from cclsearch.loop.drive import start_run
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.plan.target import find_recording, read_names
from cclsearch.plan.warm_start import AUTO, MIXED_NONE, NONE, is_recording
from cclsearch.run.catalog import find_run, list_runs, runs_folder
from cclsearch.run.spec import DEFAULT_BUDGET, RunSpec, SearchLimits
from cclsearch.space.opening import Extend
from cclsearch.space.parse import parse_knobs, read_tuning_config
from cclsearch.tracking.webhook import choose_webhook

NO_LLM = "none"
"""The `--llm` of a search without an LLM in a project whose settings name one."""


def run(args: argparse.Namespace) -> int | None:
    choose_webhook(args.notify)  # what cannot be sent stops the command before a run exists
    with naming_settings(args):
        plan = plan_search(make_request(args))
    runs = runs_folder(args.runs)
    if args.dry_run:
        from cclsearch.cli.dry_run import show_plan

        show_plan(plan, runs, as_json=args.json)
        return None
    from cclsearch.cli.drive import drive_in_terminal

    tell_llm(plan.spec, args)
    folder = start_run(plan.spec, runs)
    return drive_in_terminal(folder, args)


def tell_llm(spec: RunSpec, args: argparse.Namespace) -> None:
    """Ask the LLM one small request before a run folder exists, and print what it answers; UserError if it cannot be
    used.
    """
    if spec.llm is None:
        return
    from cclsearch.loop.llm_agent import check_llm

    line = check_llm(spec.llm, spec.llm_options)
    if line and not (args.json or args.quiet):
        print_wrapped(f"LLM: {line}")


@contextlib.contextmanager
def naming_settings(args: argparse.Namespace) -> Iterator[None]:
    """Add the settings file's name to a UserError about a value that comes from it and was not typed."""
    try:
        yield
    except UserError as error:
        settings = load_settings()
        for name in ("launcher", "llm", "objective"):
            value = getattr(settings, name)
            if value and getattr(args, name) in (None, value) and repr(value) in str(error):
                raise UserError(f"{error} (`{name}` in {SETTINGS_FILE})") from None
        raise


def _refuse_unused_llm_options(args: argparse.Namespace, llm: str | None) -> None:
    """Raise UserError for LLM options of a search without an LLM."""
    options = ("llm_mode", "llm_effort", "llm_context", "llm_price", "max_tokens", "max_usd", "seed_policy", "extend")
    given = [f"--{name.replace('_', '-')}" for name in options if getattr(args, name, None) is not None]
    if given and not llm:
        raise UserError(f"{' and '.join(given)}: no LLM is used; add one with `--llm SPEC`")


def _read_learn_from(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the request that `--learn-from` sets; without it, runs on the same cluster set the prior."""
    names = args.learn_from
    if NONE in names:
        if set(names) != {NONE}:
            raise UserError(MIXED_NONE)
        return {}
    return {
        "learn_from": tuple(str(_find_earlier(name, args.runs)) for name in names if name != AUTO),
        "learn_from_comparable": AUTO in names,
        "earlier_runs": tuple(str(folder) for folder in list_runs(args.runs)),
    }


def _find_earlier(name: str, runs: Path | None) -> Path:
    """Return the folder of a recording, given by its path or name, or of a run."""
    folder = Path(name).expanduser()
    if is_recording(folder):
        return folder
    return find_recording(name) if name in list_recordings() else find_run(name, runs)


def _choose_extend(args: argparse.Namespace) -> str | None:
    """Return the LLM's level of additions to the search space; by default listed ones, but None without a terminal."""
    watched = sys.stdin is not None and sys.stdin.isatty() and is_terminal() and hasattr(args, "extend")
    chosen = getattr(args, "extend", None) or (Extend.LISTED if watched else Extend.OFF).value
    return None if chosen == Extend.OFF.value else str(chosen)


def read_command(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the fields of the request that `--command` sets; None without it."""
    if getattr(args, "command", None) is None:  # `ask` and `sweep` have no such option
        if used := next((name for name in ("read", "template", "maximize") if getattr(args, name, None)), None):
            raise UserError(f"--{used}: belongs to --command, and none is given")
        return None
    for name in ("launcher", "recording", "in_allocation"):
        if getattr(args, name):
            raise UserError(
                f"--command and --{name.replace('_', '-')} exclude each other: the command runs here; write what"
                " submits it and waits into it (`srun ...`, `sbatch --wait ...`, `ssh HOST ...`)"
            )
    from cclsearch.plan.command import plan_command

    return plan_command(args)


def make_request(args: argparse.Namespace) -> SearchRequest:
    """Return the search request; options that were not given come from the project's settings."""
    settings = load_settings()
    llm = None if args.llm == NO_LLM else args.llm or settings.llm
    _refuse_unused_llm_options(args, llm)
    own = read_command(args)
    if own is None and args.workload is None and args.recording is None:
        raise UserError(
            "nothing is named: give --workload NAME, or --recording NAME for the card of a recording, or --command"
        )
    workload, recording = read_names(args.workload, args.recording, args.launcher)
    options = {
        "mode": args.llm_mode,
        "effort": args.llm_effort,
        "context": args.llm_context,
        "price": args.llm_price,
        "max_tokens": args.max_tokens,
        "max_usd": args.max_usd,
        "seed_policy": args.seed_policy,
        "extend": _choose_extend(args) if llm else None,
    }
    return SearchRequest(
        **(own or {"objective": args.objective or settings.objective}),
        workload=own["card"].name
        if own and "card" in own
        else workload or str(find_recording(recording or "") / "card.yaml"),
        limits=SearchLimits(
            budget=args.budget or settings.budget or DEFAULT_BUDGET,
            trial_timeout_s=args.timeout_min * 60,
            early_stop=not args.no_early_stop,
            levers=not args.no_levers,
            **take(args, "parallel", "confirm", "max_hours", "max_node_hours"),
            **take(args, "keep_going", "control_every", "stop_early"),
        ),
        overlays=tuple(args.overlay),
        sets=tuple(args.set),
        launcher=None if own else args.launcher or (None if recording else settings.launcher),
        recording=recording,
        constraints=tuple(args.constraint),
        llm=llm,
        llm_options={name: value for name, value in options.items() if value is not None},
        log_to=tuple(args.log_to) or settings.log_to,
        **_read_learn_from(args),
        knobs=(*read_tuning_config(args.tuning_config), *parse_knobs(args.knob)),
        run_id=args.name,
        **take(args, "in_allocation", "framework", "strategy", "sampler", "seed", "use_fewer", "baseline"),
    )
