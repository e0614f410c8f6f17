"""From what the user asks for to a search that can run: inputs resolved and frozen, parts built, folder made."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cclsearch import __version__
from cclsearch.card.load import load_card
from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.destination import Destination, choose_destination
from cclsearch.earlier import load_prior
from cclsearch.errors import UserError
from cclsearch.flight import Flight, Stop
from cclsearch.judging import TrialJudge
from cclsearch.launch.base import Launcher
from cclsearch.launch.contract import TrialInput
from cclsearch.launch.profile import make_launcher
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Proposer
from cclsearch.propose.first import FirstProposer
from cclsearch.propose.front import FrontProposer
from cclsearch.propose.llm.spec import missing_key, parse_spec
from cclsearch.record.book import Book
from cclsearch.record.event import Note, SearchResumed, SearchStarted
from cclsearch.record.lock import FolderLock
from cclsearch.record.observe import Observer
from cclsearch.record.trial import Trial
from cclsearch.recording import load_recording
from cclsearch.redact import redact
from cclsearch.score.objective import load_objective
from cclsearch.search import Parts
from cclsearch.space.build import build_space, require_known_knobs
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Space
from cclsearch.spec import SPEC_FILE, Limits, RecordingRef, RunSpec, hash_file, read_spec, write_spec
from cclsearch.values import Config, Provenance, Value

RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")
LLM_STRATEGIES = ("hybrid", "llm")
LEAST_CHANCE = 0.005
"""Probability to fit into memory below which a configuration is not launched."""


@dataclass(frozen=True)
class Request:
    """What the user asks for, before anything is looked up."""

    workload: str
    limits: Limits
    overlays: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    launcher: str | None = None
    in_allocation: bool = False
    """Run trials as steps of the Slurm allocation that is held already."""
    recording: str | None = None
    framework: str | None = None
    objective: str = "step_time"
    strategy: str | None = None
    llm: str | None = None
    llm_options: Mapping[str, Value | None] = field(default_factory=dict)
    seed: int = 0
    use_fewer: bool = False
    learn_from: tuple[str, ...] = ()
    first: tuple[Config, ...] = ()
    """Configurations to run before the strategy is asked."""
    knobs: tuple[KnobDeclaration, ...] = ()
    run_id: str | None = None


@dataclass(frozen=True)
class Plan:
    """A search that could start: nothing was written or submitted yet."""

    spec: RunSpec
    space: Space


def plan_search(request: Request) -> Plan:
    """Resolve and freeze what was asked for; raises UserError for whatever cannot work."""
    asked = load_card(request.workload, overlays=request.overlays, sets=request.sets)
    destination = choose_destination(
        asked, launcher=request.launcher, recording=request.recording, in_allocation=request.in_allocation
    )
    objective = load_objective(request.objective)
    if destination.recording is not None:
        recording = load_recording(destination.recording)
        _refuse_changes(request, recording.card.framework)
        card, framework, space = recording.card, recording.card.framework, recording.space
        reference = RecordingRef(
            name=recording.name,
            folder=destination.recording,
            sha256=hash_file(destination.recording / "trials.csv"),
        )
        banner = (*describe_recording(asked, recording.card, len(recording.rows)), *recording.notes)
    else:
        card, framework, space, reference, banner = *_live_space(request, asked, destination), None, ()
    launcher = _open_launcher(destination, framework, None)
    strategy = _choose_strategy(request, multi=objective.is_multi)
    spec = RunSpec(
        run_id=_run_id(request),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        engine_version=__version__,
        workload=request.workload,
        card=card,
        framework=framework,
        objective=objective,
        profile=destination.profile,
        recording=reference,
        provenance=launcher.provenance,
        strategy=strategy,
        llm=request.llm,
        llm_options=dict(request.llm_options),
        limits=request.limits,
        seed=request.seed,
        use_fewer=request.use_fewer,
        knobs=() if reference else (*destination.profile.knobs, *request.knobs),
        learn_from=tuple(str(Path(folder).resolve()) for folder in request.learn_from),
        first=request.first,
        space_size=len(space),
        space_sha256=hash_space(space),
        banner=(
            *banner,
            *destination.banner,
            *_confirm_hint(request, launcher.provenance),
            *_llm_hint(request, strategy),
        ),
    )
    launcher.close()
    load_prior(spec)
    return Plan(redact_spec(spec), space)


def redact_spec(spec: RunSpec) -> RunSpec:
    """The same with no secret in any of its words."""
    text = spec.model_dump_json()
    masked = redact(text)
    return spec if masked == text else RunSpec.model_validate_json(masked)


def _live_space(request: Request, asked: Card, destination: Destination) -> tuple[Card, str, Space]:
    profile = destination.profile
    hardware = asked.hardware.model_copy(update=profile.hardware.overrides())
    card = asked.model_copy(update={"hardware": type(hardware).model_validate(hardware.model_dump())})
    name = request.framework or profile.framework or card.framework
    framework = load_framework(name)
    require_known_knobs(request.knobs, card, framework, profile.knobs)
    extra = (*profile.knobs, *request.knobs)
    return card, framework.name, build_space(card, framework, extra_knobs=extra, use_fewer=request.use_fewer)


def _refuse_changes(request: Request, framework: str) -> None:
    """Refuse what would change a recorded space: its legal set is its rows."""
    ways = "search it as it is, or name a place to run (`--launcher NAME`)"
    if request.framework not in (None, framework):
        raise UserError(f"--framework {request.framework!r}: the recording was measured with {framework!r}; {ways}")
    if request.knobs:
        names = ", ".join(knob.name for knob in request.knobs)
        raise UserError(f"--knob {names}: the legal set of a recording is its rows, and no knob changes them; {ways}")


def _open_launcher(destination: Destination, framework: str, run_dir: Path | None) -> Launcher:
    return make_launcher(destination.profile, framework=framework, run_dir=run_dir)


def _choose_strategy(request: Request, *, multi: bool) -> str:
    """The strategy's name, checked; `hybrid` with an LLM, `pareto` over several metrics, else `default`."""
    strategy = request.strategy or ("hybrid" if request.llm else "pareto" if multi else "default")
    if strategy == "optuna":
        strategy = "default"  # the classical side alone, as `hybrid` and `llm` fall back to it
    if request.llm:
        parse_spec(request.llm)
    if strategy in LLM_STRATEGIES:
        if not request.llm:
            raise UserError(f"strategy {strategy!r} needs an LLM: `--llm anthropic:MODEL`, `openai:MODEL` or a URL")
        return strategy
    PROPOSERS.get(strategy)
    return strategy


def _llm_hint(request: Request, strategy: str) -> tuple[str, ...]:
    if request.llm and strategy in LLM_STRATEGIES:
        key = missing_key(parse_spec(request.llm))
        return (f"no LLM takes part: {key} is not set, and the search goes on without",) if key else ()
    if request.llm or strategy != "default":
        return ()
    return ("no LLM takes part (`--llm anthropic:MODEL` or `openai:MODEL` adds one)",)


def _confirm_hint(request: Request, provenance: Provenance) -> tuple[str, ...]:
    if not request.limits.confirm or provenance is Provenance.MEASURED:
        return ()
    return (f"nothing will be confirmed: a {provenance.value} figure is read once, and no run can confirm it",)


def _run_id(request: Request) -> str:
    if request.run_id is None:
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(request.workload).stem)[:30].strip("-") or "run"
        return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if not RUN_ID.match(request.run_id):
        raise UserError(f"a run's name must be letters, digits, `.`, `_` and `-` (at most 80), not {request.run_id!r}")
    return request.run_id


def describe_recording(asked: Card, recorded: Card, num_rows: int) -> tuple[str, ...]:
    """What banner, table and report say when a recording stands in: what it is, and how it differs."""
    lines = [
        f"recorded measurements of {recorded.hardware.num_accelerators} x {recorded.hardware.accelerator}"
        f" with {recorded.framework}, {num_rows} configurations, from: {recorded.source or 'an unnamed source'}"
        f" ({recorded.licence or 'no licence named'}); nothing is run here"
    ]
    if asked.name != recorded.name:
        pairs = [
            ("model", asked.family, recorded.family),
            ("global batch", asked.global_batch_size, recorded.global_batch_size),
            ("sequence length", asked.seq_len, recorded.seq_len),
            ("accelerators", _hardware_words(asked), _hardware_words(recorded)),
            ("framework", asked.framework, recorded.framework),
            ("vocabulary", asked.arch.vocab_size, recorded.arch.vocab_size),
            ("KV heads", asked.arch.num_kv_heads, recorded.arch.num_kv_heads),
        ]
        differs = [f"{what} {theirs} (not {ours})" for what, ours, theirs in pairs if ours != theirs]
        lines.append(f"the search runs the recording's card {recorded.name}, not {asked.name}: " + ", ".join(differs))
    return tuple(lines)


def _hardware_words(card: Card) -> str:
    return f"{card.hardware.num_accelerators} x {card.hardware.accelerator}"


def hash_space(space: Space) -> str:
    """SHA-256 over knobs, choices and rows: tells whether two spaces are the same."""
    digest = hashlib.sha256(repr([(knob.name, knob.choices) for knob in space.knobs]).encode())
    digest.update(space.codes_NK.tobytes())
    return digest.hexdigest()


def create_run(plan: Plan, runs_folder: Path) -> Path:
    """Make the run's folder with its frozen inputs; raises UserError where that cannot be.

    What a kill left of a folder before it had any is taken over.
    """
    folder = runs_folder.absolute() / plan.spec.run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(folder):
            if any(not path.name.startswith(("lock", f".{SPEC_FILE}.")) for path in folder.iterdir()):
                raise FileExistsError
            write_spec(folder, plan.spec)
    except FileExistsError:
        raise UserError(
            f"{str(folder)!r} is there already: choose another --name, or `ccl-search resume {folder}`"
        ) from None
    except OSError as error:
        raise UserError(f"cannot make the run folder {str(folder)!r}: {error.strerror or error}") from None
    return folder


def start_book(book: Book, parts: Parts, *, budget: int = 0, confirm: int = 0) -> None:
    """Enter the search's start, or its going on (with a raised budget, more confirmations), into the ledger."""
    now_s = time.time()
    state, spec = book.state, parts.spec
    if not state.run_id:
        sha256 = hash_file(book.folder / SPEC_FILE)
        book.record(SearchStarted(time_s=now_s, run_id=spec.run_id, engine_version=__version__, spec_sha256=sha256))
        if parts.held_back:
            text = describe_held_back(spec, parts.space, parts.held_back)
            book.record(Note(time_s=now_s, topic="held_back", text=text))
        return
    if hash_file(book.folder / SPEC_FILE) != state.spec_sha256:
        raise UserError(f"{str(book.folder / SPEC_FILE)!r} was edited since the search began: its inputs are frozen")
    if confirm and spec.provenance is not Provenance.MEASURED:
        raise UserError(f"a {spec.provenance.value} search cannot be confirmed: its rows are read once")
    book.record(
        SearchResumed(
            time_s=now_s,
            engine_version=__version__,
            budget=max(budget, state.budget_raised_to, spec.limits.budget),
            confirm=max(confirm, state.confirm_raised_to),
        )
    )


def open_parts(folder: Path, *, stop: Stop | None = None) -> Parts:
    """The parts of the search in a run folder, rebuilt from its frozen inputs."""
    spec = read_spec(folder)
    space = rebuild_space(spec)
    launcher = make_launcher(spec.profile, framework=spec.framework, run_dir=folder)
    flight = Flight(spec=spec, launcher=launcher, judge=TrialJudge(spec), make_input=lambda t: make_input(spec, t))
    return Parts(
        spec=spec,
        space=space,
        proposer=make_proposer(spec, folder),
        flight=flight,
        observer=Observer(space),
        prior=load_prior(spec),
        held_back=hold_back(spec, space),
        stop=stop or Stop(),
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
    return FirstProposer(spec.first, strategy) if spec.first else strategy


def _make_strategy(spec: RunSpec, folder: Path) -> Proposer:
    if spec.strategy in LLM_STRATEGIES:
        from cclsearch.agent import make_agent_for

        return make_agent_for(spec, folder)
    return make_planning_proposer(spec)


def make_planning_proposer(spec: RunSpec) -> Proposer:
    """Whoever proposes where no LLM is asked."""
    name = "default" if spec.strategy in LLM_STRATEGIES else spec.strategy
    proposer: Proposer = PROPOSERS.get(name)()
    if isinstance(proposer, FrontProposer) and spec.objective.is_multi:
        return FrontProposer([(term.metric, term.direction.value) for term in spec.objective.terms])
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
    from cclsearch.predict.model import predict_space

    hopeless_N = predict_space(spec.card, space).fits_N < LEAST_CHANCE
    return frozenset() if hopeless_N.all() else frozenset(hopeless_N.nonzero()[0].tolist())


def describe_held_back(spec: RunSpec, space: Space, rows: frozenset[int]) -> str:
    """What is held back and why, with the largest and the smallest of them."""
    from cclsearch.predict.model import predict_space

    memory_gib_N = predict_space(spec.card, space).memory_gib_N
    ordered = sorted(rows, key=lambda row: float(memory_gib_N[row]))
    least, most = ordered[0], ordered[-1]
    return (
        f"{len(rows)} of {len(space)} configurations are held back: the memory model gives them under"
        f" {LEAST_CHANCE:.1%} to fit into {spec.card.hardware.memory_gib:g} GiB; they are predicted to need"
        f" {memory_gib_N[least]:.3g} GiB ({space.config(least)}) to {memory_gib_N[most]:.3g} GiB ({space.config(most)})"
    )
