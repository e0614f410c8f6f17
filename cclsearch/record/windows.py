"""The windows of a cluster in which trials ran, and the losses corrected for the differences between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cclsearch.scoring.outcome import ClusterWindow, Outcome
from cclsearch.stats.drift import WindowRatio, estimate_drift


@dataclass
class ClusterWindows:
    """The window of each ranked trial; a search over one window, or over a recording, is never corrected."""

    _index: dict[ClusterWindow, int] = field(default_factory=dict)
    """Each window, in order of appearance -> its number from 0."""
    _of_trial: dict[int, int] = field(default_factory=dict)
    _ratios: dict[int, WindowRatio] | None = None
    """None if they have to be estimated again."""

    def take(self, number: int, outcome: Outcome, *, is_ranked: bool) -> None:
        """Take in the outcome of a trial that finished, or was evaluated again."""
        self._ratios = None
        if not is_ranked or outcome.window is None or (outcome.loss or 0.0) <= 0:
            self._of_trial.pop(number, None)
            return
        self._of_trial[number] = self._index.setdefault(outcome.window, len(self._index))

    @property
    def names(self) -> list[ClusterWindow]:
        """The windows, in order of appearance."""
        return list(self._index)

    def find(self, number: int) -> int | None:
        """Number of a ranked trial's window; None if unknown."""
        return self._of_trial.get(number)

    def trials_in(self, window: int) -> list[int]:
        """Ranked trials of that window."""
        return [number for number, found in self._of_trial.items() if found == window]

    def ratios(self, runs: Iterable[tuple[int, int, float]]) -> dict[int, WindowRatio]:
        """Window -> its ratio to the first, from (trial, key of its configuration, loss) of each ranked trial."""
        if self._ratios is None:
            known = [(key, self._of_trial[n], loss) for n, key, loss in runs if n in self._of_trial]
            self._ratios = estimate_drift(known)
        return self._ratios

    def ratio_of(self, number: int, runs: Iterable[tuple[int, int, float]]) -> WindowRatio:
        """The ratio of a trial's window to the first; no difference if unknown."""
        if len(self._index) < 2 or number not in self._of_trial:
            return WindowRatio()
        return self.ratios(runs).get(self._of_trial[number], WindowRatio())
