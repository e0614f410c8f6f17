"""`ccl-search predict`: predicted primary metric and memory of configurations, part by part; starts no job."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.card.model import Card
from cclsearch.cli.space import read_asked
from cclsearch.core.errors import UserError, require_writable
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.plan.cost import estimate_search
from cclsearch.plan.subject import Subject, find_subject
from cclsearch.run.spec import DEFAULT_BUDGET
from cclsearch.space.knobs import meaning_of
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import LIKELY, Derived, Prediction, predict_space, predictor_of
from cclsearch.tasks.base import task_of
from cclsearch.tasks.training.aot import compile_memory, find_topology, require_compiler


def run(args: argparse.Namespace) -> int:
    """Print the configurations that are predicted to be fastest and likely to fit, with their parts."""
    if args.png:
        require_writable(args.png, "--png")
    subject = find_subject(read_asked(args))
    card = subject.card
    topology = _find_topology(card, args.aot)
    space = subject.build_space()
    prediction = predict_space(card, space)
    if prediction is None:
        raise UserError(f"task {card.task!r} of {card.name} has no closed form: nothing is known before a trial runs")
    rows = _choose(space, prediction, args)
    derived = predictor_of(card, space).derived
    shown = [name for name in task_of(card).highlights if name in derived]
    described = [_describe(space, prediction, row, {name: derived[name] for name in shown}) for row in rows]
    cost = None if args.config or subject.recording else estimate_search(card, space, DEFAULT_BUDGET, prediction)
    if topology is not None:
        _compile_all(card, described, topology)
    if args.png:
        _draw(args.png, described, card, prediction)
    if args.json:
        inferred = [each.model_dump(mode="json") for each in card.inferred]
        head = {"workload": card.name, "provenance": "simulated", "legal": len(space), "inferred": inferred}
        more = {"search_node_hours": cost.node_hours, "search_cost": cost.describe()} if cost else {}
        fits = {"memory_limit_gib": card.hardware.memory_gib, "any_fits": not _describe_none_fits(card, prediction)}
        print(json.dumps(head | fits | {"configurations": described} | more))
    else:
        _print_table(subject, space, described, prediction, {name: derived[name].formula for name in shown})
        if cost is not None:
            print(f"  expected cost of a search on a cluster: {cost.describe()}")
    return 0


def _choose(space: Space, prediction: Prediction, args: argparse.Namespace) -> list[int]:
    """Return at most `--top` rows that match `--config`: first those likely to fit, each group fastest first."""
    matches = space.matching(parse_assignments(args.config, space.knobs) if args.config is not None else {})
    if not matches.any():
        options = [("--workload", args.workload), ("--recording", args.recording), ("--run", args.run)]
        options += [("--framework", args.framework), ("--launcher", args.launcher), ("--config", args.config)]
        options += [("--overlay", path) for path in args.overlay] + [("--set", pair) for pair in args.set]
        options += [("--knob", knob) for knob in args.knob]
        given = shlex.join([text for option, value in options if value is not None for text in (option, value)])
        why = f"run `ccl-search space explain {given}` to see which rule excludes it"
        raise UserError(f"no configuration in the search space matches --config {args.config!r}; {why}")
    rows = np.flatnonzero(matches)
    return [int(row) for row in prediction.order(rows)[: args.top]]


def _describe(space: Space, prediction: Prediction, row: int, derived: Mapping[str, Derived]) -> dict[str, Any]:
    value, rows = prediction.value_N[[row]], np.array([row])
    return {
        "config": dict(space.config(row)),
        "label": str(space.config(row)),
        **prediction.describe(row),
        **{name: float(each.value(value, rows)[0]) for name, each in derived.items()},
        prediction.form.parts_key: {name: float(part[row]) for name, part in prediction.parts.items()},
        "memory_parts_gib": {name: float(part[row]) for name, part in prediction.memory_parts_gib.items()},
    }


def _describe_none_fits(card: Card, prediction: Prediction) -> str:
    """Return a line if no configuration is likely to fit into memory, else nothing."""
    if (prediction.fits_N >= LIKELY).any():
        return ""
    least = float(np.nanmin(prediction.memory_gib_N))
    return (
        f"no configuration is likely to fit into memory: the smallest needs about {least:.3g} GiB of each accelerator,"
        f" which has {card.hardware.memory_gib:g} GiB; take more or larger accelerators"
    )


def _print_table(
    subject: Subject, space: Space, described: list[dict[str, Any]], prediction: Prediction, formulas: Mapping[str, str]
) -> None:
    card = subject.card
    form, metric, has_memory = prediction.form, prediction.form.metric, "memory_gib" in described[0]
    print(f"{card.name}: {len(space)} configurations in the search space; predicted; nothing was run")
    for note in subject.notes:
        print(f"note: {note}")
    if none_fits := _describe_none_fits(card, prediction):
        print(f"note: {none_fits}")
    width = max(len(row["label"]) for row in described)
    memory = f"  {'GiB':>7}  {'P(fits)':>7}" if has_memory else ""
    heading = f"{form.heading or metric.unit or metric.name:>9}{memory}"
    infos = [task_of(card).metric(name) for name in formulas]
    columns = [info.heading or info.words for info in infos]
    more = "".join(f"  {column:>{max(len(column), 8)}}" for column in columns)
    print(f"\n  {'configuration':<{width}}  {heading}{more}   largest parts")
    for row in described:
        parts = sorted(row[form.parts_key].items(), key=lambda item: -item[1])[:4]
        whole = sum(row[form.parts_key].values())
        shares = ", ".join(f"{name} {part / whole:.0%}" for name, part in parts if part > 0)
        memory = f"  {row['memory_gib']:>7.1f}  {row['fits']:>7.0%}" if has_memory else ""
        figures = f"{row[metric.name]:>9.4g}{memory}"
        for info, column in zip(infos, columns, strict=True):
            figures += f"  {_format_figure(info, row[info.name]):>{max(len(column), 8)}}"
        print(f"  {row['label']:<{width}}  {figures}   {shares}")
    first, unit = described[0], metric.unit or ""
    cost = (metric.words, unit) if form.metric.sign > 0 else (f"1 / {metric.words}", f"1/({unit})")
    for title, unit, key in ((*cost, form.parts_key), ("memory", "GiB", "memory_parts_gib")):
        if first[key]:
            print(f"\n  {title} of {first['label']}")
        for name, value in first[key].items():
            if value:
                print(f"    {name:<20}{value:>10.4g} {unit}")
    _print_compiled(described)
    limit = f"an accelerator has {card.hardware.memory_gib:g} GiB; " if has_memory else ""
    print(f"\n  {limit}a search's trials correct these predictions")
    for formula in filter(None, formulas.values()):
        print(f"  {formula}")


def _format_figure(info: MetricInfo, value: float) -> str:
    return f"{value:.1%}" if info.unit == "fraction" else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _find_topology(card: Card, asked: str | None) -> str | None:
    if asked is None:
        return None
    if card.task != "training":
        raise UserError(f"--aot compiles a training step, but {card.name} is a {card.task!r} workload: leave it out")
    topology = find_topology(card, asked)
    require_compiler()
    return topology


def _compile_all(card: Card, described: list[dict[str, Any]], topology: str) -> None:
    """Add the compiler's memory to each configuration, as its key `compiled`."""
    for row in described:
        found = compile_memory(card, Config(row["config"]), topology)
        row["compiled"] = {
            "topology": topology,
            "memory_gib": found.total_gib,
            "parts_gib": found.parts_gib,
            "refused": found.refused,
        }


def _print_compiled(described: list[dict[str, Any]]) -> None:
    rows = [row for row in described if "compiled" in row]
    if not rows:
        return
    print(f"\n  memory of one chip, from the TPU compiler for {rows[0]['compiled']['topology']} (no TPU was used);")
    print("  the compiled program is the engine's own JAX transformer with AdamW, not the framework's program")
    for row in rows:
        found = row["compiled"]
        parts = ", ".join(f"{name} {gib:.3g}" for name, gib in found["parts_gib"].items() if gib)
        refused = f"not compiled: {one_line(found['refused'], 200)}"
        figure = f"{found['memory_gib']:>9.3f} GiB  ({parts})" if parts else refused
        print(f"    {row['label']}  {figure}")


def _draw(path: Path, described: list[dict[str, Any]], card: Card, prediction: Prediction) -> None:
    from cclsearch.charts.parts import StackedBar, draw_parts
    from cclsearch.report.write import write_picture

    labels = _short_labels([row["config"] for row in described])
    form = prediction.form
    words = ("" if form.metric.sign > 0 else "1 / ") + form.metric.axis_label
    pictures = (
        (form.parts_key, f"predicted {words}", "parts", None),
        ("memory_parts_gib", "predicted GiB of the device that uses most", "memory", card.hardware.memory_gib),
    )
    for key, title, name, limit in pictures:
        bars = [StackedBar(label, row[key]) for label, row in zip(labels, described, strict=True)]
        chart = draw_parts(bars, title, name=name, title=title, limit=limit)
        if chart is not None:
            write_picture(chart, path if name == "parts" else path.with_name(f"{path.stem}-memory{path.suffix}"))


def _short_labels(configs: list[dict[str, Any]]) -> list[str]:
    """Return bar labels: the parallel degrees and every knob in which the configurations differ."""
    labels = {
        name: meaning_of(name).label or name
        for name in configs[0]
        if meaning_of(name).splits or len({str(config.get(name)) for config in configs}) > 1
    }
    return [" ".join(f"{label}={str(c[n]).lower()}" for n, label in labels.items())[:52] for c in configs]
