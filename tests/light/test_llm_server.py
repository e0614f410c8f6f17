"""Whether the LLM's server can be asked, what that costs, and that a limit on the money is never passed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from llm.turns import GOOD, FakeClock, Scripted, call, run_turn, submit

from cclsearch.core.errors import UserError
from cclsearch.propose.agent.providers.cost import (
    Cost,
    LlmLimits,
    Price,
    cost_of,
    largest_cost,
)
from cclsearch.propose.agent.providers.prices import parse_price
from cclsearch.propose.agent.providers.spec import find_price
from cclsearch.propose.agent.providers.types import (
    Answer,
    CompletionRequest,
    ErrorKind,
    Message,
    ProviderError,
    Role,
    StopReason,
    Usage,
)
from cclsearch.propose.agent.server import PAUSES_S, LlmServer, ServerState

OK = Answer(text="ok", stop=StopReason.DONE, usage=Usage(input_tokens=100, output_tokens=10))
ASK = CompletionRequest(system="s" * 4000, messages=(Message(role=Role.USER, text="u" * 4000),), tools=())


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (ErrorKind.AUTHENTICATION, ServerState.OFF),
        (ErrorKind.EMPTY_ACCOUNT, ServerState.OFF),
        (ErrorKind.UNKNOWN_MODEL, ServerState.OFF),
        (ErrorKind.UNKNOWN_HOST, ServerState.OFF),
        (ErrorKind.CERTIFICATE, ServerState.OFF),
        (ErrorKind.NOT_AN_API, ServerState.OFF),
        (ErrorKind.BAD_REQUEST, ServerState.OFF),
        (ErrorKind.RATE_LIMIT, ServerState.DOWN),
        (ErrorKind.OVERLOADED, ServerState.DOWN),
        (ErrorKind.CONNECTION, ServerState.DOWN),
        (ErrorKind.TIMEOUT, ServerState.DOWN),
        (ErrorKind.BAD_GENERATION, ServerState.UP),
    ],
)
def test_only_what_no_other_try_cures_refuses_a_search(kind, state):
    server = LlmServer(Scripted(ProviderError(kind, "why")), clock=FakeClock())
    server.check()
    assert server.state is state
    assert server.state is ServerState.UP or "why" in server.reason


def test_a_server_that_is_down_is_asked_again_with_doubling_pauses_and_then_no_more():
    clock = FakeClock()
    provider = Scripted(ProviderError(ErrorKind.OVERLOADED, "busy"))
    server = LlmServer(provider, clock=clock)
    server.fail("busy")
    asked_s = []
    while server.poll() is ServerState.DOWN:
        if len(provider.requests) > len(asked_s):
            asked_s.append(clock.time_s)
        clock.time_s += 1.0
    assert len(provider.requests) == len(PAUSES_S)
    assert [later - earlier for earlier, later in pairwise(asked_s)] == [10.0, 20.0, 40.0]
    assert clock.time_s <= 180.0
    assert "three minutes in vain" in server.reason


def test_a_server_that_answers_only_the_small_request_is_given_up_too():
    clock = FakeClock()
    server = LlmServer(Scripted(OK), clock=clock)
    for _ in range(10):
        if server.state is ServerState.OFF:
            break
        server.fail("HTTP 500", 30.0)
        clock.time_s += 200.0
        server.poll()
    assert server.state is ServerState.OFF
    server.reopen()
    server.succeed()
    server.fail("HTTP 500")
    assert server.state is ServerState.DOWN


def test_a_server_that_answers_again_is_up_and_its_cost_is_reported():
    clock = FakeClock()
    server = LlmServer(Scripted(OK), Price(model="*", input_usd=10.0, output_usd=100.0), clock)
    server.fail("busy")
    assert server.poll() is ServerState.DOWN
    clock.time_s += PAUSES_S[0]
    assert server.poll() is ServerState.UP
    (report,) = server.take_reports()
    assert report.cost.usd == pytest.approx(100 * 10e-6 + 10 * 100e-6)
    assert server.take_reports() == []


def test_another_search_of_the_process_asks_a_server_again_that_an_earlier_one_gave_up():
    server = LlmServer(Scripted(OK), clock=FakeClock(), state=ServerState.OFF)
    assert server.poll() is ServerState.OFF
    server.reopen()
    assert server.poll() is ServerState.UP


def test_a_wrong_key_in_the_middle_of_a_search_is_final_and_an_unknown_host_is_not():
    for kind, state in ((ErrorKind.AUTHENTICATION, ServerState.OFF), (ErrorKind.UNKNOWN_HOST, ServerState.DOWN)):
        clock = FakeClock()
        server = LlmServer(Scripted(ProviderError(kind, "no")), clock=clock)
        server.fail("busy")
        clock.time_s += PAUSES_S[0]
        assert server.poll() is state


def test_the_largest_cost_of_a_request_counts_its_whole_output_and_a_token_for_every_other_byte():
    cost = largest_cost(ASK, Price(model="*", input_usd=2.0, output_usd=10.0, cache_write_usd=4.0))
    assert cost.usd is not None
    assert cost.usd >= 8000 * 0.5 * 4e-6 + 16_384 * 10e-6
    assert cost.is_assumed


@pytest.mark.parametrize("max_usd", [0.05, 0.2, 0.5, 1.0])
def test_a_limit_on_the_money_is_never_passed_whatever_the_model_writes(max_usd):
    def use_all(request: CompletionRequest) -> Answer:
        usage = Usage(input_tokens=request.num_bytes // 2, output_tokens=request.max_output_tokens)
        return call("candidates").model_copy(update={"usage": usage})

    outcome = run_turn(Scripted(use_all), limits=LlmLimits(max_usd=max_usd))
    spent = outcome.event.cost
    assert spent.usd is not None
    assert spent.usd <= max_usd * (1 + 1e-12), "sums are rounded"
    assert outcome.stall is not None
    assert max_usd == 1.0 or outcome.stall.cause == "limit"


def test_an_answer_that_did_not_arrive_counts_with_its_largest_cost():
    lost = ProviderError(ErrorKind.TIMEOUT, "late", may_have_cost=True)
    assert run_turn(Scripted(lost)).event.cost.usd > 0.16
    refused = ProviderError(ErrorKind.BAD_REQUEST, "no")
    assert run_turn(Scripted(refused)).event.cost.usd == 0.0
    assert run_turn(Scripted(submit(GOOD))).event.cost.is_assumed is False


@pytest.mark.parametrize(
    ("name", "is_assumed"),
    [
        ("anthropic:claude-opus-5-5", False),
        ("anthropic:claude-fable-5-2", False),
        ("anthropic:claude-haiku-4-5-20251001", False),
        ("anthropic:claude-opus-9", True),
        ("openai:gpt-5.6-sol", False),
        ("openai:gpt-5.2", False),
        ("openai:gpt-5.6-mini", True),
    ],
)
def test_current_models_have_a_price_with_its_source_and_others_the_dearest_of_their_family(name, is_assumed):
    price = find_price(name)
    assert price is not None
    assert price.is_assumed is is_assumed
    assert price.output_usd > price.input_usd > 0
    assert price.source.startswith("genai-prices ")
    assert ("assumed" in price.describe()) is is_assumed
    cost = cost_of(Usage(output_tokens=10**6), price)
    assert cost.usd == pytest.approx(price.output_usd)
    assert ("(assumed)" in cost.describe_spent()) is is_assumed


def test_the_dearest_of_a_family_is_dearer_than_its_other_models():
    assumed, known = find_price("anthropic:claude-opus-9"), find_price("anthropic:claude-opus-5-5")
    assert assumed is not None
    assert known is not None
    assert assumed.output_usd >= known.output_usd
    assert find_price("anthropic:no-such-family") is None


def test_a_price_of_the_user_s_is_read_and_a_wrong_one_refused():
    price = parse_price("4,20")
    assert (price.input_usd, price.output_usd) == (4.0, 20.0)
    for wrong in ("4", "4,", "a,b", "-1,2", "1,2,3", "nan,1"):
        with pytest.raises(UserError, match="--llm-price must be"):
            parse_price(wrong)


def test_costs_add_up_with_what_is_assumed():
    total = Cost(usd=1.0, requests=1) + Cost(usd=0.5, requests=2, is_assumed=True)
    assert (total.usd, total.requests, total.is_assumed) == (1.5, 3, True)
