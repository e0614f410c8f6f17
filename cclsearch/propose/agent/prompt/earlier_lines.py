"""Describe earlier searches on the same cluster with the same framework for the LLM."""

from __future__ import annotations

from cclsearch.propose.agent.prompt.quoting import quote_line
from cclsearch.propose.base import SearchView


def earlier_lines(view: SearchView, *, anonymous: bool) -> list[str]:
    """Return the insights of earlier LLMs, each with its origin; without names if the prompt must not name origins."""
    if view.earlier is None or not view.earlier.has_insights:
        return []
    lines = []
    for number, search in enumerate(view.earlier.searches, 1):
        name = f"search {number}" if anonymous else f"{search.run_id} (work {quote_line(search.workload, 60)})"
        lines += [f"{name}: {quote_line(text, 300)}" for text in reversed(search.insights)]
        said = "; ".join(f"{part}: {factor.replace('_', ' ')}" for part, factor in search.beliefs.items())
        lines += [f"{name} corrected: {quote_line(said, 300)}"] if said else []
    return lines
