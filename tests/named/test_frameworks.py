"""What needs DeepSpeed or torchtitan, which take minutes to install: `make test-frameworks` does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from packages import needs
from test_nanotron import DEEPSPEED, start
from trials import DENSE, LAUNCHERS, MOE, make_input, make_job, run_script

from cclsearch.card.arch import count_parameters
from cclsearch.card.load import load_card
from cclsearch.core.values import Value
from cclsearch.tasks.training.contract import TrainingResult

HOW = "make test-frameworks installs it"


@needs("deepspeed", HOW)
@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_trains_the_same_model_on_the_same_data_as_cpu(stage, tmp_path):
    reference = run_script(tmp_path / "cpu", make_input({"micro_batch_size": 8}, arch=MOE))
    payload = make_input({**DEEPSPEED, "zero_stage": stage, "activation_checkpointing": "full"}, arch=MOE)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = start(tmp_path / "deepspeed", payload, *ranks)
    assert isinstance(result, TrainingResult)
    assert result.losses == pytest.approx(reference.losses, rel=2e-5)
    assert result.num_params == reference.num_params
    assert (result.global_batch_size, result.seq_len, result.world_size) == (8, 32, 2)


READ_OPTIONS = """
import dataclasses, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torchtitan as script
sys.modules.pop("torchtitan")
sys.path.append(sys.path.pop(0))  # the package of that name comes first from here on
import torch
from torchtitan.config import ConfigManager
for path in sys.argv[2:]:
    os.environ.update(CCL_CONFIG=path, CCL_TRIAL_DIR=str(Path(path).parent))
    config = ConfigManager().parse_args(script.render_options(json.loads(Path(path).read_text())))
    folder = Path(path).parent
    for name, text in script.show_launch(json.loads(Path(path).read_text())).files.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    sys.modules.pop("card_config", None)
    whole = ConfigManager().parse_args(["--module", "card_config", "--config", "make_whole_config"])
    sys.path.remove(str(folder))
    parts = [field.name for field in dataclasses.fields(config) if field.name != "model_spec"]
    different = [name for name in parts if getattr(whole, name) != getattr(config, name)]
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    facts = {
        "different": different,
        "compared": len(parts),
        "replicate": whole.parallelism.data_parallel_replicate_degree,
        "tp": config.parallelism.tensor_parallel_degree,
        "pp": config.parallelism.pipeline_parallel_degree,
        "batch": config.training.global_batch_size,
        "layers": len(config.model_spec.model.layers),
        "family": config.model_spec.name,
        "params": sum(parameter.numel() for parameter in model.parameters()),
    }
    print("FACTS", json.dumps(facts))
"""


@needs("triton", HOW)
@needs("torchtitan", HOW)
def test_torchtitan_parses_the_options_and_builds_the_cards_model(tmp_path):
    """Run torchtitan's own parser and models in another process."""
    config: dict[str, Value] = {"tp": 2, "dp": 2, "pp": 2, "micro_batch_size": 2, "zero_stage": 3}
    config["activation_checkpointing"] = "selective"
    others: dict[str, Value] = {"cp": 1, "compile": True, "activation_checkpointing": "full"}
    wl1, wl5 = load_card("wl1").arch, load_card("wl5").arch
    cases = [
        (DENSE, config, "llama3", 0),
        (DENSE.model_copy(update={"tied_embeddings": True}), {**config, "pp": 1}, "llama3", 0),
        # Qwen3 also has norms of queries and keys, one head wide each
        (wl1, {**config, "pp": 1}, "qwen3", 2 * wl1.head_dim * wl1.num_layers),
        (DENSE, {**config, **others, "pp": 1, "zero_stage": 0}, "llama3", 0),
        (wl5, {**config, "ep": 4, "activation_checkpointing": "none"}, "qwen3", 2 * wl5.head_dim * wl5.num_layers),
        (DENSE, {**config, "dp": 4, "dp_replicate": 2, "compile": True, "async_tp": True, "virtual_pipeline": 2},
         "llama3", 0),
    ]  # fmt: skip
    paths = []
    for number, (arch, chosen, _, _) in enumerate(cases):
        make_job(tmp_path / str(number), make_input(chosen, arch=arch))
        paths.append(str(tmp_path / str(number) / "config.json"))
    done = subprocess.run(
        [sys.executable, "-c", READ_OPTIONS, str(LAUNCHERS), *paths], capture_output=True, text=True, timeout=400
    )
    told = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert len(told) == len(cases), done.stderr[-3000:]
    for said, (arch, chosen, family, extra) in zip(told, cases, strict=True):
        assert said["compared"] > 10
        assert said["different"] == [], "the printed function sets what the options set"
        assert said["replicate"] == (chosen.get("dp_replicate", 1) if chosen["zero_stage"] else chosen["dp"])
        assert (said["tp"], said["pp"], said["batch"]) == (chosen["tp"], chosen["pp"], 8)
        assert (said["layers"], said["family"]) == (arch.num_layers, family)
        assert said["params"] == count_parameters(arch) + extra
