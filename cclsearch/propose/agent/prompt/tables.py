"""The compact tables of a prompt: trials, failures, candidates, and expected against measured values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cclsearch.core.metrics import PEAK_MEMORY, MetricInfo
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.propose.agent.memory.history import find_choosers, past_turns
from cclsearch.propose.agent.prompt.knob_effects import count_changes
from cclsearch.propose.agent.prompt.quoting import quote_line
from cclsearch.propose.agent.prompt.row_facts import RowFacts
from cclsearch.propose.agent.prompt.surrogate_table import UNLIKELY, SurrogateTable, best_observation, primary_term
from cclsearch.propose.agent.tools.configs import format_config, format_header, format_row
from cclsearch.propose.base import Observation, SearchView

MAX_TRIALS_SHOWN = 60
MAX_RUNNING_SHOWN = 16
NUM_CANDIDATES = 12
"""Candidates that the prompt lists at least."""
MAX_CANDIDATES = 40
"""It lists all, or all that are free, if they are at most so many."""
# The insights and the surrogate contain the lessons of older ones.
MAX_THEORIES = 5
"""Number of shown theories, the latest."""
NUM_WITH_PARTS = 8
"""Length of a list of candidates up to which their parts are listed too."""
FREE_MARK = "*"
"""Mark in the column `free`: the configuration may be submitted without credit."""


def objective_line(view: SearchView, goal: str = "") -> str:
    """The definition of the loss, with its formula if there is one."""
    formula = f"\n{one_line(goal, 600)}" if goal else ""
    term = primary_term(view)
    if term:
        inverse = "1 / " if term.reciprocal else ""
        return f"loss = {inverse}{view.task.describe_primary()}; lower is better{formula}"
    name = quote_line(view.objective.name, 60)
    return f"loss of objective {name}; lower is better (tables also show the {view.primary.words}){formula}"


def trial_lines(view: SearchView, noise: float, facts: RowFacts) -> list[str]:
    """Ranked trials, the best first, then those that violate constraints; the others are in the table of failures."""
    valid = sorted((o for o in view.observations if o.is_valid), key=_order)
    if not valid:
        return []
    primary = [] if view.is_primary else [view.primary.column]
    predicted = [] if facts.prediction is None else [f"closed_form_{view.primary.column}"]
    with_memory = measures_memory(view)
    memory = ["peak_GiB"] if with_memory else []
    shown = [*facts.column_names(), *_bounded_metrics(view)]
    choosers = find_choosers(view)
    names = ["trial by loss", *primary, "vs_best", *predicted, *memory, *shown]
    lines = [f"{' '.join(names)} | {format_header(view.space)}"]
    lines += [
        _trial_line(view, o, choosers, valid[0].loss, noise, facts, with_memory=with_memory)
        for o in valid[:MAX_TRIALS_SHOWN]
    ]
    if len(valid) > MAX_TRIALS_SHOWN:
        worse = "slower" if view.primary.is_time else "worse"
        lines.append(f"({len(valid) - MAX_TRIALS_SHOWN} {worse} trials left out; `trial` shows any)")
    return lines


def trials_title(view: SearchView) -> str:
    """The title of the table of trials, with the meaning of its marks, and that no trial measured memory."""
    marks = "~ = within noise of the best; by = who chose it: you, the surrogate, or a seed of the start"
    return f"TRIALS, best first ({marks}{'' if measures_memory(view) else '; no trial measured its memory'})"


def measures_memory(view: SearchView) -> bool:
    """Whether a trial of the table measured its memory."""
    return any(PEAK_MEMORY in o.metrics for o in view.observations if o.is_valid)


def _order(o: Observation) -> tuple[bool, float, float, int]:
    """Sort key: ranked trials first, then by excess over the constraints, then trials that ended early."""
    return o.is_pruned, o.violation, o.loss or 0.0, o.trial


def _trial_line(
    view: SearchView,
    o: Observation,
    choosers: Mapping[int, str],
    best: float | None,
    noise: float,
    facts: RowFacts,
    *,
    with_memory: bool,
) -> str:
    loss = view.find_loss(o) if o.is_pruned else o.loss
    ratio = loss / best if best and best > 0 and loss is not None else None
    near = "~" if ratio is not None and ratio - 1 <= noise and o.loss != best else ""
    figures = [
        str(o.trial),
        choosers.get(o.trial, "-"),
        "-" if loss is None else f"{loss:.5g}",
        *([] if view.is_primary else [_figure(o.value(view.primary.name))]),
        f"x{ratio:.3f}{near}" if ratio is not None else "-",
        *([] if facts.prediction is None else ["-" if o.row is None else facts.predicted(o.row)]),
        *([_figure(o.metrics.get(PEAK_MEMORY))] if with_memory else []),
        *(["-"] * len(facts.column_names()) if o.row is None else facts.figures(o.row, o.value(view.primary.name))),
        *(_figure(o.metrics.get(name)) for name in _bounded_metrics(view)),
    ]
    notes = (" (repeat)" if o.is_confirmation else "") + (f" ({_violations(view, o)})" if o.violation else "")
    notes += " (ended early: too slow)" if o.is_pruned else ""
    return f"{' '.join(figures)} | {format_row(view.space, _plain_config(view, o))}{notes}"


def _plain_config(view: SearchView, o: Observation) -> Config:
    """A trial's configuration with one value for each knob without effect, as all equal runs are shown."""
    return o.config if o.row is None else view.space.masked_config(o.row)


def _bounded_metrics(view: SearchView) -> list[str]:
    """Metrics of the objective's constraints that have no other column."""
    bounded = dict.fromkeys(bound.metric for bound in view.objective.constraints)
    return [name for name in bounded if name not in {view.primary.name, PEAK_MEMORY}]


def _violations(view: SearchView, o: Observation) -> str:
    """Return the constraints that a trial violates, with the excess of each."""
    bounds = [bound for bound in view.objective.constraints if bound.metric in o.metrics]
    broken = [line for bound in bounds if (line := bound.broken_by(o.metrics[bound.metric]))]
    return f"violates by {o.violation:.1%}: {'; '.join(broken)}"


def failure_lines(view: SearchView, table: SurrogateTable, facts: RowFacts) -> list[str]:
    """Failures by kind: their number, their configurations, and the root message of the latest."""
    by_kind: dict[str, list[Observation]] = {}
    for o in view.observations:
        if not o.is_valid:
            by_kind.setdefault(_kind(o), []).append(o)
    # The columns are named here only if the table of ranked trials, which has the same ones, is missing.
    is_named = not by_kind or any(o.is_valid for o in view.observations)
    lines: list[str] = [] if is_named else [f"trial by | {format_header(view.space)}"]
    choosers = find_choosers(view)
    for kind, failed in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        message = failed[-1].failure.message if failed[-1].failure else _describe_refusal(failed[-1])
        lines.append(f"{kind} x{len(failed)}; latest message: {quote_line(message, 240)}")
        shown = failed[-12:]
        lines += [
            f"  trial {o.trial} {choosers.get(o.trial, '-')} | "
            f"{format_row(view.space, _plain_config(view, o))}{_memory_note(o, table, facts)}"
            for o in shown[::-1]
        ]
        if len(failed) > len(shown):
            lines.append(f"  ({len(failed) - len(shown)} earlier ones left out)")
    return lines


def _describe_refusal(o: Observation) -> str:
    return f"it ran, but was not admitted: {'; '.join(o.refusals) or 'the rule is not known'}"


def _memory_note(o: Observation, table: SurrogateTable, facts: RowFacts) -> str:
    """Return the predicted memory of a failed trial, and the surrogate's present view of its cause."""
    notes = ["" if o.row is None else facts.memory(o.row)]
    if (odds := table.oom_odds.get(o.trial)) is not None:
        notes.append(f"cause unknown; surrogate now: memory {odds:.0%}, something else {1 - odds:.0%}")
    text = "; ".join(filter(None, notes))
    return f" ({text})" if text else ""


def running_lines(view: SearchView) -> list[str]:
    """Configurations of the running trials."""
    shown = sorted(view.pending)[:MAX_RUNNING_SHOWN]
    lines = [format_config(view.space, view.space.config(row)) for row in shown]
    return lines + ([f"({len(view.pending) - len(shown)} more)"] if len(view.pending) > len(shown) else [])


def pick_candidates(view: SearchView, table: SurrogateTable) -> tuple[list[int], int]:
    """The candidates in the order of the prompt, and how many it lists: all if they are few.

    Else the first `NUM_CANDIDATES`, and every one that is free if these are few.
    """
    ranked = table.sort_by_chance(table.listed, view.primary.sign)
    if len(ranked) <= MAX_CANDIDATES:
        return ranked, len(ranked)
    free = {row for row in ranked if table.is_free(row)}
    kept = set(ranked[:NUM_CANDIDATES]) | (free if len(free) <= MAX_CANDIDATES else set())
    return sorted(ranked, key=lambda row: row not in kept), len(kept)


def candidate_lines(
    view: SearchView,
    table: SurrogateTable,
    rows: Iterable[int],
    count: int,
    facts: RowFacts,
    *,
    with_parts: bool = False,
) -> list[str]:
    """Configurations with the surrogate's predictions; with the parts of the closed form of the first, if wanted."""
    chosen = list(rows)
    if not chosen:
        return ["none left"]
    best, metric = best_observation(view), view.primary
    reference = best.value(metric.name) or None if best else None
    optimistic = f"optimistic_{metric.unit}" if metric.short else "optimistic"
    satisfies = "" if table.satisfies_N is None else " P(constraints)"
    wins = "" if table.wins_N is None else " P(wins)"
    changes_N = None if best is None or best.row is None else count_changes(view.space, best.row)
    changed = "" if changes_N is None else " changes"
    head = f"pred_{metric.column} {optimistic} vs_best pred_GiB P(fits){satisfies}{wins} free{changed}"
    head = " ".join([head, *facts.column_names()])
    lines = [f"{head} | {format_header(view.space)}"]
    for row in chosen[:count]:
        satisfies = "" if table.satisfies_N is None else f" {table.satisfies_N[row]:.2f}"
        versus = f"x{(table.value_N[row] / reference) ** metric.sign:.3f}" if reference else "-"
        memory = f"{table.memory_gib_N[row]:.3g}".replace("nan", "-")
        wins = "" if table.wins_N is None else f" {table.wins_N[row]:.3f}"
        free = FREE_MARK if table.is_free(row) else "-"
        changed = "" if changes_N is None else f" {changes_N[row]}"
        figures = "".join(f" {text}" for text in facts.figures(row, float(table.value_N[row])))
        parts = facts.parts(row) if with_parts and len(lines) <= NUM_WITH_PARTS else ""
        lines.append(
            f"{table.value_N[row]:.4g} {table.optimistic_N[row]:.4g} {versus} {memory} "
            f"{table.fits_N[row]:.2f}{satisfies}{wins} {free}{changed}{figures} | "
            f"{format_row(view.space, view.space.config(row))}"
        )
        lines += [f"  closed form of it: {parts}"] if parts else []
    if len(chosen) > count:
        lines.append(f"({len(chosen) - count} more; `candidates` lists others)")
    return lines


def unlikely_lines(table: SurrogateTable) -> list[str]:
    """Return how many candidates are not listed because they almost certainly do not fit."""
    count = len(table.order) - len(table.listed)
    return [f"({count} with P(fits) under {UNLIKELY:.0%} are not listed)"] if count else []


def theory_lines(view: SearchView) -> list[str]:
    """Return each submitted configuration's purpose, its refutation and its result, latest first."""
    metric = view.primary
    seen = {o.config.digest: o for o in view.observations if not o.is_confirmation}
    worse = "above" if metric.sign > 0 else "below"
    lines = []
    for turn in past_turns(view.events)[::-1]:
        for item in turn.submitted[::-1]:
            if (o := seen.pop(item.config.digest, None)) is None:
                continue  # not finished, or listed with a later turn
            value, limit = o.value(metric.name), item.refuted_at
            if value is None:
                verdict = f"FAILED ({_kind(o)})"
            elif limit is None:
                verdict = "you named no value that would refute it"
            else:
                verdict = "REFUTED" if metric.sign * value > metric.sign * limit else "holds"
            said = "" if limit is None else f", refuted {worse} {metric.show(limit)}"
            ours = item.predicted.metrics.get(metric.name)
            surrogate = "" if ours is None else f", surrogate {metric.show(ours)}"
            expects = item.expects.metrics
            expected = _figures(metric, expects.get(metric.name), expects.get(PEAK_MEMORY))
            got = _figures(metric, value, o.metrics.get(PEAK_MEMORY))
            why = f" | {quote_line(item.rationale, 160)}" if item.rationale else ""
            error = _error(expects.get(metric.name), o, metric.name)
            lines.append(f"trial {o.trial}: expected {expected}{surrogate}{said}; got {got}{error}: {verdict}{why}")
    older = len(lines) - MAX_THEORIES
    return lines[:MAX_THEORIES] + ([f"({older} older ones left out)"] if older > 0 else [])


def trial_summary(view: SearchView, o: Observation) -> str:
    """One trial in one line."""
    metric = view.primary
    measured = f"{metric.short or metric.words} {metric.show(o.value(metric.name))}"
    loss = _violations(view, o) if o.loss is None else f"loss {o.loss:.5g}"
    end = f"{loss}, {measured}" if o.is_valid else _kind(o)
    parts = [f"trial {o.trial}: {format_config(view.space, _plain_config(view, o))}: {end}, {describe_memory(view, o)}"]
    parts += [f"{metric.words}{'s' if metric.is_time else ''} spread {o.spread:.1%}"] if o.spread is not None else []
    parts += [f"message: {quote_line(o.failure.message, 300)}"] if o.failure else []
    parts += [quote_line(_describe_refusal(o), 300)] if o.is_unjudged else []
    return ", ".join(parts)


def describe_memory(view: SearchView, o: Observation) -> str:
    """`memory 61.2 of 80 GiB (24% free)`, for the device that used most."""
    peak, whole = o.metrics.get(PEAK_MEMORY), view.card.hardware.memory_gib
    if peak is None:
        return "memory not measured"
    return f"memory {peak:.4g} of {whole:g} GiB ({1 - peak / whole:.0%} free)"


def _figures(metric: MetricInfo, value: float | None, memory_gib: float | None) -> str:
    return f"{metric.show(value)}, {_figure(memory_gib)} GiB"


def _kind(o: Observation) -> str:
    return o.failure.kind.value if o.failure else "not_admitted"


def _error(expected: float | None, o: Observation, metric: str) -> str:
    measured = o.value(metric) or o.loss
    if expected is None or measured is None or not measured:
        return ""
    ratio = measured / expected
    return f" (measured {ratio:.2g} x the expected)"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
