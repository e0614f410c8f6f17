"""Mutation score of judging, ledger, job identity, traces and space: the share of wrong changes that tests detect.

`python benchmarks/mutation.py judging ledger --count 30` copies the repository's code and tests to a temporary folder,
changes one operator, comparison or constant at a time (a random sample of each group, fixed by `--seed`) and runs the
tests of that group: first the files that import the changed module, then, if the mutant survives, the others. Every
operator, comparison, number and boolean outside annotations can be mutated. Not mutated are texts (messages, names,
documentation), the maximum length of a message (`one_line`), and `strict=` of `zip`, which is an assertion like
`assert`. Only tests in `tests/light` are run.

A mutant of job identity may end processes that are not its own: run that group in a PID namespace of its own, with
`unshare --pid --fork --mount-proc --kill-child python benchmarks/mutation.py identity`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
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
COPIED = ("benchmarks", "cclsearch", "tests", "launchers", "objectives", "policies", "workloads")
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
class Group:
    """Code that is mutated (patterns of paths), and the test files that must detect it."""

    code: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = {
    "judging": Group(
        (
            "cclsearch/scoring/*.py",
            "cclsearch/evaluation/comparison.py",
            *(f"cclsearch/tasks/training/{name}.py" for name in (
                "admission", "losses", "measurements", "thresholds", "time_rules", "trace_rules",
            )),
        ),
        (
            "test_admission", "test_admit", "test_agreement", "test_catalog", "test_collect", "test_comparison",
            "test_constraints", "test_evaluate", "test_objective", "test_task_contract", "test_thresholds",
            "test_trace_rules",
        ),
    ),
    "ledger": Group(
        ("cclsearch/record/*.py", "cclsearch/core/atomic_file.py", "cclsearch/core/job_file.py"),
        (
            "test_job_file", "test_judging_error", "test_ledger", "test_ledger_damage", "test_lock", "test_noise",
            "test_observations", "test_run_folder", "test_shared_cause", "test_trials", "test_unknown_trials",
        ),
    ),
    "identity": Group(
        (
            "cclsearch/launch/slurm/job_files.py",
            "cclsearch/launch/ownership.py",
            "cclsearch/core/lock_file.py",
            "cclsearch/core/values.py",
            "cclsearch/core/processes.py",
            "cclsearch/record/lock.py",
        ),
        (
            "test_launch_local", "test_lock", "test_ownership", "test_processes", "test_slurm_identity",
        ),
    ),
    "trace": Group(
        ("cclsearch/trace/metrics/*.py", *(f"cclsearch/trace/{name}.py" for name in (
            "collectives", "intervals", "windows",
        ))),
        (
            "test_trace_diagnosis", "test_trace_metrics", "test_trace_metrics_device", "test_trace_metrics_totals",
            "test_trace_operators", "test_trace_score", "test_trace_steps",
        ),
    ),
    "space": Group(
        ("cclsearch/space/*.py", "cclsearch/stats/*.py", "cclsearch/tasks/training/space_rules.py"),
        (
            "test_build", "test_collect", "test_framework", "test_knobs", "test_noise", "test_space",
            "test_space_rules", "test_table",
        ),
    ),
}  # fmt: skip


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


def find_sites(root: Path, group: Group) -> Iterator[Site]:
    """Yield every possible mutation of the group's code, in order."""
    for pattern in group.code:
        for path in sorted(root.glob(pattern)):
            mutator = Mutator()
            mutator.visit(ast.parse(path.read_text(encoding="utf-8")))
            for number, (line, what) in enumerate(mutator.sites):
                yield Site(str(path.relative_to(root)), number, line, what)


def mutate(code: str, number: int) -> str:
    """Return the code with this one mutation."""
    tree = Mutator(number).visit(ast.parse(code))
    return ast.unparse(ast.fix_missing_locations(tree))


def find_test(tests: Path, name: str) -> Path:
    """Return the test file of that name, in whichever folder it is."""
    [found] = tests.rglob(f"{name}.py")
    return found


def order_tests(tests: Path, names: Sequence[str], module: str) -> tuple[list[str], list[str]]:
    """Return the test files that import the module or are named after it, and the other ones."""
    own = [
        name
        for name in names
        if name == f"test_{module.rpartition('.')[2]}"
        or f"from {module} import" in find_test(tests, name).read_text(encoding="utf-8")
    ]
    return own, [name for name in names if name not in own]


def is_killed(folder: Path, group: Group, site: Site) -> bool:
    """Return whether a test of the group fails on the copy with this mutation."""
    path = folder / site.path
    original = path.read_text(encoding="utf-8")
    path.write_text(mutate(original, site.number), encoding="utf-8")
    try:
        parts = order_tests(folder / "tests", group.tests, site.path.removesuffix(".py").replace("/", "."))
        return any(run_tests(folder, names) not in SURVIVED for names in parts if names)
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

            files = [str(find_test(folder / "tests", name)) for name in names]
            code = int(
                pytest.main(
                    ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not serial and not untimed", *files]
                )
            )
        finally:
            os._exit(code)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    print(f"ended after {WAIT_S:.0f} s:", *names, flush=True)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def score_group(folder: Path, name: str, options: argparse.Namespace) -> str:
    """Test a sample of the group's mutants, print the survivors, and return the group's mutation score in words."""
    group = GROUPS[name]
    sites = [site for site in find_sites(folder, group) if options.only in site.path]
    chosen = random.Random(options.seed).sample(sites, min(options.count, len(sites)))
    if run_tests(folder, group.tests, keep_bytecode=True) != 0:
        raise SystemExit(f"{name}: the tests fail without any mutation")
    killed = 0
    for count, site in enumerate(chosen, 1):
        if is_killed(folder, group, site):
            killed += 1
        else:
            print(f"survived: {site.path}:{site.line} {site.what}", flush=True)
        if count % 10 == 0:
            print(f"{name}: {killed} of {count} killed", flush=True)
    share = f" ({killed / len(chosen):.1%})" if chosen else ""
    return f"{name}: {killed} of {len(chosen)} mutants killed{share}, of {len(sites)} places"


def load_packages() -> None:
    """Import what the tests need, once for all forked processes."""
    for name in ("hypothesis", "msgspec", "numpy", "pandas", "pydantic", "pytest", "scipy.stats", "yaml"):
        importlib.import_module(name)


def measure() -> None:
    """Test a sample of mutants of each group; print the survivors and the mutation scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)} (default: all)")
    parser.add_argument("--count", type=int, default=60, help="mutants of each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only mutate files whose path contains this text")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"unknown group {min(unknown)!r}; the groups are {', '.join(GROUPS)}")
    load_packages()
    with tempfile.TemporaryDirectory(prefix="ccl-mutants-") as name:
        folder = Path(name)
        for part in COPIED:
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for group in options.groups or GROUPS:
            print(score_group(folder, group, options), flush=True)


if __name__ == "__main__":
    measure()
