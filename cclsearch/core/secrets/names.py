"""Decide by their names which variables and fields have secret values."""

from __future__ import annotations

import functools
import re

SECRET_NAME = re.compile(
    r"(?i)(api[_-]?key|secret|token|passw(or)?d|passphrase|credential|private[_-]?key|auth|jwt|webhook|bearer|cookie"
    r"|conn(ection)?[_-]?str(ing)?|(database|db|redis|postgres(ql)?|mysql|mongo(db)?|amqp|broker)[_-]ur[il]"
    r"|[_-]keys?([_-]|\d*$)|[_-](pat|pwd|dsn|sas)([_-]?\d+|[_-]b(ase)?64)*$"
    r"|(^|[_-])(pg|ssh|db|mysql|redis|smtp|ftp|ldap|sudo|root|user|admin)?pass([_-]?\d+|[_-]b(ase)?64)*$)"
)
NOT_SECRET_NAME = re.compile(
    r"(?i)(tokens?_per|max_tokens|num_tokens|tokenizers?|author(?!i[sz]a)|auth_sock|askpass"
    r"|key_(value|padding|norm|heads?|dim|proj|layer)|(forward|backward)_pass"
    r"|(^|max|min|num|total|batch|batched|prompt|new|seq|input|output|generated|train|eval|context|extra|completion"
    r"|target|cached|micro|global|special|added|stop|step|rank|gpu|seen|processed)_?tokens$"
    r"|[_-](file|path|dir|type|mode|method|count|size|len(gth)?|timeout|enabled|algorithm|backend|version)$)"
)
"""Names without a secret: a variable with a path names a file, and counted tokens are a text's."""

_SECRET_FIELD = re.compile(
    r"(?i)(api[_-]?key|access[_-]?key([_-]id)?|account[_-]?key|private[_-]?key|secret|token|passw(or)?d|pwd|passphrase"
    r"|credential|bearer|cookie|dsn|auth|jwt|conn(ection)?[_-]?str(ing)?|access[_-]?signature|[_-](key|pat|pass))"
    r"s?([_-]?\d{1,3})?([_-](b(ase)?64|value))?$"
)
_PLAIN_VALUE = re.compile(
    r"(?i)[\d.,_+\-]+(e[+\-]?\d+)?[a-z/%]{0,6}|\d+(\.\d+)+[a-z.+\-]{0,6}\d*([.+][a-z0-9]{1,8})?|none|null|true|false|unset|missing|required|default|enabled|disabled"
)

_DECLARED: set[str] = set()


def declare_secret(name: str) -> None:
    """Treat the variable of that name as a secret from now on, even if its name does not look like one."""
    _DECLARED.add(name)
    is_secret_field.cache_clear()


def is_secret_name(name: str) -> bool:
    """Whether a variable of that name has a secret value (`OPENAI_API_KEY`, `HF_TOKEN`, `MYSQL_PWD`, `DB_PASS`)."""
    return name in _DECLARED or (bool(SECRET_NAME.search(name)) and not NOT_SECRET_NAME.search(name))


@functools.lru_cache(maxsize=4096)
def is_secret_field(name: str) -> bool:
    """Whether the text after such a field name may be a secret; `is_secret_value` then judges it."""
    suggests = _SECRET_FIELD.search(name) or (name.isupper() and is_secret_name(name))
    return bool(suggests) and not NOT_SECRET_NAME.search(name) and "per_" not in name.lower()


def is_plain_value(value: str) -> bool:
    """Whether a value is a number with or without unit, a version (`2.6.0rc1+cu121`), or a word such as `none`."""
    return bool(_PLAIN_VALUE.fullmatch(value))


def is_plain_word(value: str) -> bool:
    """Whether a value is a word such as `none` or `enabled`, which says nothing wherever it occurs."""
    return value.isalpha() and is_plain_value(value)
