"""`--offline`: what would connect to another machine is refused before anything starts, and nothing connects."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from pathlib import Path

import pytest
from command_line import run_command
from paths import ROOT
from trials import copy_framework

from cclsearch.core.offline import OFFLINE_NAME, OfflineError, is_local_url, offline

RECORDER = """
import sys

def record(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        target = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        with open(__file__ + ".connections", "a") as file:
            file.write(f"{event} {target!r}\\n")

sys.addaudithook(record)
"""
"""`sitecustomize.py` of every Python process of a search: appends each attempt to connect to a file."""
CALLING_SAMPLER = """
import urllib.request
from optuna.samplers import RandomSampler

class Calling(RandomSampler):
    def __init__(self):
        super().__init__()
        urllib.request.urlopen("http://192.0.2.1/", timeout=2)
"""
"""Sends a request to an address that is reserved for documentation (RFC 5737)."""


def run_recorded(project: Path, *words: str) -> tuple[int, str, list[str]]:
    """Run a command in a process of its own; returns exit code, standard error and the attempts to connect."""
    tools = project / "tools"
    tools.mkdir()
    (tools / "sitecustomize.py").write_text(RECORDER)
    path = os.pathsep.join([str(tools), str(project), str(ROOT)])
    done = run_command(*words, cwd=project, environment={"PYTHONPATH": path})
    tried = tools / "sitecustomize.py.connections"
    return done.returncode, done.stderr, tried.read_text().splitlines() if tried.exists() else []


@pytest.mark.parametrize("way", ["option", "environment", "settings"])
def test_an_llm_elsewhere_is_refused_in_one_line_before_anything_starts(project, way, monkeypatch, cli):
    named = {
        "option": "--offline",
        "environment": f"{OFFLINE_NAME}=yes",
        "settings": "`offline: true` in ccl-search.yaml",
    }
    if way == "environment":
        monkeypatch.setenv(OFFLINE_NAME, "yes")
    if way == "settings":
        (project / "ccl-search.yaml").write_text("offline: true\n")
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-key-1234")
    words = ["run", "-w", "wl2", "-b", "2", "--llm", "openai:gpt-5", *(["--offline"] if way == "option" else [])]
    [line] = cli.err(words).splitlines()
    assert line.startswith(f"ccl-search: {named[way]} refuses the LLM")
    assert "https://api.openai.com" in line
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("url", "proxy", "is_local"),
    [
        ("http://127.0.0.1:8000/v1", None, True),
        ("http://localhost/v1", None, True),
        ("http://[::1]:8000/v1", None, True),
        ("http://[::ffff:127.0.0.1]/v1", None, True),
        ("http://10.0.0.5/v1", None, False),
        ("http://localhost.example.com/v1", None, False),
        ("http://127.0.0.1.nip.io/v1", None, False),
        ("http://0x7f000001.example/v1", None, False),
        ("http://localhost/v1", "http://proxy.example:3128", False),
        ("http://localhost/v1", "127.0.0.1:3128", True),
    ],
)
def test_only_loopback_counts_as_this_machine(url, proxy, is_local, monkeypatch):
    for name in ("HTTP_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    if proxy:
        monkeypatch.setenv("http_proxy", proxy)
    assert is_local_url(url) is is_local


def test_gcloud_and_the_webhook_are_refused(project, cli):
    (project / "launchers").mkdir()
    (project / "launchers" / "cloud.yaml").write_text(
        "launcher: tpu-vm\nframework: jax-cpu\ntpu: mine\nzone: us-central1-a\n"
    )
    assert "--offline refuses Google Cloud (gcloud)" in cli.err(["run", "-w", "tiny-jax", "-l", "cloud", "--offline"])
    night = {"name": "night", "webhook_env": "CHAT", "jobs": [{"workload": "wl2"}]}
    (project / "nightly.yaml").write_text(json.dumps(night))
    assert "--offline refuses the webhook" in cli.err(["nightly", "nightly.yaml", "--once", "--offline"])
    night = {"name": "night", "jobs": [{"workload": "wl2", "llm": "anthropic:claude"}]}
    (project / "nightly.yaml").write_text(json.dumps(night))
    assert "--offline refuses the LLM" in cli.err(["nightly", "nightly.yaml", "--once", "--offline"])
    assert not (project / "runs").exists()


def test_a_connection_that_nothing_announced_is_refused_and_allowed_again_afterwards():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with offline(by_option=True):
            socket.create_connection(("127.0.0.1", port)).close()
            with pytest.raises(OfflineError, match=r"192\.0\.2\.1"):
                urllib.request.urlopen("http://192.0.2.1/", timeout=2)
            with pytest.raises(OfflineError, match=r"example\.com"):
                socket.getaddrinfo("example.com", 80)
        assert OFFLINE_NAME not in os.environ
    socket.getaddrinfo("192.0.2.1", 80)


def test_a_search_with_a_sampler_that_calls_out_ends_in_one_line(project):
    (project / "calling.py").write_text(CALLING_SAMPLER)
    code, error, tried = run_recorded(
        project, "run", "-w", "wl2", "-b", "2", "--sampler", "calling:Calling", "--offline"
    )
    assert (code, len(error.splitlines())) == (2, 1)
    assert "192.0.2.1" in error
    assert all("192.0.2.1" in line for line in tried), "the guard refused it before it left"
    assert not (project / "runs").exists()


def test_no_process_of_a_real_search_connects_to_another_machine(project):
    """One trial that trains on two ranks; its processes are recorded too."""
    pytest.importorskip("torch")
    copy_framework(project / "launchers", "calm")
    small = ["workload.data.seq_len=32", "workload.data.batch_size=8", "workload.model.model_arch.num_layers=2"]
    words = [*("run", "-w", "tiny", "--framework", "calm", "-b", "1", "--knob", "tp=1", "--knob", "pp=1", "--offline")]
    code, error, tried = run_recorded(project, *words, *(word for name in small for word in ("--set", name)))
    assert code == 0, error
    assert any("pymp-" in line for line in tried), "the recorder sees the sockets between the processes of the trial"
    local = ("pymp-", "127.0.0.1", "localhost", "'::1'", socket.gethostname())
    assert [line for line in tried if not any(name in line for name in local)] == []
