"""Take over from earlier searches: times of the same work (`--learn-from`), and what other work shows of the cluster.

Trials of the same work with the same framework on the same accelerators are observations of the new search. Runs of
another model, batch or precision on the cluster show how the framework runs on it (`propose/warm_start`). The result is
frozen in `search.yaml`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import count_of, one_line
from cclsearch.core.values import Failure, Provenance, Stage
from cclsearch.launch.contract import RunStatus
from cclsearch.launch.instant import RECORDED_FAILURES
from cclsearch.plan.forecast import describe_doubt
from cclsearch.plan.request import SearchRequest
from cclsearch.plan.subject import Subject
from cclsearch.plan.target import find_recording
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.prediction import predict_posterior
from cclsearch.propose.events import LlmTurn, find_withdrawn
from cclsearch.propose.observations import Observation
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge, EarlierSearch
from cclsearch.propose.warm_start.learn import learn_knowledge
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.record.state import RunState
from cclsearch.recording.load import Recording, load_recording
from cclsearch.recording.table import RecordedRow, RowStatus, find_table
from cclsearch.run.catalog import find_run, list_runs
from cclsearch.run.spec import SPEC_FILE, RunSpec, hash_file, read_spec
from cclsearch.scoring.evaluate import evaluate_evidence
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.objective import Objective, single_metric
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Prediction, Predictor, predictor_of
from cclsearch.tasks.base import task_of

AUTO = "auto"
"""Accepted in place of a run's name: all comparable runs of the project."""
NONE = "none"
MIXED_NONE = "--learn-from none excludes other runs: give `none` alone, or the names of runs"
"""Accepted in place of a run's name: nothing is taken over."""
_OF_CLUSTER = frozenset({"task", "accelerator", "framework", "provenance", "simulated cluster"})
"""Fields that two runs must share to teach each other anything; work, model and precision may differ."""
# Each takes 1.2 ms, and 2.7 ms more to read a ledger of 30 trials if the cluster is the same (means over 200 copies of
# a simulated run on one core of a virtual machine).
MAX_LOOKED_AT = 200
"""Number of run folders, the newest first, that are searched."""
MAX_SEARCHES = 12
# More searches of one work would outvote other models.
MAX_OF_SAME_WORK = 2
"""Number of searches of one model and work that are taken."""
MAX_TRIALS = 30
"""Number of first trials of one search from which the multipliers are learned."""
MAX_INSIGHTS, MAX_INSIGHT = 3, 300
"""Insights of one search that are kept, the latest ones; characters of one."""


def learn_from_earlier(spec: RunSpec, request: SearchRequest, space: Space) -> RunSpec:
    """Return the spec with the times and the knowledge of earlier runs; UserError if a named one cannot teach it.

    With `--learn-from auto`, runs are comparable that were measured (not recorded or simulated) with the same work,
    framework and machine. Of these, runs that cannot be read or have no finished trial are skipped.
    """
    candidates, named = [Path(folder) for folder in request.earlier_runs], [Path(name) for name in spec.learn_from]
    of_other_work = [folder for folder in named if not is_recording(folder) and _differs_in_work(spec, folder)]
    times = [folder for folder in named if folder not in of_other_work]
    notes = [f"warm start from the trials of {', '.join(folder.name for folder in times)}"] if times else []
    if request.learn_from_comparable:
        known = [folder.resolve() for folder in candidates]
        found = [folder for folder in known if folder not in times and _is_comparable(spec, folder)]
        names = ", ".join(folder.name for folder in found)
        notes.insert(0, f"warm start from {count_of(len(found), 'earlier run')}: {names}" if found else _why_none(spec))
        times += found
    learn_from = tuple(str(folder) for folder in times)
    spec = spec.model_copy(update={"learn_from": learn_from, "banner": (*spec.banner, *notes)})
    load_warm_start(spec)  # a run that is not comparable must stop the search here
    return take_over(spec, space, candidates, of_other_work)


def load_warm_start(spec: RunSpec) -> tuple[Observation, ...]:
    """Return the observations of the runs and recordings in `spec.learn_from`; UserError if one is not comparable.

    Runs of different provenance never mix: a measured search does not learn from recorded or simulated runs. A
    recording that the user names is a table of measurements: it may teach where to search, and is never ranked.
    """
    prior: list[Observation] = []
    for folder in map(Path, spec.learn_from):
        recording = load_recording(folder) if is_recording(folder) else None
        if recording and spec.recording is not None and spec.recording.sha256 == hash_file(find_table(folder)):
            raise UserError(f"--learn-from {str(folder)!r} is the recording that this search replays: leave it out")
        differs = _find_differences(spec, _describe_recording(spec, recording) if recording else read_spec(folder))
        if differs:
            raise UserError(
                f"--learn-from {str(folder)!r} is not comparable with this search: different {', '.join(differs)};"
                " name runs or recordings with the same work, model, accelerator and framework"
            )
        prior += _observe_rows(recording, spec.objective) if recording else _read_trials(folder)
    return tuple(prior)


def is_recording(folder: Path) -> bool:
    """Whether the folder is a recording rather than a run, to which `export` writes a table too."""
    return find_table(folder).is_file() and not (folder / SPEC_FILE).exists()


def take_over(spec: RunSpec, space: Space, candidates: Sequence[Path], named: Sequence[Path] = ()) -> RunSpec:
    """Return the spec with observations and priors from the candidates and the named runs, and notes that name them.

    `candidates` are searched, the newest last, only by measured searches; those on another cluster or with another
    framework, or whose profile has another name, are left out. Runs in `learn_from` already count with their times.
    """
    known = {*spec.learn_from, *(str(folder.resolve()) for folder in named)}
    searched = [folder for folder in candidates if str(folder.resolve()) not in known]
    unreadable: list[str] = []
    found = [(read_spec(folder), fold_ledger(folder / LEDGER_FILE)) for folder in named]
    if spec.provenance is Provenance.MEASURED:
        found += _find_usable(partial(_is_same_cluster, spec), searched, unreadable)
    taken = [(earlier, state, trials) for earlier, state in found if (trials := _usable_trials(state))]
    notes = list(_describe_unreadable(unreadable))
    if taken:
        measured = [(one.card, trials) for one, _, trials in taken]
        searches = tuple(_describe_search(earlier, state, len(trials)) for earlier, state, trials in taken)
        knowledge = learn_knowledge(spec.card, predictor_of(spec.card, space), measured)
        spec = spec.model_copy(update={"earlier": knowledge.model_copy(update={"searches": searches})})
        notes.insert(0, _describe(spec))
    return spec.model_copy(update={"banner": (*spec.banner, *notes)})


@dataclass(frozen=True)
class Learned:
    """The view of a search that has not begun, with all that earlier trials teach it, and lines that name them."""

    view: SearchView
    notes: tuple[str, ...] = ()

    def predict(self, wanted: NDArray[np.int64] | None = None) -> tuple[Prediction, Predictor]:
        """Return the prediction of every configuration, and the predictor; UserError without a closed form."""
        found = predict_posterior(self.view, wanted)
        if found is None:
            card = self.view.card
            raise UserError(
                f"task {card.task!r} of {card.name} has no closed form: nothing is known before a trial runs"
            )
        return found

    def describe(self, predictor: Predictor) -> tuple[str, ...]:
        """Return lines that say what the predictions rest on."""
        return self.notes or describe_doubt(predictor)


def learn_about(subject: Subject, space: Space, sources: Sequence[str], runs: Path | None) -> Learned:
    """Return what is learned about a subject (`learn_from_trials`); about a recording, only from named sources."""
    sources = sources or ([NONE] if subject.recording is not None else [])
    return learn_from_trials(subject.card, space, subject.framework_name, sources, runs)


def learn_from_trials(
    card: Card, space: Space, framework: str, sources: Sequence[str] = (), runs: Path | None = None
) -> Learned:
    """Return what the trials of these runs and recordings teach, as a search learns it; `none` means nothing.

    Without sources, or with `auto`: the measured runs on this machine with this framework. Trials of the same work in
    this space are observations; others, and simulated ones, show how the framework runs on the cluster. Raises
    UserError if a source has another task, accelerator or framework, or no trial that was measured.
    """
    if NONE in sources and set(sources) != {NONE}:
        raise UserError(MIXED_NONE)
    if list(sources) == [NONE]:
        return Learned(view_space(card, space))
    read = [(source, *_read_source(source, runs)) for source in dict.fromkeys(sources) if list(sources) != [AUTO]]
    read = read or _read_measured_here(card, framework, runs)
    prior: list[Observation] = []
    searches, notes = [], []
    for source, earlier, of_framework, trials, provenance in read:
        _require_alike(source, (card, framework), (earlier, of_framework))
        if not (measured := sum(trial.is_valid for trial in trials)):
            raise UserError(f"--learn-from {source!r} has no trial that was measured: nothing can be learned from it")
        differs = _compare_work((card, framework), (earlier, of_framework))
        if provenance is Provenance.SIMULATED:  # none of its figures is a measurement of a configuration
            differs.append("provenance (simulated)")
        rows = [None if differs else space.row(trial.config) for trial in trials]
        here = [trial for trial, row in zip(trials, rows, strict=True) if row is not None]
        elsewhere = [trial for trial, row in zip(trials, rows, strict=True) if row is None]
        prior += here
        searches += [(earlier, elsewhere)] if any(trial.is_valid for trial in elsewhere) else []
        notes.append(_describe_reach(source, earlier, measured, differs, card))
    knowledge = learn_knowledge(card, predictor_of(card, space), searches, with_odds=False) if searches else None
    if not prior and knowledge is not None and not knowledge.priors:
        raise UserError(f"task {card.task!r} of {card.name} has no closed form that trials of other work could adapt")
    return Learned(view_space(card, space, tuple(prior), knowledge), tuple(notes))


def view_space(
    card: Card, space: Space, prior: tuple[Observation, ...] = (), earlier: EarlierKnowledge | None = None
) -> SearchView:
    """Return the view of a search that has not begun; `prior` are trials of the same work."""
    view = SearchView(card, space, (), frozenset(), budget_left=1, seed=0, prior=prior, earlier=earlier)
    return replace(view, target=task_of(card).constrain(card, view.objective))


def _read_measured_here(
    card: Card, framework: str, runs: Path | None
) -> list[tuple[str, Card, str, list[Observation], Provenance]]:
    """Return name, card, framework, trials and provenance of the newest measured runs on the same machine."""

    def is_here(spec: RunSpec) -> bool:
        same = (spec.card.task, spec.framework, _machine_of(spec.card)) == (card.task, framework, _machine_of(card))
        return same and spec.provenance is Provenance.MEASURED

    found = _find_usable(is_here, list_runs(runs), [])
    return [(spec.run_id, spec.card, spec.framework, _usable_trials(state), spec.provenance) for spec, state in found]


def _require_alike(source: str, ours: tuple[Card, str], theirs: tuple[Card, str]) -> None:
    for what, own, other in (
        ("task", ours[0].task, theirs[0].task),
        ("accelerator", ours[0].hardware.accelerator, theirs[0].hardware.accelerator),
        ("framework", ours[1], theirs[1]),
    ):
        if own != other:
            raise UserError(
                f"--learn-from {source!r} was measured with {what} {other!r}, but this is {own!r}: name runs or"
                " recordings that have it in common"
            )


def _describe_reach(source: str, earlier: Card, measured: int, differs: Sequence[str], card: Card) -> str:
    """Return how many trials a source has, and how far it is from the card: the farther, the wider the intervals."""
    sizes = [each.hardware.num_accelerators for each in (earlier, card)]
    scale = [f"{sizes[0]} accelerators, here {sizes[1]}"] if sizes[0] != sizes[1] else []
    reach = ", ".join([f"other {', '.join(differs)}"] * bool(differs) + scale) or "the same work"
    trials = count_of(measured, "trial")
    return f"predictions learn from {one_line(source, 60)} ({one_line(earlier.name, 40)}, {trials}; {reach})"


def _read_source(source: str, runs: Path | None) -> tuple[Card, str, list[Observation], Provenance]:
    """Return card, framework, trials and provenance of a run or a recording."""
    folder = Path(source).expanduser()
    if not is_recording(folder):
        try:
            run = find_run(source, runs)
        except UserError as no_run:
            try:
                folder = find_recording(source)
            except UserError:
                raise no_run from None
        else:
            spec = read_spec(run)
            return spec.card, spec.framework, _read_trials(run), spec.provenance
    recording = load_recording(folder)
    trials = _observe_rows(recording, single_metric(recording.primary))
    return recording.card, recording.card.framework, trials, Provenance.RECORDED


def _read_trials(folder: Path) -> list[Observation]:
    """Return the finished trials of a run, without rows: its search space may be another."""
    return [replace(observation, row=None) for observation in fold_ledger(folder / LEDGER_FILE).trials.observe()]


def _observe_rows(recording: Recording, objective: Objective) -> list[Observation]:
    """Return the rows of a recording as trials, judged by an objective."""
    baseline = dict(recording.rows[recording.best_row].metrics) if objective.needs_baseline else None
    return [_observe(recording.card, row, objective, baseline) for row in recording.rows]


def _observe(card: Card, row: RecordedRow, objective: Objective, baseline: dict[str, float] | None) -> Observation:
    if row.status is not RowStatus.OK:
        kind, message = RECORDED_FAILURES[row.status]
        failure = Failure(stage=Stage.RUN, kind=kind, message=message)
        return Observation(0, row.config, None, None, failure, metrics=row.metrics)
    task = task_of(card)
    payload = task.make_input(card, row.config, is_measured=False, run_id="", trial=1)
    result = task.make_result(card, row.metrics, status=RunStatus.OK, recorded=True)
    evidence = Evidence(payload, result, card, Provenance.RECORDED, None)
    outcome = evaluate_evidence(evidence, task, objective, baseline=baseline)
    violation = objective.violation(outcome.metrics)
    return Observation(
        0, row.config, None, outcome.loss, outcome.failure,
        metrics=outcome.metrics, loads=row.loads, violation=violation,
    )  # fmt: skip


def _describe_recording(spec: RunSpec, recording: Recording) -> RunSpec:
    """Return a spec of a recording with the fields that are compared."""
    provenance = Provenance.RECORDED if spec.provenance is Provenance.SIMULATED else spec.provenance
    own = {"card": recording.card, "framework": recording.card.framework, "provenance": provenance}
    return spec.model_copy(update=own)


def _find_differences(spec: RunSpec, earlier: RunSpec) -> list[str]:
    """Return the differences between two runs that make their times incomparable."""
    pairs = {
        "provenance": (spec.provenance, earlier.provenance),
        "simulated cluster": (spec.simulated_cluster, earlier.simulated_cluster),
    }
    differs = _compare_work((spec.card, spec.framework), (earlier.card, earlier.framework))
    return [*differs, *(name for name, (ours, theirs) in pairs.items() if ours != theirs)]


def _compare_work(ours: tuple[Card, str], theirs: tuple[Card, str]) -> list[str]:
    """Return the differences in work, accelerator and framework."""
    (card, framework), (earlier, of_framework) = ours, theirs
    pairs = {
        "task": (card.task, earlier.task),
        "model": (card.model, earlier.model),
        **{
            name.replace("_", " "): (card.work.get(name), earlier.work.get(name))
            for name in {**card.work, **earlier.work}
        },
        "precision": (card.precision, earlier.precision),
        "accelerator": (card.hardware.accelerator, earlier.hardware.accelerator),
        "framework": (framework, of_framework),
    }
    return [name for name, (one, other) in pairs.items() if one != other]


def _differs_in_work(spec: RunSpec, folder: Path) -> bool:
    """Whether a run differs in its work, model or precision alone, and so still shows how the framework runs here."""
    differs = _find_differences(spec, read_spec(folder))
    return bool(differs) and _OF_CLUSTER.isdisjoint(differs)


def _is_comparable(spec: RunSpec, folder: Path) -> bool:
    try:
        earlier = read_spec(folder)
        is_same = _machine_of(spec.card) == _machine_of(earlier.card) and not _find_differences(spec, earlier)
        return is_same and earlier.provenance is Provenance.MEASURED and bool(_read_trials(folder))
    except (UserError, OSError):
        return False


def _is_same_cluster(spec: RunSpec, earlier: RunSpec) -> bool:
    """Whether both runs measure with the same framework, machine and profile; model and work may differ."""
    is_same = _machine_of(spec.card) == _machine_of(earlier.card) and spec.profile.name == earlier.profile.name
    return is_same and _OF_CLUSTER.isdisjoint(_find_differences(spec, earlier))


def _machine_of(card: Card) -> tuple[object, ...]:
    hardware = card.hardware
    return hardware.accelerator, hardware.accelerators_per_node, hardware.memory_gib, hardware.groups


def _why_none(spec: RunSpec) -> str:
    if spec.provenance is not Provenance.MEASURED:
        return f"no warm start: `--learn-from auto` uses measured runs, but this search is {spec.provenance.value}"
    hardware = spec.card.hardware
    return (
        f"no warm start: no earlier run was measured on {hardware.accelerator} ({hardware.memory_gib:g} GiB,"
        f" {hardware.accelerators_per_node} per node) with {spec.framework} for the same work"
    )


def _find_usable(
    is_usable: Callable[[RunSpec], bool], folders: Sequence[Path], unreadable: list[str]
) -> Iterator[tuple[RunSpec, RunState]]:
    """Yield the newest usable runs that can be read; adds the names of those that cannot to `unreadable`."""
    of_work: Counter[str] = Counter()
    for folder in reversed(folders[-MAX_LOOKED_AT:]):
        try:
            earlier = read_spec(folder)
            work = f"{earlier.card.model} {earlier.card.work}"
            if of_work[work] >= MAX_OF_SAME_WORK or not is_usable(earlier):
                continue
            state = fold_ledger(folder / LEDGER_FILE)
        except (UserError, OSError):
            unreadable.append(folder.name)
            continue
        if _usable_trials(state):
            of_work[work] += 1
            yield earlier, state
        if of_work.total() >= MAX_SEARCHES:
            return


def _usable_trials(state: RunState) -> list[Observation]:
    seen = [o for o in state.trials.observe() if not o.is_confirmation]
    return seen[:MAX_TRIALS] if any(o.is_valid for o in seen) else []


def _describe_search(earlier: RunSpec, state: RunState, trials: int) -> EarlierSearch:
    insights: dict[str, None] = {}
    beliefs: dict[str, str] = {}
    withdrawn = find_withdrawn(state.reported)
    for event in state.reported:
        if isinstance(event, LlmTurn) and event.turn not in withdrawn:
            beliefs |= {one.part: f"x{one.factor:.4g}" for one in event.corrections if one.part}
            if text := one_line(redact(event.insight), MAX_INSIGHT):
                insights.pop(text, None)
                insights[text] = None
    latest = tuple(insights)[-MAX_INSIGHTS:]
    workload = one_line(earlier.card.name, 60)
    return EarlierSearch(run_id=earlier.run_id, workload=workload, trials=trials, insights=latest, beliefs=beliefs)


def _describe(spec: RunSpec) -> str:
    knowledge = spec.earlier or EarlierKnowledge()
    names = ", ".join(f"{one.run_id} ({one.workload}, {count_of(one.trials, 'trial')})" for one in knowledge.searches)
    metrics = " and ".join(metric for metric in knowledge.priors) or "no metric"
    line = (
        f"{count_of(len(knowledge.searches), 'earlier search')} with {spec.framework} on this cluster set the prior of"
        f" {metrics}: {names}"
    )
    insights = sum(len(one.insights) for one in knowledge.searches)
    offered = f"; {count_of(insights, 'insight')} of their LLM offered" if insights and spec.llm else ""
    return f"{line}{offered} (`--learn-from none`: start without them)"


def _describe_unreadable(names: Sequence[str]) -> Iterator[str]:
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        teach = "teaches" if len(names) == 1 else "teach"
        yield f"{count_of(len(names), 'earlier run')} cannot be read and {teach} nothing: {shown}"
