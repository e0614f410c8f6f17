"""Real training over shaped links, for `placement.py`: placements of nodes, an order of devices, and errors."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from placement_orders import at_places, compare, predict, with_links
from shaped_links import shaped

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.checks.links import measure_links
from cclsearch.core.values import Config
from cclsearch.launch.profile import profile_from_mapping
from cclsearch.launch.spread import main as _spread
from cclsearch.network.matrix import LinkMatrix
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.calibration import CalibrationData, ParametricModel, RowModel, calibrate
from cclsearch.stats.closed_form import ClosedForm, predictor_of
from cclsearch.stats.kernel import read_features
from cclsearch.tasks.base import task_of
from cclsearch.tasks.training.prediction import STEP_TIME

ROOT = Path(__file__).parent.parent
REAL = (
    {"tp": 1, "dp": 4, "pp": 1},
    {"tp": 2, "dp": 2, "pp": 1},
    {"tp": 2, "dp": 1, "pp": 2},
    {"tp": 1, "dp": 2, "pp": 2},
)
MBIT_S = ((0, 40, 800, 160), (40, 0, 160, 800), (800, 160, 0, 160), (160, 800, 160, 0))
"""Two zones, nodes 0 and 2 and nodes 1 and 3; one pair between the zones is slower still."""


def run_real(
    names: list[str], card: Card, config: dict[str, object], places: Sequence[int], per_node: int = 1
) -> float:
    """Train with the ranks on these namespaces, so many of which are a node; returns the median seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(card)
        payload = task.make_input(card, Config(config), is_measured=False, run_id="r", trial=1)  # type: ignore[arg-type]
        data = {**json.loads(payload.model_dump_json()), "warmup_steps": 1, "timed_steps": 3}
        (Path(folder) / "config.json").write_text(json.dumps(data))
        words = [f"namespaces={','.join(names)}", "ranks=4", f"places={','.join(map(str, places))}"]
        words += [f"per_node={per_node}", f"namespaces_per_node={per_node}"]
        command = [sys.executable, sys.modules[_spread.__module__].__file__, ROOT / "launchers" / "cpu.py", *words]
        variables = {"CCL_TRIAL_DIR": folder, "CCL_CONFIG": f"{folder}/config.json", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=300)  # type: ignore[arg-type]
        return statistics.median(json.loads((Path(folder) / "result.json").read_text())["step_times_s"])


def real() -> None:
    """Measure links, then train each layout in its placements, and compare with predictions."""
    with shaped(MBIT_S) as names, tempfile.TemporaryDirectory() as folder:
        profile = profile_from_mapping({"launcher": "local", "network_namespaces": names}, name="shaped")
        hardware = profile.hardware.model_copy(update={"accelerators_per_node": 1})
        profile = profile.model_copy(update={"hardware": hardware, "environment": {"OMP_NUM_THREADS": "1"}})
        measured = measure_links(profile, num_ranks=4, folder=Path(folder), timeout_s=600, say=print)
        print(measured.links.describe())
        tiny = load_card("tiny")
        on_links, on_card = with_links(tiny, measured.links, 4, 1), with_links(tiny, None, 4, 4)
        print("| layout | placement | degrees | nodes | step s, measured | predicted with the matrix | without |")
        print("| --- " * 7 + "|")
        ran: list[Ran] = []
        for layout in REAL:
            full = {"micro_batch_size": 4, "activation_checkpointing": "none", "zero_stage": 0, **layout}
            ran += _run_layout(names, on_links, on_card, full)
        _print_errors(on_links, ran)


def real_devices() -> None:
    """Train on four namespaces as the devices of one node, in the given order and in the better one."""
    with shaped(MBIT_S) as names:
        rates = tuple(tuple(rate / 1e3 for rate in row) for row in MBIT_S)
        endpoints, latency = tuple(f"a:{k}" for k in range(4)), tuple((100.0,) * 4 for _ in range(4))
        links = LinkMatrix(endpoints=endpoints, nodes=("a",) * 4, gbps=rates, latency_us=latency)
        card = with_links(load_card("tiny"), links, 4, 4)
        config = {"tp": 2, "dp": 2, "pp": 1, "micro_batch_size": 4, "activation_checkpointing": "none", "zero_stage": 0}
        print("| device_order | devices | step s, measured | predicted |\n| --- | --- | --- | --- |")
        for order in ("given", "links"):
            asked = Config({**config, "device_order": order})  # type: ignore[arg-type,dict-item]
            places = task_of(card).make_input(card, asked, is_measured=True, run_id="r", trial=1).places or range(4)
            seconds, predicted = (
                run_real(names, card, config, places, 4),
                predict(card, {**config, "device_order": order}),
            )
            print(f"| {order} | {','.join(map(str, places))} | {seconds:.3f} | {predicted:.3f} |", flush=True)


@dataclass(frozen=True)
class Ran:
    """One placement that was trained."""

    config: dict[str, object]
    places: tuple[int, ...]
    measured_s: float
    predicted_s: float
    without_s: float


def _run_layout(names: list[str], on_links: Card, on_card: Card, full: dict[str, object]) -> list[Ran]:
    took: dict[tuple[str, tuple[int, ...]], Ran] = {}
    shown = " ".join(f"{k}={full[k]}" for k in ("tp", "dp", "pp"))
    found = compare(on_links, full)
    for name, (predicted, order, places) in found.items():
        config = {**full, "rank_order": order}
        if (order, places) not in took:
            seconds = run_real(names, on_card, config, places)
            took[order, places] = Ran(config, places, seconds, predicted, predict(on_card, config))
        ran = took[order, places]
        nodes = ",".join(map(str, places))
        figures = f"{ran.measured_s:.3f} | {predicted:.3f} | {ran.without_s:.3f}"
        print(f"| {shown} | {name} | {order} | {nodes} | {figures} |", flush=True)
    times = {name: took[order, places].measured_s for name, (_, order, places) in found.items()}
    ratios = ", ".join(f"{times[name] / times['best']:.2f}x against {name}" for name in ("worst", "default", "nodes"))
    print(f"| {shown} | best: {ratios} | | | | | |", flush=True)
    return list(took.values())


def _print_errors(card: Card, ran: Sequence[Ran]) -> None:
    """Print the median error before any trial, and of the others after three of the runs were trials of a search."""
    measured = np.array([each.measured_s for each in ran])
    for name, values in (("with", [r.predicted_s for r in ran]), ("without", [r.without_s for r in ran])):
        error = statistics.median(abs(np.array(values) / measured - 1).tolist())
        print(f"median error of the prediction {name} the matrix, before any trial: {100 * error:.0f} %")
    forms = [_form_of(card, each) for each in ran]
    space = space_from_rows(*_rows_of(ran))
    at = np.array([int(np.flatnonzero(space.matching(row))[0]) for row in _rows_of(ran)[1]])
    own = np.log([each.predicted_s for each in ran])
    errors, by_factor = [], []
    for trials in itertools.combinations(range(len(ran)), 3):
        tried, rest = np.array(trials), np.array([k for k in range(len(ran)) if k not in trials])
        evidence = CalibrationData.measured(at[tried], np.log(measured[tried]))
        position = {int(row): k for k, row in enumerate(at)}
        model = _model_of(forms, position)
        posterior = calibrate(model, read_features(space), forms[0].prior, evidence)
        after = np.exp(posterior.marginals(at[rest])[0])
        errors.append(statistics.median(abs(after / measured[rest] - 1).tolist()))
        factor = np.mean(np.log(measured[tried]) - own[tried])
        by_factor.append(statistics.median(abs(np.exp(own[rest] + factor) / measured[rest] - 1).tolist()))
    print(
        f"after 3 of the {len(ran)} runs as trials, error of the others: {100 * statistics.median(errors):.0f} %;"
        f" with one common factor from them in place of the multipliers: {100 * statistics.median(by_factor):.0f} %"
        f" (medians over all {len(errors)} choices of three)"
    )


def _rows_of(ran: Sequence[Ran]) -> tuple[list[Knob], list[dict[str, object]]]:
    """Return knobs and rows of the runs, with their places as a knob."""
    rows = [{**each.config, "places": "-".join(map(str, each.places))} for each in ran]
    return [Knob(name, tuple(dict.fromkeys(row[name] for row in rows))) for name in rows[0]], rows  # type: ignore[arg-type,misc]


def _form_of(card: Card, ran: Ran) -> ClosedForm:
    """Return the closed form of the step time of one run on the links of its places."""
    assert card.hardware.links is not None
    hardware = card.hardware.model_copy(update={"links": at_places(card.hardware.links, ran.places)})
    space = space_from_rows([Knob(k, (v,)) for k, v in ran.config.items()], [ran.config])  # type: ignore[arg-type,list-item]
    return predictor_of(card.model_copy(update={"hardware": hardware}), space).forms[STEP_TIME]


def _model_of(forms: Sequence[ClosedForm], position: Mapping[int, int]) -> ParametricModel:
    """Return rows -> log multipliers -> log step times, each row by its own form."""
    each = [form.log_cost(np.array([0])) for form in forms]

    def at(rows: NDArray[np.int64]) -> RowModel:
        return lambda theta: np.concatenate([each[position[int(row)]](theta) for row in rows], axis=-1)

    return at
