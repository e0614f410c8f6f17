"""No code of a copied folder runs: every hostile file here would write `RAN` beside the project."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import run_command
from paths import ROOT
from privileges import enforced_permissions

from cclsearch import search
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.settings import load_settings
from cclsearch.core.trust import confirm, find_trusted, identify, require_trust, trust_project
from cclsearch.launch.profile import make_launcher
from cclsearch.loop.session import open_session
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.run.folder import create_run
from cclsearch.run.spec import SearchLimits, read_spec
from cclsearch.space.framework import load_framework

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
    assert find_trusted(script) is None
    assert "launchers/evil.py" in cli.out(["trust"])
    assert (copied / "ccl-search.yaml").read_text() == "# mine\nbudget: 3\ntrust_code: true\n"
    assert find_trusted(script) is not None
    again = copied.parent / "again"
    shutil.copytree(copied, again)
    assert find_trusted(again / "launchers" / "evil.py") is None, "a copy is asked about again"
    (copied / "ccl-search.yaml").write_text("budget: 3\n")
    assert find_trusted(script) is None, "the line is needed"
    trust_project(copied)
    assert load_settings(copied).budget == 3
    copied.rename(copied.parent / "moved")
    again.rename(copied)
    assert find_trusted(script) is None, "another folder at the same path is asked about again"
    trust_project(copied)
    assert main(["trust", str(copied), "--withdraw"]) == 0
    assert find_trusted(script) is None


def write_again(folder: Path, how: str, beside: Path) -> None:
    """Put a hostile copy at the path of a trusted folder, by one of the ways in which that happens every day."""
    shutil.copytree(folder, beside)  # the mark is copied too
    if how == "emptied and filled":
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(beside, folder, dirs_exist_ok=True)
    else:
        shutil.rmtree(folder)
        shutil.copytree(beside, folder)


@pytest.mark.parametrize("how", ["deleted and made", "emptied and filled"])
def test_a_folder_that_was_made_again_with_the_same_inode_is_asked_about(copied, how, tmp_path, monkeypatch):
    """Ext4 gives a freed inode to the next folder: a clone at the path of a deleted one had it in 28 of 30 tries."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script = copied / "launchers" / "evil.py"
    trust_project(copied)
    write_again(copied, how, tmp_path / "beside")
    (record,) = (tmp_path / "state" / "ccl-search" / "trusted").iterdir()
    known = json.loads(record.read_text())
    for place, path in (("folder", copied), ("mark", copied / f".ccl-search-{os.getuid()}" / "trust")):
        known[place][:2] = [path.stat().st_dev, path.stat().st_ino]  # the inodes are given out again
    record.write_text(json.dumps(known))
    assert find_trusted(script) is None


def test_a_disk_with_another_device_number_is_the_same_disk(copied, tmp_path, monkeypatch):
    """The numbers of disks follow the order in which they are found; those of btrfs and NFS, that of the mounts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script = copied / "launchers" / "evil.py"
    trust_project(copied)
    (record,) = (tmp_path / "state" / "ccl-search" / "trusted").iterdir()
    known = json.loads(record.read_text())
    for place in ("folder", "mark"):
        known[place][0] += 1
    record.write_text(json.dumps(known))
    assert find_trusted(script) == script
    known["mark"][1] += 1
    record.write_text(json.dumps(known))
    assert find_trusted(script) is None


def test_an_owners_edits_in_place_ask_nothing(copied):
    script = copied / "launchers" / "evil.py"
    trust_project(copied)
    edited = script.with_suffix(".new")
    edited.write_text("pass\n")
    edited.replace(script)
    shutil.rmtree(copied / "policies")
    (copied / "metrics").mkdir()
    (copied / "ccl-search.yaml").write_text("trust_code: true\nbudget: 3\n")
    assert find_trusted(script) == script
    mark = copied / f".ccl-search-{os.getuid()}"
    if shutil.which("git"):
        subprocess.run(["git", "init", "-q", copied], check=True)
        shown = subprocess.run(["git", "status", "--short", "-uall"], cwd=copied, capture_output=True, text=True)
        assert mark.name not in shown.stdout


@pytest.mark.parametrize("lacks", ["birth time", "mark"])
def test_a_folder_that_cannot_be_told_from_a_later_one_is_asked_about_once_a_day(copied, lacks, monkeypatch):
    script = copied / "launchers" / "evil.py"
    if lacks == "birth time":
        monkeypatch.setattr("cclsearch.core.trust._find_statx", lambda: None)
        trust_project(copied)
        if identify(copied)[0].born_ns is not None:
            pytest.skip("os.stat has birth times here")
    else:
        trust_project(copied)
        copied.chmod(0o500)
        shutil.rmtree(copied / f".ccl-search-{os.getuid()}")
        with enforced_permissions():
            confirm(copied)
    later = time.time() + 24 * 3600
    monkeypatch.setattr("cclsearch.core.trust.time.time", lambda: later)
    assert find_trusted(script) is None
    monkeypatch.undo()
    if lacks == "birth time":
        monkeypatch.setattr("cclsearch.core.trust._find_statx", lambda: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(copied.parent / "state"))
    confirm(copied)
    assert find_trusted(script) is not None
    monkeypatch.setattr("cclsearch.core.trust.time.time", lambda: later)
    assert find_trusted(script) is not None, "a search that began goes on"


@pytest.mark.parametrize("sign", ["launchers", ".git"])
def test_a_clone_below_a_trusted_folder_is_a_project_of_its_own(copied, project, sign, cli, monkeypatch):
    trust_project(project)
    (copied / "ccl-search.yaml").unlink()
    clone = project / "Downloads" / "clone"
    clone.parent.mkdir()
    copied.rename(clone)
    monkeypatch.chdir(clone)
    path = "launchers/prompt.yaml"
    if sign == ".git":
        (clone / "launchers").rename(clone / "bin")
        (clone / ".git").mkdir()
        path = "bin/prompt.yaml"
    assert f"ccl-search trust {clone}" in cli.err(hostile("--launcher", path))
    assert not (clone.parent / "RAN").exists()


def test_what_was_checked_is_what_runs_even_if_a_link_changes_meanwhile(copied, project):
    shutil.copytree(SHIPPED, project / "launchers")
    trust_project(project)
    link = copied / "launchers"
    shutil.rmtree(link)
    link.symlink_to(project / "launchers")
    os.chdir(copied)
    framework = load_framework("cpu")
    assert framework.path == link / "cpu.framework.yaml"
    assert framework.script_path == project / "launchers" / "cpu.py", "not through the link"
    link.unlink()
    shutil.copytree(project / "launchers", link)
    with pytest.raises(UserError, match="ccl-search trust"):
        _ = framework.script_path
    other = copied.parent / "other"
    link.rename(other)
    link.symlink_to(other)
    trust_project(other.parent)
    with pytest.raises(UserError, match="was replaced since it was read"):
        _ = framework.script_path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user and mounts")
@pytest.mark.parametrize("how", ["hard link of another user", "mounted folder", "mounted file"])
def test_a_file_of_others_inside_a_trusted_folder_does_not_run(copied, project, how):
    trust_project(project)
    (project / "policies").mkdir()
    place, source = project / "policies" / "evil.py", copied / "policies" / "evil.py"
    words = [sys.executable, "-P", "-m", "cclsearch", "policy", "test", "evil"]
    if how == "hard link of another user":
        os.chown(source, 65534, 65534)
        place.hardlink_to(source)
    else:
        place.touch()
        pair = (source, place) if how == "mounted file" else (source.parent, place.parent)
        mount = f"mount --bind {shlex.quote(str(pair[0]))} {shlex.quote(str(pair[1]))}"
        words = ["unshare", "--mount", "sh", "-c", f"{mount} || exit 77; exec {shlex.join(words)}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, env=environment)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this container mounts nothing")
    assert done.returncode == 2, done.stderr
    assert "nothing of others runs" in done.stderr


def test_an_entry_point_that_lies_in_the_working_directory_is_code_of_the_project(copied):
    info = copied / "evil-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[cclsearch]\nx = evil_module\n")
    (copied / "evil_module.py").write_text((copied / "launchers" / "evil.py").read_text())
    # an empty part of PYTHONPATH is the working directory
    done = run_command("launcher", "list", cwd=copied, environment={"PYTHONPATH": f":{ROOT}"})
    assert not (copied.parent / "RAN").exists()
    assert f"evil (evil_module) is left out: it is code of {str(copied)!r}" in done.stderr


def test_another_user_has_not_confirmed_it(copied, monkeypatch, tmp_path):
    trust_project(copied)
    assert find_trusted(copied / "launchers" / "evil.py") is not None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of-another"))
    assert find_trusted(copied / "launchers" / "evil.py") is None
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
    assert find_trusted(copied / "launchers" / "evil.py") is None
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
