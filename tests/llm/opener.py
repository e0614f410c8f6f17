"""A simulated model that opens the search space: it asks for what an expert would try, then tries it."""

from __future__ import annotations

import re
from typing import Any

from cclsearch.propose.agent.providers.types import CompletionRequest

from .players import Expert, Row, knob_choices, read_trials, submit

Wish = tuple[str, tuple[Any, ...]]

WISHES: dict[str, tuple[Wish, ...]] = {
    "host": (("compile", (True,)), ("optimizer", ("fused",)), ("threads", (2,)), ("bucket_mib", (4,))),
    "xla": (
        ("attention", ("grouped",)),
        ("malloc_huge_pages", (1,)),
        ("xla_cpu_multi_thread_eigen", (False,)),
        ("xla_cpu_region_analysis", (True,)),
    ),
    "nccl": (("nccl_buffsize", (8388608, 16777216)), ("nccl_min_ctas", (16,)), ("cuda_device_max_connections", (1,))),
}
"""What an expert asks for: less work per operation on the host, fewer page faults, other schedules, other buffers."""
TOGETHER = ("compile", "optimizer", "attention", "malloc_huge_pages")
"""Changes that an expert expects to help independently of each other, and tries at once."""
SIZE = "micro_batch_size"


class Opener(Expert):
    """Searches the space as it is until that has settled, then asks for what is offered and worth a try, and submits
    the best with added options."""

    name = "compatible:opener"

    def __init__(self, seed: int = 0, *, patience: int = 2) -> None:
        """`patience`: trials since the best one after which the search has settled; it has in any case at half time."""
        super().__init__(seed)
        self.patience = patience

    def decide(self, request: CompletionRequest) -> tuple[str, dict[str, Any]]:
        text = request.messages[0].text
        trials = read_trials(text)
        refused = read_submitted(request)
        if trials and self.has_settled(text, trials, knob_choices(request)):
            wished = self.find_wishes(read_offers(text), knob_choices(request))
            if wished and was_refused(request):
                return super().decide(request)
            if wished:
                add = [{"knob": knob, "values": list(values)} for knob, values in wished]
                return "extend_space", {"add": add, "why": "the search of the present space has settled"}
            change = self.change_best(trials, knob_choices(request), refused)
            if change is not None:
                return submit(change, "the best trial with added options changed")
        return super().decide(request)

    def has_settled(self, text: str, trials: list[Row], choices: dict[str, list[Any]]) -> bool:
        """Whether the latest trials did not improve the best, half of the budget is used, or the space has grown."""
        found = re.search(r"(\d+) trials seen; budget left (\d+)", text)
        assert found is not None
        seen, left = int(found[1]), int(found[2])
        has_grown = any(knob in choices for wishes in WISHES.values() for knob, _ in wishes)
        best = min(trials, key=lambda row: row["loss"])
        return has_grown or seen >= left or seen - best["trial"] >= self.patience

    def find_wishes(self, offers: list[str], choices: dict[str, list[Any]]) -> list[Wish]:
        """The first group of wishes of which some are offered and not yet knobs, at most four."""
        for wishes in WISHES.values():
            found = [(knob, values) for knob, values in wishes if knob in offers and knob not in choices]
            if found:
                return found[:4]
        return []

    def change_best(self, trials: list[Row], choices: dict[str, list[Any]], refused: list[Row]) -> Row | None:
        """The best trial with a change neither tried nor refused: the added knobs of `TOGETHER`, then the next smaller
        or larger micro-batch, since it moves when the work of an operation changes, then each added value; None if none
        is left.
        """
        best = min(trials, key=lambda row: row["loss"])
        wished = {knob: values for wishes in WISHES.values() for knob, values in wishes if knob in choices}
        changes = [{knob: wished[knob][0] for knob in TOGETHER if knob in wished}]
        sizes = sorted(choices.get(SIZE, []))
        at = sizes.index(best["config"][SIZE]) if sizes else 0
        changes += [{SIZE: size} for size in sizes[max(at - 1, 0) : at + 2]]
        changes += [{knob: value} for knob, values in wished.items() for value in values]
        tried = [row["config"] for row in trials] + refused
        found = ({**best["config"], **change} for change in changes if change)
        return next(({"config": c, "time": best["loss"]} for c in found if c not in tried), None)


def was_refused(request: CompletionRequest) -> bool:
    """Whether a call of this turn was refused."""
    return any(result.is_error for message in request.messages for result in message.results)


def read_submitted(request: CompletionRequest) -> list[Row]:
    """The configurations that this turn submitted; since the turn goes on, all were refused."""
    calls = (call for message in request.messages for call in message.calls if call.name == "submit")
    return [item["config"] for call in calls for item in (call.arguments or {}).get("configurations", ())]


def read_offers(text: str) -> list[str]:
    """Names of what the prompt says may be added."""
    start = text.find("MAY BE ADDED to the search space")
    section = text[start:].split("\n\n")[0] if start >= 0 else ""
    return re.findall(r"^([a-z][a-z0-9_]*):", section, re.MULTILINE)
