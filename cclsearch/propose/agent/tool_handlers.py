"""Answers the model's tool calls from the view of the search; no argument of a call is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.propose.agent.configs import CallError, format_config, nearest_rows, read_config, read_value
from cclsearch.propose.agent.decision import Decision, ToolReply
from cclsearch.propose.agent.evidence import EvidenceSource, TrialEvidence, describe_evidence, fit_evidence
from cclsearch.propose.agent.extension import TOOL as EXTEND_SPACE
from cclsearch.propose.agent.extension import Extension
from cclsearch.propose.agent.history import just_revised
from cclsearch.propose.agent.lessons import add_lessons, changes_figures, read_lessons
from cclsearch.propose.agent.policy.runner import PolicyChoice, PolicyRunner, hide_origin
from cclsearch.propose.agent.providers.types import ToolCall
from cclsearch.propose.agent.quoting import clip_bytes
from cclsearch.propose.agent.row_facts import RowFacts, read_row_facts
from cclsearch.propose.agent.surrogate_table import (
    NUM_PROMISING,
    PLAUSIBLE,
    MakeSurrogateTable,
    SurrogateTable,
    best_observation,
    none_ranked,
)
from cclsearch.propose.agent.tables import FREE_MARK, candidate_lines, trial_summary
from cclsearch.propose.agent.tool_schemas import (
    BY_CHANCE,
    LOOKUPS,
    MAX_LISTED,
    MAX_PREDICTED,
    REFUTED_AT,
    REVISE,
    expected_fields,
    sort_orders,
)
from cclsearch.propose.base import ExpectedOutcome, SearchView
from cclsearch.propose.bayes.prior_hints import find_doubted, parse_doubts, without_guesses
from cclsearch.propose.events import LlmMode, SubmittedConfig

Explain = Callable[[Config], Sequence[str]]
"""The rules that a configuration violates, one line each; empty if it violates none."""

NOT_TRACED = "no trace: its parts are predicted, not measured"
WHY_NOT_KEPT = (
    "What you sent with it is not kept: beliefs change once between two trials, and not after a stall. "
    "Send it with your submission"
)
WITHOUT_GUESSES = "This is without your beliefs about values that no trial had: nothing measured speaks for them"
MAX_REPLY_BYTES = 2400
"""Bytes of one look-up's result."""
MIN_FITS = 0.05
"""Probability of fitting, or of satisfying the constraints, below which that is the objection to a row."""


@dataclass
class ToolHandlers:
    """Handlers of one turn's tool calls; they also record the evidence and explanations that they used."""

    view: SearchView
    table: SurrogateTable
    evidence: EvidenceSource
    max_submitted: int = 1
    overrules_left: int = 1
    mode: LlmMode = LlmMode.CONFIGS
    anonymous: bool = False
    """Hides the workload's origin from policy programs too, because the model reads their errors."""
    explain: Explain | None = None
    policies: PolicyRunner | None = None
    make_table: MakeSurrogateTable | None = None
    """Fits the surrogate again, with beliefs that come with a request to finish."""
    refitted: SurrogateTable | None = None
    """The table with these beliefs, kept for the turn record; in a replay, the recorded one."""
    looked_up: dict[int, TrialEvidence] = field(default_factory=dict)
    explanations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Digest of a configuration -> what `explain` returned for it."""
    extension: Extension = field(default_factory=Extension)
    """What the model may add to the search space."""
    max_bytes: int = MAX_REPLY_BYTES
    """Bytes of the current reply."""

    def answer(self, call: ToolCall, max_bytes: int = MAX_REPLY_BYTES) -> ToolReply:
        """The reply to one call; descriptions of trials are shortened to fit into `max_bytes`."""
        self.max_bytes = max_bytes
        if call.arguments is None:
            return ToolReply(f"{call.fault}; call {one_line(call.name, 40)} again with valid arguments", "malformed")
        handlers: dict[str, Callable[[dict[str, Any]], ToolReply]] = {
            "predict": self._predict,
            "explain": self._explain,
            "trial": self._trial,
            "compare": self._compare,
            "candidates": self._candidates,
            "submit_policy" if self.mode == LlmMode.POLICY else "submit": (
                self._submit_policy if self.mode == LlmMode.POLICY else self._submit
            ),
            **({EXTEND_SPACE: self._extend} if self.extension.offers else {}),
            **({REVISE: self._revise} if self.can_revise else {}),
            "finish": self._finish,
        }
        if call.name not in handlers:
            return ToolReply(
                f"unknown tool {one_line(call.name, 40)!r}; the tools are: {', '.join(handlers)}", "unknown tool"
            )
        try:
            return handlers[call.name](call.arguments)
        except CallError as error:
            return ToolReply(str(error), error.fault)

    @property
    def can_revise(self) -> bool:
        """Whether the model may revise what it believes: once between two trials, and not while it is limited to the
        surrogate's first candidates, which are to be chosen without its beliefs."""
        return not self.table.first_only and not just_revised(self.view)

    def find_shown(self) -> dict[int, TrialEvidence]:
        """The evidence of the best trial and of the last, which the prompt shows without a look-up."""
        last = max(self.view.observations, key=lambda o: o.trial, default=None)
        trials = [o.trial for o in (best_observation(self.view), last) if o]
        return {trial: found for trial in trials if (found := self.find_evidence(trial))}

    def is_lookup(self, call: ToolCall) -> bool:
        """Whether the call is a look-up, not a decision."""
        return call.name in LOOKUPS

    def find_evidence(self, trial: int) -> TrialEvidence | None:
        """The evidence of that trial, which is also kept for the turn record."""
        if trial not in self.looked_up:
            found = self.evidence.find(trial)
            if found is not None:
                self.looked_up[trial] = found
        return self.looked_up.get(trial)

    # look-ups

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
        """What is known of a row without a trial: its figures, and the parts of the closed form."""
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
        """What the closed form predicts as the difference of two trials, part by part; empty without one."""
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
                f"there is no finished trial {one_line(repr(number), 30)}; finished: {trials}", "malformed"
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
        rows &= self.table.fits_N >= least
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

    # decisions

    def _submit(self, arguments: dict[str, Any]) -> ToolReply:
        raw = arguments.get("configurations")
        if isinstance(raw, Mapping):
            raw = [raw]
        if not isinstance(raw, list) or not raw:
            raise CallError("configurations must be a list with at least one {config, rationale, ...}")
        accepted: list[SubmittedConfig] = []
        refused: list[CallError] = []
        doubts = find_doubted(self.view) | set(parse_doubts(arguments.get("doubts"), self.view))
        for item in raw[: self.max_submitted]:
            item = item if isinstance(item, Mapping) else {}
            try:
                config = read_config(self.view.space, item.get("config", item))
                accepted.append(self._check_submission(config, item, accepted, doubts))
            except CallError as error:
                refused.append(error)
        if not accepted:
            raise CallError("\n".join(map(str, refused)), refused[0].fault)
        if left := raw[self.max_submitted :]:
            first = left[0].get("config", left[0]) if isinstance(left[0], Mapping) else left[0]
            what = f"{len(left)} of {len(raw)} configurations, from {first} on"
            refused.append(CallError(f"not considered: {what}: this turn may submit {self.max_submitted}", "too many"))
        decision = Decision(
            tuple(accepted),
            refused=tuple(one_line(str(error), 300) for error in refused),
            **read_lessons(arguments, self.view),
        )
        return ToolReply("accepted", decision=decision)

    def _submit_policy(self, arguments: dict[str, Any]) -> ToolReply:
        program = arguments.get("program")
        if not isinstance(program, str) or self.policies is None:
            raise CallError("program must be the source text of a Python program")
        # The turn record keeps it redacted, so it runs redacted: a replay then runs the same program.
        program = redact(program)
        view = hide_origin(self.view) if self.anonymous else self.view
        choice: PolicyChoice = self.policies.choose(program, view, self.table)
        if choice.config is None:
            raise CallError(choice.problem, "policy failed")
        try:
            submitted = self._check_submission(choice.config, arguments, [])
        except CallError as error:
            returned = format_config(self.view.space, choice.config)
            raise CallError(f"the program returned {returned}: {error}", error.fault) from None
        decision = Decision((submitted,), program=program, **read_lessons(arguments, self.view))
        return ToolReply("accepted" + (f" ({choice.note})" if choice.note else ""), decision=decision)

    def _check_submission(
        self,
        config: Config,
        item: Mapping[str, Any],
        accepted: Sequence[SubmittedConfig],
        doubts: Set[int] = frozenset(),
    ) -> SubmittedConfig:
        row = self.view.space.row(config)
        if row is None:
            raise CallError(self._explain_illegal(config), "illegal")
        config = self.view.space.config(row)  # the one that represents all that differ in knobs without effect
        tried = next((o for o in self.view.observations if o.row == row), None)
        is_repeat = tried is not None and tried.loss is not None and tried.trial in doubts and self.view.can_repeat
        if tried and not is_repeat:
            raise CallError(f"a duplicate: {trial_summary(self.view, tried)}. Choose an untried one", "duplicate")
        if self.view.is_closed(row) or any(other.config == config for other in accepted):
            text = "it is already running, submitted twice, or held back because it does not fit. Choose another one"
            raise CallError(text, "duplicate")
        is_free = is_repeat or self.table.is_free(row)
        spent = sum(other.is_overrule for other in accepted)
        if not is_free and self.overrules_left - spent <= 0:
            raise CallError(
                f"{self._describe_objection(row)}, and no credit is left to overrule the surrogate. "
                f"Choose a free one: the rows marked {FREE_MARK} in `candidates`",
                "implausible",
            )
        expected = {metric: _positive(item.get(name)) for name, metric in expected_fields(self.view).items()}
        refuted_at = _positive(item.get(REFUTED_AT))
        value, memory = float(self.table.value_N[row]), float(self.table.memory_gib_N[row])
        fits = float(self.table.fits_N[row])
        return SubmittedConfig(
            config=config,
            refuted_at=refuted_at,
            predicted=ExpectedOutcome({self.view.primary.name: value, PEAK_MEMORY: memory}, fits),
            expects=ExpectedOutcome({name: value for name, value in expected.items() if value is not None}),
            is_overrule=not is_free,
            rationale=one_line(redact(str(item.get("rationale") or "")), 400),
            predicted_sd=self.table.sd(row) or None,
            is_promising=self.table.is_promising(row),
            is_own_idea=not self.table.is_first_choice(row),
            is_repeat=is_repeat,
        )

    def _describe_objection(self, row: int) -> str:
        """Why a row is not free, in words."""
        table = self.table
        if table.fits_N[row] < MIN_FITS:
            return f"the surrogate's probability that it fits is {table.fits_N[row]:.2f}"
        if table.satisfies_N is not None and table.satisfies_N[row] < MIN_FITS:
            return f"the surrogate's probability that it satisfies the constraints is {table.satisfies_N[row]:.2f}"
        if table.wins_N is not None and not table.first_only:
            return f"the surrogate's chance that it beats the best is {table.wins_N[row]:.1%}, below {PLAUSIBLE:.0%}"
        return f"it is not among the first {NUM_PROMISING} by the surrogate's promise or by P(wins)"

    def _explain_illegal(self, config: Config) -> str:
        if self.explain:
            self.explanations[config.digest] = tuple(self.explain(config))
        rules = [one_line(line, 200) for line in self.explanations.get(config.digest, ())][:4]
        near = nearest_rows(self.view.space, config, self.table.listed)
        listed = "; ".join(format_config(self.view.space, self.view.space.config(row)) for row in near)
        why = f": {'; '.join(rules)}" if rules else ""
        return f"not in the search space{why}. Nearest untried configurations: {listed or 'none'}"

    def _extend(self, arguments: dict[str, Any]) -> ToolReply:
        wanted, why, text = self.extension.request(arguments)
        return ToolReply(text, decision=Decision(adds=wanted, why=why, **read_lessons(arguments, self.view)))

    def _revise(self, arguments: dict[str, Any]) -> ToolReply:
        lessons = read_lessons(arguments, self.view)
        if not any(lessons.values()):
            raise CallError("nothing to revise: give beliefs, doubts, an insight, or turns to withdraw, that are known")
        return ToolReply("noted", decision=Decision(is_revision=True, **lessons))

    def _finish(self, arguments: dict[str, Any]) -> ToolReply:
        reason = one_line(redact(str(arguments.get("reason") or "no reason given")), 400)
        lessons = read_lessons(arguments, self.view)
        is_kept = self.can_revise and any(lessons.values())
        problem = self._find_problem(lessons, is_kept=is_kept)
        if not problem:
            return ToolReply("granted", decision=Decision(finish=reason, **lessons))
        if not is_kept:
            kept = f". {WHY_NOT_KEPT}" if any(lessons.values()) else ""
            raise CallError(f"{problem}{kept}. {self._describe_likeliest()}", "finish refused")
        # as `revise` does: the next request shows what the surrogate predicts with what the model has learnt
        text = f"finish {problem}. What you sent with it is kept, and the figures of this prompt are with it"
        return ToolReply(text, decision=Decision(is_revision=True, refused=(text,), **lessons))

    def _describe_likeliest(self) -> str:
        """What may be submitted instead of finishing."""
        if self.table.wins_N is None or not self.table.likeliest:
            return "Submit one of the open candidates"
        row = self.table.likeliest[0]
        config = format_config(self.view.space, self.view.space.config(row))
        return f"The likeliest is ({config}), P(wins) {self.table.wins_N[row]:.3f}: it is free, submit it"

    def _find_problem(self, lessons: Mapping[str, Any], *, is_kept: bool) -> str:
        """Why the search may not be finished, by the figures with what the model has learnt; empty if it may."""
        if best_observation(self.view) is None:
            return f"refused: {none_ranked(self.view)}"
        is_changed = is_kept and changes_figures(lessons)
        learnt = add_lessons(self.view, lessons) if is_changed else self.view
        judged = without_guesses(learnt)
        if judged is not self.view and self.make_table and self.refitted is None:
            self.refitted = self.make_table(judged)
        table = self.refitted if judged is not self.view and self.refitted else self.table
        guesses = "" if judged is learnt else f". {WITHOUT_GUESSES}"
        return "" if table.nothing_left else f"refused: {table.why}{guesses}"


def _positive(value: object) -> float | None:
    try:
        number = 0.0 if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < 1e9 else None
