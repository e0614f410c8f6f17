"""Requests that arrive at a rate: how many there are, whether a server keeps up with them, and what carries them."""

from __future__ import annotations

import contextlib
import heapq
import http.server
import json
import threading
import time

import numpy as np
import pytest
from test_engines import load  # noqa: F401  a fixture
from test_serving import evidence_of, find_violated
from test_serving import make_card as make_small_card
from test_serving_prediction import make_card, make_space

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.plan.capacity import describe_capacity
from cclsearch.plan.warm_start import view_space
from cclsearch.plugins import TASKS
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prediction import predict_posterior
from cclsearch.stats.closed_form import LIKELY
from cclsearch.tasks.serving.settling import KEPT_UP, find_kept_share
from cclsearch.tasks.serving.workload import count_requests, find_rate


@pytest.mark.parametrize(
    ("data", "number", "words"),
    [
        ({"request_rate": 20, "output_len": 500}, 2000, "2,000 requests in 100 s at 20 requests/s"),
        ({"request_rate": 20, "output_len": 100}, 1200, "1,200 requests in 60 s"),
        ({"request_rate": 0.1}, 32, "32 requests in 320 s"),
        ({"request_rate": 20, "num_requests": 32}, 32, "32 requests in 1.6 s at 20 requests/s: it does not settle"),
        ({"request_rate": 20, "num_requests": 0}, 1200, "1,200 requests in 60 s"),
        ({"request_rate": 1000}, 20_000, "does not settle"),
    ],
)
def test_the_number_of_requests_follows_from_the_rate(data, number, words):
    card = make_card(concurrency=None, **data)
    assert count_requests(card.work, find_rate(card)) == number
    assert words in TASKS.get("serving").remark(card)[0]


def test_a_limit_below_what_the_memory_allows_is_refused():
    card = make_card(concurrency=None, request_rate=2)
    limited = card.model_copy(update={"work": Config({**card.work, "at_most.tpot_p90_s": 0.001})})
    with pytest.raises(
        UserError, match=r"tpot_p90_s <= 0\.001 s cannot be kept: 8 h100 read the weights of a token in"
    ):
        TASKS.get("serving").remark(limited)


def serve(rate: float, places: int, seconds: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrival, start and end of the requests of 80 s at a server of so many places, first come, first served."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, int(80 * rate)))
    free, starts = [0.0] * places, []
    for when, lasts in zip(arrival, rng.exponential(seconds, len(arrival)), strict=True):
        starts.append((max(when, heapq.heappop(free)), lasts))
        heapq.heappush(free, sum(starts[-1]))
    start, lasts = np.array(starts).T
    return arrival, start, start + lasts


def test_a_server_below_its_capacity_keeps_up_and_one_above_it_does_not():
    def share(busy: float, seed: int) -> float:
        return find_kept_share(*serve(busy * 10, 20, 2.0, seed))

    assert sum(share(0.7, seed) >= KEPT_UP for seed in range(20)) >= 19
    assert [share(1.5, seed) for seed in range(20)] == pytest.approx([1 / 1.5] * 20, abs=0.12)
    arrival, start, end = serve(10, 1000, 2.0, 0)
    slower = end + np.maximum(arrival - 20, 0) * 2  # every answer takes longer than the one before
    assert find_kept_share(arrival, start, end) == 1.0
    assert find_kept_share(arrival, start, slower) < 0.6, "no request waits, but more and more are being answered"


class OneAtATime(http.server.BaseHTTPRequestHandler):
    """Answers one request after the other, each in 0.1 s."""

    busy = threading.Lock()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.busy:
            time.sleep(0.1)
        self.send_response(200)
        self.end_headers()
        event = {"choices": [{"token_ids": [1] * asked["max_tokens"]}]}
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *words: object) -> None:
        pass


def test_a_rate_above_the_capacity_ends_the_load_and_cannot_win(load, tmp_path, monkeypatch):  # noqa: F811
    module = load("serving_load")
    monkeypatch.setattr(module, "BEHIND_S", 1.0)
    card = make_small_card(concurrency=None, arrival="constant", request_rate=40, num_requests=1200)
    planned = TASKS.get("serving").make_input(card, card.configuration, is_measured=True, run_id="r", trial=1).requests
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneAtATime) as server:
        threading.Thread(target=server.serve_forever).start()
        asked = module.Load(0, [request.model_dump() for request in planned], None, seed=1, may_end=True)
        records, window_s = module.run_load(module.Target(server.server_address[1], 100, timeout_s=50), asked)
        server.shutdown()
    assert window_s < 20, "the load is 30 s long"
    assert {record.error for record in records} == {"", module.UNANSWERED}
    warm = {**vars(records[0]), "is_warm_up": True}
    ended = {"request_rate": 40.0, "window_s": window_s, "ended_s": max(r.end_s for r in records)}
    lines = [{**warm, "number": n} for n in range(4)] + [vars(record) for record in records]
    evidence = evidence_of(card, tmp_path, lines, loads=[ended])
    task = TASKS.get("serving")
    metrics = task.measure(evidence)[0]
    assert set(find_violated(evidence)) <= {"asked_load"}, "a busy machine may send late"
    assert metrics["served_fraction"] < 0.5
    objective = task.constrain(card, view_space(card, make_space(tp=(1,))).objective)
    assert objective.broken_constraints(metrics)[0].startswith("served_fraction must be at least 0.99")
    assert "the load does not settle: the server keeps up with" in task.diagnose(evidence).sentences[0]
    early = [{**line, "error": "", "end_s": line["arrival_s"] + 0.1, "token_times_s": [line["arrival_s"] + 0.1] * 2,
              "sent_s": line["arrival_s"]} for line in lines]  # fmt: skip
    assert "the server kept up" in find_violated(evidence_of(card, tmp_path, early, loads=[ended]))["requests"]


def test_what_breaks_a_limit_goes_last_and_a_load_that_nothing_carries_is_said_before_the_first_trial():
    space = make_space(tp=(1, 2, 4, 8), max_num_seqs=(8, 64))

    def view_at(rate: float, **limits: float) -> SearchView:
        card = make_card(concurrency=None, request_rate=rate)
        limited = card.model_copy(update={"work": Config({**card.work, "at_most.tpot_p90_s": 0.03, **limits})})
        return view_space(limited, space)

    view = view_at(2)
    found = predict_posterior(view)
    assert found is not None
    prediction, over_N = found[0], found[0].over_N
    assert over_N is not None
    kept = [bool(over_N[row] == 0) for row in prediction.order() if prediction.fits_N[row] >= LIKELY]
    assert kept == sorted(kept, reverse=True)
    assert 0 < sum(kept) < len(kept)
    cheapest = min(space.num_accelerators_N[(over_N == 0) & (prediction.fits_N >= LIKELY)])
    (line,) = describe_capacity(view)
    assert line.startswith(f"2 requests/s under tpot_p90_s <= 0.03 s: predicted to need {cheapest} of 8 ")
    (unknown,) = describe_capacity(view_at(2, **{"at_least.requests_per_s": 1e9}))
    assert "and requests_per_s >= 1e+09 requests/s (not predicted): predicted to need" in unknown
    above = describe_capacity(view_at(60))
    assert "no configuration is predicted to keep 60 requests/s under tpot_p90_s <= 0.03 s on 8 h100" in above[0]
    most = float(above[0].partition("the most is about ")[2].split()[0])
    again = describe_capacity(view_at(0.9 * most))
    assert "predicted to need" in again[0], "what is said to be carried is"
    assert int(above[1].split()[0]) >= 60 / most * 8 * 0.99
