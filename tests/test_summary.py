"""What a search prints at its end: the best configuration, how certain it is, and where its details are."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_launcher import ScriptedLauncher, ran
from scripted_search import admit, open_search

from cclsearch.cli import main
from cclsearch.core.values import Provenance
from cclsearch.record.event import SearchResumed
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.writer import RunWriter
from cclsearch.report.summary import best_as_json, summarize_run
from cclsearch.report.terminal import watch_lines
from cclsearch.run.folder import load_run
from cclsearch.search.evaluate import TrialEvaluator
from cclsearch.search.loop import run_search
from cclsearch.search.session import Session, begin_or_resume

REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


def test_quiet_json_is_the_summary_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--budget", "2", "--name", "r", "--quiet", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    summary = json.loads(line)
    assert summary["event"] == "summary"
    assert summary["best"]["provenance"] == "recorded"


def test_a_run_without_trials_has_no_best_and_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--budget", "1", "--name", "r", "--quiet"]) == 0
    (project / "runs" / "r" / LEDGER_FILE).unlink()
    capsys.readouterr()
    assert main(["best", "r"]) == 1
    assert "no trial has run yet" in capsys.readouterr().out
    assert main(["best", "r", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) is None
    assert main(["show", "r", "1"]) == 2


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
