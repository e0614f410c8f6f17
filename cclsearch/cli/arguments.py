"""Argument types, and arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
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


def add_llm_limits(parser: argparse.ArgumentParser) -> None:
    """Add `--max-tokens` and `--max-usd`, limits over the whole search."""
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="limit on the LLM's tokens")
    parser.add_argument("--max-usd", type=positive_float, metavar="X", help="limit on the LLM's cost in US dollars")


def add_run(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add `RUN`: a run's name, its folder, or `last`."""
    what = "a run's name, its folder, or `last`"
    parser.add_argument("run", metavar="RUN", nargs="?" if optional else None, help=what)
    add_runs_folder(parser)
