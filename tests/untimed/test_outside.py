"""A launcher, an LLM provider and a metric as packages outside the tree, each installed by pip: no file of the engine
knows them, and they pass the contract suites.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from paths import ROOT, TESTS

from cclsearch.core.trust import trust_project
from cclsearch.propose.agent.providers.types import CompletionRequest

PACKAGES = TESTS / "plugins" / "outside"
TOY = TESTS / "plugins" / "toy_task"
LOGIN = "house-login-4711-secret"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the three packages."""
    folder, sources = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("sources")
    for package in PACKAGES.iterdir():
        shutil.copytree(package, sources / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    install(folder, *sorted(sources.iterdir()))
    return folder


def install(folder: Path, *packages: Path) -> None:
    """Install packages into a folder as a user does, without the network."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, packages)], check=True, timeout=300)


def call(site: Path, *command: str, code: int = 0, cwd: Path | None = None, **environment: str) -> str:
    """Run Python with the packages installed; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}", **environment},
        cwd=cwd or site.parent,  # in the folder itself, packages would count as its code, which is not trusted
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("package", ["kube", "house_llm", "kernel_jitter"])
def test_each_package_passes_its_contract_suite(site, package):
    shutil.copy(PACKAGES / package / "contract.py", site / f"contract_of_{package}.py")
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull)
    shown = call(site, *options, str(site / f"contract_of_{package}.py"))
    counted = re.search(r"(\d+) passed", shown)
    assert counted is not None, shown
    assert int(counted[1]) >= 3
    assert "skipped" not in shown


def test_no_file_of_the_engine_knows_the_packages():
    words = re.compile(r"\b(kube_\w*|house(?:_llm)?:|HOUSE_LOGIN|kernel_jitter)\b", re.IGNORECASE)
    assert [str(path) for path in (ROOT / "cclsearch").rglob("*.py") if words.search(path.read_text())] == []


def test_doctor_lists_the_packages_and_the_provider_key(site):
    shown = call(site, "-m", "cclsearch", "doctor", HOUSE_LOGIN=LOGIN)
    for plugin in ("kube-launcher (kube_launcher.launcher)", "house-llm (house_llm.provider)", "kernel-jitter"):
        assert f"ok  plugin {plugin}" in shown
    assert re.search(r"ok +HOUSE_LOGIN +set \(not shown\)", shown)
    assert LOGIN not in shown


def test_the_metric_is_listed_and_measured(site, tmp_path):
    from cclsearch.testing import write_example_trace

    folder = write_example_trace(tmp_path / "trace")
    assert re.search(r"kernel_jitter +fraction", call(site, "-m", "cclsearch", "score", "--list"))
    assert "kernel_jitter" in call(site, "-m", "cclsearch", "score", str(folder), "--metric", "kernel_jitter")


def test_a_search_runs_its_trials_as_pods(site, tmp_path):
    """With the toy task as a fourth package: its trials really run."""
    project = tmp_path / "project"
    shutil.copytree(TOY / "project", project)
    trust_project(project)
    (project / "launchers" / "pods.yaml").write_text(f"launcher: kube\ncluster: {tmp_path / 'cluster'}\n")
    both = tmp_path / "both"
    shutil.copytree(site, both)
    toy = tmp_path / "toy"
    shutil.copytree(TOY / "compress_task", toy / "compress_task")
    declared = (TOY / "pyproject.toml").read_text().replace("hatchling.build", "setuptools.build_meta")
    (toy / "pyproject.toml").write_text(declared.replace('"hatchling"', '"setuptools"'))
    install(both, toy)
    run = ("-m", "cclsearch", "run", "--workload", "logs", "--launcher", "pods", "--budget", "2", "--name", "pods")
    call(both, *run, cwd=project)
    status = json.loads(call(both, "-m", "cclsearch", "status", "pods", "--json", cwd=project))
    assert [trial["result"].split()[1] for trial in status["trials"]] == ["MB/s", "MB/s"]
    assert {path.name for path in (tmp_path / "cluster").iterdir()} == {"pods-t0001-a1", "pods-t0002-a1"}


@contextmanager
def serve_house(asked: list[CompletionRequest], keys: list[str]) -> Iterator[str]:
    """Yield the address of a server of the house's protocol whose answers decide nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(CompletionRequest.model_validate(body["request"]))
            keys.append(self.headers["authorization"])
            answer = {"text": "no decision", "calls": [], "tokens": {"in": 1_000_000, "out": 500_000}}
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_search_asks_the_provider_and_counts_its_price(site, tmp_path):
    """The server says nothing of use: the search falls back, and what it asked is counted and kept without the key."""
    asked: list[CompletionRequest] = []
    keys: list[str] = []
    (tmp_path / "ccl-search.yaml").write_text("{}\n")
    run = ("-m", "cclsearch", "run", "-w", "wl2", "--launcher", "replay", "--budget", "4", "--name", "house")
    with serve_house(asked, keys) as url:
        environment = {"HOUSE_LLM_URL": url, "HOUSE_LOGIN": LOGIN}
        shown = call(site, *run, "--llm", "house:small-2", "--max-usd", "3", cwd=tmp_path, **environment)
    assert asked, shown
    assert set(keys) == {f"Bearer {LOGIN}"}
    kept = "".join(path.read_text(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert LOGIN not in kept + shown
    assert "house:small-2" in kept
    ledger = (tmp_path / "runs" / "house" / "ledger.jsonl").read_text()
    spent = [float(usd) for usd in re.findall(r'"usd":([\d.]+)', ledger)]
    assert sum(spent) == 2.0 * len(asked), "a million tokens in at 1 dollar, half a million out at 2"
    refused = call(site, *run, "--llm", "hous:small", code=2, cwd=tmp_path)
    assert "house:MODEL" in refused
    assert "did you mean 'house'" in refused
    assert "house:MODEL" in call(site, "-m", "cclsearch", "run", "--help")


def test_without_its_key_the_search_does_not_begin(site, tmp_path):
    (tmp_path / "ccl-search.yaml").write_text("{}\n")
    run = ("-m", "cclsearch", "run", "-w", "wl2", "--launcher", "replay", "--budget", "2", "--name", "keyless")
    shown = call(site, *run, "--llm", "house:small-2", code=2, cwd=tmp_path, HOUSE_LOGIN="")
    assert "HOUSE_LOGIN is not set" in shown
