"""Argument types, and arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    return whole_number(text, 1)


def whole_number(text: str, minimum: int = 0) -> int:
    """A whole number of at least `minimum`."""
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, not {text!r}")
    return number


def seed_number(text: str) -> int:
    """A whole number that every random generator accepts as a seed."""
    number = whole_number(text)
    if number >= 2**32:
        raise argparse.ArgumentTypeError(f"must be less than {2**32}, not {text!r}")
    return number


def positive_float(text: str) -> float:
    """A finite number above 0."""
    import math

    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def add_runs_folder(parser: argparse.ArgumentParser) -> None:
    """Add `--runs`, the folder of runs."""
    parser.add_argument("--runs", metavar="FOLDER", type=Path, help="folder of runs (default: the project's runs/)")


def add_card_changes(parser: argparse.ArgumentParser) -> None:
    """Add the options that change a workload card: its fields, framework and knobs."""
    overlay = "YAML file whose fields replace the card's"
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="set a field of the card")
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help=overlay)
    parser.add_argument("--framework", metavar="NAME", help="framework to use instead of the card's")
    knob = "add a knob, or limit its choices"
    parser.add_argument("--knob", action="append", default=[], metavar="NAME=A,B", help=knob)


def add_use_fewer(parser: argparse.ArgumentParser) -> None:
    """Add `--use-fewer`."""
    what = "also search configurations that use fewer accelerators"
    parser.add_argument("--use-fewer", action="store_true", help=what)


def add_run(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add `RUN`: a run's name, its folder, or `last`."""
    what = "a run's name, its folder, or `last`"
    parser.add_argument("run", metavar="RUN", nargs="?" if optional else None, help=what)
    add_runs_folder(parser)
