"""The command line. Each command is a module that parses arguments, calls the engine and prints.

A command's module has `EXAMPLE` (shown in its help), `add_arguments(parser)` and `run(args) -> int` (the exit code). It
is imported only when the command is used, so that `ccl-search --help` imports nothing heavy.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Iterable, Sequence

from cclsearch import __version__
from cclsearch.core.errors import UserError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("cclsearch.cli.run", "search for the fastest configuration of a workload"),
    "resume": ("cclsearch.cli.resume", "continue a search that was stopped or killed"),
    "status": ("cclsearch.cli.status", "progress of a search, or of all searches in the project"),
    "best": ("cclsearch.cli.best", "the best configuration of a search, ready to run again"),
    "show": ("cclsearch.cli.show", "all facts about one trial"),
    "space": ("cclsearch.cli.space", "search space of a workload; which rule rejects a configuration"),
    "bench": ("cclsearch.cli.bench", "compare strategies on recorded landscapes"),
    "predict": ("cclsearch.cli.predict", "predicted time and memory of configurations, with their parts"),
    "admit": ("cclsearch.cli.admit", "which trials may be ranked, rule by rule, evaluated again from their evidence"),
    "sweep": ("cclsearch.cli.sweep", "one search for a whole Pareto front, scored at every weight"),
    "pareto": ("cclsearch.cli.pareto", "Pareto front of a sweep or of several runs, as tables and charts"),
    "nightly": ("cclsearch.cli.nightly", "several searches per night, with a deadline, compared with earlier nights"),
    "report": ("cclsearch.cli.report", "HTML page and charts of a run, or of several runs compared"),
    "export": ("cclsearch.cli.export", "export a run as CSV, Parquet, Optuna study or CCL-Bench cards"),
    "score": ("cclsearch.cli.score", "metrics of profiler traces, and where the time of a step goes"),
    "what-if": ("cclsearch.cli.what_if", "step time with other links or collectives, projected from a trace"),
    "policy": ("cclsearch.cli.policy", "test a policy program: what it proposes for each workload"),
    "replay-turns": ("cclsearch.cli.replay_turns", "repeat an LLM's decisions from the records of a run"),
    "launcher": ("cclsearch.cli.launcher", "list launcher profiles; check one on its cluster"),
    "clean": ("cclsearch.cli.clean", "show and cancel jobs that a search left running"),
    "doctor": ("cclsearch.cli.doctor", "what this machine offers, and how to add what is missing"),
    "completion": ("cclsearch.cli.completion", "shell completion for commands, options and names"),
    "init": ("cclsearch.cli.init", "create a project folder"),
}
"""Command -> (module, one line of help)."""

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
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line; the exit code is 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        hint = _guess(unknown, self._option_string_actions) if unknown.startswith("--") else ""
        raise UserError(f"{message}{hint} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 it ran and failed, 2 bad input (nothing was started)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
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
    module = importlib.import_module(COMMANDS[name][0])
    return int(module.run(args))


def _guess(name: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return the argument parser of one command."""
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
        "ccl-search finds the fastest configuration for LLM training on many accelerators.",
        "",
        "usage: ccl-search COMMAND [options]     (details: ccl-search COMMAND --help)",
        "",
        *(f"  {name:<{width}}{summary}" for name, (_, summary) in COMMANDS.items()),
        "",
        "start with:  ccl-search run --workload wl2 --budget 15",
    ]
    return "\n".join(lines)
