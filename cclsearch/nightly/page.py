"""The pages of a night: `summary.md`, and an HTML page that opens offline, with a chart of every job's nights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import NightPoint, draw_nights
from cclsearch.core.templates import open_templates
from cclsearch.core.text import one_line, show_number
from cclsearch.core.values import Provenance, format_config
from cclsearch.nightly.compare import NightVerdict
from cclsearch.nightly.summary import JobSummary, NightSummary, describe_trials, show_best
from cclsearch.report.page import place_charts, render_template

HERE = Path(__file__).parent
MAX_FOLLOWED = 3
"""Number of configurations with a line of their own: those that ran on the most nights."""
WORDS = {"show_best": show_best, "describe_trials": describe_trials, "format_config": format_config}
"""Functions that templates call."""


def render_night(night: NightSummary, history: Sequence[NightSummary]) -> str:
    """Render the page; `history` holds the summaries of earlier nights, the oldest first."""
    charts = list(draw_series([*history, night]).values())
    values = {"night": night, "history": [*history, night][::-1], "number": show_number}
    worst = (NightVerdict.REGRESSED, NightVerdict.TROUBLE)
    placed = place_charts(charts, "n")
    return render_template("night.html.j2", {**values, **WORDS, "worst": worst}, charts=placed, folder=HERE)


def render_markdown(night: NightSummary) -> str:
    """Content of `summary.md`."""
    environment = open_templates(HERE)
    environment.filters["cell"] = _cell
    return environment.get_template("summary.md.j2").render(night=night, **WORDS)


def _cell(text: str) -> str:
    """Text from outside as one line of Markdown, with all markup escaped."""
    return re.sub(r"([|<>\[\]`*\\])", r"\\\1", one_line(text, 600))


def draw_series(nights: Sequence[NightSummary]) -> dict[str, Chart]:
    """Per job, by the name of its chart: the best of each night, and configurations that ran on several nights.

    `nights` begins with the oldest.
    """
    charts: dict[str, Chart] = {}
    for place, name in enumerate(dict.fromkeys(job.job for night in nights for job in night.jobs)):
        found = [(night.night, one, one.best) for night in nights for one in night.jobs if one.job == name and one.best]
        if not found:
            continue
        newest = found[-1][1]
        shown = [each for each in found if (each[1].figure, each[1].unit) == (newest.figure, newest.unit)]
        figures = [list_figures(one) for _, one, _ in shown]
        counts = Counter(config for by_config in figures for config in by_config)
        followed = [config for config, count in counts.most_common(MAX_FOLLOWED) if count > 1]
        points = [
            NightPoint(
                night=night,
                value=best.value,
                config=format_config(best.config),
                interval=(best.low, best.high) if best.low is not None and best.high is not None else None,
                followed={config: by_config[config] for config in followed if config in by_config},
            )
            for (night, _, best), by_config in zip(shown, figures, strict=True)
        ]
        mark = Provenance(newest.provenance).mark if newest.provenance else ""
        words = newest.figure.removesuffix(f"_{newest.unit}").replace("_", " ")
        title = f"{words} ({newest.unit}){mark}" if newest.unit else words + mark
        chart = draw_nights(points, title, name=f"nights{place}", title=f"{name}, night by night")
        charts |= {chart.name: chart} if chart is not None else {}
    return charts


def list_figures(job: JobSummary) -> dict[str, float]:
    """Configuration -> its figure in this night: of the best, and of those that ran on earlier nights too."""
    changes = (*job.worse, *job.better, *job.same)
    figures = {format_config(change.config): change.now for change in changes if change.now is not None}
    return figures | ({format_config(job.best.config): job.best.value} if job.best else {})
