"""Answer the model's look-ups of configurations and trials. No argument of a call is trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.propose.agent.decision import ToolReply
from cclsearch.propose.agent.memory.evidence import EvidenceSource, TrialEvidence, describe_evidence, fit_evidence
from cclsearch.propose.agent.prompt.quoting import clip_bytes, redact_strings
from cclsearch.propose.agent.prompt.row_facts import RowFacts, read_row_facts
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable, best_observation
from cclsearch.propose.agent.prompt.tables import candidate_lines, trial_summary
from cclsearch.propose.agent.providers.types import ToolCall
from cclsearch.propose.agent.tools.configs import CallError, format_config, nearest_rows, read_config, read_value
from cclsearch.propose.agent.tools.suppose import describe_supposed
from cclsearch.propose.agent.tools.tool_schemas import (
    BY_CHANCE,
    FACTORS,
    LOOKUPS,
    MAX_LISTED,
    MAX_PREDICTED,
    SHOWS,
    sort_orders,
)
from cclsearch.propose.base import SearchView

Explain = Callable[[Config], Sequence[str]]
"""The rules that a configuration violates, one line each; empty if it violates none."""

NOT_TRACED = "no trace: its parts are predicted, not measured"
MAX_REPLY_BYTES = 2400
"""Bytes of one look-up's result."""


@dataclass
class Lookups:
    """Look-ups of one turn; they also record the evidence and explanations that they used."""

    view: SearchView
    table: SurrogateTable
    evidence: EvidenceSource
    explain: Explain | None = None
    looked_up: dict[int, TrialEvidence] = field(default_factory=dict)
    has_traces: bool = False
    """Whether traces and the documentation may be asked."""
    recorded: dict[str, str] = field(default_factory=dict)
    """Look-up and its arguments -> its text, of those that ask more than the view and the table."""
    max_bytes: int = MAX_REPLY_BYTES
    """Bytes of the current reply."""

    def lookups(self) -> dict[str, Callable[[dict[str, Any]], ToolReply]]:
        """Return look-up tool -> the function that answers its arguments."""
        return {
            "predict": self._predict,
            "suppose": self._suppose,
            "explain": self._explain,
            "trial": self._trial,
            "compare": self._compare,
            "candidates": self._candidates,
            **({"trace": self._trace, "search_docs": self._search_docs} if self.has_traces else {}),
        }

    def find_shown(self) -> dict[int, TrialEvidence]:
        """Return the evidence of the best and of the last trial, which the prompt shows without a look-up."""
        last = max(self.view.observations, key=lambda o: o.trial, default=None)
        trials = [o.trial for o in (best_observation(self.view), last) if o]
        return {trial: found for trial in trials if (found := self.find_evidence(trial))}

    def is_lookup(self, call: ToolCall) -> bool:
        """Whether the call is a look-up, not a decision."""
        return call.name in LOOKUPS

    def find_evidence(self, trial: int) -> TrialEvidence | None:
        """Return the evidence of that trial, and keep it for the turn record."""
        if trial not in self.looked_up:
            found = self.evidence.find(trial)
            if found is not None:
                self.looked_up[trial] = found
        return self.looked_up.get(trial)

    def _predict(self, arguments: dict[str, Any]) -> ToolReply:
        raw = arguments.get("configurations")
        if not isinstance(raw, list) or not raw:
            raise CallError("configurations must be a list of configurations")
        lines = [self._predict_one(item) for item in raw[:MAX_PREDICTED]]
        if len(raw) > MAX_PREDICTED:
            lines.append(f"({len(raw) - MAX_PREDICTED} left out: at most {MAX_PREDICTED} a call)")
        return ToolReply("\n".join(lines))

    def _predict_one(self, raw: object) -> str:
        try:
            config = read_config(self.view.space, raw)
        except CallError as error:
            return str(error)
        row = self.view.space.row(config)
        if row is None:
            return f"{format_config(self.view.space, config)}: {self._explain_illegal(config)}"
        return self._describe_row(row)

    def _describe_row(self, row: int) -> str:
        tried = next((o for o in self.view.observations if o.row == row), None)
        if tried:
            return "already tried: " + trial_summary(self.view, tried)
        table, show = self.table, self.view.primary.show
        satisfies = "" if table.satisfies_N is None else f", P(constraints) {table.satisfies_N[row]:.2f}"
        state = " (running, or held back)" if self.view.is_closed(row) else ""
        memory = f"{table.memory_gib_N[row]:.3g} GiB".replace("nan GiB", "unknown")
        return (
            f"{format_config(self.view.space, self.view.space.config(row))}: predicted "
            f"{show(table.value_N[row])} (optimistic {show(table.optimistic_N[row])}), "
            f"memory {memory}, P(fits) {table.fits_N[row]:.2f}{satisfies}{state}{self._describe_facts(row)}"
        )

    def _describe_facts(self, row: int) -> str:
        """Describe a row without a trial: its figures, and the parts of the closed form."""
        facts, value = self._facts, float(self.table.value_N[row])
        figures = zip(facts.column_names(), facts.figures(row, value), strict=True)
        named = [f"{name} {figure}" for name, figure in figures]
        parts = facts.parts(row)
        named += [f"closed form {facts.predicted(row)} before any trial, of it {parts}"] if parts else []
        memory = facts.memory_parts(row)
        named += [f"memory by the closed form before any trial: {memory}"] if memory else []
        return "".join(f", {text}" for text in named)

    @cached_property
    def _facts(self) -> RowFacts:
        return read_row_facts(self.view)

    def _explain(self, arguments: dict[str, Any]) -> ToolReply:
        config = read_config(self.view.space, arguments.get("config"))
        row = self.view.space.row(config)
        return ToolReply(
            self._explain_illegal(config) if row is None else f"in the search space. {self._describe_row(row)}"
        )

    def _trial(self, arguments: dict[str, Any]) -> ToolReply:
        best = best_observation(self.view)
        number = arguments.get("trial")
        reference = best.trial if best and best.trial != number else None
        return self._describe_trial(number, self.max_bytes, reference=reference, against="the best")

    def _compare(self, arguments: dict[str, Any]) -> ToolReply:
        a, b = arguments.get("a"), arguments.get("b")
        reference = next((o.trial for o in self.view.observations if o.trial == b and b != a), None)
        difference = self._describe_difference(a, b)
        half = (self.max_bytes - len(difference.encode())) // 2 - 2
        first = self._describe_trial(a, half, reference=reference, against=f"trial {reference}")
        second = self._describe_trial(b, half)
        return ToolReply("\n\n".join(filter(None, (first.text, second.text, difference))), first.fault or second.fault)

    def _describe_difference(self, a: object, b: object) -> str:
        """Return the closed form's difference of two trials, part by part; empty without one."""
        rows = {o.trial: o.row for o in self.view.observations if o.trial in (a, b) and o.row is not None}
        if len(rows) < 2:
            return ""
        found = self._facts.differences(rows[a], rows[b])  # type: ignore[index]
        return f"closed form of trial {a} less that of trial {b} (predicted, not measured): {found}" if found else ""

    def _describe_trial(
        self, number: object, max_bytes: int, *, reference: int | None = None, against: str = ""
    ) -> ToolReply:
        found = [o for o in self.view.observations if o.trial == number]
        if not found or isinstance(number, bool):
            trials = ", ".join(str(o.trial) for o in self.view.observations[-30:]) or "none yet"
            return ToolReply(
                f"trial {one_line(repr(number), 30)} has not finished or does not exist; finished trials: {trials}",
                "malformed",
            )
        row = found[0].row
        parts = self._facts.parts(row) if row is not None else ""
        closed_form = (
            f", closed form {self._facts.predicted(row)}, predicted parts: {parts}" if row is not None and parts else ""
        )
        memory = self._facts.memory(row) if row is not None and not found[0].is_valid else ""
        whole = trial_summary(self.view, found[0]) + closed_form + (f", {memory}" if memory else "")
        summary = clip_bytes(whole, max(max_bytes // 2, 200))
        evidence = self.find_evidence(found[0].trial)
        if parts and not (evidence and evidence.seconds_by_cause):
            summary += f", {NOT_TRACED}"
        if evidence is None:
            return ToolReply(summary)
        other = self.find_evidence(reference) if reference is not None else None
        diagnosis = describe_evidence(evidence, other, against=against)
        left = max_bytes - len(summary.encode())
        return ToolReply("\n".join([summary, *fit_evidence(diagnosis, evidence.log_tail, left)]))

    def _candidates(self, arguments: dict[str, Any]) -> ToolReply:
        rows = ~self.view.taken_N
        where = arguments.get("where") or {}
        if not isinstance(where, Mapping):
            raise CallError("where must be an object: knob -> list of values")
        for name, wanted in where.items():
            knob = next((knob for knob in self.view.space.knobs if knob.name == name), None)
            if knob is None:
                raise CallError(f"unknown knob {one_line(str(name), 40)!r}")
            values = wanted if isinstance(wanted, list) else [wanted]
            keep = [knob.choices.index(value) for value in (read_value(knob, v) for v in values) if value is not None]
            rows &= np.isin(self.view.space.codes_NK[:, self.view.space.knobs.index(knob)], keep)
        least = arguments.get("min_fits")
        if not isinstance(least, int | float) or isinstance(least, bool):
            least = self.table.least_fits
        rows &= self.table.fits_N >= min(max(least, 0), 2)
        sort = arguments.get("sort", BY_CHANCE)
        ordered = self._sorted(rows, sort)
        limit = arguments.get("limit")
        count = min(max(limit, 1), MAX_LISTED) if isinstance(limit, int) and not isinstance(limit, bool) else 10
        orders = sort_orders(self.view)
        by = sort if sort in orders else orders[0]
        return ToolReply(f"{len(ordered)} match, sorted by {by}\n" + "\n".join(self._list(ordered, count)))

    def _list(self, rows: Sequence[int], count: int) -> list[str]:
        return candidate_lines(self.view, self.table, rows, count, self._facts, with_parts=True)

    def _sorted(self, rows: Any, sort: object) -> list[int]:
        costs = (self.view.primary.sign * self.table.value_N, self.table.memory_gib_N, -self.table.fits_N)
        _, promise, *orders = sort_orders(self.view)
        key = next((cost for order, cost in zip(orders, costs, strict=True) if order == sort), None)
        if key is None:
            kept = [row for row in self.table.order if rows[row]]
            return kept if sort == promise else self.table.sort_by_chance(kept, self.view.primary.sign)
        chosen = np.flatnonzero(rows)
        return [int(row) for row in chosen[np.argsort(key[chosen], kind="stable")]]

    def _explain_illegal(self, config: Config) -> str:
        rules = self._record("explain", config.digest, lambda: "; ".join(self._list_rules(config)))
        near = nearest_rows(self.view.space, config, self.table.listed)
        listed = "; ".join(format_config(self.view.space, self.view.space.config(row)) for row in near)
        why = f": {rules}" if rules else ""
        return f"not in the search space{why}. Nearest untried configurations: {listed or 'none'}"

    def _list_rules(self, config: Config) -> list[str]:
        return [one_line(line, 200) for line in (self.explain(config) if self.explain else ())][:4]

    def _record(self, name: str, arguments: object, answer: Callable[[], str]) -> str:
        """Return the text of a look-up that a replay repeats from its record."""
        key = f"{name} {json.dumps(redact_strings(arguments), sort_keys=True, default=str)}"
        if key not in self.recorded:
            self.recorded[key] = redact(answer())
        return self.recorded[key]

    def _trace(self, arguments: dict[str, Any]) -> ToolReply:
        show, trials = (
            arguments.get("show"),
            [n for n in (arguments.get("trial"), arguments.get("with")) if n is not None],
        )
        finished = {o.trial for o in self.view.observations}
        if show not in SHOWS or not trials or not all(type(n) is int and n in finished for n in trials):
            raise CallError(f"trace needs a finished trial, and show as one of {', '.join(SHOWS)}")
        factors = [_read_factor(arguments.get(name, 1.0)) for name in FACTORS]
        if (show == "difference") != (len(trials) == 2):
            raise CallError("`with` names the second trial of show=difference, and of nothing else")
        return ToolReply(self._record("trace", arguments, lambda: self.evidence.inspect(trials, str(show), factors)))

    def _search_docs(self, arguments: dict[str, Any]) -> ToolReply:
        words = one_line(str(arguments.get("words") or ""), 100)
        return ToolReply(self._record("search_docs", words, lambda: self.evidence.search(words)))

    def _suppose(self, arguments: dict[str, Any]) -> ToolReply:
        if not arguments:
            raise CallError("suppose what? Give corrections, a program, doubts, memory_crashes, or configurations")
        return ToolReply(self._record("suppose", arguments, lambda: describe_supposed(self.view, arguments)))


def _read_factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 100:
        raise CallError("a factor of what_if is a number from 0.01 to 100")
    return float(value)
