"""`ccl-search run --llm` from end to end, with a server that speaks the providers' protocols."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm.players import Expert
from llm.server import KEY, MODEL, Reaction, Say, serve

from cclsearch.cli import main
from cclsearch.propose.llm.wire import Request

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("protocol", ["anthropic", "compatible"])
def test_a_search_with_an_llm_ends_can_be_told_and_replays(
    protocol: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expert = Expert()

    def script(request: Request) -> Reaction:
        answer = expert.ask(request)
        return Say(tuple((call.name, call.arguments) for call in answer.calls))

    with serve(script) as server:
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
        monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
        spec = f"anthropic:{MODEL}" if protocol == "anthropic" else f"{server.url}/v1#{MODEL}"
        command = ["run", "--workload", "wl2", "--recording", recording(), "--budget", "8", "--llm", spec]
        assert main([*command, "--name", "asked", "--quiet"]) == 0
        assert server.refused == []
        assert server.requests
        assert "nanotron" not in "".join(request.model_dump_json() for request in server.requests)
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    capsys.readouterr()
    assert main(["status", "asked"]) == 0
    assert "llm since trial 2: the seeds are placed" in capsys.readouterr().out
    assert main(["replay-turns", "asked", "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert turns
    assert all(turn["same"] and turn["same_prompt"] for turn in turns)
    assert not [path for path in (project / "runs").rglob("*") if path.is_file() and KEY in path.read_text()]
    assert len(list((project / "runs" / "asked" / "turns").glob("0*.json"))) == len(turns)


def test_without_a_key_the_search_says_so_and_goes_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "--workload", "wl2", "--recording", recording(), "--budget", "2", "--llm", "openai:gpt-5"]
    assert main([*command, "--name", "keyless"]) == 0
    out = capsys.readouterr().out
    assert "no LLM takes part: OPENAI_API_KEY is not set" in out
    assert main(["replay-turns", "keyless"]) == 2
    assert "no LLM turns to replay" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["gpt-5", "openai:", "http://127.0.0.1/v1", "http://u:p@127.0.0.1/v1#m", "claude:x"])
def test_a_spec_that_is_none_is_one_line_and_starts_nothing(
    spec: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--workload", "wl2", "--recording", recording(), "--budget", "2", "--llm", spec]) == 2
    err = capsys.readouterr().err
    assert "--llm" in err
    assert "u:p@" not in err
    assert not (project / "runs").exists() or not list((project / "runs").iterdir())


def recording() -> str:
    from cclsearch.content import shipped_root

    return str(shipped_root() / "workloads" / "recordings" / "nanotron-8b-2n")
