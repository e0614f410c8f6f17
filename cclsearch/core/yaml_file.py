"""Safe reading of untrusted YAML: bounded size, depth and expansion, no tags, no duplicate keys, one-line errors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import open_inside
from cclsearch.core.text import one_line

MAX_BYTES = 8 * 2**20
MAX_DEPTH = 60
# An alias bomb is a few hundred bytes that expand to billions of nodes.
MAX_NODES = 400_000
"""Largest number of nodes after aliases are expanded."""
MAX_KEYS = 10_000

M = TypeVar("M", bound=BaseModel)
_NOT_DECIMAL = re.compile(r":|^[-+]?0\d")
"""Numbers of YAML 1.1 that are not decimal: base 60 (`12:00:00` is 43200) and octal (`0123` is 83)."""
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Safe loader that rejects duplicate keys and merges that grow without bound."""

    def flatten_mapping(self, node: Any) -> None:
        own = [key.value for key, _ in node.value if isinstance(key.value, str) and key.value != "<<"]
        if len(own) != len(set(own)):
            twice = next(key for key in own if own.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is given twice", node.start_mark)
        super().flatten_mapping(node)
        if len(node.value) > MAX_KEYS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a mapping has more than {MAX_KEYS} keys", node.start_mark
            )


class _AsWritten(_Loader):
    """Keeps what only YAML 1.1 reads as a number (`12:00:00`, `0123`) as text."""


def _construct_number(loader: Any, node: Any) -> Any:
    text = loader.construct_scalar(node)
    if _NOT_DECIMAL.search(text):
        return text
    return loader.construct_yaml_int(node) if node.tag.endswith("int") else loader.construct_yaml_float(node)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _AsWritten.add_constructor(_tag, _construct_number)


def read_yaml(path: Path, *, as_written: bool = False) -> dict[str, Any]:
    """The mapping in that file; raises UserError that names the file and, if known, the line.

    With `as_written`, unquoted times and numbers with leading zeros (`12:00:00`, `0123`) stay text.
    """
    try:
        with open(path, "rb", opener=open_inside) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise UserError(f"{path}: a YAML file must be under {MAX_BYTES // 2**20} MiB, not {size} bytes")
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: must be UTF-8 text; byte {error.start} is not") from None
    return parse_yaml(text, str(path), as_written=as_written)


def parse_yaml(text: str, where: str, *, as_written: bool = False) -> dict[str, Any]:
    """The mapping in that text, as plain dicts and lists (aliases copied); UserErrors start with `where`."""
    data = parse_yaml_value(text, where, as_written=as_written)
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise UserError(f"{where}: must be a mapping of fields, not {kind}")
    return data


def parse_yaml_value(text: str, where: str, *, as_written: bool = False) -> Any:
    """The value in that text, of any kind; raises UserError that starts with `where`."""
    if len(text) > MAX_BYTES:
        raise UserError(f"{where}: a YAML text must be under {MAX_BYTES // 2**20} MiB")
    try:
        _check_depth(text, where)
        data = yaml.load(text, Loader=_AsWritten if as_written else _Loader)
        return _plain(data, where, [0], 0)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: {_describe(error)}") from None
    except RecursionError:
        raise UserError(f"{where}: is nested too deeply") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: contains a value that cannot be read: {one_line(str(error), 120)}") from None


def validate_mapping(model: type[M], data: dict[str, Any], where: str) -> M:
    """The mapping as a frozen model; raises UserError with one line that names every wrong field."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        wrong = [_locate(e) for e in error.errors()[:5]]
        more = f" (and {error.error_count() - 5} more)" if error.error_count() > 5 else ""
        raise UserError(f"{where}: {one_line('; '.join(wrong), 600)}{more}") from None


def _locate(error: Any) -> str:
    """Field and problem; only the problem if it concerns the whole mapping."""
    field = ".".join(map(str, error["loc"]))
    if not field and error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    return f"{field or 'value'}: {_describe_problem(error)}"


_PROBLEMS = {"missing": "is missing", "extra_forbidden": "is not a known field"}
_MUSTS = {"tuple_type": "must be a list", "model_type": "must be a mapping"}
"""Type of pydantic's error -> what it says of a field, and of a field's value."""


def _describe_problem(error: Any) -> str:
    if error["type"] in _PROBLEMS:
        return _PROBLEMS[error["type"]]
    if error["type"] == "too_short" and not error["input"]:
        return "must not be empty"
    message = _MUSTS.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}, not {one_line(repr(error['input']), 60)}"


def _check_depth(text: str, where: str) -> None:
    """Bound the nesting on streamed events, before any recursive code sees the text."""
    depth = 0
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise UserError(f"{where}: is nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _plain(value: Any, where: str, count: list[int], depth: int) -> Any:
    count[0] += 1
    if count[0] > MAX_NODES:
        raise UserError(f"{where}: has more than {MAX_NODES} values once its aliases are expanded")
    if depth > MAX_DEPTH:
        raise UserError(f"{where}: is nested more than {MAX_DEPTH} levels deep, or refers to itself")
    if isinstance(value, dict):
        return {str(key): _plain(item, where, count, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item, where, count, depth + 1) for item in value]
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    return str(value)


def _describe(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = one_line(str(getattr(error, "problem", None) or getattr(error, "reason", None) or error), 160)
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem
