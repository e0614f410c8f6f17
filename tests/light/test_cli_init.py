"""`init`, `space`, and completion in shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cclsearch.cli import COMMANDS, completion, main, make_parser, read_command
from cclsearch.cli.completion import NAMES, SHELLS, complete_words
from cclsearch.cli.init import check_answer
from cclsearch.core.errors import UserError
from cclsearch.core.settings import Settings, load_settings
from tests.shells import START, complete_typed


def test_init_writes_a_project_that_runs_at_once(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    shown = cli.out(["init", "mine", "--yes"])
    assert "cd mine && ccl-search run --workload mine" in shown
    assert "it trains on this machine" in shown
    folder = tmp_path / "mine"
    assert {"workloads", "launchers", "objectives", "policies", "runs"} <= {path.name for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    assert load_settings() == Settings(trust_code=True)
    assert cli.json(["space", "--workload", "mine", "--json"])["legal"] > 20


def test_init_asks_three_questions_and_names_where_trials_run(tmp_path, monkeypatch, cli):
    answers = iter(["slurm-generic", "anthropic:some-model", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    shown = cli.out(["init", str(tmp_path / "p")])
    assert "on this machine" not in shown.replace("not on this machine", "")
    assert "launcher check slurm-generic" in shown
    monkeypatch.chdir(tmp_path / "p")
    assert load_settings() == Settings(launcher="slurm-generic", llm="anthropic:some-model", trust_code=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["my-cluster"], "there is no launcher profile 'my-cluster'; known: "),
        (["elsewhere"], "there is no launcher profile 'elsewhere'"),
        (["cpu.framework"], "is a framework file"),
        (["launchers/elsewhere.yaml"], "bare name"),
        (["", "some-model"], "--llm must be"),
        (["", "", "fastest"], "there is no objective 'fastest'"),
    ],
)
def test_init_asks_again_after_a_name_that_is_unknown_in_the_new_project(project, monkeypatch, cli, given, message):
    (project / "launchers").mkdir()
    (project / "launchers" / "elsewhere.yaml").write_text("launcher: local\n")
    answers = [*given]

    def answer(question: str) -> str:
        if not answers:
            raise EOFError
        return answers.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    assert message in cli.err(["init", "p"])
    assert not (project / "p").exists()
    answers[:] = [*given, "", "", ""]
    assert "local, " in cli.out(["init", "p"])


def test_init_finds_the_profiles_of_an_existing_folder(tmp_path, monkeypatch):
    (tmp_path / "p" / "launchers").mkdir(parents=True)
    (tmp_path / "p" / "launchers" / "own.yaml").write_text("launcher: local\n")
    answers = iter(["own", "", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["init", str(tmp_path / "p")]) == 0


def test_init_overwrites_nothing(tmp_path, cli):
    (tmp_path / "ccl-search.yaml").write_text("launcher: mine\n")
    assert "already has ccl-search.yaml" in cli.err(["init", str(tmp_path), "--yes"])
    assert [path.name for path in tmp_path.iterdir()] == ["ccl-search.yaml"]


def test_init_keeps_an_existing_gitignore(tmp_path):
    (tmp_path / ".gitignore").write_text("secret\n")
    assert main(["init", str(tmp_path), "--yes"]) == 0
    assert (tmp_path / ".gitignore").read_text() == "secret\n"


def test_init_without_a_terminal_names_the_option_for_defaults(tmp_path, monkeypatch, cli):
    def end_of_input(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end_of_input)
    assert "--yes" in cli.err(["init", str(tmp_path / "p")])
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("answer", ["a b", "x: y", "{}", "- x", "'", "a\nb"])
def test_answers_that_yaml_could_misread_are_rejected(answer):
    with pytest.raises(UserError, match="one word"):
        check_answer("launcher", answer)


def test_space_lists_knobs_rules_and_rows(project, cli):
    shown = cli.out(["space", "-w", "wl2", "--knob", "tp=2,4", "--rows", "2"])
    assert "tp                        2, 4" in shown
    assert "tp_divides_widths" in shown
    assert shown.count("tp=2 dp=") == 2


def test_space_explain_names_the_rejecting_rule(project, cli):
    config = "tp=16,dp=1,pp=1,mbs=1,ac=none,sp=false,zero=0"
    card = ["--workload", "wl2", "--set", "framework_version=0.15"]
    shown = cli.out(["space", "explain", *card, "--config", config], 1)
    assert "NO  tp_divides_kv_heads" in shown
    assert "8 KV heads / tp 16 = 0.5" in shown
    assert "refused by the framework: megatron/core/transformer/transformer_config.py" in shown
    assert "not in the search space: violates rule tp_divides_kv_heads" in shown


def test_space_explain_counts_the_matches_of_a_partial_configuration(project, cli):
    answer = cli.json(["space", "explain", "-w", "wl2", "--config", "tp=2,dp=8,pp=1,mbs=1", "--json"])
    assert (answer["legal"], answer["completions"]) == (True, 12)
    assert {verdict["rule"]: verdict["ok"] for verdict in answer["verdicts"]}["zero_stage_needs_dp"] is None


def test_space_explain_predicts_memory_of_a_complete_configuration(project, cli):
    config = "tp=2,dp=8,pp=1,mbs=1,ac=full,sp=true,zero=1"
    prediction = cli.json(["space", "explain", "-w", "wl2", "--config", config, "--json"])["prediction"]
    assert 5 < prediction["memory_gib"] < 100
    assert "predicted, not measured" in cli.out(["space", "explain", "-w", "wl2", "--config", config])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "-w", "wl2"], "needs --config"),
        (["explain", "-w", "wl2", "--config", "warp=1"], "there is no knob 'warp'"),
        (["-w", "wl2", "--knob", "warp=1"], "has no knob 'warp'"),
        (["-w", "wl2", "--knob", "tp"], "NAME=CHOICE"),
        (["-w", "wl2", "--rows", "-1"], "--rows"),
        (["-w", "wl2", "--set", "num_heads=7"], "num_kv_heads must divide num_heads"),
    ],
)
def test_invalid_input_gives_one_line_and_exit_code_two(project, cli, arguments, message):
    error = cli.err(["space", *arguments])
    assert message in error
    assert error.count("\n") == 1


COMPLETE = {
    "bash": 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _ccl_search;'
    ' printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": 'functions[compdef]=:; compadd() { shift; print -l -- "$@" }; _files() { print FILES };'
    ' source "$1"; shift; words=("$@"); CURRENT=$#; _ccl_search',
}


def complete_in_shell(shell: str, tmp_path: Path, *words: str) -> set[str]:
    """Return what that shell offers after these words; the last word is incomplete."""
    (tmp_path / "completion").write_text(Path(completion.__file__).with_suffix(f".{shell}").read_text())
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    plain = {"bash": ["--norc"], "zsh": ["-f"]}[shell]
    command = [shell, *plain, "-c", COMPLETE[shell], shell, str(tmp_path / "completion"), "ccl-search", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PATH": here}, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", sorted(COMPLETE))
def test_the_shell_offers_the_matching_names(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    offered = complete_in_shell(shell, tmp_path, "run", "--workload", "wl")
    assert {f"wl{n}" for n in range(1, 8)} <= offered
    assert all(name.startswith("wl") for name in offered)
    assert complete_in_shell(shell, tmp_path, "run", "--overlay", "") <= {"FILES"}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["rep"], {"report", "replay-turns"}),
        (["run", "--work"], {"--workload"}),
        (["run", "-w", "wl2", "-o", "com"], {"composite"}),
        (["run", "--workload=wl4"], {"--workload=wl4"}),
        (["run", "--workload", "=", "wl4"], {"wl4"}),
        (["space", "-w", "wl2", "--framework", "mega"], {"megatron"}),
        (["run", "--recording", "nanotron-8b-2"], {"nanotron-8b-2n"}),
        (["bench", "DIR", "--samplers", "random", "gr"], {"grid"}),
        (["run", "--llm-mode", ""], {"configs", "policy"}),
        (["run", "--llm", "anth"], {"anthropic:"}),
        (["run", "--llm", "anthropic", ":", ""], set()),
        (["run", "--quiet", "--sampler", "heur"], {"heuristic"}),
        (["score", "trace", "--metric", "bus_"], {"bus_bw"}),
        (["launcher", "ch"], {"check"}),
        (["launcher", "check", "slurm"], {"slurm-generic"}),
        (["run", "--launcher", "rep"], {"replay"}),
        (["policy", "test", "de"], {"dense"}),
        (["policy", "test", "--js"], {"--json"}),
        (["show", ""], {"first", "last"}),
        (["report", "first", "fi"], {"first"}),
        (["run", "--learn-from", ""], {"first", "auto", "none"}),
        (["show", "first", ""], set()),
        (["run", "--budget", ""], set()),
        (["nonsense", ""], set()),
        (["--v"], {"--version"}),
    ],
)
def test_each_argument_completes_its_own_names(project, typed, offered):
    (project / "runs" / "first").mkdir(parents=True)
    (project / "runs" / "first" / "search.yaml").write_text("{}\n")
    assert set(complete_words(typed)) == offered


def test_every_completed_argument_belongs_to_a_command():
    parsers = [make_parser(name) for name in COMMANDS]
    parsers += [sub for p in parsers for a in p._actions if isinstance(a.choices, dict) for sub in a.choices.values()]
    assert set(NAMES) <= {action.dest for parser in parsers for action in parser._actions}


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_prints_a_script_for_each_shell(shell, cli):
    script = cli.out(["completion", shell])
    assert "completion --words" in script
    assert "ccl-search" in script


@pytest.mark.parametrize("shell", START)
@pytest.mark.parametrize("line", ["MINE=1 ccl-search run -w on", "true && ccl-search run -w 'on"])
def test_a_person_gets_names_in_the_second_command_and_inside_quotes(shell, line, project):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (project / "workloads").mkdir(exist_ok=True)
    (project / "workloads" / "onlyone.yaml").touch()
    script = Path(completion.__file__).with_suffix(f".{shell}").read_text()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    typed = complete_typed(shell, script, line, project, {**os.environ, "PATH": path})
    assert typed == line.replace("on", "onlyone") + ("' " if "'" in line else " ")


def test_candidates_come_without_the_engine(project):
    (project / "runs" / "mine").mkdir(parents=True)
    (project / "runs" / "mine" / "search.yaml").touch()
    (project / "ccl-search.yaml").write_text("runs: runs\n")
    code = (
        "import sys; from cclsearch.cli import main\n"
        "for words in (['run', '-w', 'wl'], ['run', '--pa'], ['show', 'm'], ['run', '--recording', 'n']):\n"
        "    main(['completion', '--words', *words])\n"
        "print('HEAVY', sorted({'numpy', 'pandas', 'pydantic', 'scipy', 'optuna', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    assert {"wl2", "--parallel", "mine", "nanotron-8b-2n"} <= set(done.stdout.split())
    assert "HEAVY []" in done.stdout


def test_a_part_of_the_arguments_is_read_as_in_the_whole_file():
    whole = yaml.safe_load(Path(completion.__file__).with_name("arguments.yaml").read_text())
    assert {name: read_command(name) for name in COMMANDS} == {name: whole[name] for name in COMMANDS}


@pytest.mark.parametrize("settings", ["runs: [", "- runs", "runs: elsewhere"])
def test_settings_that_name_no_runs_offer_none(project, settings):
    (project / "ccl-search.yaml").write_text(settings)
    assert complete_words(["show", ""]) == ["last"]
