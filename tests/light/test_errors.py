"""Mistyped input: every command exits with code 2 and one line that says what is wrong and what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import TESTS
from privileges import enforced_permissions

from cclsearch.cli import COMMANDS, EXIT_INTERRUPTED, main
from cclsearch.core.errors import UserError, reading_from, require_writable, writing_to

TRACE = str(TESTS / "recorded" / "gloo-ddp2")
RUN = ["run", "--workload", "wl2", "--launcher", "replay"]
LONG = "x" * 300
"""Longer than any file system allows a name to be."""
RUN_COMMANDS = (
    *("resume", "status", "best", "show", "admit", "replay-turns", "clean", "export", "report", "pareto", "watch"),
    "dashboard",
)


@pytest.fixture
def mistakes(project: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a project with one run, and with files and folders that no command accepts."""
    assert main([*RUN, "--budget", "1", "--name", "first", "--quiet"]) == 0
    capsys.readouterr()
    (project / "folder").mkdir()
    (project / "empty").touch()
    (project / "list.yaml").write_text("- a\n")
    for name, text in {"newer": "schema_version: 99\n", "broken": "a: [\n"}.items():
        (project / "runs" / name).mkdir()
        (project / "runs" / name / "search.yaml").write_text(text)
    return project


MISTAKES: list[tuple[str, str]] = [
    ("runn", "did you mean 'run'?"),
    ("run -w wl2 --budjet 3", "unrecognized arguments: --budjet 3 (did you mean '--budget'?) (see"),
    ("--verbose", "there is no command '--verbose'"),
    ("run", "give --workload NAME, or --recording NAME"),
    ("run -w folder", "there is no workload 'folder' (here that name is a folder); known: "),
    ("run -w LONG", "there is no workload"),
    ("status LONG", "there is no run"),
    ("score LONG", "LONG"),
    ("launcher check LONG.yaml", "LONG.yaml"),
    ("init LONG --yes", "cannot write"),
    ("bench LONG", "LONG"),
    ("run -w wl2 --recording LONG", "LONG"),
    ("run -w empty", "here that name is a file that does not end in .yaml"),
    ("run -w list.yaml", "list.yaml: must be a mapping of fields"),
    ("run -w wl2 --launcher simulate --set micro_bach_size=2", "limit it with `--knob micro_batch_size=VALUE`"),
    ("run -w wl2 --launcher simulate --set batch_sise=2", "no field 'batch_sise' (did you mean 'batch_size'?)"),
    ("run -w wl2 --launcher simulate --knob zero_stge=1", "no knob 'zero_stge' (did you mean 'zero_stage'?)"),
    ("run -w wl2 --launcher simulate --baseline tpp=2", "--baseline: there is no knob 'tpp' (did you mean 'tp'?)"),
    ("predict -w wl2 --config zero_stge=1", "no knob 'zero_stge' (did you mean 'zero_stage'?)"),
    ("run -w wl2 --launcher replay --name a/b", "not 'a/b'"),
    ("run -w wl2 --launcher replay --name last", "'last' is reserved"),
    ("run -w wl2 --launcher replay --name first", "choose another --name, or run `ccl-search resume "),
    ("run -w wl2 --launcher replay --llm none --max-tokens 5", "--max-tokens: no LLM is used"),
    ("run -w wl2 --launcher replay --max-usd 1 --llm-mode policy", "--llm-mode and --max-usd: no LLM is used"),
    ("run -w wl2 --launcher replay --runs empty", "cannot create the run folder"),
    ("run -w wl2 --launcher replay --seed 4294967296", "--seed: must be at most 4,294,967,295"),
    ("sweep -w wl2 --launcher replay --weights 1:0:0.1", "not '1:0:0.1'"),
    ("sweep -w wl2 --launcher replay --seed-policy dense", "--seed-policy: no LLM is used"),
    ("show first x", "TRIAL: must be a whole number of at least 1, not 'x'"),
    ("logs first 7", "has 1 trial; there is no trial 7"),
    ("tag first a/b", "'a/b' is not a tag"),
    ("note first 7 text", "has 1 trial; there is no trial 7"),
    ("show first 7", "has 1 trial; there is no trial 7"),
    ("admit first --trial 7", "has 1 trial; there is no trial 7"),
    ("resume first --confirm 2", "cannot be confirmed"),
    ("report first --all", "give either --all or first"),
    ("report first --out folder", "cannot write 'folder'"),
    ("pareto first --out empty", "cannot write 'empty/pareto.html'"),
    ("export first --to csv --out folder", "'folder' exists already"),
    ("export first --to csv --out empty/x.csv", "cannot write 'empty/x.csv'"),
    ("export first --to optuna --out LONG", "cannot write 'LONG'"),
    ("export first --trials best", "need `--to ccl-bench`"),
    ("space -w wl2 --config tp=1", "`space list` does not accept it"),
    ("predict -w wl2 --png folder", "--png: 'folder' is a folder; name a file"),
    ("predict -w wl2 --png LONG", "cannot write 'LONG'"),
    ("bench folder", "'folder' has no landscape"),
    ("bench folder --samplers ,", "--samplers is empty; choose from: surrogate, "),
    ("bench folder --json nowhere/x.json", "/nowhere' does not exist; create it"),
    ("score", "score takes one trace, or two to compare; 0 were given"),
    ("score nowhere", "'nowhere' does not exist: give a trace file"),
    ("score runs/first", "give one of its trials, for example runs/first/trials/0001"),
    (f"score {TRACE} --picture empty", "cannot write 'empty/breakdown.svg'"),
    (f"what-if {TRACE} --chakra empty", "cannot write 'empty'"),
    ("what-if nowhere", "'nowhere' does not exist: give a trace file"),
    ("policy test nowhere", "there is no policy 'nowhere'; known: "),
    ("launcher list slurm-generic", "unrecognized arguments: slurm-generic"),
    ("objective show cots", "did you mean 'cost'?"),
    ("objective copy cost", "required: NEWNAME"),
    ("card show nowhere", "there is no workload 'nowhere'"),
    ("recording check nowhere", "there is no recording 'nowhere'"),
    ("accelerators h10o", "did you mean 'h100'?"),
    ("links shw x", "did you mean 'show'?"),
    ("sweep-hardware nowhere", "'nowhere' does not exist"),
    ("ui --port x", "argument --port"),
    ("ask nowhere", "there is no run 'nowhere'"),
    ("tell first 1 --value 1", "run by the launcher 'replay'"),
    ("mcp --http 0", "set CCL_SEARCH_MCP_TOKEN"),
    ("claims overlap nowhere", "nowhere"),
    ("device prob", "did you mean 'probe'?"),
    ("docs tutoral", "did you mean 'tutorial'?"),
    ("export example-wl2 --to csw", "did you mean 'csv'?"),
    ("card chek wl2", "did you mean 'check'?"),
    ("nightly instal night.yaml", "did you mean 'install'?"),
    ("nightly night.yaml --onc", "did you mean '--once'?"),
    ("score --metric comm_tme .", "did you mean 'comm_time'?"),
    ("run -w wl5 --framework megatrn", "did you mean 'megatron'?"),
    ("run -w wl2 --launcher replay --llm anthropc:m", "did you mean 'anthropic'?"),
    ("run -w wl2 --launcher replay --sampler tpee", "did you mean 'tpe'?"),
    ("run -w wl2 -o composit", "did you mean 'composite'?"),
    ("run -w wl2 -o composite:cost_wieght=1", "there is no parameter"),
    ("launcher show local --framework cpu", "unrecognized arguments: --framework"),
    ("launcher copy local", "required: NEWNAME"),
    ("launcher copy local a/b", "NEWNAME is 'a/b'"),
    ("launcher copy local x.framework", "NEWNAME is 'x.framework'"),
    ("launcher copy locl mine", "did you mean 'local'?"),
    ("launcher show local mine", "unrecognized arguments: mine"),
    ("launcher check replay", "--recording FOLDER"),
    ("space -w wl2 --set num_acelerators=8", "did you mean 'num_accelerators'?"),
    ("launcher check list.yaml", "list.yaml: must be a mapping"),
    ("nightly empty", "empty: must be a mapping"),
    ("doctor now", "unrecognized arguments: now"),
    ("completion tcsh", "invalid choice: 'tcsh'"),
    ("trust nowhere", "'nowhere' is not a folder"),
    ("init empty --yes", "'empty' must be a folder, but it is a file"),
]


def test_a_mistake_gives_one_line_and_starts_nothing(mistakes, capsys):
    before = sorted(mistakes.rglob("*"))
    wrong = []
    for line, message in [(line.replace("LONG", LONG), message.replace("LONG", LONG)) for line, message in MISTAKES]:
        code, captured = main(shlex.split(line)), capsys.readouterr()
        if (code, captured.out) != (2, "") or message not in captured.err or captured.err.count("\n") != 1:
            wrong.append((line, code, captured))
    assert wrong == []
    assert sorted(mistakes.rglob("*")) == before
    assert {line.split()[0] for line, _ in MISTAKES} | set(RUN_COMMANDS) >= set(COMMANDS)


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_a_missing_newer_or_broken_run_is_named(command, mistakes, cli):
    more = ["1"] if command == "show" else []
    expected = {"nowhere": "there is no run 'nowhere' in", "folder": "there is no run 'folder' in"}
    if command != "replay-turns":  # `replay-turns` reads only the turns of a run
        expected |= {"newer": "was written by a newer ccl-search", "broken": "search.yaml: line 2: "}
    for name, message in expected.items():
        error = cli.err([command, name, *more])
        assert message in error
        assert error.count("\n") == 1


def test_a_command_suggested_by_an_error_works_as_printed(mistakes, cli):
    def find_suggested(error: str) -> list[str]:
        [command] = re.findall(r"`ccl-search (.*?)`", error)
        return shlex.split(command)

    wrong = ["predict", "--workload", "wl2", "--config", "pp=40", "--set", "model_family=my model"]
    assert "NO" in cli.out(find_suggested(cli.err(wrong)), 1)
    run = [*RUN, "--budget", "1", "--name", "r", "--runs", "my runs", "--quiet"]
    cli.out(run)
    assert main(find_suggested(cli.err(run))) == 0


def test_report_all_skips_unreadable_runs(mistakes, cli):
    shown = cli.out(["report", "--all", "--out", "all.html", "--no-png"])
    assert "note: newer is skipped: " in shown
    assert "note: broken is skipped: " in shown
    assert (mistakes / "all.html").is_file()


def test_a_folder_in_place_of_the_verdicts_is_moved_aside(mistakes):
    verdicts = mistakes / "runs" / "first" / "trials" / "0001" / "admission.json"
    verdicts.unlink()
    verdicts.mkdir()
    assert main(["admit", "first", "--write"]) == 0
    assert json.loads(verdicts.read_text())["admitted"] is True
    assert verdicts.with_name("admission.json.1").is_dir()


def test_help_with_a_command_shows_that_commands_help(capsys, cli):
    with pytest.raises(SystemExit) as ended:
        main(["help", "policy"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ccl-search policy")
    assert "did you mean 'policy'?" in cli.err(["help", "polcy"])


@pytest.mark.parametrize("command", ["run", "sweep"])
@pytest.mark.parametrize("name", ["launcher", "llm", "objective"])
def test_an_error_in_the_settings_names_the_settings_file(name, command, project, cli):
    (project / "ccl-search.yaml").write_text(f"{name}: nowhere\n")
    more = [] if name == "launcher" else ["--launcher", "replay"]
    words = [command, "--workload", "wl2", "--dry-run", *more]
    if (name, command) == ("objective", "sweep"):
        assert cli.err(words, 0) == "", "a sweep does not use the objective of the settings"
        return
    error = cli.err(words)
    assert "'nowhere'" in error
    assert error.endswith(f"(`{name}` in ccl-search.yaml)\n")


@pytest.mark.parametrize(
    ("command", "interrupted", "message"),
    [
        ("init p", "builtins.input", "ccl-search: Interrupted\n"),
        ("run -w wl2", "cclsearch.cli.run.plan_search", "Continue with `ccl-search resume last`\n"),
    ],
)
def test_ctrl_c_prints_one_line_and_how_to_continue(project, monkeypatch, cli, command, interrupted, message):
    def interrupt(asked: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, interrupt)
    error = cli.err(shlex.split(command), EXIT_INTERRUPTED)
    assert error.endswith(message)
    assert error.count("\n") == 1


ODD: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "8 GiB": lambda path: (path.touch(), os.truncate(path, 8 << 30)),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("workloads/w.yaml", ("--workload", "w")),
        ("launchers/l.yaml", ("--launcher", "l")),
        ("launchers/f.framework.yaml", ("--framework", "f", "--launcher", "local")),
        ("objectives/o.yaml", ("--objective", "o")),
        ("ccl-search.yaml", ()),
    ],
)
def test_an_odd_file_of_a_project_is_named_and_never_waited_for(project, cli, name, option, odd):
    path = project / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    ODD[odd](path)
    run = ["run", "--workload", "wl2", "--launcher", "replay", "--budget", "1", "--dry-run", *option]
    [line] = cli.err(run).splitlines()
    assert str(path) in line
    assert ("must be under 8 MiB" if odd == "8 GiB" else "is not a regular file") in line


def test_an_error_while_a_file_is_read_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"Stale file handle: '.*ledger\.jsonl'"), reading_from(tmp_path / "ledger.jsonl"):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_failed_write_is_a_user_error_and_leaves_no_file(tmp_path):
    with pytest.raises(UserError, match="No space left"), writing_to(tmp_path):
        raise OSError(28, "No space left on device")
    require_writable(tmp_path / "new", "--out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").write_text("kept")
    require_writable(tmp_path / "old", "--out")
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize("command", ["score", "what-if", "run -w wl2 --recording", "bench", "init --yes", "run -w"])
def test_an_unreadable_folder_is_a_user_error(command, project, cli):
    closed = project / "closed"
    closed.mkdir(mode=0)
    try:
        with enforced_permissions():
            assert cli.err([*shlex.split(command), str(closed)]).count("\n") == 1
    finally:
        closed.chmod(0o700)


@pytest.mark.parametrize("command", ["run -w wl2 --launcher replay", "status", "nightly nightly.yaml"])
def test_a_project_whose_path_a_ledger_cannot_hold_is_refused_in_one_line(project, tmp_path, monkeypatch, cli, command):
    odd = tmp_path / os.fsdecode(b"a\xff?")
    odd.mkdir()
    (odd / "ccl-search.yaml").write_text("{}\n")
    (odd / "nightly.yaml").write_text("budget: {trials: 1}\njobs: [{workload: wl2, launcher: replay}]\n")
    monkeypatch.chdir(odd)
    assert "must be UTF-8 text" in cli.err(command.split())
    assert not (odd / "runs").exists()
