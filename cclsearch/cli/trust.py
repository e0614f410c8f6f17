"""`ccl-search trust`: let the code of a project run for this user on this machine, or no longer."""

from __future__ import annotations

import argparse
from pathlib import Path

from cclsearch.cli.output import say
from cclsearch.core.content import project_root
from cclsearch.core.errors import UserError
from cclsearch.core.settings import SETTINGS_FILE
from cclsearch.core.trust import LINE, list_code, trust_project, withdraw_trust


def run(args: argparse.Namespace) -> None:
    """Confirm a project, and print the files that may run from now on."""
    folder = (project_root() if args.directory is None else Path(args.directory).expanduser()).resolve()
    if not folder.is_dir():
        raise UserError(f"{str(args.directory)!r} is not a folder: name a project")
    if args.withdraw:
        known = withdraw_trust(folder)
        say(f"{folder}: {'its code no longer runs' if known else 'it was not trusted'}")
        return
    trust_project(folder)
    say(f"{folder}: its code may run for you on this machine (`{LINE}` is in its {SETTINGS_FILE})")
    say(*(f"  {path.relative_to(folder)}" for path in list_code(folder)))
