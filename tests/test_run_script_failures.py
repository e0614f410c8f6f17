"""How a run script fails, and what is recorded of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cclsearch.cli import main
from cclsearch.core.values import FailureKind
from cclsearch.run.folder import load_run

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
