"""The pages of a night: `summary.md`, and an HTML page that opens offline, with a chart of every job's nights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from cclsearch import __version__
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Provenance, format_config
from cclsearch.draw.axes import Frame, Scale, fit_scale, show_number
from cclsearch.draw.scene import Item, Mark, Role, Scene, Shape, Text
from cclsearch.draw.scene import Path as Line
from cclsearch.draw.svg import palette_css, render_svg
from cclsearch.nightly.assemble import JobNights
from cclsearch.nightly.compare import NightVerdict
from cclsearch.nightly.history import Night, mean_of
from cclsearch.nightly.summary import NightSummary, describe_trials, show_best
from cclsearch.stats.noise import confidence_interval, estimate_noise

HERE = Path(__file__).parent
STYLE = HERE.parent / "report" / "page.css"
WIDTH, LEFT, RIGHT = 880.0, 84.0, 24.0
FOLLOWED: tuple[tuple[Shape, Role], ...] = (("circle", "blue"), ("square", "orange"), ("triangle", "purple"))
"""Marks of the configurations that get a line of their own: those that ran on the most nights."""


def render_night(night: NightSummary, jobs: Sequence[JobNights], history: Sequence[NightSummary]) -> str:
    """Render the page; `history` holds the summaries of earlier nights, the oldest first."""
    charts = [chart for n, job in enumerate(jobs) if (chart := draw_nights(job, n)) is not None]
    return _render(
        "night.html.j2",
        night=night,
        history=[*history, night][::-1],
        charts=[(scene, Markup(render_svg(scene))) for scene in charts],
        palette=Markup(palette_css()),
        style=Markup(STYLE.read_text(encoding="utf-8")),
        version=__version__,
        number=show_number,
        worst=(NightVerdict.REGRESSED, NightVerdict.TROUBLE),
    )


def render_markdown(night: NightSummary) -> str:
    """Content of `summary.md`."""
    return _render("summary.md.j2", night=night)


def _render(template: str, **values: object) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    words = {"show_best": show_best, "describe_trials": describe_trials, "format_config": format_config}
    return environment.get_template(template).render(**words, **values)


def _cell(text: str) -> str:
    """Text from outside as one line of Markdown, with all markup escaped."""
    return re.sub(r"([|<>\[\]`*\\])", r"\\\1", one_line(text, 600))


def draw_nights(job: JobNights, index: int) -> Scene | None:
    """Chart of the best of each night with its interval, and of configurations that ran on several nights."""
    nights = [night for night in job.nights if night.samples]
    if not nights:
        return None
    bests = [(night.best, _mean(night, night.best)) for night in nights if night.best is not None]
    spans = [_span(night) for night in nights]
    followed = _pick_followed(nights)
    values = [value for _, value in bests] + [edge for span in spans if span for edge in span]
    values += [_mean(night, c) for c in followed for night in nights if c in night.samples]
    x = Scale(0.5, len(nights) + 0.5, LEFT, WIDTH - RIGHT)
    frame = Frame(x, fit_scale(values, 300, 58))
    ticks = range(1, len(nights) + 1, max(1, -(-len(nights) // 10)))
    names = [f"{nights[t - 1].stamp[4:6]}-{nights[t - 1].stamp[6:8]}" for t in ticks]
    provenance = job.summary.provenance or ""
    mark = Provenance(provenance).mark
    items = frame.draw("night (month-day, UTC)", job.summary.figure + mark, x_ticks=list(ticks), x_names=names)
    for n, config in enumerate(followed):
        items += _follow(config, nights, frame, n)
    items.append(Line(tuple((x(n + 1), frame.y(value)) for n, (_, value) in enumerate(bests)), "green", 1.8))
    for n, (night, (config, value), span) in enumerate(zip(nights, bests, spans, strict=True)):
        if span:
            items.append(Line(((x(n + 1), frame.y(span[0])), (x(n + 1), frame.y(span[1]))), "green", 1.2))
        tip = f"night {night.stamp}: {show_number(value)}\n{config}"
        items.append(Mark(x(n + 1), frame.y(value), "star", 13, "green", tip=tip))
    items += _legend(followed)
    summary = "; ".join(
        f"{night.stamp[:8]}: {show_number(value)}" for night, (_, value) in zip(nights, bests, strict=True)
    )
    return Scene(f"job-{index}", f"{job.summary.job}, night by night", summary, WIDTH, 350, tuple(items))


def _span(night: Night) -> tuple[float, float] | None:
    if night.run.spec.provenance is not Provenance.MEASURED or night.best is None:
        return None
    noise = estimate_noise([[s.value for s in samples] for samples in night.samples.values()])
    interval = confidence_interval([s.value for s in night.samples[night.best]], noise)
    return night.figure.show(interval.low), night.figure.show(interval.high)


def _mean(night: Night, config: Config) -> float:
    """The compared figure of a configuration that ran."""
    return night.figure.show(mean_of(night.samples[config]))


def _pick_followed(nights: Sequence[Night]) -> list[Config]:
    counts = {config: sum(config in night.samples for night in nights) for n in nights for config in n.samples}
    often = [config for config, count in counts.items() if count > 1]
    return sorted(often, key=lambda config: -counts[config])[: len(FOLLOWED)]


def _follow(config: Config, nights: Sequence[Night], frame: Frame, n: int) -> list[Item]:
    places = [(k + 1, _mean(night, config)) for k, night in enumerate(nights) if config in night.samples]
    points = tuple((frame.x(k), frame.y(value)) for k, value in places)
    shape, role = FOLLOWED[n]
    marks: list[Item] = [
        Mark(px, py, shape, 7, role, hollow=True, tip=f"{config}: {show_number(value)}")
        for (px, py), (_, value) in zip(points, places, strict=True)
    ]
    return [Line(points, role, 1.0, dash=(4, 3)), *marks]


def _legend(followed: Sequence[Config]) -> list[Item]:
    items: list[Item] = [
        Mark(LEFT + 6, 16, "star", 12, "green"),
        Text(LEFT + 18, 20, "best of the night", 12, "start", "muted"),
    ]
    for n, (config, (shape, role)) in enumerate(zip(followed, FOLLOWED, strict=False)):
        y = 16.0 + 15 * n
        text = str(config)
        items.append(Mark(LEFT + 160, y, shape, 7, role, hollow=True))
        items.append(Text(LEFT + 172, y + 4, text if len(text) < 95 else text[:94] + "…", 11, "start", "muted"))
    return items
