"""Exports a run as a table (CSV, Parquet) or an Optuna study."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclsearch.core.atomic_file import replacing
from cclsearch.core.errors import UserError, require_writable, writing_to
from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.text import one_line
from cclsearch.core.values import Value
from cclsearch.record.trial import TrialState
from cclsearch.report.data import RunPage
from cclsearch.report.gather import gather_run
from cclsearch.report.pareto import escape_formula
from cclsearch.report.rows import TrialRow
from cclsearch.run.folder import Run
from cclsearch.scoring.objective import Objective
from cclsearch.study.mapping import name_values

if TYPE_CHECKING:
    import pandas as pd


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
    """Write the run as a study in an SQLite file that optuna-dashboard opens; returns the URL of the storage.

    Ranked trials are COMPLETE with their loss (for a Pareto objective one value per metric, in its own direction).
    Failed trials and trials that were not admitted are FAIL, those that ended early PRUNED, with the reason in their
    attributes. Running trials are left out.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with _creating(path) as partial:
            _fill_study(gather_run(run), run.spec.objective, f"sqlite:///{partial.absolute()}")
    except (SQLAlchemyError, StorageInternalError) as error:
        raise UserError(f"cannot write {str(path)!r}: {one_line(str(error), 200)}") from None
    return f"sqlite:///{path.absolute()}"


def _fill_study(page: RunPage, objective: Objective, url: str) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(url)
    directions = [term.direction.value for term in objective.terms] if objective.is_multi else ["minimize"]
    study = optuna.create_study(storage=storage, study_name=page.run_id, directions=directions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(name_values(objective))
    for key in ("workload", "work", "hardware", "framework", "provenance", "objective"):
        study.set_user_attr(key, getattr(page, key))
    distributions = _distributions(page)
    finished = [row for row in page.trials if row.state is not TrialState.UNFINISHED]
    study.add_trials([_as_optuna(row, objective, distributions) for row in finished])
    storage.engine.dispose()


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


def _distributions(page: RunPage) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution

    tried: dict[str, dict[tuple[str, Value], Value]] = {}
    for trial in page.trials:
        for knob, value in trial.config.items():
            tried.setdefault(knob, {})[type(value).__name__, value] = value
    return {knob: CategoricalDistribution([values[key] for key in sorted(values)]) for knob, values in tried.items()}


def _as_optuna(row: TrialRow, objective: Objective, distributions: dict[str, Any]) -> Any:
    from optuna.trial import TrialState as State
    from optuna.trial import create_trial

    ranked = row.state is TrialState.ADMITTED
    values: list[float] | None = None
    if ranked and objective.is_multi:
        values = [row.metrics[term.metric] * term.scale for term in objective.terms]
    elif row.loss is not None:
        values = [row.loss]
    state = {TrialState.ADMITTED: State.COMPLETE, TrialState.PRUNED: State.PRUNED}.get(row.state, State.FAIL)
    attributes: dict[str, Any] = {"number": row.number, "proposer": row.proposer, "purpose": row.purpose.value}
    attributes |= {key: text for key in ("reason", "rationale", "failure_kind") if (text := getattr(row, key))}
    attributes |= dict(row.metrics)
    return create_trial(
        state=state,
        values=values,
        params=dict(row.config),
        distributions={knob: distributions[knob] for knob in row.config},
        user_attrs=attributes,
    )


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
