"""The task `command`: a program of the user's own, whose figures are read from what it prints."""

from __future__ import annotations

from cclsearch.card.fields import CardField, FieldKind
from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.metrics import Direction
from cclsearch.scoring.catalog import result_metric
from cclsearch.tasks.base import Task


class CommandTask(Task):
    """Runs the card's command with the knobs filled in; nothing is known of its work."""

    name = "command"
    metrics = (result_metric("elapsed_s", "s", Direction.MINIMIZE, label="time of the command"),)
    primary = "elapsed_s"
    card_fields = (CardField("command", FieldKind.TEXT, ("workload.data.command",), required=True),)
    needs_model = False
    tuned = "the options of a command"
    unit_of_work = "command"

    def describe_work(self, card: Card) -> str:
        """The command as it was given."""
        return str(card.work["command"])


TASKS.register("command")(CommandTask())
