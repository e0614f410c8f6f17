"""A server over several nodes: how their run scripts meet, and that one that fails ends all. Every node is this machine
and the server is a small one; `make test-vllm` does the same with a real engine."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_serving_live import ARCH, LAUNCHERS
from waiting import find_processes, wait_until

from cclsearch.launch.collect import classify_text

SCRIPT = r'''
import json, os, sys, time
from common import MissingRequirement, run_rank
from serving_run import serve_trial
HEAD = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200); self.end_headers()
        if HANGS:
            import time; time.sleep(600)
        for _ in range(asked["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\n')
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
HANGS = bool(os.environ.get("TEST_HANGS"))
def command(port, share):
    if share.place.node == int(os.environ.get("TEST_LACKS", -1)):
        raise MissingRequirement("the engine must be installed here")
    (trial_folder / f"share-{share.place.node}.json").write_text(json.dumps([share.ports, share.address]))
    if share.place.node:
        ends = os.environ.get("TEST_ENDS") == str(share.place.node)
        return [sys.executable, "-c", "import sys, time; sys.exit('RuntimeError: no memory for me')" if ends else
                "import time; time.sleep(600)"]
    return [sys.executable, "-c", f"HANGS = {HANGS}" + HEAD, str(port)]
def serve(trial):
    global trial_folder
    trial_folder = trial.folder
    serve_trial(trial, command, lambda server: {}, lambda server: {"memory_kind": "rss"}, port_names=("master",))
sys.exit(run_rank(serve))
'''


class Nodes:
    """The scripts of a trial on several nodes."""

    def __init__(self, folder: Path, count: int, name: str, **changes: str) -> None:
        self.folder, self.name = folder, name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        own = {"CCL_CONFIG": str(folder / "config.json"), "CCL_TRIAL_DIR": str(folder), "CCL_JOB_NAME": name}
        meet = {"CCL_NUM_PROCESSES": str(count), "CCL_COORDINATOR": f"127.0.0.1:{self.port}", "CCL_TIMEOUT_S": "60"}
        self.environment = {**os.environ, **own, **meet, "PYTHONPATH": str(LAUNCHERS), **changes}
        self.scripts: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        command = [sys.executable, str(self.folder / "script.py")]
        place = {**self.environment, "CCL_PROCESS_ID": str(node)}
        with (self.folder / f"script-{node}.log").open("wb") as log:
            self.scripts[node] = subprocess.Popen(command, env=place, stdout=log, stderr=log)

    def wait(self, node: int, limit_s: float = 60) -> int:
        return self.scripts[node].wait(limit_s)

    def await_load(self) -> None:
        """Wait until every node runs its share and requests are sent."""
        phase = self.folder / "phase"
        wait_until(lambda: phase.is_file() and phase.read_text() != "starting", limit_s=30)

    def find(self, words: bytes) -> list[int]:
        """The processes of the trial whose command has these words."""
        return [number for number in find_processes(self.name) if words in Path(f"/proc/{number}/cmdline").read_bytes()]

    @property
    def failures(self) -> dict[str, Any]:
        found = sorted((self.folder / "failures").glob("*.json"))
        return {path.stem: json.loads(path.read_text()) for path in found}


@pytest.fixture
def start_nodes(tmp_path: Path) -> Iterator[Any]:
    """Start a trial's scripts on so many nodes; afterwards nothing of it runs."""
    requests = [{"arrival_s": 0.0, "input_tokens": 12, "output_tokens": 4}] * 6
    config = {
        "config": {}, "arch": ARCH, "seed": 0, "precision": "fp32", "num_ranks": 3, "requests": requests,
        "arrival": "closed", "concurrency": 2, "max_concurrency": None, "repeats": 1, "warmup_requests": 2,
        "shared_prefix_tokens": 0, "limits": {}, "nonce": "secret",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "script.py").write_text(SCRIPT)
    name, started = f"nodes-test-{os.getpid()}-{time.monotonic_ns()}", []

    def start(count: int, only: int | None = None, **changes: str) -> Nodes:
        nodes = Nodes(tmp_path, count, name, **changes)
        started.append(nodes)
        for node in range(count) if only is None else (only,):
            nodes.start(node)
        return nodes

    yield start
    for nodes in started:
        for script in nodes.scripts.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                script.wait(30)
    wait_until(lambda: find_processes(name) == [], limit_s=5)  # what was killed takes a moment to end


def test_all_nodes_know_the_same_ports_and_end_with_the_trial(start_nodes, tmp_path):
    nodes = start_nodes(3)
    assert [nodes.wait(node) for node in range(3)] == [0, 0, 0]
    shares = [json.loads((tmp_path / f"share-{node}.json").read_text()) for node in range(3)]
    assert shares[0] == shares[1] == shares[2]
    assert list(shares[0][0]) == ["master"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["hosts"]) == 3
    assert len(result["peak_memory_bytes"]) == 2, "the two other nodes' servers; the test's own does not say"
    assert all(peak > 1e6 for peak in result["peak_memory_bytes"])
    assert nodes.failures == {}


def test_a_node_whose_share_ends_fails_the_trial_with_its_own_reason(start_nodes):
    nodes = start_nodes(3, TEST_ENDS="2", TEST_HANGS="1")
    assert (nodes.wait(0), nodes.wait(1), nodes.wait(2)) == (1, 0, 0)
    (failure,) = nodes.failures.values()
    assert failure["rank"] == 0
    assert failure["message"].startswith("NodeFailed: node 2 (")
    assert (
        "the server ended with code 1 during the trial; its log: RuntimeError: no memory for me" in failure["message"]
    )


def test_a_node_that_is_lost_under_load_ends_requests_that_hang(start_nodes):
    nodes = start_nodes(2, TEST_HANGS="1")
    nodes.await_load()
    (share,) = nodes.find(b"-c\0import time; time.sleep(600)")
    nodes.scripts[1].kill()
    assert nodes.wait(0, 30) == 1, "requests that hang are not waited for"
    os.kill(share, signal.SIGKILL)  # of a script that was killed: launchers end what is left of a job
    (failure,) = nodes.failures.values()
    assert failure["message"].endswith("its run script ended, or the node is gone")


def test_what_is_missing_on_one_node_is_the_failure_of_the_launcher(start_nodes):
    nodes = start_nodes(2, TEST_LACKS="1")
    assert (nodes.wait(0), nodes.wait(1)) == (1, 0)
    (failure,) = nodes.failures.values()
    assert failure["kind"] == "launcher"
    assert "node 1 (" in failure["message"]
    assert "the engine must be installed here" in failure["message"]


def test_without_node_0_the_others_end_and_say_so(start_nodes):
    nodes = start_nodes(2, TEST_HANGS="1")
    nodes.await_load()
    nodes.scripts[0].send_signal(signal.SIGTERM)
    assert (nodes.wait(0), nodes.wait(1)) == (1, 0), "ended in order: node 0 says so to the others"
    assert list(nodes.failures) == ["rank-00000"]


def test_a_killed_node_0_is_lost_communication_for_the_others(start_nodes):
    nodes = start_nodes(2, TEST_HANGS="1")
    nodes.await_load()
    (head,) = nodes.find(b"http.server")
    nodes.scripts[0].kill()
    assert nodes.wait(1) == 1
    os.kill(head, signal.SIGKILL)  # of a script that was killed
    (failure,) = nodes.failures.values()
    assert (failure["rank"], classify_text(failure["message"])) == (1, "communication")


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    return importlib.import_module("serving_nodes")


def make_place(meeting: Any, node: int, count: int) -> Any:
    return meeting.Place(node, count, "127.0.0.1", meeting.find_open_port())


def test_a_node_that_does_not_come_is_named(meeting):
    place = make_place(meeting, 0, 3)
    with pytest.raises(meeting.NodeFailed, match=r"^nodes 1, 2 did not reach node 0 within 0\.2 s$"):
        meeting.leading(place, "n", {}, limit_s=0.2).__enter__()
    with pytest.raises(meeting.NodeFailed, match=r"node 0 did not listen on 127\.0\.0\.1:\d+ within 0\.2 s"):
        meeting.following(make_place(meeting, 1, 2), "n", limit_s=0.2).__enter__()


def test_strangers_and_second_comers_are_turned_away(meeting):
    place = make_place(meeting, 0, 2)
    found: dict[str, Any] = {}

    def lead() -> None:
        with meeting.leading(place, "secret", {"p": 5}, limit_s=20) as leader:
            found["hosts"] = dict(leader.hosts)

    thread = threading.Thread(target=lead)
    thread.start()
    for said in ({"node": 1, "nonce": "guess"}, {"node": 7, "nonce": "secret"}, {"node": "1", "nonce": "secret"}, [1]):
        peer = meeting._connect(place, 10)
        peer._socket.sendall(json.dumps(said).encode() + b"\n")
        assert peer.receive(10) is None, said
        peer.close()
    follower = meeting.Place(1, 2, place.host, place.port)
    with meeting.following(follower, "secret") as (_, plan):
        assert plan == {"p": 5}
    thread.join()
    assert list(found["hosts"]) == [1]
