"""`ccl-search nightly`: several searches per night, until a deadline, compared with earlier nights."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from cclsearch.cli import EXIT_OK
from cclsearch.cli.drive import listen_for_stop
from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.text import plain
from cclsearch.core.yaml_file import validate_mapping
from cclsearch.loop.jobs import StopSignal
from cclsearch.nightly import install as installing
from cclsearch.nightly.config import NightlyConfig, Scrontab, load_nightly
from cclsearch.nightly.night import describe_night, plan_jobs
from cclsearch.nightly.run import NightService, prepare_outside
from cclsearch.nightly.summary import NightSummary, render_message
from cclsearch.nightly.window import nights_folder
from cclsearch.run.catalog import runs_folder

SCRONTAB_FLAGS = ("partition", "account", "qos")


def run(args: argparse.Namespace) -> int:
    """Return the exit code of the last night; 0 for a preview and an installation."""
    config = load_nightly(Path(args.file))
    prepare_outside(config, connects=not args.dry_run)
    if args.action == "install":
        return _install(args, config)
    runs = runs_folder(args.runs).absolute()
    if args.dry_run:
        head, *lines = describe_night(config, runs)
        print("\n".join([head, *map(plain, lines)]))
        return EXIT_OK
    stop = StopSignal()

    def show(night: NightSummary) -> None:
        if args.json:
            print(night.model_dump_json())
            return
        print(plain(render_message(night)))
        for note in night.notes:
            print(f"note: {plain(note)}")
        print(f"details: {nights_folder(runs, config.name) / night.night / 'report.html'}")

    def say(line: str) -> None:
        if not (args.quiet or args.json):
            print(line, flush=True)

    warn = partial(print, file=sys.stderr, flush=True)
    with listen_for_stop(stop):
        return NightService(config, runs, stop, show, say, warn).run(once=args.once)


def _install(args: argparse.Namespace, config: NightlyConfig) -> int:
    """Install the start of the nights, or with `--dry-run` only print it."""
    plan_jobs(config)
    given = {name: value for name in SCRONTAB_FLAGS if (value := getattr(args, name)) is not None}
    if given and args.how != "scrontab":
        raise UserError(f"--{next(iter(given))} needs `ccl-search nightly install FILE --scrontab`")
    scrontab = validate_mapping(Scrontab, {**config.scrontab.model_dump(), **given}, "--scrontab")
    plan = installing.plan_install(config, Path(args.file), project_root(), args.runs, scrontab)
    if args.how is None:
        raise UserError("no scheduler was chosen: add --systemd, --cron or --scrontab")
    for line in installing.find_warnings(plan, args.how):
        print(f"warning: {line}", file=sys.stderr)
    print("\n".join(installing.install_nights(plan, args.how, dry_run=args.dry_run)))
    return EXIT_OK
