"""The evidence in a run's folder for the LLM: results, logs and traces of finished trials, and the shipped texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cclsearch.core.content import shipped_root, trial_folder
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import read_tail
from cclsearch.core.secrets.redact import redact
from cclsearch.launch.contract import STDERR_FILE, STDOUT_FILE
from cclsearch.propose.agent.memory.evidence import TrialEvidence
from cclsearch.run.folder import find_trial_inputs
from cclsearch.run.trial_folder import METRICS_FILE
from cclsearch.scoring.outcome import Outcome
from cclsearch.trace.answers.score_request import ScoreRequest, score_request
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.read import open_trace
from cclsearch.trace.whatif.answer import describe_answer
from cclsearch.trace.whatif.projection import Scenario, prepare_replay

LOG_TAIL_BYTES = 4000
# A secret may cross the start of the tail.
OVERLAP_BYTES = 16_000
"""Bytes read before the tail, so that such a secret is recognized."""
MAX_LINES = 30
"""Lines of the shipped texts that a search for words returns."""
SHOWN: dict[str, dict[str, Any]] = {
    "parts": {"diagnosis": True},
    "ranks": {"metrics": ("compute_imbalance", "comm_wait_frac", "last_arriver", "start_skew"), "steps": True},
    "stages": {"metrics": ("pipeline_bubble", "compute_imbalance", "moe_balance")},
    "kernels": {"metrics": ("compute_time", "kernel_time", "concentration", "launch_rate"), "operators": True},
    "collectives": {"metrics": ("bus_bw", "bw_util", "comm_volume", "comm_time", "comm_mean_time", "overlap")},
    "idle": {"metrics": ("idle_frac", "busy_frac", "exposed_comm_frac", "exposed_mem_frac")},
    "difference": {"diff": True},
}
"""What the look-up `trace` shows -> the options of `ccl-search score` for it."""


class FolderEvidence:
    """Evidence from the trial folders of a run; an `EvidenceSource`."""

    def __init__(self, folder: Path, framework: str = "", *, has_traces: bool = False) -> None:
        self._folder, self._framework, self.has_traces = folder, framework, has_traces

    def find(self, trial: int) -> TrialEvidence | None:
        """Diagnosis and log tail of a finished trial; None if its folder contains neither."""
        folder = trial_folder(self._folder, trial)
        outcome = Outcome.read(folder / METRICS_FILE)
        log = _read_log(folder / STDERR_FILE) or _read_log(folder / STDOUT_FILE)
        if outcome is None and not log:
            return None
        if outcome is None:
            return TrialEvidence(log_tail=log)
        return TrialEvidence(
            diagnosis=outcome.diagnosis,
            seconds_by_cause=outcome.seconds_by_cause,
            notes=outcome.notes,
            log_tail=log if outcome.failure else "",
        )

    def inspect(self, trials: Sequence[int], show: str, factors: Sequence[float]) -> str:
        """Return what the trace of a trial, or of two, shows, as text; or why it does not."""
        paths = [str(trial_folder(self._folder, trial)) for trial in trials]
        try:
            if show == "what_if":
                return _ask_what_if(
                    Path(paths[0]), Scenario(scale_up_bw=factors[0], scale_out_bw=factors[1], compute=factors[2])
                )
            request = ScoreRequest(traces=paths, find_inputs=find_trial_inputs, **SHOWN[show])
            text = score_request(request).as_text()
        except NotAvailable as error:
            return f"not available: {error.detail or error.reason}"
        except UserError as error:
            return f"not available: {error}"
        for path in paths:
            text = text.replace(path, f"trial {int(Path(path).name)}")
        return re.sub(" {3,}", "  ", text)  # a reply is bounded in bytes

    def search(self, words: str) -> str:
        """Return the lines of the framework's options and of the documentation that have all of these words."""
        root = shipped_root()
        options = root / "launchers" / f"{self._framework}.options.txt"
        wanted = words.lower().split()
        lines = [
            f"{path.stem}: {line.strip()}"
            for path in [*([options] if options.is_file() else []), *sorted((root / "docs").glob("*.md"))]
            for line in path.read_text(encoding="utf-8").splitlines()
            if wanted and all(word in line.lower() for word in wanted)
        ]
        more = [f"({len(lines) - MAX_LINES} more)"] if len(lines) > MAX_LINES else []
        return "\n".join([*(line[:600] for line in lines[:MAX_LINES]), *more]) or f"no line has {words!r}"


def _ask_what_if(path: Path, scenario: Scenario) -> str:
    inputs = find_trial_inputs(path)
    trace = open_trace(path, card=inputs[0] if inputs else None, config=inputs[1] if inputs else None)
    replay = prepare_replay(trace, None)
    return "\n".join(describe_answer(replay, replay.time(scenario), replay.utilities()))


def _read_log(path: Path) -> str:
    return redact(read_tail(path, LOG_TAIL_BYTES + OVERLAP_BYTES))[-LOG_TAIL_BYTES:]
