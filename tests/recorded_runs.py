"""Searches over small recordings, for tests of reports, exports and Pareto fronts."""

from __future__ import annotations

import csv
from pathlib import Path

import yaml
from cards import change_fields, make_card

from cclsearch.cli import main
from cclsearch.run.folder import Run, load_run

ARCH = {
    **{"num_layers": 16, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "hidden_size": 2048},
    **{"intermediate_size": 8192, "vocab_size": 32000, "tied_embeddings": False},
}
STATED = {
    "description": "A small recorded problem <script>alert('card')</script>",
    "source": "made up for a test",
    "licence": "CC0-1.0",
    "workload.data": {"batch_size": 64, "seq_len": 2048},
    "workload.hardware": {
        "network_topo": {"bandwidth_gbps": [400, 3600]},
        "xpu_spec": {"type": "GPU", "model": "nvidia_h100", "memory_gb": 80, "total_count": 8, "count_per_node": 8},
    },
    "Model-executor": {"framework": {"name": "nanotron"}},
}


def write_recording(folder: Path, num_accelerators: int = 8, scale: float = 1.0) -> Path:
    """Write a recording of the toy model on that many accelerators: larger `tp` is slower, and one row fails."""
    folder.mkdir(parents=True)
    total = {"workload.hardware.xpu_spec.total_count": num_accelerators}
    card = change_fields(make_card("toy-1b", ARCH), STATED | total)
    (folder / "card.yaml").write_text(yaml.safe_dump(card), encoding="utf-8")
    with (folder / "trials.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["tp", "pp", "dp", "micro_batch_size", "status", "step_time_s", "peak_memory_gib"])
        for tp in (1, 2, 4):
            dp = num_accelerators // tp
            for micro in (1, 2, 4):
                fails = (tp, micro) == (1, 4)
                time_s = scale * 16 / num_accelerators * (1 + 0.2 * (tp - 1) + 0.1 * abs(micro - 2))
                figures = ["", ""] if fails else [f"{time_s:.4f}", f"{20 * micro / tp:.1f}"]
                writer.writerow([tp, 1, dp, micro, "oom" if fails else "ok", *figures])
    return folder


def search(recording: Path, name: str, *more: str, budget: int = 9) -> Run:
    """Run a search over that recording in the working directory's `runs/` and return it."""
    given = ["--recording", str(recording), "--budget", str(budget), "--name", name, "--quiet"]
    sampler = [] if "--sampler" in more else ["--sampler", "random"]
    assert main(["run", "--workload", str(recording / "card.yaml"), *given, *sampler, *more]) == 0
    return load_run(Path("runs") / name)
