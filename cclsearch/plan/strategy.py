"""Which strategy proposes, and whether an LLM is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cclsearch.core.errors import UserError
from cclsearch.core.registry import describe_broken_plugins
from cclsearch.core.text import guess_name
from cclsearch.core.values import Value
from cclsearch.plan.request import SearchRequest
from cclsearch.propose.agent.policy.store import freeze_seed
from cclsearch.propose.agent.providers.kind import describe_forms, explain_unknown_price, list_kinds, list_prices
from cclsearch.propose.agent.providers.spec import missing_key, parse_spec, read_timeout_s, refuse_if_offline
from cclsearch.propose.study.choose import list_strategies, resolve_sampler
from cclsearch.run.spec import DEFAULT_SAMPLER, DEFAULT_STRATEGY, SAMPLER


@dataclass(frozen=True)
class Strategy:
    """The chosen strategy and its LLM options."""

    name: str
    sampler: str
    """As `--sampler` names it; a folder as an absolute path."""
    llm_options: Mapping[str, Value | None]
    """The request's, with the seed policy's source."""
    notes: tuple[str, ...]
    """On the LLM: none is used, its key is missing, or its price is unknown."""


def choose_strategy(request: SearchRequest) -> Strategy:
    """Return the strategy of an LLM, else `sampler`, with the sampler; raises UserError if one cannot work."""
    name = _choose_name(request)
    sampler = resolve_sampler(request.sampler or DEFAULT_SAMPLER)
    return Strategy(name, sampler, freeze_seed(request.llm_options), _describe_llm(request))


def _choose_name(request: SearchRequest) -> str:
    strategy = request.strategy
    if strategy is not None and strategy not in (known := list_strategies()):
        raise UserError(
            f"there is no strategy {strategy!r}{guess_name(strategy, known)}; known: {', '.join(known)}; name a sampler"
            f" with --sampler{describe_broken_plugins()}"
        )
    if not request.llm:
        if strategy:
            raise UserError(f"strategy {strategy!r} needs an LLM: --llm {describe_forms()}")
        return SAMPLER
    refuse_if_offline(parse_spec(request.llm))
    # Wrong values in the environment are reported before anything starts.
    list_prices()
    read_timeout_s()
    return strategy or DEFAULT_STRATEGY


def _describe_llm(request: SearchRequest) -> tuple[str, ...]:
    if request.llm:
        spec = parse_spec(request.llm)
        key, unknown_price = missing_key(spec), explain_unknown_price(spec.name, request.llm_options.get("max_usd"))
        missing = f"{key} is not set: the search runs without an LLM" if key else None
        return tuple(line for line in (missing, unknown_price) if line)
    if request.sampler not in (None, DEFAULT_SAMPLER):
        return ()
    return (f"no LLM is used (add one with {' or '.join(f'`--llm {word}:MODEL`' for word in list_kinds())})",)
