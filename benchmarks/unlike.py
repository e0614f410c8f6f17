"""Uneven pipeline stages on ranks of unlike speed: the even split, the split by speed and all splits, really trained.

    python benchmarks/unlike.py             # trains on this machine's CPUs; about five minutes
    python benchmarks/unlike.py clusters    # simulated: predictions for clusters of unlike GPUs, nothing runs

Ranks are held back to a share of their speed by sleeping in proportion to their CPU time (`launchers/unlike.py`). All
of them are, to at most 1.2 cores together, so that other processes on a machine of two cores disturb little.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cclsearch.card.load import card_from_mapping
from cclsearch.card.model import Card
from cclsearch.core.content import find_content
from cclsearch.core.values import Config
from cclsearch.core.yaml_file import read_yaml
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.closed_form import predict_space
from cclsearch.tasks.base import task_of
from cclsearch.tasks.training.placement import find_layers

ROOT = Path(__file__).parent.parent
LAYERS, REPEATS = 6, 2
SPEEDS = ((0.8, 0.3), (0.25, 0.8), (0.6, 0.3, 0.3))
CLUSTERS = (
    ("wl2", "h100", "a100-80", 10.0),
    ("wl2", "h100", "a100-80", 200.0),
    ("wl2", "h200", "l40s", 200.0),
)
"""Card, accelerators of the two groups of 8, and Gbit/s between the groups for each accelerator."""


def make_card(name: str, groups: list[dict[str, object]], **changes: object) -> Card:
    """Return a card of the project on these groups, with other work."""
    data = read_yaml(find_content("workloads", name, ".yaml"))
    data["workload"]["hardware"] = {"groups": groups}
    for section, values in changes.items():
        data["workload"][section] |= values
    return card_from_mapping(data, name)


def split_all(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every split of the layers with at least one a stage."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))


def predict(card: Card, configs: list[dict[str, object]]) -> list[float]:
    """Return predicted seconds per step, before any trial."""
    knobs = [Knob(name, tuple(dict.fromkeys(config[name] for config in configs))) for name in configs[0]]  # type: ignore[misc]
    found = predict_space(card, space_from_rows(knobs, configs))  # type: ignore[arg-type]
    assert found is not None
    return [float(seconds) for seconds in found.value_N]


def train(card: Card, config: dict[str, object]) -> float:
    """Train one configuration; returns the median seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        payload = task_of(card).make_input(card, Config(config), is_measured=True, run_id="r", trial=1)  # type: ignore[arg-type]
        data = {**json.loads(payload.model_dump_json()), "warmup_steps": 1, "timed_steps": 3, "profiled_steps": 0}
        (Path(folder) / "config.json").write_text(json.dumps(data))
        variables = {
            **{"CCL_TRIAL_DIR": folder, "CCL_CONFIG": f"{folder}/config.json"},
            **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        }
        command = [sys.executable, ROOT / "launchers" / "cpu.py"]
        subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=300, stdout=subprocess.DEVNULL)
        return statistics.median(json.loads((Path(folder) / "result.json").read_text())["step_times_s"])


def show(split: tuple[int, ...]) -> str:
    """`5-3`."""
    return "-".join(map(str, split))


def measure(speeds: tuple[float, ...]) -> None:
    """Train all splits, and print the table and what the split by speed gains."""
    groups: list[dict[str, object]] = [
        {"accelerator": "cpu", "num_accelerators": 1, "accelerators_per_node": 8, "memory_gib": 4, "speed": speed}
        for speed in speeds
    ]
    stages = len(speeds)
    card = make_card("tiny", groups, model={})
    shape = card.arch.model_copy(update={"num_layers": LAYERS})
    card = card.model_copy(update={"model": shape})
    base = {"tp": 1, "dp": 1, "pp": stages, "micro_batch_size": 2, "activation_checkpointing": "none", "zero_stage": 0}
    splits = list(split_all(LAYERS, stages))
    predicted = dict(zip(splits, predict(card, [base | {"stage_layers": show(s)} for s in splits]), strict=True))
    measured = dict.fromkeys(splits, float("inf"))
    for _ in range(REPEATS):
        for split in splits:
            measured[split] = min(measured[split], train(card, base | {"stage_layers": show(split)}))
    ours = find_layers(card, Config(base | {"stage_layers": "speed"}))  # type: ignore[arg-type]
    even = min(splits, key=lambda split: (max(split) - min(split), split[::-1]))
    best = min(splits, key=measured.__getitem__)
    factor = statistics.median(measured[split] / predicted[split] for split in splits)
    print(f"\nSpeeds {', '.join(map(str, speeds))}; pp {stages}, {LAYERS} layers\n")
    print("| layers of each stage | step s, measured | predicted | predicted x one factor | |")
    print("| --- | --- | --- | --- | --- |")
    for split in sorted(splits, key=measured.__getitem__):
        names = [name for name, one in (("best of all", best), ("by speed", ours), ("even", even)) if one == split]
        figures = f"{measured[split]:.3f} | {predicted[split]:.3f} | {factor * predicted[split]:.3f}"
        print(f"| {show(split)} | {figures} | {', '.join(names)} |")
    errors = [abs(factor * predicted[split] / measured[split] - 1) for split in splits]
    gain, expected = measured[even] / measured[ours], predicted[even] / predicted[ours]
    print(f"\n- even / by speed: {gain:.2f}x measured, {expected:.2f}x predicted")
    print(f"- by speed / best of all: {measured[ours] / measured[best]:.3f} measured")
    middle, most = statistics.median(errors), max(errors)
    print(f"- error of the prediction x one factor ({factor:.2f}): median {middle:.1%}, largest {most:.0%}")


def clusters() -> None:
    """Predict even and uneven splits, and orders of the ranks, on two groups of 8 GPUs; simulated."""
    print("| card | groups | Gbit/s between | even s | by speed s | layers | gain | gradients across groups s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, first, second, outside in CLUSTERS:
        groups: list[dict[str, object]] = [
            {"accelerator": each, "num_accelerators": 8, "accelerators_per_node": 8, "outside_gbps": outside}
            for each in (first, second)
        ]
        card = make_card(name, groups, data={"batch_size": 256, "seq_len": 4096})
        base = {"tp": 4, "dp": 2, "pp": 2, "micro_batch_size": 2, "activation_checkpointing": "none", "zero_stage": 1}
        even, ours = predict(card, [base | {"stage_layers": choice} for choice in ("even", "speed")])
        flat = base | {"pp": 2, "rank_order": "tp-pp-dp", "stage_layers": "even"}
        layers = find_layers(card, Config(base | {"stage_layers": "speed"}))  # type: ignore[arg-type]
        across = predict(card, [flat])[0]
        print(
            f"| {name} | 8 {first} + 8 {second} | {outside:g} | {even:.2f} | {ours:.2f} | {show(layers)} |"
            f" {even / ours:.2f}x | {across:.2f} |"
        )


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1:] == ["clusters"]:
        clusters()
        return
    for speeds in SPEEDS:
        measure(speeds)


if __name__ == "__main__":
    main()
