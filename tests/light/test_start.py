"""A new search whose jobs cannot start here is refused before it has a folder."""

import sys
from pathlib import Path

import pytest

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.launch.local import LocalLauncher
from cclsearch.launch.profile import Profile


def write_bare_python(folder: Path) -> Path:
    """An interpreter without installed packages."""
    path = folder / "bare-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return path


def launcher(python: Path, **fields: object) -> LocalLauncher:
    settings = {"python": str(python)}
    profile = Profile.model_validate(
        {"name": "mine", "launcher": "local", "framework": "cpu", "settings": settings, **fields}
    )
    return LocalLauncher.from_profile(profile)


def test_run_without_the_package_of_its_framework_is_refused(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    python = write_bare_python(tmp_path)
    profile = tmp_path / "bare.yaml"
    profile.write_text(f"launcher: local\npython: {python}\n")
    assert main(["trust"]) == 0
    error = cli.err(["run", "--workload", "tiny", "--launcher", str(profile), "--budget", "2"]).splitlines()[-1]
    assert error == (f"ccl-search: torch is not installed for {python}. Run `{python} -m pip install torch`")
    assert not list(tmp_path.glob("runs/*"))


def test_package_in_a_source_folder_is_found(tmp_path):
    python = write_bare_python(tmp_path)
    with pytest.raises(UserError, match="torch is not installed"):
        launcher(python).refuse_at_start()
    (tmp_path / "source" / "torch").mkdir(parents=True)
    (tmp_path / "source" / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    launcher(python, environment={"PYTHONPATH": str(tmp_path / "source")}).refuse_at_start()


def test_interpreter_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match="was not found"):
        launcher(tmp_path / "none").refuse_at_start()
