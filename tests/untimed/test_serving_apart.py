"""Prefill and decode on servers of their own: the proxy before small servers, and what the run script renders and
refuses. `make test-vllm` does the same with real ones."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_serving_live import LAUNCHERS
from test_vllm_script import make_data
from waiting import wait_until

from cclsearch.card.load import load_card
from cclsearch.plugins import TASKS
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.rule import RULES, Columns
from cclsearch.stats.closed_form import predict_space

SERVER = r"""
import http.server, json, sys, time
port, name = int(sys.argv[1]), sys.argv[2]
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def answer(self, status, body):
        self.send_response(status); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.answer(200, f"{name} {self.path}".encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(name + ".log", "a") as log:
            log.write(json.dumps(asked) + "\n")
        if self.path == "/collective_rpc":
            return self.answer(200, json.dumps({"results": [name]}).encode())
        if asked["prompt"] == [13]:
            return self.answer(400, b"an unlucky prompt")
        if "/prefill" in name:
            time.sleep(0.3)
            return self.answer(200, json.dumps({"kv_transfer_params": {"from": name}}).encode())
        self.send_response(200); self.end_headers()
        for number in range(asked["max_tokens"]):
            event = {"choices": [{"text": "a", "token_ids": [number]}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ROLES = (("prefill", "prefill0"), ("prefill", "prefill1"), ("decode", "decode0"))


class Apart:
    """Two servers that prefill and one that decodes, behind the proxy; of two nodes, the second decodes."""

    def __init__(self, folder: Path, nodes: int = 1) -> None:
        (folder / "server.py").write_text(SERVER)
        self.folder, self.port, self.relay = folder, free_port(), free_port()
        planned: list[dict[str, Any]] = []
        for number, (role, name) in enumerate(ROLES):
            port = free_port()
            command = [sys.executable, str(folder / "server.py"), str(port), str(folder / name)]
            own = {"command": command, "environment": {"NAME": name}, "port": port}
            planned.append({"number": number, "role": role, **own})
        more = {"passes_parameters": True, "secret": "a secret"}
        self.others: list[subprocess.Popen[str]] = []
        if nodes > 1:
            place = {"host": "127.0.0.1", "port": self.relay}
            (folder / "other.json").write_text(json.dumps({"workers": planned[2:], "relay": place, **more}))
            planned[2] = {"number": 2, "role": "decode", **place}
            self.others.append(self.start("other.json"))
        (folder / "plan.json").write_text(json.dumps({"workers": planned, **more}))
        self.process = self.start("plan.json")
        self.await_health()

    def start(self, plan: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(LAUNCHERS / "serving_proxy.py"), str(self.folder / plan), str(self.port)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def stop(self) -> None:
        for process in (self.process, *self.others):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def await_health(self) -> None:
        wait_until(lambda: self.ask("/health") is not None, limit_s=30)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> str | None:
        """The answer of the proxy; None without one."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=30) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return None if body is None else f"{error.code} {error.read().decode()}"
        except OSError:
            return None

    def seen(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def apart(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Apart]:
    servers = Apart(tmp_path, nodes=getattr(request, "param", 1))
    yield servers
    servers.stop()


on_two_nodes = pytest.mark.parametrize("apart", [2], indirect=True)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    return importlib.import_module


def test_a_request_is_prefilled_for_one_token_and_then_decoded_from_there(apart):
    asked = {"prompt": [1, 2], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    answer = apart.ask("/v1/completions", asked)
    assert answer.count("data: {") == 3
    assert answer.endswith("data: [DONE]\n\n")
    (first,), (then,) = apart.seen("prefill0"), apart.seen("decode0")
    assert (first["max_tokens"], first["stream"], first["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
    assert "stream_options" not in first
    assert then == {**asked, "kv_transfer_params": {"from": str(apart.folder / "prefill0")}}


def test_the_load_generator_sees_one_server_and_both_prefill_servers_work(apart, load):
    module = load("serving_load")
    planned = [{"arrival_s": 0.0, "input_tokens": 7, "output_tokens": 5}] * 6
    records, _ = module.run_load(module.Target(apart.port, 100, timeout_s=20), module.Load(0, planned, 2, seed=1))
    assert [record.error for record in records] == [""] * 6
    assert {(r.output_tokens, len(r.token_times_s), r.first_token_id) for r in records} == {(5, 5, 0)}
    assert min(record.token_times_s[0] - record.arrival_s for record in records) > 0.3, "the prefill counts"
    assert [len(apart.seen(name)) for name in ("prefill0", "prefill1", "decode0")] == [3, 3, 6]


def test_health_metrics_and_calls_are_of_all_servers(apart):
    names = [f"{apart.folder}/{name}" for name in ("prefill0", "prefill1", "decode0")]
    assert apart.ask("/metrics") == "\n".join(f"{name} /metrics" for name in names)
    called = json.loads(apart.ask("/collective_rpc", {"method": "m"}) or "")
    assert called == {"results": names}


def test_what_a_server_refuses_reaches_the_client(apart):
    assert apart.ask("/v1/completions", {"prompt": [13], "max_tokens": 3}) == "400 an unlucky prompt"
    assert apart.seen("decode0") == []


def test_a_server_that_ends_ends_the_proxy_with_its_reason(apart):
    words = f"{apart.folder / 'server.py'}".encode()
    servers = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if path.joinpath("stat").exists() and words in path.joinpath("cmdline").read_bytes()
        and b"decode0" in path.joinpath("cmdline").read_bytes()
    ]  # fmt: skip
    os.kill(servers[0], signal.SIGKILL)
    assert apart.process.wait(10) == 1
    assert "Error: the decode server on port" in (said := apart.process.stderr.read())
    assert "ended with signal 9" in said


@on_two_nodes
def test_a_server_of_another_node_answers_through_its_relay(apart):
    asked = {"prompt": [1, 2], "max_tokens": 3, "stream": True}
    answer = apart.ask("/v1/completions", asked)
    assert (answer.count("data: {"), answer.endswith("data: [DONE]\n\n")) == (3, True)
    called = json.loads(apart.ask("/collective_rpc", {"method": "m"}) or "")
    assert called == {"results": [f"{apart.folder}/{name}" for _, name in ROLES]}


@on_two_nodes
@pytest.mark.parametrize(
    "greeting",
    [b'["a guess", 2]\n', b'["a secret", 7]\n', b"[1]\n", b"GET / HTTP/1.0\n", b"x" * 100_000 + b"\n", b'["a secret"'],
)
def test_the_relay_answers_nobody_without_the_secret(apart, greeting):
    asked = b"GET /health HTTP/1.0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", apart.relay), timeout=20) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(greeting + asked)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1000) == b""
    with socket.create_connection(("127.0.0.1", apart.relay), timeout=20) as known:
        known.sendall(b'["a secret", 2]\n' + asked)
        assert b" 200 " in known.recv(1000)


@on_two_nodes
def test_a_server_that_is_not_healthy_is_named_once(apart):
    apart.others[0].kill()
    apart.others[0].wait(10)
    assert [apart.ask("/health") for _ in range(3)] == [None] * 3
    apart.process.kill()
    said = apart.process.stdout.read().splitlines()
    decode = f"the decode server on port {apart.relay} of 127.0.0.1 is not healthy: see server-decode-2.log"
    assert said.count(decode) == 1


@on_two_nodes
def test_a_port_that_is_taken_is_the_reason(apart):
    second = apart.start("other.json")
    said = second.stderr.read()
    assert second.wait(10) == 1
    with contextlib.suppress(ProcessLookupError):
        os.killpg(second.pid, signal.SIGKILL)
    assert f"{apart.relay}" in said.strip().splitlines()[-1]
    assert "address already in use" in said


TWO = {
    "devices": 6, "prefill_workers": 1, "prefill_gpus_per_worker": 2, "decode_workers": 2, "decode_gpus_per_worker": 2,
}  # fmt: skip


def test_each_server_has_accelerators_and_ports_of_its_own(load, monkeypatch):
    module = load("vllm_disagg")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2")
    planned = module.plan_servers(make_data({**TWO, "max_num_seqs": 64}), "MODEL", "FOLDER", ["--more"])
    assert [(each["role"], each["environment"]["CUDA_VISIBLE_DEVICES"]) for each in planned] == [
        ("prefill", "7,6"), ("decode", "5,4"), ("decode", "3,2"),
    ]  # fmt: skip
    ports = [each["port"] for each in planned] + [
        each["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for each in planned
    ]
    assert len(set(ports)) == 6
    for each in planned:
        words = each["command"]
        assert words[words.index("--tensor-parallel-size") + 1] == "2"
        assert words[words.index("--max-num-seqs") + 1] == "64"
        assert json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector"] == "NixlConnector"
        assert words[words.index("--port") + 1] == str(each["port"])
        assert words[-1] == "--more"


@pytest.mark.parametrize(
    ("changes", "data", "message"),
    [
        ({"devices": 7}, {}, "the servers have 6 accelerators together, but devices is 7"),
        ({"decode_workers": 0, "devices": 2}, {}, "prefill_workers and decode_workers must be at least 1"),
        (
            {"prefill_gpus_per_worker": 8, "devices": 12},
            {"num_ranks": 12, "ranks_per_node": 4},
            "the prefill server 0 of 8 accelerators does not fit on 3 machines with 4 each",
        ),
        (
            {"kv_connector": "ExampleConnector"},
            {"num_ranks": 6, "ranks_per_node": 4},
            "kv_connector must be NixlConnector on 2 nodes: ExampleConnector writes to a folder of one of them",
        ),
        ({"kv_connector": "Pigeon"}, {}, "kv_connector must be NixlConnector or ExampleConnector, not 'Pigeon'"),
    ],
)
def test_what_cannot_be_served_apart_is_refused(load, changes, data, message):
    module = load("vllm_disagg")
    with pytest.raises(module.IllegalConfig, match=message):
        module.show_launch(make_data({**TWO, **changes}, **data))


def test_servers_fill_the_nodes_that_a_trial_gets(load):
    module = load("serving_apart")
    config = {**TWO, "devices": 12, "decode_workers": 1, "decode_gpus_per_worker": 4, "prefill_workers": 4}
    seats = module.place_servers(make_data(config, num_ranks=12, ranks_per_node=8))
    assert [(seat.number, seat.role, seat.node, seat.first) for seat in seats] == [
        (0, "prefill", 0, 4), (1, "prefill", 0, 6), (2, "prefill", 1, 0), (3, "prefill", 1, 2), (4, "decode", 0, 0),
    ]  # fmt: skip


def test_the_rule_of_the_space_says_what_the_run_script_can_place(load):
    """For every machine size and 625 configurations, most of which do not fit."""
    module, sizes, fits = load("serving_apart"), (1, 2, 3, 4, 8), []
    rows = np.array(list(itertools.product(range(1, 6), sizes, range(1, 6), sizes)))
    knobs = [f"{role}_{part}" for role in module.ROLES for part in ("workers", "gpus_per_worker")]
    devices = rows[:, 0] * rows[:, 1] + rows[:, 2] * rows[:, 3]
    columns = Columns({**dict(zip(knobs, rows.T, strict=True)), "devices": devices}, len(rows))
    assert TASKS.get("serving")  # registers its rules
    for per_node in (1, 2, 3, 4, 6, 8):
        sets = [f"workload.hardware.xpu_spec.{name}" for name in (f"count_per_node={per_node}", "total_count=64")]
        rule = RULES["workers_fit_machines"](load_card("wl1-inference", sets=sets), {"knobs": ()})
        for row, total, allowed in zip(rows.tolist(), devices.tolist(), rule.check(columns), strict=True):
            config = {**dict(zip(knobs, row, strict=True)), "devices": total}
            try:
                module.place_servers({"config": config, "num_ranks": total, "ranks_per_node": per_node})
                fits.append(True)
            except module.IllegalConfig:
                fits.append(False)
            assert fits[-1] == allowed, (per_node, config)
    assert 0.2 < np.mean(fits) < 0.8


def test_on_several_nodes_each_starts_its_own_servers_and_node_0_knows_all(load):
    module, nodes = load("vllm_disagg"), load("serving_nodes")
    data = make_data({**TWO, "devices": 4, "decode_workers": 1}, num_ranks=4, ranks_per_node=2)
    share = load("serving_run").Share
    first = share(nodes.Place(0, 2), {}, "10.0.0.1", others={1: ("10.0.0.2", 4711)})
    prefill, decode = module.plan_servers(data, "MODEL", "FOLDER", [], first)
    assert decode == {"number": 1, "role": "decode", "host": "10.0.0.2", "port": 4711}
    assert prefill["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
    (own,) = module.plan_servers(data, "MODEL", "FOLDER", [], share(nodes.Place(1, 2), {}, "10.0.0.2", 4711))
    assert (own["number"], own["role"], own["environment"]["CUDA_VISIBLE_DEVICES"]) == (1, "decode", "0,1")
    assert own["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.2"
    assert own["command"][own["command"].index("--host") + 1] == "127.0.0.1", "its calls are not for the network"
    form = module.show_launch(data)
    assert any("node 0 has 1 that prefill; node 1 has 1 that decode" in note for note in form.notes)


def test_a_card_has_a_space_of_servers_apart_a_prediction_and_a_launch(load):
    sets = ["workload.hardware.xpu_spec.total_count=8", "workload.hardware.xpu_spec.count_per_node=8"]
    card, framework = load_card("wl1-inference", sets=sets), load_framework("vllm-disagg")
    space = build_space(card, framework, use_fewer=True)
    fronts = space.column("prefill_workers") * space.column("prefill_gpus_per_worker")
    backs = space.column("decode_workers") * space.column("decode_gpus_per_worker")
    assert (space.num_accelerators_N == fronts + backs).all()
    assert {(1, 1), (1, 4), (4, 4), (4, 1)} <= set(zip(fronts.tolist(), backs.tolist(), strict=True))
    assert space.num_accelerators_N.max() == 8
    assert predict_space(card, space) is not None
    form = load("vllm_disagg").show_launch(make_data(space.config(0)))
    assert form.command[:3] == ["vllm", "serve", "MODEL"]
    assert "--kv-transfer-config" in form.command
