"""What limits a served load: sentences and seconds by cause, from request logs and the engine's counters."""

from __future__ import annotations

from typing import Any

import pytest

from cclsearch.core.values import Config
from cclsearch.scoring.evidence import Diagnosed
from cclsearch.tasks.serving.contract import Arrival, AskedLoad, PlannedRequest, RequestRecord
from cclsearch.tasks.serving.diagnosis import diagnose_load

ASKED = PlannedRequest(input_tokens=10, output_tokens=3)


def answer(number: int, arrival_s: float, *token_times_s: float, **other: Any) -> RequestRecord:
    fields = {"number": number, "arrival_s": arrival_s, "sent_s": arrival_s, "input_tokens": 10}
    fields |= {"token_times_s": token_times_s, "end_s": token_times_s[-1], "output_tokens": len(token_times_s)}
    return RequestRecord.model_validate(fields | other)


def diagnose(
    records: list[RequestRecord],
    arrival: Arrival = Arrival.CLOSED,
    config: dict[str, Any] | None = None,
    shared: int = 0,
    **metrics: float,
) -> Diagnosed:
    load = AskedLoad(requests=(ASKED,) * len(records), arrival=arrival, concurrency=len(records))
    return diagnose_load(records, metrics, Config(config or {}), load, shared)


STEADY = [answer(0, 0.0, 0.4, 0.5, 0.6), answer(1, 0.0, 0.4, 0.5, 0.6)]
"""Two requests of 0.6 s: 0.4 s to the first token, then two gaps of 0.1 s."""


def test_the_parts_of_a_mean_request_add_up_to_its_time():
    found = diagnose([*STEADY, answer(2, 1.0, 1.1, 1.2, 1.8), answer(3, 0.0, 9.0, is_warm_up=True)], queue_mean_s=0.2)
    assert found.seconds_by_cause == pytest.approx(
        {"queue": 0.2, "prefill": 0.1, "decode": 0.2 + 0.5 / 3 - 0.5 / 3, "stalls between tokens": 0.5 / 3}
    )
    assert sum(found.seconds_by_cause.values()) == pytest.approx((0.6 + 0.6 + 0.8) / 3)


def test_the_wait_for_a_place_is_not_told_from_prefill_unless_the_engine_states_it():
    assert set(diagnose(STEADY).seconds_by_cause) == {"queue or prefill", "decode", "stalls between tokens"}
    assert diagnose(STEADY, queue_mean_s=5.0).seconds_by_cause["queue"] == pytest.approx(0.4), "at most the first token"


@pytest.mark.parametrize(
    ("config", "metrics", "sentence"),
    [
        (
            {"max_num_seqs": 2, "dp": 2},
            {"concurrency": 8, "queue_mean_s": 0.3},
            "50% of a request's time is in the queue: 8 clients share 4 places (max_num_seqs=2, dp=2)",
        ),
        (
            {"max_num_seqs": 16, "max_num_batched_tokens": 64},
            {"concurrency": 8, "queue_mean_s": 0.3},
            "50% of a request's time is in the queue: prompts wait for steps that are full of other prompts"
            " (max_num_batched_tokens=64)",
        ),
        (
            {"max_num_seqs": 16, "kv_cache_mib": 2},
            {"concurrency": 8, "preemptions": 3, "kv_cache_use_peak": 1.0},
            "the KV cache is too small, peak use 100%: 3 preemptions, each computes a sequence again (more memory for"
            " it, or fewer sequences at once: kv_cache_mib=2, max_num_seqs=16)",
        ),
        (
            {"kv_cache_mib": 64},
            {"kv_cache_use_peak": 0.1},
            "at most 10% of the KV cache is used: its size does not limit this load (kv_cache_mib=64)",
        ),
        (
            {"prefix_caching": True},
            {"prefix_cache_hit_rate": 0.4},
            "40% of the prompts' tokens came from the prefix cache",
        ),
    ],
)
def test_a_limit_is_named_with_the_knobs_that_set_it(config, metrics, sentence):
    assert sentence in diagnose(STEADY, config=config, **metrics).sentences


def test_a_load_without_a_limit_gets_no_cause():
    found = diagnose(STEADY, config={"max_num_seqs": 16}, concurrency=2, queue_mean_s=0.01, kv_cache_use_peak=0.7)
    assert found.sentences == (
        "a request takes 0.6 s in the mean for 3 tokens: 0.01 s queue, 0.39 s prefill, 0.2 s decode",
    )


def test_answers_that_wait_for_prompts_of_others_are_stalled():
    """One of two gaps is 0.9 s longer than the median gap."""
    records = [answer(n, 0.0, 0.1, 0.2, 1.2, 1.3) for n in range(3)]
    told = diagnose(records, config={"chunked_prefill": False}).sentences[-1]
    assert told == (
        "75% of the time between first and last token is in gaps beyond the median one: steps that compute other"
        " prompts (chunked_prefill=False)"
    )


def test_a_server_that_falls_behind_an_open_loop_is_noticed():
    behind = [answer(n, 0.1 * n, 0.1 * n + 0.05 + 0.2 * n, 0.1 * n + 0.2 + 0.2 * n) for n in range(12)]
    level = [answer(n, 0.1 * n, 0.1 * n + 0.05, 0.1 * n + 0.2) for n in range(12)]
    told = diagnose(behind, Arrival.POISSON).sentences
    assert any(text.startswith("the server falls behind the arrivals") for text in told)
    for records, arrival in ((level, Arrival.POISSON), (behind, Arrival.CLOSED)):
        assert not any("falls behind" in text for text in diagnose(records, arrival).sentences)


def test_shared_first_tokens_without_a_prefix_cache_are_noticed():
    wasted = "all prompts share their first 8 tokens, which are computed again each time (prefix_caching)"
    assert wasted in diagnose(STEADY, config={"prefix_caching": False}, shared=8).sentences
    assert wasted not in diagnose(STEADY, config={"prefix_caching": False}).sentences


def test_a_load_that_nobody_answered_has_no_diagnosis():
    assert diagnose([answer(0, 0.0, 1.0, error="HTTP 500")]) == Diagnosed()
