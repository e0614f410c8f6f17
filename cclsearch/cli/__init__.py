"""The command line. Each command is a module whose `run(args)` calls the engine, prints and returns the exit
code, or None if it only succeeds.

`arguments.yaml` declares its arguments. The module is imported only when the command runs, so that help and completion
import nothing heavy.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cclsearch.core.errors import Notice, UserError
from cclsearch.core.version import __version__

if TYPE_CHECKING:
    import argparse

GROUPS = {
    "search": {
        "run": "search for the fastest configuration of a workload",
        "resume": "continue a search that was stopped or killed",
        "status": "progress of a search, or of all searches in the project",
        "sweep": "one search for a whole Pareto front, scored at every weight",
        "nightly": "several searches per night, with a deadline, compared with earlier nights",
        "clean": "show and cancel jobs that a search left running",
    },
    "results": {
        "best": "the best configuration of a search, ready to run again",
        "show": "all facts about one trial",
        "watch": "follow a running search from another terminal, read-only",
        "logs": "what a trial printed, or prints while it runs",
        "tag": "tag a run, to find it again",
        "note": "add a note to a run or to one of its trials",
        "report": "HTML page and charts of a run, or of several runs compared",
        "ui": "all runs in a browser on this machine: live, compared, as a leaderboard",
        "dashboard": "open optuna-dashboard on a run, also while it searches",
        "pareto": "Pareto front of a sweep or of several runs, as tables and charts",
        "admit": "which trials may be ranked, rule by rule, evaluated again from their evidence",
        "export": "export a run as CSV, Parquet, Optuna study or CCL-Bench cards",
    },
    "workloads": {
        "card": "list, show, copy or check workload cards, or write one from a model's config.json",
        "space": "search space of a workload; which rule rejects a configuration",
        "predict": "predicted time and memory of configurations, with their parts",
        "accelerators": "known accelerators with their peak rates, memory, links and sources",
        "objective": "list, show or copy objectives: what a search optimizes",
        "recording": "check a table of your own measurements before a search uses it",
    },
    "traces and strategies": {
        "score": "metrics of profiler traces, and where the time of a step goes",
        "what-if": "step time with other links or collectives, projected from a trace",
        "claims": "what CCL-Bench's paper claims, shown on your traces, recordings and runs",
        "sweep-hardware": "a trace or a prediction on other clusters and accelerators, simulated",
        "bench": "compare samplers on recorded landscapes",
        "policy": "list, show, copy or test policy programs: what they propose for each workload",
        "replay-turns": "repeat an LLM's decisions from the records of a run",
    },
    "setup": {
        "init": "create a project folder",
        "trust": "let the code of a project run, once you looked at it",
        "device": "measure what this machine's device does, for a project's hardware.yaml",
        "docs": "read or search the documentation, without a network",
        "doctor": "what this machine offers, and how to add what is missing",
        "launcher": "list, show or copy launcher profiles; check one on its cluster",
        "links": "measure the links of a cluster, import or show them; order its nodes",
        "completion": "shell completion for commands, options and names",
    },
}
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
        from cclsearch.core.secrets.redact import redact

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
        from cclsearch.core.secrets.redact import redact

        place = f"{str(error.filename)!r}: " if error.filename else ""
        print(f"ccl-search: {redact(place + str(error.strerror))}", file=sys.stderr)
        return EXIT_USAGE


@contextlib.contextmanager
def _showing_notices() -> Iterator[None]:
    """Print each notice once, such as one about a damaged ledger, on stderr, in one line like an error."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **place: Any) -> None:
        if not issubclass(category, Notice):
            before(message, category, *where, **place)
        elif (text := str(message)) not in shown:
            from cclsearch.core.secrets.redact import redact

            shown.add(text)
            print(f"ccl-search: {redact(text)}", file=sys.stderr)

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
    import textwrap

    from cclsearch.cli.arguments import CommandParser, add_arguments, read_command

    summary, command = COMMANDS[name], read_command(name)
    parser = CommandParser(
        prog=f"ccl-search {name}",
        description=summary[0].upper() + summary[1:] + ".",
        epilog="example:\n" + textwrap.indent(command["example"], "  "),
    )
    add_arguments(parser, command["arguments"])
    return parser


def _list_group(title: str, commands: Mapping[str, str], width: int) -> list[str]:
    return [f"{title}:", *(f"  {name:<{width}}{summary}" for name, summary in commands.items())]


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "ccl-search finds the fastest configuration for LLM training and serving on many accelerators.",
        "",
        "usage: ccl-search COMMAND [options]     (details: ccl-search COMMAND --help)",
        "",
        *(line for group, commands in GROUPS.items() for line in (*_list_group(group, commands, width), "")),
        "start with:  ccl-search run --workload wl2 --budget 15",
    ]
    return "\n".join(lines)
