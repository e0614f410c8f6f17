"""How much a search loses by the configuration that it names, depending on when fewer runs beat more (simulated).

    python benchmarks/choose_best.py

Each simulated search tries 14 configurations. Their true times exceed the best by exponentially distributed amounts.
The leader of the first half runs once or twice more. Then the search names a configuration: the one with most runs,
unless one with fewer is better with some confidence (`cclsearch.stats.noise.is_better`). For each confidence the mean
time of the named configuration above the best one is printed. 0.5 means: the lowest mean, whatever its runs.
"""

from __future__ import annotations

import numpy as np

from cclsearch.stats.noise import estimate_noise, is_better

CONFIGS, SEARCHES = 14, 1500
CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def lose(noise: float, spread: float, rng: np.random.Generator) -> np.ndarray:
    """The simulated loss of one search for each confidence, relative to the best time."""
    above = rng.exponential(spread, CONFIGS)
    runs = [[value] for value in np.exp(above + rng.normal(0, noise, CONFIGS))]
    leader = int(np.argmin([values[0] for values in runs[: CONFIGS // 2]]))
    runs[leader] += list(np.exp(above[leader] + rng.normal(0, noise, rng.integers(1, 3))))
    found = estimate_noise(runs)
    others = [number for number in range(CONFIGS) if number != leader]
    challenger = min(others, key=lambda number: runs[number][0])
    named = [
        challenger if is_better(runs[challenger], runs[leader], found, confidence=confidence) else leader
        for confidence in CONFIDENCES
    ]
    return np.asarray(above[named] - above.min())


def main() -> None:
    print(f"mean loss of {SEARCHES} simulated searches in percent\n")
    print("| noise | spread | " + " | ".join(f"{confidence:g}" for confidence in CONFIDENCES) + " |")
    print("| --- " * (2 + len(CONFIDENCES)) + "|")
    total = np.zeros(len(CONFIDENCES))
    for noise in (0.01, 0.03, 0.1):
        for spread in (0.03, 0.1, 0.3):
            rng = np.random.default_rng(0)
            losses = 100 * np.mean([lose(noise, spread, rng) for _ in range(SEARCHES)], axis=0)
            total += losses / losses.min()
            print(f"| {noise:.0%} | {spread:.0%} | " + " | ".join(f"{each:.2f}" for each in losses) + " |")
    print("\nmean of each row's ratio to its least: " + ", ".join(f"{each / 9:.2f}" for each in total))


if __name__ == "__main__":
    main()
