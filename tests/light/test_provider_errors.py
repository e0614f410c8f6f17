"""Errors of today's servers: their kind, the part of the request that they refuse, and the form to ask in next."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from paths import TESTS

from cclsearch.propose.agent.providers.errors import read_status_error
from cclsearch.propose.agent.providers.forms import (
    Api,
    CallForm,
    Form,
    Thinking,
    find_allowed_output,
    find_feature,
    step_down,
)
from cclsearch.propose.agent.providers.types import CompletionRequest, Message, ProviderError, Role, ToolSpec

TOOL = ToolSpec(name="submit", description="decide", parameters={"type": "object", "properties": {}})
ASK = CompletionRequest(system="be brief", messages=(Message(role=Role.USER, text="go"),), tools=(TOOL,))
BOTH = (Api.CHAT, Api.RESPONSES)
CASES = yaml.safe_load((TESTS / "light" / "provider_errors.yaml").read_text(encoding="utf-8"))


def words(case: list[object]) -> str:
    """A name for the case: what the server says."""
    return re.sub(r"\W+", "-", str(case[-2]))[-60:]


def error(status: int, body: object, **headers: str) -> ProviderError:
    content = body if isinstance(body, str) else json.dumps(body)
    return read_status_error(status, content.encode(), headers)


def openai(message: str, **more: object) -> dict[str, object]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **more}}


def anthropic(message: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


@pytest.mark.parametrize("case", CASES["refusals"], ids=words)
def test_a_refusal_names_the_part_of_the_request(case):
    status, body, part = case
    assert find_feature(error(status, body)) == part


@pytest.mark.parametrize("case", CASES["kinds"], ids=words)
def test_an_error_is_read_by_what_it_says(case):
    status, body, kind = case
    assert error(status, body).kind.value == kind


@pytest.mark.parametrize(
    ("headers", "text", "seconds"),
    [
        ({"retry-after": "7"}, "", 7.0),
        ({"retry-after-ms": "1500"}, "", 1.5),
        ({"retry-after": "soon"}, "", None),
        ({}, "Please try again in 1m2.5s", 62.5),
        ({}, "Please retry in 34s", 34.0),
        ({}, "Please try again in 250ms", 0.25),
        ({}, "slow down", None),
    ],
)
def test_the_wait_of_a_rate_limit_is_read_from_headers_and_words(headers, text, seconds):
    assert error(429, openai(text), **headers).retry_after_s == seconds


@pytest.mark.parametrize("case", CASES["limits"], ids=words)
def test_the_limit_on_output_is_computed_from_the_complaint(case):
    text, allowed = case
    assert find_allowed_output(text.lower(), 16384) == allowed


def test_a_form_that_was_refused_before_is_not_asked_again():
    chat, responses = Form(api=Api.CHAT), Form(api=Api.RESPONSES)
    found, _ = step_down(responses, error(404, {"detail": "Not Found"}), ASK, BOTH, (chat, responses))
    assert (found.api, found.call) == (Api.CHAT, CallForm.SCHEMA)


def test_reasoning_that_is_gone_is_not_asked_for_again():
    gone = openai("The `reasoning_content` in the thinking mode must be passed back to the API.")
    assert walk(Form(api=Api.CHAT), (400, gone)).call is CallForm.TEXT


def walk(form: Form, *refusals: tuple[int, object]) -> Form:
    for status, body in refusals:
        form, line = step_down(form, error(status, body), ASK, BOTH)
        assert line
    return form


CLAUDE = Form(api=Api.MESSAGES, call=CallForm.AUTO, thinking=Thinking.ADAPTIVE, marks_cache=True, streams=True)


def test_an_older_claude_thinks_by_budget_and_a_model_without_thinking_is_made_to_call():
    form = walk(CLAUDE, (400, anthropic("adaptive thinking is not supported on this model")))
    assert (form.thinking, form.call) == (Thinking.BUDGET, CallForm.AUTO)
    form = walk(form, (400, anthropic('"thinking.type.enabled" is not supported for this model.')))
    assert (form.thinking, form.call) == (Thinking.NONE, CallForm.FORCED)


def test_effort_takes_the_next_lower_word_that_the_server_names_else_none():
    form = Form(api=Api.RESPONSES, effort="max")
    listed = "Unsupported value: 'max' is not supported. Supported values are: 'low', 'medium', 'high', and 'xhigh'."
    assert walk(form, (400, openai(listed, param="reasoning.effort"))).effort == "xhigh"
    assert walk(form, (400, openai("Unsupported parameter: 'reasoning.effort'", param="reasoning.effort"))).effort == ""


def test_a_model_of_the_responses_api_is_asked_there_and_a_server_without_it_by_chat():
    body = openai("This model is only supported in v1/responses and not in v1/chat/completions.")
    assert walk(Form(api=Api.CHAT), (404, body)).api is Api.RESPONSES
    assert walk(Form(api=Api.RESPONSES), (404, {"detail": "Not Found"})).api is Api.CHAT


def test_an_address_without_v1_is_tried_with_it_once():
    form = walk(Form(api=Api.CHAT), (404, {"detail": "Not Found"}))
    assert form.path == "/v1"
    with pytest.raises(ProviderError, match="is the address right"):
        walk(form, (404, {"detail": "Not Found"}))


def test_refusals_that_say_nothing_lead_down_to_text_and_then_to_the_error():
    form = walk(Form(api=Api.CHAT, effort="high"), *[(400, openai("no"))] * 4)
    assert (form.call, form.system_apart, form.effort) == (CallForm.TEXT, False, "")
    with pytest.raises(ProviderError, match="HTTP 400: no"):
        walk(form, (400, openai("no")))


def test_a_context_that_is_too_small_is_named():
    with pytest.raises(ProviderError, match="16,000 tokens"):
        walk(Form(api=Api.CHAT), (400, openai("prompt is too long: 9000 tokens > 8192 maximum, max_tokens 16")))
