"""Notes of ledgers of version 1, and of turn records of version 1, as the events of the present version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cclsearch.core.metrics import PEAK_MEMORY


def upgrade_note(note: dict[str, Any]) -> dict[str, Any]:
    """The note as the event that its topic and data describe; raises ValueError, TypeError or KeyError if damaged."""
    topic, data = note["topic"], note.get("data") or {}
    match topic:
        case "llm_turn":
            fields = _upgrade_turn(data)
        case "arbiter":
            fields = {"before": data["from"], "after": {key: value for key, value in data.items() if key != "from"}}
        case "llm_limits":
            fields = {"limits": data}
        case "held_back" | "refused":
            fields = {}
        case _:
            return note
    return {"event": topic, "time_s": note.get("time_s", 0.0), "text": note["text"], **fields}


def _upgrade_turn(data: Mapping[str, Any]) -> dict[str, Any]:
    usage = {key: value or 0 for key, value in data.items() if key.endswith("_tokens")}
    beliefs = json.loads(data.get("beliefs") or "{}")
    return {
        "turn": data["turn"],
        "decision": data["decision"],
        "submitted": [_upgrade_submitted(item) for item in json.loads(data.get("submitted") or "[]")],
        "insight": data.get("insight") or "",
        "num_seen": beliefs.pop("seen", 0),
        "beliefs": beliefs,
        "policy": data.get("policy"),
        "cost": {
            "usage": {**usage, "is_estimated": bool(data.get("tokens_estimated"))},
            "usd": data.get("usd"),
            "seconds": data.get("seconds") or 0.0,
            "requests": data.get("requests") or 0,
        },
    }


def read_expected(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Expected metrics, which version 1 has beside `fits`."""
    metrics = {name: value for name, value in fields.items() if name != "fits" and value is not None}
    return {"metrics": metrics, "fits": fields.get("fits")}


def _upgrade_submitted(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "config": item["config"],
        "expects": read_expected({"step_time_s": item.get("time"), PEAK_MEMORY: item.get("memory")}),
        "is_overrule": bool(item.get("overrule")),
        "rationale": item.get("why", ""),
        "is_own_idea": not item.get("agreed"),
    }


def upgrade_turn_record(record: dict[str, Any]) -> dict[str, Any]:
    """A turn record in the form of the present version."""
    taken = {"exchanges", "decision", "submitted", "finish", "insight", "beliefs", "submitted_program"}
    taken |= {"stall", "stall_cause", "faults", "cost"}
    submitted = [
        {
            "config": item["config"],
            "expects": read_expected(
                {"step_time_s": item.get("expected_step_time_s"), PEAK_MEMORY: item.get("expected_memory_gib")}
            ),
            "rationale": item.get("rationale", ""),
            "is_overrule": item.get("is_overrule", False),
        }
        for item in record.get("submitted", [])
    ]
    decided = {name: record.get(name) for name in ("finish", "insight", "beliefs")} | {"submitted": submitted}
    stall = {"cause": record.get("stall_cause"), "text": record.get("stall")}
    result = {
        "decision": {**decided, "program": record.get("submitted_program")} if record["decision"] != "none" else None,
        "stall": stall if stall["cause"] else None,
        "cost": record["cost"],
        "exchanges": [_rename(exchange, {"trouble": "error"}) for exchange in record["exchanges"]],
        "faults": record.get("faults", []),
    }
    look = record.get("look")
    arrays = {"times": "value_N", "lows": "optimistic_N", "memories": "memory_gib_N", "fits": "fits_N"}
    return {
        **{name: value for name, value in record.items() if name not in taken},
        "observations": [_upgrade_observation(observation) for observation in record["observations"]],
        "remarks": [{"event": "note", **upgrade_note(note)} for note in record["remarks"]],
        "look": _rename(look, arrays) if look else None,
        "result": result,
    }


def upgrade_context_record(record: dict[str, Any]) -> dict[str, Any]:
    """A context record in the form of the present version.

    Of an objective, version 1 has only the name: one over other metrics than the step time has an unknown loss here.
    """
    name = record["objective"]
    unknown = {"metric": "step_time_s", "direction": "minimize", "unit": "s", "weight": 1.0, "reference": 1.0}
    return {
        **{field: value for field, value in record.items() if field != "objective"},
        "target": None if name == "step_time" else {"name": name, "description": "", "terms": [unknown]},
        "prior": [_upgrade_observation(observation) for observation in record.get("prior", [])],
    }


def _rename(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in fields.items()}


def _upgrade_observation(fields: Mapping[str, Any]) -> dict[str, Any]:
    earlier = {name: fields[name] for name in ("step_time_s", PEAK_MEMORY) if fields.get(name) is not None}
    kept = {name: value for name, value in fields.items() if name not in ("step_time_s", PEAK_MEMORY)}
    return {**kept, "row": None, "metrics": earlier | fields.get("metrics", {})}
