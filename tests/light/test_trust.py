"""No code of a copied folder runs: every hostile file here would write `RAN` beside the project."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from command_line import run_command
from paths import ROOT

from cclsearch import search
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.settings import load_settings
from cclsearch.core.trust import is_trusted, require_trust, trust_project
from cclsearch.launch.profile import make_launcher
from cclsearch.loop.session import open_session
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.run.folder import create_run
from cclsearch.run.spec import SearchLimits, read_spec

SHIPPED = ROOT / "launchers"
RUN = ["run", "--workload", "tiny", "--budget", "1", "--quiet"]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder as it comes from elsewhere: it says itself that its code is trusted."""
    folder = tmp_path / "copied"
    for name in ("launchers", "policies", "workloads"):
        (folder / name).mkdir(parents=True)
    (folder / "ccl-search.yaml").write_text("trust_code: true\n")
    mark = f"open({str(tmp_path / 'RAN')!r}, 'w').close()\n"
    (folder / "launchers" / "evil.py").write_text(mark)
    text = (SHIPPED / "cpu.framework.yaml").read_text().replace("script: cpu.py", "script: evil.py")
    (folder / "launchers" / "evil.framework.yaml").write_text(text)
    (folder / "policies" / "evil.py").write_text(mark + "def generate_config(w, e):\n    return {}\n")
    shell = folder / "python.sh"
    shell.write_text(f"#!/bin/sh\ntouch {tmp_path / 'RAN'}\n")
    shell.chmod(0o755)
    (folder / "launchers" / "prompt.yaml").write_text(f"launcher: local\npython: {shell}\n")
    (folder / "launchers" / "variable.yaml").write_text(f"launcher: local\nenvironment: {{PYTHONPATH: {folder}}}\n")
    (folder / "launchers" / "lines.yaml").write_text(f"launcher: slurm\nsetup: [{shell}]\n")
    (folder / "launchers" / "remote.yaml").write_text(f"launcher: tpu-vm\ntpu: t\nzone: z\ngcloud: {shell}\n")
    (folder / "launchers" / "plain.yaml").write_text("launcher: local\nmax_parallel: 2\nhardware: {host_cores: 4}\n")
    (folder / "nightly.yaml").write_text("jobs: [{workload: tiny, framework: evil, budget: {trials: 1}}]\n")
    monkeypatch.chdir(folder)
    return folder


def hostile(*more: str) -> list[str]:
    return [*RUN, *more]


COMMANDS = [
    hostile("--framework", "evil"),
    hostile("--framework", "evil", "--dry-run"),
    hostile("--launcher", "prompt"),
    hostile("--launcher", "launchers/prompt.yaml"),
    hostile("--launcher", "variable"),
    hostile("--launcher", "lines"),
    hostile("--launcher", "lines", "--dry-run"),
    hostile("--launcher", "remote"),
    ["launcher", "check", "prompt"],
    ["launcher", "check", "remote"],
    ["sweep", "--workload", "tiny", "--framework", "evil", "--weights", "0:1:1", "--budget", "1", "--quiet"],
    ["policy", "test", "evil"],
    ["policy", "test", "policies/evil.py"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_runs_code_of_a_copied_folder(copied, command, cli):
    error = cli.err(command)
    assert error.count("\n") == 1
    assert "launchers/" in error or "policies/" in error, "it names the file"
    assert f"ccl-search trust {copied}" in error
    assert "trust_code: true" in error
    assert not (copied.parent / "RAN").exists()
    assert not (copied / "runs").exists()


def test_a_night_and_the_python_api_do_not_run_it(copied, capsys):
    assert main(["nightly", "nightly.yaml", "--once"]) != 0
    assert "ccl-search trust" in capsys.readouterr().err
    with pytest.raises(UserError, match="ccl-search trust"):
        search("tiny", framework="evil", budget=1)
    assert not (copied.parent / "RAN").exists()


def test_a_profile_of_data_alone_needs_no_trust(copied):
    assert main(hostile("--launcher", "plain", "--dry-run")) == 0


def test_trust_is_for_one_folder_and_ends(copied, monkeypatch, cli):
    (copied / "ccl-search.yaml").write_text("# mine\nbudget: 3\ntrust_code: false\n")
    script = copied / "launchers" / "evil.py"
    assert not is_trusted(script)
    assert "launchers/evil.py" in cli.out(["trust"])
    assert (copied / "ccl-search.yaml").read_text() == "# mine\nbudget: 3\ntrust_code: true\n"
    assert is_trusted(script)
    again = copied.parent / "again"
    shutil.copytree(copied, again)
    assert not is_trusted(again / "launchers" / "evil.py"), "a copy is asked about again"
    (copied / "ccl-search.yaml").write_text("budget: 3\n")
    assert not is_trusted(script), "the line is needed"
    trust_project(copied)
    assert load_settings(copied).budget == 3
    copied.rename(copied.parent / "moved")
    again.rename(copied)
    assert not is_trusted(script), "another folder at the same path is asked about again"
    trust_project(copied)
    assert main(["trust", str(copied), "--withdraw"]) == 0
    assert not is_trusted(script)


def test_another_user_has_not_confirmed_it(copied, monkeypatch, tmp_path):
    trust_project(copied)
    assert is_trusted(copied / "launchers" / "evil.py")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of-another"))
    assert not is_trusted(copied / "launchers" / "evil.py")
    monkeypatch.setenv("XDG_STATE_HOME", "state")  # relative: it would be a folder of the project
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    trust_project(copied)
    assert not (copied / "state").exists()


@pytest.mark.parametrize("how", ["..", "link to a file", "link to a folder", "link to the package"])
def test_a_path_that_leads_elsewhere_does_not_help(copied, project, how):
    """The project is trusted, what it points at is not."""
    (project / "launchers").mkdir()
    place = project / "launchers" / "evil.framework.yaml"
    text = (copied / "launchers" / "evil.framework.yaml").read_text()
    if how == "..":
        place.write_text(text.replace("script: evil.py", "script: ../../copied/launchers/evil.py"))
    elif how == "link to a file":
        place.symlink_to(copied / "launchers" / "evil.framework.yaml")
    elif how == "link to a folder":
        (project / "launchers").rmdir()
        (project / "launchers").symlink_to(copied / "launchers")
    else:  # an untrusted folder whose framework file is the package's, and whose script is its own
        os.chdir(copied)
        (copied / "launchers" / "evil.framework.yaml").unlink()
        (copied / "launchers" / "evil.framework.yaml").symlink_to(SHIPPED / "cpu.framework.yaml")
        (copied / "launchers" / "evil.py").rename(copied / "launchers" / "cpu.py")
    assert main(hostile("--framework", "evil")) == 2
    assert not (copied.parent / "RAN").exists()


def test_a_shipped_script_with_variables_of_a_copied_file_does_not_run(copied):
    """A framework file of the folder could set PYTHONPATH through a knob."""
    framework = yaml.safe_load((SHIPPED / "cpu.framework.yaml").read_text())
    framework["script"] = str(SHIPPED / "cpu.py")
    framework["knobs"].append({"name": "modules", "choices": [str(copied)], "env": "PYTHONPATH"})
    framework["optional_knobs"] = []
    (copied / "launchers" / "evil.framework.yaml").write_text(yaml.safe_dump(framework))
    with pytest.raises(UserError, match="a framework file of the project"):
        search("tiny", framework="evil", budget=1)


def test_a_folder_of_the_search_path_is_asked_about_too(copied, project, monkeypatch):
    monkeypatch.setenv("CCL_SEARCH_PATH", str(copied))
    assert main(hostile("--framework", "evil")) == 2
    trust_project(copied)
    assert main([*hostile("--framework", "evil"), "--dry-run"]) == 0


def make_run(project: Path, profile: str) -> Path:
    """Return a run folder of the project whose search has not begun, with a profile of that text."""
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / "mine.yaml").write_text(profile)
    request = SearchRequest("tiny", SearchLimits(budget=1), launcher="mine", run_id="one")
    return create_run(plan_search(request).spec, project / "runs")


@pytest.mark.parametrize("source", ["", "runs/one/mine.yaml", "runs/beside/mine.yaml", "launchers/mine.yaml"])
def test_a_run_folder_brings_no_commands(project, source):
    """A run that was copied into a trusted project names a program, and claims that a profile says so."""
    folder = make_run(project, f"launcher: local\npython: {sys.executable}\n")
    assert open_session(folder).jobs is not None, "what the profile says runs"
    spec = yaml.safe_load((folder / "search.yaml").read_text())
    spec["profile"]["settings"]["python"] = "/tmp/evil"
    spec["profile"]["source"] = str(project / source) if source else None
    (project / "runs" / "beside").mkdir()
    if source.startswith("runs"):
        (project / source).write_text("launcher: local\npython: /tmp/evil\n")
    (folder / "search.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(UserError, match=r"run folder|folder of runs"):
        open_session(folder)
    frozen = read_spec(folder)
    with pytest.raises(UserError):
        make_launcher(frozen.profile, framework="cpu", run_dir=folder)


def test_a_run_of_a_project_that_moved_is_resumed(project, monkeypatch):
    folder = make_run(project, f"launcher: local\npython: {sys.executable}\n")
    moved = project.parent / "moved"
    project.rename(moved)
    monkeypatch.chdir(moved)
    with pytest.raises(UserError, match="ccl-search trust"):
        open_session(moved / "runs" / folder.name)
    trust_project(moved)
    assert open_session(moved / "runs" / folder.name).jobs is not None


def test_init_does_not_trust_code_that_is_there_already(copied, cli):
    (copied / "ccl-search.yaml").unlink()
    assert "does not run before `ccl-search trust .`: launchers/evil.framework.yaml" in cli.out(["init", ".", "--yes"])
    assert not load_settings(copied).trust_code
    assert not is_trusted(copied / "launchers" / "evil.py")
    assert main(["init", str(copied.parent / "new"), "--yes"]) == 0
    (copied.parent / "new" / "launchers" / "mine.py").touch()
    require_trust(copied.parent / "new" / "launchers" / "mine.py", "a run script")


def test_modules_beside_the_user_do_not_take_the_place_of_installed_ones(copied):
    for name in ("numpy", "pydantic", "msgspec", "yaml"):
        (copied / f"{name}.py").write_text((copied / "launchers" / "evil.py").read_text())
    (copied / "trace.json").write_text('{"traceEvents": []}')
    for words in (["launcher", "list"], ["score", "trace.json"]):
        run_command(*words, cwd=copied)
    assert not (copied.parent / "RAN").exists()
