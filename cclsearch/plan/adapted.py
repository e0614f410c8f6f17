"""Predictions adapted by trials on the same accelerators with the same framework, of any workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.text import count_of, one_line
from cclsearch.core.values import Failure, Stage
from cclsearch.launch.replay import RECORDED_FAILURES
from cclsearch.plan.target import find_recording
from cclsearch.plan.warm_start import is_recording
from cclsearch.propose.bayes.earlier_fit import learn_knowledge
from cclsearch.propose.earlier import apply_earlier
from cclsearch.propose.observations import Observation
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.recording.load import load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.run.catalog import find_run
from cclsearch.run.spec import SPEC_FILE, read_spec
from cclsearch.scoring.objective import single_metric
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor, predictor_of


def adapt_predictor(
    card: Card, space: Space, framework: str, sources: Sequence[str], runs: Path | None = None
) -> tuple[Predictor, str]:
    """Return the predictor with multipliers that the trials of these runs and recordings set, and a line that says so.

    Raises UserError if one of them has another task, accelerator or framework, or no trial that was measured.
    """
    searches, told = [], []
    for source in dict.fromkeys(sources):
        earlier, of_framework, trials = _read(source, runs)
        pairs = {
            "task": (earlier.task, card.task),
            "accelerator": (earlier.hardware.accelerator, card.hardware.accelerator),
            "framework": (of_framework, framework),
        }
        for what, (theirs, ours) in pairs.items():
            if theirs != ours:
                raise UserError(
                    f"--learn-from {source!r} was measured with {what} {theirs!r}, but this is {ours!r}: name runs or"
                    " recordings that have it in common"
                )
        measured = sum(trial.is_valid for trial in trials)
        if not measured:
            raise UserError(f"--learn-from {source!r} has no trial that was measured: nothing can be learned from it")
        searches.append((earlier, trials))
        told.append(f"{one_line(source, 60)} ({one_line(earlier.name, 40)}, {count_of(measured, 'trial')})")
    predictor = predictor_of(card, space)
    knowledge = learn_knowledge(card, predictor, searches, with_odds=False)
    if not knowledge.priors:
        raise UserError(f"task {card.task!r} of {card.name} has no closed form that trials of other work could adapt")
    note = f"{' and '.join(knowledge.priors)} adapted by {', '.join(told)}"
    return apply_earlier(predictor, space, knowledge), note


def _read(source: str, runs: Path | None) -> tuple[Card, str, list[Observation]]:
    """Return card, framework and trials of a run or a recording."""
    folder = Path(source).expanduser()
    if (folder / SPEC_FILE).exists() or not is_recording(folder):
        try:
            run = find_run(source, runs)
        except UserError as no_run:
            try:
                folder = find_recording(source)
            except UserError:
                raise no_run from None
        else:
            spec = read_spec(run)
            return spec.card, spec.framework, list(fold_ledger(run / LEDGER_FILE).trials.observe())
    recording = load_recording(folder)
    objective, trials = single_metric(recording.primary), []
    for row in recording.rows:
        failure, loss = None, None
        if row.status is RowStatus.OK:
            loss = objective.loss(row.metrics)
        else:
            kind, message = RECORDED_FAILURES[row.status]
            failure = Failure(stage=Stage.RUN, kind=kind, message=message)
        trials.append(Observation(0, row.config, None, loss, failure, metrics=row.metrics, loads=row.loads))
    return recording.card, recording.card.framework, trials
