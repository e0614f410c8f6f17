"""The pages of a night: `summary.md`, and an HTML page that opens offline, with a chart of every job's nights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cclsearch.charts.chart import Chart
from cclsearch.charts.nights import NightPoint, draw_nights
from cclsearch.core.numbers import show_number
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Provenance, format_config
from cclsearch.nightly.assemble import JobNights
from cclsearch.nightly.compare import NightVerdict
from cclsearch.nightly.history import Night, mean_of
from cclsearch.nightly.summary import NightSummary, describe_trials, show_best
from cclsearch.report.page import place_charts, render_template
from cclsearch.stats.noise import confidence_interval, estimate_noise

HERE = Path(__file__).parent
MAX_FOLLOWED = 3
"""Configurations that get a line of their own: those that ran on the most nights."""
WORDS = {"show_best": show_best, "describe_trials": describe_trials, "format_config": format_config}
"""What templates call."""


def render_night(night: NightSummary, jobs: Sequence[JobNights], history: Sequence[NightSummary]) -> str:
    """Render the page; `history` holds the summaries of earlier nights, the oldest first."""
    charts = [chart for n, job in enumerate(jobs) if (chart := draw_job(job, n)) is not None]
    values = {"night": night, "history": [*history, night][::-1], "number": show_number}
    worst = (NightVerdict.REGRESSED, NightVerdict.TROUBLE)
    placed = place_charts(charts, "n")
    return render_template("night.html.j2", {**values, **WORDS, "worst": worst}, charts=placed, folder=HERE)


def render_markdown(night: NightSummary) -> str:
    """Content of `summary.md`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = _cell
    return environment.get_template("summary.md.j2").render(night=night, **WORDS)


def _cell(text: str) -> str:
    """Text from outside as one line of Markdown, with all markup escaped."""
    return re.sub(r"([|<>\[\]`*\\])", r"\\\1", one_line(text, 600))


def draw_job(job: JobNights, index: int) -> Chart | None:
    """Chart of the best of each night with its interval, and of configurations that ran on several nights."""
    nights = [(night, night.best) for night in job.nights if night.samples and night.best is not None]
    followed = _pick_followed([night for night, _ in nights])
    points = [
        NightPoint(
            night.stamp,
            _mean(night, best),
            str(best),
            _span(night),
            {str(config): _mean(night, config) for config in followed if config in night.samples},
        )
        for night, best in nights
    ]
    mark = Provenance(job.summary.provenance or "").mark if points else ""
    title = f"{job.summary.job}, night by night"
    return draw_nights(points, job.summary.figure + mark, name=f"job-{index}", title=title)


def _span(night: Night) -> tuple[float, float] | None:
    if night.run.spec.provenance is not Provenance.MEASURED or night.best is None:
        return None
    runs = {config: [s.value for s in samples] for config, samples in night.samples.items()}
    own = runs.pop(night.best)
    interval = confidence_interval(own, estimate_noise(list(runs.values()), own=[own]))
    return night.figure.show(interval.low), night.figure.show(interval.high)


def _mean(night: Night, config: Config) -> float:
    """The compared figure of a configuration that ran."""
    return night.figure.show(mean_of(night.samples[config]))


def _pick_followed(nights: Sequence[Night]) -> list[Config]:
    counts = {config: sum(config in night.samples for night in nights) for n in nights for config in n.samples}
    often = [config for config, count in counts.items() if count > 1]
    return sorted(often, key=lambda config: -counts[config])[:MAX_FOLLOWED]
