"""Shell completion, asked of a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cclsearch.cli import COMMANDS, main
from cclsearch.cli.completion import render_completion


def complete(tmp_path: Path, *words: str) -> set[str]:
    """What bash offers after these words; the last one is being typed."""
    (tmp_path / "completion").write_text(render_completion("bash"))
    ask = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _ccl_search; printf "%s\\n" "${COMPREPLY[@]}"'
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-c", ask, "bash", str(tmp_path / "completion"), "ccl-search", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PATH": here}, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_options_and_names(tmp_path: Path) -> None:
    assert complete(tmp_path, "re") == {name for name in COMMANDS if name.startswith("re")}
    assert {"--workload", "--budget", "--launcher"} <= complete(tmp_path, "run", "--")
    assert "wl2" in complete(tmp_path, "run", "--workload", "wl")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in script] == []
