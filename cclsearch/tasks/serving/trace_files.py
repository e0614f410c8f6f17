"""Files of requests: traces with times (Azure, BurstGPT, Mooncake), data sets of prompts (vLLM, SGLang, ShareGPT).

Prompts in words are counted as tokens of four characters each: no tokenizer is needed, and lengths are all that counts.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from cclsearch.core.content import find_content
from cclsearch.core.errors import UserError
from cclsearch.core.numbers import parse_number
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.tasks.serving.contract import PlannedRequest

MAX_REQUESTS = 20_000
TIMED: Mapping[str, tuple[str, str, str, float]] = {
    "Azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1.0),
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens", 1.0),
    "Mooncake": ("timestamp", "input_length", "output_length", 1e-3),
}
"""Traces -> fields of arrival, prompt and answer, and the seconds of a unit of the arrival."""
TEXTS = ("conversations", "messages", "prompt")
"""Fields of data sets with prompts in words: ShareGPT and SGLang, OpenAI and SGLang, vLLM."""
ANSWERS = ("output_tokens", "expected_output_len", "output_len", "max_completion_tokens", "max_tokens")
"""Fields with the tokens of such a prompt's answer."""
CHARACTERS = 4
KNOWN = f"{', '.join(TIMED)} (times and tokens) or a data set with {', '.join(map(repr, TEXTS))}"
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,6})?")


def locate_trace(work: Config) -> Path:
    """The file of a card's request trace; raises UserError if there is none."""
    return find_content("workloads", str(work["request_trace"]), ".csv", ".jsonl", ".json")


def hash_trace(work: Config) -> str:
    """The SHA-256 of a card's request trace."""
    return hashlib.sha256(locate_trace(work).read_bytes()).hexdigest()


def read_request_trace(work: Config, *, is_timed: bool) -> tuple[PlannedRequest, ...]:
    """The first `num_requests` requests of a card's file, with their arrivals if it `is_timed`; at least two.

    Requests without tokens, which BurstGPT logs if they failed, are left out. Raises UserError that names file, line,
    format and field.
    """
    path = locate_trace(work)
    frozen = work.get("request_trace_sha256")
    if frozen is not None and hash_trace(work) != frozen:
        raise UserError(f"{path}: the request trace has changed since the search began")
    most = int(work.get("num_requests") or MAX_REQUESTS)
    found: list[PlannedRequest] = []
    first_s = before_s = -math.inf
    try:
        for where, name, fields in _read_rows(path):
            if name in TIMED:
                when, given, asked, unit_s = TIMED[name]
                when_s = _read_time(fields.get(when), f"{where}: {when}") * unit_s
                tokens = [_read_tokens(fields.get(each), f"{where}: {each}") for each in (given, asked)]
            elif is_timed:
                raise UserError(
                    f"{where} has no arrival times: give --set arrival=poisson --set request_rate=N, or"
                    " --set arrival=closed --set concurrency=N"
                )
            else:
                when_s, tokens = 0.0, _count_tokens(fields, name, work, where)
            if when_s < before_s:
                raise UserError(f"{where}: {TIMED[name][0]} must not be before that of the row above: sort the trace")
            before_s = when_s
            if all(tokens):
                first_s = when_s if first_s == -math.inf else first_s
                arrival_s = round(when_s - first_s, 6)
                found.append(PlannedRequest(arrival_s=arrival_s, input_tokens=tokens[0], output_tokens=tokens[1]))
            if len(found) == most:
                break
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise UserError(f"{path}: must be a CSV table or JSON in UTF-8; {one_line(str(error), 200)}") from error
    if len(found) < 2 or (is_timed and found[-1].arrival_s <= 0):
        raise UserError(f"{path}: a load needs at least two requests with tokens in and out, at different times")
    return tuple(found)


def _read_rows(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield place, format and fields of each row, which may be a line of CSV or JSON, or an item of one JSON list."""

    def refuse(where: str, why: str) -> NoReturn:
        raise UserError(f"{where}: {why}; known formats: {KNOWN}")

    with path.open(newline="", encoding="utf-8-sig") as lines:
        first = lines.read(1)
        lines.seek(0)
        if first not in ("{", "["):
            reader = csv.DictReader(lines)
            columns = reader.fieldnames or ()
            name = next((name for name, names in TIMED.items() if set(names[:3]) <= set(columns)), None)
            if name is None:
                refuse(f"{path} row 1", f"the columns are {one_line(', '.join(map(repr, columns)) or 'none', 200)}")
            for row, cells in enumerate(reader, start=2):
                yield f"{path} row {row} ({name})", name, cells
            return
        items: Any = enumerate(json.loads(lines.read()) if first == "[" else lines, start=1)
        for number, item in items:
            where = f"{path} {'item' if first == '[' else 'line'} {number}"
            if isinstance(item, str) and first == "{":
                if not item.strip():
                    continue
                try:
                    item = json.loads(item)
                except ValueError as error:
                    refuse(where, f"is not JSON: {one_line(str(error), 80)}")
            if not isinstance(item, dict):
                refuse(where, f"must be a JSON object, not {one_line(repr(item), 40)}")
            named = [name for name, names in TIMED.items() if set(names[:3]) <= set(item)]
            name = next(iter([*named, *(name for name in TEXTS if name in item)]), None)
            if name is None:
                refuse(where, f"has the fields {one_line(', '.join(map(repr, item)) or 'none', 200)}")
            yield f"{where} ({name})", name, item


def _count_tokens(fields: Mapping[str, Any], name: str, work: Config, where: str) -> list[int]:
    """Return the tokens of a prompt in words and of its answer: as the row states it, its own words, or the card's."""
    content = fields[name]
    turns = [content] if isinstance(content, str) else content
    if not isinstance(turns, list):
        raise UserError(f"{where}: {name} must be text or a list of turns, not {one_line(repr(content), 40)}")
    texts = [each if isinstance(each, str) else str(each.get("value") or each.get("content") or "") for each in turns]
    stated = next((fields[each] for each in ANSWERS if fields.get(each) is not None), None)
    if stated is None and name == "conversations" and len(texts) > 1:
        stated = -(-len(texts[1]) // CHARACTERS)
    if stated is None and "output_len" not in work:
        raise UserError(f"{where}: states no tokens of the answer ({', '.join(ANSWERS)}): give --set output_len=N")
    prompt = texts[:1] if name == "conversations" else texts
    given = fields.get("prompt_len", -(-sum(map(len, prompt)) // CHARACTERS))
    asked = work["output_len"] if stated is None else stated
    return [_read_tokens(each, f"{where}: {what}") for each, what in ((given, "prompt"), (asked, "answer"))]


def _read_time(cell: Any, where: str) -> float:
    text = str("" if cell is None else cell).strip()
    try:
        value = parse_number(text)
    except ValueError:
        moment = _MOMENT.match(text)
        if moment is None:
            raise UserError(f"{where}: must be a number or a date with a time, not {one_line(text, 40)!r}") from None
        value = datetime.fromisoformat(moment[0]).replace(tzinfo=UTC).timestamp()
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{where}: must be a time from 0 on, not {one_line(text, 40)!r}")
    return value


def _read_tokens(cell: Any, where: str) -> int:
    text = str("" if cell is None else cell).strip()
    try:
        value = parse_number(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e8 or not value.is_integer():
        raise UserError(f"{where}: must be a whole number of tokens, 0 or more, not {one_line(text, 40)!r}")
    return int(value)
