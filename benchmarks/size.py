"""Prints how large the project is, how its code is laid out, and which files two commands walk through.

    python benchmarks/size.py [CHECKOUT ...] [--walks]

Lines of code are lines that are neither blank nor a comment nor part of a docstring (docstrings under constants
included). Imports inside functions and under `TYPE_CHECKING` count like any other. `--walks` runs `run --launcher
replay` and `score`: how many files of the engine they load, how many of these run a function, and how often a call
enters another file than the call before.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

KINDS = ("lines", "code", "docstrings", "blank", "comments")
WALKS = {
    "run --launcher replay": ["run", "--workload", "wl2", "--budget", "15", "--launcher", "replay", "--quiet"],
    "score of a trace": ["score", "tests/recorded/gloo-ddp2"],
}
"""What is run -> arguments of ccl-search; a path is one of the checkout."""
WALK = """
import json, os, sys, threading
root, words = sys.argv[1], sys.argv[2:]
engine, seen, last, changes = os.path.join(root, "cclsearch") + os.sep, set(), None, 0
def enter(frame, event, argument):
    global last, changes
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(engine) and code.co_name != "<module>":
        changes += code.co_filename != last
        last = code.co_filename
        seen.add(last)
from cclsearch.cli import main
threading.setprofile(enter)
sys.setprofile(enter)
try:
    main(words)
finally:
    sys.setprofile(None)
loaded = [m for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").startswith(engine)]
print(json.dumps([len(loaded), len(seen), changes]), file=sys.stderr)
"""


def read_modules(checkout: Path) -> dict[str, ast.Module]:
    """Return module name -> syntax tree of everything under `cclsearch/`."""
    found = {}
    for path in sorted((checkout / "cclsearch").rglob("*.py")):
        parts = path.relative_to(checkout).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def find_docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Yield every string that stands alone in a body: docstrings, also of constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else ():
            if (
                isinstance(line, ast.Expr)
                and isinstance(line.value, ast.Constant)
                and isinstance(line.value.value, str)
            ):
                yield line


def count_lines(path: Path) -> Counter[str]:
    """Return how many lines of each kind a file has."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for each in find_docstrings(ast.parse(text)):
        documented |= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    counts = Counter(lines=0)
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        kind = "docstrings" if number in documented else "code" if bare else "blank"
        counts.update({"lines": 1, "comments" if kind == "code" and bare.startswith("#") else kind: 1})
    return counts


def print_lines(checkout: Path) -> None:
    """Print the lines of each package and of the other folders, and the words of the documents."""
    engine, total = checkout / "cclsearch", Counter[str]()
    packages: dict[str, Counter[str]] = {}
    for path in sorted(engine.rglob("*.py")):
        parts = path.relative_to(engine).parts
        packages.setdefault(parts[0] if len(parts) > 1 else "(root)", Counter()).update(count_lines(path))
    print(f"  {'package':<14}" + "".join(f"{kind:>12}" for kind in KINDS))
    for counts in packages.values():
        total.update(counts)
    for name, counts in [*sorted(packages.items()), ("engine", total)]:
        print(f"  {name:<14}" + "".join(f"{counts[kind]:>12,}" for kind in KINDS))
    for name in ("tests", "benchmarks", "launchers"):
        print(f"  {name:<14}{sum(count_lines(path)['lines'] for path in (checkout / name).rglob('*.py')):>12,}")
    pages = {
        "README": [checkout / "README.md"],
        "CHANGELOG": [checkout / "CHANGELOG.md"],
        "docs": (checkout / "docs").rglob("*.md"),
        "benchmarks": (checkout / "benchmarks").glob("*.md"),
    }
    words = {name: sum(len(p.read_text(encoding="utf-8").split()) for p in paths) for name, paths in pages.items()}
    print(f"  words of documents: {sum(words.values()):,} ({', '.join(f'{k} {v:,}' for k, v in words.items())})")


def find_imports(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return module -> modules of the engine that it imports, wherever in the file."""
    arrows: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cclsearch"):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    arrows[name].add(whole if whole in modules else node.module)
            elif isinstance(node, ast.Import):
                arrows[name] |= {alias.name for alias in node.names if alias.name in modules}
        arrows[name] &= set(modules) - {name}
    return arrows


def find_cycle(arrows: dict[str, set[str]]) -> str:
    """Return one ring of modules that import each other; `none` if there is none."""
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        return " ".join(error.args[1])
    return "none"


def group_arrows(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between top-level packages; a module at the root is a package of its own."""
    grouped: dict[str, set[str]] = {}
    for name, others in arrows.items():
        package = name.split(".")[1] if "." in name else name
        grouped.setdefault(package, set()).update(other.split(".")[1] if "." in other else other for other in others)
    return {package: others - {package} for package, others in grouped.items()}


def summarize(checkout: Path) -> list[tuple[str, str]]:
    """Return rows of label and value on the layout of one checkout."""
    modules = read_modules(checkout)
    arrows = find_imports(modules)
    packages = group_arrows(arrows)
    nodes = [node for tree in modules.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    public = [n for n in [*functions, *(n for n in nodes if isinstance(n, ast.ClassDef))] if not n.name.startswith("_")]
    documented = sum(ast.get_docstring(node) is not None for node in public)
    texts = [path.read_text(encoding="utf-8").splitlines() for path in (checkout / "cclsearch").rglob("*.py")]
    files = [len(lines) for lines in texts]
    return [
        ("modules at the root", str(len(list((checkout / "cclsearch").glob("*.py"))))),
        ("packages and root modules", str(len(packages))),
        ("imports between them", str(sum(map(len, packages.values())))),
        ("cycles between them", find_cycle(packages)),
        ("modules", str(len(modules))),
        ("imports between modules", str(sum(map(len, arrows.values())))),
        ("cycles between modules", find_cycle(arrows)),
        ("documented public functions and classes", f"{documented} of {len(public)} ({documented / len(public):.1%})"),
        ("longest line", str(max(len(line) for lines in texts for line in lines))),
        ("lines of a file: median, largest", f"{statistics.median(files):g}, {max(files)}"),
        ("functions", f"{len(functions):,}"),
        ("lines of a function: median, largest", f"{statistics.median(lengths):g}, {max(lengths)}"),
    ]


def print_walks(checkout: Path) -> None:
    """Run each of WALKS in an empty folder and print the files that it goes through."""
    for name, words in WALKS.items():
        at = [str(checkout / word) if (checkout / word).exists() else word for word in words]
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            command = [sys.executable, "-c", WALK, str(checkout), *at]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        try:
            loaded, run, changes = json.loads(done.stderr.splitlines()[-1])
        except (IndexError, ValueError):
            raise SystemExit(f"{name}: exit code {done.returncode}: {done.stderr[-1000:]}") from None
        print(f"  {name}: {loaded} files loaded, {run} run a function, {changes:,} changes of file")


def main() -> None:
    """Print one block per checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(".")])
    parser.add_argument("--walks", action="store_true", help="also run two commands and count the files they enter")
    args = parser.parse_args()
    for checkout in map(Path.resolve, args.checkouts):
        print(checkout.name)
        print_lines(checkout)
        for label, value in summarize(checkout):
            print(f"  {label:<42} {value}")
        if args.walks:
            print_walks(checkout)


if __name__ == "__main__":
    main()
