"""`ccl-search launcher`: list, show or copy profiles, or check one against its cluster."""

from __future__ import annotations

import argparse
import json
import re

from cclsearch.cli import EXIT_FAILED, EXIT_OK
from cclsearch.core.content import FRAMEWORK_SUFFIX, find_content, project_root
from cclsearch.core.errors import UserError
from cclsearch.core.names import PROFILE_SUFFIXES, list_profiles
from cclsearch.core.text import one_line, plain
from cclsearch.launch.profile import load_profile, make_launcher

NEW_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,60}$")


def run(args: argparse.Namespace) -> int:
    if args.framework is not None and args.action != "check":
        raise UserError(f"`launcher {args.action}` takes no --framework; it is an option of `launcher check`")
    if args.new_name is not None and args.action != "copy":
        raise UserError(f"`launcher {args.action}` takes no second name: {args.new_name!r}; `launcher copy` does")
    if args.action == "list":
        if args.profile is not None:
            raise UserError("`launcher list` takes no profile; `launcher show` and `launcher check` do")
        return _list(as_json=args.json)
    if args.profile is None:
        needed = f"`launcher {args.action}` needs the name of a profile"
        raise UserError(f"{needed}; `ccl-search launcher list` shows them")
    if args.action == "show":
        return _show(args.profile, as_json=args.json)
    if args.action == "copy":
        return _copy(args.profile, args.new_name)
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


def _show(name: str, *, as_json: bool) -> int:
    """Print the profile's file as it is; with --json what the engine reads from it."""
    profile = load_profile(name)
    if as_json:
        print(profile.model_dump_json())
    elif profile.source is not None:
        print(plain(profile.source.read_text(encoding="utf-8")), end="")
    return EXIT_OK


def _copy(name: str, new_name: str | None) -> int:
    """Copy a profile into the project's launchers/ under a new name; never over a file that exists."""
    if new_name is None or not NEW_NAME.match(new_name) or new_name.endswith((FRAMEWORK_SUFFIX, *PROFILE_SUFFIXES)):
        given = "is missing" if new_name is None else f"is {one_line(new_name, 60)!r}"
        raise UserError(f"`launcher copy {name} NEWNAME`: NEWNAME {given}; give letters, digits, `.`, `_` and `-`")
    source = load_profile(name).source
    assert source is not None
    path = project_root() / "launchers" / f"{new_name}{PROFILE_SUFFIXES[0]}"
    path.parent.mkdir(exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{str(path)!r} exists already: give another name, or remove it") from None
    print(f"{path}\nnext: fill in what your cluster needs, then  ccl-search launcher check {new_name}")
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
