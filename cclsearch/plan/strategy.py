"""Which strategy proposes, and whether an LLM is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cclsearch.core.errors import UserError
from cclsearch.core.values import Value
from cclsearch.plan.request import SearchRequest
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.agent.policy.store import freeze_seed
from cclsearch.propose.agent.providers.cost import explain_unknown_price, load_prices, prices_path
from cclsearch.propose.agent.providers.spec import missing_key, parse_spec, read_timeout_s

LLM_STRATEGIES = ("hybrid", "llm")


@dataclass(frozen=True)
class Strategy:
    """The chosen strategy and its LLM options."""

    name: str
    llm_options: Mapping[str, Value | None]
    """The request's, with the seed policy's source."""
    notes: tuple[str, ...]
    """On the LLM: none is used, its key is missing, or its price is unknown."""


def choose_strategy(request: SearchRequest, *, multi: bool) -> Strategy:
    """Return the requested strategy, else `hybrid` with an LLM, `pareto` over several metrics, or `default`."""
    name = _choose_name(request, multi=multi)
    return Strategy(name, freeze_seed(request.llm_options), _describe_llm(request, name))


def _choose_name(request: SearchRequest, *, multi: bool) -> str:
    strategy = request.strategy or ("hybrid" if request.llm else "pareto" if multi else "default")
    if strategy == "optuna":
        strategy = "default"  # the fallback of `hybrid` and `llm`, without an LLM
    if request.llm:
        parse_spec(request.llm)
        # Wrong values in the environment are reported before anything starts.
        load_prices(prices_path())
        read_timeout_s()
    if strategy not in LLM_STRATEGIES:
        PROPOSERS.get(strategy)
    elif not request.llm:
        raise UserError(f"strategy {strategy!r} needs an LLM: `--llm anthropic:MODEL`, `openai:MODEL` or a URL")
    return strategy


def _describe_llm(request: SearchRequest, strategy: str) -> tuple[str, ...]:
    if request.llm and strategy in LLM_STRATEGIES:
        spec = parse_spec(request.llm)
        key, unknown_price = missing_key(spec), explain_unknown_price(spec.name, request.llm_options.get("max_usd"))
        missing = f"{key} is not set: the search runs without an LLM" if key else None
        return tuple(line for line in (missing, unknown_price) if line)
    if request.llm or strategy != "default":
        return ()
    return ("no LLM is used (add one with `--llm anthropic:MODEL` or `--llm openai:MODEL`)",)
