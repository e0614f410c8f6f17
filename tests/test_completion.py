"""Shell completion, tested in each installed shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cclsearch.cli import COMMANDS, completion, main, make_parser
from cclsearch.cli.completion import NAMES, SHELLS, complete_words

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
def test_completion_prints_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "completion --words" in script
    assert "ccl-search" in script
