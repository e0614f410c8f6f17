"""`--dry-run`: prints the search space, the first proposals and the job script. Nothing is written or submitted."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from cclsearch.cli.output import say
from cclsearch.core.content import trial_folder
from cclsearch.core.text import one_line
from cclsearch.core.values import format_knob_value
from cclsearch.evaluation.trial_input import make_input
from cclsearch.launch.base import Job
from cclsearch.launch.profile import make_launcher
from cclsearch.loop.session import hold_back, make_offline_proposer
from cclsearch.plan.plan import Plan
from cclsearch.plan.warm_start import load_warm_start
from cclsearch.propose.base import Proposal, SearchView
from cclsearch.record.event import Purpose
from cclsearch.record.trial import Trial
from cclsearch.report.launch_form import describe_launch, launch_as_json

NUM_PROPOSALS = 3


def show_plan(plan: Plan, runs_folder: Path, *, as_json: bool) -> None:
    """Print the plan of a search whose run would be in `runs_folder`."""
    spec, space = plan.spec, plan.space
    proposals = first_proposals(plan)
    script = render_first(plan, proposals[0], runs_folder) if proposals else ""
    if as_json:
        shown = [{"config": dict(p.config), "proposer": p.proposer, "rationale": p.rationale} for p in proposals]
        launch = launch_as_json(spec, proposals[0].config) if proposals else None
        answer = {"space": len(space), "raw": space.num_raw, "proposals": shown, "job_script": script, "launch": launch}
        print(json.dumps(answer))
        return
    say(*(f"note: {line}" for line in spec.banner))
    print(f"space: {len(space):,} valid configurations of {space.num_raw:,} combinations")
    for knob in space.knobs:
        print(f"  {knob.name}: {', '.join(format_knob_value(choice) for choice in knob.choices)}")
    print(f"first proposals of the sampler {spec.sampler}:")
    for proposal in proposals:
        print(f"  {proposal.config}  ({one_line(proposal.rationale, 160) or proposal.proposer})")
    say(f"job script of the first ({spec.profile.name}):\n{script.rstrip()}")
    say(*(describe_launch(spec, proposals[0].config) if proposals else ()))
    print("nothing was run; start the search without --dry-run")


def first_proposals(plan: Plan) -> list[Proposal]:
    """Return the proposals that would run first, before any measurement; an LLM is not asked."""
    spec, space = plan.spec, plan.space
    view = SearchView(
        card=spec.card,
        space=space,
        observations=(),
        pending=frozenset(),
        held_back=hold_back(spec, space).rows,
        budget_left=spec.limits.budget,
        seed=spec.seed,
        target=spec.objective,
        prior=load_warm_start(spec),
        earlier=spec.earlier,
        next_trial=1,
    )
    return list(make_offline_proposer(spec).propose(view, min(NUM_PROPOSALS, spec.limits.budget)))


def render_first(plan: Plan, proposal: Proposal, runs_folder: Path) -> str:
    """Return the job script of the first proposal, as it would be submitted."""
    spec = plan.spec
    trial = Trial(
        number=1,
        config=proposal.config,
        proposer=proposal.proposer,
        rationale=proposal.rationale,
        expects=proposal.expects,
        purpose=Purpose.SEARCH,
        turn=None,
        proposed_s=0.0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        launcher = make_launcher(spec.profile, framework=spec.framework, run_dir=Path(scratch))
        job = Job(
            run_id=spec.run_id,
            trial=1,
            attempt=1,
            trial_dir=trial_folder(runs_folder.absolute() / spec.run_id, 1),
            payload=make_input(spec, trial),
            timeout_s=spec.limits.trial_timeout_s,
        )
        try:
            return launcher.render(job)
        finally:
            launcher.close()
