"""Fits `cclsearch/tasks/training/prior.json`: the prior of the multipliers before any measurement.

    python benchmarks/fit_prior.py LANDSCAPES [--experts EXPERTS.csv MODELS.csv] [--leave-out FAMILY] [--out FILE]

Empirical Bayes over families: of landscapes, a framework (the card's `framework`); of published configurations, the
framework of a repository. The multipliers of each landscape are calibrated on all its rows, averaged within its family,
and the families averaged with a physical guess that counts as one more family. The spread between families and between
landscapes becomes the prior's width, with a lower bound from the physical guess. No constant is fitted to a single
landscape. `--leave-out` fits without one framework or repository, for held-out figures.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experts import Published, choose_row, read_published
from numpy.typing import NDArray

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.loop.bench import RecordedTable
from cclsearch.propose.bayes.feasibility import fit_feasibility
from cclsearch.recording.load import Recording, find_recordings, load_recording
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.calibration import CalibrationData, Posterior, RowModel, calibrate
from cclsearch.stats.kernel import read_features
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training import memory, time
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.prediction import PRIOR_FILE, Priors, make_predictor, read_priors, select_rows

os.environ.setdefault("CCL_SEARCH_PATH", str(Path(__file__).with_name("behaviour")))
"""How frameworks train that have no run script, only recordings (`behaviour/launchers`)."""
GUESS_FILE = Path(__file__).with_name("prior_guess.json")
"""Multipliers and widths from the literature and from physics, without any landscape."""
ROUNDS = 2
# With 1, published times of a source left out were predicted worse than by the guess alone.
GUESS_WEIGHT = 4.0
"""Number of families that the guess counts as."""
SD_FLOOR_SHARE = 0.7
"""A fitted width is at least this share of the guessed one: few families determine the spread poorly."""


HYPOTHESIS = "kept"
"""A multiplier that is one of several ways, of which each landscape has its own: it keeps the guess."""
REPEAT_NOISE = 0.06
"""Relative spread of a published configuration between releases of its source (their median)."""


def fit_prior(recordings: Sequence[Recording], published: Sequence[Published] = ()) -> dict[str, Any]:
    """Return prior data in the format of `prior.json`, from these landscapes and configurations and the guess only."""
    guess = json.loads(GUESS_FILE.read_text(encoding="utf-8"))
    data = json.loads(json.dumps(guess))
    for _ in range(ROUNDS):
        priors = read_priors(_with_widths(data, guess))
        for part, names in (("time", time.MULTIPLIERS), ("memory", memory.MULTIPLIERS)):
            fits = _calibrate_each(recordings, priors, part)
            if part == "time":
                fits |= _calibrate_published(published, priors)
            if fits:
                data[part]["log_multipliers"] = _pool(fits, names, guess[part]["log_multipliers"])
    return data


def _with_widths(data: dict[str, Any], guess: dict[str, Any]) -> dict[str, Any]:
    """Return the fitted means with the guessed widths, so that no round narrows the next one."""
    wide = json.loads(json.dumps(data))
    for part in ("time", "memory"):
        for name, mean_sd in wide[part]["log_multipliers"].items():
            mean_sd[1] = guess[part]["log_multipliers"][name][1]
    return wide


def _calibrate_each(recordings: Sequence[Recording], priors: Priors, part: str) -> dict[str, list[Posterior]]:
    by_family = defaultdict(list)
    for recording in recordings:
        posterior = (calibrate_time if part == "time" else _calibrate_memory)(recording, priors)
        if posterior is not None:
            by_family[recording.card.framework].append(posterior)
    return by_family


def calibrate_time(recording: Recording, priors: Priors) -> Posterior | None:
    from cclsearch.propose.bayes.ensemble import downweight_far

    rows = [n for n, row in enumerate(recording.rows) if row.metrics.get("step_time_s") is not None]
    values = np.log([recording.rows[n].metrics.get("step_time_s") or 0.0 for n in rows])
    noise = downweight_far(values, np.full(len(rows), priors.time.noise))
    evidence = CalibrationData.measured(np.array(rows), values, one_sided=True, noise_n=noise)
    predictor = make_predictor(recording.card, recording.space, priors)
    return calibrate(predictor.forms["step_time_s"].log_cost, predictor.features, priors.time, evidence)


def _calibrate_memory(recording: Recording, priors: Priors) -> Posterior | None:
    """Return the likeliest hypothesis, given all peaks and failures."""
    table = RecordedTable(recording)
    seen = [table.ask(n, n, row.config) for n, row in enumerate(recording.rows)]
    if not any(PEAK_MEMORY in o.metrics for o in seen):
        return None
    return fit_feasibility(make_predictor(recording.card, recording.space, priors), seen).memory


def _calibrate_published(published: Sequence[Published], priors: Priors) -> dict[str, list[Posterior]]:
    """Return family -> the calibration of all its configurations, which differ in model and machine as well."""
    by_family = defaultdict(list)
    for one in published:
        by_family[f"{one.source} {one.card.framework}"].append(one)
    return {family: [_calibrate_family(rows, priors)] for family, rows in by_family.items()}


def _calibrate_family(rows: Sequence[Published], priors: Priors) -> Posterior:
    chosen = [choose_row(row, priors) for row in rows]
    each = [
        select_rows(time.time_parts(row.card, read_layout(row.card, row.space), read_machine(row.card)), np.array([at]))
        for row, at in zip(rows, chosen, strict=True)
    ]
    names = time.TimeParts.__dataclass_fields__
    parts = time.TimeParts(**{name: np.concatenate([getattr(one, name) for one in each]) for name in names})
    configs = [
        {**row.space.config(at), "model": row.card.family, "accelerator": row.card.hardware.accelerator}
        | {"precision": row.card.precision}
        for row, at in zip(rows, chosen, strict=True)
    ]
    shared = set.intersection(*(set(config) for config in configs))
    knobs = [Knob(name, tuple(dict.fromkeys(c[name] for c in configs))) for name in configs[0] if name in shared]
    space = space_from_rows(knobs, configs)

    def log_cost(at: NDArray[np.int64]) -> RowModel:
        here = select_rows(parts, at)
        return lambda theta: np.log(time.combine_time(here, theta))

    values = np.log([row.step_time_s for row in rows])
    noise = np.full(len(rows), REPEAT_NOISE)
    evidence = CalibrationData.measured(np.arange(len(rows)), values, noise_n=noise)
    return calibrate(log_cost, read_features(space), priors.time, evidence)


def _pool(
    fits: dict[str, list[Posterior]], names: Sequence[str], guess: dict[str, list[float]]
) -> dict[str, list[float]]:
    """Return multiplier -> (mean, width): families have equal weight; one that no family determines keeps the guess."""
    pooled = {}
    for p, name in enumerate(names):
        guess_mean, guess_sd = guess[name]
        means, weights, within = [guess_mean], [GUESS_WEIGHT], []
        for posteriors in fits.values():
            values = np.array([posterior.theta_P[p] for posterior in posteriors])
            certainty = np.array([1 - (posterior.multiplier_sd()[p] / guess_sd) ** 2 for posterior in posteriors]).clip(
                0, 1
            )
            if certainty.sum() < 0.2 or name == HYPOTHESIS:
                continue
            mean = float(np.average(values, weights=certainty + 1e-6))
            means.append(mean)
            weights.append(float(min(certainty.sum(), 1.0)))
            variance = np.array([posterior.multiplier_sd()[p] ** 2 for posterior in posteriors])
            within.append(float(np.average((values - mean) ** 2 + variance, weights=certainty + 1e-6)))
        if not within:
            pooled[name] = [guess_mean, guess_sd]
            continue
        mean = float(np.average(means, weights=weights))
        between = float(np.average((np.array(means) - mean) ** 2, weights=weights))
        spread = np.sqrt(between + np.mean(within))
        pooled[name] = [round(mean, 3), round(float(max(spread, SD_FLOOR_SHARE * guess_sd)), 3)]
    return pooled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--experts", type=Path, nargs=2, metavar="CSV", help="published configurations, and models")
    parser.add_argument("--leave-out", metavar="FRAMEWORK", help="fit without the landscapes of this framework")
    parser.add_argument("--out", type=Path, default=PRIOR_FILE)
    args = parser.parse_args()
    recordings = [load_recording(path) for folder in args.landscapes for path in find_recordings(folder)]
    kept = [recording for recording in recordings if recording.card.framework != args.leave_out]
    published = read_published(*args.experts) if args.experts else []
    published = [row for row in published if args.leave_out not in {row.source, row.card.framework}]
    args.out.write_text(json.dumps(fit_prior(kept, published), indent=1) + "\n", encoding="utf-8")
    frameworks, sources = sorted({r.card.framework for r in kept}), sorted({row.source for row in published})
    print(f"fitted on {len(kept)} landscapes of {frameworks}, {len(published)} rows of {sources}; wrote {args.out}")


if __name__ == "__main__":
    main()
