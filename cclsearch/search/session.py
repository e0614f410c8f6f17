"""From a plan to a search that can run: its folder made, its book opened, its parts built from the frozen inputs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from cclsearch import __version__
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.values import Provenance
from cclsearch.launch.contract import TrialInput
from cclsearch.launch.profile import make_launcher
from cclsearch.plan.plan import LLM_STRATEGIES, Plan, hash_space
from cclsearch.plan.warm_start import load_prior
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Proposer
from cclsearch.propose.bayes.pareto_proposer import ParetoProposer
from cclsearch.propose.enqueued import EnqueuedProposer
from cclsearch.record.event import Note, SearchResumed, SearchStarted
from cclsearch.record.ledger import LEDGER_FILE
from cclsearch.record.lock import FolderLock
from cclsearch.record.observe import Observer
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.recording.load import load_recording
from cclsearch.run.spec import SPEC_FILE, RunSpec, hash_file, read_spec, write_spec
from cclsearch.search.evaluate import TrialEvaluator
from cclsearch.search.jobs import JobRunner, StopSignal
from cclsearch.search.loop import Parts
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Space

LEAST_CHANCE = 0.005
"""Probability to fit into memory below which a configuration is not launched."""


def create_run(plan: Plan, runs_folder: Path, *, beside: Mapping[str, str] | None = None) -> Path:
    """Make the run's folder with its frozen inputs; raises UserError where that cannot be.

    `beside` (file name -> text) is there before `search.yaml` makes a run of the folder. What a kill left of a folder
    before that is taken over.
    """
    folder = runs_folder.absolute() / plan.spec.run_id
    others = beside or {}
    unfinished = ("lock", f".{SPEC_FILE}.", *others, *(f".{name}." for name in others))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(folder):
            if any(not path.name.startswith(unfinished) for path in folder.iterdir()):
                raise FileExistsError
            for name, text in others.items():
                write_atomically(folder / name, text)
            write_spec(folder, plan.spec)
    except FileExistsError:
        resume = f"`ccl-search resume {shlex.quote(str(folder))}`"
        raise UserError(f"{str(folder)!r} is there already: choose another --name, or {resume}") from None
    except OSError as error:
        raise UserError(f"cannot make the run folder {str(folder)!r}: {error.strerror or error}") from None
    return folder


def begin_or_resume(writer: RunWriter, parts: Parts, *, budget: int = 0, confirm: int = 0) -> None:
    """Enter the search's start, or its going on (with a raised budget, more confirmations), into the ledger."""
    now_s = time.time()
    state, spec = writer.state, parts.spec
    if not state.run_id:
        _require_no_trials(writer)
        sha256 = hash_file(writer.folder / SPEC_FILE)
        writer.record(SearchStarted(time_s=now_s, run_id=spec.run_id, engine_version=__version__, spec_sha256=sha256))
        if parts.held_back:
            text = describe_held_back(spec, parts.space, parts.held_back)
            writer.record(Note(time_s=now_s, topic="held_back", text=text))
        return
    if hash_file(writer.folder / SPEC_FILE) != state.spec_sha256:
        raise UserError(f"{str(writer.folder / SPEC_FILE)!r} was edited since the search began: its inputs are frozen")
    if confirm and spec.provenance is not Provenance.MEASURED:
        raise UserError(f"a {spec.provenance.value} search cannot be confirmed: its rows are read once")
    writer.record(
        SearchResumed(
            time_s=now_s,
            engine_version=__version__,
            budget=max(budget, state.budget_raised_to, spec.limits.budget),
            confirm=max(confirm, state.confirm_raised_to),
        )
    )


def _require_no_trials(writer: RunWriter) -> None:
    """A search that never began has no trials; where there are some, its ledger is lost, and none must run again."""
    trials = writer.trial_folder(1).parent
    if trials.is_dir() and any(trials.iterdir()):
        raise UserError(
            f"{str(writer.folder)!r} has trials, and its {LEDGER_FILE} tells of none: put that file back, or start"
            " another search (--name)"
        )


def open_parts(folder: Path, *, stop: StopSignal | None = None) -> Parts:
    """The parts of the search in a run folder, rebuilt from its frozen inputs."""
    spec = read_spec(folder)
    space = rebuild_space(spec)
    launcher = make_launcher(spec.profile, framework=spec.framework, run_dir=folder)
    jobs = JobRunner(
        spec=spec, launcher=launcher, evaluate=TrialEvaluator(spec), make_input=lambda t: make_input(spec, t)
    )
    return Parts(
        spec=spec,
        space=space,
        proposer=make_proposer(spec, folder),
        jobs=jobs,
        observer=Observer(space),
        prior=load_prior(spec),
        held_back=hold_back(spec, space),
        stop=stop or StopSignal(),
    )


def rebuild_space(spec: RunSpec) -> Space:
    """The search's legal set; raises UserError where it is no longer the one that the search began with."""
    if spec.recording is not None:
        if hash_file(spec.recording.folder / "trials.csv") != spec.recording.sha256:
            raise UserError(f"the recording {str(spec.recording.folder)!r} was changed since the search began")
        space = load_recording(spec.recording.folder).space
    else:
        space = build_space(spec.card, load_framework(spec.framework), extra_knobs=spec.knobs, use_fewer=spec.use_fewer)
    if hash_space(space) != spec.space_sha256:
        raise UserError(
            f"the space of {spec.card.name} is another than when the search began (framework or engine changed):"
            " start a new search with `--learn-from` this one"
        )
    return space


def make_proposer(spec: RunSpec, folder: Path) -> Proposer:
    """Whoever proposes in this search."""
    strategy = _make_strategy(spec, folder)
    return EnqueuedProposer(spec.first, strategy) if spec.first else strategy


def _make_strategy(spec: RunSpec, folder: Path) -> Proposer:
    if spec.strategy in LLM_STRATEGIES:
        from cclsearch.search.llm_agent import make_agent_for

        return make_agent_for(spec, folder)
    return make_planning_proposer(spec)


def make_planning_proposer(spec: RunSpec) -> Proposer:
    """Whoever proposes where no LLM is asked."""
    name = "default" if spec.strategy in LLM_STRATEGIES else spec.strategy
    proposer: Proposer = PROPOSERS.get(name)()
    if isinstance(proposer, ParetoProposer) and spec.objective.is_multi:
        return ParetoProposer([(term.metric, term.direction.value) for term in spec.objective.terms])
    return proposer


def make_input(spec: RunSpec, trial: Trial) -> TrialInput:
    """What the run script of one trial gets."""
    config, card = trial.config, spec.card
    num_ranks = config.as_int("tp") * config.as_int("dp") * config.as_int("pp")
    per_pass = config.as_int("dp") * config.as_int("micro_batch_size")
    return TrialInput(
        run_id=spec.run_id,
        trial=trial.number,
        config=config,
        arch=card.arch,
        global_batch_size=card.global_batch_size,
        seq_len=card.seq_len,
        precision=card.precision,
        gradient_accumulation=max(1, card.global_batch_size // per_pass),
        num_ranks=num_ranks,
        ranks_per_node=card.hardware.accelerators_per_node,
        seed=spec.seed,
        profiled_steps=0 if spec.provenance is not Provenance.MEASURED else 2,
    )


def hold_back(spec: RunSpec, space: Space) -> frozenset[int]:
    """Rows that the memory model, before anything was measured, gives next to no chance to fit: never launched.

    None of a recording's, whose rows cost nothing to read; none at all where nothing else would be left.
    """
    if spec.recording is not None:
        return frozenset()
    from cclsearch.tasks.training.prediction import predict_space

    hopeless_N = predict_space(spec.card, space).fits_N < LEAST_CHANCE
    return frozenset() if hopeless_N.all() else frozenset(hopeless_N.nonzero()[0].tolist())


def describe_held_back(spec: RunSpec, space: Space, rows: frozenset[int]) -> str:
    """What is held back and why, with the largest and the smallest of them."""
    from cclsearch.tasks.training.prediction import predict_space

    memory_gib_N = predict_space(spec.card, space).memory_gib_N
    ordered = sorted(rows, key=lambda row: float(memory_gib_N[row]))
    least, most = ordered[0], ordered[-1]
    return (
        f"{len(rows)} of {len(space)} configurations are held back: the memory model gives them under"
        f" {LEAST_CHANCE:.1%} to fit into {spec.card.hardware.memory_gib:g} GiB; they are predicted to need"
        f" {memory_gib_N[least]:.3g} GiB ({space.config(least)}) to {memory_gib_N[most]:.3g} GiB ({space.config(most)})"
    )
