"""Searches with an LLM behind a local server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest
from llm.cases import plain_table
from llm.chaos import run_chaos
from llm.players import Expert
from llm.server import KEY, MODEL, Hang, Raw, Reaction, Say, check_first, serve
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from cclsearch.cli import main
from cclsearch.launch.contract import STDERR_FILE
from cclsearch.loop.evidence import FolderEvidence
from cclsearch.loop.llm_agent import read_options
from cclsearch.propose.agent.providers.types import CompletionRequest
from cclsearch.propose.events import LlmTurn
from cclsearch.propose.study.choose import make_sampler
from cclsearch.run.folder import load_run
from cclsearch.run.spec import read_spec
from cclsearch.study.mapping import NUMBER
from cclsearch.study.view import STUDY_FILE


@pytest.mark.parametrize("protocol", ["anthropic", "compatible"])
def test_search_with_an_llm_ends_shows_its_status_and_replays(protocol, project, monkeypatch, capsys, cli):
    expert = Expert()

    def script(request: CompletionRequest) -> Reaction:
        answer = expert.ask(request)
        return Say(tuple((call.name, call.arguments) for call in answer.calls), thinking="hm")

    with serve(check_first(script)) as server:
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
        monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
        spec = f"anthropic:{MODEL}" if protocol == "anthropic" else f"{server.url}/v1#{MODEL}"
        command = ["run", "--workload", "wl2", "--recording", recording(), "--budget", "8", "--llm", spec]
        assert main([*command, "--name", "asked", "--quiet"]) == 0
        assert server.refused == []
        assert server.requests
        assert "nanotron" not in "".join(request.model_dump_json() for request in server.requests)
        first = server.requests[1]
        constant = {str((request.system, request.tools)) for request in server.requests[1:]}
        assert len(constant) == 1, "the provider's cache hits"
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    check_study(project / "runs" / "asked")
    assert "llm since trial 2: the seeds are chosen" in cli.out(["status", "asked"])
    assert main(["replay-turns", "asked", "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert turns
    assert all(turn["same"] and turn["same_prompt"] for turn in turns)
    assert not [path for path in (project / "runs").rglob("*") if path.is_file() and KEY in path.read_text()]
    assert len(list((project / "runs" / "asked" / "turns").glob("0*.json"))) == len(turns)
    shown = cli.out(["replay-turns", "asked", "--prompt", "1"])
    assert first.system in shown
    assert first.messages[0].text in shown
    assert "there is no turn 99" in cli.err(["replay-turns", "asked", "--prompt", "99"])


def check_study(folder: Path) -> None:
    """The Optuna study has every trial of the ledger, those of the LLM with their turn and rationale."""
    state = load_run(folder).state
    storage = JournalStorage(JournalFileBackend(str(folder / STUDY_FILE)))
    (summary,) = storage.get_all_studies()
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    found = {trial.user_attrs[NUMBER]: trial for trial in study.trials}
    assert sorted(found) == sorted(state.trials)
    by_llm = [trial for trial in state.trials.values() if trial.proposer == "llm"]
    assert by_llm
    for trial in by_llm:
        facts = found[trial.number].user_attrs
        assert (facts["proposer"], facts["llm_turn"], facts["rationale"]) == ("llm", trial.turn, trial.rationale)


def test_policy_programs_from_a_server_without_tools_decide_and_replay(project, monkeypatch, capsys):
    def script(request: CompletionRequest) -> Reaction:
        if request.tools:
            return Raw(b'{"error": "this model does not support tools"}', code=400)
        body = (
            "n = environment['total_gpus']\n    return {'tensor_parallel': 2, 'pp_size': 1, 'DP': n // 2, 'mbs': '1'}"
        )
        program = f"def generate_config(workload, environment):\n    {body}\n"
        call = {"tool": "submit_policy", "arguments": {"program": program, "rationale": "one split"}}
        return Say(text=f"<think>{{hm}}</think>{json.dumps(call)}")

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve(script) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        command = ["run", "--workload", "wl2", "--recording", recording(), "--budget", "4", "--llm-mode", "policy"]
        assert main([*command, "--llm", f"openai:{MODEL}", "--name", "written", "--quiet"]) == 0
        assert server.refused == []
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "tensor_parallel" in (project / "runs" / "written" / "policies" / "v001.py").read_text()
    capsys.readouterr()
    assert main(["replay-turns", "written", "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "tp=2 pp=1" in turns[0]["decision"]
    assert all(turn["same"] and turn["same_prompt"] for turn in turns)


@pytest.mark.parametrize(
    "spec",
    ["gpt-5", "openai:", "http://127.0.0.1/v1", "http://u:p@127.0.0.1/v1#m", "http://h/v1?api_key=u:p@#m", "claude:x"],
)
def test_invalid_spec_prints_one_line_and_starts_nothing(spec, project, cli):
    err = cli.err(["run", "--workload", "wl2", "--recording", recording(), "--budget", "2", "--llm", spec])
    assert "--llm" in err
    assert "u:p@" not in err
    assert not (project / "runs").exists() or not list((project / "runs").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_a_turn_whose_server_never_answers(number, project):
    asked = threading.Event()

    def script(request: CompletionRequest) -> Reaction:
        asked.set()
        return Hang(300.0)

    with serve(check_first(script)) as server:
        environment = {**os.environ, "CCL_SEARCH_LLM_API_KEY": KEY}
        command = ["run", "--workload", "wl2", "--recording", recording(), "--budget", "8", "--name", "asked"]
        process = subprocess.Popen(
            [sys.executable, "-m", "cclsearch", *command, "--llm", f"{server.url}/v1#{MODEL}"],
            cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert asked.wait(120)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait(timeout=60)
    assert f"{signal.Signals(number).name}: stopping the search" in err.decode()
    assert "Traceback" not in err.decode()
    assert "continue: ccl-search resume asked" in out.decode()
    run = load_run(project / "runs" / "asked")
    assert run.status == "stopped"
    assert len(run.state.trials) == 1, "no trial began after the stop"
    assert "the search ended before this turn did" in [e.text for e in run.state.reported if isinstance(e, LlmTurn)][-1]


def recording() -> str:
    from cclsearch.core.content import shipped_root

    return str(shipped_root() / "workloads" / "recordings" / "nanotron-8b-2n")


@pytest.fixture
def ready(monkeypatch):
    """The `--llm` of a server that answers the small request, and nothing else."""
    monkeypatch.setenv("CCL_SEARCH_LLM_API_KEY", KEY)
    with serve(check_first(lambda request: Say(text="no"))) as server:
        yield f"{server.url}/v1#{MODEL}"


def test_a_seed_policy_is_found_when_planning_and_frozen_as_text(project, capsys, ready):
    command = ["run", "--workload", "wl2", "--recording", recording(), "--budget", "1", "--llm", ready]
    for more in (["--dry-run"], []):
        assert main([*command, *more, "--seed-policy", "no-such-policy"]) == 2
        assert "there is no policy 'no-such-policy'; known: " in capsys.readouterr().err
        assert not (project / "runs").exists()
    mine = project / "mine.py"
    for name, given in (("named", "dense"), ("pathed", str(mine))):
        mine.write_text("def generate_config(workload, environment):\n    return {'tp': 2}\n")
        assert main([*command, "--seed-policy", given, "--name", name]) in (0, 1)  # the policy's choice may fail
    mine.unlink()
    assert "return {'tp': 2}" in (read_options(read_spec(project / "runs" / "pathed")).seed_program or "")
    assert "def generate_config" in (read_options(read_spec(project / "runs" / "named")).seed_program or "")
    assert main(["resume", "pathed", "--budget", "2"]) in (0, 1)


def test_resume_raises_the_limits_of_an_llm_and_refuses_them_without_one(project, cli, ready):
    command = ["run", "--workload", "wl2", "--recording", recording(), "--budget", "1"]
    assert main([*command, "--name", "alone"]) == 0
    assert "none takes part" in cli.err(["resume", "alone", "--budget", "2", "--max-tokens", "9"])
    away = "https://llm.example.org/v1#m"
    assert "the price of compatible:m is unknown" in cli.err([*command, "--llm", away, "--max-usd", "1", "--dry-run"])
    assert main([*command, "--llm", ready, "--name", "asked", "--max-tokens", "10"]) == 0
    assert main(["resume", "asked", "--budget", "2", "--max-tokens", "5000"]) == 0
    assert "the LLM may use 5,000 tokens in total from now on" in cli.out(["status", "asked"])


def test_strategies_are_checked_when_a_search_is_planned(project, capsys, cli):
    command = ["run", "--workload", "wl2", "--recording", recording(), "--budget", "1", "--dry-run"]
    assert main([*command, "--sampler", "cmaes"]) == 0
    capsys.readouterr()
    refused = {
        "--strategy hybrid": "needs an LLM",
        "--strategy llm": "needs an LLM",
        "--sampler magic": "'magic'; known",
    }
    for options, message in refused.items():
        assert message in cli.err([*command, *options.split()])
    assert not (project / "runs").exists()


def test_a_secret_across_the_start_of_a_logs_tail_is_masked(tmp_path):
    folder = tmp_path / "trials" / "0001"
    folder.mkdir(parents=True)
    (folder / STDERR_FILE).write_text("x" * 9000 + "\nsk-ant-" + "k" * 4500 + "\nthe last words\n")
    evidence = FolderEvidence(tmp_path).find(1)
    assert evidence is not None
    assert "kkk" not in evidence.log_tail
    assert evidence.log_tail.endswith("the last words\n")


def test_every_search_completes_under_all_provider_faults(tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    report = run_chaos(
        120, tmp_path, seed=11, make_fallback=lambda: make_sampler("random"), make_table=lambda view: plain_table()
    )
    assert report.turns >= 120
    assert report.requests > report.turns
    assert report.decisions > 8
    assert report.waited_s > 24
