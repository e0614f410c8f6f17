"""Compiles small programs with JAX for a CPU and writes each as a serialized HloModuleProto: FOLDER/NAME.hlo.

python tests/jax_programs.py FOLDER

A process of its own: a test that forks must not have JAX's threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

Program = tuple[Callable[..., Any], list[tuple[int, ...]]]


def convolve(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, **options, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def strided(x: jax.Array, w: jax.Array) -> jax.Array:
    return convolve(x, w, window_strides=(2, 2), padding="VALID")


def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
    return convolve(x, w, window_strides=(1, 1), padding="VALID", rhs_dilation=(2, 2), feature_group_count=4)


def both_gradients(x: jax.Array, w: jax.Array) -> Any:
    return jax.grad(lambda x, w: jnp.sum(strided(x, w) ** 2), argnums=(0, 1))(x, w)


def recomputed(x: jax.Array, w: jax.Array) -> jax.Array:
    inner = jax.checkpoint(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w))
    return jax.grad(lambda w: jnp.sum(inner(w) ** 2))(w)


PROGRAMS: dict[str, Program] = {
    "product": (lambda a, b: jnp.tanh(a @ b), [(64, 96), (96, 32)]),
    "batched": (lambda q, k: jnp.einsum("bshd,bthd->bhst", q, k), [(2, 40, 4, 16), (2, 24, 4, 16)]),
    "convolution": (strided, [(2, 31, 31, 16), (3, 3, 16, 24)]),
    "gradients": (both_gradients, [(2, 31, 31, 16), (3, 3, 16, 24)]),
    "grouped": (grouped, [(2, 31, 31, 16), (3, 3, 4, 24)]),
    "recomputed": (recomputed, [(32, 48), (48, 48)]),
}


if __name__ == "__main__":
    for name, (function, shapes) in PROGRAMS.items():
        arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        (module,) = jax.jit(function).lower(*arguments).compile().runtime_executable().hlo_modules()
        (Path(sys.argv[1]) / f"{name}.hlo").write_bytes(module.as_serialized_hlo_module_proto())
