"""Build the strategy of a search with an LLM: the agent, and the evidence in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.loop.evidence import FolderEvidence
from cclsearch.loop.growth import MAX_GROWTHS, level_of, list_openings, plan_growth
from cclsearch.propose.agent.agent import Agent, make_agent
from cclsearch.propose.agent.conversation import DEFAULT_TOKENS
from cclsearch.propose.agent.memory.turn_records import TURNS_FOLDER
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.providers.cost import LlmLimits
from cclsearch.propose.agent.providers.outside import ASKED_FILE, OutsideAgent
from cclsearch.propose.agent.providers.prices import Price, parse_price
from cclsearch.propose.agent.providers.spec import (
    find_address,
    missing_key,
    parse_spec,
    read_timeout_s,
    refuse_if_offline,
)
from cclsearch.propose.agent.providers.types import Effort
from cclsearch.propose.agent.server import LlmServer, ServerState, connect
from cclsearch.propose.base import LlmContext, SearchView
from cclsearch.propose.events import LlmMode
from cclsearch.record.event import SpaceGrown
from cclsearch.run.folder import grow_spec
from cclsearch.run.spec import RunSpec, read_spec
from cclsearch.scoring.objective import Objective, Term
from cclsearch.space.build import explain_config
from cclsearch.space.framework import load_framework
from cclsearch.space.opening import Extend


def make_llm_context(spec: RunSpec, folder: Path) -> LlmContext | None:
    """Return the parts of the strategy of a search with `--llm`; None without an LLM."""
    if spec.llm is None:
        return None
    llm = parse_spec(spec.llm)
    refuse_if_offline(llm)
    return LlmContext(
        missing_key=missing_key(llm),
        make_provider=lambda: connect_llm(spec.llm, spec.llm_options).provider,
        make_agent=lambda: _make_search_agent(spec, folder),
    )


def connect_llm(llm: str | None, options: Mapping[str, Value | None]) -> LlmServer:
    """The server of `--llm` with the search's options; raises UserError if it cannot be asked at all."""
    return connect(parse_spec(llm or ""), effort=read_effort(options), price=_read_price(options))


def read_effort(options: Mapping[str, Value | None]) -> Effort | None:
    """`--llm-effort` among the options of a search; None if it was not given."""
    return Effort(str(options["effort"])) if options.get("effort") else None


def _read_price(options: Mapping[str, Value | None]) -> Price | None:
    return parse_price(str(options["price"])) if options.get("price") else None


def check_llm(llm: str | None, options: Mapping[str, Value | None]) -> str | None:
    """Ask the LLM one small request before a search; returns a line about it, None without an LLM.

    Raises UserError if no other try can help: no or a refused key, an unknown model or host, a refused certificate, an
    empty account, an address that is not an API, every form refused. If the server is slow, overloaded or not there,
    the line says so: the search begins, and asks it again.
    """
    if llm is None:
        return None
    server = connect_llm(llm, options)
    limit, most = options.get("max_usd"), server.check_cost.usd
    if limit is not None and most is not None and most > float(limit):
        raise UserError(f"--max-usd {limit}: one small request to {llm} may cost ${most:.2f}; raise the limit")
    seconds = server.check()
    address = find_address(parse_spec(llm))
    if server.state is ServerState.OFF:
        raise UserError(f"the LLM {llm} cannot be used: {server.reason} (at {address}); or search with --llm none")
    if server.state is ServerState.DOWN:
        return f"{llm} at {address}: {server.reason}; the search begins without it, and asks it again"
    form = getattr(server.provider, "form", None)
    price = server.price.describe() if server.price else "price unknown"
    return f"{llm} answers in {seconds:.1f} s ({'; '.join(filter(None, (form and form.describe(), price)))})"


def _make_search_agent(spec: RunSpec, folder: Path) -> Agent:
    """The agent with the evidence of the run folder."""
    space, server = GrowingSpace(read_spec(folder)), connect_llm(spec.llm, spec.llm_options)
    server.reopen()
    if isinstance(server.provider, OutsideAgent):
        server.provider.turns = folder / TURNS_FOLDER
        (server.provider.turns / ASKED_FILE).unlink(missing_ok=True)  # of a session that was killed
    return make_agent(
        server,
        options=read_options(spec),
        timeout_s=read_timeout_s(read_effort(spec.llm_options), parse_spec(spec.llm or "").kind),
        folder=folder,
        evidence=FolderEvidence(folder, spec.framework, has_traces=spec.recording is None),
        explain=space.explain if spec.recording is None else None,
        extender=space,
    )


def read_options(spec: RunSpec) -> AgentOptions:
    """The agent's options, as the spec froze them. Prompts never contain the origin of a recording."""
    options = spec.llm_options
    tokens, usd, seed_policy = options.get("max_tokens"), options.get("max_usd"), options.get("seed_policy")
    return AgentOptions(
        mode=LlmMode(str(options.get("mode") or LlmMode.CONFIGS)),
        limits=LlmLimits(
            max_tokens=int(tokens) if tokens is not None else None, max_usd=float(usd) if usd is not None else None
        ),
        anonymous=not spec.provenance.is_repeatable,
        goal=describe_goal(spec.objective, TASKS.get(spec.card.task).primary_metric),
        proposer=spec.llm if spec.llm and spec.llm.startswith("mcp:") else "llm",
        seed_policy=str(seed_policy) if seed_policy else None,
        # an outside agent remembers its own words
        max_context=0 if (spec.llm or "").startswith("mcp:") else int(options.get("context") or DEFAULT_TOKENS),
        seed_program=str(options["seed_program"]) if options.get("seed_program") else None,
    )


def describe_goal(objective: Objective, primary: MetricInfo) -> str:
    """The formula of the loss in one line, with weights and bounds; empty if it is the primary metric itself."""
    if objective.is_weighted:
        shares = [
            f"{term.weight:g} x {_of_reference(term, term.direction is Direction.MINIMIZE)}" for term in objective.terms
        ]
        parts = [f"loss = 1 / ({' + '.join(shares)})"]
    else:
        parts = [
            f"{'loss' if i == 0 else f'objective {i + 1}'} = {_minimized(term)}{term.metric}"
            + (f" ({term.unit})" if term.unit and term.metric != primary.name else "")
            + ("" if term.direction is Direction.MINIMIZE else f", so a higher {term.metric} is better")
            for i, term in enumerate(objective.terms)
            if objective.metrics != (primary.name,) or term.direction is Direction.MAXIMIZE
        ]
    for bound in objective.constraints:
        limits = [f"at least {bound.at_least:g}"] if bound.at_least is not None else []
        limits += [f"at most {bound.at_most:g}"] if bound.at_most is not None else []
        unit = f" {bound.unit}" if bound.unit else ""
        parts.append(f"only trials with {bound.metric} {' and '.join(limits)}{unit} count")
    return "; ".join(parts)


def _minimized(term: Term) -> str:
    """Return the metric's prefix in a formula of which less is better."""
    return "" if term.direction is Direction.MINIMIZE else "1 / " if term.reciprocal else "-"


def _of_reference(term: Term, is_minimized: bool) -> str:
    reference = f"baseline trial's {term.metric}" if term.reference is None else f"{term.reference:g}"
    return f"({reference} / {term.metric})" if is_minimized else f"({term.metric} / {reference})"


NO_RECORDING = "nothing: this search reads a recording, where only the measured configurations exist"


class GrowingSpace:
    """Explains configurations of the space as it is now, and checks what the model asks to add; a `SpaceExtender`."""

    def __init__(self, original: RunSpec) -> None:
        """`original` is the search as it began, without later growth."""
        self._original = original
        self._level = level_of(original)
        self._growth: SpaceGrown | None = None

    def explain(self, config: Config) -> Sequence[str]:
        """The rules that a configuration violates, one line each."""
        spec = grow_spec(self._original, self._growth)
        framework = load_framework(spec.framework)
        verdicts = explain_config(spec.card, framework, config, spec.knobs, spec.use_fewer)
        return [f"{verdict.rule}: {verdict.summary} ({verdict.detail})" for verdict in verdicts if verdict.ok is False]

    def offers(self, view: SearchView) -> Sequence[str]:
        """Return the possible additions, one line each; empty if none."""
        grown = self._read(view)
        if self._level is Extend.OFF:
            return []
        if self._original.recording is not None:
            return [NO_RECORDING]
        if len(grown) >= MAX_GROWTHS:
            return []
        framework = load_framework(self._original.framework)
        lines = [opening.describe() for opening in list_openings(self._original, view.space.knobs).values()]
        if self._level is Extend.ANY and framework.libraries:
            lines.append(
                f"any other variable or XLA flag of {', '.join(framework.libraries)} by its name, unless it loads code,"
                " names a place, or changes precision, hardware or the work; one that the framework does not know fails"
            )
        return lines

    def check(self, view: SearchView, wanted: Mapping[str, Sequence[Value]]) -> str:
        """Return the additions in one line; raises UserError with each refused value and the reason."""
        grown = self._read(view)
        if self._original.recording is not None:
            raise UserError(NO_RECORDING)
        planned = plan_growth(self._original, self._growth, len(grown), wanted, level=self._level)
        return one_line(planned.describe(len(view.space)), 400)

    def _read(self, view: SearchView) -> list[SpaceGrown]:
        grown = [event for event in view.events if isinstance(event, SpaceGrown)]
        self._growth = grown[-1] if grown else None
        return grown
