"""Memory of a configuration as the TPU compiler computes it, ahead of time and without a TPU.

    python -m cclsearch.tasks.training.aot REQUEST.json

compiles one configuration's optimizer step in a process of its own and prints its memory as JSON. The step is that of
the run script `jax_cpu.py` (model, AdamW, gradient accumulation) on the mesh of the topology's chips. It needs no chip:
JAX calls the TPU compiler in `libtpu`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import public_environment
from cclsearch.core.text import one_line
from cclsearch.core.values import Config
from cclsearch.space.framework import load_framework
from cclsearch.space.table import count_ranks
from cclsearch.tasks.base import task_of

COMPILE_S = 1800.0
"""Timeout of one compilation."""
REFERENCE = "jax-cpu"
"""Framework whose model is compiled: the engine's own JAX transformer."""
GIB = 2**30
_TOPOLOGY = re.compile(r"v[0-9]+[a-z]*:\d+(?:x\d+)*")


@dataclass(frozen=True)
class CompiledMemory:
    """The compiler's memory of one chip, or in `refused` why there is none."""

    topology: str
    parts_gib: dict[str, float]
    refused: str = ""

    @property
    def total_gib(self) -> float | None:
        """Arguments, temporaries, outputs that do not alias arguments, and code; None if it was not compiled."""
        return sum(self.parts_gib.values()) if self.parts_gib else None


def find_topology(card: Card, asked: str) -> str:
    """Return the topology (`v5e:2x2`) as given, or from the card; raises UserError if neither has one."""
    if asked:
        if not _TOPOLOGY.fullmatch(asked):
            raise UserError(f"--aot must be a TPU topology such as v5e:2x2 or v5p:2x2x1, not {asked!r}")
        return asked
    hardware = card.hardware
    if not hardware.accelerator.startswith("tpu-") or hardware.torus is None:
        raise UserError(
            f"{card.name} runs on {hardware.accelerator!r}, which is not a TPU slice: give the topology to compile for"
            " (`--aot v5e:2x2`), or use a card with a TPU slice"
        )
    return f"{hardware.accelerator.removeprefix('tpu-')}:{'x'.join(map(str, hardware.torus))}"


def require_compiler() -> None:
    """Raise UserError if JAX or the TPU compiler is not installed."""
    missing = [name for name in ("jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"predict --aot needs the TPU compiler, but {' and '.join(missing)} is not installed:"
            " run `pip install 'ccl-search[tpu]'` (about 500 MB), or leave out --aot"
        )


def compile_memory(card: Card, config: Config, topology: str) -> CompiledMemory:
    """Return the memory of one chip with the configuration's step compiled for this topology.

    The step is the engine's own JAX transformer with AdamW in fp32, not the framework's program.
    """
    shape = [int(size) for size in topology.partition(":")[2].split("x")]
    for knob, feature in (("pp", "pipeline"), ("cp", "context parallelism")):
        if config.as_int(knob) != 1:
            return CompiledMemory(topology, {}, f"the reference model has no {feature} ({knob} must be 1)")
    if count_ranks(config) != math.prod(shape):
        return CompiledMemory(topology, {}, f"tp x dp must be the {math.prod(shape)} chips of {topology}")
    payload = task_of(card).make_input(card, config, is_measured=False, run_id="aot", trial=0)
    script = load_framework(REFERENCE).script_path
    request: dict[str, object] = {
        "script": str(script),
        "topology": topology,
        "payload": payload.model_dump(mode="json"),
    }
    return _compile(request, topology)


def _compile(request: dict[str, object], topology: str) -> CompiledMemory:
    environment = {
        **public_environment(),
        "TPU_SKIP_MDS_QUERY": "1",  # do not query a metadata server: nothing leaves this machine
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "cclsearch.tasks.training.aot", str(file)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_S,
                env=environment,
                cwd=scratch,
            )
        except subprocess.TimeoutExpired:
            return CompiledMemory(topology, {}, f"the compiler took more than {COMPILE_S:g} s")
    answers = [line for line in done.stdout.splitlines() if line.startswith("CCL-AOT ")]
    if not answers:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        errors = [line for line in lines if "RESOURCE_EXHAUSTED" in line or "Error" in line] or lines
        return CompiledMemory(topology, {}, one_line(errors[-1], 400))
    return _read(json.loads(answers[-1].removeprefix("CCL-AOT ")), topology)


def _read(answer: dict[str, object], topology: str) -> CompiledMemory:
    if "refused" in answer:
        return CompiledMemory(topology, {}, str(answer["refused"]))
    if "TPU" not in str(answer["device"]):
        return CompiledMemory(topology, {}, f"the compiler compiled for {answer['device']!r}, which is not a TPU")
    sizes = {name: int(str(value)) for name, value in answer.items() if name.endswith("_bytes")}
    parts = {
        "arguments": sizes["arguments_bytes"],
        "temporaries": sizes["temporary_bytes"],
        "further outputs": max(0, sizes["output_bytes"] - sizes["aliased_bytes"]),
        "code": sizes["code_bytes"],
    }
    return CompiledMemory(topology, {name: size / GIB for name, size in parts.items()})


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
