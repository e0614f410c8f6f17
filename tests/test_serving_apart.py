"""Prefill and decode on servers of their own: the proxy before small servers, and what the run script renders and
refuses. `make test-vllm` does the same with real ones."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_serving_live import ARCH, LAUNCHERS

from cclsearch.card.load import load_card
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
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


class Apart:
    """Two servers that prefill and one that decodes, behind the proxy."""

    def __init__(self, folder: Path) -> None:
        (folder / "server.py").write_text(SERVER)
        self.folder, self.port = folder, free_port()
        roles = (("prefill", "prefill0"), ("prefill", "prefill1"), ("decode", "decode0"))
        planned = []
        for role, name in roles:
            port = free_port()
            command = [sys.executable, str(folder / "server.py"), str(port), str(folder / name)]
            planned.append({"role": role, "port": port, "command": command, "environment": {"NAME": name}})
        (folder / "plan.json").write_text(json.dumps({"workers": planned, "passes_parameters": True}))
        command = [sys.executable, str(LAUNCHERS / "serving_proxy.py"), str(folder / "plan.json"), str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        until = time.monotonic() + 30
        while self.ask("/health") is None:
            assert time.monotonic() < until
            time.sleep(0.05)

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
def apart(tmp_path: Path) -> Iterator[Apart]:
    servers = Apart(tmp_path)
    yield servers
    os.killpg(servers.process.pid, signal.SIGKILL)
    servers.process.wait(10)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    return importlib.import_module


def test_a_request_is_prefilled_for_one_token_and_then_decoded_from_there(apart: Apart) -> None:
    asked = {"prompt": [1, 2], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    answer = apart.ask("/v1/completions", asked)
    assert answer is not None
    assert answer.count("data: {") == 3
    assert answer.endswith("data: [DONE]\n\n")
    (first,), (then,) = apart.seen("prefill0"), apart.seen("decode0")
    assert (first["max_tokens"], first["stream"], first["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
    assert "stream_options" not in first
    assert then == {**asked, "kv_transfer_params": {"from": str(apart.folder / "prefill0")}}


@pytest.mark.serial
@pytest.mark.untimed
def test_the_load_generator_sees_one_server_and_both_prefill_servers_work(apart: Apart, load: Any) -> None:
    module = load("serving_load")
    planned = [{"arrival_s": 0.0, "input_tokens": 7, "output_tokens": 5}] * 6
    records, _ = module.run_load(module.Target(apart.port, 100, timeout_s=20), module.Load(0, planned, 2, seed=1))
    assert [record.error for record in records] == [""] * 6
    assert {(r.output_tokens, len(r.token_times_s), r.first_token_id) for r in records} == {(5, 5, 0)}
    assert min(record.token_times_s[0] - record.arrival_s for record in records) > 0.3, "the prefill counts"
    assert [len(apart.seen(name)) for name in ("prefill0", "prefill1", "decode0")] == [3, 3, 6]


def test_health_metrics_and_calls_are_of_all_servers(apart: Apart) -> None:
    names = [f"{apart.folder}/{name}" for name in ("prefill0", "prefill1", "decode0")]
    assert apart.ask("/metrics") == "\n".join(f"{name} /metrics" for name in names)
    called = json.loads(apart.ask("/collective_rpc", {"method": "m"}) or "")
    assert called == {"results": names}


def test_what_a_server_refuses_reaches_the_client(apart: Apart) -> None:
    assert apart.ask("/v1/completions", {"prompt": [13], "max_tokens": 3}) == "400 an unlucky prompt"
    assert apart.seen("decode0") == []


def test_a_server_that_ends_ends_the_proxy_with_its_reason(apart: Apart) -> None:
    words = f"{apart.folder / 'server.py'}".encode()
    servers = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if path.joinpath("stat").exists() and words in path.joinpath("cmdline").read_bytes()
        and b"decode0" in path.joinpath("cmdline").read_bytes()
    ]  # fmt: skip
    os.kill(servers[0], signal.SIGKILL)
    assert apart.process.wait(10) == 1
    assert apart.process.stderr is not None
    assert "Error: the decode server on port" in (said := apart.process.stderr.read())
    assert "ended with signal 9" in said


REQUESTS = [{"arrival_s": 0.0, "input_tokens": 100, "output_tokens": 20}]
TWO = {
    "devices": 6, "prefill_workers": 1, "prefill_gpus_per_worker": 2, "decode_workers": 2, "decode_gpus_per_worker": 2,
}  # fmt: skip


def make_data(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {"config": config, "precision": "bf16", "seed": 3, "requests": REQUESTS, "arch": ARCH, **changes}


def test_each_server_has_accelerators_and_ports_of_its_own(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({}, {"num_ranks": 6, "ranks_per_node": 4}, "one machine, which has 4 accelerators; the configuration needs 6"),
        ({"kv_connector": "Pigeon"}, {}, "kv_connector must be NixlConnector or ExampleConnector, not 'Pigeon'"),
    ],
)
def test_what_cannot_be_served_apart_is_refused(
    load: Any, changes: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    module = load("vllm_disagg")
    with pytest.raises(module.IllegalConfig, match=message):
        module.show_launch(make_data({**TWO, **changes}, **data))


def test_a_card_has_a_space_of_servers_apart_a_prediction_and_a_launch(load: Any) -> None:
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
