"""Exports runs as a table (CSV, Parquet), an Optuna study, or OpenMetrics text, which Prometheus reads."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclsearch.core.atomic_file import replacing
from cclsearch.core.errors import UserError, require_writable, writing_to
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Value
from cclsearch.propose.events import LlmTurn
from cclsearch.record.trial import TrialState
from cclsearch.report.data import RunPage
from cclsearch.report.figures import find_figure
from cclsearch.report.gather import TOKENS, gather_run
from cclsearch.report.pareto import escape_formula
from cclsearch.report.rows import TrialRow
from cclsearch.run.folder import Run
from cclsearch.run.usage import sum_node_hours
from cclsearch.space.table import Knob
from cclsearch.study.view import STUDY_FILE, StudyView

if TYPE_CHECKING:
    import pandas as pd
    from prometheus_client.metrics_core import Metric


def tabulate_run(page: RunPage) -> pd.DataFrame:
    """A table with one row per trial: configuration (`config.*`), result, and every metric (`metric.*`).

    A figure that was not measured is missing, never 0.
    """
    import pandas as pd

    frame = pd.DataFrame([_flatten(page, trial) for trial in page.trials])
    return frame.convert_dtypes() if len(frame) else frame


def write_csv(run: Run, path: Path) -> None:
    """Write the table as CSV in UTF-8; text that a spreadsheet would read as a formula gets a leading quote."""
    table = tabulate_run(gather_run(run))
    for column in table.columns:
        if table[column].dtype.name in ("object", "string", "str"):
            table[column] = table[column].map(escape_formula, na_action="ignore")
    with _creating(path) as partial:
        table.to_csv(partial, index=False)


def write_parquet(run: Run, path: Path) -> None:
    """Write the table as Parquet; raises UserError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError("Parquet needs pyarrow: `pip install pyarrow`, or use `--to csv`") from None
    with _creating(path) as partial:
        tabulate_run(gather_run(run)).to_parquet(partial, index=False)


def write_optuna(run: Run, path: Path) -> str:
    """Write the run's study (`study/mapping.py`) as an SQLite file that optuna-dashboard opens; returns its URL."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    def refuse(problem: str) -> None:
        raise UserError(f"cannot write {str(path)!r}: {problem}")

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with _creating(path) as partial, tempfile.TemporaryDirectory(prefix="ccl-search-") as scratch:
            StudyView(Path(scratch), run.spec, _list_tried(run), refuse).open(run.state)
            journal = optuna.storages.journal.JournalFileBackend(str(Path(scratch, STUDY_FILE)))
            source = optuna.storages.JournalStorage(journal)
            storage = optuna.storages.RDBStorage(f"sqlite:///{partial.absolute()}")
            [name] = optuna.get_all_study_names(source)
            optuna.copy_study(
                from_study_name=name, from_storage=source, to_storage=storage, to_study_name=run.spec.run_id
            )
            storage.engine.dispose()
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise UserError(f"cannot write {str(path)!r}: {one_line(str(error), 200)}") from None
    return f"sqlite:///{path.absolute()}"


def _list_tried(run: Run) -> list[Knob]:
    """The knobs with the values that were tried: the space may not be here, such as with another's framework."""
    tried: dict[str, dict[tuple[str, Value], Value]] = {}
    for trial in run.state.trials.values():
        for knob, value in trial.config.items():
            tried.setdefault(knob, {})[type(value).__name__, value] = value
    return [Knob(name, tuple(values[key] for key in sorted(values))) for name, values in tried.items()]


def _flatten(page: RunPage, trial: TrialRow) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": page.run_id,
        "trial": trial.number,
        "provenance": page.provenance,
        "purpose": trial.purpose.value,
        "proposer": trial.proposer,
        "state": trial.kind,
        "failure_kind": trial.failure_kind or None,
        "reason": trial.reason or None,
        "loss": trial.loss,
        "score": trial.score,
        **({"violation": trial.violation} if page.constraints else {}),
        "spread": trial.spread,
        **{f"expected_{name}": trial.expected.get(name) for name in (page.metric.name, PEAK_MEMORY)},
        "wall_s": trial.wall_s,
        "accelerator_hours": trial.accelerator_hours,
        "is_best": trial.number == page.best,
        "rationale": trial.rationale or None,
        "evidence": trial.evidence,
    }
    row |= {f"config.{knob}": value for knob, value in trial.config.items()}
    return row | {f"metric.{name}": value for name, value in sorted(trial.metrics.items())}


@contextlib.contextmanager
def _creating(path: Path) -> Iterator[Path]:
    """A temporary file that becomes `path`; raises UserError if the file exists or cannot be written."""
    with writing_to(path):
        if path.exists():
            raise UserError(f"{str(path)!r} exists already: remove it, or name another file with --out")
        path.parent.mkdir(parents=True, exist_ok=True)
    require_writable(path, "--out")
    with writing_to(path), replacing(path) as partial:
        yield partial


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
            counts = state.trials.counts
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
