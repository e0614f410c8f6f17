"""Decide by their names which variables and fields have secret values, and tell these from words, types and code."""

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


_AMBIGUOUS = re.compile(
    r"(?i)(token|(?<!api)(?<!access)(?<!account)(?<!private)(?<!secret)(?<!signing)[_-]key|pat|pass|auth|cookie|bearer)"
    r"s?([_-]?\d{1,3})?$"
)
"""Names that are as often part of ordinary text, or a column of a table."""
_HONEST_KEY = re.compile(
    r"(?i)(^|[_.\-])(cache|sort|primary|foreign|partition|hash|index|lookup|group|dict|state|param|config|kernel|weight"
    r"|layer|model|metric|shard|object|unique|row|column|join|routing|compile|guard|tuning|shape|public|key|query|kv|total)"
    r"[_-]keys?$"
)
_SPECIAL_TOKEN = re.compile(r"(?i)(^|[_-])(bos|eos|pad|unk|mask|cls|sep|start|end|stop|image|audio)_?token$")
_MAX_WORD = 15
"""Letters of the longest word, such as `authentication`, that is not a key without digits."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_CLASS = re.compile(r"([A-Z][a-z]+){2,8}")
_TYPES = frozenset(
    ("str", "bytes", "int", "bool", "any", "optional", "union", "literal", "secretstr", "string", "callable")
)

_PIECE = r"(?:[a-z]\d{2}[a-z]{4,20}|[A-Za-z]+\d{0,3})"
_IDENTIFIER = rf"_{{0,2}}{_PIECE}(?:_+(?:{_PIECE}|\d{{1,3}}))*_{{0,2}}"
"""A name in code: words, each with at most three digits at its end (`sha256`) or two inside (`b64decode`)."""
_PATH = re.compile(rf"{_IDENTIFIER}(?:\.{_IDENTIFIER})*")
_ARGUMENTS = re.compile(
    r"[(\[](?:[^()\[\]\r\n]|\([^()\r\n]{0,100}\)|\[[^\[\]\r\n]{0,100}\]){0,160}(?:[)\]]|(?<=[(\[,])\s{0,4}(?=[\r\n\\]|$))"
)
_AFTER_CALL = re.compile(r"[\s,;:.()\[\]}\\\"'`]|$")
_STRING = re.compile(r"\\{0,2}\"[^\"]{0,200}\"|'[^']{0,200}'")
_ARGUMENT = re.compile(r"[A-Za-z0-9_]+")
_PLAIN_ARGUMENT = re.compile(rf"{_IDENTIFIER}|_+|\d+")
_OWNERS = frozenset(("self", "cls", "args", "typing", "builtins", "os", "settings", "config", "cfg", "options", "opts"))
"""Names before a dot in lines of code: their attributes are code."""


def is_secret_value(name: str, value: str, *, is_bare: bool, is_setting: bool = False) -> bool:
    """Whether the value of such a name is a secret; words and numbers after names such as `token` are not.

    `is_bare`: it follows `name: `, without quotes, as in a sentence. `is_setting`: it follows `NAME=`.
    """
    if is_plain_value(value) or not any(character.isalnum() for character in value):
        return False
    if not is_setting and _is_part_of_name(name, value):
        return False
    if value.isalpha() and len(value) <= _MAX_WORD and (_HONEST_KEY.search(name) or _SPECIAL_TOKEN.search(name)):
        return False
    if _AMBIGUOUS.search(name) and not name.isupper():
        # `unexpected token: word`, `partition_key=name`: a key contains digits.
        is_key = any(c.isdigit() for c in value) or (len(value) >= 20 and _is_mixed(value))
        return len(value) >= 8 and is_key and not _HONEST_KEY.search(name)
    if name.lower().endswith("pwd") and value.startswith(("/", "~", ".")):
        return False
    # `password: must be given` is a sentence, `credentials: ServiceAccountCredentials` a declaration.
    word = value.rstrip(".!?")
    return not (is_bare and word.isalpha() and (len(word) <= _MAX_WORD or _CLASS.fullmatch(word)))


def _is_mixed(value: str) -> bool:
    """Whether capital and small letters alternate in no order, as in a key, unlike the name of a class."""
    is_one_case = value.islower() or value.isupper()
    return value.isalpha() and not is_one_case and not _CLASS.fullmatch(value) and len(_WORD.findall(value)) >= 5


def _is_part_of_name(name: str, value: str) -> bool:
    """Whether a value says its own name or a word of it: `api_key=api_key`, `TOTAL_KEY = "Total"`."""
    return f"_{value.lower()}_" in f"_{re.sub('[-.]', '_', name.lower())}_" and not value.isdigit()


def is_word_of_text(value: str, *, is_sentence: bool) -> bool:
    """Whether the text after `bearer` or a header's name is a word or a type; in sentences any short word."""
    word = value.rstrip(".!?,")
    if is_plain_value(word) or word.lower() in _TYPES:
        return True
    return is_sentence and len(word) <= _MAX_WORD and _WORD.fullmatch(word) is not None


def is_code(name: str, text: str) -> bool:
    """Whether a text at the place of a value without quotes is code, as tracebacks show: `make_token(n)`, `match[1]`,
    `self.api_key`, `Optional[str]`. Passwords may have digits inside words, or brackets left open; code here has
    neither.
    """
    path = _PATH.match(text)
    if path is None:
        return False
    called = _ARGUMENTS.match(text, path.end())
    if called is not None:
        words = _ARGUMENT.findall(_STRING.sub("", called.group()))
        return all(map(_PLAIN_ARGUMENT.fullmatch, words)) and _AFTER_CALL.match(text, called.end()) is not None
    owner, _, attribute = path.group().rpartition(".")
    if not owner or not re.match(r"[\s,;:)\]}\\\"'`]|\.?$|\.\s", text[path.end() :]):
        return False
    own, last = (word.lower().strip("_").rstrip("s") for word in (name, attribute))
    return owner.split(".")[0] in _OWNERS or own.endswith(last) or last in _TYPES
