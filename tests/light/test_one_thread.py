"""BLAS has one thread while the surrogate computes, and the user's number afterwards."""

from __future__ import annotations

import threading

import numpy as np
import scipy.linalg
from paths import ROOT
from threadpoolctl import threadpool_info, threadpool_limits

from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes import models
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.recording.load import load_recording
from cclsearch.stats.one_thread import on_one_thread


def count_threads() -> set[int]:
    scipy.linalg.cholesky(np.eye(2))
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_a_proposal_computes_on_one_thread_and_leaves_the_users_number(monkeypatch):
    recording = load_recording(ROOT / "benchmarks" / "landscapes" / "nanotron-8b-4n")
    seen: list[set[int]] = []
    whole = models.fit_ensemble
    monkeypatch.setattr(models, "fit_ensemble", lambda *args: (seen.append(count_threads()), whole(*args))[1])
    with threadpool_limits(2, user_api="blas"):
        assert count_threads() == {2}
        fit_posterior(SearchView(recording.card, recording.space, (), frozenset(), 1, seed=0))
        assert count_threads() == {2}
    assert seen == [{1}]


def test_two_searches_in_threads_of_one_process_leave_the_users_number():
    began, may_end = threading.Event(), threading.Event()

    @on_one_thread
    def search(*, waits: bool) -> set[int]:
        began.set()
        if waits:
            assert may_end.wait(30)
        return count_threads()

    with threadpool_limits(2, user_api="blas"):
        other = threading.Thread(target=search, kwargs={"waits": True})
        other.start()
        assert began.wait(30)
        search(waits=False)
        may_end.set()
        other.join()
        assert count_threads() == {2}
        assert search(waits=False) == {1}
