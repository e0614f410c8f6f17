"""What a user meets: where a search runs, what it prints, what it refuses, and how run scripts fail."""

from __future__ import annotations

import csv
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_launcher import Ending, ScriptedLauncher, failed, ran
from test_jobs import open_search

from cclsearch.card.load import load_card
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.values import FailureKind, Provenance
from cclsearch.launch.base import Job
from cclsearch.plan.target import choose_target
from cclsearch.record.event import SearchResumed
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.writer import RunWriter
from cclsearch.report.summary import best_as_json, summarize_run
from cclsearch.report.terminal import watch_lines
from cclsearch.run.folder import load_run
from cclsearch.score.outcome import Admission, Outcome
from cclsearch.search.evaluate import TrialEvaluator
from cclsearch.search.jobs import StopSignal
from cclsearch.search.loop import run_search
from cclsearch.search.session import Session, begin_or_resume

RECORDING = Path(__file__).parent.parent / "workloads" / "recordings" / "nanotron-8b-2n"
REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one folder, in which a test may put the commands that its machine has."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_slurm_that_nobody_named_gets_nothing_and_the_output_says_how_to_choose_it(
    project: Path, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tool(tools, "sbatch", f"echo called > {project}/submitted")
    assert main(["run", "--workload", "wl2", "--budget", "2", "--name", "r"]) == 0
    shown = capsys.readouterr().out
    assert "no profile was named, so nothing was submitted: use `--launcher slurm-generic`" in shown
    assert not (project / "submitted").exists()
    assert load_run(project / "runs" / "r").spec.provenance is Provenance.RECORDED


def test_a_machine_with_enough_accelerators_runs_the_workload_itself(project: Path, tools: Path) -> None:
    card = load_card("wl2")
    assert choose_target(card, launcher=None).recording is not None
    add_tool(tools, "nvidia-smi", "for n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do echo GPU $n: A100; done")
    destination = choose_target(card, launcher=None)
    assert destination.recording is None
    assert destination.profile.launcher == "local"


def test_where_nothing_applies_the_ways_out_are_named(project: Path, tools: Path) -> None:
    with pytest.raises(UserError) as raised:
        choose_target(load_card("wl3"), launcher=None)
    for way in ("--launcher slurm-generic", "--recording FOLDER", "--workload tiny", "16 x a100-40"):
        assert way in str(raised.value)


def test_a_machine_named_for_more_accelerators_than_it_has_is_warned_of(project: Path, tools: Path) -> None:
    [warning] = choose_target(load_card("wl2"), launcher="local").notes
    assert "needs 16 x a100-40, but this machine has none" in warning
    assert choose_target(load_card("tiny"), launcher="local").notes == ()


def test_steps_of_an_allocation_need_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="SLURM_JOB_ID is not set"):
        choose_target(load_card("wl2"), launcher=None, in_allocation=True)


BAD = [
    (
        ["run", "--workload", "wl2", "--launcher", "slurm-generic", "--recording", str(RECORDING)],
        "--launcher slurm-generic and --recording",
    ),
    (["sweep", "--workload", "wl2", "--in-allocation", "--recording", str(RECORDING)], "--in-allocation and --record"),
    ([*REPLAY, "--knob", "nonsense=1,2"], "a recording has a fixed search space"),
    ([*REPLAY, "--framework", "megatron"], "measured with 'nanotron'"),
    (["run", "--workload", "tiny", "--knob", "nonsense=1,2"], "has no knob 'nonsense'"),
    (["run", "--workload", "tiny", "--knob", "tp=3"], "the search space of tiny is empty"),
    (["run", "--workload", "tiny", "--set", "num_heads=7"], "must divide num_heads"),
    (["run", "--workload", "broken.yaml"], "broken.yaml"),
    (["run", "--workload", "text.yaml"], "mapping"),
    (["run", "--workload", "wl2", "--recording", "."], "no card.yaml"),
]


@pytest.mark.parametrize(("command", "says"), BAD, ids=[says for _, says in BAD])
def test_what_cannot_work_is_refused_in_one_line(
    project: Path, command: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "broken.yaml").write_text("workload: [\n")
    (project / "text.yaml").write_text("only words\n")
    assert main(command) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert not (project / "runs").exists()


def test_an_unknown_profile_is_answered_with_profiles_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--workload", "wl2", "--launcher", "nope"]) == 2
    told = capsys.readouterr().err
    assert "slurm-generic" in told
    assert "framework" not in told


def test_a_misspelled_degree_of_a_recording_is_noted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project / "mine"
    shutil.copytree(RECORDING, folder)
    table = (folder / "trials.csv").read_text()
    assert table.startswith("tp,") or ",tp," in table.splitlines()[0]
    head, rest = table.split("\n", 1)
    names = ["tpp" if name == "tp" else name for name in next(csv.reader([head]))]
    (folder / "trials.csv").write_text(",".join(names) + "\n" + rest)
    main(["run", "--workload", "wl2", "--recording", "mine", "--dry-run"])
    assert "no column tp" in capsys.readouterr().out


def test_quiet_json_is_the_summary_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--budget", "2", "--name", "r", "--quiet", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    summary = json.loads(line)
    assert summary["event"] == "summary"
    assert summary["best"]["provenance"] == "recorded"


def test_confirmations_that_a_recording_cannot_give_are_told_of(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REPLAY, "--budget", "2", "--confirm", "1"]) == 0
    assert "--confirm is ignored: a recorded figure cannot be confirmed" in capsys.readouterr().out


def test_a_run_without_trials_has_no_best_and_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--budget", "1", "--name", "r", "--quiet"]) == 0
    (project / "runs" / "r" / LEDGER_FILE).unlink()
    capsys.readouterr()
    assert main(["best", "r"]) == 1
    assert "no trial has run yet" in capsys.readouterr().out
    assert main(["best", "r", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) is None
    assert main(["show", "r", "1"]) == 2


def test_a_run_folder_tells_how_its_search_stands(project: Path) -> None:
    assert main([*REPLAY, "--budget", "2", "--name", "r", "--quiet"]) == 0
    folder = project / "runs" / "r"
    assert load_run(folder).standing == "ended"
    with RunWriter(folder):
        assert load_run(folder).standing == "running"
    ledger = folder / LEDGER_FILE
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    assert load_run(folder).standing == "killed"


def test_a_run_in_another_folder_is_named_so_that_its_hint_works(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REPLAY, "--budget", "2", "--name", "r", "--runs", "else where"]) == 0
    [hint] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("details:")]
    assert f"ccl-search best '{project / 'else where' / 'r'}'" in hint
    assert main(["best", str(project / "else where" / "r")]) == 0


def open_measured(project: Path, times_s: Sequence[float], *, budget: int) -> tuple[Path, Session]:
    """A search whose trials take these step times one after another, as if they had been measured with every trace."""
    launcher = ScriptedLauncher(lambda job: ran(job, times_s[job.trial - 1], simulated=False))
    launcher.provenance = Provenance.MEASURED  # type: ignore[misc]
    folder, session = open_search(project, launcher, budget=budget)
    evaluate = TrialEvaluator(session.spec)
    return folder, replace(session, jobs=replace(session.jobs, evaluate=lambda t, p, b, f: admit(evaluate(t, p, b, f))))


def test_the_summary_says_how_sure_it_is_and_what_it_beat(project: Path) -> None:
    """Three trials, 1 s, 2 s and 1.05 s; then the best is run again."""
    folder, session = open_measured(project, (1.0, 2.0, 1.05, 1.002), budget=3)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        told = "\n".join(summarize_run(session.spec, writer.state, folder).lines)
        begin_or_resume(writer, session, confirm=1)
        run_search(writer, session)
        again = "\n".join(summarize_run(session.spec, writer.state, folder).lines)
    assert "best: trial 1" in told
    assert "from 1 run;" in told
    assert "assumed: no configuration ran twice yet" in told
    assert "better than 1 of 2 other configurations beyond noise (95% confidence); runner-up: trial 3" in told
    assert "ties with trial 3 (step time 5.00% longer): within noise (95% confidence)" in told
    assert str(folder) in told
    assert "from 2 runs;" in again
    assert "(measured, repeats: 1)" in again


@pytest.mark.parametrize(("third_s", "winner"), [(1.03, 2), (0.5, 3)])
def test_a_lucky_single_run_does_not_displace_a_confirmed_one_but_a_clear_win_does(
    project: Path, third_s: float, winner: int
) -> None:
    """1 s, 1.02 s and then one run of `third_s`; the first two are run again, at 1.10 s and 1.06 s."""
    times_s = (1.0, 1.02, 1.10, 1.06, third_s)
    folder, session = open_measured(project, times_s, budget=2)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        begin_or_resume(writer, session, confirm=2)
        run_search(writer, session)
        writer.record(SearchResumed(time_s=time.time(), engine_version="1", budget=3))
        run_search(writer, session)
        best = writer.state.best
        told = "\n".join(summarize_run(session.spec, writer.state, folder).lines)
        answer = best_as_json(session.spec, writer.state, folder)
    assert [trial.loss for trial in writer.state.trials.values()] == list(times_s)
    assert best is not None
    assert answer is not None
    assert best.config == writer.state.trials[5 if winner == 3 else winner].config
    assert answer["trial"] == best.number
    assert answer["confidence"]["runs"] == (1 if winner == 3 else 2)
    assert (5 in answer["confidence"]["tied"]) == (winner == 2)
    assert f"best: trial {best.number}" in told


def test_a_lead_within_the_noise_is_said_when_it_is_taken(project: Path) -> None:
    """1 s, then 0.99 s, then 0.3 s: the second leads within the noise, the third beyond it."""
    folder, session = open_measured(project, (1.0, 0.99, 0.3), budget=3)
    shown = io.StringIO()
    with RunWriter(folder) as writer:
        writer.watch(watch_lines(3, shown))
        begin_or_resume(writer, session)
        run_search(writer, session)
    ended = [line for line in shown.getvalue().splitlines() if " left" in line]
    assert "confidence of beating trial 1: within noise" in ended[1]
    assert "within noise" not in ended[0] + ended[2]


def admit(outcome: Outcome) -> Outcome:
    """As if every rank had left its trace."""
    admission = Admission(admitted=True, verdicts=())
    return outcome.model_copy(update={"admission": admission, "loss": outcome.metrics["step_time_s"]})


def test_the_best_of_a_framework_without_a_run_script_is_told_in_knobs(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REPLAY, "--budget", "1", "--name", "r", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["best", "r"]) == 0
    told = capsys.readouterr().out
    best = load_run(project / "runs" / "r").state.best
    assert best is not None
    assert f"knobs: {best.config} (options of nanotron are unknown: there is no run script)\n" in told
    assert "--zero-stage" not in told


def test_earlier_runs_teach_only_the_same_work(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--budget", "3", "--name", "first", "--quiet"]) == 0
    assert main([*REPLAY, "--budget", "2", "--name", "same", "--quiet", "--learn-from", "first"]) == 0
    capsys.readouterr()
    assert main(["run", "--workload", "tiny", "--name", "unlike", "--learn-from", "first"]) == 2
    told = capsys.readouterr().err
    assert "is not comparable with this search" in told
    for what in ("model", "global batch", "accelerator", "framework", "provenance"):
        assert what in told
    assert told.count("\n") == 1
    assert not (project / "runs" / "unlike").exists()


def test_a_stop_uses_up_no_attempt(project: Path) -> None:
    """Stopped three times while its trial runs, then preempted twice: the trial still ends well."""
    stop = StopSignal()

    def decide(job: Job) -> Ending:
        if job.attempt <= 3:
            stop.request("the test said so")
            return None
        return failed(FailureKind.PREEMPTED) if job.attempt <= 5 else ran(job)

    launcher = ScriptedLauncher(decide)
    folder, session = open_search(project, launcher, budget=1)
    for _ in range(4):
        stop = StopSignal()
        with RunWriter(folder) as writer:
            begin_or_resume(writer, session)
            run_search(writer, replace(session, stop=stop))
    trial = load_run(folder).state.trials[1]
    assert trial.loss == 1.0
    assert len(trial.repeats) == 5


FRAMEWORK = {
    "title": "one that fails in every way",
    "script": "mine.py",
    "runner": "process",
    "knobs": [
        {"name": "tp", "choices": [4]},
        {"name": "dp", "choices": [1]},
        {"name": "pp", "choices": [1]},
        {"name": "micro_batch_size", "choices": [1]},
        {"name": "way", "choices": ["nothing", "words", "signal", "raise", "hang"]},
    ],
}
SCRIPT = """
import os, signal, time
way = os.environ["CCL_WAY"]
if way == "words":
    open(os.path.join(os.environ["CCL_TRIAL_DIR"], "result.json"), "w").write("{not json")
elif way == "signal":
    os.kill(os.getpid(), signal.SIGSEGV)
elif way == "raise":
    raise ValueError("the root of it")
elif way == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
MINE = ["run", "--workload", "tiny", "--framework", "mine", "--launcher", "local", "--strategy", "grid", "--name", "r"]


def write_framework(project: Path, ways: list[str]) -> None:
    (project / "launchers").mkdir()
    knobs = [{**knob, "choices": ways} if knob["name"] == "way" else knob for knob in FRAMEWORK["knobs"]]  # type: ignore
    (project / "launchers" / "mine.framework.yaml").write_text(yaml.safe_dump({**FRAMEWORK, "knobs": knobs}))
    (project / "launchers" / "mine.py").write_text(SCRIPT)


@pytest.mark.serial
def test_each_way_in_which_a_run_script_fails_is_recorded_as_what_it_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_framework(project, ["nothing", "words", "signal", "raise", "hang"])
    assert main([*MINE, "--budget", "5", "--timeout-min", "0.2"]) == 1
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert "continue: ccl-search resume r --budget 10" in told.out
    trials = load_run(project / "runs" / "r").state.trials.values()
    failures = {str(t.config["way"]): t.outcome.failure for t in trials if t.outcome and t.outcome.failure}
    wanted = {
        "nothing": (FailureKind.CRASHED, "exited with 0 but wrote no result.json"),
        "words": (FailureKind.CRASHED, "result.json is not JSON"),
        "signal": (FailureKind.CRASHED, "killed by SIGSEGV"),
        "raise": (FailureKind.CRASHED, "ValueError: the root of it"),
        "hang": (FailureKind.TIMEOUT, "no result after 12 s"),
    }
    assert set(failures) == set(wanted)
    for way, (kind, words) in wanted.items():
        assert failures[way].kind is kind, way
        assert words in failures[way].message


def start_search(project: Path, *command: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "cclsearch", *command], cwd=project, **streams)


def wait_for_event(ledger: Path, name: str) -> None:
    deadline = time.monotonic() + 120
    while not (ledger.exists() and f'"event":"{name}"'.encode() in ledger.read_bytes()):
        assert time.monotonic() < deadline, f"no {name} came"
        time.sleep(0.05)


@pytest.mark.serial
def test_an_interrupt_cancels_the_trial_that_runs_and_resume_goes_on(project: Path) -> None:
    write_framework(project, ["hang", "raise"])
    folder = project / "runs" / "r"
    process = start_search(
        project, *MINE, "--budget", "2", stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        wait_for_event(folder / LEDGER_FILE, "trial_submitted")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait(timeout=60)
    assert b"Traceback" not in err
    assert process.returncode == 1
    assert b"continue: ccl-search resume r" in out
    run = load_run(folder)
    assert run.standing == "stopped"
    [waiting] = run.state.unfinished
    assert waiting.handle is None
    assert find_processes("r-t0001-a1") == []
    (project / "launchers" / "mine.py").write_text("raise ValueError('another script')")
    assert main(["resume", "r", "--quiet"]) == 1
    state = load_run(folder).state
    assert [t.outcome.failure.message for t in state.trials.values() if t.outcome and t.outcome.failure] == [
        "ValueError: another script"
    ] * 2


def find_processes(job_name: str) -> list[str]:
    """Living processes that carry a job's name in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"CCL_JOB_NAME={job_name}\0".encode() in path.read_bytes() + b"\0" and str(path) not in found:
                found.append(str(path))
        except OSError:
            continue
    return found


@pytest.mark.serial
def test_a_search_whose_output_nobody_reads_stops_cleanly(project: Path) -> None:
    process = start_search(
        project, *REPLAY, "--budget", "60", "--name", "r", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) in (0, 1)
    assert b"Traceback" not in said
    run = load_run(project / "runs" / "r")
    assert run.standing == "stopped"
    assert run.state.stopped is not None
    assert "nobody reads" in run.state.stopped.reason
    assert run.state.unfinished == [] or all(trial.handle is None for trial in run.state.unfinished)
