"""How well a few trials of one workload on a new accelerator predict its other workloads: `newdevice.md`.

    python benchmarks/newdevice.py LANDSCAPES [LANDSCAPES ...] --experts EXPERTS.csv MODELS.csv

Leave one accelerator out: the constants are fitted to the measurements of all other accelerators (landscapes, and
published configurations), from `prior_guess.json`. Then 0, 1, 3, 5 and 10 trials of one workload on the accelerator
adapt them, as `predict --learn-from` and searches do (`propose/warm_start/transfer.py`), and the step times of its
*other* workloads are predicted. A workload is a landscape, or a model and framework of one repository of published
configurations; trials are spread over the half of its configurations that are predicted to be fastest. Errors are
medians of |predicted / measured - 1| over the rows of a workload that ran, then over the pairs of workloads.

Beside it: the prior alone, and one factor for the accelerator (the median of measured over predicted of the trials).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from experts import Published, choose_row, read_published
from fit_prior import fit_prior

from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.propose.observations import Observation
from cclsearch.propose.warm_start.learn import learn_knowledge
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.tasks.training.prediction import Priors, make_predictor, read_priors

TRIALS = (1, 3, 5, 10)
MOST_SOURCES = 8
"""Workloads of an accelerator whose trials are used, if it has more: drawn at random."""
LEAST_ROWS = 3
"""Configurations of a workload whose trials are used; with fewer than the trials, all of them."""
STEP = "step_time_s"
FASTEST = 0.5
"""Share of a workload's configurations, the fastest by prediction, among which trials are chosen."""
NEAR = 2.0
"""Errors are also printed over the rows within this factor of the fastest, among which a search chooses."""
HEADS = ("0", "1", "3", "5", "10", "factor")
Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Row:
    """One configuration that ran."""

    card: Card
    config: Config
    seconds: float


@dataclass(frozen=True)
class Workload:
    """What was measured of one workload on one accelerator."""

    name: str
    framework: str
    accelerator: str
    rows: tuple[Row, ...]


def read_workloads(recordings: Sequence[Recording], published: Sequence[Published], priors: Priors) -> list[Workload]:
    """Return all workloads; where a source does not state the recomputation, it is chosen by these priors."""
    found = []
    for recording in recordings:
        rows = tuple(
            Row(recording.card, row.config, row.metrics[STEP]) for row in recording.rows if STEP in row.metrics
        )
        card = recording.card
        found.append(Workload(recording.name, card.framework, card.hardware.accelerator, rows))
    grouped = defaultdict(list)
    for one in published:
        row = Row(one.card, one.space.config(choose_row(one, priors)), one.step_time_s)
        grouped[one.source, one.card.family, one.card.framework, one.card.hardware.accelerator].append(row)
    for (source, model, framework, accelerator), rows_of in grouped.items():
        found.append(Workload(f"{source} {model}", framework, accelerator, tuple(rows_of)))
    return found


def space_of(configs: Sequence[Config]) -> Space:
    knobs = [Knob(name, tuple(dict.fromkeys(c[name] for c in configs))) for name in configs[0]]
    return space_from_rows(knobs, configs)


def predict_rows(rows: Sequence[Row], priors: Priors) -> Seconds:
    """(N,) predicted seconds."""
    by_card: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for n, row in enumerate(rows):
        by_card[id(row.card), tuple(row.config)].append(n)
    seconds = np.zeros(len(rows))
    for at in by_card.values():
        form = make_predictor(rows[at[0]].card, space_of([rows[n].config for n in at]), priors).forms[STEP]
        seconds[at] = np.exp(form.predict(len(at))[0])
    return seconds


def choose_trials(rows: Sequence[Row], count: int, priors: Priors) -> list[Row]:
    """Return rows spread evenly over the order of predicted time."""
    order = np.argsort(predict_rows(rows, priors), kind="stable")
    order = order[: max(int(len(order) * FASTEST), min(count, len(order)))]
    picked = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    if count == 1:
        picked = np.array([len(order) // 2])
    return [rows[order[k]] for k in picked]


def observe(row: Row) -> Observation:
    return Observation(0, row.config, None, row.seconds, metrics={STEP: row.seconds})


def adapt(trials: Sequence[Row], target: Workload, priors: Priors) -> Priors:
    """Return the priors after these trials."""
    by_card: dict[int, list[Row]] = defaultdict(list)
    for row in trials:
        by_card[id(row.card)].append(row)
    searches = [(rows[0].card, [observe(row) for row in rows]) for rows in by_card.values()]

    def predict(card: Card, space: Space):  # type: ignore[no-untyped-def]  # a predictor
        return make_predictor(card, space, priors)

    one = target.rows[0]
    predictor = predict(one.card, space_of([one.config]))
    learned = learn_knowledge(one.card, predictor, searches, predict, with_odds=False).priors.get(STEP)
    if not learned:
        return priors
    mean, sd = (np.array([getattr(each, name) for each in learned.values()]) for name in ("mean", "sd"))
    return replace(priors, time=replace(priors.time, mean_P=mean, sd_P=sd))


def find_errors(predicted: Seconds, rows: Sequence[Row]) -> list[float]:
    """Return the median error over all rows, and over those near the fastest."""
    measured = np.array([row.seconds for row in rows])
    off = np.abs(predicted / measured - 1)
    return [float(np.median(off)), float(np.median(off[measured <= NEAR * measured.min()]))]


def evaluate(source: Workload, targets: Sequence[Workload], priors: Priors) -> Iterator[list[list[float]]]:
    """Yield, for each target workload, the errors under each of `HEADS`."""
    five = choose_trials(source.rows, 5, priors)
    factor = float(np.median(np.array([row.seconds for row in five]) / predict_rows(five, priors)))
    adapted = [adapt(choose_trials(source.rows, count, priors), targets[0], priors) for count in TRIALS]
    for target in targets:
        before = predict_rows(target.rows, priors)
        after = [predict_rows(target.rows, each) for each in adapted]
        yield [find_errors(seconds, target.rows) for seconds in (before, *after, before * factor)]


def evaluate_accelerator(own: Sequence[Workload], priors: Priors) -> dict[bool, list[list[list[float]]]]:
    """Return, for pairs of workloads with equal frameworks and with unlike ones, their errors."""
    sources = [workload for workload in own if len(workload.rows) >= LEAST_ROWS]
    if len(sources) > MOST_SOURCES:
        drawn = np.random.default_rng(0).choice(len(sources), MOST_SOURCES, replace=False)
        sources = [sources[k] for k in sorted(drawn)]
    found: dict[bool, list[list[list[float]]]] = {True: [], False: []}
    for source in sources:
        targets = [workload for workload in own if workload.name != source.name]
        if targets:
            for target, errors in zip(targets, evaluate(source, targets, priors), strict=True):
                found[target.framework == source.framework].append(errors)
    return found


def print_row(name: str, errors: Sequence[Sequence[Sequence[float]]]) -> None:
    """Print the medians over pairs of workloads."""
    all_rows, near = np.median(np.array(errors), axis=0).T
    cells = "".join(f"{value:>8.3f}" for value in all_rows) + "  |" + "".join(f"{value:>8.3f}" for value in near)
    print(f"{name:<26}{len(errors):>6}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--experts", type=Path, nargs=2, required=True, metavar="CSV")
    args = parser.parse_args()
    recordings = [load_recording(path) for folder in args.landscapes for path in find_recordings(folder)]
    published = read_published(*args.experts)
    chips = dict.fromkeys(each.card.hardware.accelerator for each in (*recordings, *published))
    print("median error after that many trials of another workload: all rows | rows within twice the fastest")
    heads = "".join(f"{head:>8}" for head in HEADS)
    print(f"{'accelerator left out':<26}{'pairs':>6}{heads}  |{heads}")
    by_chip: list[list[list[list[float]]]] = []
    for chip in chips:
        others, own = (
            [r for r in recordings if (r.card.hardware.accelerator == chip) is mine] for mine in (False, True)
        )
        rest, ours = ([p for p in published if (p.card.hardware.accelerator == chip) is mine] for mine in (False, True))
        priors = read_priors(fit_prior(others, rest))
        found = evaluate_accelerator([w for w in read_workloads(own, ours, priors) if w.rows], priors)
        if found[True]:
            print_row(chip, found[True])
            by_chip.append(found[True])
        if found[False]:
            print_row(f"{chip}, other framework", found[False])
    print_row("all, same framework", [errors for found in by_chip for errors in found])
    print_row("median of accelerators", [np.median(np.array(found), axis=0).tolist() for found in by_chip])


if __name__ == "__main__":
    main()
