"""A small search with invented measurements that the tests of agent and arbiter share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cclsearch.card.model import Card, Hardware, ModelArch, Phase
from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable
from cclsearch.propose.base import Observation, Proposal, ProposerEvent, SearchView
from cclsearch.propose.events import ArbiterMove
from cclsearch.scoring.objective import load_objective
from cclsearch.space.table import Knob, Space, space_from_rows

CARD = Card(
    name="secret-name",
    title="secret-title",
    task="training",
    phase=Phase.TRAINING,
    family="secret-family",
    model=ModelArch(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        num_params=8_000_000_000,
    ),
    work={"global_batch_size": 64, "seq_len": 4096},
    precision="bf16",
    hardware=Hardware(
        accelerator="a100-80",
        num_accelerators=16,
        accelerators_per_node=8,
        memory_gib=80.0,
        scale_up_gbps=4800.0,
        scale_out_gbps=200.0,
    ),
    framework="secret-framework",
    source="secret-source",
    licence="secret-licence",
)


def make_space() -> Space:
    """All 16-accelerator splits with four micro-batches: 60 configurations."""
    degrees = (1, 2, 4, 8, 16)
    knobs = (Knob("tp", degrees), Knob("pp", degrees), Knob("dp", degrees), Knob("micro_batch_size", (1, 2, 4, 8)))
    rows = [
        {"tp": tp, "pp": pp, "dp": 16 // (tp * pp), "micro_batch_size": micro}
        for tp in degrees
        for pp in degrees
        if tp * pp <= 16
        for micro in (1, 2, 4, 8)
        if 64 % (16 // (tp * pp) * micro) == 0
    ]
    return space_from_rows(knobs, rows)


SPACE = make_space()


def plain_table() -> SurrogateTable:
    """A table with round numbers, so that the golden file does not depend on a fitted surrogate."""
    n = len(SPACE)
    value_N = 10.0 + np.arange(n) * 0.01
    order = tuple(range(n))
    return SurrogateTable(
        value_N, value_N * 0.9, np.full(n, 40.0), np.full(n, 0.75), order, False, "something may be left", ("a record",)
    )


def invented_time_s(config: Config) -> float | None:
    """A smooth invented step time with its minimum at tp 2, pp 2, micro-batch 2; None if out of memory."""
    tp, pp, micro = config.as_int("tp"), config.as_int("pp"), config.as_int("micro_batch_size")
    if micro * 4 > tp * pp * 4:
        return None
    return 10.0 * (1 + 0.1 * abs(tp - 2) + 0.15 * abs(pp - 2) + 0.05 * abs(micro - 2))


def run_trial(trial: int, config: Config, message: str = "CUDA out of memory. Tried to allocate 2 GiB") -> Observation:
    """The invented result of one configuration."""
    time_s = invented_time_s(config)
    row = SPACE.row(config)
    if time_s is None:
        failure = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message=message)
        return Observation(trial, config, row, None, failure=failure)
    metrics = {"step_time_s": time_s, "peak_memory_gib": 40.0}
    return Observation(trial, config, row, time_s, metrics=metrics, spread=0.01)


@dataclass
class Search:
    """A search as the loop would run it, without jobs: the view grows with observations and events."""

    budget: int = 15
    seed: int = 0
    objective: str = "step_time"
    observations: list[Observation] = field(default_factory=list)
    events: list[ProposerEvent] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    running: list[Proposal] = field(default_factory=list)
    message: str = "CUDA out of memory"

    @property
    def view(self) -> SearchView:
        pending = {SPACE.row(proposal.config) for proposal in self.running}
        return SearchView(
            card=CARD,
            space=SPACE,
            observations=tuple(self.observations),
            pending=frozenset(row for row in pending if row is not None),
            budget_left=self.budget - len(self.proposals),
            seed=self.seed,
            target=load_objective(self.objective),
            events=tuple(self.events),
            next_trial=len(self.proposals) + 1,
        )

    def ask(self, proposer: object, count: int = 1) -> list[Proposal]:
        """The proposals, checked as the loop checks them, and started."""
        view = self.view
        taken = {o.row for o in view.observations} | view.pending | set(view.held_back)
        given = list(proposer.propose(view, count))  # type: ignore[attr-defined]
        self.events += proposer.take_events()  # type: ignore[attr-defined]
        for proposal in given:
            row = SPACE.row(proposal.config)
            assert row is not None, f"not in the search space: {proposal}"
            assert row not in taken, f"a repetition: {proposal}"
            taken.add(row)
            self.proposals.append(proposal)
            self.running.append(proposal)
        assert len(given) <= count
        return given

    def finish_trial(self) -> None:
        """Finish the trial that has run longest."""
        proposal = self.running.pop(0)
        trial = next(i for i, p in enumerate(self.proposals, 1) if p is proposal)
        self.observations.append(run_trial(trial, proposal.config, self.message))

    def run(self, proposer: object) -> str | None:
        """Run to the end, one trial after another; returns why it ended early, None if the budget was used."""
        while len(self.proposals) < self.budget:
            if not self.ask(proposer):
                return proposer.ending()  # type: ignore[attr-defined,no-any-return]
            self.finish_trial()
        return None

    def moves(self) -> list[str]:
        """The arbiter's moves, in words."""
        return [event.text for event in self.events if isinstance(event, ArbiterMove)]
