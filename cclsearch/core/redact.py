"""Mask secrets in logs, prompts, job environments, evidence packages and error messages."""

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
    r"|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_\-]{20,}"
    r"|eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"
    r"|xox[abpr]-[A-Za-z0-9\-]{10,}"
    r"|AKIA[0-9A-Z]{16}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)
_BEARER = re.compile(
    r"(?i)(bearer\s+|x-api-key['\"]?\s*[:=]\s*['\"]?"
    r"|authorization['\"]?\s*[:=]\s*['\"]?(?:(?:basic|bearer|digest|negotiate|token)\s+)?)[A-Za-z0-9._\-+/=~]{8,}"
)
_NAMED = re.compile(r"(?<![\w.\-])([A-Za-z_][\w.\-]{0,80})\\?[\"']?(\s{0,8}[=:]\s{0,8})(\\?[\"']?)")
"""A name, the sign after it, and the quote before the value."""
_VALUE = re.compile(r"[^\s\"'\\,;&<>{}()\[\]]{4,}")
_NAMES_SECRET = re.compile(
    r"(?i)(api[_-]?key|access[_-]?key|private[_-]?key|secret|token|passw(or)?d|pwd|credentials?|[_-](key|pat))$"
)
_NAMES_PIECE = re.compile(r"(?i)(token|(?<!api)(?<!access)(?<!private)[_-]key|pat)$")
"""Names that are as often part of ordinary text, or a column of a table."""
_PLAIN_VALUE = re.compile(
    r"(?i)[\d.,+\-]+(e[+\-]?\d+)?[a-z/%]{0,6}|none|null|true|false|unset|missing|required|default"
)
_URL_PASSWORD = re.compile(r"(?i)((?<![a-z0-9+.\-])[a-z][a-z0-9+.\-]{0,20}://[^/\s:@]{1,200}:)[^/\s@]{1,500}@")


_DECLARED: set[str] = set()


def declare_secret(name: str) -> None:
    """Treat the variable of that name as a secret from now on, even if its name does not look like one."""
    _DECLARED.add(name)


def is_secret_name(name: str) -> bool:
    """Whether a variable of that name has a secret value (`OPENAI_API_KEY`, `HF_TOKEN`, `MYSQL_PWD`)."""
    return name in _DECLARED or (bool(SECRET_NAME.search(name)) and not NOT_SECRET_NAME.search(name))


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment's secrets, longest first; values under 6 characters are not treated as secrets."""
    source = os.environ if environment is None else environment
    values = {value.strip() for name, value in source.items() if is_secret_name(name)}
    return sorted((value for value in values if len(value) >= 6), key=len, reverse=True)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with every known secret, and everything that looks like one, masked."""
    for value in secret_values(environment):
        text = text.replace(value, MASK)
    text = _SHAPES.sub(MASK, text)
    text = _BEARER.sub(lambda match: match.group(1) + MASK, text)
    text = _mask_assigned(text)
    return _URL_PASSWORD.sub(lambda match: match.group(1) + MASK + "@", text)


def _mask_assigned(text: str) -> str:
    """The text with the value masked in `NAME=value` and `name: value`, if the name suggests a secret."""
    parts: list[str] = []
    done = 0
    for named in _NAMED.finditer(text):
        name, sign, quote = named.groups()
        if named.start() < done or not _is_secret_key(name):
            continue
        value = _VALUE.match(text, named.end())
        if value and _is_secret_value(name, value.group(), is_bare=not quote and sign != "=" and sign[-1].isspace()):
            parts += [text[done : value.start()], MASK]
            done = value.end()
    return "".join([*parts, text[done:]])


def _is_secret_key(name: str) -> bool:
    suggests = _NAMES_SECRET.search(name) or (name.isupper() and is_secret_name(name))
    return bool(suggests) and not NOT_SECRET_NAME.search(name) and "per_" not in name.lower()


def _is_secret_value(name: str, value: str, *, is_bare: bool) -> bool:
    """Whether the value of such a name is a secret; words and numbers after names such as `token` are not."""
    if _PLAIN_VALUE.fullmatch(value):
        return False
    if _NAMES_PIECE.search(name) and not name.isupper():
        # `unexpected token: word`, `partition_key=name`: a key contains digits.
        return len(value) >= 8 and any(c.isdigit() for c in value)
    # `password: must be given` is a sentence.
    return not is_bare or not value.rstrip(".!?").isalpha()


def public_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without its secrets, for jobs and tools to inherit."""
    source = os.environ if environment is None else environment
    return {name: value for name, value in source.items() if not is_secret_name(name)}
