"""Start-up time of ccl-search and of `import cclsearch`, beside an empty Python: `python -c pass`.

    python benchmarks/startup.py [--repeats 60]

They are started in turn, so that load of other processes falls on all; the figure of each is its minimum.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

STARTED = {
    "empty Python": ["-c", "pass"],
    "ccl-search --help": ["-m", "cclsearch", "--help"],
    "ccl-search --version": ["-m", "cclsearch", "--version"],
    "ccl-search completion bash": ["-m", "cclsearch", "completion", "bash"],
    "TAB: a card": ["-m", "cclsearch", "completion", "--words", "run", "-w", "wl"],
    "TAB: a run": ["-m", "cclsearch", "completion", "--words", "show", ""],
    "import argparse, yaml": ["-c", "import argparse, yaml"],
    "import cclsearch": ["-c", "import cclsearch"],
}
"""What is started -> arguments of the interpreter."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    repeats = parser.parse_args().repeats
    fastest = {name: min(seconds) for name, seconds in start_in_turn(repeats).items()}
    empty = fastest["empty Python"]
    for name, seconds in fastest.items():
        more = f"  {1e3 * (seconds - empty):+6.1f} ms" if name != "empty Python" else ""
        print(f"{name:<28}{1e3 * seconds:7.1f} ms{more}")
    print(f"minimum of {repeats} starts each, in turn; goal: ccl-search at most +20 ms")


def start_in_turn(repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each start, after one round that warms the caches."""
    seconds: dict[str, list[float]] = {name: [] for name in STARTED}
    for number in range(repeats + 1):
        for name, arguments in STARTED.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    main()
