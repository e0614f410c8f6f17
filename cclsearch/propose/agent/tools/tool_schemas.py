"""The schemas of the tools, as a provider receives them."""

from __future__ import annotations

from typing import Any

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.propose.agent.prompt.messages import WORDS
from cclsearch.propose.agent.providers.types import ToolSpec
from cclsearch.propose.agent.tools.configs import config_schema
from cclsearch.propose.agent.tools.extension import TOOL as EXTEND_SPACE
from cclsearch.propose.agent.tools.extension import extension_schema
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.corrections import MAX_ACTIVE, MAX_FACTOR, name_parts
from cclsearch.propose.events import LlmMode

LOOKUPS = ("predict", "suppose", "explain", "trial", "compare", "candidates", "trace", "search_docs")
SHOWS = ("parts", "ranks", "stages", "kernels", "collectives", "idle", "difference", "what_if")
"""What the look-up `trace` shows."""
FACTORS = ("scale_up_bw", "scale_out_bw", "compute")
"""Factors of its question what if."""
CORRECT = "correct"
FOLLOW = "follow"
BY_CHANCE = "P(wins)"
"""Default order of `candidates`."""
REFUTED_AT = "refuted_at"
CHANGES = ("corrections", "doubts", "memory_crashes")
"""Lessons that change the surrogate's figures."""
MAX_PREDICTED = 8
MAX_LISTED = 20


def sort_orders(view: SearchView) -> tuple[str, ...]:
    """Return the orders of `candidates`: P(wins), promise, the primary metric, memory, or P(fits)."""
    return (BY_CHANCE, "promise", view.primary.quantity, "memory", "fits")


def expected_fields(view: SearchView) -> dict[str, str]:
    """Arguments for the figures that the model expects -> their metrics."""
    return {f"expected_{view.primary.name}": view.primary.name, "expected_memory_gib": PEAK_MEMORY}


def make_toolset(
    view: SearchView, mode: LlmMode, *, can_extend: bool = False, has_traces: bool = False
) -> tuple[ToolSpec, ...]:
    """All tools, in a fixed order; the last are decisions.

    Nothing in them changes from turn to turn, so that the provider's cache hits: STATE says what a turn may do.
    """
    config = config_schema(view.space)
    text = {"type": "string"}
    trial = {"type": "integer", "minimum": 1}
    limit = {**trial, "maximum": MAX_LISTED}
    share = {"type": "number", "minimum": 0, "maximum": 1}
    lessons, described = _lessons(view), _lessons(view, with_words=True)
    changes = {name: lessons[name] for name in CHANGES} | {"program": text}
    expected = {name: {"type": "number"} for name in expected_fields(view)}
    refuted = {REFUTED_AT: {"type": "number", "description": WORDS["refuted_at"].format(unit=view.primary.unit)}}
    why = {"rationale": {**text, "description": "why, in a sentence"}}
    # A model that is made to call at once still writes its reason before its choice.
    item = _object({**why, "config": config, **expected}, refuted)
    many = {"type": "array", "items": item, "minItems": 1}
    # the knobs' choices are in `submit` alone, and in the system prompt
    config = {"type": "object", "description": "every knob with one of its choices"}
    where = {"type": "object", "description": "knob -> list of the choices to keep"}
    parameters = {
        "predict": _object({"configurations": {"type": "array", "items": config, "minItems": 1}}),
        "suppose": _object({}, {**changes, "configurations": {"type": "array", "items": config}}),
        "explain": _object({"config": config}),
        "trial": _object({"trial": trial}),
        "compare": _object({"a": trial, "b": trial}),
        "candidates": _object(
            {}, {"where": where, "sort": {"enum": list(sort_orders(view))}, "limit": limit, "min_fits": share}
        ),
    }
    if has_traces:
        factors = {name: {"type": "number", "minimum": 0.01, "maximum": 100} for name in FACTORS}
        parameters["trace"] = _object({"trial": trial, "show": {"enum": list(SHOWS)}}, {"with": trial, **factors})
        parameters["search_docs"] = _object({"words": text})
    if mode == LlmMode.POLICY:
        parameters["submit_policy"] = _object(
            {"rationale": text, "program": text, **expected}, {**refuted, **described}
        )
    else:
        parameters["submit"] = _object({"configurations": many}, described)
    parameters[FOLLOW] = _object({}, lessons)
    if can_extend:
        parameters[EXTEND_SPACE] = _object({"add": extension_schema(), "why": text}, lessons)
    parameters[CORRECT] = _object({"why": text}, {**lessons, "program": text})
    parameters["finish"] = _object({"reason": text}, {"insight": text})
    work = list(view.task.policy_inputs(view.card))
    words = {
        "quantity": view.primary.quantity,
        "unit": view.task.unit_of_work,
        "predicted": "the parts of the closed form, " if view.primary.name in view.predictor.forms else "",
        "max_predicted": MAX_PREDICTED,
        "max_listed": MAX_LISTED,
        "fields": ", ".join(["num_layers", "num_heads", "hidden_size", *work, "moe"] if view.card.model else work),
    }
    return tuple(
        ToolSpec(name=name, description=WORDS["tools"][name].format(**words), parameters=schema)
        for name, schema in parameters.items()
    )


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _lessons(view: SearchView, *, with_words: bool = False) -> dict[str, Any]:
    """Return the schema of the model's lessons; only one of the tools needs their descriptions."""
    factor = {"type": "number", "minimum": 1 / MAX_FACTOR, "maximum": MAX_FACTOR}
    numbers = {"type": "array", "items": {"type": "integer"}}
    item = _object({"part": {"type": "string"}, "factor": factor})
    lessons: dict[str, dict[str, Any]] = {
        "insight": {"type": "string"},
        "corrections": {"type": "array", "items": item},
        **{name: dict(numbers) for name in ("doubts", "memory_crashes", "withdraws")},
    }
    for name in lessons if with_words else ():
        parts = ", ".join(name_parts(view.predictor))
        lessons[name]["description"] = WORDS["lessons"][name].format(parts=parts and f"{parts}, ", most=MAX_ACTIVE)
    return lessons
