"""What people mistype: every command answers in one line that says what was wrong and what would do; exit code 2."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from privileges import permissions_hold

from cclsearch.cli import COMMANDS, EXIT_INTERRUPTED, main
from cclsearch.core.errors import UserError, require_writable, writing_to

TRACE = str(Path(__file__).parent / "recorded" / "gloo-ddp2")
RUN = ["run", "--workload", "wl2", "--launcher", "replay"]
LONG = "x" * 300
"""No file system takes so long a name."""
OF_A_RUN = ("resume", "status", "best", "show", "admit", "replay-turns", "clean", "export", "report", "pareto")


@pytest.fixture
def mistakes(project: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A project with one run, and with every kind of thing that is not what a command wants."""
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
    ("--verbose", "there is no command '--verbose'"),
    ("run", "required: -w/--workload (see `ccl-search run --help`)"),
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
    ("run -w wl2 --launcher replay --name a/b", "not 'a/b'"),
    ("run -w wl2 --launcher replay --name last", "'last' is reserved"),
    ("run -w wl2 --launcher replay --name first", "choose another --name, or run `ccl-search resume "),
    ("run -w wl2 --launcher replay --llm openai:m --strategy random", "--strategy random does not use an LLM"),
    ("run -w wl2 --launcher replay --max-usd 1 --llm-mode policy", "--llm-mode and --max-usd: no LLM takes part"),
    ("run -w wl2 --launcher replay --runs empty", "cannot create the run folder"),
    ("run -w wl2 --launcher replay --seed 4294967296", "--seed: must be less than 4294967296"),
    ("sweep -w wl2 --launcher replay --weights 1:0:0.1", "got '1:0:0.1'"),
    ("sweep -w wl2 --launcher replay --seed-policy dense", "--seed-policy: no LLM takes part"),
    ("show first x", "TRIAL: must be a whole number of at least 1, not 'x'"),
    ("show first 7", "has 1 trials, but no trial 7"),
    ("admit first --trial 7", "trial 7 is not among its 1"),
    ("resume first --confirm 2", "cannot be confirmed"),
    ("report first --all", "give either --all or first"),
    ("report first --out folder", "cannot write 'folder'"),
    ("pareto first --out empty", "cannot write 'empty/pareto.html'"),
    ("export first --to csv --out folder", "'folder' exists already"),
    ("export first --to csv --out empty/x.csv", "cannot write 'empty/x.csv'"),
    ("export first --to optuna --out LONG", "cannot write 'LONG'"),
    ("export first --trials best", "need `--to cards`"),
    ("space -w wl2 --config tp=1", "`space list` does not accept it"),
    ("predict -w wl2 --png folder", "--png: 'folder' is a folder; name a file"),
    ("predict -w wl2 --png LONG", "cannot write 'LONG'"),
    ("bench folder", "'folder' has no landscape"),
    ("bench folder --strategies ,", "--strategies is empty; choose from: default, "),
    ("bench folder --json nowhere/x.json", "/nowhere' does not exist; create it"),
    ("score", "score takes one trace, or two to compare; 0 were given"),
    ("score nowhere", "'nowhere' does not exist: give a trace file"),
    ("score runs/first", "give one of its trials, for example runs/first/trials/0001"),
    (f"score {TRACE} --picture empty", "cannot write 'empty/breakdown.svg'"),
    (f"what-if {TRACE} --chakra empty", "cannot write 'empty'"),
    ("what-if nowhere", "'nowhere' does not exist: give a trace file"),
    ("policy test nowhere", "there is no policy 'nowhere'; known: "),
    ("launcher list slurm-generic", "both are arguments of `launcher check`"),
    ("launcher check list.yaml", "list.yaml: must be a mapping"),
    ("nightly empty", "empty: must be a mapping"),
    ("doctor now", "unrecognized arguments: now"),
    ("completion tcsh", "invalid choice: 'tcsh'"),
    ("init empty --yes", "'empty' must be a folder, but it is a file"),
]


def test_a_mistake_is_answered_in_one_line_and_starts_nothing(
    mistakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(mistakes.rglob("*"))
    wrong = []
    for line, says in [(line.replace("LONG", LONG), says.replace("LONG", LONG)) for line, says in MISTAKES]:
        code, told = main(shlex.split(line)), capsys.readouterr()
        if (code, told.out) != (2, "") or says not in told.err or told.err.count("\n") != 1:
            wrong.append((line, code, told))
    assert wrong == []
    assert sorted(mistakes.rglob("*")) == before
    assert {line.split()[0] for line, _ in MISTAKES} | set(OF_A_RUN) >= set(COMMANDS)


@pytest.mark.parametrize("command", OF_A_RUN)
def test_a_run_that_is_none_or_not_this_versions_is_named(
    command: str, mistakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["1"] if command == "show" else []
    expected = {"nowhere": "there is no run 'nowhere' in", "folder": "there is no run 'folder' in"}
    if command != "replay-turns":  # which needs nothing of a run but its turns
        expected |= {"newer": "was written by a newer ccl-search", "broken": "search.yaml: line 2: "}
    for name, says in expected.items():
        assert main([command, name, *more]) == 2
        told = capsys.readouterr().err
        assert says in told
        assert told.count("\n") == 1


def test_what_a_message_says_to_type_works_as_it_stands(mistakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--workload", "wl2", "--config", "tp=8,dp=1", "--set", "model_family=my model"]) == 2
    [command] = re.findall(r"`ccl-search (.*?)`", capsys.readouterr().err)
    assert main(shlex.split(command)) == 1
    assert "NO" in capsys.readouterr().out
    assert main([*RUN, "--budget", "1", "--name", "r", "--runs", "my runs", "--quiet"]) == 0
    capsys.readouterr()
    assert main([*RUN, "--budget", "1", "--name", "r", "--runs", "my runs", "--quiet"]) == 2
    [command] = re.findall(r"`ccl-search (.*?)`", capsys.readouterr().err)
    assert main(shlex.split(command)) == 0


def test_a_run_that_cannot_be_read_is_left_out_of_all(mistakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--all", "--out", "all.html", "--no-png"]) == 0
    shown = capsys.readouterr().out
    assert "note: newer is skipped: " in shown
    assert "note: broken is skipped: " in shown
    assert (mistakes / "all.html").is_file()


def test_verdicts_that_cannot_be_written_are_the_users_to_mend(
    mistakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = mistakes / "runs" / "first" / "trials" / "0001" / "admission.json"
    verdicts.unlink()
    verdicts.mkdir()
    assert main(["admit", "first", "--write"]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_help_with_a_command_is_that_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", "policy"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ccl-search policy")
    assert main(["help", "polcy"]) == 2
    assert "did you mean 'policy'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["launcher", "llm", "objective"])
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_wrong_name_in_the_settings_is_said_to_stand_there(
    name: str, command: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "ccl-search.yaml").write_text(f"{name}: nowhere\n")
    more = [] if name == "launcher" else ["--launcher", "replay"]
    code = main([command, "--workload", "wl2", "--dry-run", *more])
    told = capsys.readouterr().err
    if (name, command) == ("objective", "sweep"):
        assert code == 0  # a sweep's objective is its own
        return
    assert code == 2
    assert "'nowhere'" in told
    assert told.endswith(f"(`{name}` in ccl-search.yaml)\n")


@pytest.mark.parametrize(
    ("command", "interrupted", "says"),
    [
        ("init p", "builtins.input", "ccl-search: Interrupted\n"),
        ("run -w wl2", "cclsearch.plan.plan.plan_search", "Continue with `ccl-search resume last`\n"),
    ],
)
def test_ctrl_c_is_one_line_and_says_how_a_search_goes_on(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    interrupted: str,
    says: str,
) -> None:
    def interrupt(asked: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, interrupt)
    assert main(shlex.split(command)) == EXIT_INTERRUPTED
    told = capsys.readouterr().err
    assert told.endswith(says)
    assert told.count("\n") == 1


def test_what_cannot_be_written_is_the_users_to_mend_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No space left"), writing_to(tmp_path):
        raise OSError(28, "No space left on device")
    require_writable(tmp_path / "new", "--out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").write_text("kept")
    require_writable(tmp_path / "old", "--out")
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize("command", ["score", "what-if", "run -w wl2 --recording", "bench", "init --yes", "run -w"])
def test_a_folder_that_may_not_be_read_is_the_users_to_mend(
    command: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = project / "closed"
    closed.mkdir(mode=0)
    try:
        with permissions_hold():
            assert main([*shlex.split(command), str(closed)]) == 2
    finally:
        closed.chmod(0o700)
    assert capsys.readouterr().err.count("\n") == 1
