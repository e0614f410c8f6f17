"""How well a few trials of one served load on an accelerator predict other loads and models there: `newdevice.md`.

    python benchmarks/newdevice_serving.py FOLDER

FOLDER has recorded serving tables (`srv-*`, without the disaggregated ones). Nothing in the closed form is fitted to an
accelerator. After 0, 1, 3, 5 and 10 trials of one table, the throughput per accelerator of the other tables of its
accelerator is predicted, each configuration at its best load; errors as in benchmarks/newdevice.py.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from newdevice import HEADS, TRIALS, print_row

from cclsearch.propose.observations import Observation
from cclsearch.propose.warm_start.knowledge import apply_earlier
from cclsearch.propose.warm_start.learn import learn_knowledge
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.stats.closed_form import predict_space, predictor_of

LEAST_ROWS = 3


def predict(recording: Recording, trials: Sequence[tuple[Recording, Sequence[int]]] = ()) -> np.ndarray:
    """(N,) predicted throughput of a table, after these rows of others."""
    predictor = predictor_of(recording.card, recording.space)
    searches = [(other.card, [_observe(other, row) for row in rows]) for other, rows in trials]
    if searches:
        knowledge = learn_knowledge(recording.card, predictor, searches, with_odds=False)
        predictor = apply_earlier(predictor, recording.space, knowledge)
    prediction = predict_space(recording.card, recording.space, predictor)
    assert prediction is not None
    return prediction.value_N


def _observe(recording: Recording, row: int) -> Observation:
    measured = recording.rows[row]
    return Observation(
        0,
        measured.config,
        None,
        1 / measured.metrics[recording.primary.name],
        metrics=measured.metrics,
        loads=measured.loads,
    )


def choose_rows(recording: Recording, count: int) -> list[int]:
    """Return rows spread over the order of predicted throughput."""
    order = np.argsort(-predict(recording), kind="stable")
    order = np.array([row for row in order if recording.values[row] is not None])
    if count == 1:
        return [int(order[len(order) // 2])]
    return [
        int(order[k]) for k in np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    ]


def find_errors(predicted: np.ndarray, recording: Recording) -> list[float]:
    """Return the median error over all rows, and over those of at least half of the best throughput."""
    measured = np.array([value or np.nan for value in recording.values])
    off = np.abs(predicted / measured - 1)
    return [float(np.nanmedian(off)), float(np.nanmedian(off[measured >= recording.best_value / 2]))]


def main() -> None:
    paths = [path for path in find_recordings(Path(sys.argv[1])) if path.name.startswith("srv-")]
    tables = [load_recording(path) for path in paths if not path.name.startswith("srv-disagg")]
    by_chip: dict[str, list[Recording]] = defaultdict(list)
    for table in tables:
        by_chip[table.card.hardware.accelerator].append(table)
    heads = "".join(f"{head:>8}" for head in HEADS)
    print("median error after that many trials of another table: all rows | rows of at least half of the best")
    print(f"{'accelerator':<26}{'pairs':>6}{heads}  |{heads}")
    all_pairs = []
    for chip, own in by_chip.items():
        pairs: dict[bool, list[list[list[float]]]] = {True: [], False: []}
        for source in own:
            if len(source.rows) < LEAST_ROWS:
                continue
            five = choose_rows(source, 5)
            factor = np.median([(source.values[row] or np.nan) / predict(source)[row] for row in five])
            for target in own:
                if target is source:
                    continue
                before = predict(target)
                after = [predict(target, [(source, choose_rows(source, count))]) for count in TRIALS]
                errors = [find_errors(each, target) for each in (before, *after, before * factor)]
                pairs[target.card.family == source.card.family].append(errors)
        for is_same, found in pairs.items():
            if found:
                print_row(f"{chip}, {'same' if is_same else 'other'} model", found)
                all_pairs += found
    print_row("all", all_pairs)


if __name__ == "__main__":
    main()
