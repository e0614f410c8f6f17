"""A complete run page with hostile text, for tests of reports."""

from __future__ import annotations

import base64
import gzip
import re
from dataclasses import replace

from cclsearch.charts.trials import NeighborPoint
from cclsearch.plugins import TASKS
from cclsearch.record.event import Purpose
from cclsearch.record.trial import TrialState
from cclsearch.report.data import RunPage
from cclsearch.report.rows import TrialRow
from cclsearch.scoring.outcome import Verdict

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def make_trial(number: int, time_s: float | None, **fields: object) -> TrialRow:
    trial = TrialRow(
        number=number,
        config={
            "tp": 2 ** (number % 3),
            "dp": 8 // 2 ** (number % 3),
            "checkpointing": number % 2 == 0,
            "kernel": "flash",
        },
        proposer="llm" if number % 2 else "default",
        rationale=f"try {number}: {HOSTILE}",
        purpose=Purpose.SEARCH,
        state=TrialState.ADMITTED if time_s else TrialState.FAILED,
        loss=time_s,
        figure=time_s,
        metrics={"step_time_s": time_s, "mfu": 0.2 / time_s, "overlap": 0.5, "num_accelerators": 8.0} if time_s else {},
        spread=0.01 if time_s else None,
        value=time_s,
        expected={"step_time_s": time_s * 1.1} if time_s else {},
        checks=(Verdict(rule="work", ok=True, detail="64 sequences"), Verdict(rule="load", ok=None, detail=HOSTILE)),
        diagnosis=("0.4 s of 1.0 s wait for the all-reduce",),
        seconds_by_cause={"compute": 0.6, "exposed transfer": 0.3, "idle": 0.1} if time_s else {},
        evidence=f"trials/{number:04d}",
        wall_s=30.0,
    )
    return replace(trial, **fields)  # type: ignore[arg-type]


def make_page(run_id: str = "demo", **fields: object) -> RunPage:
    trials = (
        make_trial(1, 1.0),
        make_trial(2, None, failure_kind="out_of_memory", reason=f"CUDA out of memory {HOSTILE}"),
        make_trial(3, 0.7),
        make_trial(4, 1.4),
        make_trial(5, None, state=TrialState.REFUSED, reason="work: global batch 4 where the card has 32"),
        make_trial(6, 0.5),
        make_trial(7, 0.51, purpose=Purpose.CONFIRMATION),
    )
    page = RunPage(
        run_id=run_id,
        task=TASKS.get("training"),
        workload="toy",
        card="toy",
        title=f"A toy {HOSTILE}",
        model="toy-1b",
        work="toy-1b (16 layers of 2048), 64 x 2048 tokens per step, bf16",
        hardware="8 x h100",
        framework="megatron",
        provenance="measured",
        objective="step_time",
        constraints=(),
        score_label="step time (s)",
        greater_is_better=False,
        status="ended: the budget is used up",
        banner=(f"note {HOSTILE}",),
        trials=trials,
        counts="5 of 7 trials admitted (1 failed, 1 not admitted)",
        best=6,
        baseline=1,
        facts=(("best step time", "0.5 s"), ("trials admitted", "5 of 7")),
        confidence=("97% likely the best of what was tried",),
        interval=(0.48, 0.52),
        neighbors=(NeighborPoint("tp 1 → 2, dp 8 → 4", 1.4, 3), NeighborPoint("kernel flash → plain", 2.0, None)),
        costs=(("accelerator-hours", "0.47"), ("LLM tokens", "1,200 input")),
        notes=(("llm turn", f"thought {HOSTILE}"),),
        created="2026-01-01T00:00:00+00:00",
    )
    return replace(page, **fields)  # type: ignore[arg-type]


def unpack_charts(page: str) -> str:
    """The charts of a page as JSON text; empty if it has none."""
    found = re.search(r'id="packed-charts">([^<]*)<', page)
    return gzip.decompress(base64.b64decode(found[1])).decode() if found else ""
