"""The package as an index and a user get it: its description, what is in it, and the wheel in an empty folder."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from command_line import run_command
from paths import ROOT

ADDRESS = "https://files.example/ccl-search/v1"


def build(target: str, into: Path, address: str) -> Path:
    kept = {**os.environ, "CCL_SEARCH_URL": address}
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [built] = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without an address, as a clone builds it."""
    return build("wheel", tmp_path_factory.mktemp("wheel"), "")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the address of its files, as who publishes it does."""
    return build("sdist", tmp_path_factory.mktemp("sdist"), ADDRESS)


def read_metadata(path: Path) -> Message:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(archive.read(name))
    with tarfile.open(path) as archive:
        found = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        return email.message_from_bytes(found.read())


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_description_renders_on_an_index(kind, request):
    markdown = pytest.importorskip("readme_renderer.markdown")
    metadata = read_metadata(request.getfixturevalue(kind))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert isinstance(text, str)
    html = markdown.render(text)
    assert html is not None, "twine check would refuse it"
    assert "<h1" in html
    assert "<table" in html
    places = [part.partition('"')[0] for mark in ('href="', 'src="') for part in html.split(mark)[1:]]
    assert [place for place in places if not place.startswith(("http://", "https://", "#"))] == []
    if kind == "wheel":
        assert "<img" not in html
        assert "docs/your-cluster.md" in html
        assert metadata.get_all("Project-URL") is None
    else:
        assert f'src="{ADDRESS}/docs/pictures/first-minute.svg"' in html
        assert f'href="{ADDRESS}/docs/your-cluster.md"' in html
        assert f"Documentation, {ADDRESS}/docs/index.md" in metadata.get_all("Project-URL", [])


def test_every_address_of_the_description_is_a_file_of_the_source_package(sdist):
    text = read_metadata(sdist).get_payload()
    assert isinstance(text, str)
    paths = {part.partition(")")[0].partition("#")[0] for part in text.split(f"]({ADDRESS}/")[1:]}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert len(paths) > 20
    assert paths - inside == set()
    assert {"CHANGELOG.md", "README.md", "tests/light/test_package.py", "docs/index.md", "LICENSE"} <= inside


def test_an_address_that_is_none_is_refused(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    kept = {**os.environ, "CCL_SEARCH_URL": "over there"}
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "CCL_SEARCH_URL is the address of this version's files" in done.stderr


def test_the_wheel_works_in_an_empty_folder(wheel, tmp_path):
    installed, empty = tmp_path / "site", tmp_path / "empty"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)  # what installing a wheel does with these files
    empty.mkdir()
    kept = {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}

    def call(*words: str) -> str:
        done = run_command(*words, cwd=empty, environment=kept)
        assert done.returncode == 0, f"{words}: {done.stderr or done.stdout}"
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import cclsearch; print(cclsearch.__file__)"],
        cwd=empty, env={**os.environ, **kept}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(installed))
    assert "best: trial" in call("run", "--workload", "wl2", "--launcher", "replay", "--budget", "2", "--name", "first")
    call("report", "first", "--no-png")
    assert (empty / "runs" / "first" / "report.html").stat().st_size > 10_000
    assert "slurm-generic" in call("launcher", "list")
    call("launcher", "copy", "slurm-generic", "mine")
    assert (empty / "launchers" / "mine.yaml").is_file()
    assert "launcher copy" in call("docs", "your-cluster")
    assert (installed / "cclsearch" / "py.typed").is_file()
