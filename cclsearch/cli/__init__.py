"""The command line. Each command is a module whose `run(args)` calls the engine, prints and returns the exit
code, or None if it only succeeds.

`arguments.yaml` declares the commands and their arguments. The module is imported only when the command runs, so that
help and completion import nothing heavy.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from cclsearch.cli.output import complain
from cclsearch.core.errors import Notice, UserError
from cclsearch.core.version import __version__

if TYPE_CHECKING:
    import argparse


def read_command(name: str) -> dict[str, Any]:
    """The example and the arguments of a command, from `arguments.yaml`; the parts of other commands are not parsed."""
    with open(f"{os.path.dirname(__file__)}/arguments.yaml", encoding="utf-8") as file:
        text = file.read()
    parts = re.split(r"^(?=[a-z][a-z-]*:$)", text, flags=re.MULTILINE)
    needed = "".join(part for part in parts if part.startswith(("shared:\n", f"{name}:\n")))
    command: dict[str, Any] = yaml.load(needed, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))[name]
    return command


GROUPS: dict[str, dict[str, str]] = read_command("groups")
"""Group -> command -> one line of help; a command's module has its name."""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
"""Command -> one line of help."""

USER_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "EIO", "ESTALE", "ENOTCONN", "EMFILE", "ENFILE"),
        *("ENAMETOOLONG", "ELOOP", "ETIMEDOUT", "EHOSTDOWN", "ENODEV", "ENOLCK"),
    )
    if hasattr(errno, name)
)
"""Errors of the disk, its file system or its permissions: the user can fix them, so they get one line."""
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
# The next configurations would end for the same reason, too.
EXIT_SHARED_CAUSE = 3
"""Several configurations in a row ended for the same reason."""
# `EX_SOFTWARE` of BSD's sysexits.h.
EXIT_DEFECT = 70
"""An error of ccl-search itself ended the work."""
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 it ran and failed, 2 bad input (nothing was started)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _showing_notices():
            return _dispatch(arguments)
    except UserError as error:
        complain(str(error))
        return EXIT_USAGE
    except KeyboardInterrupt:
        may_search = arguments[:1] in (["run"], ["resume"], ["sweep"])
        hint = ". Continue with `ccl-search resume last`" if may_search else ""
        print(f"ccl-search: Interrupted{hint}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        if error.errno not in USER_ERRNOS:
            raise
        place = f"{str(error.filename)!r}: " if error.filename else ""
        complain(f"{place}{error.strerror}")
        return EXIT_USAGE


@contextlib.contextmanager
def _showing_notices() -> Iterator[None]:
    """Print each notice once, such as one about a damaged ledger, on stderr, in one line like an error."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **place: Any) -> None:
        if not issubclass(category, Notice):
            before(message, category, *where, **place)
        elif (text := str(message)) not in shown:
            shown.add(text)
            complain(text)

    with warnings.catch_warnings():
        before = warnings.showwarning
        warnings.simplefilter("always", Notice)
        warnings.showwarning = show  # type: ignore[assignment]  # the arguments after the category are passed on
        yield


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(_overview())
        return EXIT_OK
    if arguments[0] in {"-V", "--version"}:
        print(f"ccl-search {__version__}")
        return EXIT_OK
    name = arguments[0]
    if name not in COMMANDS:
        from cclsearch.core.text import guess_name

        raise UserError(f"there is no command {name!r}{guess_name(name, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    path = f"cclsearch.cli.{name.replace('-', '_')}"
    if name == "completion" and importlib.import_module(path).answer(arguments[1:]):
        return EXIT_OK
    args = make_parser(name).parse_args(arguments[1:])
    module = importlib.import_module(path)
    if not hasattr(args, "offline"):
        return module.run(args) or EXIT_OK
    from cclsearch.core.offline import offline

    with offline(args.offline):
        return module.run(args) or EXIT_OK


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return the argument parser of one command."""
    from cclsearch.cli.arguments import CommandParser, add_arguments

    summary, command = COMMANDS[name], read_command(name)
    parser = CommandParser(
        prog=f"ccl-search {name}",
        description=summary[0].upper() + summary[1:] + ".",
        epilog="example:\n" + textwrap.indent(command["example"], "  "),
    )
    add_arguments(parser, command["arguments"])
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    groups = (
        f"{title}:\n" + "".join(f"  {name:<{width}}{summary}\n" for name, summary in commands.items())
        for title, commands in GROUPS.items()
    )
    lines = (
        "ccl-search finds the fastest configuration for LLM training and serving on many accelerators.\n",
        "usage: ccl-search COMMAND [options]     (details: ccl-search COMMAND --help)\n",
        *groups,
        "start with:  ccl-search run --workload wl2 --budget 15",
    )
    return "\n".join(lines)
