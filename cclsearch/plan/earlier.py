"""What a search takes over from earlier searches on the same cluster with the same framework, also of another model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import count_of, one_line
from cclsearch.core.values import Provenance
from cclsearch.plan.request import SearchRequest
from cclsearch.plan.warm_start import add_comparable_runs, load_warm_start, set_apart_other_work
from cclsearch.propose.bayes.earlier_fit import learn_knowledge
from cclsearch.propose.earlier import EarlierKnowledge, EarlierSearch
from cclsearch.propose.events import LlmTurn, find_withdrawn
from cclsearch.propose.observations import Observation
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.record.state import RunState
from cclsearch.run.spec import RunSpec, read_spec
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import predictor_of

NONE = "none"
"""Accepted in place of a run's name: nothing is taken over."""
MAX_LOOKED_AT = 200
"""Run folders, the newest first, that are looked at: 1.2 ms each, and 2.7 ms more to read a ledger of 30 trials if the
cluster is the same (means over 200 copies of a simulated run on one core of a virtual machine)."""
MAX_SEARCHES = 12
MAX_OF_SAME_WORK = 2
"""Searches of one model and work that are taken: more of them would outvote other models."""
MAX_TRIALS = 30
"""Trials of one search from which the multipliers are learned, the first ones."""
MAX_INSIGHTS, MAX_INSIGHT = 3, 300
"""Insights of one search that are kept, the latest ones; characters of one."""


def learn_from_earlier(spec: RunSpec, request: SearchRequest, space: Space) -> RunSpec:
    """Return the spec with the times and the knowledge of earlier runs; UserError if a named one cannot teach it."""
    candidates = [Path(folder) for folder in request.earlier_runs]
    spec, of_other_work = set_apart_other_work(spec)
    named = spec.learn_from
    if request.learn_from_comparable:
        spec = add_comparable_runs(spec, candidates)
    load_warm_start(spec)
    if named:
        note = f"warm start from the trials of {', '.join(Path(name).name for name in named)}"
        spec = spec.model_copy(update={"banner": (*spec.banner, note)})
    return take_over(spec, space, candidates, of_other_work)


def take_over(spec: RunSpec, space: Space, candidates: Sequence[Path], named: Sequence[Path] = ()) -> RunSpec:
    """Return the spec with what the candidates and the named runs leave, and notes that name them.

    `candidates` are searched, the newest last, only by measured searches; those on another cluster or with another
    framework, or whose profile has another name, are left out. Runs in `learn_from` already count with their times.
    """
    searched = list(candidates) if spec.provenance is Provenance.MEASURED else []
    known = {*spec.learn_from, *(str(folder.resolve()) for folder in named)}
    searched = [folder for folder in searched if str(folder.resolve()) not in known]
    unreadable: list[str] = []
    found = [(read_spec(folder), fold_ledger(folder / LEDGER_FILE)) for folder in named]
    found += _find_usable(spec, searched, unreadable)
    taken = [(earlier, state, trials) for earlier, state in found if (trials := _usable_trials(state))]
    notes = tuple(_describe_unreadable(unreadable))
    if not taken:
        return spec.model_copy(update={"banner": (*spec.banner, *notes)}) if notes else spec
    measured = [(one.card, trials) for one, _, trials in taken]
    searches = tuple(_describe_search(earlier, state, len(trials)) for earlier, state, trials in taken)
    knowledge = learn_knowledge(spec.card, predictor_of(spec.card, space), measured)
    knowledge = knowledge.model_copy(update={"searches": searches})
    banner = (*spec.banner, _describe(knowledge, spec), *notes)
    return spec.model_copy(update={"earlier": knowledge, "banner": banner})


def runs_on_same_cluster(spec: RunSpec, earlier: RunSpec) -> bool:
    """Whether both runs measure with the same framework, accelerators and profile, whatever the model and the work."""
    return _cluster_of(spec) == _cluster_of(earlier)


def _cluster_of(spec: RunSpec) -> tuple[object, ...]:
    hardware = spec.card.hardware
    machine = hardware.accelerator, hardware.accelerators_per_node, hardware.memory_gib, hardware.groups
    return spec.card.task, spec.framework, spec.provenance, spec.simulated_cluster, spec.profile.name, *machine


def _find_usable(spec: RunSpec, folders: Sequence[Path], unreadable: list[str]) -> Iterator[tuple[RunSpec, RunState]]:
    """Yield the newest runs on the same cluster that can be read; adds the names of the others to `unreadable`."""
    of_work: Counter[str] = Counter()
    for folder in reversed(folders[-MAX_LOOKED_AT:]):
        try:
            earlier = read_spec(folder)
            work = f"{earlier.card.model} {earlier.card.work}"
            if of_work[work] >= MAX_OF_SAME_WORK or not runs_on_same_cluster(spec, earlier):
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
            beliefs |= event.beliefs
            if text := one_line(redact(event.insight), MAX_INSIGHT):
                insights.pop(text, None)
                insights[text] = None
    latest = tuple(insights)[-MAX_INSIGHTS:]
    workload = one_line(earlier.card.name, 60)
    return EarlierSearch(run_id=earlier.run_id, workload=workload, trials=trials, insights=latest, beliefs=beliefs)


def _describe(knowledge: EarlierKnowledge, spec: RunSpec) -> str:
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
