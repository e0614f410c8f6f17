"""The LLM agent of one search: its evidence is the run folder, its fallback the default strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cclsearch.launch.contract import STDERR_FILE, STDOUT_FILE
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.arbiter.arbiter import make_arbiter
from cclsearch.propose.base import Proposer
from cclsearch.propose.llm.account import Limits
from cclsearch.propose.llm.agent import AgentOptions, make_agent
from cclsearch.propose.llm.evidence import TrialEvidence
from cclsearch.record.ledger import LEDGER_FILE, read_events
from cclsearch.record.state import fold_events
from cclsearch.redact import redact
from cclsearch.spec import RunSpec
from cclsearch.values import Config

LOG_TAIL_BYTES = 4096


def make_agent_for(spec: RunSpec, folder: Path) -> Proposer:
    """The proposer of strategy `hybrid` or `llm`; raises UserError where the LLM's spec or key will not do."""
    options: dict[str, Any] = spec.llm_options
    limits = Limits(max_tokens=options.get("max_tokens"), max_usd=options.get("max_usd"))
    agent = make_agent(
        spec.llm or "",
        options=AgentOptions(
            mode=str(options.get("mode", "configs")), limits=limits, seed_policy=options.get("seed_policy")
        ),
        folder=folder,
        evidence=RunEvidence(folder),
        explain=None if spec.recording else make_explain(spec),
    )
    return make_arbiter(spec.strategy, PROPOSERS.get("default")(), agent, parallel=spec.limits.parallel)


class RunEvidence:
    """Looks up what a run's trials left behind, for the agent's tools."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, trial: int) -> TrialEvidence | None:
        """What that trial left; None where there is no such finished trial."""
        known = fold_events(read_events(self._folder / LEDGER_FILE)).trials.get(trial)
        if known is None or known.outcome is None:
            return None
        outcome = known.outcome
        return TrialEvidence(
            diagnosis=outcome.diagnosis,
            seconds_by_cause=outcome.seconds_by_cause,
            notes=outcome.notes,
            log_tail=self._log_tail(trial) if outcome.failure else "",
        )

    def _log_tail(self, trial: int) -> str:
        folder = self._folder / "trials" / f"{trial:04d}"
        return next((tail for name in (STDERR_FILE, STDOUT_FILE) if (tail := _read_tail(folder / name))), "")


def _read_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - LOG_TAIL_BYTES, 0))
            return redact(file.read().decode("utf-8", errors="replace")).strip()
    except OSError:
        return ""


def make_explain(spec: RunSpec) -> Any:
    """Configuration -> why each broken rule of the space rejects it."""
    from cclsearch.space.build import explain_config
    from cclsearch.space.framework import load_framework

    framework = load_framework(spec.framework)

    def explain(config: Config) -> Sequence[str]:
        return [f"{v.rule}: {v.detail}" for v in explain_config(spec.card, framework, config) if v.ok is False]

    return explain
