"""Turn a request into a plan, in stages: card, target, objective, workload with its space, strategy. Writes nothing.

Each stage takes frozen values and returns a frozen value; no stage calls an earlier one.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from cclsearch.core.content import shipped_root
from cclsearch.core.errors import UserError
from cclsearch.core.registry import describe_broken_plugins
from cclsearch.core.secrets.redact import public_environment, redact
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.values import Config, Provenance, Value, format_config
from cclsearch.core.version import __version__
from cclsearch.launch.profile import Profile, make_launcher
from cclsearch.plan.capacity import describe_capacity
from cclsearch.plan.forecast import describe_doubt, describe_impossible, describe_no_room, estimate_search
from cclsearch.plan.request import SearchRequest, load_requested
from cclsearch.plan.target import choose_target
from cclsearch.plan.warm_start import AUTO, NONE, learn_from_earlier
from cclsearch.plan.workload import ResolvedWorkload, resolve_workload
from cclsearch.propose.agent.policy.store import freeze_seed
from cclsearch.propose.agent.providers.kind import describe_forms, list_kinds
from cclsearch.propose.agent.providers.spec import (
    missing_key,
    parse_spec,
    read_timeout_s,
    refuse_if_offline,
    refuse_without_price,
)
from cclsearch.propose.base import SearchView
from cclsearch.propose.study.choose import list_strategies, resolve_sampler, try_sampler
from cclsearch.run.catalog import LAST
from cclsearch.run.spec import DEFAULT_SAMPLER, DEFAULT_STRATEGY, SAMPLER, RunSpec
from cclsearch.scoring.objective import choose_objective
from cclsearch.space.build import explain_config
from cclsearch.space.framework import load_framework
from cclsearch.space.knobs import canonical_name, meaning_of
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import predictor_of
from cclsearch.tasks.base import task_of
from cclsearch.trace.names.kernels import load_classes
from cclsearch.tracking.base import open_targets

RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")


@dataclass(frozen=True)
class Plan:
    """A search that is ready to start; nothing was written or submitted."""

    spec: RunSpec
    space: Space


def plan_search(request: SearchRequest) -> Plan:
    """Return the request resolved and frozen; raises UserError if the search cannot work."""
    load_classes()  # a malformed table of the project stops the search before anything is written
    requested_card = load_requested(request)
    target = choose_target(
        requested_card,
        launcher=request.launcher,
        recording=request.recording,
        in_allocation=request.in_allocation,
        may_simulate=request.may_simulate,
        threads=request.threads,
        command=request.command,
    )
    objective = choose_objective(request.objective, request.constraints, task=requested_card.task)
    objective = task_of(requested_card).constrain(requested_card, objective)
    workload = resolve_workload(request, requested_card, target, objective)
    if request.command is not None:
        request.command.check({knob.name: len(knob.choices) for knob in workload.space.knobs})
    provenance = Provenance.RECORDED if workload.recording else _read_provenance(target.profile, workload.framework)
    strategy = choose_strategy(request)
    first = SearchView(workload.card, workload.space, (), frozenset(), 1, request.seed, target=objective)
    try_sampler(strategy.sampler, first)
    baseline = _choose_baseline(request, workload)
    open_targets(request.log_to)  # a tracker that cannot be used must stop the search here
    spec = RunSpec(
        run_id=_choose_run_id(request),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        engine_version=__version__,
        command=find_command(),
        script_commit=find_commit(workload.framework) if provenance is Provenance.MEASURED else "",
        workload=request.workload,
        card=task_of(workload.card).freeze(workload.card, objective),
        framework=workload.framework,
        objective=objective,
        profile=target.profile,
        recording=workload.recording,
        provenance=provenance,
        strategy=strategy.name,
        sampler=strategy.sampler,
        llm=request.llm,
        llm_options=dict(strategy.llm_options),
        limits=request.limits,
        seed=request.seed,
        use_fewer=workload.use_fewer,
        knobs=workload.knobs,
        learn_from=tuple(str(Path(folder).resolve()) for folder in request.learn_from),
        first=request.first,
        baseline=baseline,
        log_to=request.log_to,
        space_size=len(workload.space),
        space_sha256=workload.space_sha256,
        banner=(
            *describe_impossible(objective, workload.space, workload.card.task),
            *(describe_no_room(workload.card, workload.space) if workload.recording is None else ()),
            *(task_of(workload.card).remark(workload.card) if workload.recording is None else ()),
            *workload.notes,
            *target.notes,
            *(describe_capacity(first) if workload.recording is None else ()),
            *_describe_confirm(request, provenance),
            *([f"baseline, measured first and outside the budget: {baseline}"] if baseline else []),
            *_describe_cost(request, workload, provenance),
            *strategy.notes,
        ),
    )
    return Plan(_mask_secrets(learn_from_earlier(spec, request, workload.space)), workload.space)


def _read_provenance(profile: Profile, framework: str) -> Provenance:
    """Return where the figures will come from; raises UserError if the profile's launcher cannot work."""
    with contextlib.closing(make_launcher(profile, framework=framework)) as launcher:
        return launcher.provenance


def _describe_cost(request: SearchRequest, workload: ResolvedWorkload, provenance: Provenance) -> tuple[str, ...]:
    """Describe the search's use of the cluster; nothing if no trial runs."""
    limits = request.limits
    if provenance is not Provenance.MEASURED:
        return ("--max-node-hours is ignored: no trial runs",) if limits.max_node_hours else ()
    trials = limits.budget + limits.confirm + (request.baseline is not None)
    cost = estimate_search(workload.card, workload.space, trials)
    if cost is None:
        return ()
    doubt = () if request.learn_from else describe_doubt(predictor_of(workload.card, workload.space))
    lines = [*doubt, f"expected cost: {cost.describe()}"]
    if limits.max_node_hours and cost.node_hours > limits.max_node_hours:
        lines.append(
            f"that is more than --max-node-hours {limits.max_node_hours:g}: the search may end before its budget"
        )
    return tuple(lines)


def _mask_secrets(spec: RunSpec) -> RunSpec:
    text = spec.model_dump_json()
    masked = redact(text)
    return spec if masked == text else RunSpec.model_validate_json(masked)


def _describe_confirm(request: SearchRequest, provenance: Provenance) -> tuple[str, ...]:
    if not request.limits.confirm or provenance.is_repeatable:
        return ()
    return (f"--confirm is ignored: a {provenance.value} figure cannot be confirmed by another run",)


def _choose_run_id(request: SearchRequest) -> str:
    if request.run_id is None:
        path = Path(request.workload)
        stem = path.parent.name if path.name == "card.yaml" else path.stem
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem)[:30].strip("-") or "run"
        return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if request.run_id in (LAST, AUTO, NONE):
        raise UserError(f"{request.run_id!r} is reserved: choose another run name")
    if not RUN_ID.match(request.run_id):
        raise UserError(f"a run's name must be letters, digits, `.`, `_` and `-` (at most 80), not {request.run_id!r}")
    return request.run_id


@dataclass(frozen=True)
class Strategy:
    """The chosen strategy and its LLM options."""

    name: str
    sampler: str
    """As `--sampler` names it; a folder as an absolute path."""
    llm_options: Mapping[str, Value | None]
    """The request's, with the seed policy's source."""
    notes: tuple[str, ...]
    """Notes on the LLM: none is used, or its key is missing."""


def choose_strategy(request: SearchRequest) -> Strategy:
    """Return the strategy of an LLM, else `sampler`, with the sampler; raises UserError if one cannot work."""
    name = _choose_name(request)
    sampler = resolve_sampler(request.sampler or DEFAULT_SAMPLER)
    return Strategy(name, sampler, freeze_seed(request.llm_options), _describe_llm(request))


def _choose_name(request: SearchRequest) -> str:
    strategy = request.strategy
    if strategy is not None and strategy not in (known := list_strategies()):
        raise UserError(
            f"there is no strategy {strategy!r}{guess_name(strategy, known)}; known: {', '.join(known)}; name a sampler"
            f" with --sampler{describe_broken_plugins()}"
        )
    if not request.llm:
        if strategy:
            raise UserError(f"strategy {strategy!r} needs an LLM: --llm {describe_forms()}")
        return SAMPLER
    refuse_if_offline(parse_spec(request.llm))
    # Wrong values in the environment are reported before anything starts.
    read_timeout_s()
    refuse_without_price(parse_spec(request.llm).name, request.llm_options)
    return strategy or DEFAULT_STRATEGY


def _describe_llm(request: SearchRequest) -> tuple[str, ...]:
    if request.llm:
        key = missing_key(parse_spec(request.llm))
        return (f"{key} is not set: the search runs without an LLM",) if key else ()
    if request.sampler not in (None, DEFAULT_SAMPLER):
        return ()
    words = " or ".join(f"`--llm {word}:MODEL`" for word, kind in list_kinds().items() if kind.key_name)
    return (f"no LLM is used (add one with {words})",)


NAMES = ("ccl-search", "__main__.py")
"""Programs of ours: in a notebook or a user's program the command line says nothing about the search."""
GIT_TIMEOUT_S = 10.0
MAX_COMMAND = 2000


def find_command() -> str:
    """The command line of this process as one would type it; empty if another program called the search."""
    if not sys.argv or Path(sys.argv[0]).name not in NAMES:
        return ""
    return one_line(shlex.join(["ccl-search", *sys.argv[1:]]), MAX_COMMAND)


def find_commit(framework: str) -> str:
    """The git commit of the folder of the framework's run script, and whether files there differ from it.

    Empty for a script of the package itself, and for a folder that git does not know.
    """
    try:
        script = load_framework(framework).script_path.resolve()
    except UserError:
        return ""
    folder = script.parent
    if folder.is_relative_to(shipped_root().resolve() / "launchers"):
        return ""
    commit = _ask_git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    if _ask_git(folder, "ls-files", "--error-unmatch", "--", script.name) is None:
        return f"commit {commit}, which does not have {script.name}"
    changed = _ask_git(folder, "status", "--porcelain", "--", ".")
    state = "unknown whether files differ from it" if changed is None else "with changes" if changed else "no changes"
    return f"commit {commit}, {state}"


def _ask_git(folder: Path, *words: str) -> str | None:
    """Output of git about a folder; None if git fails."""
    # A repository's own settings may name programs to start (fsmonitor, pagers): none of them may run.
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            env={**public_environment(), "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


_BASELINE = "--baseline"


def _choose_baseline(request: SearchRequest, workload: ResolvedWorkload) -> Config | None:
    """The configuration to compare with; knobs that the user left out have their neutral value.

    Raises UserError that names the rule that refuses it.
    """
    if request.baseline is None:
        return None
    space = workload.space
    try:
        given = parse_assignments(request.baseline, space.knobs)
    except UserError as error:
        raise UserError(f"{_BASELINE}: {error}") from None
    rows = np.flatnonzero(space.matching(given))
    if not len(rows):
        raise UserError(f"{_BASELINE} {format_config(given)}: {_explain(given, workload)}")
    open_knobs = [knob for knob in space.knobs if knob.name not in given]
    neutral = {knob.name: meaning_of(canonical_name(knob.name)).neutral for knob in open_knobs}
    row = space.row({**neutral, **given}) if len(rows) > 1 else int(rows[0])
    if row is None:
        varied = [k.name for k in open_knobs if len({space.config(int(r))[k.name] for r in rows[:1000]}) > 1]
        raise UserError(
            f"{_BASELINE} {format_config(given)}: {len(rows)} configurations of the search space match;"
            f" give {' and '.join(varied)} too"
        )
    return space.config(row)


def _explain(given: Mapping[str, Value], workload: ResolvedWorkload) -> str:
    """Explain why no configuration of the space has these values."""
    if workload.recording:
        return "the recording has no such configuration"
    framework = load_framework(workload.framework)
    verdicts = explain_config(workload.card, framework, given, workload.knobs, workload.use_fewer)
    refused = [
        f"rule {verdict.rule}: {verdict.detail} (required: {verdict.summary})"
        for verdict in verdicts
        if verdict.ok is False
    ]
    return "; ".join(refused) or "not in the search space for any values of the other knobs"
