"""The interface of a tracker, the frozen values with masked texts that it gets of a search, and `--log-to`."""

from __future__ import annotations

import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from cclsearch.core.errors import UserError
from cclsearch.core.registry import Registry
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.core.values import Value
from cclsearch.record.trial import Trial, find_state
from cclsearch.run.spec import RunSpec

MAX_TEXT = 500
"""Length of a tag's text that all trackers keep whole."""


@dataclass(frozen=True)
class TrackedSearch:
    """A search as trackers show it."""

    run_id: str
    workload: str
    metric: str
    """The metric that the curve of the best shows: the objective's first, or `NAME loss` of a weighted one."""
    tags: Mapping[str, str]
    """Framework, hardware, objective, provenance and who proposes."""


@dataclass(frozen=True)
class TrackedTrial:
    """A finished trial as trackers show it."""

    number: int
    params: Mapping[str, Value]
    """The configuration."""
    metrics: Mapping[str, float]
    """Everything that was measured, in the units of the ledger, and `loss` if the trial is ranked."""
    tags: Mapping[str, str]
    """State, proposer, purpose, provenance, and the reason of a trial that failed or was not admitted."""
    value: float | None
    """The objective's figure if the trial is ranked."""
    best: float | None
    """The figure of the best trial when this one had finished; None before the first ranked trial."""
    started_s: float
    """Seconds since the epoch."""
    finished_s: float

    @property
    def sha256(self) -> str:
        """Hash of the shown fields, to write a trial again only if it changed."""
        # `best` is left out: other trials change it.
        shown = [self.number, dict(self.params), dict(self.metrics), dict(self.tags), self.value]
        return hashlib.sha256(orjson.dumps(shown, option=orjson.OPT_SORT_KEYS)).hexdigest()


class Tracker(ABC):
    """Writes one search into a tracker: `begin`, any number of `log_trial`, `end`, all in one thread.

    Each may raise any exception and take any time: the search continues meanwhile.
    """

    @classmethod
    @abstractmethod
    def from_place(cls, place: str) -> Tracker:
        """Return a tracker that writes to `place`: the text after the colon of `--log-to NAME:PLACE`, else "".

        Raises UserError if the package or the place is missing or unusable. Writes and connects to nothing.
        """

    @abstractmethod
    def begin(self, search: TrackedSearch) -> bool:
        """Open the search; return whether the tracker has it already, and it is continued."""

    @abstractmethod
    def log_trial(self, trial: TrackedTrial) -> None:
        """Write a finished trial, in place of its number's earlier record."""

    @abstractmethod
    def end(self, *, is_finished: bool, summary: str) -> None:
        """Write the end of this process's part: `is_finished` is False if the search can be resumed."""


def describe_search(spec: RunSpec) -> TrackedSearch:
    """Return the search as trackers show it."""
    objective = spec.objective
    tags = {
        "workload": spec.workload,
        "framework": spec.framework,
        "hardware": f"{spec.card.hardware.num_accelerators} x {spec.card.hardware.accelerator}",
        "objective": objective.spec,
        "provenance": spec.provenance.value,
        "proposers": spec.proposers,
        "engine_version": spec.engine_version,
        "created": spec.created,
    }
    metric = f"{objective.name} loss" if objective.is_weighted else objective.metrics[0]
    return TrackedSearch(spec.run_id, spec.workload, metric, _mask(tags))


def describe_trial(spec: RunSpec, trial: Trial, best: Trial | None) -> TrackedTrial:
    """Return a finished trial as trackers show it; `best` is the best trial now."""
    outcome, state = trial.outcome, find_state(trial.outcome)
    assert outcome is not None
    tags = {
        "state": state.value,
        "proposer": trial.proposer,
        "purpose": trial.purpose.value,
        "provenance": spec.provenance.value,
        "rationale": trial.rationale,
        "failure": outcome.failure.kind.value if outcome.failure is not None else "",
        "reason": trial.reason,
    }
    metrics = dict(outcome.metrics) | ({"loss": trial.loss} if trial.loss is not None else {})
    return TrackedTrial(
        number=trial.number,
        params={name: redact(value) if isinstance(value, str) else value for name, value in trial.config.items()},
        metrics=metrics,
        tags=_mask({name: text for name, text in tags.items() if text}),
        value=_value_of(spec, trial),
        best=_value_of(spec, best),
        started_s=trial.proposed_s,
        finished_s=trial.finished_s or trial.proposed_s,
    )


def _value_of(spec: RunSpec, trial: Trial | None) -> float | None:
    objective = spec.objective
    if trial is None or trial.outcome is None or trial.loss is None:
        return None
    if objective.is_weighted:
        return trial.loss
    value = trial.outcome.metrics.get(objective.metrics[0])
    return None if value is None else value * objective.terms[0].scale


def _mask(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: one_line(redact(text), MAX_TEXT) for name, text in tags.items()}


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker",
    {word: f"cclsearch.tracking.{word}_tracker" for word in ("mlflow", "tensorboard", "wandb")},
    needs=("from_place", "log_trial"),
)
"""word of `--log-to WORD:PLACE` -> subclass of `Tracker`."""


@dataclass(frozen=True)
class LogTarget:
    """One tracker that was asked for, and checked."""

    text: str
    """Text that the user typed."""
    tracker: Tracker

    @property
    def name(self) -> str:
        """The tracker's name."""
        return self.text.partition(":")[0]


def open_targets(texts: Iterable[str]) -> tuple[LogTarget, ...]:
    """Return the targets, each once; raises UserError for one that is unknown, lacks its package or cannot be used."""
    return tuple(LogTarget(text, _open(text)) for text in dict.fromkeys(texts))


def _open(text: str) -> Tracker:
    name, _, place = text.partition(":")
    try:
        return TRACKERS.get(name).from_place(place)
    except UserError as error:
        raise UserError(f"--log-to {name}: {error}") from None


def require_package(module: str, extra: str) -> None:
    """Raise UserError that says how to install the package of a tracker, if it is missing."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {module!r} is not installed: pip install 'ccl-search[{extra}]'")
