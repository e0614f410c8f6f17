"""How a run script fails, and what is recorded of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cclsearch.cli import main
from cclsearch.core.values import FailureKind
from cclsearch.run.folder import load_run

FRAMEWORK = {
    "title": "a framework whose run script fails as asked",
    "script": "mine.py",
    "runner": "process",
    "knobs": [
        {"name": "tp", "choices": [4]},
        {"name": "dp", "choices": [1]},
        {"name": "pp", "choices": [1]},
        {"name": "micro_batch_size", "choices": [1]},
        {"name": "ending", "choices": ["no_result", "invalid_json", "signal", "exception", "hang"]},
    ],
}
SCRIPT = """
import os, signal, time
ending = os.environ["CCL_ENDING"]
if ending == "invalid_json":
    open(os.path.join(os.environ["CCL_TRIAL_DIR"], "result.json"), "w").write("{not json")
elif ending == "signal":
    os.kill(os.getpid(), signal.SIGSEGV)
elif ending == "exception":
    raise ValueError("the cause")
elif ending == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
MINE = ["run", "--workload", "tiny", "--framework", "mine", "--launcher", "local", "--sampler", "grid", "--name", "r"]


def write_framework(project: Path, endings: list[str]) -> None:
    (project / "launchers").mkdir()
    knobs = [{**knob, "choices": endings} if knob["name"] == "ending" else knob for knob in FRAMEWORK["knobs"]]  # type: ignore
    (project / "launchers" / "mine.framework.yaml").write_text(yaml.safe_dump({**FRAMEWORK, "knobs": knobs}))
    (project / "launchers" / "mine.py").write_text(SCRIPT)


def test_each_failure_of_a_run_script_is_recorded_with_its_kind(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_framework(project, ["no_result", "invalid_json", "signal", "exception", "hang"])
    assert main([*MINE, "--budget", "5", "--timeout-min", "0.2"]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "continue: ccl-search resume r --budget 10" in captured.out
    trials = load_run(project / "runs" / "r").state.trials.values()
    failures = {str(t.config["ending"]): t.outcome.failure for t in trials if t.outcome and t.outcome.failure}
    expected = {
        "no_result": (FailureKind.CRASHED, "exited with 0 but wrote no result.json"),
        "invalid_json": (FailureKind.CRASHED, "result.json is not JSON"),
        "signal": (FailureKind.CRASHED, "killed by SIGSEGV"),
        "exception": (FailureKind.CRASHED, "ValueError: the cause"),
        "hang": (FailureKind.TIMEOUT, "no result after 12 s"),
    }
    assert set(failures) == set(expected)
    for ending, (kind, message) in expected.items():
        assert failures[ending].kind is kind, ending
        assert message in failures[ending].message
