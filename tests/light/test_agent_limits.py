"""Time, prices and limits of an agent's turns."""

from __future__ import annotations

import pytest
from llm.turns import GOOD, FakeClock, Scripted, call, run_turn, submit

from cclsearch.core.errors import UserError
from cclsearch.propose.agent.history import limits_event, read_limits
from cclsearch.propose.agent.providers.cost import LlmLimits, load_prices, price_usage
from cclsearch.propose.agent.providers.kind import explain_unknown_price
from cclsearch.propose.agent.providers.spec import parse_spec, read_timeout_s
from cclsearch.propose.agent.providers.types import (
    Usage,
)


def test_tokens_money_and_seconds_are_accounted():
    clock = FakeClock()
    provider = Scripted(call("candidates"), submit(GOOD), clock=clock)
    outcome = run_turn(provider)
    assert outcome.event.cost.usage.input_tokens == 2000
    assert outcome.event.cost.requests == 2
    assert outcome.event.cost.usd == pytest.approx(2 * (1000 * 1.0 + 100 * 10.0) / 1e6)


def test_a_limit_ends_the_turn_for_good():
    outcome = run_turn(Scripted(call("candidates")), limits=LlmLimits(max_tokens=2000))
    assert outcome.stall is not None
    assert (outcome.stall.cause, outcome.stall.is_temporary) == ("limit", False)
    assert "2,200 of 2,000 tokens" in outcome.stall.text
    outcome = run_turn(Scripted(call("candidates")), limits=LlmLimits(max_usd=0.003))
    assert outcome.stall is not None
    assert "$0.00" in outcome.stall.text


def test_timeout_of_an_answer_is_read_from_the_environment():
    assert read_timeout_s({}) == 120.0
    assert read_timeout_s({"CCL_SEARCH_LLM_TIMEOUT_S": "900"}) == 900.0
    for wrong in ("0", "nan", "inf", "soon", "-3"):
        with pytest.raises(UserError, match="CCL_SEARCH_LLM_TIMEOUT_S must be seconds"):
            read_timeout_s({"CCL_SEARCH_LLM_TIMEOUT_S": wrong})


def test_the_shipped_price_list_is_dated_and_prices_by_pattern():
    prices = load_prices()
    assert prices.as_of
    assert prices.find("anthropic:claude-sonnet-4-5") is not None
    assert prices.find("anthropic:no-such-model") is None


def test_remote_server_has_no_price_and_local_server_is_free(monkeypatch):
    for url in ("http://127.0.0.1:8000/v1#m", "http://localhost/v1#m", "http://[::1]:1/v1#m"):
        name = parse_spec(url).name
        assert name == "local:m"
        assert price_usage(Usage(input_tokens=10**6), load_prices().find(name)) == 0.0
        assert explain_unknown_price(name, 1.0) is None
    name = parse_spec("https://llm.example.org/v1#m").name
    assert name == "compatible:m"
    assert load_prices().find(name) is None
    assert "--max-usd has no effect" in (explain_unknown_price(name, 1.0) or "")
    assert explain_unknown_price(name, None) is None
    assert explain_unknown_price("openai:gpt-5", 1.0) is None


def test_raised_limit_applies_to_later_turns():
    limits = read_limits((limits_event(LlmLimits(max_usd=2.0)),), LlmLimits(max_tokens=5, max_usd=1.0))
    assert (limits.max_tokens, limits.max_usd) == (5, 2.0)
