"""Prints how the code is laid out: modules at the root, imports between packages, import cycles, and sizes.

    python benchmarks/structure.py [CHECKOUT ...]

Several checkouts print one below the other, so that a layout can be compared with an earlier one. Imports inside
functions and under `TYPE_CHECKING` count like any other. Complexity is McCabe's, with comprehensions and boolean
operators counted as branches.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections.abc import Iterable
from pathlib import Path

BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.comprehension)


def read_modules(checkout: Path) -> dict[str, ast.Module]:
    """Module name -> syntax tree of everything under `cclsearch/`."""
    found = {}
    for path in sorted((checkout / "cclsearch").rglob("*.py")):
        parts = path.relative_to(checkout).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


def find_imports(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules of the engine that it imports, wherever in the file."""
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


def find_cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or in a ring (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(arrows[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                cycles.append(sorted(stack[at:]))
            del stack[at:]

    for name in arrows:
        if name not in index:
            visit(name)
    return cycles


def group_arrows(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between top-level packages; a module at the root is a package of its own."""
    grouped: dict[str, set[str]] = {}
    for name, others in arrows.items():
        package = name.split(".")[1] if "." in name else name
        grouped.setdefault(package, set()).update(other.split(".")[1] if "." in other else other for other in others)
    return {package: others - {package} for package, others in grouped.items()}


def count_complexity(function: ast.AST) -> int:
    """1 plus the branches of a function, nested functions included."""
    branches = sum(isinstance(node, BRANCHES) for node in ast.walk(function))
    operators = sum(len(node.values) - 1 for node in ast.walk(function) if isinstance(node, ast.BoolOp))
    return 1 + branches + operators


def find_repeated_classes(modules: dict[str, ast.Module]) -> list[str]:
    """Public class names that several modules define."""
    homes: dict[str, int] = {}
    for tree in modules.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name] = homes.get(node.name, 0) + 1
    return sorted(name for name, count in homes.items() if count > 1)


def summarize(checkout: Path) -> list[tuple[str, str]]:
    """Rows of label and value for one checkout."""
    modules = read_modules(checkout)
    arrows = find_imports(modules)
    packages = group_arrows(arrows)
    functions = [
        node
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    complexity = [count_complexity(node) for node in functions]
    root = sorted(path.stem for path in (checkout / "cclsearch").glob("*.py"))
    files = [path.read_text().count("\n") for path in (checkout / "cclsearch").rglob("*.py")]
    repeated = find_repeated_classes(modules)
    return [
        ("modules at the root", str(len(root))),
        ("packages and root modules", str(len(packages))),
        ("imports between them", str(sum(map(len, packages.values())))),
        ("cycles between them", join(find_cycles(packages))),
        ("modules", str(len(modules))),
        ("imports between modules", str(sum(map(len, arrows.values())))),
        ("cycles between modules", join(find_cycles(arrows))),
        ("lines", f"{sum(files):,}"),
        ("lines of a file: median, largest", f"{statistics.median(files):g}, {max(files)}"),
        ("functions", f"{len(functions):,}"),
        ("lines of a function: median, largest", f"{statistics.median(lengths):g}, {max(lengths)}"),
        ("complexity of a function: median, largest", f"{statistics.median(complexity):g}, {max(complexity)}"),
        ("class names used twice or more", f"{len(repeated)}: {', '.join(repeated)}" if repeated else "0"),
    ]


def join(cycles: Iterable[list[str]]) -> str:
    """The cycles, each in one pair of brackets; `0` if there are none."""
    found = [f"({' '.join(name.removeprefix('cclsearch.') for name in cycle)})" for cycle in cycles]
    return f"{len(found)}: {' '.join(found)}" if found else "0"


def main() -> None:
    """Print one block per checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(".")])
    for checkout in parser.parse_args().checkouts:
        print(checkout.resolve().name)
        for label, value in summarize(checkout):
            print(f"  {label:<42} {value}")


if __name__ == "__main__":
    main()
