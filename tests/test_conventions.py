"""Rules of the house that a reviewer would otherwise say twice."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGINE = sorted((ROOT / "cclsearch").rglob("*.py"))

FLOORS = [
    {"core"},
    {"plugins", "draw", "card", "space"},
    {"stats"},
    {"tasks", "recording"},
    {"propose", "launch", "trace", "score", "record", "report", "run"},
    {"plan"},
    {"search"},
    {"analysis", "export"},
    {"nightly", "checks"},
    {"cli", "__main__"},
]
"""Lower floors never import from higher ones; `propose launch trace score record report` are rooms of one floor."""
ROOMS = {"propose", "launch", "trace", "score", "record", "report"}
BETWEEN_ROOMS = {
    ("report", "launch"): {"contract"},
    ("report", "record"): {"event", "state", "trial"},
    ("report", "score"): {"objective", "outcome"},
    ("score", "launch"): {"contract"},
    ("record", "launch"): {"base", "contract"},
    ("record", "propose"): {"base", "observations"},
    ("record", "score"): {"outcome"},
}
"""Room -> other room -> the modules of frozen values that may cross."""


def imports_of(path: Path) -> set[str]:
    """Modules of the engine that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cclsearch."):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("cclsearch.")}
    return found


def room_of(module: str) -> str:
    return module.split(".")[1]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def floor_of(room: str) -> int | None:
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def test_imports_run_one_way() -> None:
    wrong = []
    for path in ENGINE:
        module = module_of(path)
        if module.count(".") == 0 or module == "cclsearch.plugins":
            continue
        own = floor_of(room_of(module))
        for other in imports_of(path):
            theirs = floor_of(room_of(other))
            if own is None or theirs is None or theirs > own:
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_the_architecture_page_names_every_room_and_every_module_between_them() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = {word for code in re.findall(r"`([^`]+)`", page) for word in re.findall(r"\w+", code)}
    modules = {room_of(module_of(path)) for path in ENGINE if path.parent != ROOT / "cclsearch" or path.stem[0] != "_"}
    assert sorted(modules - named) == []


def test_rooms_of_one_floor_meet_in_the_search_only() -> None:
    wrong = []
    for path in ENGINE:
        module = module_of(path)
        if module.count(".") < 2 or room_of(module) not in ROOMS:
            continue
        for other in imports_of(path):
            pair = (room_of(module), room_of(other))
            if pair[1] in ROOMS and pair[0] != pair[1]:
                allowed = BETWEEN_ROOMS.get(pair, set())
                if other.count(".") < 2 or other.split(".")[2] not in allowed:
                    wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from cclsearch.cli import main; main(['--help']);"
        "heavy = {'numpy', 'pandas', 'optuna', 'openai', 'anthropic', 'torch', 'jax', 'scipy', 'plotly', 'pydantic'};"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "HEAVY []" in done.stdout


def test_every_command_has_help_with_an_example() -> None:
    from cclsearch.cli import COMMANDS, make_parser

    for name in COMMANDS:
        text = make_parser(name).format_help()
        assert f"ccl-search {name}" in text.split("example:")[1], name


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "misc.py", "common_utils.py"])
def test_no_file_is_named_for_nothing(name: str) -> None:
    assert [path for path in ENGINE if path.name == name] == []


def test_public_functions_say_what_comes_back() -> None:
    silent = []
    for path in ENGINE:
        if "cli" in path.relative_to(ROOT).parts:
            continue
        for node in ast.parse(path.read_text()).body:
            is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            is_public = is_public and node.name != "main"
            if is_public and ast.get_docstring(node) is None:
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert silent == []


def test_files_and_functions_stay_small() -> None:
    """The habit is 250 lines and 12; these are where it would be broken beyond doubt."""
    large = []
    for path in ENGINE:
        text = path.read_text()
        if text.count("\n") > 450:
            large.append(f"{path.relative_to(ROOT)} ({text.count(chr(10))} lines)")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 70:
                large.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert large == []


def test_nothing_is_left_unfinished() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    assert [str(path.relative_to(ROOT)) for path in ENGINE if marks.search(path.read_text())] == []


def test_content_folders_hold_no_packages() -> None:
    folders = ("policies", "launchers", "objectives", "workloads")
    assert [str(p) for folder in folders for p in (ROOT / folder).rglob("__init__.py")] == []


def test_every_test_can_fail() -> None:
    bare = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                source = ast.dump(node).lower()
                if not any(word in source for word in ("assert", "raises", "check_", "expect")):
                    bare.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert bare == []
