"""Searches against servers and in environments that public reports describe: by the command line, over HTTP."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable

import pytest
from llm.server import KEY, MODEL, Hang, ProviderServer, Raw, Reaction, Say, Status, check_first, is_check, serve

from cclsearch.propose.agent.providers.types import CompletionRequest
from cclsearch.propose.agent.server import LlmServer
from cclsearch.run.folder import load_run

RUN = ["run", "--workload", "wl2", "--launcher", "replay", "--budget", "3", "--strategy", "llm", "--name", "r"]
Refuse = Callable[[dict], "tuple[int, object] | None"]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)


CONFIGS = [{"tp": 2, "pp": 1, "dp": 8, "zero_stage": 1, "micro_batch_size": n} for n in (1, 2, 4)]


def answer_well(request: CompletionRequest) -> Say:
    """A good answer: the small request's, or the next configuration that the prompt does not name as tried."""
    if is_check(request):
        return Say((("ready", {"ready": True}),))
    seen = re.search(r"(\d+) trials seen", request.model_dump_json())
    config = CONFIGS[int(seen[1]) if seen else 0]
    return Say((("submit", {"configurations": [{"rationale": "try", "config": config}]}),))


def play(server: ProviderServer, cli, *more: str, llm: str = "") -> str:
    return cli.out([*RUN, "--llm", llm or f"{server.url}/v1#{MODEL}", *more])


def text(message: str, **more: object) -> dict[str, object]:
    return {"error": {"message": message, "type": "invalid_request_error", **more}}


def tools_in(body: dict) -> bool:
    return bool(body.get("tools"))


SERVERS: dict[str, Refuse] = {
    "a gateway has no endpoint with tools": lambda b: (404, text("No endpoints found that support tool use.", code=404))
    if tools_in(b)
    else None,
    "a gateway has no endpoint with that tool choice": lambda b: (
        (404, text("No endpoints found that support the provided 'tool_choice' value.", code=404))
        if b.get("tool_choice") == "required"
        else None
    ),
    "tools need an option of the server": lambda b: (500, text("tools param requires --jinja flag", code=500))
    if tools_in(b)
    else None,
    "the schema has what the grammar lacks": lambda b: (
        (400, {"object": "error", "message": "The provided JSON schema contains features not supported by xgrammar."})
        if tools_in(b) or "response_format" in b
        else None
    ),
    "the context is small": lambda b: (
        (400, text(f"'max_tokens' is too large: {b['max_tokens']}. This model's maximum context length is 8192 tokens "
                   f"and your request has 5200 input tokens ({b['max_tokens']} > 8192 - 5200)."))
        if b["max_tokens"] > 2992
        else None
    ),
    "the model has a smaller limit": lambda b: (
        (400, text(f"max_tokens is too large: {b['max_tokens']}. This model supports at most 4096 completion tokens."))
        if b["max_tokens"] > 4096
        else None
    ),
    "roles must alternate": lambda b: (
        (400, text("Conversation roles must alternate user/assistant/user/assistant/..."))
        if any(message["role"] == "tool" for message in b["messages"]) or tools_in(b)
        else None
    ),
    "a prompt has no system text": lambda b: (400, text("System role not supported"))
    if b["messages"][0]["role"] == "system"
    else None,
    "the model speaks only the Responses API": lambda b: (
        (404, text("This model is only supported in v1/responses and not in v1/chat/completions.", param="model"))
        if "messages" in b
        else None
    ),
    "nothing is said": lambda b: (400, text("Bad Request")) if tools_in(b) or "response_format" in b else None,
}  # fmt: skip


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_refuses_a_form_is_asked_in_another(name, project, cli):
    def script(request: CompletionRequest) -> Reaction:
        refused = SERVERS[name](server.bodies[-1])
        if refused:
            return Raw(json.dumps(refused[1]).encode(), code=refused[0])
        said = answer_well(request)
        if request.tools or "response_format" in server.bodies[-1]:
            return said
        ((tool, arguments),) = said.calls or (("ready", {}),)
        return Say(text=json.dumps({"tool": tool, "arguments": arguments}))

    with serve(script) as server:
        shown = play(server, cli)
        first = next(i for i, request in enumerate(server.requests) if not is_check(request))
    trials = load_run(project / "runs" / "r").state.trials
    assert trials[1].proposer == "llm", shown
    assert first <= 5
    assert "LLM: " in shown
    refusals = [event.text for event in load_run(project / "runs" / "r").state.reported if event.label == "LLM"]
    assert any("the server" in line for line in refusals), "each step down is a line in the ledger"


@pytest.mark.parametrize(
    ("reaction", "words"),
    [
        (Status(401, message=f"Incorrect API key provided: {KEY}"), "authentication"),
        (Status(404, message="The model `m` does not exist"), "unknown model"),
        (
            Raw(b'{"error": {"code": "1113", "message": "Insufficient balance."}}', code=429),
            "empty account",
        ),
        (Raw(b"<!doctype html><title>Sign in</title>", {"content-type": "text/html"}), "web page"),
        (Status(400, message="Bad Request"), "Bad Request"),
    ],
)
def test_what_no_other_try_cures_ends_with_one_line_before_a_run_exists(reaction, words, project, cli):
    with serve(lambda request: reaction) as server:
        line = cli.err([*RUN, "--llm", f"{server.url}/v1#{MODEL}"])
    assert words in line
    assert server.url in line
    assert KEY not in line
    assert len(line.strip().splitlines()) == 1
    assert not (project / "runs").exists()


@pytest.mark.parametrize("reaction", [Status(529), Status(429), Status(503), Hang(20.0)])
def test_a_server_that_may_answer_later_delays_no_search(reaction, project, cli, monkeypatch):
    monkeypatch.setattr(LlmServer.check, "__defaults__", (0.3,))
    with serve(lambda request: reaction) as server:
        shown = play(server, cli)
    assert "the search begins without it, and asks it again" in shown
    assert {trial.proposer for trial in load_run(project / "runs" / "r").state.trials.values()} == {"surrogate"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ALL_PROXY": "socks5://127.0.0.1:1080"}, "ALL_PROXY is a SOCKS proxy"),
        ({"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "localhost,::1,fd00::/8"}, "NO_PROXY"),
        ({"HTTPS_PROXY": "127.0.0.1:port"}, "HTTPS_PROXY"),
        ({"SSL_CERT_FILE": "/nonexistent/cacert.pem"}, "SSL_CERT_FILE=/nonexistent/cacert.pem"),
        ({"ANTHROPIC_BASE_URL": "llm.example"}, "ANTHROPIC_BASE_URL"),
        ({"ANTHROPIC_BASE_URL": "https://no-such-host.invalid"}, "https://no-such-host.invalid"),
        ({"ANTHROPIC_API_KEY": "two words"}, "ANTHROPIC_API_KEY"),
        ({"ANTHROPIC_API_KEY": "sk-\u201cquoted\u201d"}, "ANTHROPIC_API_KEY"),
        ({"ANTHROPIC_API_KEY": ""}, "ANTHROPIC_API_KEY is not set"),
        ({"CCL_SEARCH_LLM_TIMEOUT_S": "soon"}, "CCL_SEARCH_LLM_TIMEOUT_S"),
    ],
)
def test_a_fault_of_the_environment_is_one_line_that_names_it(variables, words, project, cli, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-x")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = cli.err([*RUN, "--llm", "anthropic:m"])
    assert words in line
    assert len(line.strip().splitlines()) == 1
    assert not (project / "runs").exists()


def test_a_proxy_for_other_hosts_does_not_stand_before_a_server_on_this_machine(project, cli, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    with serve(check_first(answer_well)) as server:
        play(server, cli)
    assert server.requests


def test_a_limit_on_the_money_needs_a_price(project, cli):
    url = f"https://llm.example.org/v1#{MODEL}"
    assert "--llm-price" in cli.err([*RUN, "--llm", url, "--max-usd", "1"])
    assert "--llm-price must be" in cli.err([*RUN, "--llm", url, "--max-usd", "1", "--llm-price", "cheap"])
    for command in (RUN, ["doctor"]):
        assert "--llm-effort: no LLM" in cli.err([*command, "--llm-effort", "high"])


def test_effort_and_price_reach_the_server_and_the_ledger(project, cli):
    with serve(check_first(answer_well)) as server:
        shown = play(server, cli, "--llm-effort", "high", "--llm-price", "1,2", "--max-usd", "0.5")
    assert {body.get("reasoning_effort") for body in server.bodies} == {"high"}
    assert "effort high" in shown
    assert all(body["stream"] for body in server.bodies), "an answer may take minutes"
    assert "$1 and $2 for a million tokens" in shown
    used = [event.cost.usd for event in load_run(project / "runs" / "r").state.reported if hasattr(event, "cost")]
    assert 0 < sum(used) <= 0.5


def test_doctor_asks_the_llm(project, cli):
    with serve(check_first(answer_well)) as server:
        shown = cli.out(["doctor", "--llm", f"{server.url}/v1#{MODEL}"])
        assert "chat completions" in shown
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        shown = cli.out(["doctor", "--llm", f"http://127.0.0.1:{unused.getsockname()[1]}/v1#{MODEL}"])
    assert "asks it again" in shown
