"""`ccl-search launcher`: list the profiles, or check one against its cluster."""

from __future__ import annotations

import argparse
import json

from cclsearch.cli import EXIT_FAILED, EXIT_OK
from cclsearch.core.content import find_content
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line, plain
from cclsearch.launch.profile import PROFILE_SUFFIXES, list_profiles, load_profile, make_launcher


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        if args.framework is not None or args.profile is not None:
            raise UserError(
                "`launcher list` takes no profile and no --framework; both are arguments of `launcher check`"
            )
        return _list(as_json=args.json)
    if args.profile is None:
        raise UserError("`launcher check` needs the name of a profile; `ccl-search launcher list` shows them")
    return _check(args.profile, args.framework, as_json=args.json)


def _list(*, as_json: bool) -> int:
    """Print every profile with its launcher and path; for one that cannot be read, the reason."""
    rows = []
    for name in list_profiles():
        try:
            profile = load_profile(name)
            rows.append({"profile": name, "launcher": profile.launcher, "description": profile.description})
        except UserError as error:
            rows.append({"profile": name, "launcher": "?", "description": str(error)})
    if as_json:
        print(json.dumps(rows))
        return EXIT_OK
    width = max((len(row["profile"]) for row in rows), default=0)
    for row in rows:
        print(f"{row['profile']:<{width}}  {row['launcher']:<8}  {one_line(row['description'], 160)}".rstrip())
        print(f"{'':<{width}}  {find_content('launchers', row['profile'], *PROFILE_SUFFIXES)}")
    return EXIT_OK


def _check(name: str, framework: str | None, *, as_json: bool) -> int:
    """Run the launcher's own checks; exit code 1 if one fails."""
    profile = load_profile(name)
    launcher = make_launcher(profile.model_copy(update={"framework": framework or profile.framework}))
    checks = launcher.check()
    launcher.close()
    if as_json:
        print(json.dumps([check.model_dump() for check in checks]))
    for check in [] if as_json else checks:
        print(f"{'ok' if check.ok else 'NO'}  {check.name}: {plain(check.detail)}")
        if check.remedy and not check.ok:
            print(f"    {plain(check.remedy)}")
    return EXIT_OK if all(check.ok for check in checks) else EXIT_FAILED
