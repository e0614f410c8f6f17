"""Fixtures of every test: no network except loopback, no API keys, and a project folder of its own.

The folder of a test says what it needs: `light` nothing, `untimed` servers, jobs or processes whose speed changes no
result, `serial` the machine to itself; `named` has tests that only a target of the Makefile runs.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from command_line import CommandLine
from paths import TESTS

from cclsearch.core.secrets.redact import is_secret_name
from cclsearch.core.trust import confirm

KINDS = ("untimed", "serial")
SHARE_CLUSTER = ("test_contracts_slurm.py", "test_slurm_cluster.py", "test_slurm_search.py")
"""Files that use the fixture `cluster`."""

# A busy machine is no failure, and each run tries the same examples.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, for `pytest -m`."""
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(kind)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one worker all tests of a file, so that they share what it starts, and all files that share the cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "cluster" if Path(file).name in SHARE_CLUSTER else file

    return FileScheduling(config, log)


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the API keys and content folders of the person who runs the tests."""
    for name in list(os.environ):
        if is_secret_name(name):
            monkeypatch.delenv(name)
    monkeypatch.delenv("CCL_SEARCH_PATH", raising=False)


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what the tests trust apart from the user's record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that connects to anything but loopback, for example to an LLM provider."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            host = str(address[0])
            if not (host.startswith("127.") or host in ("::1", "localhost", "0.0.0.0")):
                raise AssertionError(f"a test tried to connect to {host}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty user project, made as by `init`: its code may run. Make it the working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "ccl-search.yaml").write_text("trust_code: true\n")
    confirm(folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Return the command line, whose calls return what a command printed."""
    return CommandLine(capsys)


@pytest.fixture
def nightly_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a project whose nights run on a scripted launcher, days apart."""
    import nights

    nights.put_launcher(project)
    nights.put_days_between(monkeypatch)
    yield project
    nights.DECIDE.clear()


@pytest.fixture(scope="session")
def _started_cluster() -> Iterator[Any]:
    from slurm.cluster import start_cluster

    with start_cluster() as started:
        # Tests of other files, which run in between, must not find it.
        os.environ.pop("SLURM_CONF")
        yield started


@pytest.fixture(scope="module")
def cluster(_started_cluster: Any) -> Iterator[Any]:
    """Yield the worker's real Slurm (`slurm.cluster.Cluster`), with its accounting database."""
    from slurm.cluster import use_cluster

    with use_cluster(_started_cluster):
        yield _started_cluster
        _started_cluster.ask("scancel", "--me")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a headless Chromium (playwright's `Browser`); without one the test is skipped, or fails where CI has it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None and not os.environ.get("CCL_REQUIRE_CHROMIUM"):
        pytest.skip("chromium is not installed on this machine")
    from playwright.sync_api import sync_playwright

    assert found is not None, "CCL_REQUIRE_CHROMIUM is set, but chromium is not installed"
    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()
