"""The compact store returns each observation unchanged, and its snapshots do not change."""

from __future__ import annotations

import numpy as np
import pytest

from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.propose.observations import Observation, ObservationStore, observed_rows
from cclsearch.space.table import Knob, Space, space_from_rows

KNOBS = (Knob("tp", (1, 2, 4)), Knob("overlap", (False, True)), Knob("bucket", (0.5, 1.0)))
OOM = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory", rank=3)


@pytest.fixture
def space() -> Space:
    configs = [{"tp": tp, "overlap": overlap, "bucket": 0.5} for tp in (1, 2, 4) for overlap in (False, True)]
    return space_from_rows(KNOBS, configs)


def some_observations(space: Space) -> list[Observation]:
    metrics = {"step_time_s": 2.5, "peak_memory_gib": 60.0, "mfu": 0.4}
    return [
        Observation(1, space.config(0), 0, 2.5, spread=0.01, metrics=metrics | {"peak_memory_gib": 60.0}),
        Observation(2, space.config(1), 1, None, failure=OOM, metrics={"peak_memory_gib": 80.0}),
        Observation(3, Config(bucket=0.5, overlap=True, tp=2), 3, 0.0, metrics={"mfu": 0.4, "step_time_s": 2.5}),
        Observation(4, Config(tp=8), None, 3.0, is_confirmation=True),
        Observation(
            5, Config(tp=4.0, overlap=0, bucket=0.5), 4, None, violation=0.25, metrics={"peak_memory_gib": 1.0}
        ),
    ]


def test_each_observation_is_read_back_unchanged(space: Space) -> None:
    store, added = ObservationStore(space), some_observations(space)
    for observation in added:
        store.add(observation)
    seen = store.snapshot()
    assert tuple(seen) == tuple(added)
    assert seen == tuple(added)
    assert [seen[n] for n in range(-5, 5)] == added + added
    assert seen[1:3] == tuple(added[1:3])
    assert [(list(o.config.items()), list(o.metrics)) for o in seen] == [
        (list(o.config.items()), list(o.metrics)) for o in added
    ], "knobs and metrics keep their order, so that a prompt prints them alike"
    assert [type(o.config["tp"]) for o in seen] == [int, int, int, int, float]


def test_a_snapshot_is_sorted_by_trial_and_does_not_change(space: Space) -> None:
    store = ObservationStore(space)
    for trial in (2, 5, 1):
        store.add(Observation(trial, space.config(trial), trial, float(trial)))
    before = store.snapshot()
    store.add(Observation(3, space.config(3), 3, None, failure=OOM))
    store.add(Observation(4, Config(tp=16), None, 4.0))
    assert [o.trial for o in before] == [1, 2, 5]
    assert sorted(before.rows.tolist()) == [1, 2, 5]
    assert [o.trial for o in store.snapshot()] == [1, 2, 3, 4, 5]
    assert (
        sorted(observed_rows(store.snapshot()).tolist())
        == sorted(observed_rows(tuple(store.snapshot())).tolist())
        == [1, 2, 3, 5]
    )


def test_an_empty_store_and_one_without_a_space_work(space: Space) -> None:
    assert len(ObservationStore(space).snapshot()) == 0
    assert ObservationStore(space).snapshot().rows.dtype == np.int64
    store = ObservationStore()
    store.add(Observation(1, space.config(2), None, 1.0))
    assert store.snapshot()[0].config == space.config(2)


def test_more_observations_than_are_cached_are_built_again(space: Space) -> None:
    store = ObservationStore(space)
    added = [
        Observation(n, space.config(n % 6), n % 6, float(n), metrics={"step_time_s": n / 3}) for n in range(1, 700)
    ]
    for observation in added:
        store.add(observation)
    seen = store.snapshot()
    assert list(seen) == added
    assert list(seen) == added
