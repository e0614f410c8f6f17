"""`--log-to`: what the real trackers have of a search, and that nothing that becomes of them changes it."""

from __future__ import annotations

import importlib.util
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from cclsearch.cli import main
from cclsearch.core.offline import OFFLINE_NAME
from cclsearch.plugins import TRACKERS
from cclsearch.record.event import TrialRevised
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import Run, load_run
from cclsearch.tracking.base import TrackedSearch, TrackedTrial, Tracker, TrackingView, describe_trial, open_targets

LANDSCAPE = ROOT / "benchmarks" / "landscapes" / "nanotron-8b-4n"
BUDGET = 4
SECRET = "sk-ant-api03-" + "q7Rz9KvLm2Xw4Tn8" * 3


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT", OFFLINE_NAME):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "ccl-search.yaml").write_text("{}\n")
    return tmp_path


def search(*more: str, name: str = "r", command: str = "run") -> Run:
    given = ["--recording", str(LANDSCAPE), "--name", name, "--seed", "1"] if command == "run" else [name]
    assert main([command, *given, "--budget", str(BUDGET), "--quiet", *more]) == 0
    return load_run(Path("runs") / name)


def configs(run: Run) -> list[dict[str, Any]]:
    return [dict(trial.config) for trial in run.state.trials.values()]


def read_mlflow(folder: str = "mlruns") -> tuple[Any, dict[int, Any], Any]:
    """The search's run, the trials' runs by number, and the client."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=Path(folder).absolute().as_uri())
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments)
    parents = [run for run in runs if "ccl_search.trial" not in run.data.tags]
    children = {int(run.data.tags["ccl_search.trial"]): run for run in runs if run not in parents}
    assert len(parents) == 1
    assert len(children) == len(runs) - 1
    return parents[0], children, client


def test_mlflow_has_a_run_with_a_child_per_trial_and_the_curve_of_the_best():
    run = search("--log-to", "mlflow")
    parent, children, client = read_mlflow()
    assert parent.info.run_name == "r"
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["provenance"] == "recorded"
    for number, trial in run.state.trials.items():
        child = children[number]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.data.params == {name: str(value) for name, value in trial.config.items()}
        for name, value in trial.outcome.metrics.items():
            assert child.data.metrics[name] == pytest.approx(value)
        assert child.data.tags["state"] in ("admitted", "failed", "refused")
    curve = client.get_metric_history(parent.info.run_id, "best_step_time_s")
    values = [point.value for point in sorted(curve, key=lambda point: point.step)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == run.state.best.outcome.metrics["step_time_s"]


def test_a_resumed_search_continues_its_run_and_a_lost_note_writes_nothing_twice():
    search("--log-to", "mlflow:there")
    Path("runs/r/tracking.jsonl").unlink()
    assert main(["resume", "r", "--budget", str(BUDGET + 2), "--quiet"]) == 0  # the run knows its trackers
    parent, children, _client = read_mlflow("there")
    run = load_run(Path("runs/r"))
    assert sorted(children) == sorted(run.state.trials)
    assert len(children) == BUDGET + 2
    assert {parent.info.status, *(child.info.status for child in children.values())} <= {"FINISHED", "FAILED"}


def test_tensorboard_has_curves_and_a_row_of_hyperparameters_per_trial():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    run = search("--log-to", "tensorboard:tb")
    events = EventAccumulator("tb/r")
    events.Reload()
    measured = {t.number: t.outcome.metrics["step_time_s"] for t in run.state.trials.values() if t.outcome and t.loss}
    points = {event.step: event.value for event in events.Scalars("trials/step_time_s")}
    assert points == pytest.approx(measured, rel=1e-6)
    assert events.Scalars("best/step_time_s")[-1].value == pytest.approx(min(measured.values()), rel=1e-6)
    for number, trial in run.state.trials.items():
        of_trial = EventAccumulator(f"tb/r/trial-{number:04d}")
        of_trial.Reload()
        content = of_trial.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        data = plugin_data_pb2.HParamsPluginData.FromString(content)
        shown = dict(data.session_start_info.hparams)
        assert shown["tp"].number_value == trial.config["tp"]
        assert shown["state"].string_value == "admitted"


def records_of(path: Path) -> Iterator[Any]:
    """The records of a file of W&B: LevelDB's log format with a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def test_wandb_has_a_group_with_a_run_per_trial_and_sends_nothing():
    run = search("--log-to", "wandb:tuning")
    found: dict[str, Any] = {}
    for path in Path("wandb").glob("offline-run-*/*.wandb"):
        records = list(records_of(path))
        about = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        found[about.display_name] = (about, records)
    assert set(found) == {"r", *(f"r, trial {number}" for number in run.state.trials)}
    for number, trial in run.state.trials.items():
        about, records = found[f"r, trial {number}"]
        assert (about.project, about.run_group, about.job_type) == ("tuning", "r", "trial")
        config = {item.key: item.value_json for item in about.config.update}
        assert config["tp"] == str(trial.config["tp"])
        logged = {
            item.key or "/".join(item.nested_key): item.value_json
            for record in records
            if record.WhichOneof("record_type") == "history"
            for item in record.history.item
        }
        assert float(logged["step_time_s"]) == pytest.approx(trial.outcome.metrics["step_time_s"])
        assert about.host == ""
        assert about.git.remote_url == ""


def test_export_writes_a_finished_run(capsys):
    search()
    assert not Path("mlruns").exists()
    assert main(["export", "r", "--log-to", "mlflow", "--log-to", "tensorboard"]) == 0
    assert f"{BUDGET} of {BUDGET} trials admitted to mlflow" in capsys.readouterr().out
    assert len(read_mlflow()[1]) == BUDGET
    assert Path(f"tensorboard/r/trial-{BUDGET:04d}").is_dir()


@pytest.mark.parametrize("where", ["settings", "nightly"])
def test_trackers_of_the_settings_follow_every_search(where):
    Path("ccl-search.yaml").write_text("log_to: [tensorboard]\n")
    if where == "settings":
        search()
        assert Path("tensorboard/r").is_dir()
        return
    job = f"- {{name: j, workload: {LANDSCAPE}/card.yaml, recording: {LANDSCAPE}, budget: {{trials: 2}}}}\n"
    Path("nightly.yaml").write_text(f"name: n\nbudget: {{trials: 4}}\njobs:\n{job}")
    assert main(["nightly", "nightly.yaml", "--once", "--quiet"]) in (0, 1)
    assert len(list(Path("tensorboard").iterdir())) == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mlfow", "there is no tracker 'mlfow' (did you mean 'mlflow'?)"),
        ("mlflow:http://me:pw@127.0.0.1:1", "the URL has a user name: set MLFLOW_TRACKING_USERNAME"),
        ("mlflow:ftp://127.0.0.1", "cannot be a place of MLflow"),
        ("mlflow:ccl-search.yaml", "is not a folder"),
        ("tensorboard:ccl-search.yaml", "is not a folder"),
        ("wandb:a/b", "cannot name a project"),
        ("mlflow:https://mlflow.example.org", "--offline refuses the MLflow server"),
    ],
)
def test_a_target_that_cannot_work_stops_the_search_before_it_starts(target, said, cli, monkeypatch):
    more = ["--offline"] if "example.org" in target else []
    monkeypatch.setenv(OFFLINE_NAME, "")  # the option sets it
    given = ["run", "--recording", str(LANDSCAPE), "--budget", "2", "--log-to", target]
    error = cli.err([*given, *more])
    assert said in error
    assert error.count("\n") == 1
    assert "pw" not in error.replace("PASSWORD", "")
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize(
    ("module", "extra"), [("mlflow", "mlflow"), ("tensorboardX", "tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named_with_its_extra(module, extra, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == module else find(name, *more))
    assert main(["run", "--recording", str(LANDSCAPE), "--budget", "2", "--log-to", extra]) == 2
    assert f"pip install 'ccl-search[{extra}]'" in capsys.readouterr().err


class OddTracker(Tracker):
    """Fails or waits where the test says."""

    fails_at = waits_at = ""
    seen: list[Any] = []
    go_on = threading.Event()

    @classmethod
    def from_place(cls, place: str) -> OddTracker:
        return cls()

    def _do(self, what: str) -> None:
        if what == self.waits_at:
            self.go_on.wait(60)
        if what == self.fails_at:
            raise RuntimeError(f"cannot {what} with {SECRET}")

    def begin(self, search: TrackedSearch) -> bool:
        self._do("begin")
        return False

    def log_trial(self, trial: TrackedTrial) -> None:
        self._do("log_trial")
        self.seen.append(trial)

    def end(self, *, is_finished: bool, summary: str) -> None:
        self._do("end")


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> type[OddTracker]:
    monkeypatch.setitem(TRACKERS._entries, "odd", OddTracker)
    for name, value in {"fails_at": "", "waits_at": "", "seen": [], "go_on": threading.Event()}.items():
        monkeypatch.setattr(OddTracker, name, value)
    return OddTracker


@pytest.mark.parametrize("step", ["begin", "log_trial", "end"])
def test_a_broken_tracker_gets_one_line_and_changes_no_trial(step, odd, capsys, monkeypatch):
    alone = search(name="alone")
    monkeypatch.setattr(odd, "fails_at", step)
    capsys.readouterr()
    with_it = search("--log-to", "odd", "--log-to", "tensorboard")
    error = capsys.readouterr().err
    assert configs(with_it) == configs(alone)
    assert error.count("--log-to odd writes no more") == 1
    assert SECRET not in error
    assert Path(f"tensorboard/r/trial-{BUDGET:04d}").is_dir()  # another tracker goes on


def test_a_tracker_that_hangs_does_not_hold_the_search(odd, capsys, monkeypatch):
    monkeypatch.setattr(odd, "waits_at", "log_trial")
    monkeypatch.setattr(TrackingView.close, "__kwdefaults__", {"wait_s": 0.2})
    run = search("--log-to", "odd")
    assert len(run.state.trials) == BUDGET
    assert "later: ccl-search export r --log-to odd" in capsys.readouterr().err
    odd.go_on.set()


def test_a_changed_verdict_is_written_again(odd):
    search()
    folder = Path("runs/r")
    with RunWriter(folder) as writer:
        view = TrackingView(folder, load_run(folder).spec, open_targets(["odd"]), lambda text: None)
        view.open(writer.state)
        with writer.watching(view.watch):
            outcome = writer.state.trials[2].outcome
            changed = outcome.model_copy(update={"loss": None})
            writer.record(TrialRevised(time_s=1.0, trial=2, outcome=changed, text="judged again"))
        view.close(writer.state)
    numbers = [trial.number for trial in odd.seen]
    assert numbers == [*range(1, BUDGET + 1), 2]
    assert odd.seen[1].value is not None
    assert odd.seen[-1].value is None


def test_no_secret_reaches_a_tracker(odd):
    run = search()
    trial = run.state.trials[1]
    leaky = replace(trial, rationale=f"key {SECRET}", config=type(trial.config)({**trial.config, "env": SECRET}))
    shown = describe_trial(run.spec, leaky, None)
    assert SECRET not in str(shown)
    assert shown.tags["rationale"].startswith("key ")
