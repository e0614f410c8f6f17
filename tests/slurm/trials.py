"""Jobs of `trial_script.py`: the configuration says how the trial ends."""

from __future__ import annotations

from pathlib import Path

from cclsearch.card.model import ModelArch
from cclsearch.core.values import Config, Value
from cclsearch.launch.base import Job
from cclsearch.launch.contract import CONFIG_FILE
from cclsearch.tasks.training.contract import TrainingInput

ARCH = ModelArch(
    num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, intermediate_size=8, vocab_size=16
)


def make_job(
    run_dir: Path,
    trial: int,
    *,
    ranks: int = 2,
    per_node: int = 1,
    timeout_s: float = 300,
    attempt: int = 1,
    **config: Value,
) -> Job:
    """Return a job of the run in that folder; prepares the trial's folder like a search."""
    folder = run_dir / "trials" / f"{trial:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    payload = TrainingInput(
        run_id=run_dir.name,
        trial=trial,
        config=Config(config),
        arch=ARCH,
        global_batch_size=8,
        seq_len=8,
        precision="fp32",
        gradient_accumulation=1,
        num_ranks=ranks,
        ranks_per_node=per_node,
    )
    (folder / CONFIG_FILE).write_text(payload.model_dump_json())
    return Job(
        run_id=run_dir.name, trial=trial, attempt=attempt, trial_dir=folder, payload=payload, timeout_s=timeout_s
    )
