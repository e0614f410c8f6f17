"""`ccl-search clean`: show and remove jobs and cloud resources that a search left behind."""

from __future__ import annotations

import argparse
import json

from cclsearch.cli import EXIT_OK
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.launch.base import Cleaner, JobState
from cclsearch.launch.profile import make_launcher
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import load_run


def run(args: argparse.Namespace) -> int:
    """Cancel every unfinished job of the run; refuse if its search is still running."""
    folder = find_run(args.run, args.runs)
    found = load_run(folder)
    if found.is_running:
        raise UserError(f"run {folder.name!r} is still running, so its jobs are in use; stop the search first (Ctrl-C)")
    launcher = make_launcher(found.spec.profile, framework=found.spec.framework, run_dir=folder)
    if isinstance(launcher, Cleaner):
        return _clean_all(launcher, found.spec.run_id, args)
    handles = launcher.find(found.spec.run_id)
    statuses = launcher.poll(handles)
    left = [(h, s) for h, s in zip(handles, statuses, strict=True) if s.state is not JobState.DONE]
    if args.json:
        print(json.dumps([{"job": h.job_id, "name": h.job_name, "state": s.state.value} for h, s in left]))
    for handle, status in [] if args.json else left:
        job = f"{handle.job_id:<12}  {handle.job_name}"
        print(f"{job}  {status.state.value}  {one_line(status.note, 100)}".rstrip())
    if left and not args.dry_run:
        launcher.cancel([handle for handle, _ in left])
    launcher.close()
    if not args.json:
        print(_say(folder.name, len(left), dry=args.dry_run))
    return EXIT_OK


def _clean_all(launcher: Cleaner, run_id: str, args: argparse.Namespace) -> int:
    """Show and remove the jobs and resources of a launcher that creates both."""
    left = launcher.leftovers(run_id)
    if args.json:
        print(json.dumps([{"job": x.name, "name": x.name, "kind": x.kind, "state": x.state} for x in left]))
    for item in [] if args.json else left:
        print(f"{item.kind}  {item.name}  {one_line(item.state, 100)}")
    if left and not args.dry_run:
        launcher.remove_leftovers(run_id)
    if not args.json and not left:
        print(f"run {run_id!r} has no unfinished job and no resource")
    elif not args.json:
        count = "1 thing" if len(left) == 1 else f"{len(left)} things"
        print(f"{count} left; nothing was removed (--dry-run)" if args.dry_run else f"{count} removed")
    return EXIT_OK


def _say(name: str, count: int, *, dry: bool) -> str:
    if not count:
        return f"run {name!r} has no unfinished job"
    jobs = "1 job" if count == 1 else f"{count} jobs"
    return f"{jobs} left; nothing was cancelled (--dry-run)" if dry else f"{jobs} cancelled"
