"""The schemas of the tools, as a provider receives them."""

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
"""Bytes of a configuration's schema in the look-up tools; a longer one appears in `submit` only."""


def make_toolset(space: Space, mode: str, max_submitted: int) -> tuple[ToolSpec, ...]:
    """All tools of a turn, in a fixed order; the last two are decisions."""
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
            description="Whether a configuration is in the search space, which rules it violates, and what is nearest.",
            parameters=_object({"config": config}, "config"),
        ),
        ToolSpec(
            name="trial",
            description="All about one trial: measurements, the time of each part of its step, failure, log tail.",
            parameters=_object({"trial": trial}, "trial"),
        ),
        ToolSpec(
            name="compare",
            description="Two trials side by side, with the differences in the time of each part of the step.",
            parameters=_object({"a": trial, "b": trial}, "a", "b"),
        ),
        ToolSpec(
            name="candidates",
            description=f"Untried configurations that match a filter (knob -> values to keep), at most {MAX_LISTED}.",
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
            description="End the search: no untried configuration could beat the best beyond the noise. Checked first.",
            parameters=_object({"reason": {"type": "string"}, **LESSONS}, "reason"),
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
        description=f"Decide: run these new configurations next, at most {max_submitted}, the best first.",
        parameters=_object({"configurations": many, **LESSONS}, "configurations"),
    )


def _submit_policy() -> ToolSpec:
    return ToolSpec(
        name="submit_policy",
        description=(
            "Decide: a whole Python program with `generate_config(workload: dict, environment: dict) -> dict`, run in "
            "a sandbox (no files, network, environment; no yield, del, class inheritance, properties; math, json, "
            "itertools, functools, collections, dataclasses, re are available). workload has config_space (list of "
            "{key, type, choices, description}), num_layers, num_heads, hidden_size, batch_size, seq_len, moe, ...; "
            "environment has total_gpus, gpus_per_node, gpu_memory_gb, ...; a third parameter `history` gets the "
            "finished trials. It must return a new configuration of the search space, which runs next."
        ),
        parameters=_object(
            {
                "program": {"type": "string"},
                "rationale": {"type": "string"},
                "expected_step_time_s": {"type": "number"},
                "expected_memory_gib": {"type": "number"},
                **LESSONS,
            },
            "program",
            "rationale",
            "expected_step_time_s",
            "expected_memory_gib",
        ),
    )


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


LESSONS: dict[str, Any] = {
    "insight": {
        "type": "string",
        "description": "what you learnt about this framework and cluster, in words; you see it again in later turns",
    },
    "beliefs": {
        "type": "array",
        "description": "evidence for the surrogate: parts of the step that take longer or shorter than it predicts",
        "items": _object({"part": {"enum": list(PARTS)}, "is": {"enum": list(LEVELS)}}, "part", "is"),
    },
}
