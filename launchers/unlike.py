"""What a rank does if ranks or pipeline stages are unlike: holds itself back, and has its own number of layers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common import IllegalConfig, Trial
from torch.autograd.profiler import record_function


def cut_layers(layers: int, stages: int, stage_layers: Sequence[int] = ()) -> list[range]:
    """Return the layers of each stage: as many as given, or as near to equal as possible."""
    cuts = [round(layers * stage / stages) for stage in range(stages + 1)]
    if stage_layers:
        cuts = [0, *itertools.accumulate(stage_layers)]
        if len(stage_layers) != stages or cuts[-1] != layers or min(stage_layers) < 1:
            raise IllegalConfig(f"stage_layers {list(stage_layers)} do not split {layers} layers over pp {stages}")
    return [range(*pair) for pair in itertools.pairwise(cuts)]


class Brake:
    """Holds a rank back to the share of its speed that the card's groups of hardware give it (`rank_speeds`).

    After each piece of computation the rank sleeps for as long as a slower processor would have computed longer. Its
    CPU time counts, not the clock: waiting for other ranks or for a busy core is not made longer.
    """

    def __init__(self, trial: Trial, rank: int) -> None:
        speeds = trial.data.get("rank_speeds") or ()
        self.speed = float(speeds[rank]) if speeds else 1.0
        self.threads = int(trial.config.get("threads", 1))
        if speeds and rank == 0:
            print(f"speeds of the ranks: {speeds}; slower ones sleep after each computation", flush=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run the block as slowly as this rank is."""
        if self.speed >= 1:
            yield
            return
        start_s = time.process_time()
        yield
        more_s = (time.process_time() - start_s) / self.threads * (1 / self.speed - 1)
        with record_function("held_back"):
            time.sleep(more_s)
