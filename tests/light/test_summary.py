"""What a search prints at its end: the best configuration, how certain it is, and where its details are."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from scripted_launcher import FirstJobFinishesLast, MeasuredLauncher, ScriptedLauncher, failed, ran
from scripted_search import open_search, run_session

from cclsearch.cli import main
from cclsearch.cli.drive import print_end
from cclsearch.core.values import FailureKind
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import Changes, Session, begin_or_resume
from cclsearch.plugins import TASKS
from cclsearch.record.event import Purpose, SearchResumed, TrialProposed
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.report.figures import ObjectiveFigure
from cclsearch.report.summary import best_as_json, summarize_run
from cclsearch.report.terminal import watch_lines
from cclsearch.run.folder import load_run

STEP_TIME = TASKS.get("training").primary_metric
REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


def test_quiet_json_prints_only_the_summary(project, cli):
    [line] = cli.out([*REPLAY, "--budget", "2", "--name", "r", "--quiet", "--json"]).splitlines()
    summary = json.loads(line)
    assert summary["event"] == "summary"
    assert summary["best"]["provenance"] == "recorded"


def test_best_of_a_run_without_trials_exits_with_1(project, cli):
    assert main([*REPLAY, "--budget", "1", "--name", "r", "--quiet"]) == 0
    (project / "runs" / "r" / LEDGER_FILE).unlink()
    assert "no trial has run yet" in cli.out(["best", "r"], 1)
    assert cli.json(["best", "r", "--json"], 1) is None
    assert main(["show", "r", "1"]) == 2


def test_the_best_command_printed_for_another_folder_works(project, capsys):
    assert main([*REPLAY, "--budget", "2", "--name", "r", "--runs", "else where"]) == 0
    [hint] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("details:")]
    assert f"ccl-search best '{project / 'else where' / 'r'}'" in hint
    assert main(["best", str(project / "else where" / "r")]) == 0


def open_measured(project: Path, times_s: Sequence[float], *, budget: int) -> tuple[Path, Session]:
    """Return a search whose trials take these step times in turn and count as measured, with every trace."""
    launcher = MeasuredLauncher(lambda job: ran(job, times_s[job.trial - 1], simulated=False))
    return open_search(project, launcher, admits=True, budget=budget)


def test_the_summary_gives_confidence_runner_up_and_ties(project):
    """Three trials of 1 s, 2 s and 1.05 s; then the best is confirmed."""
    folder, session = open_measured(project, (1.0, 2.0, 1.05, 1.002), budget=3)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        summary = "\n".join(summarize_run(session.spec, writer.state, folder))
        begin_or_resume(writer, session, Changes(confirm=1))
        run_search(writer, session)
        confirmed = "\n".join(summarize_run(session.spec, writer.state, folder))
    assert "best: trial 1" in summary
    assert "from 1 run;" in summary
    assert "assumed: no configuration ran twice yet" in summary
    assert "better than 1 of 2 other configurations beyond noise (95% confidence); runner-up: trial 3" in summary
    assert "ties with trial 3 (step time 5.00% longer): within noise (95% confidence)" in summary
    assert str(folder) in summary
    assert "from 2 runs;" in confirmed
    assert "(measured, repeats: 1)" in confirmed


def test_reference_trials_count_among_the_other_configurations(project):
    folder, session = open_measured(project, (2.0, 1.0, 1.05, 2.0), budget=3)
    reference = TrialProposed(
        trial=1, config=session.space.config(0), proposer="reference", rationale="", purpose=Purpose.REFERENCE
    )
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        writer.record(reference.at(0.0))
        run_search(writer, session)
        summary = "\n".join(summarize_run(session.spec, writer.state, folder))
    assert "best: trial 2" in summary
    assert "better than 2 of 3 other configurations" in summary


@pytest.mark.parametrize(("third_s", "winner", "is_tied"), [(1.03, 2, True), (0.97, 3, True), (0.5, 3, False)])
def test_only_a_likely_win_displaces_a_confirmed_best(project, third_s, winner, is_tied):
    """Trials of 1 s and 1.02 s, confirmed at 1.10 s and 1.06 s; then one trial of `third_s`."""
    times_s = (1.0, 1.02, 1.10, 1.06, third_s)
    folder, session = open_measured(project, times_s, budget=2)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
        begin_or_resume(writer, session, Changes(confirm=2))
        run_search(writer, session)
        writer.record(SearchResumed(time_s=time.time(), engine_version="1", budget=3))
        run_search(writer, session)
        best = writer.state.best
        summary = "\n".join(summarize_run(session.spec, writer.state, folder))
        answer = best_as_json(session.spec, writer.state, folder)
    assert [trial.loss for trial in writer.state.trials.values()] == list(times_s)
    assert best.config == writer.state.trials[5 if winner == 3 else winner].config
    assert answer["trial"] == best.number
    assert answer["confidence"]["runs"] == (1 if winner == 3 else 2)
    assert ((5 if winner == 2 else 2) in answer["confidence"]["tied"]) == is_tied
    assert f"best: trial {best.number}" in summary


def test_a_new_best_within_noise_is_marked_in_its_line(project):
    """Trials of 1 s, 0.99 s and 0.3 s: the second leads within noise, the third beyond noise."""
    folder, session = open_measured(project, (1.0, 0.99, 0.3), budget=3)
    shown = io.StringIO()
    with RunWriter(folder) as writer:
        writer.watch(watch_lines(3, ObjectiveFigure(STEP_TIME), shown))
        begin_or_resume(writer, session)
        run_search(writer, session)
    ended = [line for line in shown.getvalue().splitlines() if " left" in line]
    assert "(within noise of trial 1: " in ended[1]
    assert "% probability of being faster)" in ended[1]
    assert "within noise" not in ended[0] + ended[2]


def test_best_of_a_recording_shows_the_launch_of_its_own_framework(project, cli):
    assert main([*REPLAY, "--budget", "1", "--name", "r", "--quiet"]) == 0
    summary = cli.out(["best", "r"])
    best = load_run(project / "runs" / "r").state.best
    text = summary.split("cat > nanotron.yaml <<'EOF'\n")[1].split("\nEOF\n")[0]
    assert yaml.safe_load(text)["parallelism"].items() >= {n: best.config[n] for n in ("tp", "dp", "pp")}.items()
    assert summary.rstrip().endswith("run_train.py --config-file nanotron.yaml")


def test_best_says_that_the_launch_is_unknown_if_the_framework_is(project, cli):
    assert main([*REPLAY, "--budget", "1", "--name", "r", "--quiet"]) == 0
    spec = project / "runs" / "r" / "search.yaml"
    spec.write_text(spec.read_text().replace("framework: nanotron", "framework: mystery"))
    assert "unknown: there is no framework 'mystery'" in cli.out(["best", "r"])
    assert "there is no framework" in cli.json(["best", "r", "--json"])["launch"]["unknown"]


def test_the_summary_compares_with_the_first_trial_that_finished(project):
    launcher = FirstJobFinishesLast(lambda job: ran(job, (10.0, 3.0, 2.0)[job.trial - 1]))
    folder, session = open_search(project, launcher, budget=3, parallel=2)
    lines = summarize_run(session.spec, run_session(folder, session), folder)
    [line] = [line for line in lines if "first ranked" in line]
    assert line.startswith("1.5x faster than the first ranked trial (trial 2: 3 s -> 2 s")


def test_a_best_within_noise_of_the_baseline_is_not_called_faster(project):
    folder, session = open_measured(project, (1.0, 0.99), budget=2)
    assert summarize_run(session.spec, RunState(), folder)[0] == "no trial has run yet"
    lines = summarize_run(session.spec, run_session(folder, session), folder)
    [line] = [line for line in lines if "first ranked" in line]
    assert line.startswith("within noise of the first ranked trial (trial 1: 1 s -> 0.99 s, 1.00% less; ")


def test_a_single_ranked_configuration_has_no_probability_of_being_the_best(project):
    folder, session = open_measured(project, (1.0,), budget=1)
    lines = summarize_run(session.spec, run_session(folder, session), folder)
    [line] = [line for line in lines if line.startswith("confidence: only")]
    assert line.startswith(
        "confidence: only one configuration was admitted: nothing to compare with; 95% interval of the step time: 0."
    )
    assert " s from 1 run;" in line


def test_infrastructure_failures_are_named_in_words_and_cost_no_budget(project, capsys, cli):
    folder, session = open_search(project, ScriptedLauncher(lambda job: failed(FailureKind.LAUNCHER)), budget=4)
    shown = io.StringIO()
    with RunWriter(folder) as writer:
        writer.watch(watch_lines(4, ObjectiveFigure(STEP_TIME), shown, max_attempts=session.spec.limits.max_attempts))
        begin_or_resume(writer, session)
        run_search(writer, session)
        print_end(session.spec, writer.state, folder)
    assert "retrying (launcher failure: " in shown.getvalue()
    assert shown.getvalue().count(", attempt 2 of 3\n") == shown.getvalue().count(", attempt 3 of 3\n") == 3
    assert "no best yet, 4 of 4 trials left" in shown.getvalue()
    ending, *_ = capsys.readouterr().out.splitlines()
    assert ending.startswith("stopped: 3 consecutive infrastructure failures: fix the cause (see `ccl-search status ")
    status = cli.out(["status", str(folder)])
    assert "0 of 4 trials used (3 infrastructure failures do not count)" in status
    assert "failed: 3 x launcher failure (trial 1: " in status
    assert {trial["result"] for trial in cli.json(["status", str(folder), "--json"])["trials"]} == {"launcher"}


def test_recorded_figures_are_ranked_without_a_claim_about_noise(project, capsys, cli):
    assert main([*REPLAY, "--budget", "3", "--name", "r", "--quiet"]) == 0
    assert re.search(
        r"^lowest of \d recorded step times; runner-up: trial \d \([\d.]+ s -> [\d.]+ s, [\d.]+(% longer|x as long)\)$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert cli.out(["show", "r", "3"]).count("expected step time") <= 1
