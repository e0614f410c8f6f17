"""Compiles one configuration's optimizer step for a TPU topology and prints its memory as JSON.

    python -m cclsearch.tasks.training.aot_compile REQUEST.json

Runs in its own process. The step is that of the run script `jax_cpu.py` (model, AdamW, gradient accumulation) on the
mesh of the topology's chips. It needs no chip: JAX calls the TPU compiler in `libtpu`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def compile_step(request: dict[str, Any]) -> dict[str, Any]:
    """Return the compiler's memory figures for one chip, in bytes."""
    sys.path.insert(0, str(Path(request["script"]).parent))
    import jax
    import numpy as np
    from jax.experimental import topologies

    script: Any = __import__(Path(request["script"]).stem)
    common: Any = __import__("common")
    data = request["payload"]
    trial = common.Trial(Path(request["script"]).parent, data, data["config"])
    topology = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"])
    devices, (tp, dp, ep) = topology.devices, (trial.degree(knob) for knob in ("tp", "dp", "ep"))
    if len(devices) != tp * dp:
        return {"refused": f"tp {tp} x dp {dp} must be the {len(devices)} chips of {request['topology']}"}
    mesh = jax.sharding.Mesh(np.array(devices).reshape(dp // ep, ep, tp), ("data", "expert", "tensor"))
    model = script.Model(trial, mesh)
    trainer = script.Trainer.__new__(script.Trainer)
    trainer.trial, trainer.model, trainer.accumulation = trial, model, int(data["gradient_accumulation"])
    shardings = {name: model.sharding(spec) for name, (_, spec) in model.specs.items()}
    weights = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=shardings[name])
        for name, (shape, _) in model.specs.items()
    }
    rows = dp * trial.micro_batch_size
    tokens = jax.ShapeDtypeStruct(
        (trainer.accumulation, rows, data["seq_len"] + 1),
        np.int32,
        sharding=model.sharding((None, ("data", "expert"), None)),
    )
    count = jax.ShapeDtypeStruct((), np.float32, sharding=model.sharding(()))
    out = (shardings, (shardings, shardings), model.sharding(()))
    step = jax.jit(trainer._train_step, donate_argnums=(0, 1), out_shardings=out)
    found = step.lower(weights, (weights, weights), tokens, count).compile().memory_analysis()
    return {
        "arguments_bytes": int(found.argument_size_in_bytes),
        "temporary_bytes": int(found.temp_size_in_bytes),
        "output_bytes": int(found.output_size_in_bytes),
        "aliased_bytes": int(found.alias_size_in_bytes),
        "code_bytes": int(found.generated_code_size_in_bytes),
        "device": str(devices[0].device_kind),
        "num_devices": len(devices),
    }


def main() -> int:
    answer = compile_step(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    print("\nCCL-AOT " + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
