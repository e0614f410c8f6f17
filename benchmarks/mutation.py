"""Mutation score of score, space, stats and the space rules: the share of small wrong changes that their tests detect.

`python benchmarks/mutation.py --count 60` copies the repository's code and tests to a temporary folder, changes one
operator, comparison or constant at a time (a fixed random sample) and runs the tests of these packages: first the files
that import the changed module, then, if the mutant survives, the others. Every operator, comparison, number and boolean
outside annotations can be mutated. Not mutated are texts (messages, names, documentation), the maximum length of a
message (`one_line`), and `strict=` of `zip`, which is an assertion like `assert`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = (
    "cclsearch/score/*.py",
    "cclsearch/space/*.py",
    "cclsearch/stats/*.py",
    "cclsearch/tasks/training/admission.py",
    "cclsearch/tasks/training/measurements.py",
    "cclsearch/tasks/training/space_rules.py",
)
TESTS = (
    "test_admission", "test_admit", "test_evaluate", "test_noise", "test_objective", "test_space", "test_framework",
    "test_collect", "test_thresholds", "test_catalog", "test_expression",
    "test_build", "test_parse", "test_table", "test_degree_rules", "test_space_rules", "test_knobs",
)  # fmt: skip
COPIED = ("cclsearch", "tests", "launchers", "objectives", "policies", "workloads")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.USub: ast.UAdd, ast.Not: ast.UAdd,
}  # fmt: skip
WAIT_S = 120.0
SURVIVED = (0, 5)
"""Exit codes of pytest for a surviving mutant: every test passed, or there was none to run."""


@dataclass(frozen=True)
class Site:
    """One possible mutation: the n-th of its file."""

    path: str
    number: int
    line: int
    what: str


class Mutator(ast.NodeTransformer):
    """Numbers the possible mutations of a module and applies the one with number `target`."""

    def __init__(self, target: int | None = None) -> None:
        self.target = target
        self.sites: list[tuple[int, str]] = []

    def _hit(self, node: ast.AST, what: str) -> bool:
        self.sites.append((getattr(node, "lineno", 0), what))
        return len(self.sites) - 1 == self.target

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for n, operator in enumerate(node.ops):
            new = SWAPS.get(type(operator))
            if new and self._hit(node, f"{type(operator).__name__} to {new.__name__}"):
                node.ops[n] = new()  # type: ignore[assignment]
        return node

    def _visit_operator(self, node: ast.BinOp | ast.BoolOp | ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        is_union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
        new = None if is_union else SWAPS.get(type(node.op))
        if new and self._hit(node, f"{type(node.op).__name__} to {new.__name__}"):
            if isinstance(node.op if isinstance(node, ast.UnaryOp) else None, ast.Not):
                return node.operand  # type: ignore[union-attr]
            node.op = new()  # type: ignore[assignment]
        return node

    visit_BinOp = visit_BoolOp = visit_UnaryOp = _visit_operator

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._hit(node, f"{node.value} to {not node.value}"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, int | float) and self._hit(node, f"{node.value} to {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called == "one_line":
            node.args[:1] = [self.visit(text) for text in node.args[:1]]
        elif called == "zip":
            node.args = [self.visit(given) for given in node.args]
        else:
            self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.defaults = [self.visit(value) for value in node.defaults]
        node.kw_defaults = [value if value is None else self.visit(value) for value in node.kw_defaults]
        return node


def find_sites(root: Path) -> Iterator[Site]:
    """Yield every possible mutation of the code, in order."""
    for pattern in CODE:
        for path in sorted(root.glob(pattern)):
            mutator = Mutator()
            mutator.visit(ast.parse(path.read_text(encoding="utf-8")))
            for number, (line, what) in enumerate(mutator.sites):
                yield Site(str(path.relative_to(root)), number, line, what)


def mutate(code: str, number: int) -> str:
    """Return the code with this one mutation."""
    tree = Mutator(number).visit(ast.parse(code))
    return ast.unparse(ast.fix_missing_locations(tree))


def order_tests(tests: Path, module: str) -> tuple[list[str], list[str]]:
    """Return the test files that import the module or are named after it, and the other ones."""
    own = [
        name
        for name in TESTS
        if name == f"test_{module.rpartition('.')[2]}"
        or f"from {module} import" in (tests / f"{name}.py").read_text(encoding="utf-8")
    ]
    return own, [name for name in TESTS if name not in own]


def is_killed(folder: Path, site: Site) -> bool:
    """Return whether a test fails on the copy with this mutation."""
    path = folder / site.path
    original = path.read_text(encoding="utf-8")
    path.write_text(mutate(original, site.number), encoding="utf-8")
    try:
        groups = order_tests(folder / "tests", site.path.removesuffix(".py").replace("/", "."))
        return any(run_tests(folder, names) not in SURVIVED for names in groups if names)
    finally:
        path.write_text(original, encoding="utf-8")


def run_tests(folder: Path, names: Sequence[str], *, keep_bytecode: bool = False) -> int:
    """Return the exit code of these tests on the copy, run in a forked process; -1 if they hang (also a kill)."""
    child = os.fork()
    if not child:
        code = 99
        try:
            os.chdir(folder)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            sys.path.insert(0, str(folder))
            sys.dont_write_bytecode = not keep_bytecode
            import pytest

            files = [f"tests/{name}.py" for name in names]
            code = int(
                pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not serial", *files])
            )
        finally:
            os._exit(code)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def measure() -> None:
    """Test a sample of mutants; print the survivors and the mutation score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only mutate files whose path contains this text")
    args = parser.parse_args()
    import hypothesis
    import msgspec
    import numpy
    import pandas
    import pydantic
    import pytest
    import scipy.stats
    import yaml

    loaded = (hypothesis, msgspec, numpy, pandas, pydantic, pytest, scipy.stats, yaml)
    with tempfile.TemporaryDirectory(prefix="ccl-mutants-") as name:
        folder = Path(name)
        for part in COPIED:
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        sites = [site for site in find_sites(folder) if args.only in site.path]
        chosen = random.Random(args.seed).sample(sites, min(args.count, len(sites)))
        if run_tests(folder, TESTS, keep_bytecode=True) != 0:
            raise SystemExit(f"the tests fail without any mutation (with {len(loaded)} packages loaded)")
        killed = 0
        for count, site in enumerate(chosen, 1):
            if is_killed(folder, site):
                killed += 1
            else:
                print(f"survived: {site.path}:{site.line} {site.what}", flush=True)
            if count % 10 == 0:
                print(f"{killed} of {count} killed", flush=True)
    with contextlib.suppress(ZeroDivisionError):
        print(f"mutation score: {killed} of {len(chosen)} killed ({killed / len(chosen):.1%}), of {len(sites)} mutants")


if __name__ == "__main__":
    measure()
