"""The fields of a CCL-Bench card that the engine does not read: kept as they are, and its parallel plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from cclsearch.card.fields import EXECUTORS, CardField, look_up, read_number
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value

PLAN = "model_plan_parallelization"
_KEPT = ("version", "hf_url", "trace_url", "contributor", "contact", "workload", *EXECUTORS, "metric_source")
"""Sections of the template; other sections (the runs of an agent, sources, knobs) are not."""
_MAX_FIELDS, _MAX_TEXT = 200, 500
_KNOBS = {"pp_mb": "micro_batch_size", "micro_batch": "micro_batch_size"}
_PLAN_FIELDS = ("tp", "dp", "pp", "ep", "cp", "dp_replicate", "dp_shard", "pp_mb", "micro_batch", "micro_batch_size")


def read_template(data: Mapping[str, Any], fields: tuple[CardField, ...]) -> Config:
    """Dotted path -> value of every other field of the template, secrets masked; at most 200 of them."""
    read = {path for field in fields for path in field.paths if field.name != "source"}
    kept: dict[str, Value] = {}
    for section in _KEPT:
        for path, value in _flatten(section, data.get(section)):
            if path not in read and f".{PLAN}." not in path and len(kept) < _MAX_FIELDS:
                kept[path] = value
    return Config(kept)


def read_configuration(data: Mapping[str, Any]) -> Config:
    """The parallel plan of the card: degrees that it states as whole numbers above 0; `dp` is replicas x shards."""
    plan = next((found for root in EXECUTORS if isinstance(found := look_up(data, f"{root}.{PLAN}"), Mapping)), {})
    stated: dict[str, Value] = {}
    for name in _PLAN_FIELDS:
        number = read_number(plan.get(name))
        if number is not None and number.is_integer() and number < 1e6:
            stated.setdefault(_KNOBS.get(name, name), int(number))
    shards = [int(stated[name]) for name in ("dp_replicate", "dp_shard") if name in stated]
    if "dp" not in stated and shards:
        stated = {"dp": math.prod(shards), **stated}
    return Config(stated)


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flatten(f"{path}.{one_line(str(name), 80)}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value[:50]):
            yield from _flatten(f"{path}.{index}", item)
    elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        yield path, value
    elif isinstance(value, str) and value.strip():
        name = path.rpartition(".")[2]
        yield path, one_line(redact(f"{name}={value}").removeprefix(f"{name}="), _MAX_TEXT)
