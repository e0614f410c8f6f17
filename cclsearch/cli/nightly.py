"""`ccl-search nightly`: several searches per night, until a deadline, compared with earlier nights."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cclsearch.cli import EXIT_OK, EXIT_USAGE
from cclsearch.cli.drive import listen_for_stop
from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.outside import refuse_outside
from cclsearch.core.redact import declare_secret, redact
from cclsearch.core.text import plain
from cclsearch.core.yaml_file import validate_mapping
from cclsearch.nightly import install as installing
from cclsearch.nightly.config import NightlyConfig, Scrontab, load_nightly
from cclsearch.nightly.night import plan_jobs, show_time
from cclsearch.nightly.preview import preview_night
from cclsearch.nightly.run import NightBrokenError, NightBusyError, run_night
from cclsearch.nightly.summary import EXIT_BUSY, EXIT_TROUBLE, render_message
from cclsearch.nightly.webhook import send_webhook
from cclsearch.nightly.window import find_interrupted, find_window, nights_folder
from cclsearch.propose.agent.providers.spec import parse_spec, refuse_if_offline
from cclsearch.run.catalog import runs_folder
from cclsearch.search.jobs import StopSignal

SCRONTAB_FLAGS = ("partition", "account", "qos")


def run(args: argparse.Namespace) -> int:
    path = Path(args.file)
    config = load_nightly(path)
    if not args.dry_run:
        refuse_outside_of_night(config)
    if config.webhook_env is not None:
        declare_secret(config.webhook_env)
    if args.action == "install":
        return install(args, config, path)
    return show_plan(args, config) if args.dry_run else run_nights(args, config)


def refuse_outside_of_night(config: NightlyConfig) -> None:
    """Raise UserError before the first job if the user wants no connections, and the webhook or an LLM needs one."""
    if config.webhook_env is not None:
        refuse_outside("the webhook", "remove `webhook_env` from the nightly file")
    for job in config.all_jobs:
        if job.llm:
            refuse_if_offline(parse_spec(job.llm))


def run_nights(args: argparse.Namespace, config: NightlyConfig) -> int:
    """Run one night now, or one at each `start` until stopped; returns the exit code of the last night."""
    stop = StopSignal()
    code = EXIT_OK
    with listen_for_stop(stop):
        if args.once or config.start_moment is None:
            return run_one_night(args, config, stop)
        plan_jobs(config)
        if find_interrupted(config, runs_folder(args.runs).absolute(), time.time()) is not None:
            code = run_night_safely(args, config, stop)
        while wait_for_start(config, stop, quiet=args.quiet or args.json):
            code = run_night_safely(args, config, stop)
    return code


def run_night_safely(args: argparse.Namespace, config: NightlyConfig, stop: StopSignal) -> int:
    """Run one night of a process that runs every night: report a failure, and leave the next night its chance."""
    try:
        return run_one_night(args, config, stop)
    except BrokenPipeError:
        raise
    except (UserError, OSError) as error:
        report_failure(config, str(error))
        return EXIT_USAGE


def report_failure(config: NightlyConfig, why: str) -> None:
    """Report on standard error and in the chat that a night failed."""
    text = redact(f"{config.name}: this night failed: {why}")
    print(f"ccl-search: {text}", file=sys.stderr, flush=True)
    problem = send_webhook(config.webhook_env, f"ccl-search {text}") if config.webhook_env else None
    if problem is not None:
        print(f"note: {problem}", file=sys.stderr, flush=True)


def wait_for_start(config: NightlyConfig, stop: StopSignal, *, quiet: bool) -> bool:
    """Sleep until the next start; False if stopped. The clock is read every 30 s, because it may be adjusted."""
    assert config.start_moment is not None
    start_s = config.start_moment.next_after(time.time())
    if not quiet:
        print(f"the next night starts at {show_time(start_s)} (UTC)", flush=True)
    while time.time() < start_s and not stop.is_set():
        stop.wait(min(30.0, max(start_s - time.time(), 0.1)))
    return not stop.is_set()


def run_one_night(args: argparse.Namespace, config: NightlyConfig, stop: StopSignal) -> int:
    """Run one night and print its result; returns its exit code."""
    runs = runs_folder(args.runs).absolute()
    quiet = args.quiet or args.json
    try:
        summary = run_night(
            config, runs, stop=stop, say=(lambda line: None) if quiet else lambda line: print(plain(line), flush=True)
        )
    except NightBusyError as error:
        print(f"ccl-search: {error}", file=sys.stderr)
        return EXIT_BUSY
    except NightBrokenError as error:
        report_failure(config, str(error))
        return EXIT_TROUBLE
    if args.json:
        print(summary.model_dump_json())
    else:
        print(plain(render_message(summary)))
        for note in summary.notes:
            print(f"note: {plain(note)}")
        print(f"details: {nights_folder(runs, config.name) / summary.night / 'report.html'}")
    return summary.exit_code


def show_plan(args: argparse.Namespace, config: NightlyConfig) -> int:
    """Print what a night would do: its jobs, their shares, the deadline, and the evidence it would remove."""
    runs = runs_folder(args.runs).absolute()
    plans = plan_jobs(config)
    window = find_window(config, runs, time.time())
    until = f"until {show_time(window.deadline_s)}" if window.deadline_s is not None else "without a deadline"
    which = f"continues the interrupted night {window.stamp}" if window.folder.exists() else "a new night from now"
    print(f"{config.name}: {which} {until}; {len(plans)} jobs")
    for line in preview_night(config, runs, plans, window):
        print(plain(line))
    return EXIT_OK


def install(args: argparse.Namespace, config: NightlyConfig, path: Path) -> int:
    """Install what starts the nights, or with `--dry-run` only print it."""
    plan_jobs(config)
    plan = installing.plan_install(config, path, project_root(), args.runs, choose_scrontab(args, config))
    if not (args.systemd or args.cron or args.scrontab):
        raise UserError("no scheduler was chosen: add --systemd, --cron or --scrontab")
    how = "systemd" if args.systemd else "cron" if args.cron else "scrontab"
    for line in installing.find_warnings(plan, how):
        print(f"warning: {line}", file=sys.stderr)
    if args.systemd:
        for name, text in installing.render_systemd(plan).items():
            print(f"# {name}\n{text}")
        if not args.dry_run:
            for written in installing.install_systemd(plan):
                print(f"wrote {written}")
            print(f"next: systemctl --user daemon-reload && systemctl --user enable --now {plan.unit}.timer")
            print("and:  loginctl enable-linger   (without it a user's timers end with the user's last login)")
        return EXIT_OK
    program = "crontab" if args.cron else "scrontab"
    print(installing.render_cron(plan, slurm=args.scrontab), end="")
    if not args.dry_run:
        installing.install_table(plan, program)
        print(f"installed with `{program}`; `{program} -l` shows the entry")
    return EXIT_OK


def choose_scrontab(args: argparse.Namespace, config: NightlyConfig) -> Scrontab:
    """Slurm options of the night's job: those of the file, overridden by the command line."""
    given = {name: value for name in SCRONTAB_FLAGS if (value := getattr(args, name)) is not None}
    if given and not args.scrontab:
        raise UserError(f"--{next(iter(given))} needs `ccl-search nightly install FILE --scrontab`")
    return validate_mapping(Scrontab, {**config.scrontab.model_dump(), **given}, "--scrontab")
