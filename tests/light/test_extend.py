"""An LLM that opens the search space, over the providers' protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llm.opener import Opener, read_offers
from llm.players import Expert, own_turn
from llm.server import KEY, MODEL, Reaction, Say, check_first, serve

from cclsearch.cli import main
from cclsearch.loop.session import open_session
from cclsearch.propose.agent.providers.types import CompletionRequest
from cclsearch.record.event import SpaceGrown
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.run.folder import load_run

Decide = Callable[[CompletionRequest], tuple[str, dict[str, Any]]]


def run_with(decide: Decide, name: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> list[CompletionRequest]:
    """Run a simulated search with an LLM that decides so; returns what the LLM was asked."""

    def script(request: CompletionRequest) -> Reaction:
        return Say((decide(own_turn(request)),))

    monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
    with serve(check_first(script)) as server:
        llm = f"{server.url}/v1#{MODEL}"
        command = ["run", "-w", "tiny", "-l", "simulate", "--llm", llm, "--name", name, "--quiet"]
        assert main([*command, *options]) == 0
        assert server.refused == []
        return server.requests[1:]  # after the small one that asks whether the LLM is ready


def test_an_llm_adds_knobs_and_its_next_turn_chooses_among_them(project, monkeypatch, capsys):
    requests = run_with(Opener().decide, "r", "--budget", "7", "--extend", "listed", monkeypatch=monkeypatch)
    assert "threads" in read_offers(own_turn(requests[0]).messages[0].text)
    run = load_run(project / "runs" / "r")
    grown = [event for event in run.state.reported if isinstance(event, SpaceGrown)]
    assert [set(event.neutral) for event in grown] == [{"compile", "optimizer", "threads", "bucket_mib"}]
    assert "the search of the present space has settled" in grown[0].text
    configs = [trial.config for trial in run.state.trials.values()]
    assert any("compile" not in config for config in configs)
    assert any(config.get("compile") for config in configs), "what was added is run"
    assert len(configs) == 7, "asking costs no trial"
    capsys.readouterr()
    for command in ("show r 1", "best r", "report r --no-png", "status r", "export r", "space --run r"):
        assert main(command.split()) == 0, command
    assert "compile" in capsys.readouterr().out
    assert main(["replay-turns", "r", "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any(turn["decision"].startswith("extend ") for turn in turns)
    assert all(turn["same"] and turn["same_prompt"] for turn in turns)


def test_a_kill_between_the_request_and_the_growth_loses_nothing(project, monkeypatch):
    def script(request: CompletionRequest) -> Reaction:
        return Say((Opener().decide(own_turn(request)),))

    monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
    folder = project / "runs" / "r"
    ledger = folder / LEDGER_FILE
    with serve(check_first(script)) as server:
        command = ["run", "-w", "tiny", "-l", "simulate", "--budget", "4", "--extend", "listed", "--name", "r"]
        assert main([*command, "--llm", f"{server.url}/v1#{MODEL}", "--quiet"]) == 0
        lines = ledger.read_bytes().splitlines(keepends=True)
        ledger.write_bytes(b"".join(lines[: next(i for i, line in enumerate(lines) if b'"space_grown"' in line)]))
        killed = load_run(folder).state
        assert killed.wanted is not None
        for later in folder.glob("trials/*"):
            if int(later.name) > killed.highest_trial:
                later.rename(project / f"lost-{later.name}")
        assert main(["resume", "r", "--quiet"]) == 0
    resumed = load_run(folder).state
    assert (resumed.num_growths, resumed.wanted) == (1, None)
    assert any(trial.config.get("compile") for trial in resumed.trials.values())
    assert open_session(folder).space.find("compile") is not None


@pytest.mark.parametrize("options", [(), ("--extend", "off")])
def test_without_a_terminal_or_with_off_nothing_is_offered_and_a_request_is_an_unknown_tool(
    project, monkeypatch, options
):
    def insist(request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        return "extend_space", {"add": [{"knob": "threads", "values": [2]}], "why": "please"}

    requests = run_with(insist, "r", "--budget", "3", *options, monkeypatch=monkeypatch)
    assert not any(tool.name == "extend_space" for tool in requests[0].tools)
    assert "unknown tool" in requests[1].messages[-1].model_dump_json()
    run = load_run(project / "runs" / "r")
    assert run.state.growth is None
    assert len(run.state.trials) == 3, "the fallback did the work"


def test_a_refused_request_is_explained_and_a_model_that_insists_is_put_aside(project, monkeypatch):
    def hostile(request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        return "extend_space", {"add": [{"knob": "LD_PRELOAD", "values": ["/tmp/x.so"]}], "why": "faster malloc"}

    requests = run_with(hostile, "r", "--budget", "3", "--extend", "any", monkeypatch=monkeypatch)
    assert "loads code" in requests[1].messages[-1].model_dump_json()
    run = load_run(project / "runs" / "r")
    assert run.state.growth is None
    assert len(run.state.trials) == 3
    assert any("asked for what may not be added" in event.text for event in run.state.reported)


def test_a_recording_says_why_it_cannot_grow(project, monkeypatch):
    from test_agent_run import recording

    def script(request: CompletionRequest) -> Reaction:
        return Say((Expert().decide(own_turn(request)),))

    monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
    with serve(check_first(script)) as server:
        command = ["run", "-w", "wl2", "--recording", recording(), "--budget", "3", "--llm", f"{server.url}/v1#{MODEL}"]
        assert main([*command, "--extend", "listed", "--name", "r", "--quiet"]) == 0
        assert "only the measured configurations exist" in own_turn(server.requests[1]).messages[0].text


def test_extend_without_an_llm_is_refused_in_one_line(project, cli):
    assert "--extend: no LLM is used" in cli.err(["run", "-w", "tiny", "--extend", "any"])


def test_a_user_adds_a_knob_to_a_search_that_continues(project, cli):
    assert main(["run", "-w", "tiny", "-l", "simulate", "--budget", "2", "--name", "r", "--quiet"]) == 0
    before = (project / "runs" / "r" / LEDGER_FILE).read_bytes()
    for wrong in ("threads=2;rm", "LD_PRELOAD=x", "threads=0", "dtype=bf16", "threads=1", "threads", "omp_dynamic=2"):
        assert cli.err(["resume", "r", "--budget", "5", "--extend-knob", wrong]).count("\n") == 1
    assert (project / "runs" / "r" / LEDGER_FILE).read_bytes() == before, "a refused growth leaves nothing behind"
    command = ["resume", "r", "--budget", "5", "--extend-knob", "threads=2,4", "--extend-knob", "optimizer=fused"]
    assert main([*command, "--quiet"]) == 0
    run = load_run(project / "runs" / "r")
    assert run.state.growth.choices == {"threads": (1, 2, 4), "optimizer": ("for_loop", "fused")}
    assert len(run.state.trials) == 5
    assert run.spec.space_size == 6 * 180


def test_a_user_names_a_variable_and_its_values_as_they_are_written(project, capsys, cli):
    assert main(["run", "-w", "tiny", "-l", "simulate", "--budget", "1", "--name", "r", "--quiet"]) == 0
    capsys.readouterr()
    command = ["resume", "r", "--budget", "2", "--extend-knob", "OMP_DYNAMIC=true", "--extend-knob", "compile=True"]
    assert "search space: omp_dynamic=true; compile=true: 180 -> 720 configurations" in cli.out(command)
    growth = load_run(project / "runs" / "r").state.growth
    assert growth.choices == {"omp_dynamic": ("default", "true"), "compile": (False, True)}, "a text, and a truth value"
