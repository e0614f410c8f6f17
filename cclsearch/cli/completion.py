"""`ccl-search completion SHELL`: prints a script that completes commands, options and names.

Each script calls `ccl-search completion --words ...` for the candidates at the cursor, so the commands' own parsers are
the only source. If there are no candidates, the shell offers files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from cclsearch.cli import COMMANDS, EXIT_OK, make_parser
from cclsearch.core.content import list_content, list_run_names

if TYPE_CHECKING:
    import argparse

SHELLS = ("bash", "zsh", "fish")
"""Each has a file beside this one, which defines the completion."""

NAMES = {
    "workload": "workloads",
    "card": "workloads",
    "launcher": "launchers",
    "profile": "launchers",
    "framework": "frameworks",
    "objective": "objectives",
    "policy": "policies",
    "seed_policy": "policies",
    "recording": "recordings",
    "sampler": "samplers",
    "samplers": "samplers",
    "strategy": "strategies",
    "llm": "providers",
    "metric": "metrics",
    "run": "runs",
    "learn_from": "runs",
}
"""Destination of an argument in its parser -> kind of names that it accepts."""


def run(args: argparse.Namespace) -> int:
    """Print the script of `args.shell`; `answer` has printed what scripts ask for."""
    answer([args.shell])
    return EXIT_OK


def answer(arguments: Sequence[str]) -> bool:
    """Print a shell's script, or the candidates for `--words WORD...`; False for other arguments.

    Each start of a shell and each press of TAB calls this, so it does not wait for the command's own parser.
    """
    if arguments[:1] == ["--words"]:
        print("".join(f"{line}\n" for line in complete_words(arguments[1:])), end="")
        return True
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        return False
    with open(f"{__file__.removesuffix('.py')}.{arguments[0]}", encoding="utf-8") as file:
        print(file.read().rstrip())
    return True


def complete_words(words: Sequence[str]) -> list[str]:
    """Return the candidates for the last word, given the words before it; empty for a file or a number."""
    if ":" in words[-2:]:
        return []  # bash splits `anthropic:MODEL` into three words, and nothing lists models
    *before, current = _join_equals(words) or [""]
    current = current.lstrip("'\"")  # a quote that is not closed yet; the shell keeps it
    if not before:
        return _filter_prefix(current, [*COMMANDS, "--help", "--version"])
    if before[0] not in COMMANDS:
        return []
    parser, argument = find_argument(make_parser(before[0]), before[1:])
    if current.startswith("--") and "=" in current and "--" not in before:
        option, _, value = current.partition("=")
        named = next((a for a in parser._actions if option in a.option_strings), None)
        return [f"{option}={name}" for name in _filter_prefix(value, list_names(named))]
    if current.startswith("-"):
        return _filter_prefix(current, [option for action in parser._actions for option in action.option_strings])
    return _filter_prefix(current, list_names(argument))


def find_argument(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.ArgumentParser, argparse.Action | None]:
    """Return the argument that follows `words`, and its parser: of the subcommand, if one was given."""
    default = parser.get_default("default_action")
    positionals = [action for action in parser._actions if not action.option_strings]
    if default and words and isinstance(named := positionals[0].choices, dict) and words[0] not in named:
        return find_argument(named[default], words)
    option: argparse.Action | None = None
    for n, word in enumerate(words):
        if word.startswith("-"):
            option = next((a for a in parser._actions if word in a.option_strings and a.nargs != 0), None)
        elif option is not None:
            option = option if option.nargs in ("+", "*") else None
        elif positionals:
            taken = positionals[0]
            if isinstance(taken.choices, dict) and word in taken.choices:
                return find_argument(taken.choices[word], words[n + 1 :])
            positionals = positionals if taken.nargs in ("+", "*") else positionals[1:]
    return parser, option or (positionals[0] if positionals else None)


def list_names(argument: argparse.Action | None) -> list[str]:
    """Return the values of an argument that can be listed: its choices, or names of content, runs and plugins."""
    if argument is None:
        return []
    if argument.choices is not None:
        return [str(choice) for choice in argument.choices]
    kind = NAMES.get(argument.dest)
    if kind == "runs":
        return [*list_run_names(), *(("auto", "none") if argument.dest == "learn_from" else ("last",))]
    if kind == "providers":
        return [*(f"{word}:" for word in resolve_name(LISTED[kind])()), "none"]
    if kind in LISTED:
        return list(resolve_name(LISTED[kind])())
    return list_content(kind, ".yaml", ".yml", ".py") if kind else []


LISTED = {
    "launchers": "cclsearch.core.content:list_profiles",
    "frameworks": "cclsearch.core.content:list_frameworks",
    "recordings": "cclsearch.core.content:list_recordings",
    "providers": "cclsearch.propose.agent.providers.kind:list_kinds",
    "samplers": "cclsearch.propose.study.choose:list_samplers",
    "strategies": "cclsearch.propose.study.choose:list_strategies",
    "metrics": "cclsearch.core.metrics:METRICS.names",
}
"""Kind of names -> function that lists them, imported when it is called; other kinds are folders of content."""


def _join_equals(words: Sequence[str]) -> list[str]:
    """Drop each `=` on its own: bash splits `--option=value` into three words."""
    return [word for n, word in enumerate(words) if word != "=" or n == 0] + [""] * (list(words[-1:]) == ["="])


def _filter_prefix(prefix: str, names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(prefix)]
