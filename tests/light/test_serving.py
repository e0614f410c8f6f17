"""Serving and inference: what a card asks for, metrics from the request log, limits, and what is not admitted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cclsearch.card.load import card_from_mapping
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config, Provenance
from cclsearch.launch.contract import RunStatus
from cclsearch.plugins import TASKS
from cclsearch.scoring.admission import admit
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.objective import choose_objective
from cclsearch.tasks.serving.contract import MeasuredLoad, RequestRecord, ServingResult
from cclsearch.tasks.serving.measurements import choose_load, measure_load
from cclsearch.tasks.serving.workload import draw_requests, read_limits, read_load_choice

ARCH = {
    "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 64,
    "vocab_size": 100, "tied_embeddings": False,
}  # fmt: skip


def make_card(task: str = "serving", limits: dict[str, float] | None = None, **data: Any) -> Card:
    hardware = {"xpu_spec": {"type": "CPU", "model": "cpu", "memory_gb": 4, "total_count": 1, "count_per_node": 1}}
    model = {"phase": "inference", "model_family": "tiny", "precision": "fp32", "model_arch": ARCH}
    lengths = {"input_len": 10, "output_len": 3, **({"concurrency": 2} if task == "serving" else {"batch_size": 2})}
    targets = data.pop("targets", None)
    workload = {"task": task, "model": model, "data": lengths | data, "hardware": hardware}
    workload |= {"limits": limits, "targets": targets}
    return card_from_mapping({"workload": workload, "Model-executor": {"framework": {"name": "cpu-serving"}}}, "c")


def freeze(card: Card, *constraints: str, objective: str | None = None) -> Card:
    task = TASKS.get(card.task)
    frozen: Card = task.freeze(card, task.constrain(card, choose_objective(objective, constraints, task=card.task)))
    return frozen


def record(number: int, sent_s: float, *tokens_s: float, **other: Any) -> dict[str, Any]:
    fields = {"number": number, "arrival_s": sent_s, "sent_s": sent_s, "token_times_s": tokens_s, "input_tokens": 10}
    return {**fields, "end_s": tokens_s[-1], "output_tokens": len(tokens_s), **other}


ANSWERED = [
    record(0, 0.0, 0.01, 0.02, 0.03, is_warm_up=True),
    record(0, 0.0, 0.1, 0.2, 0.4),
    record(1, 0.0, 0.2, 0.3, 0.4),
    record(2, 0.4, 0.6, 0.7, 0.8),
    record(3, 0.4, 0.5, 0.9, 1.0),
]
"""Four requests of three tokens, two at once, after a warm-up."""


def evidence_of(card: Card, folder: Path, records: list[dict[str, Any]], **result: Any) -> Evidence:
    task = TASKS.get(card.task)
    text = "".join(json.dumps(each) + "\n" for each in records)
    (folder / "evidence.jsonl").write_text(text)
    payload = task.make_input(card, Config(), is_measured=True, run_id="r", trial=1)
    fields = {
        "status": "ok", "world_size": 1, "num_params": 24992, "precision": "fp32",
        "loads": [{"concurrency": 2, "window_s": 1.0}], "request_log_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }  # fmt: skip
    read = task.read_files(folder, ServingResult.model_validate(fields | result))
    return Evidence(payload, read, card, Provenance.MEASURED, None)


def find_violated(evidence: Evidence) -> dict[str, str]:
    admission = admit(evidence, TASKS.get(evidence.card.task).admission_rules)
    return {verdict.rule: verdict.detail for verdict in admission.verdicts if verdict.ok is False}


def test_metrics_are_computed_from_the_request_log(tmp_path):
    card = make_card(num_requests=4, targets={"ttft_s": 0.15, "itl_s": 0.3})
    evidence = evidence_of(card, tmp_path, ANSWERED, metrics={"ttft_mean_s": 0.001})
    metrics, _ = TASKS.get("serving").measure(evidence)
    assert metrics["output_tokens_per_s_per_accelerator"] == pytest.approx(12.0)
    assert metrics["total_tokens_per_s"] == pytest.approx(52.0)
    assert (metrics["ttft_mean_s"], metrics["ttft_p50_s"]) == pytest.approx((0.15, 0.15))
    assert metrics["ttft_p90_s"] == pytest.approx(0.2)
    assert metrics["tpot_mean_s"] == pytest.approx((0.15 + 0.1 + 0.1 + 0.25) / 4)
    assert metrics["itl_p50_s"] == pytest.approx(0.1)
    assert metrics["e2e_mean_s"] == pytest.approx(0.45)
    assert metrics["goodput_requests_per_s"] == pytest.approx(1.0), "one of two that begin in time has no gap of 0.4 s"
    assert metrics["concurrency"] == 2


def test_the_script_states_no_latency_of_its_own_if_no_request_has_it(tmp_path):
    stated = {"concurrency": 2, "metrics": {"ttft_p99_s": 0.001, "preemptions": 3.0}}
    evidence = evidence_of(make_card(num_requests=4), tmp_path, ANSWERED, loads=[stated])
    metrics, _ = TASKS.get("serving").measure(evidence)
    assert metrics["ttft_p99_s"] > 0.1
    assert metrics["preemptions"] == 3


def test_limits_of_card_and_objective_are_one_thing():
    card = make_card(limits={"ttft_p99_s": 0.5, "tpot_mean_s": 0.02})
    objective = TASKS.get("serving").constrain(card, choose_objective(None, ["ttft_p99_s <= 0.2"], task="serving"))
    assert [str(c) for c in objective.constraints] == ["ttft_p99_s <= 0.2 s", "tpot_mean_s <= 0.02 s"]
    frozen = TASKS.get("serving").freeze(card, objective)
    assert read_limits(frozen.work) == {"ttft_p99_s": (None, 0.2), "tpot_mean_s": (None, 0.02)}


def test_the_trial_has_the_metrics_of_the_best_load_that_keeps_the_limits():
    name = "output_tokens_per_s_per_accelerator"
    loads = [{name: 10.0, "tpot_mean_s": 0.01}, {name: 20.0, "tpot_mean_s": 0.02}, {name: 30.0, "tpot_mean_s": 0.04}]
    assert choose_load(loads, {"tpot_mean_s": (None, 0.03)}) == 1
    assert choose_load(loads, {"tpot_mean_s": (None, 0.005)}) == 0, "the least violation"
    assert choose_load(loads, {}) == 2
    good = [{**load, "goodput_requests_per_s": rate} for load, rate in zip(loads, (3.0, 4.0, 1.0), strict=True)]
    frozen = freeze(make_card(), objective="goodput").work
    assert choose_load(good, {}, read_load_choice(frozen)) == 1, "the most goodput, not the most throughput"
    assert choose_load(good, {}, read_load_choice(freeze(make_card(), objective="ttft_p99_s").work)) == 2
    recorded = TASKS.get("serving").make_result(
        make_card(), {}, status=RunStatus.OK, recorded=True,
        loads=tuple(MeasuredLoad(concurrency=n + 1, metrics=load) for n, load in enumerate(loads)),
    )  # fmt: skip
    card = freeze(make_card(), "tpot_mean_s <= 0.03")
    payload = TASKS.get("serving").make_input(card, Config(), is_measured=False, run_id="r", trial=1)
    metrics, _ = TASKS.get("serving").measure(Evidence(payload, recorded, card, Provenance.RECORDED, None))
    assert (metrics[name], metrics["concurrency"]) == (20.0, 2.0)


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        ({"output_tokens": 2, "token_times_s": [0.5, 0.9]}, "requests", "has 2 tokens; 3 were asked"),
        ({"input_tokens": 5}, "requests", "the prompt of request 3 has 5 tokens; 10 were asked"),
        ({"error": "HTTP 500", "token_times_s": [], "output_tokens": 0}, "requests", "1 of 4 requests failed"),
        ({"number": 2}, "requests", "each of the 4 must be once"),
        ({"is_warm_up": True}, "requests", "3 requests were logged"),
        ({"sent_s": 0.35, "arrival_s": 0.35}, "asked_load", "at most 3 requests ran at once; 2 were asked"),
        ({"end_s": 3.0}, "window", "took 1 s by the other clock, but 3 s in the log"),
    ],
)
def test_a_trial_that_did_other_work_is_not_admitted(change, rule, words, tmp_path):
    card = make_card(num_requests=4, warmup_requests=1)
    assert find_violated(evidence_of(card, tmp_path, ANSWERED)) == {}
    wrong = evidence_of(card, tmp_path, [*ANSWERED[:-1], {**ANSWERED[-1], **change}])
    assert words in find_violated(wrong)[rule]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({**ANSWERED[1], "end_s": 0.1}, "line 1: its times do not ascend"),
        ({**ANSWERED[1], "sent_s": -1}, "line 1: sent_s"),
        ({**ANSWERED[1], "arrival_s": 0.05}, "line 1: it was sent before it arrived"),
        ({**ANSWERED[1], "end_s": float("nan")}, "line 1: end_s"),
        ({**ANSWERED[1], "load": 7}, "line 1: load 7 of 1"),
        ({**ANSWERED[1], "output_tokens": 9}, "the times of 3 of 9 tokens"),
    ],
)
def test_a_log_that_cannot_be_true_is_a_failure(line, words, tmp_path):
    failure = TASKS.get("serving").find_failure(evidence_of(make_card(), tmp_path, [line]).result)
    assert words in failure.message


def test_a_log_that_was_edited_or_is_missing_is_a_failure(tmp_path):
    task = TASKS.get("serving")
    evidence = evidence_of(make_card(), tmp_path, ANSWERED)
    (tmp_path / "evidence.jsonl").write_text("")
    assert "does not have the SHA-256" in task.find_failure(task.read_files(tmp_path, evidence.result)).message
    (tmp_path / "evidence.jsonl").unlink()
    assert "wrote no request log" in task.find_failure(task.read_files(tmp_path, evidence.result)).message


def test_requests_follow_from_card_and_seed():
    card = make_card(request_rate=50, concurrency=None, num_requests=2000, lengths="lognormal", input_len=200)
    drawn = draw_requests(card, 0)
    assert drawn == draw_requests(card, 0) != draw_requests(card, 1)
    assert drawn[-1].arrival_s == pytest.approx(40, rel=0.1)
    assert sum(each.input_tokens for each in drawn) / 2000 == pytest.approx(200, rel=0.1)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319569,396,109\n"
)
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,x
45,GPT-4,1087,0,1087,x
118,GPT-4,417,276,693,x
"""


MOONCAKE = """{"timestamp": 100, "input_length": 374, "output_length": 44, "hash_ids": [46, 47]}
{"timestamp": 3100, "input_length": 7322, "output_length": 490, "hash_ids": [46]}
"""
SHAREGPT = json.dumps([
    {"conversations": [{"from": "human", "value": "x" * 1496}, {"from": "gpt", "value": "y" * 173}]},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
])  # fmt: skip
VLLM = '{"prompt": "%s", "output_tokens": 44}\n{"prompt": "a", "output_tokens": 1}\n' % ("x" * 1496)
OPENAI = '{"messages": [{"role": "user", "content": "%s"}], "max_tokens": 44}\n' % ("x" * 1496) * 2


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [(AZURE, [0, 0.051996]), (BURST, [0, 113]), (MOONCAKE, [0, 3]), (SHAREGPT, None), (VLLM, None), (OPENAI, None)],
)
def test_traces_and_data_sets_are_loads(text, arrivals, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    more = {} if arrivals else {"arrival": "constant", "request_rate": 1, "num_requests": 3}
    card = freeze(make_card(request_trace=str(tmp_path / "t.csv"), concurrency=None, **more))
    drawn = draw_requests(card, 0)
    assert [each.arrival_s for each in drawn] == pytest.approx(arrivals or [0, 1, 2], abs=1e-5)
    assert drawn[0].input_tokens in (374, 472)
    assert drawn[0].output_tokens in (44, 18)
    (tmp_path / "t.csv").write_text(text + "\n")
    with pytest.raises(UserError, match="has changed since the search began"):
        draw_requests(card, 0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("Timestamp,Request tokens\n1,2\n", "row 1: the columns are .*; known formats: Azure, BurstGPT, Mooncake"),
        ("Timestamp,Request tokens,Response tokens\n5,1,1\n4,1,1\n", "row 3 .BurstGPT.: Timestamp must not be before"),
        ("Timestamp,Request tokens,Response tokens\n-5,1,1\n", "row 2 .BurstGPT.: Timestamp: must be a time from 0 on"),
        (
            "Timestamp,Request tokens,Response tokens\nnan,1,1\n",
            "row 2 .BurstGPT.: Timestamp: must be a number or a date",
        ),
        (
            "Timestamp,Request tokens,Response tokens\n5,nan,1\n",
            "row 2 .BurstGPT.: Request tokens: must be a whole number",
        ),
        (
            "Timestamp,Request tokens,Response tokens\n5,1\n",
            "row 2 .BurstGPT.: Response tokens: must be a whole number",
        ),
        (
            "Timestamp,Request tokens,Response tokens\n5,1,-1\n",
            "row 2 .BurstGPT.: Response tokens: must be a whole number",
        ),
        ("Timestamp,Request tokens,Response tokens\n5,1,1\n", "at least two requests"),
        ('{"prompt": "a"}\n', r"line 1 \(prompt\) has no arrival times: give --set arrival=poisson"),
        ('{"timestamp": 0\n', "line 1: is not JSON"),
        ('[{"conversations": [\n', "must be a CSV table or JSON"),  # a list that is cut off
        ('[{"a": 1}]', "item 1: has the fields 'a'; known formats"),
    ],
)
def test_a_request_trace_that_is_wrong_is_refused_in_one_line(rows, words, tmp_path):
    (tmp_path / "t.csv").write_text(rows)
    with pytest.raises(UserError, match=words):
        freeze(make_card(request_trace=str(tmp_path / "t.csv"), concurrency=None))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"concurrency": None}, "a closed loop has a concurrency, or a max_concurrency"),
        ({"arrival": "sometimes"}, "arrival must be one of closed, constant"),
        ({"arrival": "poisson"}, "need a rate"),
        ({"request_rate": 3}, "say which counts with --set arrival=closed"),
        ({"lengths": "long"}, "lengths must be one of"),
        ({"output_len": None}, "workload.data has no output_len: give --set output_len=N"),
        ({"shared_prefix_tokens": 10}, "must be fewer than input_len"),
    ],
)
def test_a_load_that_is_not_described_is_refused(data, words):
    with pytest.raises(UserError, match=words):
        freeze(make_card(**data))


def test_an_unknown_limit_is_refused():
    with pytest.raises(
        UserError, match=r"workload.limits.ttft_p99 is not a limit; did you mean|ttft_p99 is not a limit"
    ):
        freeze(make_card(limits={"ttft_p99": 0.5}))


def test_a_batch_is_measured_several_times(tmp_path):
    card = make_card("inference")
    records = [record(0, 0.0, 0.1, 0.2, 0.3, is_warm_up=True), record(1, 0.0, 0.1, 0.2, 0.3, is_warm_up=True)]
    for load, seconds in enumerate((0.5, 0.4, 0.6)):
        records += [record(n, 0.0, 0.1, 0.2, seconds, load=load) for n in range(2)]
    loads = [{"concurrency": 2}] * 3
    evidence = evidence_of(freeze(card), tmp_path, records, loads=loads)
    metrics, spread = TASKS.get("inference").measure(evidence)
    assert find_violated(evidence) == {}
    assert metrics["batch_latency_s"] == pytest.approx(0.5)
    assert metrics["output_tokens_per_s_per_accelerator"] == pytest.approx(12)
    assert spread is not None
    assert spread > 0.1


def test_a_load_without_an_answer_has_no_metrics():
    failed = RequestRecord.model_validate({**ANSWERED[1], "error": "x"})
    assert measure_load([failed], 1.0, {}) == {}
