"""`ccl-search init`: create a project folder that can run a search at once."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from pathlib import Path

from cclsearch.core.content import FRAMEWORK_SUFFIX, find_content, list_content
from cclsearch.core.errors import UserError
from cclsearch.core.settings import SETTINGS_FILE
from cclsearch.core.trust import LINE, confirm, list_code

SETTINGS = Path(SETTINGS_FILE)
SUFFIXES = (".yaml", ".yml")
FOLDERS = ("workloads", "launchers", "objectives", "metrics", "policies", "runs")
QUESTIONS = {
    "launcher": "cluster profile (empty: this machine or a recording): ",
    "llm": "LLM: anthropic:MODEL, openai:MODEL or a URL (empty: none): ",
    "objective": "objective (empty: the task's): ",
}
RUNS_HERE = {"local": "it trains on this machine", "simulate": "nothing trains: its trials are simulated"}
"""Launcher of a profile that needs no other machine -> note on its trials."""
TEMPLATES = Path(__file__).parent / "new_project"


def run(args: argparse.Namespace) -> None:
    """Write the project and print the next command."""
    folder = Path(args.directory).expanduser()
    answers = dict.fromkeys(QUESTIONS, "") if args.yes else _ask(folder)
    files = plan_project(folder, answers)
    brought = [str(path.relative_to(folder)) for path in list_code(folder)]
    if brought:
        files[SETTINGS] = files[SETTINGS].replace(f"\n{LINE}\n", "\ntrust_code: false\n")
    write_project(folder, files)
    print(f"wrote {len(files)} files in {folder}: " + ", ".join(str(name) for name in files))
    if brought:
        print(f"its code does not run before `ccl-search trust {shlex.quote(str(folder))}`: {', '.join(brought)}")
    else:
        confirm(folder)
    where = "" if folder.resolve() == Path.cwd().resolve() else f"cd {shlex.quote(str(folder))} && "
    profile = answers["launcher"]
    kind = find_launcher(folder, profile) if profile else "local"
    runs_here = kind in RUNS_HERE
    if not runs_here:
        print(f"next: {where}ccl-search launcher check {profile}   (describe its hardware in workloads/mine.yaml)")
    elsewhere = f"it trains on the machines of profile {profile!r}, not on this machine"
    what = RUNS_HERE.get(kind, elsewhere)
    print(f"{'next' if runs_here else 'then'}: {where}ccl-search run --workload mine --budget 5   ({what})")


def plan_project(folder: Path, answers: dict[str, str]) -> dict[Path, str]:
    """Path -> text of the project's files; raises UserError if one of them, or a file named like the folder, exists."""
    settings = (TEMPLATES / "settings.yaml").read_text(encoding="utf-8")
    examples = {"launcher": "slurm-generic", "llm": "anthropic:MODEL", "objective": "cost"}
    lines = {k: f"{k}: {answers[k]}" if answers[k] else f"# {k}: {example}" for k, example in examples.items()}
    settings = settings.format(**lines)
    card = (TEMPLATES / "mine.yaml").read_text(encoding="utf-8")
    files = {SETTINGS: settings, Path("workloads/mine.yaml"): card, Path(".gitignore"): "runs/*\n"}
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{str(folder)!r} must be a folder, but it is a file; give another name")
    taken = [str(name) for name in files if os.path.exists(folder / name) and name != Path(".gitignore")]
    if taken:
        raise UserError(f"{str(folder)!r} already has {', '.join(taken)}; nothing was written. Give another folder")
    if os.path.exists(folder / ".gitignore"):
        del files[Path(".gitignore")]
    return files


def write_project(folder: Path, files: dict[Path, str]) -> None:
    """Write the folders and files; raises UserError if that fails."""
    try:
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with (folder / path).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or str(folder)!r}: {error.strerror or error}") from None


def _ask(folder: Path) -> dict[str, str]:
    """Three checked answers from the terminal; raises UserError if there is no terminal."""
    names = (n for n in list_content("launchers", *SUFFIXES, project=folder) if not n.endswith(FRAMEWORK_SUFFIX))
    print(f"profiles: {', '.join(names)}")
    print(f"objectives: {', '.join(list_content('objectives', *SUFFIXES, project=folder))}")
    return {name: _ask_until_valid(name, question, folder) for name, question in QUESTIONS.items()}


def _ask_until_valid(name: str, question: str, folder: Path) -> str:
    """The first valid answer; a wrong one is explained and asked again until the input ends."""
    while True:
        try:
            return check_name(name, check_answer(name, input(question)), folder)
        except UserError as error:
            print(error, file=sys.stderr)
        except (EOFError, OSError, RuntimeError):  # no standard input at all raises RuntimeError
            print(file=sys.stderr)
            raise UserError("no terminal for the questions: use `ccl-search init --yes` for the defaults") from None


def check_answer(question: str, answer: str) -> str:
    """The stripped answer; raises UserError if YAML or a shell could interpret it as more than one word."""
    value = answer.strip()
    if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@+\-]{0,200}", value):
        raise UserError(f"{question} must be one word of letters, digits and . _ : / @ + -, not {value[:80]!r}")
    return value


def check_name(question: str, value: str, folder: Path) -> str:
    """The same answer; raises UserError with the known names if it is unknown in the new project."""
    from cclsearch.propose.agent.providers.spec import parse_spec
    from cclsearch.scoring.objective import load_objective, split_spec

    if value and question == "launcher":
        find_launcher(folder, value)
    elif value and question == "llm":
        parse_spec(value)
    elif value:
        path = find_content("objectives", _require_bare(question, split_spec(value)[0]), *SUFFIXES, project=folder)
        load_objective(str(path))
    return value


def find_launcher(folder: Path, name: str) -> str:
    """Launcher (`local`, `slurm`, ...) of a profile, looked up from the project in `folder`; UserError if unknown."""
    from cclsearch.launch.profile import load_profile

    path = find_content("launchers", _require_bare("launcher", name), *SUFFIXES, project=folder)
    return load_profile(str(path)).launcher


def _require_bare(question: str, name: str) -> str:
    """The name if it is bare: a path relative to here would be wrong from inside the project."""
    if "/" in name or name.endswith(SUFFIXES):
        raise UserError(
            f"{question} must be a bare name, not a file, because it is looked up in the project's folders: {name!r}"
        )
    return name
