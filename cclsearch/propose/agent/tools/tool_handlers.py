"""Answers the model's tool calls from the view of the search; no argument of a call is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.propose.agent.decision import Decision, ToolReply
from cclsearch.propose.agent.memory.history import just_corrected, past_turns
from cclsearch.propose.agent.memory.turn_feedback import read_lessons
from cclsearch.propose.agent.policy.inputs import hide_origin
from cclsearch.propose.agent.policy.runner import PolicyChoice, PolicyRunner
from cclsearch.propose.agent.prompt.surrogate_table import (
    MAX_BET_GAIN,
    MIN_BET_TRIALS,
    NUM_PROMISING,
    PLAUSIBLE,
    best_observation,
    none_ranked,
)
from cclsearch.propose.agent.prompt.tables import FREE_MARK, trial_summary
from cclsearch.propose.agent.providers.types import ToolCall, ToolSpec
from cclsearch.propose.agent.tools.configs import CallError, format_config, read_config
from cclsearch.propose.agent.tools.extension import TOOL as EXTEND_SPACE
from cclsearch.propose.agent.tools.extension import Extension
from cclsearch.propose.agent.tools.lookups import MAX_REPLY_BYTES, Lookups
from cclsearch.propose.agent.tools.tool_schemas import CORRECT, FOLLOW, REFUTED_AT, expected_fields, make_toolset
from cclsearch.propose.base import ExpectedOutcome
from cclsearch.propose.bayes.corrections import find_doubted, parse_doubts
from cclsearch.propose.events import LlmMode, SubmittedConfig

MIN_FITS = 0.05
"""Probability of fitting, or of satisfying the constraints, below which a row is refused for that reason."""


@dataclass
class ToolHandlers(Lookups):
    """Handlers of one turn's tool calls: look-ups and decisions."""

    max_submitted: int = 1
    overrules_left: int = 1
    mode: LlmMode = LlmMode.CONFIGS
    anonymous: bool = False
    """Hides the workload's origin from policy programs too, because the model reads their errors."""
    policies: PolicyRunner | None = None
    extension: Extension = field(default_factory=Extension)
    """Additions to the search space that the model may make."""

    def answer(self, call: ToolCall, max_bytes: int = MAX_REPLY_BYTES) -> ToolReply:
        """The reply to one call; descriptions of trials are shortened to fit into `max_bytes`."""
        self.max_bytes = max_bytes
        if call.arguments is None:
            return ToolReply(f"{call.fault}; call {one_line(call.name, 40)} again with valid arguments", "malformed")
        handlers: dict[str, Callable[[dict[str, Any]], ToolReply]] = {
            **self.lookups(),
            "submit_policy" if self.mode == LlmMode.POLICY else "submit": (
                self._submit_policy if self.mode == LlmMode.POLICY else self._submit
            ),
            **({EXTEND_SPACE: self._extend} if self.extension.record.offers else {}),
            FOLLOW: self._follow,
            CORRECT: self._correct,
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
    def can_correct(self) -> bool:
        """Whether the model may correct the prediction without a trial: once between two trials."""
        return not just_corrected(self.view)

    def _follow(self, arguments: dict[str, Any]) -> ToolReply:
        row = next((row for row in self.table.order if not self.view.taken_N[row]), None)
        if row is None:
            raise CallError("no configuration is left: finish", "duplicate")
        lessons, ignored = read_lessons(arguments, self.view)
        return ToolReply("accepted", decision=Decision((self._take(row),), ignored, **lessons))

    def _take(self, row: int) -> SubmittedConfig:
        """Return a row of the surrogate's, which expects what it predicts."""
        config = self.view.space.config(row)
        metrics = {PEAK_MEMORY: self.table.memory_gib_N, self.view.primary.name: self.table.value_N}
        figures = {name: float(metrics[of][row]) for name, of in expected_fields(self.view).items()}
        return self._check_submission(config, {**figures, "rationale": "the surrogate's choice"}, [])

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
        lessons, ignored = read_lessons(arguments, self.view)
        why = (*(one_line(str(error), 300) for error in refused), *ignored)
        return ToolReply("accepted", decision=Decision(tuple(accepted), why, **lessons))

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
        lessons, ignored = read_lessons({**arguments, "program": None}, self.view)
        decision = Decision((submitted,), ignored, program=program, **lessons)
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
        value, memory = float(self.table.value_N[row]), float(self.table.memory_gib_N[row])
        fits = float(self.table.fits_N[row])
        return SubmittedConfig(
            config=config,
            refuted_at=_positive(item.get(REFUTED_AT)),
            predicted=ExpectedOutcome({self.view.primary.name: value, PEAK_MEMORY: memory}, fits),
            expects=ExpectedOutcome({name: value for name, value in expected.items() if value is not None}),
            is_overrule=not is_free,
            rationale=one_line(redact(str(item.get("rationale") or "")), 400),
            is_own_idea=not self.table.is_first_choice(row),
            is_repeat=is_repeat,
        )

    def _describe_objection(self, row: int) -> str:
        """Return why a row is not free, in words."""
        table = self.table
        if table.fits_N[row] < MIN_FITS:
            return f"the surrogate's probability that it fits is {table.fits_N[row]:.2f}"
        if table.satisfies_N is not None and table.satisfies_N[row] < MIN_FITS:
            return f"the surrogate's probability that it satisfies the constraints is {table.satisfies_N[row]:.2f}"
        if table.wins_N is not None and not table.first_only:
            return f"the surrogate's chance that it beats the best is {table.wins_N[row]:.1%}, below {PLAUSIBLE:.0%}"
        return f"it is not among the first {NUM_PROMISING} by the surrogate's promise or by P(wins)"

    def _extend(self, arguments: dict[str, Any]) -> ToolReply:
        wanted, why, text = self.extension.request(arguments)
        lessons, ignored = read_lessons(arguments, self.view)
        return ToolReply(text, decision=Decision(adds=wanted, why=why, refused=ignored, **lessons))

    def _correct(self, arguments: dict[str, Any]) -> ToolReply:
        if not self.can_correct:
            raise CallError("you corrected it since the last trial: decide, or try `suppose`", "corrected twice")
        lessons, ignored = read_lessons(arguments, self.view)
        if not any(lessons.values()):
            why = "".join(f"; {text}" for text in ignored)
            raise CallError(f"nothing new: give corrections, a program, doubts, an insight, or turns to withdraw{why}")
        return ToolReply("noted", decision=Decision(is_revision=True, refused=ignored, **lessons))

    def _finish(self, arguments: dict[str, Any]) -> ToolReply:
        reason = one_line(redact(str(arguments.get("reason") or "no reason given")), 400)
        lessons, _ = read_lessons({"insight": arguments.get("insight")}, self.view)
        table = self.table
        if best_observation(self.view) is None:
            raise CallError(f"refused: {none_ranked(self.view)}. {self._describe_likeliest()}", "finish refused")
        if table.nothing_left:
            return ToolReply("granted", decision=Decision(finish=reason, **lessons))
        if not (problem := self._find_risk()):
            rival = self._take(table.likeliest[0])
            return ToolReply("one last trial", decision=Decision((rival,), bet=reason, **lessons))
        raise CallError(f"refused: {table.why}; {problem}. {self._describe_likeliest()}", "finish refused")

    def _find_risk(self) -> str:
        """Return why the model may not end the search after one more trial, of the likeliest rival; empty if it may."""
        measured = sum(o.value(self.view.primary.name) is not None for o in self.view.observations)
        if measured < MIN_BET_TRIALS:
            return f"at your own risk from {MIN_BET_TRIALS} measured trials on"
        if self.table.first_only or any(turn.bet for turn in past_turns(self.view.events)):
            return "not at your own risk: you stalled, or a rival beat the best after an earlier request"
        if self.table.gain_left > MAX_BET_GAIN or not self.table.likeliest:
            return f"at your own risk below {MAX_BET_GAIN:.0%}"
        return ""

    def _describe_likeliest(self) -> str:
        """Return what the model may submit instead of finishing."""
        if self.table.wins_N is None or not self.table.likeliest:
            return "Submit one of the open candidates"
        row = self.table.likeliest[0]
        config = format_config(self.view.space, self.view.space.config(row))
        return f"The likeliest is ({config}), P(wins) {self.table.wins_N[row]:.3f}: it is free, submit it"


def list_tools(handlers: ToolHandlers, mode: LlmMode) -> tuple[ToolSpec, ...]:
    """The tools of these handlers, as a provider receives them."""
    can_extend = bool(handlers.extension.record.offers)
    return make_toolset(handlers.view, mode, can_extend=can_extend, has_traces=handlers.has_traces)


def _positive(value: object) -> float | None:
    try:
        number = 0.0 if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < 1e9 else None
