"""Shell completion, tested in each installed shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cclsearch.cli import COMMANDS, completion, make_parser
from cclsearch.cli.arguments import read_command
from cclsearch.cli.completion import NAMES, SHELLS, complete_words
from tests.shells import START, complete_typed

COMPLETE = {
    "bash": 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _ccl_search;'
    ' printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": 'functions[compdef]=:; compadd() { shift; print -l -- "$@" }; _files() { print FILES };'
    ' source "$1"; shift; words=("$@"); CURRENT=$#; _ccl_search',
}


def complete_in_shell(shell: str, tmp_path: Path, *words: str) -> set[str]:
    """Return what that shell offers after these words; the last word is incomplete."""
    (tmp_path / "completion").write_text(Path(completion.__file__).with_suffix(f".{shell}").read_text())
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    plain = {"bash": ["--norc"], "zsh": ["-f"]}[shell]
    command = [shell, *plain, "-c", COMPLETE[shell], shell, str(tmp_path / "completion"), "ccl-search", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PATH": here}, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", sorted(COMPLETE))
def test_the_shell_offers_the_matching_names(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    offered = complete_in_shell(shell, tmp_path, "run", "--workload", "wl")
    assert {f"wl{n}" for n in range(1, 8)} <= offered
    assert all(name.startswith("wl") for name in offered)
    assert complete_in_shell(shell, tmp_path, "run", "--overlay", "") <= {"FILES"}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["rep"], {"report", "replay-turns"}),
        (["run", "--work"], {"--workload"}),
        (["run", "-w", "wl2", "-o", "com"], {"composite"}),
        (["run", "--workload=wl4"], {"--workload=wl4"}),
        (["run", "--workload", "=", "wl4"], {"wl4"}),
        (["space", "-w", "wl2", "--framework", "mega"], {"megatron"}),
        (["run", "--recording", "nanotron-8b-2"], {"nanotron-8b-2n"}),
        (["bench", "DIR", "--samplers", "random", "gr"], {"grid"}),
        (["run", "--llm-mode", ""], {"configs", "policy"}),
        (["run", "--llm", "anth"], {"anthropic:"}),
        (["run", "--llm", "anthropic", ":", ""], set()),
        (["run", "--quiet", "--sampler", "heur"], {"heuristic"}),
        (["score", "trace", "--metric", "bus_"], {"bus_bw"}),
        (["launcher", "ch"], {"check"}),
        (["launcher", "check", "slurm"], {"slurm-generic"}),
        (["run", "--launcher", "rep"], {"replay"}),
        (["policy", "test", "de"], {"dense"}),
        (["policy", "test", "--js"], {"--json"}),
        (["show", ""], {"first", "last"}),
        (["report", "first", "fi"], {"first"}),
        (["run", "--learn-from", ""], {"first", "auto", "none"}),
        (["show", "first", ""], set()),
        (["run", "--budget", ""], set()),
        (["nonsense", ""], set()),
        (["--v"], {"--version"}),
    ],
)
def test_each_argument_completes_its_own_names(project: Path, typed: list[str], offered: set[str]) -> None:
    (project / "runs" / "first").mkdir(parents=True)
    (project / "runs" / "first" / "search.yaml").write_text("{}\n")
    assert set(complete_words(typed)) == offered


def test_every_completed_argument_belongs_to_a_command() -> None:
    parsers = [make_parser(name) for name in COMMANDS]
    parsers += [sub for p in parsers for a in p._actions if isinstance(a.choices, dict) for sub in a.choices.values()]
    assert set(NAMES) <= {action.dest for parser in parsers for action in parser._actions}


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_prints_a_script_for_each_shell(shell: str, cli) -> None:
    script = cli.out(["completion", shell])
    assert "completion --words" in script
    assert "ccl-search" in script


@pytest.mark.parametrize("shell", START)
@pytest.mark.parametrize("line", ["MINE=1 ccl-search run -w on", "true && ccl-search run -w 'on"])
def test_a_person_gets_names_in_the_second_command_and_inside_quotes(shell: str, line: str, project: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (project / "workloads").mkdir(exist_ok=True)
    (project / "workloads" / "onlyone.yaml").touch()
    script = Path(completion.__file__).with_suffix(f".{shell}").read_text()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    typed = complete_typed(shell, script, line, project, {**os.environ, "PATH": path})
    assert typed == line.replace("on", "onlyone") + ("' " if "'" in line else " ")


def test_candidates_come_without_the_engine(project: Path) -> None:
    (project / "runs" / "mine").mkdir(parents=True)
    (project / "runs" / "mine" / "search.yaml").touch()
    (project / "ccl-search.yaml").write_text("runs: runs\n")
    code = (
        "import sys; from cclsearch.cli import main\n"
        "for words in (['run', '-w', 'wl'], ['run', '--pa'], ['show', 'm'], ['run', '--recording', 'n']):\n"
        "    main(['completion', '--words', *words])\n"
        "print('HEAVY', sorted({'numpy', 'pandas', 'pydantic', 'scipy', 'optuna', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    assert {"wl2", "--parallel", "mine", "nanotron-8b-2n"} <= set(done.stdout.split())
    assert "HEAVY []" in done.stdout


def test_a_part_of_the_arguments_is_read_as_in_the_whole_file() -> None:
    whole = yaml.safe_load(Path(completion.__file__).with_name("arguments.yaml").read_text())
    assert {name: read_command(name) for name in COMMANDS} == {name: whole[name] for name in COMMANDS}


@pytest.mark.parametrize("settings", ["runs: [", "- runs", "runs: elsewhere"])
def test_settings_that_name_no_runs_offer_none(project: Path, settings: str) -> None:
    (project / "ccl-search.yaml").write_text(settings)
    assert complete_words(["show", ""]) == ["last"]
