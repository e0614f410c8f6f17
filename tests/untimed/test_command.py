"""`run --command`: a program of the user's own is searched, here or with a card; what cannot start says so first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cclsearch.core.processes import find_processes_by_variable
from cclsearch.run.folder import load_run
from cclsearch.space.parse import fill_command

TRAIN = """\
import json, os, subprocess, sys, time
tp, batch = int(sys.argv[1]), int(sys.argv[2])
if batch * tp >= 16:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
if os.path.exists("slow"):
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    time.sleep(300)
for step in range(6):
    print(f"{step} step time: {0.5 / tp + 0.3 / batch + (step < 2):.3f} s", flush=True)
json.dump({"runs": [{"rate": 100.0 * tp * batch}]}, open(os.environ["CCL_TRIAL_DIR"] + "/out.json", "w"))
"""
COMMAND = ["--command", f"{sys.executable} train.py {{tp}} {{mbs}}", "--knob", "tp=1,2", "--knob", "mbs=1,4,8"]
READ = ["--read", "step_time_s=step time: ([0-9.]+)"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    monkeypatch.setenv("MY_API_KEY", "not-for-jobs")

    def start(*words: str, wait: bool = True):
        full = [sys.executable, "-m", "cclsearch", *words, "--runs", str(tmp_path / "runs")]
        if not wait:
            return subprocess.Popen(full, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.run(full, cwd=tmp_path, capture_output=True, text=True)

    return start


def test_a_command_is_searched_and_its_failures_and_figures_are_read(run, tmp_path):
    done = run("run", *COMMAND, *READ, "--read", "rate=json:out.json#runs.0.rate", "--budget", "6", "--name", "a")
    assert done.returncode == 0, done.stderr
    state = load_run(tmp_path / "runs" / "a").state
    found = {tuple(trial.config.values()): trial.outcome for trial in state.trials.values()}
    assert found[2, 8].failure.kind.value == "out_of_memory"
    assert found[2, 4].metrics["step_time_s"] == pytest.approx(0.325)  # the first steps are warm-up
    assert found[2, 4].metrics["rate"] == 800.0
    assert state.best.config == {"tp": 2, "micro_batch_size": 4}
    assert "the work was not checked" in done.stdout
    assert f"/bin/sh -c '{sys.executable} train.py 2 4'" in run("best", "a").stdout


def test_the_greatest_figure_wins_and_a_template_is_filled_in(run, tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "a.yaml").write_text("batch: {mbs}\nother: ${model.width} {unknown}\n", encoding="utf-8")
    (tmp_path / "conf" / "b").write_bytes(b"\xff\r\n")
    words = ["--command", "cat {template}/a.yaml; env; cmp {template}/b c*/b", "--template", "conf", "--knob=mbs=1,2,4"]
    done = run("run", *words, "--read", "batch=batch: ([0-9]+)", "--maximize", "--budget", "3", "--name", "a")
    run_ = load_run(tmp_path / "runs" / "a")
    assert (done.returncode, run_.state.best.config) == (0, {"micro_batch_size": 4}), done.stderr
    printed = (tmp_path / "runs" / "a" / "trials" / "0001" / "stdout.log").read_text(encoding="utf-8")
    assert "other: ${model.width} {unknown}" in printed, "only knobs are filled in"
    assert "not-for-jobs" not in printed


def test_a_value_is_one_word_also_where_the_command_has_it_in_quotes():
    value = "a; 'b $HOME"
    line = fill_command("""printf '<%s>' {x} "{x}" '{x}' "$(echo {x})" \\'{x}""", {"x": value}, "")
    assert subprocess.run(["sh", "-c", line], capture_output=True, text=True).stdout == f"<{value}>" * 4 + f"<'{value}>"


def test_with_a_card_its_rules_take_part(run, tmp_path):
    words = ["--command", "echo step time: 1.{mbs}{dp}{tp}", "--knob", "tp=1,2,3", "--set", "total_count=2"]
    fixed = [word for knob in ("pp", "zero_stage=0", "activation_checkpointing=none") for word in ("--knob", knob)]
    fixed[1] = "pp=1"
    done = run("run", "-w", "tiny", *words, *fixed, *READ, "--budget", "2", "--name", "a")
    assert done.returncode == 0, done.stderr
    loaded = load_run(tmp_path / "runs" / "a")
    assert {trial.config["tp"] * trial.config["dp"] for trial in loaded.state.trials.values()} == {2}
    assert "tokens_per_s" in loaded.state.trials[1].outcome.metrics


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_search_that_ends_in_a_trial_leaves_no_process_and_continues(run, tmp_path, number):
    (tmp_path / "slow").touch()
    search, folder = run("run", *COMMAND, *READ, "--budget", "2", "--name", "a", wait=False), tmp_path / "runs" / "a"

    def processes() -> dict[int, dict[str, str]]:
        return find_processes_by_variable("CCL_TRIAL_DIR", str(folder))

    deadline = time.monotonic() + 60
    while len(processes()) < 3 and time.monotonic() < deadline:  # shell, Python, and the process of its own session
        time.sleep(0.1)
    search.send_signal(number)
    search.communicate(timeout=30)
    (tmp_path / "slow").unlink()
    assert (number is signal.SIGKILL) or not processes()
    done = run("resume", "a")
    assert done.returncode == 0, done.stderr
    assert not processes()
    assert load_run(folder).state.num_spent == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--command", "echo {x}"], "give what to vary"),
        (["--command", "echo {y}", "--knob", "x=1,2"], "write {x} into the command"),
        (["--command", "echo {x} {y}", "--knob", "x=1,2"], "{y} is not a knob"),
        (["--command", "echo {x} {template}", "--knob", "x=1,2"], "give --template FILE"),
        (["--command", "echo {x}", "--knob", "x=1,2", "--template", "none"], "there is no such file"),
        (["--command", "echo {x}", "--knob", "x=1,2", "--read", "a"], "--read is written"),
        (["--command", "echo {x}", "--knob", "x=1,2", "--read", "a=(["], "is not a regular expression"),
        (["--command", "echo {x}", "--knob", "x=1,2", "--read", "a=1"], "must have one group"),
        (["--command", "echo {x}", "--knob", "x=1,2", "-l", "local"], "exclude each other"),
        (["--command", " ", "--knob", "x=1,2"], "it is empty"),
        (["--command", "echo {x}", "--knob", "x=1,2", "--template", "."], "name one inside it"),
        (["-w", "tiny", "--read", "a=(1)"], "belongs to --command"),
    ],
)
def test_what_cannot_start_is_one_line_before_a_run_exists(run, tmp_path, words, says):
    done = run("run", *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("command", "read", "says"),
    [
        ("echo {x}", "a=b: ([0-9]+)", "nothing that it printed matches"),
        ("echo b: no{x}", "a=b: (.*)", "must be a number"),
        ("echo {x}; cat old.json", "a=json:old.json#a", "is older than the trial"),
        ("echo {x}", "a=json:none.json#a", "No such file"),
        ("echo [{x}] > $CCL_TRIAL_DIR/o.json", "a=json:o.json#0.b", "--read a"),
        ("echo {x}; echo '[true]' > $CCL_TRIAL_DIR/o.json", "a=json:o.json#0", "must be a number"),
        ("echo {x}; printf '[%0200000d' | tr 0 [ > $CCL_TRIAL_DIR/o.json", "a=json:o.json#0", "recursion"),
        ("echo {x}; exit 3", "a=(1)", "code 3"),
    ],
)
def test_a_figure_that_cannot_be_read_is_a_failed_trial_that_says_so(run, tmp_path, command, read, says):
    (tmp_path / "old.json").write_text(json.dumps({"a": 1}), encoding="utf-8")
    os.utime(tmp_path / "old.json", (1, 1))
    run("run", "--command", command, "--knob", "x=1,2", "--read", read, "--budget", "1", "--name", "a")
    (trial,) = load_run(Path(tmp_path / "runs" / "a")).state.trials.values()
    assert says in trial.outcome.failure.message
