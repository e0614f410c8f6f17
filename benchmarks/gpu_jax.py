"""A training step in JAX for `gpu.py`: writes an XSpace of some steps, and beside it what was measured without it.

python benchmarks/gpu_jax.py FOLDER small|full
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp

STEPS = 4


def main() -> None:
    folder, form = Path(sys.argv[1]), sys.argv[2]
    rows, width = (256, 256) if form == "small" else (8192, 4096)
    weights = {name: jnp.full((width, width), 0.01, jnp.bfloat16) for name in ("first", "second")}
    inputs = jnp.ones((rows, width), jnp.bfloat16)

    def find_loss(weights: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(inputs @ weights["first"])
        return jnp.mean((hidden @ weights["second"]).astype(jnp.float32) ** 2)

    @jax.jit
    def train_step(weights: dict[str, jax.Array], inputs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, gradients = jax.value_and_grad(find_loss)(weights, inputs)
        return loss, jax.tree.map(lambda w, g: w - (0.01 * g).astype(w.dtype), weights, gradients)

    for _ in range(3):
        loss, weights = train_step(weights, inputs)
    jax.block_until_ready((loss, weights))
    starts = []
    with jax.profiler.trace(str(folder)):
        for step in range(STEPS):
            starts.append(time.perf_counter())
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                loss, weights = train_step(weights, inputs)
                jax.block_until_ready((loss, weights))
    device = jax.devices()[0]
    products = 5  # forward 2, gradients of the weights 2, gradient of the hidden layer 1; the inputs need none
    truth = {
        "version": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "period_s": statistics.median(b - a for a, b in pairwise(starts[1:])),
        "flops": products * 2.0 * rows * width * width,
    }
    (folder / "truth.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    main()
