"""Rules that a reviewer would otherwise repeat."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT

ENGINE = sorted((ROOT / "cclsearch").rglob("*.py"))

LEVELS = [
    {"core"},
    {"network", "charts"},
    {"card"},
    {"space"},
    {"recording", "stats"},
    {"launch"},
    {"scoring", "trace"},
    {"propose"},
    {"tasks"},
    {"record"},
    {"run"},
    {"tracking"},
    {"plan", "report", "study"},
    {"evaluation", "export"},
    {"loop"},
    {"analysis", "nightly", "checks"},
    {"api", "ui", "testing", "plugins"},
    {"cli"},
    {"__main__", "cclsearch"},
]
"""The order of the packages: each imports only from levels before its own."""
SHARED_VALUES = {
    ("scoring", "launch"): {"contract"},
    ("trace", "launch"): {"contract"},
    ("propose", "scoring"): {"objective"},
    ("record", "launch"): {"base", "contract"},
    ("record", "propose"): {"events", "observations"},
    ("record", "scoring"): {"outcome"},
    ("report", "launch"): {"contract"},
    ("report", "propose"): {"events"},
    ("report", "scoring"): {"objective", "outcome"},
    ("report", "record"): {"event", "state", "trial"},
}
"""(package, other package) -> the modules of frozen values that it may import. Other pairs of `PARTS` share none."""
PARTS = {"propose", "launch", "trace", "scoring", "record", "report"}
ROOT_MODULES = {"__init__", "__main__", "plugins"}


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; callers do not change it."""
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


MODULES = {module_of(path): path for path in ENGINE}


@cache
def imports_of(path: Path) -> set[str]:
    """Return the modules of the engine that a file imports, at the top, in a function or for type checking."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cclsearch":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
    return found - {"cclsearch"}


def cross_package_imports() -> list[tuple[str, str]]:
    """Return every import between modules of different packages."""
    imports = [(module, other) for module, path in MODULES.items() for other in sorted(imports_of(path))]
    return [(module, other) for module, other in imports if package_of(module) != package_of(other)]


def test_packages_import_only_from_lower_levels():
    level = {package: number for number, packages in enumerate(LEVELS) for package in packages}
    assert sorted({package_of(module) for module in MODULES} - set(level) - {"cclsearch"}) == []
    wrong = [
        f"{module} imports {other}"
        for module, other in cross_package_imports()
        if level[package_of(other)] >= level[package_of(module)]
    ]
    assert wrong == []


def test_there_is_no_import_cycle_not_even_a_lazy_one():
    graph = {module: imports_of(path) - {module} for module, path in MODULES.items()}
    assert len(tuple(TopologicalSorter(graph).static_order())) >= len(MODULES)


def test_parts_of_a_trial_share_only_frozen_values():
    wrong = [
        f"{module} imports {other}"
        for module, other in cross_package_imports()
        if {package_of(module), package_of(other)} <= PARTS
        and other.split(".")[2] not in SHARED_VALUES.get((package_of(module), package_of(other)), set())
    ]
    assert wrong == []


def test_the_root_has_few_modules_and_packages_have_docstrings():
    assert {path.stem for path in (ROOT / "cclsearch").glob("*.py")} <= ROOT_MODULES
    assert [
        module for module, path in MODULES.items() if path.stem == "__init__" and not ast.get_docstring(parse(path))
    ] == []


def test_the_architecture_page_names_every_package():
    page = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    named = {word for code in re.findall(r"`([^`]+)`", page) for word in re.findall(r"\w+", code)}
    assert sorted({package_of(module) for module in MODULES} - named - {"cclsearch", "__main__"}) == []


BETWEEN = (
    *("recording", "scoring", "propose", "record", "run", "plan", "report", "loop", "evaluation", "export"),
    *("analysis", "nightly", "checks", "cli"),
)
"""Packages that know a task only by its primary metric, its unit and its words."""
OF_TRAINING = re.compile(
    r"step[ _]times?|tokens_per|(?<![a-z])mfu(?![a-z])|seq_len|sequence length|global[ _]batch|micro[ _-]batch"
    r"|gradient_accumulation|warmup_steps|timed_steps|profiled_steps|optimizer step",
    re.IGNORECASE,
)
NAMES_TRAINING = {
    "export/ccl_bench.py": "names of parallel degrees in cards of CCL-Bench",
    "cli/score.py": "reference of CCL-Bench's step score",
    "cli/what_if.py": "projects the steps of a trace",
    "scoring/evidence.py": "the steps of a trace",
    "evaluation/trace_evidence.py": "the steps of a trace",
}
"""File -> why it may name metrics, fields or knobs of training."""


def words_of(path: Path) -> set[str]:
    """Return names and texts of a file, without docstrings and without the examples of `--help`."""
    left_out: set[int] = set()
    words = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            left_out |= {id(line.value) for line in node.body if isinstance(line, ast.Expr)}
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EXAMPLE" for t in node.targets):
            left_out |= {id(part) for part in ast.walk(node.value)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            words.add(node.value)
        words |= {
            word for field in ("id", "attr", "arg", "name") if isinstance(word := getattr(node, field, None), str)
        }
    return words


def test_the_packages_between_name_nothing_of_training():
    found = {
        path.relative_to(ROOT / "cclsearch").as_posix(): hits
        for path in ENGINE
        if package_of(module_of(path)) in (*BETWEEN, "tasks")
        and (hits := sorted(word for word in words_of(path) if OF_TRAINING.search(word)))
    }
    of_task = [path for path in found if path.startswith(("tasks/training/", "tasks/serving/", "tasks/inference/"))]
    assert len(of_task) > 5, "the check finds such words where they belong"
    assert {path: hits for path, hits in found.items() if path not in (*of_task, *NAMES_TRAINING)} == {}
    assert sorted(set(NAMES_TRAINING) - set(found)) == [], "no entry that is not needed"


def test_files_that_the_architecture_page_names_exist():
    page = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert len(named) > 25
    assert [name for name in named if not (ROOT / "cclsearch" / name).is_file() and not (ROOT / name).is_file()] == []


def test_a_class_name_occurs_once():
    classes = [
        node.name
        for path in ENGINE
        for node in parse(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name, count in Counter(classes).items() if count > 1] == []


def test_dependencies_are_declared_and_imported():
    """`tzdata` is data for `zoneinfo`, not a module; `pydantic_core` is a part of pydantic."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[^\w-]", text)[0] for text in project["dependencies"]}
    optional = {re.split(r"[^\w-]", text)[0] for texts in project["optional-dependencies"].values() for text in texts}
    module = {
        "pyyaml": "yaml",
        "genai-prices": "genai_prices",
        "pydantic-monty": "pydantic_monty",
        "optuna-dashboard": "optuna_dashboard",
        "vl-convert-python": "vl_convert",
        "mlflow-skinny": "mlflow",
        "prometheus-client": "prometheus_client",
    }
    imported = set()
    for path in ENGINE:
        for node in ast.walk(parse(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.split(".")[0] for name in names}
    third_party = imported - set(sys.stdlib_module_names) - {"cclsearch", "pydantic_core"}
    declared = {module.get(name, name) for name in required}
    assert sorted(declared - third_party - {"tzdata"}) == []
    assert sorted(third_party - declared - {module.get(name, name) for name in optional}) == []


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from cclsearch.cli import main; main(['--help']);"
        "heavy = {'numpy', 'pandas', 'optuna', 'openai', 'anthropic', 'torch', 'jax', 'scipy', 'mcp', 'pydantic'}"
        "| {'argparse'};"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "HEAVY []" in done.stdout


def test_scoring_a_trace_imports_no_proposer():
    code = (
        "import sys; from cclsearch.cli import main; main(['score', sys.argv[1]]);"
        "ours = [name for name in sys.modules if name.startswith(('cclsearch.stats.closed', 'cclsearch.propose.b'))];"
        "print('HEAVY', sorted({'scipy', 'optuna', 'torch', 'openai'} & set(sys.modules)), ours)"
    )
    command = [sys.executable, "-c", code, str(ROOT / "tests" / "recorded" / "gloo-ddp2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "HEAVY [] []" in done.stdout


def test_help_lists_every_command_once_in_five_groups(cli):
    from cclsearch.cli import COMMANDS, GROUPS

    shown = cli.out(["--help"])
    titles = re.findall(r"(?m)^(\w[\w ]*):$", shown)
    assert titles == list(GROUPS)
    assert len(titles) == 5
    assert re.findall(r"(?m)^  ([\w-]+)  +\w", shown) == list(COMMANDS)
    assert len(COMMANDS) == sum(map(len, GROUPS.values())), "no command is in two groups"


def test_every_command_has_help_with_an_example():
    from cclsearch.cli import COMMANDS, make_parser

    for name in COMMANDS:
        text = make_parser(name).format_help()
        assert f"ccl-search {name}" in text.split("example:")[1], name


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "misc.py", "common_utils.py"])
def test_no_module_is_a_collection_of_helpers(name):
    assert [path for path in ENGINE if path.name == name] == []


def test_public_functions_and_classes_have_docstrings():
    undocumented = []
    for path in ENGINE:
        if "cli" in path.relative_to(ROOT).parts:
            continue
        for node in parse(path).body:
            is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            is_public = is_public and node.name != "main"
            if is_public and ast.get_docstring(node) is None:
                undocumented.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert undocumented == []


def test_files_and_functions_stay_small():
    """Typical sizes are 250 lines per file and 12 per function; these limits catch only clear exceptions."""
    large = []
    for path in ENGINE:
        text = path.read_text()
        if text.count("\n") > 450:
            large.append(f"{path.relative_to(ROOT)} ({text.count(chr(10))} lines)")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 70:
                large.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert large == []


def test_the_engine_has_no_unfinished_code():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    assert [str(path.relative_to(ROOT)) for path in ENGINE if marks.search(path.read_text())] == []


def test_content_folders_contain_no_packages():
    folders = ("policies", "launchers", "objectives", "workloads")
    assert [str(p) for folder in folders for p in (ROOT / folder).rglob("__init__.py")] == []


def test_text_avoids_phrases_that_need_a_second_reading():
    """A sample of them; CONTRIBUTING.md says how the project speaks."""
    odd = re.compile(
        r"\b(nobody|whoever|mend(s|ed|ing)?|goes (on with|again)|stands? (in|there|here)|lies? (in|there|beside)"
        r"|tells? (of|apart)|told (of|apart)|(?<!there )(is|are) no (?!longer)|what it cannot)\b",
        re.IGNORECASE,
    )
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = []
    for path in [*ENGINE, *pages, *(ROOT / "launchers").iterdir()]:
        if path.is_file():
            lines = path.read_text(errors="replace").splitlines()
            found += [
                f"{path.relative_to(ROOT)}:{n} {hit[0]!r}"
                for n, line in enumerate(lines, 1)
                if (hit := odd.search(line))
            ]
    assert found == []


def test_every_test_can_fail():
    bare = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and not _asserts(node):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert bare == []


def _asserts(function: ast.FunctionDef) -> bool:
    """Whether a test has an `assert`, `pytest.raises`, or a call of a helper that is named for what it asserts."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name.lstrip("_").startswith(("assert", "check", "expect", "raises", "require")):
                return True
    return False


LIMIT_WORDS = re.compile(r"(?:^|_)(?:LIMIT|MAX|MIN|MAXIMUM|MINIMUM|MOST|LEAST|CAP|CEILING|FLOOR)(?:_|$)")
NOT_LIMITS = {
    "LIMIT_VARIABLE": "name of an environment variable",
    "LIMIT_FIELDS": "fields of cards",
    "_AT_MOST": "beginning of a field's name",
    "_AT_LEAST": "beginning of a field's name",
    "_MOST_SEVERE_FIRST": "an order",
}
"""Constant with such a word in its name -> what it is instead of a limit."""


def test_limits_are_called_max_or_min():
    names = {
        target.id
        for path in ENGINE
        for node in parse(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for part in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(part)
        if isinstance(target, ast.Name) and target.id.isupper() and LIMIT_WORDS.search(target.id)
    }
    assert len(names) > 80, "the check finds the limits"
    other = {name for name in names if not re.match(r"_?(?:DEFAULT_)?(?:MAX|MIN)_[A-Z]", name)}
    assert other == set(NOT_LIMITS)
