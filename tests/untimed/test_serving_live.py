"""The small CPU server and the load generator, in real processes; and servers that do not do what they should."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from waiting import find_processes

from cclsearch.launch.collect import classify_text

LAUNCHERS = ROOT / "launchers"
ARCH = {
    "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 64,
    "vocab_size": 100, "tied_embeddings": False,
}  # fmt: skip
PARAMETERS = 24992


def run_script(folder: Path, script: Path, timeout_s: float = 60, **given: Any) -> dict[str, Any]:
    """The `result.json` of a run script, else the failure that it reported; nothing of it runs any more."""
    requests = [{"arrival_s": 0.0, "input_tokens": 12 + n % 5, "output_tokens": 4 + n % 3} for n in range(12)]
    config = {
        "config": {}, "arch": ARCH, "seed": 0, "precision": "fp32", "num_ranks": 1, "requests": requests,
        "arrival": "closed", "concurrency": 4, "max_concurrency": None, "repeats": 1, "warmup_requests": 2,
        "shared_prefix_tokens": 8, "limits": {}, **given,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    name = f"serving-test-{os.getpid()}-{time.monotonic_ns()}"
    own = {"CCL_CONFIG": str(folder / "config.json"), "CCL_TRIAL_DIR": str(folder), "CCL_JOB_NAME": name}
    limit = {"CCL_TIMEOUT_S": str(given.get("limit_s", 60))}
    ended = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **own, **limit, "PYTHONPATH": str(ROOT / "launchers")},
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert find_processes(name) == []
    if (folder / "result.json").is_file():
        assert ended.returncode == 0
        return dict(json.loads((folder / "result.json").read_text()))
    return dict(json.loads((folder / "failures" / "rank-00000.json").read_text()))


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evidence.jsonl").read_text().splitlines()]


def test_a_trial_serves_every_request_and_ends_its_server(tmp_path):
    result = run_script(tmp_path, ROOT / "launchers" / "cpu_serving.py")
    assert (result["status"], result["num_params"], result["precision"]) == ("ok", PARAMETERS, "fp32")
    assert [load["concurrency"] for load in result["loads"]] == [4]
    log = read_log(tmp_path)
    measured = [record for record in log if not record["is_warm_up"]]
    assert len(log) - len(measured) == 2
    assert sorted(record["number"] for record in measured) == list(range(12))
    assert all(len(r["token_times_s"]) == r["output_tokens"] == 4 + r["number"] % 3 for r in measured)


def test_one_launch_measures_several_loads_to_find_the_largest_that_keeps_the_limits(tmp_path):
    given = {"concurrency": None, "max_concurrency": 8, "limits": {"ttft_p99_s": [None, 1e-9]}}
    result = run_script(tmp_path, ROOT / "launchers" / "cpu_serving.py", **given)
    assert [load["concurrency"] for load in result["loads"]] == [8, 3, 2, 1]
    assert {record["load"] for record in read_log(tmp_path)} == {0, 1, 2, 3}


def test_a_request_that_no_cache_holds_is_an_illegal_configuration(tmp_path):
    long = [{"arrival_s": 0.0, "input_tokens": 9000, "output_tokens": 4}]
    failure = run_script(tmp_path, ROOT / "launchers" / "cpu_serving.py", config={"kv_cache_mib": 2}, requests=long)
    assert failure["kind"] == "illegal_config"
    assert "holds 8192 tokens in blocks of 16, but a request has up to 9004" in failure["message"]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "launchers"))
    return importlib.import_module("cpu_serving_scheduler"), importlib.import_module("cpu_serving_model")


def answer_all(parts: Any, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], dict[str, float]]:
    """The answers of the scheduler to the prompts, and what it counted."""
    scheduler, model = parts
    usual = {
        "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "kv_cache_mib": 1, "chunked_prefill": True,
        "prefix_caching": False, "batch_bucket": 1, "context_bucket": 1, "reserve_kv_cache": False,
        "arch": ARCH, "seed": 0, "max_len": 64,
    }  # fmt: skip
    given = {**usual, **options}
    engine = scheduler.Scheduler(model.PagedModel(given), given)
    if "num_blocks" in options:
        engine.blocks = scheduler.Blocks(options["num_blocks"], 4, is_cached=given["prefix_caching"])
    answers = [scheduler.Answer(list(prompt), 9, asyncio.Queue()) for prompt in prompts]
    engine.waiting += answers
    while not engine.is_idle:
        engine.step()
    assert engine.blocks.share_used == 0, "every block is given back"
    return [a.sequence[len(p) :] for a, p in zip(answers, prompts, strict=True)], engine.read_stats()


def test_no_knob_of_the_server_changes_its_answers(parts):
    prompts = [[*range(10), *range(n, n + 7 + n % 4)] for n in range(20, 28)]
    alone = [answer_all(parts, [prompt], max_num_seqs=1, max_num_batched_tokens=64)[0][0] for prompt in prompts]
    for options in (
        {}, {"chunked_prefill": False}, {"prefix_caching": True}, {"block_size": 16}, {"max_num_batched_tokens": 5},
        {"chunked_prefill": False, "prefix_caching": True}, {"max_num_seqs": 2},
        {"batch_bucket": 8, "context_bucket": 32}, {"reserve_kv_cache": True},
    ):  # fmt: skip
        assert answer_all(parts, prompts, **options)[0] == alone, options
    for options in ({"num_blocks": 13}, {"num_blocks": 13, "prefix_caching": True}):
        answers, stats = answer_all(parts, prompts, **options)
        assert answers == alone
        assert stats["preemptions"] > 0


def test_the_server_counts_tokens_of_steps_and_prompt_tokens_from_its_cache(parts):
    prompts = [[*range(10), *range(n, n + 7 + n % 4)] for n in range(20, 28)]
    lengths = [len(prompt) for prompt in prompts]
    _, stats = answer_all(parts, prompts, max_num_seqs=1)
    steps = sum(-(-length // 16) + 8 for length in lengths)  # chunks of 16 tokens, then one token of the answer each
    assert stats["tokens_per_step"] == pytest.approx(sum(length + 8 for length in lengths) / steps)
    assert "prefix_cache_hit_rate" not in stats
    assert stats["queue_mean_s"] > 0
    _, stats = answer_all(parts, prompts, max_num_seqs=1, prefix_caching=True)
    reused = 7 * 8  # two full blocks of the ten first tokens, by all requests but the first
    assert stats["prefix_cache_hit_rate"] == pytest.approx(reused / sum(lengths))


FAKE = r'''
import sys
from common import run_rank
from serving_run import serve_trial
SERVER = """
import http.server, os, signal, sys, time
MODE = {mode!r}
if MODE == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if MODE == "memory":
    sys.exit("RuntimeError: not enough memory: you tried to allocate 999 bytes")
if MODE == "lacks":
    import argparse
    argparse.ArgumentParser(prog="engine serve").parse_args(["--new-option", "4"])
if MODE == "orphan" and os.fork() == 0:
    time.sleep(600)
count = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self):
        self.send_response(503 if MODE == "ill" else 200); self.end_headers(); self.wfile.write(b"{{}}")
    def do_POST(self):
        global count
        count += 1
        if MODE == "dies" and count > 5:
            print("Segmentation fault of its own", flush=True); os._exit(3)
        if MODE == "errors" and count > 5:
            self.send_response(500); self.end_headers(); self.wfile.write(b"internal trouble"); return
        import json
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200); self.end_headers()
        for _ in range(asked["max_tokens"] - (MODE == "short")):
            self.wfile.write(b'data: {{"choices": [{{"text": "a"}}]}}\\n\\n')
        if MODE != "breaks":
            self.wfile.write(b"data: [DONE]\\n\\n")
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
if MODE == "keeps" and os.fork() == 0:
    os.setsid()
    time.sleep(600)
server.serve_forever()
"""
sys.exit(run_rank(lambda trial: serve_trial(
    trial, lambda port, _: [sys.executable, "-c", SERVER, str(port)], lambda server: {{}}, lambda server: {{}})))
'''


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("ill", "crashed", "the server was not healthy after 1 s"),
        ("dies", "crashed", "the server ended with code 3 under load; its log: Segmentation fault of its own"),
        ("errors", "crashed", "requests failed, the first with: BadAnswer: HTTP 500: internal trouble"),
        ("breaks", "crashed", "the answer broke off"),
        (
            "lacks",
            "crashed",
            "code 2 before it was healthy; its log: engine serve: error: unrecognized arguments: --new-option 4",
        ),
        ("memory", "out_of_memory", "the server ended with code 1 before it was healthy; its log: RuntimeError"),
    ],
)
def test_a_server_that_fails_is_one_clear_line_and_nothing_is_left_running(mode, kind, words, tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE.format(mode=mode)))
    failure = run_script(tmp_path, script, limit_s=2 if mode == "ill" else 60)
    assert classify_text(failure["message"]) == kind
    assert words in failure["message"]
    assert "\n" not in failure["message"]


def test_a_port_that_the_ended_server_keeps_is_the_failure(tmp_path, monkeypatch):
    """Of a process that left the server's group: launchers end what is left of a job."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE.format(mode="keeps")))
    left: list[int] = []
    find = find_processes
    monkeypatch.setattr(sys.modules[__name__], "find_processes", lambda name: left.extend(find(name)) or [])
    failure = run_script(tmp_path, script)
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert "the server ended, but another process still listens on its port" in failure["message"]
    assert len(left) == 1


@pytest.mark.parametrize(("mode", "missing"), [("short", 1), ("orphan", 0), ("stubborn", 0)])
def test_what_a_server_leaves_out_is_logged_and_what_it_leaves_behind_is_ended(mode, missing, tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE.format(mode=mode)))
    assert run_script(tmp_path, script)["status"] == "ok"
    measured = [record for record in read_log(tmp_path) if not record["is_warm_up"]]
    assert {4 + r["number"] % 3 - r["output_tokens"] for r in measured} == {missing}
