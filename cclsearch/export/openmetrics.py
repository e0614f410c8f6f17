"""Searches as OpenMetrics text, which Prometheus and most monitoring systems read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.propose.events import LlmTurn
from cclsearch.record.trial import TrialState, count_states
from cclsearch.report.figures import find_figure
from cclsearch.report.gather import TOKENS
from cclsearch.run.folder import Run
from cclsearch.run.usage import sum_node_hours

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
LABELS = ("run", "workload", "framework", "provenance")
"""Labels of every figure. `provenance` is measured, recorded or simulated."""


def render_openmetrics(runs: Iterable[Run], now_s: float) -> str:
    """Return the figures of searches at a time in seconds since 1970; raises UserError without `prometheus_client`."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError:
        raise UserError(
            "prometheus_client is not installed: run `pip install 'ccl-search[openmetrics]'` or"
            " `pip install prometheus-client`"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Searches(list(runs), now_s))  # type: ignore[arg-type]  # any object with `collect` is one
    text: bytes = generate_latest(registry)
    return text.decode()


class _Searches:
    """Collector for `prometheus_client`."""

    def __init__(self, runs: list[Run], now_s: float) -> None:
        self._runs, self._now_s = runs, now_s

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        def gauge(name: str, what: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"ccl_search_{name}", what, labels=[*LABELS, *labels])

        trials = gauge("trials", "Trials of the search by their state.", "state")
        budget = gauge("budget_trials", "Trials that the search may use.")
        spent = gauge("spent_trials", "Trials that count against the budget so far.")
        running = gauge("running", "1 while a process runs the search, else 0.")
        best = gauge("best", "What the search optimizes, of the best trial so far, in the unit.", "metric", "unit")
        best_trial = gauge("best_trial", "Number of the best trial so far.")
        hours = gauge("node_hours", "Nodes times hours of all attempts so far; 0 if nothing is measured.")
        tokens = gauge("llm_tokens", "Tokens of the LLM so far.", "kind")
        usd = gauge("llm_cost_usd", "Cost of the LLM so far in US dollars, where its price is known.")
        started = gauge("started_timestamp_seconds", "When the search began, in seconds since 1970.")
        changed = gauge("last_event_timestamp_seconds", "When the ledger last gained an event, in seconds since 1970.")
        for run in self._runs:
            spec, state = run.spec, run.state
            labels = [_label(text) for text in (spec.run_id, spec.workload, spec.framework, spec.provenance.value)]
            counts = count_states(state.trials.values())
            for kind in TrialState:
                trials.add_metric([*labels, kind.value], counts[kind])
            budget.add_metric(labels, max(spec.limits.budget, state.budget_raised_to))
            spent.add_metric(labels, state.num_spent)
            running.add_metric(labels, run.is_running)
            figure = find_figure(spec)
            value = figure.value(state.best) if state.best else None
            if state.best is not None and value is not None:
                best.add_metric([*labels, _label(figure.metric.name), _label(figure.metric.unit or "")], value)
                best_trial.add_metric(labels, state.best.number)
            hours.add_metric(labels, sum_node_hours(spec, state, self._now_s if run.is_running else state.last_s))
            turns = [event for event in state.reported if isinstance(event, LlmTurn)]
            if turns:
                for kind_of_tokens in TOKENS:
                    used = sum(getattr(turn.cost.usage, f"{kind_of_tokens}_tokens") for turn in turns)
                    tokens.add_metric([*labels, kind_of_tokens], used)
                usd.add_metric(labels, sum(turn.cost.usd or 0.0 for turn in turns))
            started.add_metric(labels, state.started_s)
            changed.add_metric(labels, state.last_s)
        yield from (trials, budget, spent, running, best, best_trial, hours, tokens, usd, started, changed)


def _label(text: str) -> str:
    return re.sub(r"[^\x20-\U0010ffff]", "?", one_line(redact(text)))
