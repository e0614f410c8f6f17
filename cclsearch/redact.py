"""Secrets never reach a log, a prompt, a job's environment, an evidence package or an error message."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

MASK = "[secret]"

SECRET_NAME = re.compile(
    r"(?i)(api[_-]?key|secret|token|passw(or)?d|credential|private[_-]?key|auth|jwt|webhook|[_-](key|pat|pwd)$)"
)
NOT_SECRET_NAME = re.compile(r"(?i)(tokens?_per|max_tokens|num_tokens|tokenizers?|author(?!i[sz]a)|auth_sock|tokens$)")
_SHAPES = re.compile(
    r"sk-(?:ant-|proj-)?[A-Za-z0-9_\-]{16,}"
    r"|AIza[0-9A-Za-z_\-]{30,}"
    r"|hf_[A-Za-z0-9]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|xox[abpr]-[A-Za-z0-9\-]{10,}"
    r"|AKIA[0-9A-Z]{16}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)
_BEARER = re.compile(
    r"(?i)(bearer\s+|x-api-key['\"]?\s*[:=]\s*['\"]?|authorization['\"]?\s*[:=]\s*['\"]?)[A-Za-z0-9._\-]{8,}"
)
_URL_PASSWORD = re.compile(r"(?i)(\b[a-z][a-z0-9+.\-]*://[^/\s:@]+:)[^/\s@]+@")


_DECLARED: set[str] = set()


def declare_secret(name: str) -> None:
    """From now on the variable of that name holds a secret, whatever it is called."""
    _DECLARED.add(name)


def is_secret_name(name: str) -> bool:
    """Whether a variable of that name holds a secret (`OPENAI_API_KEY`, `HF_TOKEN`, `MYSQL_PWD`)."""
    return name in _DECLARED or (bool(SECRET_NAME.search(name)) and not NOT_SECRET_NAME.search(name))


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment's secrets, longest first; short ones (under 6 characters) are no secrets."""
    source = os.environ if environment is None else environment
    values = {value.strip() for name, value in source.items() if is_secret_name(name)}
    return sorted((value for value in values if len(value) >= 6), key=len, reverse=True)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with every known secret, and whatever has the shape of one, masked."""
    for value in secret_values(environment):
        text = text.replace(value, MASK)
    text = _SHAPES.sub(MASK, text)
    text = _BEARER.sub(lambda match: match.group(1) + MASK, text)
    return _URL_PASSWORD.sub(lambda match: match.group(1) + MASK + "@", text)


def public_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without its secrets: what a job or a tool may inherit."""
    source = os.environ if environment is None else environment
    return {name: value for name, value in source.items() if not is_secret_name(name)}
