"""Predictions of configurations, as data, as text and as a chart, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.text import format_table, one_line, show_number
from cclsearch.core.values import Config
from cclsearch.report.figures import show_interval
from cclsearch.scoring.objective import Constraint
from cclsearch.space.knobs import meaning_of
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Derived, Prediction, describe_none_fits
from cclsearch.tasks.base import task_of
from cclsearch.tasks.training.aot import compile_memory


def describe_prediction(
    space: Space, prediction: Prediction, row: int, derived: Mapping[str, Derived], limits: Sequence[Constraint] = ()
) -> dict[str, Any]:
    """Return the prediction of a row, with its parts and the metrics that follow from it, each with its interval, and
    the limits that it breaks.
    """
    figures, rows = prediction.describe(row), np.array([row])
    for name, each in derived.items():
        base = each.base if each.base in figures else prediction.form.metric.name
        values = {end: figures[f"{base}{end}"] for end in ("", "_low", "_high") if f"{base}{end}" in figures}
        found = {end: float(each.value(np.array([value]), rows)[0]) for end, value in values.items()}
        low_high = sorted(found[end] for end in ("_low", "_high") if end in found)
        figures |= {f"{name}{end}": value for end, value in zip(("_low", "_high"), low_high, strict=False)}
        figures[name] = found[""]
    predicted = [limit for limit in limits if limit.metric in figures]
    broken = [str(limit) for limit in predicted if limit.excess(figures[limit.metric]) > 1e-6]
    return {
        "config": dict(space.config(row)),
        "label": str(space.config(row)),
        "origin": prediction.origin(row),
        **({"breaks": broken} if limits else {}),
        **figures,
        prediction.form.parts_key: {name: float(part[row]) for name, part in prediction.parts.items()},
        "memory_parts_gib": {name: float(part[row]) for name, part in prediction.memory_parts_gib.items()},
    }


def describe_predictions(
    card: Card,
    space: Space,
    described: Sequence[Mapping[str, Any]],
    prediction: Prediction,
    formulas: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the lines of a table of predictions, the parts of the first one, and the meaning of the figures."""
    form, metric, has_memory = prediction.form, prediction.form.metric, "memory_gib" in described[0]
    yield f"{card.name}: {len(space)} configurations in the search space; predicted; nothing was run"
    for note in notes:
        yield f"note: {note}"
    if none_fits := describe_none_fits(card, prediction):
        yield f"note: {none_fits}"
    infos = [task_of(card).metric(name) for name in formulas]
    memory = ("GiB", "P(fits)") if has_memory else ()
    heads = ["configuration", form.heading or metric.unit or metric.name, *memory]
    heads += [info.heading or info.words for info in infos]
    rows = []
    for row in described:
        parts = sorted(row[form.parts_key].items(), key=lambda item: -item[1])[:4]
        whole = sum(row[form.parts_key].values())
        figures = [show_interval(row, "memory_gib", "{:.1f}".format), f"{row['fits']:.0%}"] if has_memory else []
        for info in infos:
            show = "{:.1%}".format if info.unit == "fraction" else show_number
            figures.append(
                show_interval(row, info.name, show) if info.name in prediction.others else show(row[info.name])
            )
        shares = ", ".join(f"{name} {part / whole:.0%}" for name, part in parts if part > 0)
        label = row["label"] + " (measured)" * (row["origin"] == "measured")
        label += f" (breaks {' and '.join(broken)})" if (broken := row.get("breaks")) else ""
        rows.append((label, show_interval(row, metric.name, "{:.4g}".format), *figures, shares))
    yield f"\n{format_table([*heads, 'largest parts'], rows, right=range(1, len(heads)), indent='  ')}"
    first, unit = described[0], metric.unit or ""
    cost = (metric.words, unit) if form.metric.sign > 0 else (f"1 / {metric.words}", f"1/({unit})")
    for title, unit, key in ((*cost, form.parts_key), (prediction.memory_label, "GiB", "memory_parts_gib")):
        if first[key]:
            yield f"\n  {title} of {first['label']}"
        for name, value in first[key].items():
            if value:
                yield f"    {name:<20}{value:>10.4g} {unit}"
    yield from _describe_compiled(described)
    limit = f"an accelerator has {card.hardware.memory_gib:g} GiB; " if has_memory else ""
    yield f"\n  {limit}in brackets: 80 % intervals (those of the other figures: --json)"
    slow = "" if prediction.measured else "; slow clusters take 3 to 18 times as long, which one measured run shows"
    yield f"  trials correct these predictions{slow}"
    for formula in filter(None, formulas.values()):
        yield f"  {formula}"


def add_compiled_memory(card: Card, described: list[dict[str, Any]], topology: str) -> None:
    """Add the compiler's memory to each configuration, as its key `compiled`."""
    for row in described:
        found = compile_memory(card, Config(row["config"]), topology)
        row["compiled"] = {
            "topology": topology,
            "memory_gib": found.total_gib,
            "parts_gib": found.parts_gib,
            "refused": found.refused,
        }


def _describe_compiled(described: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [row for row in described if "compiled" in row]
    if not rows:
        return
    yield f"\n  memory of one chip, from the TPU compiler for {rows[0]['compiled']['topology']} (no TPU was used);"
    yield "  the compiled program is the engine's own JAX transformer with AdamW, not the framework's program"
    for row in rows:
        found = row["compiled"]
        parts = ", ".join(f"{name} {gib:.3g}" for name, gib in found["parts_gib"].items() if gib)
        refused = f"not compiled: {one_line(found['refused'], 200)}"
        figure = f"{found['memory_gib']:>9.3f} GiB  ({parts})" if parts else refused
        yield f"    {row['label']}  {figure}"


def draw_predictions(path: Path, described: list[dict[str, Any]], card: Card, prediction: Prediction) -> None:
    """Write a chart of the parts of each configuration, and one of the parts of their memory beside it."""
    from cclsearch.charts.parts import StackedBar, draw_parts
    from cclsearch.report.page import write_picture

    labels = shorten_labels([row["config"] for row in described])
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


def shorten_labels(configs: list[dict[str, Any]]) -> list[str]:
    """Return bar labels: the parallel degrees and every knob in which the configurations differ."""
    labels = {
        name: meaning_of(name).label or name
        for name in configs[0]
        if meaning_of(name).splits or len({str(config.get(name)) for config in configs}) > 1
    }
    return [" ".join(f"{label}={str(c[n]).lower()}" for n, label in labels.items())[:52] for c in configs]
