"""The contract of a task: its files round-trip, its measurements are finite, and its rules give verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from cclsearch.card.load import card_from_mapping
from cclsearch.card.model import Card
from cclsearch.core.values import Config, Failure, FailureKind, Provenance, Stage, Value
from cclsearch.launch.contract import RunStatus
from cclsearch.scoring.evaluate import evaluate_evidence
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.objective import choose_objective
from cclsearch.scoring.outcome import Outcome, Verdict
from cclsearch.tasks.base import Task, find_task


class TaskContract:
    """Subclass it, and set the task, a card of it, a configuration and the measurements of a good trial of that."""

    task: ClassVar[str]
    """The registered name."""
    card: ClassVar[Mapping[str, Any]]
    """A workload card of the task, as YAML gives it."""
    config: ClassVar[Mapping[str, Value]]
    """A configuration of its space."""
    metrics: ClassVar[Mapping[str, float]]
    """Metrics of a trial that went well, the primary one among them."""

    @property
    def found(self) -> Task:
        """The registered task."""
        return find_task(self.task)

    def make_card(self) -> Card:
        """Return the card."""
        return card_from_mapping(dict(self.card), "contract")

    def make_evidence(self, **fields: Any) -> Evidence:
        """Return the evidence of a recorded trial with these fields in its `result.json`."""
        card = self.make_card()
        metrics = {} if fields.get("failure") else self.metrics
        payload = self.found.make_input(card, Config(self.config), is_measured=False, run_id="contract", trial=1)
        result = self.found.make_result(card, metrics, **{"status": RunStatus.OK, "recorded": True, **fields})
        return Evidence(payload, result, card, Provenance.RECORDED, None)

    def judge(self, **fields: Any) -> Outcome:
        """Return the engine's outcome of such a trial."""
        objective = choose_objective(None, (), task=self.task)
        return evaluate_evidence(
            self.make_evidence(**fields), self.found, self.found.constrain(self.make_card(), objective)
        )

    def test_its_primary_metric_can_be_searched(self) -> None:
        """The card names the task, and the primary metric is one of its metrics, with a unit and a direction."""
        assert self.make_card().task == self.task
        names = [metric.name for metric in self.found.metrics]
        assert len(set(names)) == len(names), "no metric twice"
        primary = self.found.primary_metric
        assert primary.direction is not None
        assert primary.is_positive

    def test_its_files_round_trip(self) -> None:
        """`config.json` and `result.json` are read as they were written."""
        evidence = self.make_evidence()
        for model, written in ((self.found.input, evidence.payload), (self.found.result, evidence.result)):
            text = written.model_dump_json()
            assert model.model_validate_json(text).model_dump_json() == text

    def test_a_good_trial_has_a_loss(self) -> None:
        """The measured values are finite, and the gate admits them."""
        metrics, spread = self.found.measure(self.make_evidence())
        assert self.found.primary in metrics
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
        assert spread is None or spread >= 0
        outcome = self.judge()
        assert outcome.failure is None, outcome.failure
        assert outcome.loss is not None
        assert outcome.loss > 0 or self.found.objective, "the loss of a primary metric is above 0"

    def test_a_failed_trial_has_no_loss(self) -> None:
        """The failure that the script reports is kept."""
        failure = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")
        outcome = self.judge(status=RunStatus.FAILED, failure=failure)
        assert outcome.loss is None
        assert outcome.failure == failure

    def test_each_rule_gives_a_verdict(self) -> None:
        """Also for a recorded trial without traces: None if the rule cannot be checked."""
        evidence = self.make_evidence()
        verdicts = [rule(evidence) for rule in self.found.admission_rules]
        assert all(isinstance(verdict, Verdict) for verdict in verdicts)
        rules = [verdict.rule for verdict in verdicts]
        assert len(set(rules)) == len(rules), "no rule twice"
        assert set(self.found.work_rules) <= set(rules), "work_rules are rules of the gate"

    def test_it_has_words(self) -> None:
        """For reports and prompts: one phrase each."""
        card = self.make_card()
        assert self.found.describe_primary()
        assert "\n" not in self.found.describe_work(card)
        assert self.found.describe_for_agent(card)
