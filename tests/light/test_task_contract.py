"""A task owns its run contract, measurements, admission gate and recordings: training, and a task outside the tree."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import test_admission as training

from cclsearch.card.fields import CardField, FieldKind
from cclsearch.card.load import card_from_mapping
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import Direction
from cclsearch.core.values import Config, Failure, FailureKind, Provenance
from cclsearch.launch.base import Job
from cclsearch.launch.collect import collect_end, collect_result
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, RunStatus, TrialEnd, TrialResult
from cclsearch.launch.instant import ReplayLauncher, SimulateLauncher
from cclsearch.loop.bench import RecordedTable, replay_search
from cclsearch.loop.sweep import describe_sweep
from cclsearch.plan.workload import _require_recorded
from cclsearch.plugins import TASKS
from cclsearch.propose.study.choose import make_sampler
from cclsearch.recording.join import join_recordings
from cclsearch.recording.load import Recording, load_recording
from cclsearch.scoring.admission import GENERAL_RULES
from cclsearch.scoring.catalog import result_metric
from cclsearch.scoring.evaluate import evaluate_evidence
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.objective import choose_objective, load_objective
from cclsearch.scoring.outcome import Outcome, Verdict
from cclsearch.space.table import space_from_rows
from cclsearch.stats.closed_form import UNKNOWN, ClosedForm, Predictor, constant
from cclsearch.stats.kernel import read_features
from cclsearch.stats.simulated import SimulatedCluster, SimulatedSettings
from cclsearch.tasks.base import Task
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult


def check_requests(evidence: Evidence) -> Verdict:
    served = evidence.metrics.get("requests", 0.0)
    return Verdict(rule="requests", ok=served >= 100, detail=f"{served:g} requests were answered, of 100")


class ServeTask(Task):
    """Answers requests at a fixed rate."""

    name = "serve"
    metrics = (
        result_metric("requests_per_s", "requests/s", Direction.MAXIMIZE, "no rate", label="throughput"),
        result_metric("ttft_p99_s", "s", Direction.MINIMIZE, "no latency", label="time to first token"),
    )
    primary = "requests_per_s"
    card_fields = (CardField("prompt_tokens", FieldKind.COUNT, ("workload.data.prompt_tokens",), required=True),)
    needs_model = False
    admission_rules = (*GENERAL_RULES, check_requests)
    work_rules = ("world_size", "requests")


@pytest.mark.parametrize("primary", ["headroom", "requests_per_minute"])
def test_a_primary_metric_that_is_not_always_above_0_is_refused(primary):
    headroom = result_metric("headroom", "fraction", Direction.MAXIMIZE, is_positive=False)
    with pytest.raises(UserError, match=f"task 'idle': the primary metric '{primary}' must be one of its metrics"):
        type("IdleTask", (Task,), {"name": "idle", "metrics": (headroom,), "primary": primary})


MAPPING = {
    "version": 1,
    "workload": {
        "task": "serve",
        "data": {"prompt_tokens": 512},
        "hardware": {"xpu_spec": {"model": "h100", "total_count": 8, "count_per_node": 8, "memory_gb": 80}},
    },
    "Model-executor": {"framework": {"name": "server"}},
}
CONFIG = Config(tp=2, dp=4, max_batch=32)


@pytest.fixture(autouse=True)
def serve(monkeypatch: pytest.MonkeyPatch) -> ServeTask:
    TASKS.names()
    task = ServeTask()
    monkeypatch.setitem(TASKS._entries, "serve", task)
    return task


@pytest.fixture
def card(serve: ServeTask) -> Card:
    return card_from_mapping(MAPPING, "chat")


def report(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).write_text(json.dumps({"status": "ok", "world_size": 8, **fields}), encoding="utf-8")
    return folder


def judge(card: Card, folder: Path, objective: str | None = None, constraints: tuple[str, ...] = ()) -> Outcome:
    task = TASKS.get("serve")
    result = collect_result(folder, task.result)
    assert isinstance(result, TrialResult)
    payload = task.make_input(card, CONFIG, is_measured=True, run_id="r", trial=1)
    evidence = Evidence(payload, result, card, Provenance.MEASURED, None)
    return evaluate_evidence(evidence, task, choose_objective(objective, constraints, task="serve"))


def test_the_config_of_training_has_the_keys_that_run_scripts_of_earlier_versions_read():
    """Written by version 0.2.0 for this card and configuration."""
    before = json.loads(
        '{"schema_version":1,"run_id":"r","trial":3,"config":{"tp":4,"pp":1,"dp":4,"micro_batch_size":2},"arch":'
        '{"num_layers":32,"hidden_size":4096,"num_heads":32,"num_kv_heads":8,"head_dim":128,"intermediate_size":14336,'
        '"vocab_size":128256,"tied_embeddings":false,"gated_mlp":true,"moe":null,"num_params":null},'
        '"global_batch_size":32,"seq_len":1024,"precision":"bf16","gradient_accumulation":4,"num_ranks":16,'
        '"ranks_per_node":4,"warmup_steps":2,"timed_steps":5,"profiled_steps":2,"seed":7}'
    )
    config, task = Config(tp=4, pp=1, dp=4, micro_batch_size=2), TASKS.get("training")
    payload = task.make_input(training.CARD, config, is_measured=True, run_id="r", trial=3, seed=7)
    assert json.loads(payload.model_dump_json()) == {
        **before,
        "accelerator": "a100-40",
        "nonce": "",
        "opens_window": False,
        "places": [],
        "rank_speeds": [],
        "stage_layers": [],
        "stop_above": None,
        "options": [],
    }
    assert TrainingInput.model_validate(before) == payload.model_copy(update={"work": {}, "accelerator": ""})
    assert payload.wants_traces
    assert not task.make_input(training.CARD, config, is_measured=False, run_id="r", trial=3).wants_traces


def test_a_result_of_training_keeps_its_fields(tmp_path):
    fields = set(json.loads(training.RESULT.model_dump_json()))
    assert fields == {
        *("schema_version", "status", "failure", "world_size", "global_batch_size", "seq_len", "num_layers", "extra"),
        *("num_params", "step_times_s", "timed_window_s", "warmup_steps", "peak_memory_bytes", "memory_kind"),
        *("losses", "versions", "precision", "devices", "hosts", "foreign_cpu_cores", "logical_cores", "energy_j"),
        *("metrics", "recorded", "simulated", "caller"),
    }
    folder = report(tmp_path, **json.loads(training.RESULT.model_dump_json(exclude_none=True)))
    assert collect_result(folder, TrainingResult) == training.RESULT


def test_a_task_without_fields_of_its_own_gets_its_work_and_reports_metrics(card, tmp_path):
    payload = TASKS.get("serve").make_input(card, CONFIG, is_measured=True, run_id="r", trial=1, seed=3)
    written = json.loads(payload.model_dump_json())
    assert written["work"] == {"prompt_tokens": 512}
    assert (written["num_ranks"], written["config"]["max_batch"], written["seed"]) == (8, 32, 3)
    assert "global_batch_size" not in written
    assert not payload.wants_traces
    outcome = judge(card, report(tmp_path, metrics={"requests_per_s": 4.0, "requests": 200, "ttft_p99_s": 0.3}))
    assert outcome.is_ranked
    assert outcome.loss == 1 / 4
    assert outcome.metrics["num_accelerators"] == 8
    assert outcome.spread is None


def test_a_field_of_another_task_violates_the_contract_but_not_for_a_launcher(tmp_path):
    folder = report(tmp_path, step_times_s=[1.0])
    failure = collect_result(folder, TrialResult)
    assert isinstance(failure, Failure)
    assert "violates the trial contract: step_times_s" in failure.message
    assert collect_end(folder) == TrialEnd(status=RunStatus.OK)


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({}, "there is none"),
        ({"requests_per_s": 0}, "it is 0"),
        ({"requests_per_s": -2.5}, "it is -2.5"),
        ({"requests_per_s": math.nan}, "it is nan"),
        ({"requests_per_s": math.inf}, "it is inf"),
    ],
)
def test_success_without_a_usable_primary_metric_is_a_failure(card, tmp_path, metrics, found):
    outcome = judge(card, report(tmp_path, metrics=metrics, peak_memory_bytes=[2**30]))
    assert outcome.failure.message == (
        f"the run script reported success, but its requests_per_s must be finite and above 0: {found}"
    )
    assert outcome.metrics == {"peak_memory_gib": 1.0}


def test_a_rule_of_the_task_decides_whether_the_work_was_done(card, tmp_path):
    outcome = judge(card, report(tmp_path, metrics={"requests_per_s": 4.0, "requests": 20}))
    assert outcome.failure.kind is FailureKind.WORK_MISMATCH
    assert outcome.failure.message == "20 requests were answered, of 100"
    assert [verdict.rule for verdict in outcome.admission.verdicts] == [
        *(
            "provenance",
            "world_size",
            "ranks_traced",
            "trace_origin",
            "timed_window",
            "devices",
            "load",
            "unedited",
            "requests",
        )
    ]


def test_a_search_that_names_no_objective_optimizes_the_tasks():
    own = choose_objective(None, (), task="serve")
    assert (own.name, own.metrics, own.terms[0].direction) == ("requests_per_s", ("requests_per_s",), "maximize")
    assert load_objective(own.spec, task="serve") == own
    assert choose_objective(None, (), task="training") == load_objective("step_time")


def test_an_objective_has_only_metrics_of_the_cards_task(tmp_path):
    with pytest.raises(UserError, match=r"no metric 'step_time_s'; .*Task 'serve' has requests_per_s") as error:
        load_objective("step_time", task="serve")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="there is no objective 'ttft_p99_s'"):
        load_objective("ttft_p99_s", task="training")
    assert load_objective("ttft_p99_s").metrics == ("ttft_p99_s",), "no card is known: any task's metric"
    assert load_objective("peak_memory_gib", task="serve").terms[0].unit == "GiB", "every task has it"


@pytest.mark.parametrize(
    ("text", "bounds", "shown"),
    [
        ("ttft_p99_s <= 0.5 s", (None, 0.5), "ttft_p99_s <= 0.5 s"),
        ("ttft_p99_s<=.5s", (None, 0.5), "ttft_p99_s <= 0.5 s"),
        ("  requests_per_s >= 1e2 ", (100.0, None), "requests_per_s >= 100 requests/s"),
        ("memory_headroom_frac >= -0.1", (-0.1, None), "memory_headroom_frac >= -0.1 fraction"),
    ],
)
def test_a_constraint_may_be_text(text, bounds, shown):
    (constraint,) = choose_objective(None, (text,), task="serve").constraints
    assert (constraint.at_least, constraint.at_most) == bounds
    assert str(constraint) == shown


def test_a_constraint_as_text_in_a_file_may_use_parameters(tmp_path):
    path = tmp_path / "slo.yaml"
    path.write_text(
        "version: 1\nparameters: {limit: {default: 2}}\nmetrics: [{name: requests_per_s, direction: maximize}]\n"
        "constraints: [ttft_p99_s <= limit / 4, {metric: peak_memory_gib, at_most: 70}]\n",
        encoding="utf-8",
    )
    objective = choose_objective(f"{path}", ("num_accelerators <= 4",), task="serve")
    assert [str(constraint) for constraint in objective.constraints] == [
        *("ttft_p99_s <= 0.5 s", "peak_memory_gib <= 70 GiB", "num_accelerators <= 4 accelerators")
    ]
    path.write_text(path.read_text().replace("<= limit", "< limit"))
    with pytest.raises(UserError, match=r"slo\.yaml: constraints\[0\]: must be METRIC <= NUMBER or METRIC >= NUMBER"):
        load_objective(str(path), task="serve")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be METRIC <= NUMBER or METRIC >= NUMBER"),
        ("ttft_p99_s = 3", "must be METRIC <= NUMBER"),
        ("ttft_p99_s <=", "must be METRIC <= NUMBER"),
        ("ttft_p99_s <= soon", "there is no parameter 'soon'"),
        ("ttft_p99_s <= 1e999", "has no finite value"),
        ("ttft_p99_s <= 3 GB", "ttft_p99_s is measured in 's', not in 'GB'"),
        ("ttft_p99 <= 3", "there is no metric 'ttft_p99'; did you mean ttft_p99_s"),
        ("ttft_p99_s <= __import__('os')", "only numbers, parameters"),
    ],
)
def test_a_malformed_constraint_is_one_line_that_names_it(text, message):
    with pytest.raises(UserError) as error:
        choose_objective(None, (text,), task="serve")
    assert str(error.value).startswith(f"--constraint {text!r}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bounds_that_contradict_each_other_are_refused():
    low, high = "peak_memory_gib >= 60", "peak_memory_gib <= 20"
    with pytest.raises(UserError, match="contradicts another bound: peak_memory_gib >= 60 and <= 20"):
        choose_objective("step_time", [high, low], task="training")
    assert len(choose_objective("step_time", [high, "mfu >= 0.1"], task="training").constraints) == 2


def test_a_violated_constraint_of_a_task_excludes_a_trial(card, tmp_path):
    slow = report(tmp_path, metrics={"requests_per_s": 4.0, "requests": 200, "ttft_p99_s": 0.75})
    outcome = judge(card, slow, constraints=("ttft_p99_s <= 0.5",))
    assert not outcome.is_ranked
    assert outcome.violation == pytest.approx(0.5)


TABLE = """max_batch,tp,dp,status,requests_per_s,ttft_p99_s,peak_memory_gib,note
8,2,4,ok,4.0,0.2,40,a
8,2,4,ok,5.0,0.3,41,b
16,2,4,ok,9.0,0.6,55,c
32,2,4,oom,,,,d
64,2,4,ok,2.0,1.5,,e
"""


def record(folder: Path, table: str = TABLE) -> Recording:
    folder.mkdir()
    (folder / "card.yaml").write_text(json.dumps(MAPPING), encoding="utf-8")
    (folder / "trials.csv").write_text(table, encoding="utf-8")
    return load_recording(folder)


def test_a_recording_has_the_metrics_of_its_task_and_the_best_by_its_direction(tmp_path):
    recording = record(tmp_path / "chat")
    assert recording.rows[0].metrics == {"requests_per_s": 5.0, "ttft_p99_s": 0.3, "peak_memory_gib": 41.0}
    assert "duplicate rows dropped" in recording.notes[0]
    assert recording.values == (5.0, 9.0, None, 2.0)
    assert (recording.best_row, recording.best_value) == (1, 9.0)
    assert recording.rows[2].metrics == {}
    with pytest.raises(UserError, match="row 2: requests_per_s must be a number above 0 if status is ok; it is '0'"):
        record(tmp_path / "zero", TABLE.replace("ok,4.0", "ok,0"))
    with pytest.raises(UserError, match="needs a column 'requests_per_s'"):
        record(tmp_path / "without", TABLE.replace("requests_per_s", "rate"))


def test_a_replayed_row_is_evaluated_like_a_trial(card, tmp_path):
    recording = record(tmp_path / "chat")
    folder = tmp_path / "runs" / "0001"
    folder.mkdir(parents=True)
    config = recording.rows[1].config
    payload = TASKS.get("serve").make_input(card, config, is_measured=False, run_id="r", trial=1)
    (folder / CONFIG_FILE).write_text(payload.model_dump_json(), encoding="utf-8")
    job = Job(run_id="r", trial=1, attempt=1, trial_dir=folder, payload=payload, timeout_s=9)
    ReplayLauncher(recording).submit([job])
    result = collect_result(folder, TrialResult)
    assert isinstance(result, TrialResult)
    assert result.metrics == {"requests_per_s": 9.0, "ttft_p99_s": 0.6}
    assert result.peak_memory_bytes == (55 * 2**30,)
    assert result.recorded


def test_a_task_without_a_closed_form_cannot_be_simulated_and_one_with_it_can(tmp_path, monkeypatch):
    recording = record(tmp_path / "chat")
    with pytest.raises(UserError, match="'serve' has no closed form of requests_per_s"):
        SimulatedCluster.of(SimulatedSettings(), recording.card, recording.space)
    form = ClosedForm(TASKS.get("serve").primary_metric, ("level",), UNKNOWN, constant)
    predictor = Predictor(read_features(recording.space), {"requests_per_s": form})
    monkeypatch.setattr(TASKS.get("serve"), "predictor", lambda card, space: predictor, raising=False)
    space = space_from_rows(recording.space.knobs, [row.config for row in recording.rows])
    launcher = SimulateLauncher(SimulatedSettings(crashes=0, infrastructure_failures=0, seed=4))
    launcher.use_workload(recording.card, space)
    (tmp_path / "0001").mkdir()
    payload = TASKS.get("serve").make_input(recording.card, space.config(0), is_measured=False, run_id="r", trial=1)
    launcher.submit([Job(run_id="r", trial=1, attempt=1, trial_dir=tmp_path / "0001", payload=payload, timeout_s=9)])
    result = collect_result(tmp_path / "0001", TrialResult)
    assert isinstance(result, TrialResult)
    assert result.simulated
    assert list(result.metrics) == ["requests_per_s"]
    assert result.metrics["requests_per_s"] > 0


def test_an_objective_that_a_recording_cannot_have_is_refused_with_what_there_is(tmp_path):
    recording = record(tmp_path / "chat")
    _require_recorded(choose_objective(None, ("peak_memory_gib <= 50", "ttft_p99_s <= 1"), task="serve"), recording)
    without = record(tmp_path / "less", TABLE.replace("ttft_p99_s", "ignored"))
    with pytest.raises(UserError, match="needs ttft_p99_s, but the recording 'less' has no ttft_p99_s") as error:
        _require_recorded(choose_objective(None, ("ttft_p99_s <= 1",), task="serve"), without)
    assert "it has requests_per_s, num_accelerators, peak_memory_gib, memory_headroom_frac" in str(error.value)


def test_recordings_of_a_task_join_with_all_their_metrics(tmp_path):
    first, second = record(tmp_path / "a"), record(tmp_path / "b", TABLE.replace(",2,4,", ",1,4,"))
    joined = load_recording(join_recordings([first, second], tmp_path / "joined"))
    assert len(joined.rows) == 8
    assert joined.rows[1].metrics == first.rows[1].metrics
    assert joined.best_value == 9.0


def test_a_benchmark_compares_losses_whichever_direction_is_better(tmp_path):
    recording = record(tmp_path / "chat")
    search = replay_search(recording, make_sampler("random"), seed=0, budget=4)
    assert search.best_over_optimum[-1] == 1.0
    assert max(search.best_over_optimum) <= 9.0 / 2.0
    assert RecordedTable(recording).best_over_optimum((), 2) == (4.5, 4.5), "the worst row's until one succeeds"


def test_a_sweep_that_names_no_objective_is_over_the_primary_metric_and_the_size():
    sweep, objective = describe_sweep(None, task="serve")
    assert objective.metrics == ("requests_per_s", "num_accelerators")
    assert [term.direction for term in objective.terms] == ["maximize", "minimize"]
    assert (sweep.objective, sweep.weights) == ("pareto", ())
