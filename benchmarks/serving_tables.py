"""Predicted against measured, before any trial, for every recorded table of served models: `serving.py --tables`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cclsearch.core.values import Config
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.stats.calibration import CalibrationData, calibrate
from cclsearch.stats.closed_form import predict_space, predictor_of
from cclsearch.tasks.serving.disaggregation import compute_parts, read_deployment
from cclsearch.tasks.serving.measurements import THROUGHPUT
from cclsearch.tasks.serving.priors import TPOT, TTFT
from cclsearch.tasks.serving.steady_state import serve
from cclsearch.tasks.serving.steps import MULTIPLIERS

METRICS = (TTFT, TPOT, THROUGHPUT)
RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")


class Errors(NamedTuple):
    """A table's loads, and the log of predicted over measured of each metric, for every load that measured it."""

    name: str
    loads: int
    log_ratios: Mapping[str, list[float]]
    note: str


def measure_tables(folder: Path) -> Iterator[Errors]:
    """Return the errors of each recording in a folder."""
    for path in find_recordings(folder):
        recording = load_recording(path)
        lengths, note = find_lengths(recording)
        found: dict[str, list[float]] = {metric: [] for metric in METRICS}
        measured = list(list_loads(recording, lengths[1]))
        at = read_deployment(recording.card, recording.space)
        for clients in sorted({clients for _, clients, _ in measured}):
            parts = compute_parts(recording.card, at, clients, *lengths)
            served = serve(parts, np.zeros(len(MULTIPLIERS)))
            predicted = {TTFT: served.ttft_s, TPOT: served.tpot_s, THROUGHPUT: 1 / served.cost}
            for row, own, metrics in measured:
                for metric in METRICS if own == clients else ():
                    if metrics.get(metric):
                        found[metric].append(float(np.log(predicted[metric][row] / metrics[metric])))
        yield Errors(recording.name, len(measured), found, note)


def list_loads(recording: Recording, output_len: float) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """Return row, requests at once and metrics of each load; if the load is not stated, by Little's law."""
    for row, recorded in enumerate(recording.rows):
        if recorded.status is RowStatus.OK:
            for load in recorded.loads or (recorded.metrics,):
                clients = load.get("concurrency")
                if clients is None and {RATES[0], TTFT, TPOT} <= set(load):
                    clients = load[RATES[0]] * (load[TTFT] + load[TPOT] * (output_len - 1))
                if clients is not None:
                    yield row, clients, load


def find_lengths(recording: Recording) -> tuple[tuple[float, float], str]:
    """Return mean tokens of prompts and answers: of the card, else what the measured rates say; and a note then."""
    work: Config = recording.card.work
    if {"input_len", "output_len"} <= set(work):
        return (float(work["input_len"]), float(work["output_len"])), ""
    measured = [row.metrics for row in recording.rows if set(RATES) <= set(row.metrics)]
    requests, output, total = (np.array([metrics[name] for metrics in measured]) for name in RATES)
    lengths = float(np.median((total - output) / requests)), float(np.median(output / requests))
    return lengths, "lengths and load by the measured rates"


def measure_after_a_trial(folder: Path) -> dict[str, np.ndarray]:
    """Metric -> (n, 2) log of predicted over measured of all loads of other rows, before and after one trial.

    Of each `srv-*` table whose trials have several loads; the trial is the row of the middle predicted throughput.
    """
    found: dict[str, list[np.ndarray]] = {TTFT: [], TPOT: []}
    for path in find_recordings(folder):
        recording = load_recording(path)
        loads = predictor_of(recording.card, recording.space).loads
        prediction = predict_space(recording.card, recording.space)
        if not path.name.startswith("srv-") or loads is None or prediction is None:
            continue
        rows, clients, metrics = zip(*list_loads(recording, 0.0), strict=True)
        cells = loads.build(np.array(rows), np.array(clients))
        tried = np.array(rows) == prediction.order()[len(recording.rows) // 2]
        for metric, ratios in found.items():
            values = np.log([load[metric] for load in metrics])
            expected = []
            for seen in (np.zeros(0, dtype=np.int64), np.flatnonzero(tried)):
                data = CalibrationData.measured(seen, values[seen])
                fit = calibrate(cells.models[metric], cells.features, loads.priors[metric], data)
                expected.append(fit.marginals(np.flatnonzero(~tried))[0] - values[~tried])
            ratios.append(np.stack(expected, axis=1))
    return {metric: np.concatenate(ratios) for metric, ratios in found.items()}


def print_tables(folder: Path) -> None:
    """Print one line for each table, one for each kind of table, and the errors after a trial."""
    print("| table | loads | median error of TTFT | of TPOT | of throughput | bias of the three |\n|" + " --- |" * 6)
    kinds: dict[str, list[Errors]] = {}
    for errors in measure_tables(folder):
        _print_row(errors.name + (f" ({errors.note})" if errors.note else ""), errors.loads, errors.log_ratios)
        kind = "srv-disagg" if errors.name.startswith("srv-disagg") else errors.name.split("-")[0]
        kinds.setdefault(kind, []).append(errors)
    for kind, each in kinds.items():
        joined = {metric: [ratio for errors in each for ratio in errors.log_ratios[metric]] for metric in METRICS}
        _print_row(f"all {kind}-*", sum(errors.loads for errors in each), joined)
    for metric, ratios in measure_after_a_trial(folder).items():
        before, after = np.expm1(np.median(np.abs(ratios), axis=0))
        loads = f"{len(ratios)} loads of the srv-* tables' other rows"
        print(f"\n{metric}, {loads}: {before:.0%} before, {after:.0%} after one trial of the table")


def _print_row(name: str, loads: int, log_ratios: Mapping[str, list[float]]) -> None:
    ratios = [np.exp(np.array(log_ratios[metric])) for metric in METRICS]
    off = [f"{np.expm1(np.median(np.abs(np.log(r)))):.0%}" if len(r) else "not measured" for r in ratios]
    bias = ", ".join(f"{np.median(ratio):.2f}" if len(ratio) else "-" for ratio in ratios)
    print(f"| {name} | {loads} | {' | '.join(off)} | {bias} |")
