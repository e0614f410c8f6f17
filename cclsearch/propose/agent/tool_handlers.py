"""Answers the model's tool calls from the search's own knowledge; nothing that comes in is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cclsearch.core.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.propose.agent.configs import nearest_rows, read_config, read_value, spelled
from cclsearch.propose.agent.evidence import EvidenceSource, TrialEvidence
from cclsearch.propose.agent.history import SubmittedConfig
from cclsearch.propose.agent.policy.runner import PolicyChoice, PolicyRunner, hide_origin
from cclsearch.propose.agent.prompt import describe_evidence
from cclsearch.propose.agent.providers.types import ToolCall
from cclsearch.propose.agent.quoting import clip_bytes, fence, fence_end
from cclsearch.propose.agent.surrogate_table import SurrogateTable, best_observation, open_rows
from cclsearch.propose.agent.tables import candidate_lines, trial_summary
from cclsearch.propose.agent.tool_schemas import LOOKUPS, MAX_LISTED, MAX_PREDICTED, SORTS
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prior_hints import parse_hints

Explain = Callable[[Config], Sequence[str]]
"""Why a configuration is no member, one line a broken rule; empty where there is nothing to say."""

FIRST_CHOICES = 3
"""Of the surrogate's candidates, how many count as what it would run itself."""
FOREMOST = 5
"""Of the surrogate's candidates, among how many an LLM without credit chooses."""
MAX_REPLY_BYTES = 2400
"""Of one look-up's result."""
MIN_FITS = 0.05
MAX_SLOWER = 1.5
"""The surrogate speaks against a proposal where it gives it less than `MIN_FITS`, or where even its optimistic time
does not beat the best's; before anything has run, where that is so many times the best prediction."""


@dataclass(frozen=True)
class Decision:
    """How a turn ends well."""

    submitted: tuple[SubmittedConfig, ...] = ()
    finish: str | None = None
    insight: str = ""
    beliefs: Mapping[str, str] = field(default_factory=dict)
    """Part of a step -> how long it takes beside the closed form: evidence for the surrogate."""
    program: str | None = None
    """Source of the policy program behind the submission."""


@dataclass(frozen=True)
class ToolReply:
    """What a call gives."""

    text: str
    fault: str = ""
    """Short name of what was wrong (`duplicate`, `illegal`, `malformed`, ...); empty where all was well."""
    decision: Decision | None = None


@dataclass
class ToolHandlers:
    """One turn's desk: knows the view, and which evidence was looked up."""

    view: SearchView
    look: SurrogateTable
    evidence: EvidenceSource
    max_submitted: int = 1
    overrules_left: int = 1
    mode: str = "configs"
    anonymous: bool = False
    """Nothing that names the workload's origin reaches a program, whose errors the model reads."""
    explain: Explain | None = None
    policies: PolicyRunner | None = None
    looked_up: dict[int, TrialEvidence] = field(default_factory=dict)
    room_bytes: int = MAX_REPLY_BYTES
    """For the reply that is being written."""

    def answer(self, call: ToolCall, room_bytes: int = MAX_REPLY_BYTES) -> ToolReply:
        """The reply to one call; what it tells of trials is fitted into the room."""
        self.room_bytes = room_bytes
        if call.arguments is None:
            return ToolReply(f"{call.fault}; call {one_line(call.name, 40)} again with valid arguments", "malformed")
        handlers: dict[str, Callable[[dict[str, Any]], ToolReply]] = {
            "predict": self._predict,
            "explain": self._explain,
            "trial": self._trial,
            "compare": self._compare,
            "candidates": self._candidates,
            "submit_policy" if self.mode == "policy" else "submit": (
                self._submit_policy if self.mode == "policy" else self._submit
            ),
            "finish": self._finish,
        }
        if call.name not in handlers:
            return ToolReply(
                f"there is no tool {one_line(call.name, 40)!r}; there are: {', '.join(handlers)}", "unknown tool"
            )
        return handlers[call.name](call.arguments)

    def is_lookup(self, call: ToolCall) -> bool:
        """Whether the call only asks."""
        return call.name in LOOKUPS

    def find_evidence(self, trial: int) -> TrialEvidence | None:
        """What that trial left, remembered for the turn's record."""
        if trial not in self.looked_up:
            found = self.evidence.find(trial)
            if found is not None:
                self.looked_up[trial] = found
        return self.looked_up.get(trial)

    # look-ups

    def _predict(self, arguments: dict[str, Any]) -> ToolReply:
        raw = arguments.get("configurations")
        if not isinstance(raw, list) or not raw:
            return ToolReply("configurations must be a list of configurations", "malformed")
        lines: list[str] = []
        for item in raw[:MAX_PREDICTED]:
            config, problem = read_config(self.view.space, item)
            row = self.view.space.row(config) if config else None
            if config is None or row is None:
                lines.append(problem or f"{spelled(self.view.space, config or {})}: not legal (`explain` says why)")
            else:
                lines.append(self._describe_row(row))
        if len(raw) > MAX_PREDICTED:
            lines.append(f"({len(raw) - MAX_PREDICTED} left out: at most {MAX_PREDICTED} a call)")
        return ToolReply("\n".join(lines))

    def _describe_row(self, row: int) -> str:
        known = next((o for o in self.view.observations if o.row == row), None)
        if known:
            return "already tried: " + trial_summary(self.view, known)
        look = self.look
        state = " (runs now, or is held back)" if row in self.view.closed else ""
        return (
            f"{spelled(self.view.space, self.view.space.config(row))}: predicted {look.time_N[row]:.4g} s "
            f"(optimistic {look.low_N[row]:.4g} s), memory {look.memory_gib_N[row]:.3g} GiB, "
            f"P(fits) {look.fits_N[row]:.2f}{state}"
        )

    def _explain(self, arguments: dict[str, Any]) -> ToolReply:
        config, problem = read_config(self.view.space, arguments.get("config"))
        if config is None:
            return ToolReply(problem, "malformed")
        row = self.view.space.row(config)
        return ToolReply(self._why_illegal(config) if row is None else f"legal. {self._describe_row(row)}")

    def _trial(self, arguments: dict[str, Any]) -> ToolReply:
        best = best_observation(self.view)
        number = arguments.get("trial")
        reference = best.trial if best and best.trial != number else None
        return self._tell_trial(number, self.room_bytes, reference=reference, against="the best")

    def _compare(self, arguments: dict[str, Any]) -> ToolReply:
        a, b = arguments.get("a"), arguments.get("b")
        half = self.room_bytes // 2 - 1
        reference = next((o.trial for o in self.view.observations if o.trial == b and b != a), None)
        first = self._tell_trial(a, half, reference=reference, against=f"trial {reference}")
        second = self._tell_trial(b, half)
        return ToolReply(f"{first.text}\n\n{second.text}", first.fault or second.fault)

    def _tell_trial(
        self, number: object, room_bytes: int, *, reference: int | None = None, against: str = ""
    ) -> ToolReply:
        found = [o for o in self.view.observations if o.trial == number]
        if not found or isinstance(number, bool):
            trials = ", ".join(str(o.trial) for o in self.view.observations[-30:]) or "none yet"
            return ToolReply(
                f"there is no finished trial {one_line(repr(number), 30)}; finished: {trials}", "malformed"
            )
        summary = clip_bytes(trial_summary(self.view, found[0]), max(room_bytes // 2, 200))
        evidence = self.find_evidence(found[0].trial)
        if evidence is None:
            return ToolReply(summary)
        theirs = self.find_evidence(reference) if reference is not None else None
        told = describe_evidence(evidence, theirs, against=against)
        return ToolReply(
            "\n".join([summary, *_fit_evidence(told, evidence.log_tail, room_bytes - len(summary.encode()))])
        )

    def _candidates(self, arguments: dict[str, Any]) -> ToolReply:
        rows = open_rows(self.view)
        where = arguments.get("where") or {}
        if not isinstance(where, Mapping):
            return ToolReply("where must be an object: knob -> list of values", "malformed")
        for name, wanted in where.items():
            knob = next((knob for knob in self.view.space.knobs if knob.name == name), None)
            if knob is None:
                return ToolReply(f"there is no knob {one_line(str(name), 40)!r}", "malformed")
            values = wanted if isinstance(wanted, list) else [wanted]
            keep = [knob.choices.index(value) for value in (read_value(knob, v) for v in values) if value is not None]
            rows &= np.isin(self.view.space.codes_NK[:, self.view.space.knobs.index(knob)], keep)
        sort = arguments.get("sort", "promise")
        ordered = self._sorted(rows, sort if sort in SORTS else "promise")
        limit = arguments.get("limit")
        count = min(max(limit, 1), MAX_LISTED) if isinstance(limit, int) and not isinstance(limit, bool) else 10
        return ToolReply(f"{len(ordered)} match\n" + "\n".join(candidate_lines(self.view, self.look, ordered, count)))

    def _sorted(self, rows: Any, sort: str) -> list[int]:
        if sort == "promise":
            return [row for row in self.look.order if rows[row]]
        chosen = np.flatnonzero(rows)
        key = {"time": self.look.time_N, "memory": self.look.memory_gib_N, "fits": -self.look.fits_N}[sort]
        return [int(row) for row in chosen[np.argsort(key[chosen], kind="stable")]]

    # decisions

    def _submit(self, arguments: dict[str, Any]) -> ToolReply:
        raw = arguments.get("configurations")
        if isinstance(raw, Mapping):
            raw = [raw]
        if not isinstance(raw, list) or not raw:
            return ToolReply("configurations must be a list with at least one {config, rationale, ...}", "malformed")
        accepted: list[SubmittedConfig] = []
        refused: list[ToolReply] = []
        for item in raw[: self.max_submitted]:
            item = item if isinstance(item, Mapping) else {}
            config, problem = read_config(self.view.space, item.get("config", item))
            if config is None:
                refused.append(ToolReply(problem, "malformed"))
                continue
            verdict = self._judge(config, item, accepted)
            if isinstance(verdict, SubmittedConfig):
                accepted.append(verdict)
            else:
                refused.append(verdict)
        if not accepted:
            return ToolReply("\n".join(reply.text for reply in refused), refused[0].fault)
        dropped = "".join(f" (dropped: {reply.text})" for reply in refused)
        return ToolReply("accepted" + dropped, decision=Decision(tuple(accepted), **_learnt(arguments)))

    def _submit_policy(self, arguments: dict[str, Any]) -> ToolReply:
        program = arguments.get("program")
        if not isinstance(program, str) or self.policies is None:
            return ToolReply("program must be the source text of a Python program", "malformed")
        # What is kept of it is redacted, so what runs is too: a replay runs the same.
        program = redact(program)
        view = hide_origin(self.view) if self.anonymous else self.view
        choice: PolicyChoice = self.policies.choose(program, view, self.look)
        if choice.config is None:
            return ToolReply(choice.problem, "policy failed")
        verdict = self._judge(choice.config, arguments, [])
        if not isinstance(verdict, SubmittedConfig):
            return ToolReply(
                f"the program gave {spelled(self.view.space, choice.config)}: {verdict.text}", verdict.fault
            )
        decision = Decision((verdict,), program=program, **_learnt(arguments))
        return ToolReply("accepted" + (f" ({choice.note})" if choice.note else ""), decision=decision)

    def _judge(
        self, config: Config, item: Mapping[str, Any], accepted: Sequence[SubmittedConfig]
    ) -> SubmittedConfig | ToolReply:
        row = self.view.space.row(config)
        if row is None:
            return ToolReply(self._why_illegal(config), "illegal")
        known = next((o for o in self.view.observations if o.row == row), None)
        if known:
            return ToolReply(f"a duplicate: {trial_summary(self.view, known)}. Choose an untried one", "duplicate")
        if row in self.view.closed or any(other.config == config for other in accepted):
            return ToolReply("it runs already, or is held back because it cannot fit. Choose another", "duplicate")
        against = self._speaks_against(row)
        is_far = row not in self.look.order[:FOREMOST]
        spent = sum(other.is_overrule for other in accepted)
        if (against and self.overrules_left - spent <= 0) or (is_far and self.overrules_left <= 0):
            text = (
                f"{against or f'it is not among the {FOREMOST} that the surrogate finds most promising'}. "
                "You overruled the surrogate before and it did not pay: choose one that it finds "
                "plausible (see `candidates`)"
            )
            return ToolReply(text, "implausible")
        return SubmittedConfig(
            config=config,
            expected_step_time_s=_positive(item.get("expected_step_time_s")),
            expected_memory_gib=_positive(item.get("expected_memory_gib")),
            is_overrule=bool(against) or is_far,
            rationale=one_line(redact(str(item.get("rationale") or "")), 400),
            is_own_idea=row not in self.look.order[:FIRST_CHOICES],
        )

    def _speaks_against(self, row: int) -> str:
        """Why the surrogate thinks that the row cannot win; empty where it may."""
        if self.look.fits_N[row] < MIN_FITS:
            return f"the surrogate gives it a probability of {self.look.fits_N[row]:.2f} to fit"
        if self.view.objective != "step_time":
            return ""
        best = best_observation(self.view)
        low = float(self.look.low_N[row])
        if best and best.step_time_s:
            return "" if low < best.step_time_s else f"even its optimistic time, {low:.4g} s, does not beat the best"
        reference = self._best_predicted()
        return f"its optimistic time, {low:.4g} s, is poor" if low > MAX_SLOWER * reference > 0 else ""

    def _best_predicted(self) -> float:
        return float(self.look.time_N[self.look.order[0]]) if self.look.order else 0.0

    def _why_illegal(self, config: Config) -> str:
        rules = [one_line(line, 200) for line in (self.explain(config) if self.explain else ())][:4]
        near = nearest_rows(self.view.space, config, self.look.order)
        listed = "; ".join(spelled(self.view.space, self.view.space.config(row)) for row in near)
        why = "; ".join(rules) or "it is not in the legal set"
        return f"not legal: {why}. Nearest untried legal ones: {listed or 'none'}"

    def _finish(self, arguments: dict[str, Any]) -> ToolReply:
        reason = one_line(redact(str(arguments.get("reason") or "no reason given")), 400)
        if best_observation(self.view) is None:
            return ToolReply("refused: nothing has run successfully yet", "finish refused")
        if not self.look.nothing_left:
            return ToolReply(f"refused: {self.look.why}. Submit one of the open candidates", "finish refused")
        return ToolReply("granted", decision=Decision(finish=reason, **_learnt(arguments)))


_MARKS_BYTES = 80
"""Of a fence's marks, and of what stands before it."""
_LEAST_BYTES = 100
_MOST_BYTES = 1500


def _fit_evidence(told: str, log: str, room_bytes: int) -> list[str]:
    """Diagnosis and the log's end, fenced, within the room; the log has what the diagnosis leaves, at least half."""
    told, log = told.strip(), log.strip()
    room = room_bytes // (2 if told and log else 1) - _MARKS_BYTES
    if not (told or log):
        return []
    if room < _LEAST_BYTES:
        return ["(no room here for diagnosis and log: ask for this trial alone)"]
    lines = [fence(told, min(room, _MOST_BYTES))] if told else []
    left = room_bytes - sum(len(line.encode()) for line in lines) - _MARKS_BYTES
    return lines + (["log tail:", fence_end(log, min(left, _MOST_BYTES))] if log else [])


def _learnt(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the model says it has learnt: in words, for itself, and as beliefs, for the surrogate."""
    insight = arguments.get("insight")
    words = one_line(redact(insight), 400) if isinstance(insight, str) else ""
    return {"insight": words, "beliefs": parse_hints(arguments.get("beliefs"))}


def _positive(value: object) -> float | None:
    try:
        number = 0.0 if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < 1e9 else None
