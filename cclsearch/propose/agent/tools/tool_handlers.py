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
from cclsearch.propose.agent.memory.history import just_revised
from cclsearch.propose.agent.memory.turn_feedback import add_lessons, changes_figures, read_lessons
from cclsearch.propose.agent.policy.runner import PolicyChoice, PolicyRunner, hide_origin
from cclsearch.propose.agent.prompt.surrogate_table import (
    NUM_PROMISING,
    PLAUSIBLE,
    MakeSurrogateTable,
    SurrogateTable,
    best_observation,
    none_ranked,
)
from cclsearch.propose.agent.prompt.tables import FREE_MARK, trial_summary
from cclsearch.propose.agent.providers.types import ToolCall
from cclsearch.propose.agent.tools.configs import CallError, format_config, read_config
from cclsearch.propose.agent.tools.extension import TOOL as EXTEND_SPACE
from cclsearch.propose.agent.tools.extension import Extension
from cclsearch.propose.agent.tools.lookups import MAX_REPLY_BYTES, Lookups
from cclsearch.propose.agent.tools.tool_schemas import REFUTED_AT, REVISE, expected_fields
from cclsearch.propose.base import ExpectedOutcome
from cclsearch.propose.bayes.prior_hints import find_doubted, parse_doubts, without_guesses
from cclsearch.propose.events import LlmMode, SubmittedConfig

NOT_JUDGED = "What you sent with it does not count, and is not kept: beliefs change once between two trials"
NOT_KEPT = (
    "This is with the beliefs and doubts of your first request in this turn; they are not kept, because after a stall "
    "you choose without them"
)
WITHOUT_GUESSES = "This is without your beliefs about values that no trial had: nothing measured speaks for them"
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
    make_table: MakeSurrogateTable | None = None
    """Fits the surrogate again, with beliefs that come with a request to finish."""
    refitted: SurrogateTable | None = None
    """The table with these beliefs, kept for the turn record; in a replay, the recorded one."""
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
            REVISE: self._revise,
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
        """Whether the model may revise its beliefs: once between two trials, and not while it is limited to the
        surrogate's first candidates, which it must choose without its beliefs.
        """
        return not self.table.first_only and not just_revised(self.view)

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
        lessons, ignored = read_lessons(arguments, self.view)
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
            predicted_sd=self.table.sd(row) or None,
            is_promising=self.table.is_promising(row),
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

    def _revise(self, arguments: dict[str, Any]) -> ToolReply:
        if not self.can_revise:
            why = NOT_JUDGED if just_revised(self.view) else NOT_KEPT
            raise CallError(f"{why}. Submit or finish", "revised twice")
        lessons, ignored = read_lessons(arguments, self.view)
        if not any(lessons.values()):
            why = "".join(f"; {text}" for text in ignored)
            raise CallError(f"nothing to revise: give beliefs, doubts, an insight, or turns to withdraw{why}")
        return ToolReply("noted", decision=Decision(is_revision=True, refused=ignored, **lessons))

    def _finish(self, arguments: dict[str, Any]) -> ToolReply:
        reason = one_line(redact(str(arguments.get("reason") or "no reason given")), 400)
        lessons, _ = read_lessons(arguments, self.view)
        is_kept = self.can_revise and any(lessons.values())
        problem = self._find_problem(lessons)
        if not problem:
            return ToolReply("granted", decision=Decision(finish=reason, **lessons))
        if not is_kept:
            why = NOT_JUDGED if just_revised(self.view) else NOT_KEPT
            kept = f". {why}. Send it with your submission" if any(lessons.values()) else ""
            raise CallError(f"{problem}{kept}. {self._describe_likeliest()}", "finish refused")
        # as `revise` does: the next request shows what the surrogate predicts with what the model has learnt
        text = f"finish {problem}. What you sent with it is kept, and the figures of this prompt are with it"
        return ToolReply(text, decision=Decision(is_revision=True, refused=(text,), **lessons))

    def _describe_likeliest(self) -> str:
        """Return what the model may submit instead of finishing."""
        if self.table.wins_N is None or not self.table.likeliest:
            return "Submit one of the open candidates"
        row = self.table.likeliest[0]
        config = format_config(self.view.space, self.view.space.config(row))
        return f"The likeliest is ({config}), P(wins) {self.table.wins_N[row]:.3f}: it is free, submit it"

    def _find_problem(self, lessons: Mapping[str, Any]) -> str:
        """Return why the search may not end, by the figures with the model's lessons; empty if it may.

        Lessons count once between two trials: for later requests of a turn, the first request's.
        """
        if best_observation(self.view) is None:
            return f"refused: {none_ranked(self.view)}"
        is_changed = changes_figures(lessons) and not just_revised(self.view)
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
