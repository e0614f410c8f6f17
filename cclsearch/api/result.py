"""A search as users of the Python API see it: its best configuration, its trials as a table, its report."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cclsearch.analysis.report_pages import build_page, draw_pareto_charts
from cclsearch.api.inputs import as_path
from cclsearch.core.values import Value
from cclsearch.export.tables import tabulate_run
from cclsearch.report.gather import gather_run
from cclsearch.report.page import render_page
from cclsearch.report.summary import summarize_run
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import Run, load_run

if TYPE_CHECKING:
    import pandas as pd

FRAME_HEIGHT_PX = 640
"""Height of the report in a notebook."""


@dataclass(frozen=True)
class BestTrial:
    """The best trial of a search."""

    trial: int
    config: dict[str, Value]
    metrics: dict[str, float]
    """Measured metrics and those that follow from them, by name."""
    loss: float
    """Value that the search minimizes."""


@dataclass(frozen=True)
class SearchResult:
    """A search in its folder; each look reads the folder, so a running search can be watched from another process."""

    folder: Path

    @property
    def run(self) -> Run:
        """The run as the engine reads it."""
        return load_run(self.folder)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.name

    @property
    def status(self) -> str:
        """`running`, `ended`, `stopped` or `killed`."""
        return str(self.run.status)

    @property
    def provenance(self) -> str:
        """Origin of the figures: `measured`, `caller-measured`, `recorded` or `simulated`."""
        return str(self.run.spec.provenance)

    @property
    def best(self) -> BestTrial | None:
        """The best trial that is admitted; None before there is one."""
        best = self.run.state.best
        if best is None or best.outcome is None or best.loss is None:
            return None
        return BestTrial(best.number, dict(best.config), dict(best.outcome.metrics), best.loss)

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row per trial: configuration (`config.*`), state, reason and metrics (`metric.*`)."""
        return tabulate_run(gather_run(self.run))

    def summary(self) -> str:
        """Return the result in lines of text, as the command line prints it."""
        run = self.run
        return "\n".join(summarize_run(run.spec, run.state, run.folder))

    def report(self) -> str:
        """Return the report as one HTML page that needs no network, as `ccl-search report` writes it."""
        run = self.run
        return render_page([build_page(run)], extra_charts=draw_pareto_charts([run]))

    def _repr_html_(self) -> str:
        """Return the summary and the report, which a notebook shows in a frame without access to the notebook."""
        page = html.escape(self.report(), quote=True)
        frame = f'<iframe srcdoc="{page}" sandbox="allow-scripts" width="100%" height="{FRAME_HEIGHT_PX}"></iframe>'
        return f"<pre>{html.escape(self.summary())}</pre>{frame}"

    def __repr__(self) -> str:
        return f"<search {self.name}: {self.status}>\n{self.summary()}"


def open_run(
    name: str | os.PathLike[str] = "last", *, runs_folder: str | os.PathLike[str] | None = None
) -> SearchResult:
    """Return the run of that name or folder; `last` is the one that was written to most recently."""
    folder = find_run(os.fspath(name), as_path(runs_folder))
    load_run(folder)
    return SearchResult(folder)
