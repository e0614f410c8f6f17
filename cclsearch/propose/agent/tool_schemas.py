"""The schemas of the tools, as a provider receives them."""

from __future__ import annotations

import json
from typing import Any

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.propose.agent.configs import config_schema, where_schema
from cclsearch.propose.agent.providers.types import ToolSpec
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prior_hints import LEVELS
from cclsearch.propose.events import LlmMode

LOOKUPS = ("predict", "explain", "trial", "compare", "candidates")
MAX_PREDICTED = 8
MAX_LISTED = 20
MAX_LOOKUP_SCHEMA_BYTES = 2000
"""Bytes of a configuration's schema in the look-up tools; a longer one appears in `submit` only."""


def sort_orders(view: SearchView) -> tuple[str, ...]:
    """How `candidates` may sort: by promise, the primary metric, memory, or the probability of fitting."""
    return ("promise", view.primary.quantity, "memory", "fits")


def expected_fields(view: SearchView) -> dict[str, str]:
    """Arguments for the figures that the model expects -> their metrics."""
    return {f"expected_{view.primary.name}": view.primary.name, "expected_memory_gib": PEAK_MEMORY}


def make_toolset(view: SearchView, mode: LlmMode, max_submitted: int) -> tuple[ToolSpec, ...]:
    """All tools of a turn, in a fixed order; the last two are decisions."""
    config, where = config_schema(view.space), where_schema(view.space)
    trial = {"type": "integer", "minimum": 1}
    limit = {**trial, "maximum": MAX_LISTED}
    decide = _submit_policy(view) if mode == LlmMode.POLICY else _submit(view, config, max_submitted)
    parts = f"the time of each part of {{}} {view.task.unit_of_work}"
    if len(json.dumps(config, ensure_ascii=False).encode()) > MAX_LOOKUP_SCHEMA_BYTES:
        config = {"type": "object", "description": "every knob with one of its choices"}
        where = {"type": "object", "description": "knob -> list of the choices to keep"}
    return (
        ToolSpec(
            name="predict",
            description=(
                f"The surrogate's {view.primary.quantity}, memory and P(fits) for up to {MAX_PREDICTED} configurations."
            ),
            parameters=_object({"configurations": {"type": "array", "items": config, "minItems": 1}}),
        ),
        ToolSpec(
            name="explain",
            description="Whether a configuration is in the search space, which rules it violates, and what is nearest.",
            parameters=_object({"config": config}),
        ),
        ToolSpec(
            name="trial",
            description=f"All about one trial: measurements, {parts.format('its')}, failure, log tail.",
            parameters=_object({"trial": trial}),
        ),
        ToolSpec(
            name="compare",
            description=f"Two trials side by side, with the differences in {parts.format('the')}.",
            parameters=_object({"a": trial, "b": trial}),
        ),
        ToolSpec(
            name="candidates",
            description=f"Untried configurations that match a filter (knob -> values to keep), at most {MAX_LISTED}.",
            parameters=_object({}, {"where": where, "sort": {"enum": list(sort_orders(view))}, "limit": limit}),
        ),
        decide,
        ToolSpec(
            name="finish",
            description="End the search: no untried configuration could beat the best beyond the noise. Checked first.",
            parameters=_object({"reason": {"type": "string"}}, _lessons(view)),
        ),
    )


def _submit(view: SearchView, config: dict[str, Any], max_submitted: int) -> ToolSpec:
    why = {"type": "string", "description": "why, in a sentence"}
    item = _object({"config": config, "rationale": why, **_expected(view)})
    many = {"type": "array", "items": item, "minItems": 1, "maxItems": max_submitted}
    return ToolSpec(
        name="submit",
        description=f"Decide: run these new configurations next, at most {max_submitted}, the best first.",
        parameters=_object({"configurations": many}, _lessons(view)),
    )


def _submit_policy(view: SearchView) -> ToolSpec:
    text = {"type": "string"}
    work = list(view.task.policy_inputs(view.card))
    fields = ["num_layers", "num_heads", "hidden_size", *work, "moe"] if view.card.model else work
    return ToolSpec(
        name="submit_policy",
        description=(
            "Decide: a whole Python program with `generate_config(workload: dict, environment: dict) -> dict`, run in "
            "a sandbox (no files, network, environment; no yield, del, class inheritance, properties; math, json, "
            "itertools, functools, collections, dataclasses, re are available). workload has config_space (list of "
            f"{{key, type, choices, description}}), {', '.join(fields)}, ...; environment has total_gpus, "
            "gpus_per_node, gpu_memory_gb, ...; a third parameter `history` gets the finished trials. "
            "It must return a new configuration of the search space, which runs next."
        ),
        parameters=_object({"program": text, "rationale": text, **_expected(view)}, _lessons(view)),
    )


def _expected(view: SearchView) -> dict[str, Any]:
    return {name: {"type": "number"} for name in expected_fields(view)}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _lessons(view: SearchView) -> dict[str, Any]:
    """The arguments for what the model has learnt."""
    learnt = "what you learnt about this framework and cluster, in words; you see it again in later turns"
    beliefs = f"parts of the {view.task.unit_of_work} that take longer or shorter than it predicts"
    parts = list(view.predictor.hint_parts)
    insight = {"insight": {"type": "string", "description": learnt}}
    if not parts:
        return insight
    return {
        **insight,
        "beliefs": {
            "type": "array",
            "description": f"evidence for the surrogate: {beliefs}",
            "items": _object({"part": {"enum": parts}, "is": {"enum": list(LEVELS)}}),
        },
    }
