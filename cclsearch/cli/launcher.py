"""`ccl-search launcher`: list, show or copy profiles, or check one against its cluster."""

from __future__ import annotations

import argparse

from cclsearch.cli import EXIT_FAILED, EXIT_OK
from cclsearch.cli.content import run_content
from cclsearch.cli.output import show
from cclsearch.launch.profile import load_profile, make_launcher


def run(args: argparse.Namespace) -> int:
    """Return exit code 0, or 1 if a check fails."""
    if args.action == "show" and args.json:
        print(load_profile(args.profile).model_dump_json())
        return EXIT_OK
    if args.action != "check":
        return run_content("launchers", args, "profile")
    return _check(args.profile, args.framework, as_json=args.json)


def _check(name: str, framework: str | None, *, as_json: bool) -> int:
    """Run the launcher's own checks; exit code 1 if one fails."""
    profile = load_profile(name)
    launcher = make_launcher(profile.model_copy(update={"framework": framework or profile.framework}))
    checks = launcher.check()
    launcher.close()
    lines = []
    for check in checks:
        lines.append(f"{'ok' if check.ok else 'NO'}  {check.name}: {check.detail}")
        lines += [f"    {check.remedy}"] if check.remedy and not check.ok else []
    show([check.model_dump() for check in checks], lines, as_json=as_json)
    return EXIT_OK if all(check.ok for check in checks) else EXIT_FAILED
