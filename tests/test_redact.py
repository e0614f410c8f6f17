"""Secrets in text are masked by their shape or by the name before them; ordinary text is unchanged."""

from __future__ import annotations

import pytest

from cclsearch.core.redact import MASK, redact

HEX = "0123456789abcdef0123456789abcdef01234567"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"WANDB_API_KEY={HEX}", HEX),
        (f"export WANDB_API_KEY='{HEX}' and on", HEX),
        (f'{{"wandb_api_key": "{HEX}"}}', HEX),
        (f'"{{\\"api_key\\": \\"{HEX}\\"}}"', HEX),
        (f"HF_TOKEN: {HEX}", HEX),
        ("login with password=hunter2 failed", "hunter2"),
        ("password=correcthorse&user=x", "correcthorse"),
        ('"password": "correcthorse"', "correcthorse"),
        ("password: h0rse!battery", "h0rse!battery"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
        ("http://h/v1?api_key=abcdefgh#m", "abcdefgh"),
        ("token=abcd1234efgh", "abcd1234efgh"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA=="),
        ("authorization: Bearer abcdefgh+ijklmnop/qrst==", "abcdefgh+ijklmnop/qrst=="),
        ("Bearer abc.def-ghi+jkl/mno~p", "abc.def-ghi+jkl/mno~p"),
        (f"cookie {JWT} sent", JWT),
        ("github_pat_11ABCDEFG0123456789_abcdefghijklmnop", "11ABCDEFG0123456789"),
        ("postgres://user:sesame@host/db", "sesame"),
    ],
)
def test_a_secret_in_text_is_masked(text: str, secret: str) -> None:
    masked = redact(text, {})
    assert secret not in masked
    assert MASK in masked
    assert redact(masked, {}) == masked


@pytest.mark.parametrize(
    "text",
    [
        "tokens per second: 5",
        "max_tokens=12000",
        "tokens_per_s: 123456.7",
        "time_per_token=0.00012345s",
        "num_tokens: 65536 tokens",
        "unexpected token: identifier",
        "eos_token=128001, pad_token: <pad>",
        "tokenizer=LlamaTokenizerFast",
        "the password: must be given",
        "OPENAI_API_KEY is not set; set it",
        "api_key=None token=null",
        "author: Somebody Else",
        "authentication: failed",
        "key: value12345",
        "hidden=4096 heads: 32 layers=80",
        "KeyError: 'step_time'",
        "2024-05-06 12:34:56.789 [rank0]: loss=2.345678 grad_norm: 1.23456789",
        "sort(key=lambda_1234567)",
        "token[5] = vocabulary99",
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert redact(text, {}) == text


def test_a_long_text_is_redacted_in_linear_time() -> None:
    text = "a-b." * 50_000 + "password" * 20_000 + "=" * 50_000 + "http://" * 20_000 + "x=" * 20_000
    assert redact(text, {}) == text
