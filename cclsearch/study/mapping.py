"""Writes trials of the ledger as trials of an Optuna study.

admitted                         COMPLETE with its value, or one value per metric of a Pareto objective
failed, or not admitted          FAIL, with the reason
ended early                      PRUNED, with what it measured
runs                             RUNNING
lost to infrastructure, or could not be judged    not in the study
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import orjson
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.trial import TrialState as StudyState

from cclsearch.core.text import one_line
from cclsearch.core.values import Value
from cclsearch.propose.study.parameters import describe_knobs, study_directions
from cclsearch.record.trial import Trial, TrialState, find_state
from cclsearch.run.spec import RunSpec
from cclsearch.scoring.objective import Objective
from cclsearch.space.table import Knob
from cclsearch.study.journal import Log, Operation

NUMBER = "trial"
"""User attribute: our number of the trial. Optuna numbers a study's trials from 0."""
SPACE = "space_sha256"
"""User attribute of a study: hash of its distributions."""
STATES = {
    TrialState.ADMITTED: StudyState.COMPLETE,
    TrialState.FAILED: StudyState.FAIL,
    TrialState.REFUSED: StudyState.FAIL,
    TrialState.PRUNED: StudyState.PRUNED,
    TrialState.UNFINISHED: StudyState.RUNNING,
}


@dataclass(frozen=True)
class StudyMapping:
    """Writes the lines of a journal about a run over a space with these knobs."""

    spec: RunSpec
    knobs: tuple[Knob, ...]

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Knob -> distribution."""
        return describe_knobs(self.knobs)

    @cached_property
    def _as_json(self) -> dict[str, str]:
        return {name: distribution_to_json(found) for name, found in self.distributions.items()}

    @cached_property
    def space_sha256(self) -> str:
        """Hash of the distributions, in their order."""
        return hashlib.sha256(orjson.dumps(self._as_json)).hexdigest()

    def create_study(self, study: int, name: str) -> list[Log]:
        """Return the lines that create the study of that number."""
        objective, spec = self.spec.objective, self.spec
        facts = {"run": spec.run_id, "workload": spec.workload, "framework": spec.framework, SPACE: self.space_sha256}
        facts |= {"provenance": spec.provenance.value, "objective": objective.spec, "proposers": spec.proposers}
        directions = [{"minimize": 1, "maximize": 2}[direction] for direction in study_directions(objective)]
        create: Log = {"op_code": Operation.CREATE_STUDY, "study_name": name, "directions": directions}
        names: Log = {"op_code": Operation.SET_STUDY_SYSTEM_ATTR, "study_id": study}
        attributes = [
            {"op_code": Operation.SET_STUDY_USER_ATTR, "study_id": study, "user_attr": {key: value}}
            for key, value in facts.items()
        ]
        return [create, names | {"system_attr": {"study:metric_names": name_values(objective)}}, *attributes]

    def create_trial(self, study: int, trial: Trial) -> Log | None:
        """Return the line that creates a trial as it is now; None if it is not in the study."""
        state = STATES.get(find_state(trial.outcome))
        if state is None:
            return None
        params = self.encode(trial.config)
        log: Log = {
            "op_code": Operation.CREATE_TRIAL,
            "study_id": study,
            "datetime_start": _as_iso(trial.proposed_s),
            "state": state,
            "value": None,
            "values": None,
            "distributions": {name: self._as_json[name] for name in params},
            "params": params,
            "user_attrs": self._describe_proposal(trial),
            "system_attrs": {},
            "intermediate_values": {},
        }
        if state is not StudyState.RUNNING:
            log["datetime_complete"] = _as_iso(trial.finished_s or trial.proposed_s)
            log["user_attrs"] |= self._describe_end(trial)
            values = self.values_of(trial)
            log |= {"values": values} if values and len(values) > 1 else {"value": values[0] if values else None}
            if (partial := self._partial_of(trial)) is not None:
                log["intermediate_values"] = {"0": partial}
        return log

    def finish_trial(self, trial_id: int, trial: Trial) -> list[Log]:
        """Return the lines that end a running trial of the study."""
        logs: list[Log] = [
            {"op_code": Operation.SET_TRIAL_USER_ATTR, "trial_id": trial_id, "user_attr": {key: value}}
            for key, value in self._describe_end(trial).items()
        ]
        if (partial := self._partial_of(trial)) is not None:
            logs.append(
                {"op_code": Operation.SET_TRIAL_INTERMEDIATE_VALUE, "trial_id": trial_id, "step": 0}
                | {"intermediate_value": partial}
            )
        end = {
            "op_code": Operation.SET_TRIAL_STATE_VALUES,
            "trial_id": trial_id,
            "state": STATES[find_state(trial.outcome)],
        }
        complete = _as_iso(trial.finished_s or trial.proposed_s)
        return [*logs, {**end, "values": self.values_of(trial), "datetime_complete": complete}]

    def values_of(self, trial: Trial) -> list[float] | None:
        """Return the values of an admitted trial; None for any other."""
        outcome, objective = trial.outcome, self.spec.objective
        if outcome is None or find_state(trial.outcome) is not TrialState.ADMITTED:
            return None
        if objective.is_weighted:
            return [outcome.loss] if outcome.loss is not None else None
        return [outcome.metrics[term.metric] * term.scale for term in objective.terms]

    def encode(self, config: Mapping[str, Value]) -> dict[str, float]:
        """Return knob -> Optuna's internal number, for the values that the distributions contain."""
        encoded = {}
        for name, value in config.items():
            distribution = self.distributions.get(name)
            if distribution is None:
                continue
            try:
                number = distribution.to_internal_repr(value)
            except ValueError:
                continue
            if distribution._contains(number):
                encoded[name] = float(number)
        return encoded

    def _partial_of(self, trial: Trial) -> float | None:
        """Return what a pruned trial measured of the objective's metric."""
        term, outcome = self.spec.objective.terms[0], trial.outcome
        if outcome is None or find_state(trial.outcome) is not TrialState.PRUNED or len(self.spec.objective.terms) > 1:
            return None
        value = outcome.metrics.get(term.metric)
        return None if value is None else value * term.scale

    def _describe_proposal(self, trial: Trial) -> dict[str, Any]:
        facts = {NUMBER: trial.number, "proposer": trial.proposer, "purpose": trial.purpose.value}
        facts |= {"provenance": self.spec.provenance.value}
        facts |= {f"expected_{name}": value for name, value in trial.expects.metrics.items()}
        if trial.rationale:
            facts["rationale"] = one_line(trial.rationale, 500)
        if trial.turn is not None:
            facts["llm_turn"] = trial.turn
        outside = {name: value for name, value in trial.config.items() if name not in self.encode(trial.config)}
        return facts | ({"outside_the_space": outside} if outside else {})

    def _describe_end(self, trial: Trial) -> dict[str, Any]:
        outcome = trial.outcome
        if outcome is None:
            return {}
        facts: dict[str, Any] = dict(outcome.metrics)
        if outcome.failure is not None:
            facts["failure_kind"] = outcome.failure.kind.value
        if trial.reason:
            facts["reason"] = one_line(trial.reason, 500)
        return facts


def name_values(objective: Objective) -> list[str]:
    """Return the name of each value."""
    return [f"{objective.name} loss"] if objective.is_weighted else list(objective.metrics)


def _as_iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds")
