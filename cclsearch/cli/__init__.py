"""The command line. Each command is a module whose `run(args)` calls the engine, prints and returns the exit code.

`arguments.yaml` declares its arguments. The module is imported only when the command runs, so that help and completion
import nothing heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cclsearch import __version__
from cclsearch.core.errors import DamagedLedger, UserError

COMMANDS = {
    "run": "search for the fastest configuration of a workload",
    "resume": "continue a search that was stopped or killed",
    "status": "progress of a search, or of all searches in the project",
    "best": "the best configuration of a search, ready to run again",
    "show": "all facts about one trial",
    "card": "check workload cards, show one, or write one from a model's config.json",
    "space": "search space of a workload; which rule rejects a configuration",
    "bench": "compare strategies on recorded landscapes",
    "accelerators": "known accelerators with their peak rates, memory, links and sources",
    "predict": "predicted time and memory of configurations, with their parts",
    "admit": "which trials may be ranked, rule by rule, evaluated again from their evidence",
    "sweep": "one search for a whole Pareto front, scored at every weight",
    "pareto": "Pareto front of a sweep or of several runs, as tables and charts",
    "nightly": "several searches per night, with a deadline, compared with earlier nights",
    "report": "HTML page and charts of a run, or of several runs compared",
    "export": "export a run as CSV, Parquet, Optuna study or CCL-Bench cards",
    "score": "metrics of profiler traces, and where the time of a step goes",
    "what-if": "step time with other links or collectives, projected from a trace",
    "policy": "test a policy program: what it proposes for each workload",
    "replay-turns": "repeat an LLM's decisions from the records of a run",
    "recording": "check a table of your own measurements before a search uses it",
    "launcher": "list, show or copy launcher profiles; check one on its cluster",
    "clean": "show and cancel jobs that a search left running",
    "doctor": "what this machine offers, and how to add what is missing",
    "completion": "shell completion for commands, options and names",
    "init": "create a project folder",
}
"""Command -> one line of help; its module has its name."""

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
EXIT_SHARED_CAUSE = 3
"""Several configurations in a row ended for the same reason: the next ones would, too."""
EXIT_DEFECT = 70
"""An error of ccl-search itself ended the work (`EX_SOFTWARE` of BSD's sysexits.h)."""
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line; the exit code is 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> None:  # type: ignore[override]
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        hint = _guess(unknown, self._option_string_actions) if unknown.startswith("--") else ""
        raise UserError(f"{message}{hint} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 it ran and failed, 2 bad input (nothing was started)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _showing_damage():
            return _dispatch(arguments)
    except UserError as error:
        from cclsearch.core.redact import redact

        print(f"ccl-search: {redact(str(error))}", file=sys.stderr)
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
        from cclsearch.core.redact import redact

        place = f"{str(error.filename)!r}: " if error.filename else ""
        print(f"ccl-search: {redact(place + str(error.strerror))}", file=sys.stderr)
        return EXIT_USAGE


@contextlib.contextmanager
def _showing_damage() -> Iterator[None]:
    """Print each warning about a damaged ledger once, on stderr, as a line like those of errors."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **place: Any) -> None:
        if not issubclass(category, DamagedLedger):
            before(message, category, *where, **place)
        elif (text := str(message)) not in shown:
            from cclsearch.core.redact import redact

            shown.add(text)
            print(f"ccl-search: {redact(text)}", file=sys.stderr)

    with warnings.catch_warnings():
        before = warnings.showwarning
        warnings.simplefilter("always", DamagedLedger)
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
        raise UserError(f"there is no command {name!r}{_guess(name, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    args = make_parser(name).parse_args(arguments[1:])
    module = importlib.import_module(f"cclsearch.cli.{name.replace('-', '_')}")
    return int(module.run(args))


def _guess(name: str, known: Iterable[str]) -> str:
    from cclsearch.core.text import guess_name

    return guess_name(name, known)


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return the argument parser of one command."""
    from cclsearch.cli.arguments import add_arguments, read_command

    summary, command = COMMANDS[name], read_command(name)
    parser = _Parser(
        prog=f"ccl-search {name}",
        description=summary[0].upper() + summary[1:] + ".",
        epilog="example:\n" + textwrap.indent(command["example"], "  "),
    )
    add_arguments(parser, command["arguments"])
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "ccl-search finds the fastest configuration for LLM training on many accelerators.",
        "",
        "usage: ccl-search COMMAND [options]     (details: ccl-search COMMAND --help)",
        "",
        *(f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items()),
        "",
        "start with:  ccl-search run --workload wl2 --budget 15",
    ]
    return "\n".join(lines)
