"""The arguments of every command, declared in `arguments.yaml`, and the types of their values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cclsearch.core.errors import UserError
from cclsearch.core.numbers import MAX_AMOUNT, MAX_COUNT, MAX_TRIALS, read_amount, read_whole
from cclsearch.core.text import guess_name


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the additions of installed packages in `--help`."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "{providers}" not in text:
            return text
        from cclsearch.propose.agent.providers.kind import describe_forms

        return text.replace("{providers}", describe_forms())


class CommandParser(argparse.ArgumentParser):
    """Reports a wrong argument in one line; the exit code is 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words; the command's default action is used if they do not begin with the name of an action."""
        default = self.get_default("default_action")
        first = args[0] if args else ""
        if default and first not in ("-h", "--help", *self._parsers()):
            is_misspelt = guess_name(first, self._parsers()) and not Path(first).exists()
            args = args if is_misspelt else [default, *args]
        return super().parse_known_args(args, namespace)

    def _parsers(self) -> dict[str, argparse.ArgumentParser]:
        """Return the parsers of the subcommands, by name."""
        choices = (action.choices for action in self._actions)
        return {name: parser for each in choices if isinstance(each, dict) for name, parser in each.items()}

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}{self._guess(message)} (see `{self.prog} --help`)")

    def _guess(self, message: str) -> str:
        """Return the actions that take an unknown option, or the nearest option or choice; empty if there is none."""
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if unknown.startswith("--"):
            option, parsers = unknown.split("=")[0], self._parsers()
            takers = [f"`{name}`" for name, parser in parsers.items() if option in parser._option_string_actions]
            options = [name for parser in (self, *parsers.values()) for name in parser._option_string_actions]
            return f" (only for {' and '.join(takers)})" if takers else guess_name(option, options)
        chosen = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        return guess_name(chosen[1], re.findall(r"[\w.-]+", chosen[2])) if chosen else ""


def _read(low: float, high: float, text: str) -> float:
    """The number from `low` to `high`: whole if `low` is."""
    try:
        return read_whole(text, low, int(high)) if isinstance(low, int) else read_amount(text, low, high)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


TYPES: dict[str, Callable[[str], Any]] = {
    "positive_int": partial(_read, 1, MAX_COUNT),
    "trials": partial(_read, 1, MAX_TRIALS),
    "whole_number": partial(_read, 0, MAX_COUNT),
    "seed_number": partial(_read, 0, 2**32 - 1),
    "positive_float": partial(_read, math.nextafter(0.0, 1.0), MAX_AMOUNT),
    "share": partial(_read, 0.0, 1.0),
    "Path": Path,
}
"""`type` of an argument in `arguments.yaml` -> function that converts its text."""


def take(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of these arguments by name, for a function or a class that calls them the same."""
    return {name: getattr(args, name) for name in names}


def add_arguments(parser: argparse._ActionsContainer, arguments: list[Any]) -> None:
    """Add the arguments of a command, as its entry in `arguments.yaml` lists them."""
    for entry in arguments:
        if isinstance(entry, list):
            add_arguments(parser, entry)
        elif "one_of" in entry:
            add_arguments(parser.add_mutually_exclusive_group(), entry["one_of"])
        elif "actions" in entry:
            assert isinstance(parser, argparse.ArgumentParser)
            parser.set_defaults(default_action=entry.get("default"))
            actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
            for name, action in entry["actions"].items():
                own = actions.add_parser(name, help=action["help"], epilog=parser.epilog)
                add_arguments(own, action["arguments"])
        else:
            options = {key: value for key, value in entry.items() if key != "name"}
            if "type" in options:
                options["type"] = TYPES[options["type"]]
            parser.add_argument(*entry["name"].split(), **options)
