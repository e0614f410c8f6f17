"""The proposer that alternates between the LLM and the fallback, so that a search never gets stuck."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

from cclsearch.core.text import count_of
from cclsearch.propose.agent.agent import Agent, TurnOutcome, to_proposal
from cclsearch.propose.agent.arbiter.rules import (
    ArbiterSettings,
    find_llm_rows,
    find_llm_trials,
    find_queued,
    find_stall,
    find_standing,
    find_won_bet,
    is_repeat_open,
    overrules_left,
)
from cclsearch.propose.agent.arbiter.seeds import propose_seed
from cclsearch.propose.agent.arbiter.states import NO_KEY, PROVIDER, next_trial, read_state, write_move
from cclsearch.propose.agent.background import start_in_background
from cclsearch.propose.agent.memory.history import drop_decision
from cclsearch.propose.agent.prompt.surrogate_table import best_observation
from cclsearch.propose.agent.server import ServerState
from cclsearch.propose.base import Proposal, Proposer, ProposerEvent, SearchView
from cclsearch.propose.events import ArbiterMove, ArbiterPhase, ArbiterState, DecisionKind, LlmTurn

# The longest chain: seeds, llm, a revision, fallback, back and another revision.
MAX_MOVES = 8
"""Number of moves and revisions within one call."""
CLOSE_S = 2.0
"""Seconds that the end of a search waits for a turn in the background."""
STOPPED_S = 0.1
"""The same once the user asked to stop, and how long a turn runs on before that is noticed."""


class Arbiter(Proposer):
    """`hybrid` or `llm`: the LLM decides, the fallback replaces it after a stall.

    All state is in the ledger's events, except for a turn that may be running in the background.
    """

    def __init__(
        self,
        agent: Agent,
        fallback: Proposer,
        *,
        strategy: str = "hybrid",
        parallel: int = 1,
        rules: ArbiterSettings | None = None,
        grace_s: float = 0.0,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """With `parallel` over 1, a free slot does not wait for a turn, except for `grace_s`.

        Turns run in the background, so that one ends as soon as `is_stopped`, also if its provider does not answer.
        """
        self.name = strategy
        self._agent = agent
        self._fallback = fallback
        self._parallel = parallel
        self._rules = rules or ArbiterSettings()
        self._grace_s = grace_s
        self._is_stopped = is_stopped
        self._events: list[ProposerEvent] = []
        self._ending: str | None = None
        self._background: Future[TurnOutcome] | None = None
        # Its decision would rest on older evidence.
        self._is_stale = False
        """Whether the LLM was suspended since that turn began."""
        self._is_first_call = True

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Up to `count` new configurations; empty only if none is left or the search is finished."""
        self._ending = None
        view = self._add_reports(self._collect_stale_turn(view))
        view = self._resume_llm(view)
        view = replace(view, llm_rows=find_llm_rows(view))
        proposals: list[Proposal] = []
        for _ in range(MAX_MOVES):
            state = read_state(view)
            before = len(self._events)
            proposals = self._act(view, state, count)
            self._events += self._agent.watched.take_reports()
            new_events = tuple(self._events[before:])
            if proposals or self._ending or not any(map(_asks_again, new_events)):
                break
            view = replace(view, events=view.events + new_events)
        return proposals

    def take_events(self) -> Sequence[ProposerEvent]:
        """See `Proposer`."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See `Proposer`: records the cost of a turn in the background, and does not wait for its decision."""
        for _ in range(2):
            self._events += self._agent.watched.take_reports()
            if self._background is None:
                return
            outcome = self._collect(STOPPED_S if self._is_stopped() else CLOSE_S)
            event = drop_decision(outcome.event, "too late") if outcome else self._agent.describe_running_turn()
            if event:
                self._events.append(event)
                self._background = None

    def ending(self) -> str | None:
        """See `Proposer`."""
        return self._ending

    # phases

    def _act(self, view: SearchView, state: ArbiterState, count: int) -> list[Proposal]:
        match state.phase:
            case ArbiterPhase.SEEDS:
                return self._act_seeds(view, state, count)
            case ArbiterPhase.LLM | ArbiterPhase.FINISHED:
                return self._act_llm(view, state, count)
            case ArbiterPhase.FALLBACK if state.cause == PROVIDER:
                return self._act_without_server(view, state, count)
            case ArbiterPhase.FALLBACK if next_trial(view) - state.since_trial >= state.explore:
                self._move(
                    view, state, ArbiterPhase.LLM, "return", f"the fallback chose {count_of(state.explore, 'trial')}"
                )
                return []
        return self._propose_fallback(view, count)

    def _act_seeds(self, view: SearchView, state: ArbiterState, count: int) -> list[Proposal]:
        if next_trial(view) <= self._rules.num_seeds:
            seeds = propose_seed(view, self._fallback, self._agent)
            if seeds:
                return seeds
        self._move(view, state, ArbiterPhase.LLM, "seeds done", "the seeds are chosen" if self._rules.num_seeds else "")
        return []

    def _act_llm(self, view: SearchView, state: ArbiterState, count: int) -> list[Proposal]:
        if ended := find_won_bet(view):
            return self._end(view, state, *ended)
        stall = find_stall(view, state, self._rules)
        if stall and state.phase is ArbiterPhase.LLM:
            self._suspend_llm(view, state, *stall)
            return []
        queued = find_queued(view) if state.phase is ArbiterPhase.LLM else None
        if queued and self._turn_is_recent(view):
            turn, items = queued
            return [to_proposal(item, turn.turn, self._agent.options) for item in items[:count]]
        reached = self._agent.limit_reached(view)
        if reached:
            self._move(view, self._as_llm(state), ArbiterPhase.OFF, "limit", f"a limit is reached: {reached}")
            return []
        server = self._agent.watched
        if self._background is None and server.state is not ServerState.UP:
            self._suspend_llm(view, state, PROVIDER, server.reason, is_temporary=server.state is ServerState.DOWN)
            return []
        outcome = self._run_turn(view, count)
        if outcome is None:
            return [] if self._is_stopped() else self._propose_fallback(view, count)
        return self._use(view, state, outcome, count)

    def _act_without_server(self, view: SearchView, state: ArbiterState, count: int) -> list[Proposal]:
        """The fallback's proposals while the server does not answer; it is asked again beside the trials."""
        server = self._agent.watched
        reached = self._agent.limit_reached(view, server.check_cost)
        if reached:
            self._move(view, state, ArbiterPhase.OFF, "limit", f"a limit is reached: {reached}")
            return []
        answers = server.poll()
        if answers is ServerState.DOWN:
            return self._propose_fallback(view, count)
        phase = ArbiterPhase.LLM if answers is ServerState.UP else ArbiterPhase.OFF
        self._move(view, state, phase, PROVIDER, server.reason or "the server answers")
        return []

    def _use(self, view: SearchView, state: ArbiterState, outcome: TurnOutcome, count: int) -> list[Proposal]:
        self._events.append(outcome.event)
        if not outcome.stall or outcome.stall.cause != PROVIDER:
            self._agent.watched.succeed()
        if outcome.stall:
            if outcome.stall.cause == PROVIDER and outcome.stall.is_temporary:
                self._agent.watched.fail(outcome.stall.text, outcome.event.cost.seconds)
            self._suspend_llm(
                view, state, outcome.stall.cause, outcome.stall.text, is_temporary=outcome.stall.is_temporary
            )
            return []
        if outcome.finish is not None:
            return self._finish(view, state, outcome.finish)
        if outcome.event.adds or outcome.event.decision is DecisionKind.REVISE:
            return []  # the search grows its space, or the prediction changed: the model is asked again
        open_proposals = [proposal for proposal in outcome.proposals if _is_open(view, proposal)]
        if not open_proposals:
            # The turn ran in the background on an older view: its configurations may be running by now.
            return self._propose_fallback(view, count)
        return open_proposals[:count]

    def _finish(self, view: SearchView, state: ArbiterState, reason: str) -> list[Proposal]:
        if not self._agent.make_table(view).nothing_left or best_observation(view) is None:
            # The turn ran in the background on an older view: a newer result makes the trials left worth running.
            return self._propose_fallback(view, 1)
        return self._end(view, state, "the surrogate expects too little of the trials left", reason)

    def _end(self, view: SearchView, state: ArbiterState, why: str, reason: str) -> list[Proposal]:
        if state.phase is not ArbiterPhase.FINISHED:
            self._move(view, state, ArbiterPhase.FINISHED, "finish", reason)
        self._ending = f"the LLM ended the search, and {why}: {reason}"
        return []

    # turns

    def _run_turn(self, view: SearchView, count: int) -> TurnOutcome | None:
        """The outcome of a turn; None while it runs in the background, or if the user asked to stop."""
        if self._background is None:
            self._is_stale = False
            self._background = start_in_background(lambda: self._run_turn_now(view, count), "llm-turn")
        if self._parallel > 1:
            return None if self._is_stale else self._collect(self._grace_s)
        outcome = None
        while outcome is None and not self._is_stopped():
            outcome = self._collect(STOPPED_S)
        return outcome

    def _collect(self, wait_s: float) -> TurnOutcome | None:
        """Return the outcome of the turn in the background; None while it runs. Raises the turn's own error."""
        background = self._background
        if background is None or not wait([background], wait_s).done:
            return None
        self._background = None
        return background.result()

    def _collect_stale_turn(self, view: SearchView) -> SearchView:
        """The view with the cost of a turn that began before the LLM was suspended, once that turn has ended."""
        outcome = self._collect(0.0) if self._is_stale else None
        if outcome is None:
            return view
        return self._add_event(view, drop_decision(outcome.event, "not used, the LLM was suspended meanwhile"))

    def _resume_llm(self, view: SearchView) -> SearchView:
        """The view with the LLM back in phase `llm`, if an earlier session switched it off and this one may succeed."""
        is_first_call, self._is_first_call = self._is_first_call, False
        state = read_state(view)
        if not is_first_call or state.phase is not ArbiterPhase.OFF or self._agent.limit_reached(view):
            return view
        after = ArbiterState(ArbiterPhase.LLM, next_trial(view), "resume", "the search was resumed", 0, state.stalls)
        return self._add_event(view, write_move(state, after))

    def _add_reports(self, view: SearchView) -> SearchView:
        reports = self._agent.watched.take_reports()
        self._events += reports
        return replace(view, events=(*view.events, *reports)) if reports else view

    def _add_event(self, view: SearchView, event: ProposerEvent) -> SearchView:
        self._events.append(event)
        return replace(view, events=(*view.events, event))

    def _run_turn_now(self, view: SearchView, count: int) -> TurnOutcome:
        standing = find_standing(view, read_state(view), self._rules)
        limited = standing.is_limited
        return self._agent.run_turn(
            view,
            count,
            max_submitted=min(count, view.budget_left) or 1,
            overrules_left=0 if limited else overrules_left(view, self._rules),
            first_only=limited,
            standing=standing.describe(),
        )

    def _turn_is_recent(self, view: SearchView) -> bool:
        """Whether the latest turn came after the last move."""
        # A stall drops the queue.
        for event in reversed(view.events):
            if isinstance(event, ArbiterMove | LlmTurn):
                return isinstance(event, LlmTurn)
        return False

    # moves

    def _suspend_llm(
        self, view: SearchView, state: ArbiterState, cause: str, reason: str, is_temporary: bool = True
    ) -> None:
        state = self._as_llm(state)
        if not is_temporary:
            self._move(view, state, ArbiterPhase.OFF, cause, reason)
            return
        if cause == PROVIDER:
            self._move(view, state, ArbiterPhase.FALLBACK, cause, f"{reason}; it is asked again later")
            return
        since = [trial for trial in find_llm_trials(view) if trial.observation.trial >= state.since_trial]
        stalls = 0 if any(trial.improved for trial in since) else state.stalls
        explore = self._rules.find_explore(stalls, view.budget_left)
        self._move(view, state, ArbiterPhase.FALLBACK, cause, reason, explore=explore, stalls=stalls + 1)

    def _as_llm(self, state: ArbiterState) -> ArbiterState:
        """The state, with phase `llm` if it was `finished`: the search continues after all."""
        return replace(state, phase=ArbiterPhase.LLM) if state.phase is ArbiterPhase.FINISHED else state

    def _move(
        self,
        view: SearchView,
        before: ArbiterState,
        phase: ArbiterPhase,
        cause: str,
        reason: str,
        explore: int = 0,
        stalls: int | None = None,
    ) -> None:
        count = before.stalls if stalls is None else stalls
        after = ArbiterState(phase, next_trial(view), cause, reason, explore, count)
        self._is_stale |= phase is not ArbiterPhase.LLM
        self._events.append(write_move(before, after))

    def _propose_fallback(self, view: SearchView, count: int) -> list[Proposal]:
        proposals = list(self._fallback.propose(view, count))[:count]
        self._events += self._fallback.take_events()
        self._ending = None if proposals else self._fallback.ending()
        return proposals


def _asks_again(event: ProposerEvent) -> bool:
    """Whether the arbiter decides once more after this event: it moved, or the model corrected the prediction."""
    return isinstance(event, ArbiterMove) or (isinstance(event, LlmTurn) and event.decision is DecisionKind.REVISE)


def _is_open(view: SearchView, proposal: Proposal) -> bool:
    row = view.space.row(proposal.config)
    if row is None:
        return False
    return is_repeat_open(view, row) if proposal.is_repeat else not view.taken_N[row]


class NoLlmProposer(Proposer):
    """The fallback alone, for a search whose LLM key is missing; the first proposal records the reason once.

    A later `resume` with the key lets the LLM take part.
    """

    def __init__(self, fallback: Proposer, reason: str) -> None:
        self.name = fallback.name
        self._fallback = fallback
        self._reason = reason
        self._events: list[ProposerEvent] = []
        self._is_recorded = False

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """The fallback's proposals."""
        before = read_state(view, with_llm=False)
        if not self._is_recorded and before.phase is not ArbiterPhase.OFF:
            after = ArbiterState(ArbiterPhase.OFF, next_trial(view), NO_KEY, self._reason)
            self._events.append(write_move(before, after))
        self._is_recorded = True
        proposals = self._fallback.propose(view, count)
        self._events += self._fallback.take_events()
        return proposals

    def take_events(self) -> Sequence[ProposerEvent]:
        """See `Proposer`."""
        events, self._events = self._events, []
        return events

    def ending(self) -> str | None:
        """See `Proposer`."""
        return self._fallback.ending()
