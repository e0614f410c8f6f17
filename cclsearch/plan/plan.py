"""From a request to a plan, in stages: card, target, objective, workload with its space, strategy. Nothing is written.

Each stage takes frozen values and returns a frozen value; no stage calls an earlier one.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.values import Config, Provenance
from cclsearch.core.version import __version__
from cclsearch.launch.profile import Profile, make_launcher
from cclsearch.plan.baseline import choose_baseline
from cclsearch.plan.cost import estimate_search
from cclsearch.plan.impossible import describe_impossible, describe_no_room
from cclsearch.plan.origin import find_command, find_commit
from cclsearch.plan.request import SearchRequest
from cclsearch.plan.requested import load_requested
from cclsearch.plan.strategy import choose_strategy
from cclsearch.plan.target import choose_target
from cclsearch.plan.warm_start import AUTO, NONE, learn_from_earlier
from cclsearch.plan.workload import ResolvedWorkload, resolve_workload
from cclsearch.propose.base import SearchView
from cclsearch.propose.study.choose import try_sampler
from cclsearch.run.catalog import LAST
from cclsearch.run.spec import RunSpec
from cclsearch.scoring.objective import choose_objective
from cclsearch.space.table import Space
from cclsearch.tasks.base import task_of
from cclsearch.trace.kernel_classes import load_classes
from cclsearch.tracking.targets import open_targets

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
    )
    objective = choose_objective(request.objective, request.constraints, task=requested_card.task)
    objective = task_of(requested_card).constrain(requested_card, objective)
    workload = resolve_workload(request, requested_card, target, objective)
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
            *workload.notes,
            *target.notes,
            *_describe_confirm(request, provenance),
            *([f"baseline, measured first and outside the budget: {baseline}"] if baseline else []),
            *_describe_cost(request, workload, provenance),
            *strategy.notes,
        ),
    )
    return Plan(_mask_secrets(learn_from_earlier(spec, request, workload.space)), workload.space)


def _read_provenance(profile: Profile, framework: str) -> Provenance:
    """Where the figures will come from; raises UserError if the profile's launcher cannot work."""
    with contextlib.closing(make_launcher(profile, framework=framework)) as launcher:
        return launcher.provenance


def _choose_baseline(request: SearchRequest, workload: ResolvedWorkload) -> Config | None:
    if request.baseline is None:
        return None
    framework = None if workload.recording else workload.framework
    return choose_baseline(
        request.baseline, workload.space, workload.card, framework, workload.knobs, use_fewer=workload.use_fewer
    )


def _describe_cost(request: SearchRequest, workload: ResolvedWorkload, provenance: Provenance) -> tuple[str, ...]:
    """What the search will use of the cluster; nothing if no trial runs."""
    limits = request.limits
    if provenance is not Provenance.MEASURED:
        return ("--max-node-hours is ignored: no trial runs",) if limits.max_node_hours else ()
    trials = limits.budget + limits.confirm + (request.baseline is not None)
    cost = estimate_search(workload.card, workload.space, trials)
    if cost is None:
        return ()
    lines = [f"expected cost: {cost.describe()}"]
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
