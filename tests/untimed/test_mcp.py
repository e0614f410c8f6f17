"""The Model Context Protocol: real clients of the SDK, over pipes and HTTP, and searches that wait for them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from llm.cases import Search
from llm.players import Expert
from llm.server import KEY, MODEL, Reaction, Say, check_first, serve
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import Implementation
from paths import ROOT

from cclsearch.cli import main, make_parser
from cclsearch.cli.mcp import SKILL
from cclsearch.cli.tool_calls import TOOLS, ToolCalls, make_schema
from cclsearch.core.trust import withdraw_trust
from cclsearch.propose.agent.memory.turn_records import TURNS_FOLDER
from cclsearch.propose.agent.providers.outside import ASKED_FILE, AskedAgent
from cclsearch.propose.agent.providers.types import CompletionRequest
from cclsearch.propose.agent.tools.tool_schemas import make_toolset
from cclsearch.propose.events import LlmMode
from cclsearch.run.folder import load_run


@pytest.fixture(autouse=True)
def _not_for_an_hour(monkeypatch):
    """Let a search that a failed test left end soon."""
    monkeypatch.setenv("CCL_SEARCH_LLM_TIMEOUT_S", "120")


EXPERT = Implementation(name="expert", version="1.0")
SEARCH = {"workload": "wl2", "launcher": "replay", "budget": 8, "strategy": "llm"}


class Talk:
    """Calls of a connected client; each asserts whether the tool failed."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, *, fails: bool = False, **arguments: Any) -> str:
        result = await self.client.call_tool(tool, arguments)
        text = getattr(result.content[0], "text", "")
        assert result.is_error is fails, (tool, text)
        return str(text)


@asynccontextmanager
async def over_pipes(*options: str, mode: str = "auto") -> AsyncIterator[Talk]:
    words = ["-P", "-m", "cclsearch", "mcp", *options]
    server = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ), cwd=Path.cwd())
    async with Client(stdio_client(server), client_info=EXPERT, mode=mode) as client:
        yield Talk(client)


def play(talk: Talk, name: str, **search: Any) -> Any:
    """Search as `Expert` decides: it reads what the search asks, as an agent with the logs at hand could."""

    async def run() -> None:
        expert, asked = Expert(), Path("runs") / name / TURNS_FOLDER / ASKED_FILE
        await talk.call("start", name=name, **{**SEARCH, **search})
        while "\n" in (shown := await talk.call("wait", run=name)) and " ended: " not in shown.splitlines()[0]:
            found = AskedAgent.read(asked)
            assert found is not None
            [call] = expert.ask(found.request).calls
            tool = "propose" if call.name == "submit" else call.name
            await talk.call(tool, run=name, **(call.arguments or {}))

    return run()


def read_ledger(name: str) -> list[dict[str, Any]]:
    """Return the events of a run without times, costs and what says who proposed."""
    own = {"time_s", "crc", "cost", "proposer", "handle", "run_id", "spec_sha256", "result_sha256"}
    events = [json.loads(line) for line in (Path("runs") / name / "ledger.jsonl").read_text().splitlines()]
    kept = [event for event in events if event["event"] != "llm_report"]
    texts = [re.sub(r"\(\d[^)]* s\)", "(cost)", json.dumps({k: v for k, v in e.items() if k not in own})) for e in kept]
    return [json.loads(text) for text in texts]


def test_the_same_proposals_over_mcp_and_in_our_own_loop_give_the_same_ledger(project, monkeypatch):
    expert = Expert()

    def decide(request: CompletionRequest) -> Reaction:
        return Say(tuple((call.name, call.arguments) for call in expert.ask(request).calls))

    with serve(check_first(decide)) as server:
        monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
        options = [f"--{name}={value}" for name, value in SEARCH.items()]
        assert main(["run", *options, "--name", "own", "--llm", f"{server.url}/v1#{MODEL}", "--quiet"]) == 0

    async def run() -> None:
        async with over_pipes() as talk:
            await play(talk, "outside")

    asyncio.run(run())
    own, outside = read_ledger("own"), read_ledger("outside")
    assert [event["event"] for event in own].count("llm_turn") > 3
    assert outside == own
    assert {t.proposer for t in load_run(project / "runs" / "own").state.trials.values()} == {"llm"}
    assert {t.proposer for t in load_run(project / "runs" / "outside").state.trials.values()} == {"mcp:expert-1.0"}
    assert main(["replay-turns", "outside"]) == 0
    assert "(by expert 1.0)" in (project / "runs" / "outside" / "turns" / "0001.json").read_text()


def test_http_serves_this_machine_and_those_with_the_token(project, monkeypatch, cli):
    token = project / "token"
    token.write_text("a-token-of-this-test\n")
    token.chmod(0o640)
    assert "chmod 600" in cli.err(["mcp", "--http", "0", "--token-file", str(token)])
    assert "CCL_SEARCH_MCP_TOKEN" in cli.err(["mcp", "--http", "0"])
    assert "No such file" in cli.err(["mcp", "--http", "0", "--token-file", str(project / "none")])
    token.chmod(0o600)
    command = [sys.executable, "-P", "-m", "cclsearch", "mcp", "--http", "0", "--token-file", str(token)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        right = {"Authorization": "Bearer a-token-of-this-test", "Accept": "application/json, text/event-stream"}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        tries = [
            ({}, 401), ({"Authorization": "Bearer another-token-as-long"}, 401), ({"Host": "evil.example"}, 421),
            ({"Origin": "http://evil.example"}, 403),
        ]  # fmt: skip
        for headers, code in tries:
            given = headers if "Authorization" in headers or not headers else {**right, **headers}
            assert httpx2.post(url, json=body, headers=given, timeout=60.0).status_code == code, headers
        headers = {**right, "Content-Type": "application/json"}
        large = httpx2.post(url, content=b" " * 300_000, headers=headers, timeout=60.0)
        assert large.status_code == 413

        async def look(mode: str) -> str:
            async with (
                httpx2.AsyncClient(headers=right, timeout=120.0) as http,
                Client(streamable_http_client(url, http_client=http), mode=mode) as client,
            ):
                return await Talk(client).call("card", card="tiny")

        for mode in ("legacy", "auto"):
            assert json.loads(asyncio.run(look(mode)))["name"] == "tiny"
    finally:
        server.terminate()
        printed, problems = server.communicate(timeout=20)
    assert "a-token" not in url + printed + problems
    assert "a-token" not in " ".join(command)


HOSTILE = [
    ("card", {"card": "/etc/passwd"}, "is outside of"),
    ("space", {"workload": "../../secret.yaml"}, "is outside of"),
    ("start", {**SEARCH, "launcher": "~/profile.yaml"}, "is outside of"),
    ("trial", {"run": "/tmp", "trial": 1}, "is outside of"),
    ("card", {"card": "link/card.yaml"}, "is outside of"),
    ("start", {**SEARCH, "budget": 10**6}, "this server allows 100 trials"),
    ("start", {**SEARCH, "budget": -1}, "budget must be a whole number"),
    ("start", {**SEARCH, "llm": "openai:x"}, "has no argument 'llm'"),
    ("start", {**SEARCH, "name": "../x"}, "is outside of"),
    ("start", {**SEARCH, "name": "-x", "workload": "--help"}, "is not a value"),
    ("predict", {"workload": "wl2", "png": "/tmp/x.png"}, "has no argument 'png'"),
    ("predict", {"workload": "wl2", "config": {"tp": 3}}, "space explain"),
    ("predict", {"workload": "wl2", "top": "9" * 400}, "--top"),
    ("best", {"run": "x" * 70_000}, "are not read"),
    ("docs", {"page": {"a": [1]}}, "there is no page"),
    ("wait", {"run": "none"}, "there are no runs"),
    ("trace", {"run": "last", "trial": "../../.."}, "is outside of"),
    ("start", {"workload": "wl2", "launcher": "mine"}, "ccl-search trust"),
    ("rm", {}, "there is no tool 'rm'"),
    ("propose", {"run": "none", "configurations": []}, "there are no runs"),
]


@pytest.mark.parametrize(("tool", "arguments", "words"), HOSTILE)
def test_a_hostile_call_is_refused_in_one_line(tool, arguments, words, project, tmp_path, monkeypatch):
    (project / "launchers").mkdir()
    profile = {"launcher": "local", "python": str(project / "evil"), "accelerator": "a100-40", "num_accelerators": 16}
    (project / "launchers" / "mine.yaml").write_text(yaml.safe_dump(profile))
    withdraw_trust(project)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "card.yaml").write_text("name: x\n")
    (project / "link").symlink_to(outside)
    calls = ToolCalls(project / "runs", 100)
    text, failed = asyncio.run(calls.answer(tool, arguments, "evil"))
    assert failed
    assert words in text
    assert "\n" not in text
    assert not (project / "runs").exists() or not list((project / "runs").iterdir())


def test_refused_proposals_run_nothing_and_the_search_goes_on_without_an_agent_that_left(project, monkeypatch):
    monkeypatch.setenv("CCL_SEARCH_LLM_TIMEOUT_S", "4")
    monkeypatch.setenv("SECRET_TOKEN", "very-secret-0123456789")

    async def run() -> None:
        async with over_pipes(mode="legacy") as talk:
            await talk.call("start", **{**SEARCH, "budget": 3}, name="x")
            shown = await talk.call("wait")
            assert shown.startswith("STATE\n0 trials seen; budget left 3")
            assert "`propose`" not in shown
            rules = await talk.call("rules")
            assert '"configurations"' in rules
            assert "submit" not in re.sub("submit(s|ted|ting)", "", rules)
            assert "must be one of" in await talk.call("propose", fails=True, configurations=[{"config": {"tp": 3}}])
            assert "it has" in await talk.call("extend_space", fails=True, add=[])
            secret = await talk.call("candidates", fails=True, where={"very-secret-0123456789": [1]})
            assert "very-secret" not in secret
            assert (await talk.call("wait")).startswith("STATE\n0 trials seen")
            await asyncio.sleep(5.0)
            ended = await talk.call("wait", seconds=60)
            assert "x ended: the budget is used up" in ended
            assert "asks" not in ended

    asyncio.run(run())
    state = load_run(project / "runs" / "x").state
    assert [trial.proposer for trial in state.trials.values()] == ["surrogate"] * 3
    assert any("did not decide within 4 s" in event.text for event in state.reported)
    turns = project / "runs" / "x" / TURNS_FOLDER
    assert not (turns / ASKED_FILE).exists()


def test_a_search_is_stopped_resumed_and_read_as_resources(project):
    async def run() -> None:
        async with over_pipes("--budget", "6") as talk:
            await talk.call("start", **{**SEARCH, "budget": 4}, name="x")
            await talk.call("wait")
            await talk.call("stop", run="x")
            for _ in range(100):
                if "stopped by SIGINT" in (shown := await talk.call("wait", seconds=0)):
                    break
                await asyncio.sleep(0.1)
            assert "`resume` continues it" in shown
            assert "`resume` continues it" in await talk.call("propose", fails=True, configurations=[])
            assert "allows 6 trials" in await talk.call("resume", fails=True, run="x", budget=7)
            await talk.call("resume", run="x", budget=6)
            assert "budget left 6" in await talk.call("wait")
            await talk.call("stop")
            uris = {str(each.uri) for each in (await talk.client.list_resources()).resources}
            assert {f"ccl-search://docs/{page.stem}" for page in (ROOT / "docs").glob("*.md")} == uris
            for uri, words in (("ccl-search://docs/agent", "# "), ("ccl-search://status/x", '"run": "x"')):
                contents = (await talk.client.read_resource(uri)).contents
                assert words in getattr(contents[0], "text", "")
            for uri in (
                "ccl-search://start/x",
                "ccl-search://docs/nothing",
                "ccl-search://card/..%2F",
                "file:///etc/passwd",
            ):
                with pytest.raises(MCPError):
                    await talk.client.read_resource(uri)

    asyncio.run(run())


def test_every_tool_of_the_agent_is_offered_with_its_arguments():
    """Look-ups of figures that a command has are that command's."""
    toolset = make_toolset(Search().view, LlmMode.CONFIGS, can_extend=True)
    tools = {tool.name: tool.parameters["properties"] for tool in toolset}
    ours = {entry["turn"]: set(make_schema(name)["properties"]) for name, entry in TOOLS.items() if "turn" in entry}
    assert sorted(set(tools) - set(ours)) == ["explain", "predict", "trial"]
    assert {name: sorted(set(tools[name]) ^ arguments) for name, arguments in ours.items()} == {
        name: ["run"] for name in ours
    }


def test_every_argument_of_a_tool_is_one_of_its_command():
    wrong = []
    for name, entry in TOOLS.items():
        words = entry.get("command", [""])
        if not words[0]:
            continue
        parser = make_parser(words[0])
        for word in words[1:]:
            parser = parser._parsers().get(word, parser)
        actions = {string: action for action in parser._actions for string in action.option_strings}
        places = [action.dest for action in parser._actions if not action.option_strings]
        assert set(entry.get("places", ())) <= {*places, *(["run", "trial"] if name == "trace" else [])}, name
        for option in entry.get("options", ()):
            action, schema = actions["--" + option.replace("_", "-")], make_schema(name)["properties"][option]
            is_list = type(action).__name__ in ("_AppendAction", "_ExtendAction")
            if (action.nargs == 0, is_list) != (schema["type"] == "boolean", schema["type"] == "array"):
                wrong.append((name, option, schema))
    assert wrong == []


def test_the_skill_names_tools_and_commands_that_exist(project, cli):
    cli.out(["mcp", "--skill", ".claude/skills"])
    text = (project / ".claude" / "skills" / "ccl-search" / "SKILL.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["name"] == SKILL.name
    assert 0 < len(front["description"]) <= 1024
    words = set(re.findall(r"`([a-z_]+)`", text)) - {"insight"}
    assert len(words) > 10
    assert sorted(words - set(TOOLS)) == []
    listed = re.findall(r"\]\((\S+)\.md\)", (ROOT / "docs" / "llms.txt").read_text())
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
