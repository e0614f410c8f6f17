"""A second load that every trial measures too, so that a winner that loses on other traffic is found."""

from __future__ import annotations

import json

import pytest
from test_serving import ANSWERED, evidence_of, find_violated, freeze, make_card, record
from test_serving_live import LAUNCHERS, read_log, run_script

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.plugins import TASKS
from cclsearch.report.summary import describe_other_load
from cclsearch.run.folder import load_run
from cclsearch.tasks.serving.measurements import OTHER_LOAD, THROUGHPUT

FIRST = {"concurrency": 2, "window_s": 1.0}
SECOND = {"concurrency": 1, "window_s": 0.6, "is_other": True}
ALONE = [
    record(0, 0.0, 0.1, 0.15, 0.2, load=1, input_tokens=20),
    record(1, 0.2, 0.3, 0.4, 0.6, load=1, input_tokens=20),
]
"""Two longer requests of one client."""
ASKED = {
    "num_requests": 4,
    "warmup_requests": 1,
    "other_concurrency": 1,
    "other_num_requests": 2,
    "other_input_len": 20,
}


def test_the_second_load_has_metrics_of_its_own_and_changes_no_others(tmp_path):
    task = TASKS.get("serving")
    alone, _ = task.measure(evidence_of(make_card(num_requests=4), tmp_path, ANSWERED))
    evidence = evidence_of(make_card(**ASKED), tmp_path, [*ANSWERED, *ALONE], loads=[FIRST, SECOND])
    both, _ = task.measure(evidence)
    assert find_violated(evidence) == {}
    assert {name: value for name, value in both.items() if not name.startswith(OTHER_LOAD)} == alone
    assert both[OTHER_LOAD + THROUGHPUT] == pytest.approx(6 / 0.6)
    assert both[f"{OTHER_LOAD}ttft_mean_s"] == pytest.approx(0.1)
    assert both[f"{OTHER_LOAD}tpot_mean_s"] == pytest.approx((0.05 + 0.15) / 2)


def test_limits_are_those_of_the_first_load(tmp_path):
    card = freeze(make_card(limits={"ttft_p99_s": 0.3}, **ASKED))
    payload = TASKS.get("serving").make_input(card, {}, is_measured=True, run_id="r", trial=1)
    assert payload.limits == {"ttft_p99_s": (None, 0.3)}
    late = [ALONE[0], record(1, 0.2, 0.9, 1.0, 1.1, load=1, input_tokens=20)]
    second = {**SECOND, "window_s": 1.1}
    evidence = evidence_of(card, tmp_path, [*ANSWERED, *late], loads=[FIRST, second])
    metrics, _ = TASKS.get("serving").measure(evidence)
    assert (metrics["ttft_p99_s"] < 0.3 < metrics[f"{OTHER_LOAD}ttft_p99_s"], find_violated(evidence)) == (True, {})


@pytest.mark.parametrize(
    ("loads", "records", "rule", "words"),
    [
        ([FIRST], ANSWERED, "requests", "the second load was measured 0 times; 1 were asked"),
        ([SECOND], [{**each, "load": 0} for each in ALONE], "requests", "no load was measured"),
        ([FIRST, SECOND], [*ANSWERED, ALONE[0]], "requests", "load 2: 1 requests were logged; each of the 2 must be"),
        (
            [FIRST, SECOND],
            [*ANSWERED, ALONE[0], {**ALONE[1], "input_tokens": 10}],
            "requests",
            "load 2: the prompt of request 1 has 10 tokens; 20 were asked",
        ),
        ([FIRST, {**SECOND, "concurrency": 2}], [*ANSWERED, *ALONE], "asked_load", "load 2 has a concurrency of 2"),
    ],
)
def test_a_second_load_that_was_not_sent_as_asked_is_not_admitted(loads, records, rule, words, tmp_path):
    violated = find_violated(evidence_of(make_card(**ASKED), tmp_path, records, loads=loads))
    assert words in violated[rule]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"other_concurrency": 1, "other_request_rate": 2.0}, "leave one of them out"),
        (
            {"other_input_len": 5, "concurrency": None, "max_concurrency": 4},
            "--set other_concurrency=N or --set other_r",
        ),
        ({"other_concurrency": 1, "other_input_len": 4, "shared_prefix_tokens": 5}, r"\(of the second load, other_"),
    ],
)
def test_a_second_load_that_cannot_be_sent_is_refused(data, words):
    with pytest.raises(UserError, match=words) as refused:
        freeze(make_card(**data))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("objective", "constraints"),
    [(f"{OTHER_LOAD}ttft_p99_s", ()), (None, (f"{OTHER_LOAD}ttft_p99_s <= 1",))],
)
def test_an_objective_over_a_second_load_that_the_card_lacks_is_refused(objective, constraints):
    with pytest.raises(UserError, match="other_load_ttft_p99_s needs a second load: give --set other_concurrency=N"):
        freeze(make_card(), *constraints, objective=objective)
    freeze(make_card(other_concurrency=1), *constraints, objective=objective)


def test_the_run_script_sends_both_loads_to_one_server(tmp_path):
    longer = [{"arrival_s": 0.05 * n, "input_tokens": 40, "output_tokens": 3} for n in range(5)]
    other = {"requests": longer, "arrival": "constant", "concurrency": None, "max_concurrency": None}
    result = run_script(tmp_path, LAUNCHERS / "cpu_serving.py", other=other)
    assert [load.get("is_other", False) for load in result["loads"]] == [False, True]
    assert (result["loads"][0]["concurrency"], result["loads"][1]["request_rate"]) == (4, pytest.approx(5 / 0.2))
    second = [each for each in read_log(tmp_path) if each["load"] == 1]
    assert [each["input_tokens"] for each in second] == [40] * 5
    assert json.loads((tmp_path / "server.json").read_text())["max_len"] >= 43


def test_a_search_says_whether_its_winner_also_wins_on_the_second_load(project, capsys):
    words = ["--set", "num_requests=16", "--set", "other_concurrency=1", "--set", "other_num_requests=4"]
    assert main(["run", "-w", "tiny-serving", "-b", "2", *words, "--name", "r", "--learn-from", "none"]) == 0
    assert "second load: " in capsys.readouterr().out
    run = load_run(project / "runs" / "r")
    best = run.state.best
    [other] = [n for n, brief in run.state.trials.briefs.items() if brief.is_search and n != best.number]
    for number, value in ((best.number, 100.0), (other, 150.0)):
        outcome = run.state.trials[number].outcome
        outcome.metrics[OTHER_LOAD + THROUGHPUT] = value
    [said] = describe_other_load(run.spec, run.state)
    assert said.startswith(f"warning: trial {best.number} is not the best there (")
    assert f"trial {other} is 1.5 times better (150 tokens/s; max_num_seqs=" in said
    assert main(["report", "r"]) == 0
    page = (project / "runs" / "r" / "report.html").read_text()
    assert "Second load: output tokens/s per accelerator, second load " in page or "Second load: warning" in page
