"""What ran and what ran out of memory tells how a framework holds its states, where no peak was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.propose.base import Observation
from cclsearch.propose.bayes.feasibility import Feasibility, fit_feasibility
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.prediction import load_priors, model_of

CARD = load_card("wl2")  # 8 billion parameters on 16 A100 of 40 GB
FAILED = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")


def make_space(rows: Sequence[dict[str, object]]) -> Space:
    names = list(rows[0])
    knobs = [Knob(name, tuple(sorted({row[name] for row in rows}, key=str))) for name in names]  # type: ignore[misc]
    return space_from_rows(knobs, rows)  # type: ignore[arg-type]


SPACE = make_space(
    [
        {"tp": tp, "pp": pp, "dp": 16 // tp // pp, "micro_batch_size": 1}
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4)
        if tp * pp <= 16
    ]
)


def row_of(tp: int, pp: int) -> int:
    row = SPACE.row(Config({"tp": tp, "pp": pp, "dp": 16 // tp // pp, "micro_batch_size": 1}))
    assert row is not None
    return row


def learn(
    ran: Sequence[tuple[int, int]], failed: Sequence[tuple[int, int]] = (), peak: float | None = None
) -> Feasibility:
    seen = [
        Observation(n, SPACE.config(row_of(*split)), row_of(*split), 1.0, 1.0, peak) for n, split in enumerate(ran)
    ] + [
        Observation(n, SPACE.config(row_of(*split)), row_of(*split), None, failure=FAILED)
        for n, split in enumerate(failed, start=len(ran))
    ]
    return fit_feasibility(model_of(CARD, SPACE), seen, load_priors())


def chance(feasibility: Feasibility, tp: int, pp: int) -> float:
    return float(feasibility.predict(np.array([row_of(tp, pp)]))[1][0])


def test_a_run_that_only_shared_states_explain_makes_what_needs_them_likely() -> None:
    # split over 2, whole states of 8 billion parameters take over 60 GB of the 40; shared over 8 they fit
    before, after = learn([]), learn([(2, 1)])
    assert chance(before, 1, 2) < 0.7 < chance(after, 1, 2)


def test_what_ran_never_makes_its_likes_less_likely() -> None:
    known = learn([(4, 1)])
    more = learn([(4, 1), (4, 2)])
    assert chance(more, 2, 1) >= chance(known, 2, 1) - 0.02


def test_an_out_of_memory_that_shared_states_do_not_explain_makes_them_unlikely() -> None:
    # split over 4, shared states leave half of the memory free, and whole ones do not fit
    before, after = learn([]), learn([], failed=[(4, 1)])
    assert chance(after, 2, 2) < 0.7 * chance(before, 2, 2)


def test_a_measured_peak_needs_no_rivals() -> None:
    assert len(learn([(4, 1)], peak=20.0).hypotheses) == 1
    assert len(learn([(4, 2)]).hypotheses) > 1
    assert learn([(4, 2)]).weight_h.sum() == pytest.approx(1.0)


def test_words_of_kernels_say_how_fast_attention_is_and_whether_norms_are_fused() -> None:
    words = ("flash_attentionv1.0.8", "flash_attention2", "flash_attention2 + RMS kernel", "torch", "flash-attn 3")
    space = make_space([{"tp": 1, "dp": 16, "micro_batch_size": 1, "kernel": word} for word in words])
    layout = read_layout(CARD, space)
    by_word = {str(space.config(row)["kernel"]): row for row in range(len(space))}
    order = [by_word[word] for word in words]
    slow = layout.attention_slowness[order]
    assert slow[0] > slow[1] == slow[2] == slow[3] > slow[4]
    assert layout.unfused_norms[order].tolist() == [1, 1, 0, 1, 1]


def test_where_no_choice_names_a_norm_nothing_is_known_of_norms() -> None:
    space = make_space([{"tp": 1, "dp": 16, "micro_batch_size": 1, "kernel": word} for word in ("torch", "flash")])
    assert not read_layout(CARD, space).unfused_norms.any()
