"""Beyond their bounds, windows of observations and candidates keep what matters, and a proposal costs the same."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes import candidates
from cclsearch.propose.bayes.candidates import MAX_OBSERVATIONS, select_window
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.space.table import Knob, RowSet, Space

CARD = load_card("wl2")  # on 16 accelerators
FAILED = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")


def make_space(num_buckets: int) -> Space:
    """Return a space with a free knob of that many choices, which no closed form knows."""
    knobs = (
        Knob("tp", (1, 2, 4, 8)),
        Knob("pp", (1, 2)),
        Knob("dp", (1, 2, 4, 8, 16)),
        Knob("micro_batch_size", (1, 2)),
        Knob("bucket", tuple(range(num_buckets))),
    )
    codes = np.array(list(itertools.product(*(range(len(knob.choices)) for knob in knobs))), dtype=np.int16)
    degrees = [knob.column[codes[:, k]] for k, knob in enumerate(knobs[:3])]
    return Space(knobs, codes[degrees[0] * degrees[1] * degrees[2] == 16], num_raw=len(codes))


def observe(space: Space, rows: list[int]) -> tuple[Observation, ...]:
    """Return observations of these rows: bucket 7 is fast, one in nine fails."""
    found = []
    for n, row in enumerate(rows, start=1):
        config = space.config(row)
        time_s = 5.0 + float(config.as_int("tp")) + (0.0 if config["bucket"] == 7 else 1.0) + n / 1e4
        fails = n % 9 == 0
        metrics = {} if fails else {"step_time_s": time_s}
        found.append(Observation(n, config, row, None if fails else time_s, FAILED if fails else None, metrics=metrics))
    return tuple(found)


def view_of(space: Space, count: int, **fields: Any) -> SearchView:
    rows = np.random.default_rng(3).permutation(len(space))[:count].tolist()
    return SearchView(CARD, space, observe(space, rows), frozenset(), 50, 0, **fields)


def test_all_observations_are_kept_up_to_the_bound() -> None:
    seen = view_of(make_space(100), MAX_OBSERVATIONS).observations
    assert select_window(seen) is seen


def test_a_window_keeps_the_best_the_latest_and_some_failures_in_their_order() -> None:
    seen = view_of(make_space(100), 700).observations
    window = select_window(seen)
    assert len(window) == MAX_OBSERVATIONS
    assert [o.trial for o in window] == sorted(o.trial for o in window)
    best = sorted((o for o in seen if o.loss is not None), key=lambda o: o.loss or 0.0)[: MAX_OBSERVATIONS // 2]
    assert {o.trial for o in best} | {700, 699, 698} <= {o.trial for o in window}
    assert sum(o.failure is not None for o in window) >= 3
    assert min(o.trial for o in window if o.trial not in {b.trial for b in best}) < 100, "early trials are kept too"


def test_a_window_of_failures_only_is_full() -> None:
    failures = tuple(Observation(n, make_space(1).config(0), 0, None, FAILED) for n in range(1, 200))
    assert len(select_window(failures)) == MAX_OBSERVATIONS


@pytest.mark.parametrize("count", [100, 1000])
def test_models_are_fitted_to_as_many_observations_however_many_there_are(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cclsearch.propose.bayes import ensemble, feasibility

    sizes = []
    for module in (ensemble, feasibility):
        plain = module.calibrate

        def counted(model: Any, features: Any, prior: Any, data: Any, plain: Any = plain) -> Any:
            sizes.append(len(data.rows_n))
            return plain(model, features, prior, data)

        monkeypatch.setattr(module, "calibrate", counted)
    view = view_of(make_space(100), count)
    posterior = fit_posterior(view)
    assert posterior is not None
    assert 0 < max(sizes) <= MAX_OBSERVATIONS
    assert len(posterior.rows_m) == candidates.MAX_CANDIDATES_WINDOWED
    assert posterior.best == pytest.approx(np.log(min(o.loss for o in view.observations if o.loss is not None)))


def test_a_large_space_is_ranked_once_until_the_trials_double(monkeypatch: pytest.MonkeyPatch) -> None:
    space = make_space(1000)
    assert len(space) > candidates.MAX_RANKED
    ranked: list[int] = []
    plain = candidates._rank

    def counted(models: Any, rows: Any) -> Any:
        ranked.append(len(rows))
        return plain(models, rows)

    monkeypatch.setattr(candidates, "_rank", counted)
    for count in (40, 41, 42, 63, 64):
        view = view_of(space, count)
        (proposal,) = DefaultProposer().propose(view, 1)
        row = space.row(proposal.config)
        assert row is not None
        assert not view.taken_N[row]
    assert sum(ranked) - 5 * candidates.MAX_RANKED == 2 * len(space), "at 32 and at 64 trials, in chunks"


def test_neighbours_of_the_best_are_candidates_of_a_large_space() -> None:
    space = make_space(1000)
    view = view_of(space, 90)
    posterior = fit_posterior(view)
    assert posterior is not None
    best = min((o for o in view.observations if o.loss is not None), key=lambda o: o.loss or 0.0)
    differ = [
        sum(best.config[name] != value for name, value in space.config(int(row)).items()) for row in posterior.rows_m
    ]
    assert differ.count(1) >= 10
    assert not view.taken_N[posterior.rows_m].any()


def test_the_same_view_gets_the_same_proposals_from_a_new_process_state() -> None:
    view = view_of(make_space(1000), 70)
    first = DefaultProposer().propose(view, 3)
    candidates._RANKINGS.clear()
    assert [p.config for p in DefaultProposer().propose(view, 3)] == [p.config for p in first]


def test_rows_are_found_by_their_codes_and_others_are_not() -> None:
    space = make_space(50)
    order = np.random.default_rng(0).permutation(len(space))
    shuffled = Space(space.knobs, space.codes_NK[order], space.num_raw)
    assert shuffled.find_rows(space.codes_NK).tolist() == np.argsort(order).tolist()
    outside = np.array([[3, 1, 4, 0, 0]], dtype=np.int16)  # 8 x 2 x 16 ranks
    assert shuffled.find_rows(outside).tolist() == [-1]
    assert shuffled.row(shuffled.config(17)) == 17


def test_held_back_rows_are_a_set_and_are_never_proposed() -> None:
    space = make_space(100)
    mask_N = np.zeros(len(space), dtype=bool)
    mask_N[5:] = True
    view = view_of(space, 0, held_back=RowSet(mask_N))
    assert (7 in view.held_back, 3 in view.held_back, len(view.held_back)) == (True, False, len(space) - 5)
    assert view.held_back == frozenset(range(5, len(space)))
    assert np.flatnonzero(~view.taken_N).tolist() == [0, 1, 2, 3, 4]
    assert view.is_closed(9)
    assert not view.is_closed(2)
