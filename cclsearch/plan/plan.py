"""From what the user asks for to a plan: inputs looked up, checked and frozen. Nothing is written or submitted."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cclsearch import __version__
from cclsearch.card.hardware import match_accelerator
from cclsearch.card.load import load_card
from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.redact import redact
from cclsearch.core.values import Config, Provenance, Value
from cclsearch.launch.profile import make_launcher
from cclsearch.plan.target import Target, choose_target
from cclsearch.plan.warm_start import AUTO, load_prior
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.agent.policy.store import freeze_seed
from cclsearch.propose.agent.providers.cost import describe_unkept, load_prices, prices_path
from cclsearch.propose.agent.providers.spec import missing_key, parse_spec, read_timeout_s
from cclsearch.recording.load import Recording, load_recording
from cclsearch.run.catalog import LAST
from cclsearch.run.spec import RecordingRef, RunSpec, SearchLimits, hash_file
from cclsearch.score.catalog import MEMORY_METRICS, RECORDED_METRICS
from cclsearch.score.objective import Objective, load_objective, require_measurable
from cclsearch.space.build import build_space, require_known_knobs
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Space

RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")
LLM_STRATEGIES = ("hybrid", "llm")


@dataclass(frozen=True)
class SearchRequest:
    """What the user asks for, before anything is looked up."""

    workload: str
    limits: SearchLimits
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


def plan_search(request: SearchRequest) -> Plan:
    """Resolve and freeze what was asked for; raises UserError for whatever cannot work."""
    asked = load_card(request.workload, overlays=request.overlays, sets=request.sets)
    target = choose_target(
        asked, launcher=request.launcher, recording=request.recording, in_allocation=request.in_allocation
    )
    objective = load_objective(request.objective)
    if target.recording is not None:
        recording = load_recording(target.recording)
        _refuse_changes(request, recording.card.framework)
        require_recorded(objective, recording)
        card, framework, space = recording.card, recording.card.framework, recording.space
        reference = RecordingRef(
            name=recording.name,
            folder=target.recording,
            sha256=hash_file(target.recording / "trials.csv"),
        )
        banner = (*describe_recording(asked, recording.card, len(recording.rows)), *recording.notes)
    else:
        card, framework, space, reference, banner = *_live_space(request, asked, target), None, ()
        require_measurable(objective, load_framework(framework))
    launcher = make_launcher(target.profile, framework=framework)
    strategy = _choose_strategy(request, multi=objective.is_multi)
    spec = RunSpec(
        run_id=_run_id(request),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        engine_version=__version__,
        workload=request.workload,
        card=card,
        framework=framework,
        objective=objective,
        profile=target.profile,
        recording=reference,
        provenance=launcher.provenance,
        strategy=strategy,
        llm=request.llm,
        llm_options=freeze_seed(request.llm_options),
        limits=request.limits,
        seed=request.seed,
        use_fewer=request.use_fewer,
        knobs=() if reference else (*target.profile.knobs, *request.knobs),
        learn_from=tuple(str(Path(folder).resolve()) for folder in request.learn_from),
        first=request.first,
        space_size=len(space),
        space_sha256=hash_space(space),
        banner=(
            *banner,
            *target.banner,
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


def _live_space(request: SearchRequest, asked: Card, target: Target) -> tuple[Card, str, Space]:
    profile = target.profile
    hardware = asked.hardware.model_copy(update=profile.hardware.overrides())
    chip = match_accelerator(hardware.accelerator)
    if profile.launcher == "local" and hardware.host_cores is None and chip is not None and chip.kind == "cpu":
        hardware = hardware.model_copy(update={"host_cores": os.cpu_count()})
    card = asked.model_copy(update={"hardware": type(hardware).model_validate(hardware.model_dump())})
    name = request.framework or profile.framework or card.framework
    framework = load_framework(name)
    require_known_knobs(request.knobs, card, framework, profile.knobs)
    extra = (*profile.knobs, *request.knobs)
    return card, framework.name, build_space(card, framework, extra_knobs=extra, use_fewer=request.use_fewer)


def _refuse_changes(request: SearchRequest, framework: str) -> None:
    """Refuse what would change a recorded space: its legal set is its rows."""
    ways = "search it as it is, or name a place to run (`--launcher NAME`)"
    if request.framework not in (None, framework):
        raise UserError(f"--framework {request.framework!r}: the recording was measured with {framework!r}; {ways}")
    if request.knobs:
        names = ", ".join(knob.name for knob in request.knobs)
        raise UserError(f"--knob {names}: the legal set of a recording is its rows, and no knob changes them; {ways}")


def require_recorded(objective: Objective, recording: Recording) -> None:
    """Refuse an objective that needs what no row of a recording holds: each trial would fail for it."""
    has_memory = any(row.peak_memory_gib is not None for row in recording.rows)
    for metric in (*objective.metrics, *(constraint.metric for constraint in objective.constraints)):
        needs_memory = metric in MEMORY_METRICS
        if metric not in RECORDED_METRICS or (needs_memory and not has_memory):
            what = "peak memory" if needs_memory else "it"
            raise UserError(
                f"--objective {objective.name}: needs {metric}, and the recording {recording.name!r} does not hold"
                f" {what}; choose another objective, or name a place to run (`--launcher NAME`)"
            )


def _choose_strategy(request: SearchRequest, *, multi: bool) -> str:
    """The strategy's name, checked; `hybrid` with an LLM, `pareto` over several metrics, else `default`."""
    strategy = request.strategy or ("hybrid" if request.llm else "pareto" if multi else "default")
    if strategy == "optuna":
        strategy = "default"  # the classical side alone, as `hybrid` and `llm` fall back to it
    if request.llm:
        parse_spec(request.llm)
        # What the environment sets wrongly is told before anything is started.
        load_prices(prices_path())
        read_timeout_s()
    if strategy in LLM_STRATEGIES:
        if not request.llm:
            raise UserError(f"strategy {strategy!r} needs an LLM: `--llm anthropic:MODEL`, `openai:MODEL` or a URL")
        return strategy
    PROPOSERS.get(strategy)
    return strategy


def _llm_hint(request: SearchRequest, strategy: str) -> tuple[str, ...]:
    if request.llm and strategy in LLM_STRATEGIES:
        spec = parse_spec(request.llm)
        key, unkept = missing_key(spec), describe_unkept(spec.name, request.llm_options.get("max_usd"))
        missing = f"no LLM takes part: {key} is not set, and the search goes on without" if key else None
        return tuple(line for line in (missing, unkept) if line)
    if request.llm or strategy != "default":
        return ()
    return ("no LLM takes part (`--llm anthropic:MODEL` or `openai:MODEL` adds one)",)


def _confirm_hint(request: SearchRequest, provenance: Provenance) -> tuple[str, ...]:
    if not request.limits.confirm or provenance is Provenance.MEASURED:
        return ()
    return (f"nothing will be confirmed: a {provenance.value} figure is read once, and no run can confirm it",)


def _run_id(request: SearchRequest) -> str:
    if request.run_id is None:
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(request.workload).stem)[:30].strip("-") or "run"
        return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if request.run_id in (LAST, AUTO):
        raise UserError(
            f"a run cannot be named {request.run_id!r}: where a run is named, that word means another thing"
        )
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
