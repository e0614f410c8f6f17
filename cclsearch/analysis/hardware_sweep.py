"""Answers `ccl-search sweep-hardware`: a trace or a prediction on other clusters, simulated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cclsearch.card.hardware import Accelerator, find_accelerator
from cclsearch.card.load import inspect_card, require_card
from cclsearch.card.model import Card
from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import draw_utilities
from cclsearch.core.errors import UserError
from cclsearch.core.text import format_table, format_value, one_line
from cclsearch.core.values import Config
from cclsearch.network.collectives import ALGORITHMS, Compression
from cclsearch.network.spec import ClusterSpec, parse_cluster
from cclsearch.network.sweep import HardwareOption, Speeds, SweepRow, TimeOn, sweep, vary
from cclsearch.plan.subject import Subject
from cclsearch.plan.warm_start import Learned, learn_about
from cclsearch.report.figures import show_interval
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Prediction, predictor_of
from cclsearch.stats.kernel import Array
from cclsearch.tasks.base import task_of
from cclsearch.trace.events import Reason
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.read import open_trace
from cclsearch.trace.whatif.cluster import ClusterReplay, cluster_of, compare_chips, find_chip, grow
from cclsearch.trace.whatif.projection import prepare_replay

RESOURCES = ("compute", "scale_up_bw", "scale_out_bw", "scale_up_domain", "latency")


@dataclass(frozen=True)
class SweepAsked:
    """The clusters and accelerators to compare."""

    clusters: Sequence[tuple[str, ClusterSpec]]
    chips: Sequence[Accelerator]
    algorithm: str
    compression: Compression | None
    base: ClusterSpec | None
    ranks: int | None


@dataclass(frozen=True)
class HardwareSweep:
    """Simulated times on clusters, and the share of each that doubling a resource there saves."""

    rows: Sequence[SweepRow]
    subject: str
    """The measured time of a trace, or a configuration, that is compared."""
    what: str
    """The words of the time."""
    notes: Sequence[str]

    def as_data(self) -> dict[str, object]:
        """Return the output of `--json`."""
        rows = [row.model_dump(mode="json") for row in self.rows]
        return {"provenance": "simulated", "rows": rows, "notes": list(self.notes)}

    def draw(self) -> Chart:
        """Return the chart of utilities."""
        named = {f"{row.name}: {row.seconds:.3g} s": row.utility for row in self.rows if row.seconds is not None}
        return draw_utilities(named, f"{self.what.capitalize()} on each cluster, and utility (simulated)")

    def as_text(self) -> str:
        """Return the table, the clusters and the notes."""
        cells = []
        for row in self.rows:
            shares = [f"{100 * row.utility[name]:.1f} %" if name in row.utility else "-" for name in RESOURCES]
            seconds = format_value(row.seconds, "s") if row.seconds is not None else "-"
            speedup = f"{row.speedup:.2f}x" if row.speedup is not None else "-"
            cells.append((row.name, str(row.ranks), seconds, speedup, *shares))
        heads = ("cluster", "ranks", self.what, "speed-up", "compute", "scale-up", "scale-out", "domain", "latency/2")
        title = f"{self.what} on each cluster (simulated), and the share of it that doubling a resource there saves:"
        lines = [self.subject, "", title, format_table(heads, cells)]
        lines += [f"  {row.name}: {row.cluster}" for row in self.rows]
        lines += [f"note: {row.name}: {row.problem}" for row in self.rows if row.problem]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def ask_sweep(
    clusters: Sequence[str] = (),
    accelerators: Sequence[str] = (),
    *,
    algorithm: str = "auto",
    compress: str | None = None,
    base: str | None = None,
    ranks: int | None = None,
) -> SweepAsked:
    """Return the comparison that the texts ask for; raises UserError for one that cannot be read."""
    known = sorted({"auto", *(each for options in ALGORITHMS.values() for each in options)})
    if algorithm not in known:
        raise UserError(f"no algorithm {algorithm!r}: it is one of {', '.join(known)}")
    return SweepAsked(
        clusters=[_read_option(text) for text in clusters],
        chips=[find_accelerator(name) for name in accelerators],
        algorithm=algorithm,
        compression=_read_compression(compress),
        base=parse_cluster(base) if base else None,
        ranks=ranks,
    )


def sweep_trace(
    asked: SweepAsked, path: Path, *, card: str | None = None, ranks_per_domain: int | None = None, workers: int = 1
) -> HardwareSweep:
    """Return the traced step on other clusters; raises NotAvailable if the trace does not allow it."""
    trace = open_trace(path, card=require_card(inspect_card(card)) if card else None, workers=workers)
    if not trace.ranks:
        raise NotAvailable(trace.trace_set.reason or Reason.NO_TRACE_FILES, trace.trace_set.message)
    replay = prepare_replay(trace, ranks_per_domain)
    chip, base = find_chip(trace), asked.base
    if base is None:
        if chip is None:
            raise UserError(
                "the trace does not say which accelerator it ran on, or it is unknown: describe the traced cluster"
                " with --base, such as --base switch:8:2400:2.5 (docs/simulator.md), or give --card"
            )
        base = cluster_of(chip, max(replay.model.num_ranks, 1), replay.model.domain_size)
    timed = ClusterReplay(replay, base)

    def time_on(cluster: ClusterSpec, speeds: Speeds) -> float:
        return timed.step_s(cluster, speeds, algorithm=asked.algorithm, compression=asked.compression)

    options = _options(base, chip, asked)
    if asked.compression is not None or asked.algorithm != "auto":
        options.insert(0, HardwareOption("base, as asked", base))
    rows = sweep(HardwareOption("base (as traced)", base), options, time_on, timed.step_s)
    notes = list(timed.notes)
    if asked.chips and chip is None:
        notes.append("the traced accelerator is unknown: other accelerators compute as fast as it")
    return HardwareSweep(rows, f"measured {replay.what}: {format_value(timed.measured_s, 's')}", replay.what, notes)


def sweep_prediction(
    asked: SweepAsked, subject: Subject, *, config: str | None = None, sources: Sequence[str] = ()
) -> HardwareSweep:
    """Return a workload's predicted configuration on other clusters: the one given, or the best that fits."""
    given = [("--algorithm", asked.algorithm != "auto"), ("--compress", asked.compression), ("--ranks", asked.ranks)]
    odd = next((name for name, value in given if value), None)
    if odd is not None:
        raise UserError(f"{odd} belongs to a trace; a predicted configuration has its own")
    card, space = subject.card, subject.build_space()
    matches = space.matching(parse_assignments(config, space.knobs) if config else {})
    learned = learn_about(subject, space, sources, None)
    row, prediction = _choose_row(learned, matches, config or "")
    ranks = int(space.num_accelerators_N[row])
    base = asked.base or cluster_of(card.hardware.chip, ranks, card.hardware.domain)
    options = _options(base, card.hardware.chip, asked)
    small = next((each for each in (base, *(option.cluster for option in options)) if each.num_ranks < ranks), None)
    if small is not None:
        raise UserError(
            f"{space.config(row)} needs {ranks} ranks, but the cluster {small.describe()} has {small.num_ranks}"
        )
    time_on = _predict_on_clusters(card, space, row, prediction.theta_P)
    # what the closed form leaves of the card's own hardware, or of a measurement there, it also leaves of the others
    left = float(prediction.value_N[row]) / _expect(card, space, row, prediction.theta_P)
    rows = sweep(HardwareOption("base", base), options, lambda cluster, speeds: left * time_on(cluster, speeds))
    metric = task_of(card).primary_metric
    known = learned.notes or ("predicted before calibration by trials",)
    figure = show_interval(prediction.describe(row), metric.name, "{:.3g}".format)
    own = f"with the links of the card itself {figure} {metric.unit}; whether it fits into memory is not checked"
    notes = [*subject.notes, *known, own]
    return HardwareSweep(rows, f"{card.name}: {space.config(row)}", metric.words, notes)


def _options(base: ClusterSpec, chip: Accelerator | None, asked: SweepAsked) -> list[HardwareOption]:
    options = [HardwareOption(name, cluster) for name, cluster in asked.clusters]
    if not asked.clusters and not asked.chips and not asked.ranks:
        options = vary(base)
    if asked.ranks:
        options.append(HardwareOption(f"base of {asked.ranks} ranks", grow(base, asked.ranks)))
    for each in asked.chips:
        ranks = base.num_ranks
        domain = each.scale_up_domain or (8 if each.kind != "tpu" else ranks)
        spec = cluster_of(each, ranks, min(domain, ranks))
        options.append(HardwareOption(each.name, spec, compare_chips(chip, each)))
    return options


def _read_option(text: str) -> tuple[str, ClusterSpec]:
    name, is_named, spec = text.partition("=")
    if not is_named or ":" in name:
        name, spec = text, text
    return one_line(name, 60), parse_cluster(spec)


def _read_compression(text: str | None) -> Compression | None:
    if text is None:
        return None
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(f"{number}x?(?::{number})?(?::{number})?", text.strip().lower())
    if not match or float(match[1]) < 1 or any(part is not None and float(part) <= 0 for part in match.groups()[1:]):
        raise UserError(
            "--compress must be RATIO[:GBPS[:GBPS]], with a ratio of at least 1 and rates above 0, such as 4:300:150,"
            f" not {text!r}"
        )
    rates = [float(part) * 1e9 if part is not None else float("inf") for part in match.groups()[1:]]
    return Compression(float(match[1]), *rates)


def _choose_row(
    learned: Learned, matches: np.ndarray[tuple[int], np.dtype[np.bool_]], asked: str
) -> tuple[int, Prediction]:
    """Return the matching row that is predicted to be best and to fit, and the prediction; UserError without."""
    card = learned.view.card
    if learned.view.primary.unit != "s":
        raise UserError(f"{card.name}: its task {card.task!r} predicts no seconds, so there is nothing to simulate")
    rows = np.flatnonzero(matches)
    if not len(rows):
        raise UserError(
            f"no configuration in the search space matches --config {asked!r}: see `ccl-search space explain`"
        )
    prediction, _ = learned.predict(rows)
    return int(prediction.order(rows)[0]), prediction


def _predict_on_clusters(card: Card, space: Space, row: int, theta_P: Array) -> TimeOn:
    """Return the function of cluster and speeds to the predicted seconds of this configuration."""
    chip = card.hardware.chip

    def time_on(cluster: ClusterSpec, speeds: Speeds) -> float:
        hardware = card.hardware.model_copy(
            update={
                "cluster": cluster.describe(),
                "scale_up_domain": cluster.domain,
                "peak_flops": Config({name: rate * speeds.flops for name, rate in chip.peak_flops.items()}),
                "memory_gb_per_s": chip.memory_gb_per_s * speeds.memory,
            }
        )
        return _expect(card.model_copy(update={"hardware": hardware}), space, row, theta_P)

    return time_on


def _expect(card: Card, space: Space, row: int, theta_P: Array) -> float:
    """Return the closed form's seconds of one configuration with these log multipliers."""
    one = replace(space, codes_NK=space.codes_NK[row : row + 1])
    form = predictor_of(card, one).forms[task_of(card).primary]
    return float(np.exp(form.metric.sign * form.log_cost(np.array([0]))(theta_P))[0])
