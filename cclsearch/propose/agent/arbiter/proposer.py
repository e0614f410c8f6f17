"""The proposer that lets LLM and fallback take turns, so that a search is never stuck."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from cclsearch.core.errors import UserError
from cclsearch.propose.agent.agent import Agent, TurnOutcome, to_proposal
from cclsearch.propose.agent.arbiter.rules import (
    ArbiterSettings,
    find_stall,
    has_improved_since,
    overruled_rows,
    overrules_left,
    queued,
)
from cclsearch.propose.agent.arbiter.seeds import propose_seed
from cclsearch.propose.agent.arbiter.states import ArbiterPhase, State, next_trial, read_state, write_move
from cclsearch.propose.agent.history import drop_decision
from cclsearch.propose.agent.surrogate_table import best_observation
from cclsearch.propose.base import Proposal, Proposer, ProposerEvent, SearchView

STRATEGIES = ("hybrid", "llm", "optuna")


class Arbiter:
    """`hybrid` or `llm`: the LLM decides, the fallback steps in; a `Proposer` and a `EventSource`.

    All state is in the ledger's remarks, but for the one turn that may be under way in the background.
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
    ) -> None:
        """`parallel` over 1 runs turns in the background; `grace_s` is how long a free slot waits for one."""
        self.name = strategy
        self._agent = agent
        self._fallback = fallback
        self._parallel = parallel
        self._rules = rules or (ArbiterSettings() if strategy == "hybrid" else ArbiterSettings(num_seeds=0))
        self._grace_s = grace_s
        self._remarks: list[ProposerEvent] = []
        self._ending: str | None = None
        self._background: _Background | None = None
        self._is_fresh = True

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Up to `count` new members of the space; empty only where nothing is left, or the search is finished."""
        self._ending = None
        view = self._collect_overtaken(view)
        view = self._try_again(view)
        view = replace(view, overruled=overruled_rows(view))
        taken: list[Proposal] = []
        for _ in range(_MOST_MOVES):
            state = read_state(view)
            before = len(self._remarks)
            taken = self._act(view, state, count)
            fresh = tuple(self._remarks[before:])
            if taken or self._ending or not any(event.topic == "arbiter" for event in fresh):
                break
            view = replace(view, remarks=view.remarks + fresh)
        return taken

    def take_events(self) -> Sequence[ProposerEvent]:
        """See `EventSource`."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def close(self) -> None:
        """See `Closable`: what a turn in the background cost is told, its decision is not waited for."""
        background, self._background = self._background, None
        if background is None:
            return
        for _ in range(2):
            thought = background.result(_CLOSE_S)
            told = drop_decision(thought.event, "too late") if thought else self._agent.describe_under_way()
            if told:
                self._remarks.append(told)
                return

    def ending(self) -> str | None:
        """See `EventSource`."""
        return self._ending

    # phases

    def _act(self, view: SearchView, state: State, count: int) -> list[Proposal]:
        match state.phase:
            case ArbiterPhase.SEEDS:
                return self._act_seeds(view, state, count)
            case ArbiterPhase.LLM | ArbiterPhase.FINISHED:
                return self._act_llm(view, state, count)
            case ArbiterPhase.FALLBACK if next_trial(view) - state.since_trial >= state.explore:
                self._move(view, state, ArbiterPhase.LLM, "return", f"{state.explore} trials of new evidence are there")
                return []
        return self._propose_fallback(view, count)

    def _act_seeds(self, view: SearchView, state: State, count: int) -> list[Proposal]:
        if next_trial(view) <= self._rules.num_seeds:
            seeds = propose_seed(view, self._fallback, self._agent)
            if seeds:
                return seeds
        self._move(view, state, ArbiterPhase.LLM, "seeds done", "the seeds are placed" if self._rules.num_seeds else "")
        return []

    def _act_llm(self, view: SearchView, state: State, count: int) -> list[Proposal]:
        stall = find_stall(view, state, self._rules)
        if stall and state.phase is ArbiterPhase.LLM:
            self._put_aside(view, state, *stall)
            return []
        waiting = queued(view) if state.phase is ArbiterPhase.LLM else None
        if waiting and waiting[0].submitted and self._turn_is_recent(view, state):
            turn, items = waiting
            return [to_proposal(item, turn.number, self._agent.options.mode) for item in items[:count]]
        reached = self._agent.limit_reached(view)
        if reached:
            self._move(view, self._as_llm(state), ArbiterPhase.OFF, "limit", f"a limit is reached: {reached}")
            return []
        thought = self._think(view, count)
        if thought is None:
            return self._propose_fallback(view, count)
        return self._use(view, state, thought, count)

    def _use(self, view: SearchView, state: State, thought: TurnOutcome, count: int) -> list[Proposal]:
        self._remarks.append(thought.event)
        if thought.stall:
            self._put_aside(view, state, thought.stall.cause, thought.stall.text, can_pass=thought.stall.can_pass)
            return []
        if thought.finish is not None:
            return self._finish(view, state, thought.finish)
        fresh = [proposal for proposal in thought.proposals if _is_open(view, proposal)]
        if not fresh:
            # In the background the view moved on: what was new then may run by now.
            return self._propose_fallback(view, count)
        return fresh[:count]

    def _finish(self, view: SearchView, state: State, reason: str) -> list[Proposal]:
        if not self._agent.look(view).nothing_left or best_observation(view) is None:
            # Found in the background on an older view; what came in since has opened something.
            return self._propose_fallback(view, 1)
        if state.phase is not ArbiterPhase.FINISHED:
            self._move(view, state, ArbiterPhase.FINISHED, "finish", reason)
        self._ending = f"the LLM ended the search and the arbiter agrees that nothing plausible is left: {reason}"
        return []

    # turns

    def _think(self, view: SearchView, count: int) -> TurnOutcome | None:
        """A turn's result; None while one is under way in the background."""
        if self._parallel <= 1:
            return self._think_now(view, count)
        if self._background is None:
            self._background = _Background(lambda: self._think_now(view, count))
        if self._background.is_overtaken:
            return None
        thought = self._background.result(self._grace_s)
        if thought is not None:
            self._background = None
        return thought

    def _collect_overtaken(self, view: SearchView) -> SearchView:
        """The view with the cost of a turn that began before the LLM was put aside, once it has ended."""
        background = self._background
        thought = background.result(0.0) if background and background.is_overtaken else None
        if thought is None:
            return view
        self._background = None
        return self._tell(view, drop_decision(thought.event, "overtaken by a move, not used"))

    def _try_again(self, view: SearchView) -> SearchView:
        """The view with the LLM back in, where an earlier session had put it off and this one may do better."""
        fresh, self._is_fresh = self._is_fresh, False
        state = read_state(view)
        if not fresh or state.phase is not ArbiterPhase.OFF or self._agent.limit_reached(view):
            return view
        after = State(ArbiterPhase.LLM, next_trial(view), "resume", "the search was resumed", 0, state.stalls)
        return self._tell(view, write_move(state, after))

    def _tell(self, view: SearchView, event: ProposerEvent) -> SearchView:
        self._remarks.append(event)
        return replace(view, remarks=(*view.remarks, event))

    def _think_now(self, view: SearchView, count: int) -> TurnOutcome:
        most = max(count, self._rules.max_queue if self._parallel <= 1 else count)
        return self._agent.run_turn(
            view,
            count,
            max_submitted=min(most, view.budget_left) or 1,
            overrules_left=overrules_left(view, self._rules),
        )

    def _turn_is_recent(self, view: SearchView, state: State) -> bool:
        """Whether the latest turn lies after the last move: a queue does not outlive a stall."""
        for event in reversed(view.remarks):
            if event.topic == "arbiter":
                return False
            if event.topic == "llm_turn":
                return True
        return False

    # moves

    def _put_aside(self, view: SearchView, state: State, cause: str, reason: str, can_pass: bool = True) -> None:
        state = self._as_llm(state)
        if not can_pass:
            self._move(view, state, ArbiterPhase.OFF, cause, reason)
            return
        stalls = 0 if has_improved_since(view, state.since_trial) else state.stalls
        explore = min(self._rules.explore * 2**stalls, self._rules.explore_most)
        self._move(view, state, ArbiterPhase.FALLBACK, cause, reason, explore=explore, stalls=stalls + 1)

    def _as_llm(self, state: State) -> State:
        """A finished search that goes on after all is the LLM's again."""
        return replace(state, phase=ArbiterPhase.LLM) if state.phase is ArbiterPhase.FINISHED else state

    def _move(
        self,
        view: SearchView,
        before: State,
        phase: ArbiterPhase,
        cause: str,
        reason: str,
        explore: int = 0,
        stalls: int | None = None,
    ) -> None:
        count = before.stalls if stalls is None else stalls
        after = State(phase, next_trial(view), cause, reason, explore, count)
        if self._background and phase is not ArbiterPhase.LLM:
            self._background.is_overtaken = True
        self._remarks.append(write_move(before, after))

    def _propose_fallback(self, view: SearchView, count: int) -> list[Proposal]:
        return list(self._fallback.propose(view, count))[:count]


_MOST_MOVES = 6
"""Moves within one call: seeds, llm, fallback and back at most."""
_CLOSE_S = 2.0
"""How long the end of a search waits for a turn in the background."""


class _Background:
    """One call in a daemon thread."""

    def __init__(self, call: object) -> None:
        self._call = call
        self.is_overtaken = False
        """Whether the LLM was put aside since: what it decides was thought out on older evidence."""
        self._thought: TurnOutcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="llm-turn", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._thought = self._call()  # type: ignore[operator]
        except BaseException as error:
            self._error = error

    def result(self, wait_s: float) -> TurnOutcome | None:
        """What the call gave; None while it runs. What it raised is raised here."""
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return None
        if self._error:
            raise self._error
        return self._thought


def _is_open(view: SearchView, proposal: Proposal) -> bool:
    row = view.space.row(proposal.config)
    return row is not None and row not in view.closed and all(o.row != row for o in view.observations)


def make_arbiter(
    strategy: str, fallback: Proposer, agent: Agent | None, *, parallel: int = 1, rules: ArbiterSettings | None = None
) -> Proposer:
    """The proposer of `--strategy` (`optuna` is the fallback alone); raises UserError where an LLM is missing."""
    if strategy not in STRATEGIES:
        raise UserError(f"--strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")
    if strategy == "optuna":
        return fallback
    if agent is None:
        raise UserError(f"--strategy {strategy} needs --llm SPEC; without one, use --strategy optuna")
    return Arbiter(agent, fallback, strategy=strategy, parallel=parallel, rules=rules)
