"""The command line: a skin. Each command is a module that parses, calls one function and prints.

A command's module has `EXAMPLE` (shown under its help), `add_arguments(parser)` and `run(args) -> int` (exit code). It
is imported when the command is asked for, so that `ccl-search --help` imports nothing heavy.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from cclsearch import __version__
from cclsearch.core.errors import UserError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("cclsearch.cli.run", "search for the fastest configuration of a workload"),
    "resume": ("cclsearch.cli.resume", "go on with a search that was stopped or killed"),
    "status": ("cclsearch.cli.status", "where a search stands, or all searches of the project"),
    "best": ("cclsearch.cli.best", "the best configuration of a search, ready to run again"),
    "show": ("cclsearch.cli.show", "everything known of one trial"),
    "space": ("cclsearch.cli.space", "the legal set of a workload; which rule rejects a configuration"),
    "bench": ("cclsearch.cli.bench", "strategies side by side on recorded landscapes"),
    "predict": ("cclsearch.cli.predict", "predicted time and memory of configurations, with their parts"),
    "admit": ("cclsearch.cli.admit", "which trials may be ranked, rule by rule, judged again from their evidence"),
    "sweep": ("cclsearch.cli.sweep", "one search over a whole front, scored at every weight"),
    "pareto": ("cclsearch.cli.pareto", "the front of a sweep or of several runs, in figures and drawings"),
    "nightly": ("cclsearch.cli.nightly", "several searches a night, by a deadline, compared with earlier nights"),
    "report": ("cclsearch.cli.report", "one page and pictures of a run, or of several compared"),
    "export": ("cclsearch.cli.export", "a run as CSV, Parquet, an Optuna study, or cards with their evidence"),
    "score": ("cclsearch.cli.score", "what the traces of a run say: metrics, and where the time of a step goes"),
    "what-if": ("cclsearch.cli.what_if", "the step time under other links or collectives, replayed from a trace"),
    "policy": ("cclsearch.cli.policy", "test a policy program: what it picks on each workload, and why not"),
    "replay-turns": ("cclsearch.cli.replay_turns", "an LLM's decisions of a run again, without a provider"),
    "launcher": ("cclsearch.cli.launcher", "the profiles there are; whether one works on its cluster"),
    "clean": ("cclsearch.cli.clean", "show and remove the jobs that a search left behind"),
    "doctor": ("cclsearch.cli.doctor", "what is there to work with, and what to do about what is missing"),
    "completion": ("cclsearch.cli.completion", "a script that completes commands and names in your shell"),
    "init": ("cclsearch.cli.init", "write a project folder of one's own"),
}
"""Command -> (module, one line of help)."""

OUTSIDE = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "EIO", "ESTALE", "ENOTCONN", "EMFILE", "ENFILE"),
        *("ENAMETOOLONG", "ELOOP", "ETIMEDOUT", "EHOSTDOWN", "ENODEV", "ENOLCK"),
    )
    if hasattr(errno, name)
)
"""Errors of the disk, its file system or its rights, wherever they strike: no bug of ours, and the user's to mend."""
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BROKEN_OFF = 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 it ran and failed, 2 bad input (nothing was started)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        from cclsearch.core.redact import redact

        print(f"ccl-search: {redact(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        may_search = arguments[:1] in (["run"], ["resume"], ["sweep"])
        hint = "; if a search ran here, `ccl-search resume last` goes on with it" if may_search else ""
        print(f"ccl-search: broken off{hint}", file=sys.stderr)
        return EXIT_BROKEN_OFF
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        if error.errno not in OUTSIDE:
            raise
        from cclsearch.core.redact import redact

        place = f"{str(error.filename)!r}: " if error.filename else ""
        print(f"ccl-search: {redact(place + str(error.strerror))}", file=sys.stderr)
        return EXIT_USAGE


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
        raise UserError(f"there is no command {name!r}{_guess(name)}; there are: {', '.join(COMMANDS)}")
    args = make_parser(name).parse_args(arguments[1:])
    module = importlib.import_module(COMMANDS[name][0])
    return int(module.run(args))


def _guess(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def make_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command."""
    module_name, summary = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = _Parser(
        prog=f"ccl-search {name}",
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "ccl-search finds the fastest way to split LLM training over many accelerators.",
        "",
        "usage: ccl-search COMMAND [options]     (ccl-search COMMAND --help tells more)",
        "",
        *(f"  {name:<{width}}{summary}" for name, (_, summary) in COMMANDS.items()),
        "",
        "start with:  ccl-search run --workload wl2 --budget 15",
    ]
    return "\n".join(lines)
