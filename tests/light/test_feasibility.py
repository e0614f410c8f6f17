"""Without a measured peak, successes and out-of-memory failures determine how a framework shards its states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.propose.base import Observation
from cclsearch.propose.bayes.feasibility import Feasibility, fit_feasibility
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predictor_of
from cclsearch.tasks.training.layout import read_layout

CARD = load_card("wl2")  # 8 billion parameters on 16 A100 of 40 GB
FAILED = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")
CRASHED = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="crashed or out of memory")


def make_space(rows: Sequence[dict[str, object]]) -> Space:
    names = list(rows[0])
    knobs = [Knob(name, tuple(sorted({row[name] for row in rows}, key=str))) for name in names]  # type: ignore[misc]
    return space_from_rows(knobs, rows)  # type: ignore[arg-type]


SPLITS = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if tp * pp <= 16]
SPACE = make_space([{"tp": tp, "pp": pp, "dp": 16 // tp // pp, "micro_batch_size": 1} for tp, pp in SPLITS])


def row_of(tp: int, pp: int) -> int:
    return SPACE.row(Config({"tp": tp, "pp": pp, "dp": 16 // tp // pp, "micro_batch_size": 1}))


def fit(
    ran: Sequence[tuple[int, int]],
    failed: Sequence[tuple[int, int]] = (),
    peak: float | None = None,
    *,
    failure: Failure = FAILED,
    doubted: Sequence[int] = (),
) -> Feasibility:
    metrics = {"step_time_s": 1.0} | ({} if peak is None else {"peak_memory_gib": peak})
    ends = [(row_of(*split), {"loss": 1.0, "metrics": metrics}) for split in ran]
    ends += [(row_of(*split), {"loss": None, "failure": failure}) for split in failed]
    seen = [Observation(n, SPACE.config(row), row, **end) for n, (row, end) in enumerate(ends)]
    return fit_feasibility(predictor_of(CARD, SPACE), seen, doubted=frozenset(doubted))


def p_fits(feasibility: Feasibility, tp: int, pp: int) -> float:
    return float(feasibility.predict(np.array([row_of(tp, pp)]))[1][0])


def p_success(feasibility: Feasibility, tp: int, pp: int) -> float:
    return float(feasibility.predict(np.array([row_of(tp, pp)]))[2][0])


def test_a_run_explained_only_by_sharded_states_raises_p_fits():
    # over tp=2, replicated states of 8 billion parameters take over 60 GB of the 40; sharded over 8 they fit
    before, after = fit([]), fit([(2, 1)])
    assert p_fits(before, 1, 2) < 0.7 < p_fits(after, 1, 2)


def test_a_success_does_not_lower_p_fits_of_similar_configurations():
    known = fit([(4, 1)])
    more = fit([(4, 1), (4, 2)])
    assert p_fits(more, 2, 1) >= p_fits(known, 2, 1) - 0.02


def test_an_out_of_memory_failure_against_sharded_states_lowers_p_fits():
    # over tp=4, sharded states leave half of the memory free, and replicated ones do not fit
    before, after = fit([]), fit([], failed=[(4, 1)])
    assert p_fits(after, 2, 2) < 0.7 * p_fits(before, 2, 2)


def test_a_crash_of_unknown_cause_is_shared_between_memory_and_other_causes():
    # certainly fits by the peaks of others: something else made it crash, and its neighbours are suspected of that
    elsewhere, before = fit([(4, 1), (2, 1)], [(8, 1)], peak=20.0, failure=CRASHED), fit([(4, 1), (2, 1)], peak=20.0)
    assert p_fits(elsewhere, 8, 1) > 0.95
    assert p_success(elsewhere, 8, 2) < 0.9 * p_success(before, 8, 2)
    # in doubt: a crash says less of memory than an out-of-memory failure does
    before, shared, named = fit([]), fit([], [(4, 1)], failure=CRASHED), fit([], [(4, 1)])
    assert p_fits(named, 4, 1) < p_fits(shared, 4, 1) < p_fits(before, 4, 1)


def test_a_crash_that_the_llm_does_not_put_down_to_memory_teaches_little_about_memory():
    before, shared = fit([]), fit([], [(4, 1)], failure=CRASHED)
    doubted = fit([], [(4, 1)], failure=CRASHED, doubted=[0])
    assert p_fits(before, 4, 1) - p_fits(doubted, 4, 1) < 0.4 * (p_fits(before, 4, 1) - p_fits(shared, 4, 1))
    assert p_success(doubted, 4, 1) < p_success(before, 4, 1)


def test_with_a_measured_peak_one_hypothesis_is_enough():
    assert len(fit([(4, 1)], peak=20.0).hypotheses) == 1
    assert len(fit([(4, 2)]).hypotheses) > 1
    assert fit([(4, 2)]).weight_h.sum() == pytest.approx(1.0)


def test_kernel_choices_give_attention_speed_and_fused_norms():
    kernels = ("flash_attentionv1.0.8", "flash_attention2", "flash_attention2 + RMS kernel", "torch", "flash-attn 3")
    space = make_space([{"tp": 1, "dp": 16, "micro_batch_size": 1, "kernel": kernel} for kernel in kernels])
    layout = read_layout(CARD, space)
    by_kernel = {str(space.config(row)["kernel"]): row for row in range(len(space))}
    order = [by_kernel[kernel] for kernel in kernels]
    slow = layout.attention_slowness[order]
    assert slow[0] > slow[1] == slow[2] == slow[3] > slow[4]
    assert layout.unfused_norms[order].tolist() == [1, 1, 0, 1, 1]


def test_without_a_fused_norm_among_the_choices_no_norm_counts_as_unfused():
    space = make_space([{"tp": 1, "dp": 16, "micro_batch_size": 1, "kernel": kernel} for kernel in ("torch", "flash")])
    assert not read_layout(CARD, space).unfused_norms.any()


@pytest.mark.parametrize("sequence", [1024, 16384])
def test_a_space_in_which_nothing_would_run_without_recomputation_is_one_of_a_framework_that_recomputes(sequence):
    card = load_card("wl2").model_copy(update={"framework": "unheard-of"})
    card = card.model_copy(update={"work": Config({**card.work, "seq_len": sequence, "global_batch_size": 64})})
    space = make_space([{"tp": 1, "pp": 1, "dp": 16, "micro_batch_size": size} for size in (1, 2, 4)])
    fitted = fit_feasibility(predictor_of(card, space), ())
    kept = fitted.form.form.multipliers.index("kept")
    recomputed = [hypothesis.prior.mean_P[kept] == -5.0 for hypothesis in fitted.hypotheses]
    assert (fitted.weight_h @ recomputed > 0.5) == (sequence > 10000)
