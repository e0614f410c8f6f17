"""Latencies by measured kernels: the tables of aiconfigurator (NVIDIA, Apache-2.0) as a prior of serving predictions.

A card with `kernel_tables: aiconfigurator` asks for it; `pip install 'ccl-search[aiconfigurator]'` installs it. It adds
up measured times of a model's kernels on one of NVIDIA's accelerators, by engine and layout, and so has what roofline
models lack: how slow a kernel for slices of experts is. Its estimates of the time to the first token and of the time
per token are averaged, as logarithms, with the closed form's; a configuration without an estimate keeps the latter.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.catalogue import find_by_name
from cclsearch.card.model import PRECISION, Card
from cclsearch.core.errors import UserError
from cclsearch.space.table import Space
from cclsearch.tasks.serving.closed_form.replica import Array, Replica, name_engines
from cclsearch.tasks.serving.closed_form.steady_state import serve
from cclsearch.tasks.serving.closed_form.steps import MULTIPLIERS, LoadParts

PACKAGE = "aiconfigurator"
# Both err alike before any trial (benchmarks/serving.md).
TRUST = 0.5
"""Weight of aiconfigurator's estimates against the closed form's."""
# Each takes about 0.06 s.
MAX_ESTIMATES = 1500
"""Number of different estimates of one space."""
MODES = ("SILICON", "HYBRID")
"""Measured kernels only, else with formulas for those that were not measured."""
SYSTEMS = {
    "a100-40": "a100_sxm", "a100-80": "a100_sxm", "h100": "h100_sxm", "h100-pcie": "h100_pcie", "h200": "h200_sxm",
    "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200", "gb300": "gb300", "l4": "l4", "l40s": "l40s",
}  # fmt: skip
"""Key of `hardware.yaml` -> its name of the system."""
ENGINES = {"trtllm": "trtllm", "tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "vllm": "vllm", "sglang": "sglang"}
WEIGHTS = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8_block", "fp4": "nvfp4", "nvfp4": "nvfp4"}
"""Precision -> its name of the weights' type in a mixture of experts; a dense model in fp8 has one scale a matrix."""
OWN_WEIGHTS = ("gpt-oss",)
"""Models with weight types of their own in the published checkpoint; aiconfigurator knows them by name."""


@dataclass(frozen=True)
class ServedLayout:
    """Inputs of an estimate beside the card."""

    engine: str
    precision: str
    tp: int
    """Ranks that share an attention layer."""
    pp: int
    attention_dp: int
    """Groups of such ranks that share the layers of experts."""
    ep: int
    batch: int
    """Requests at once of each such group."""


def require_kernel_tables(card: Card) -> None:
    """Raise UserError, in one line, if the card asks for kernel tables that there are not."""
    asked = card.hardware.kernel_tables
    if asked is None:
        return
    if asked != PACKAGE:
        raise UserError(f"{card.name}: kernel_tables must be {PACKAGE}; it is {asked!r}")
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"{card.name}: kernel_tables needs the package {PACKAGE}: pip install 'ccl-search[{PACKAGE}]', or leave"
            " kernel_tables out"
        )
    if card.hardware.accelerator not in SYSTEMS:
        raise UserError(
            f"{card.name}: {PACKAGE} has no tables of {card.hardware.accelerator!r}, only of {', '.join(SYSTEMS)}:"
            " leave kernel_tables out"
        )
    if _find_model(card.family) is None:
        raise UserError(
            f"{card.name}: {PACKAGE} does not know the model {card.family!r}, whose configuration it would have to"
            " download: leave kernel_tables out"
        )


def _find_model(family: str) -> str | None:
    """aiconfigurator's name of the model; None if its package does not contain the model's configuration."""
    known, found = find_by_name(family), importlib.util.find_spec(f"{PACKAGE}_core")
    folders = [Path(place) / "model_configs" for place in (found.submodule_search_locations or ())] if found else []
    for name in (family, *(known.aliases if known else ())):
        if any((folder / f"{name.replace('/', '--')}_config.json").is_file() for folder in folders):
            return name
    return None


def estimate_latencies(card: Card, layouts: Sequence[ServedLayout], lengths: tuple[int, int]) -> Array:
    """(n, 2) seconds to the first token and per output token of each layout; NaN where there is no estimate.

    Raises UserError if there are too many different layouts.
    """
    require_kernel_tables(card)
    if (count := len(set(layouts))) > MAX_ESTIMATES:
        raise UserError(
            f"{card.name}: the space needs {count} estimates of {PACKAGE}, at most {MAX_ESTIMATES} work: leave"
            " kernel_tables out, or fix knobs with --knob"
        )
    model = _find_model(card.family)
    assert model is not None, "required above"
    of_card = model, SYSTEMS[card.hardware.accelerator], card.model is not None and card.model.moe is not None
    return np.array([_estimate(*of_card, layout, lengths) for layout in layouts]).reshape(-1, 2)


@lru_cache(maxsize=4 * MAX_ESTIMATES)
def _estimate(
    model: str, system: str, is_moe: bool, layout: ServedLayout, lengths: tuple[int, int]
) -> tuple[float, float]:
    engine = ENGINES.get(layout.engine.lower())
    if engine is None:
        return np.nan, np.nan
    weights: dict[str, str] = {}
    if layout.precision in WEIGHTS and not any(name in model.lower() for name in OWN_WEIGHTS):
        name = WEIGHTS[layout.precision] if is_moe or layout.precision != "fp8" else "fp8"
        weights = {"gemm_quant_mode": name} | ({"moe_quant_mode": name} if is_moe else {})
    width = layout.tp * layout.attention_dp
    ep = min(layout.ep, width) if is_moe else 1
    with _quiet():
        estimate = _load_estimator()
        for mode in MODES:
            try:
                found = estimate(
                    model, system, backend_name=engine, database_mode=mode, isl=lengths[0], osl=lengths[1],
                    batch_size=layout.batch, tp_size=layout.tp, pp_size=layout.pp,
                    attention_dp_size=layout.attention_dp, moe_ep_size=ep, moe_tp_size=max(1, width // ep), **weights,
                )  # fmt: skip
            except Exception:  # it raises many kinds for what its tables lack
                continue
            if found.ttft > 0 and found.tpot > 0:
                return found.ttft / 1e3, found.tpot / 1e3
    return np.nan, np.nan


@cache
def _load_estimator() -> Callable[..., Any]:
    """Return aiconfigurator's function for one estimate."""
    # It would list its known versions at each call; here it lists them once.
    api = importlib.import_module(f"{PACKAGE}.cli.api")
    database = importlib.import_module(f"{PACKAGE}_core.sdk.perf_database")
    database.get_supported_databases = cache(database.get_supported_databases)  # type: ignore[attr-defined]
    return api.cli_estimate  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Its prints and log lines are not for the search's output."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True, eq=False)
class KernelPrior:
    """Moves predicted latencies towards the estimates from measured kernels."""

    card: Card
    at: Replica
    """The columns of the space, (N,) each."""
    engines: Sequence[str]
    """Engine of each row."""
    precisions: Sequence[str]
    lengths: tuple[float, float]
    """Tokens of a prompt and of its answer."""

    def lean(self, parts: LoadParts, rows: NDArray[np.int64], clients: Array | float) -> LoadParts:
        """Return the parts of a load of so many clients, of these rows, with latencies between both predictions."""
        numbers = np.broadcast_to(np.asarray(clients, dtype=np.float64), rows.shape)
        layouts = [self._lay_out(int(row), float(number)) for row, number in zip(rows, numbers, strict=True)]
        estimates = estimate_latencies(self.card, layouts, (round(self.lengths[0]), round(self.lengths[1])))
        own = serve(parts, np.zeros(len(MULTIPLIERS)))
        moved = [TRUST * np.log(estimates[:, n] / value) for n, value in enumerate((own.ttft_s, own.tpot_s))]
        has_both = np.isfinite(moved).all(axis=0) & (parts.prefillers == 0)
        ttft, tpot = (np.where(has_both, each, 0.0) for each in moved)
        return replace(parts, ttft_lean=ttft, tpot_lean=tpot)

    def _lay_out(self, row: int, clients: float) -> ServedLayout:
        at = self.at
        tp, attention, dp = int(at.tp[row]), int(at.attention_ranks[row]), int(at.dp[row])
        groups = tp // attention
        return ServedLayout(
            engine=self.engines[row],
            precision=self.precisions[row],
            tp=attention,
            pp=int(at.pp[row]),
            attention_dp=groups * (dp if at.ep[row] > tp else 1),
            ep=int(at.ep[row]),
            batch=max(1, round(min(clients / (dp * groups), float(at.sequences[row])))),
        )


def make_kernel_prior(card: Card, space: Space, at: Replica, lengths: tuple[float, float]) -> KernelPrior | None:
    """Return the prior that the card asks for, if it does; raises UserError if that prior cannot be had."""
    if card.hardware.kernel_tables is None:
        return None
    require_kernel_tables(card)
    chosen = space.find(PRECISION)
    precisions = [card.precision] * len(space) if chosen is None else list(map(str, space.column(PRECISION)))
    return KernelPrior(card, at, name_engines(card, space), precisions, lengths)
