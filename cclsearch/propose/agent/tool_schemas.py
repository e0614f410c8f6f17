"""The tools as a provider is told of them."""

from __future__ import annotations

import json
from typing import Any

from cclsearch.propose.agent.configs import config_schema, where_schema
from cclsearch.propose.agent.providers.types import ToolSpec
from cclsearch.propose.bayes.prior_hints import LEVELS, PARTS
from cclsearch.space.table import Space

LOOKUPS = ("predict", "explain", "trial", "compare", "candidates")
SORTS = ("promise", "time", "memory", "fits")
MAX_PREDICTED = 8
MAX_LISTED = 20
MAX_LOOKUP_SCHEMA_BYTES = 2000
"""Of a configuration's schema in the tools that only look up: a longer one stands in `submit` alone."""


def make_toolset(space: Space, mode: str, max_submitted: int) -> tuple[ToolSpec, ...]:
    """All tools of a turn, in a fixed order; the last two decide."""
    config, where = config_schema(space), where_schema(space)
    trial = {"type": "integer", "minimum": 1}
    decide = _submit_policy() if mode == "policy" else _submit(config, max_submitted)
    if len(json.dumps(config, ensure_ascii=False).encode()) > MAX_LOOKUP_SCHEMA_BYTES:
        config = {"type": "object", "description": "every knob with one of its choices"}
        where = {"type": "object", "description": "knob -> list of the choices to keep"}
    return (
        ToolSpec(
            name="predict",
            description=f"The surrogate's time, memory and P(fits) for up to {MAX_PREDICTED} configurations.",
            parameters=_object({"configurations": {"type": "array", "items": config, "minItems": 1}}, "configurations"),
        ),
        ToolSpec(
            name="explain",
            description="Whether a configuration is legal, which rule rejects it, and the nearest legal ones.",
            parameters=_object({"config": config}, "config"),
        ),
        ToolSpec(
            name="trial",
            description="All that is known of one trial: figures, where its step's time went, failure, log tail.",
            parameters=_object({"trial": trial}, "trial"),
        ),
        ToolSpec(
            name="compare",
            description="Two trials side by side, with the differences of where their time went.",
            parameters=_object({"a": trial, "b": trial}, "a", "b"),
        ),
        ToolSpec(
            name="candidates",
            description=f"Untried legal configurations by a filter (knob -> values to keep), at most {MAX_LISTED}.",
            parameters=_object(
                {
                    "where": where,
                    "sort": {"enum": list(SORTS)},
                    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
                }
            ),
        ),
        decide,
        ToolSpec(
            name="finish",
            description="End the search: nothing left could beat the best beyond the noise. Checked first.",
            parameters=_object({"reason": {"type": "string"}, **_LEARNT}, "reason"),
        ),
    )


def _submit(config: dict[str, Any], max_submitted: int) -> ToolSpec:
    item = _object(
        {
            "config": config,
            "rationale": {"type": "string", "description": "why, in a sentence"},
            "expected_step_time_s": {"type": "number"},
            "expected_memory_gib": {"type": "number"},
        },
        "config",
        "rationale",
        "expected_step_time_s",
        "expected_memory_gib",
    )
    many = {"type": "array", "items": item, "minItems": 1, "maxItems": max_submitted}
    return ToolSpec(
        name="submit",
        description=f"Decide: run these new legal configurations next, at most {max_submitted}, the best first.",
        parameters=_object({"configurations": many, **_LEARNT}, "configurations"),
    )


def _submit_policy() -> ToolSpec:
    return ToolSpec(
        name="submit_policy",
        description=(
            "Decide: a whole Python program with `generate_config(workload: dict, environment: dict) -> dict`, run in "
            "a sandbox (no files, network, environment; no yield, del, class inheritance, properties; math, json, "
            "itertools, functools, collections, dataclasses, re are there). workload has config_space (list of {key, "
            "type, choices, description}), num_layers, num_heads, hidden_size, batch_size, seq_len, moe, ...; "
            "environment has total_gpus, gpus_per_node, gpu_memory_gb, ...; a third parameter `history` gets the "
            "finished trials. It must return a new legal configuration: it runs next."
        ),
        parameters=_object(
            {
                "program": {"type": "string"},
                "rationale": {"type": "string"},
                "expected_step_time_s": {"type": "number"},
                "expected_memory_gib": {"type": "number"},
                **_LEARNT,
            },
            "program",
            "rationale",
            "expected_step_time_s",
            "expected_memory_gib",
        ),
    )


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_LEARNT: dict[str, Any] = {
    "insight": {
        "type": "string",
        "description": "what you learnt about this framework and cluster, in words; shown to you again",
    },
    "beliefs": {
        "type": "array",
        "description": "the same as evidence for the surrogate: parts that take longer or shorter here than it thinks",
        "items": _object({"part": {"enum": list(PARTS)}, "is": {"enum": list(LEVELS)}}, "part", "is"),
    },
}
