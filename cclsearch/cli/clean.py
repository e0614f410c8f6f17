"""`ccl-search clean`: show and remove jobs and cloud resources that a search left behind."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from cclsearch.cli.output import show
from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import count_of, one_line
from cclsearch.launch.base import Cleaner, JobState
from cclsearch.launch.profile import make_launcher
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import load_run


def run(args: argparse.Namespace) -> None:
    """Cancel every unfinished job of the run, and remove its resources; refuse if its search is still running."""
    folder = find_run(args.run, args.runs)
    found = load_run(folder)
    if found.is_running:
        raise UserError(f"run {folder.name!r} is still running, so its jobs are in use; stop the search first (Ctrl-C)")
    launcher = make_launcher(found.spec.profile, framework=found.spec.framework, run_dir=folder)
    run_id = found.spec.run_id
    clean: Callable[[], object]
    if isinstance(launcher, Cleaner):
        items = launcher.leftovers(run_id)
        rows = [{"job": x.name, "name": x.name, "kind": x.kind, "state": x.state} for x in items]
        lines = [f"{x.kind}  {x.name}  {one_line(x.state, 100)}" for x in items]
        clean = partial(launcher.remove_leftovers, run_id)
        noun, done, nothing = "thing", "removed", f"run {run_id!r} has no unfinished job and no resource"
    else:
        handles = launcher.find(run_id)
        left = [(h, s) for h, s in zip(handles, launcher.poll(handles), strict=True) if s.state is not JobState.DONE]
        rows = [{"job": h.job_id, "name": h.job_name, "state": s.state.value} for h, s in left]
        lines = [f"{h.job_id:<12}  {h.job_name}  {s.state.value}  {one_line(s.note, 100)}".rstrip() for h, s in left]
        clean = partial(launcher.cancel, [handle for handle, _ in left])
        noun, done, nothing = "job", "cancelled", f"run {folder.name!r} has no unfinished job"
    show([{name: redact(text) for name, text in row.items()} for row in rows], map(redact, lines), as_json=args.json)
    if rows and not args.dry_run:
        clean()
    if not isinstance(launcher, Cleaner):  # closing it would delete resources even with --dry-run
        launcher.close()
    count = count_of(len(rows), noun)
    if not args.json and args.dry_run and rows:
        print(f"{count} left; nothing was {done} (--dry-run)")
    elif not args.json:
        print(f"{count} {done}" if rows else nothing)
