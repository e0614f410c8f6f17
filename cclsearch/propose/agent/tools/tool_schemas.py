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
from cclsearch.propose.bayes.prior_hints import LEVELS, MAX_FACTOR, name_parts, name_ways
from cclsearch.propose.events import LlmMode

LOOKUPS = ("predict", "explain", "trial", "compare", "candidates")
REVISE = "revise"
BY_CHANCE = "P(wins)"
"""Default order of `candidates`."""
REFUTED_AT = "refuted_at"
MAX_PREDICTED = 8
MAX_LISTED = 20


def sort_orders(view: SearchView) -> tuple[str, ...]:
    """Return the orders of `candidates`: P(wins), promise, the primary metric, memory, or P(fits)."""
    return (BY_CHANCE, "promise", view.primary.quantity, "memory", "fits")


def expected_fields(view: SearchView) -> dict[str, str]:
    """Arguments for the figures that the model expects -> their metrics."""
    return {f"expected_{view.primary.name}": view.primary.name, "expected_memory_gib": PEAK_MEMORY}


def make_toolset(view: SearchView, mode: LlmMode, *, can_extend: bool = False) -> tuple[ToolSpec, ...]:
    """All tools, in a fixed order; the last are decisions.

    Nothing in them changes from turn to turn, so that the provider's cache hits: STATE says what a turn may do.
    """
    config = config_schema(view.space)
    text = {"type": "string"}
    trial = {"type": "integer", "minimum": 1}
    limit = {**trial, "maximum": MAX_LISTED}
    share = {"type": "number", "minimum": 0, "maximum": 1}
    lessons, described = _lessons(view), _lessons(view, with_words=True)
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
        "explain": _object({"config": config}),
        "trial": _object({"trial": trial}),
        "compare": _object({"a": trial, "b": trial}),
        "candidates": _object(
            {}, {"where": where, "sort": {"enum": list(sort_orders(view))}, "limit": limit, "min_fits": share}
        ),
    }
    if mode == LlmMode.POLICY:
        parameters["submit_policy"] = _object(
            {"rationale": text, "program": text, **expected}, {**refuted, **described}
        )
    else:
        parameters["submit"] = _object({"configurations": many}, described)
    if can_extend:
        parameters[EXTEND_SPACE] = _object({"add": extension_schema(), "why": text}, lessons)
    parameters[REVISE] = _object({"why": text}, lessons)
    parameters["finish"] = _object({"reason": text}, lessons)
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
    item = _object({"part": {"type": "string"}, "is": {"anyOf": [{"enum": list(LEVELS)}, factor]}})
    lessons: dict[str, dict[str, Any]] = {
        "insight": {"type": "string"},
        "beliefs": {"type": "array", "items": item},
        "doubts": {"type": "array", "items": {"type": "integer"}},
        "withdraws": {"type": "array", "items": {"type": "integer"}},
    }
    if with_words:
        parts = "".join(f"{part}, " for part in name_parts(view.predictor))
        ways = name_ways(view.predictor.memory)
        likelier = f"; of {ways[0]} and the like, `more` calls it likelier" if ways else ""
        words = {"insight": WORDS["insight"], "beliefs": WORDS["believed"], "doubts": WORDS["doubts"]}
        words["withdraws"] = WORDS["withdraws"]
        for name, text in words.items():
            lessons[name]["description"] = text.format(parts=parts and f"{parts}or ", ways=likelier)
    return lessons
