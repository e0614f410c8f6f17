"""What each worker of a vLLM server says about itself: the run script `vllm_serve.py` asks it over `/collective_rpc`.

vLLM adds the class to its worker (`--worker-extension-cls`), so `self` has the worker's `model_runner`.
"""

from __future__ import annotations

from typing import Any


class DescribesWorker:
    """Mixed into vLLM's worker; names have a prefix, since they must not be those of the worker."""

    model_runner: Any

    def ccl_describe(self) -> dict[str, Any]:
        """Return the parameters that this worker holds, their precision, its device and its peak memory in bytes."""
        if hasattr(self.model_runner, "mesh"):  # of vLLM for TPU: the parameters are JAX's
            return describe_arrays(self.model_runner.state)
        import torch

        model = self.model_runner.model
        parameters = list(model.parameters())
        on_gpu = any(each.is_cuda for each in parameters)
        sizes: dict[str, int] = {}
        for each in parameters:
            name = str(each.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + each.numel()
        # On CPUs vLLM packs the weights of linear layers for its kernels; the layers keep their sizes.
        packed = [each for each in model.modules() if count_packed(each)]
        return {
            "num_params": sum(sizes.values()) + sum(map(count_packed, packed)),
            "dtype": max(sizes, key=lambda name: sizes[name]),
            "device": torch.cuda.get_device_name() if on_gpu else "",
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        }

    def ccl_energy(self) -> tuple[str, float | None]:
        """Return this worker's GPU and the joules that its counter shows; None if it cannot be read."""
        from energy import open_counter, read_energy

        counter = open_counter()
        return ("", None) if counter is None else (counter.device, read_energy(counter))


def describe_arrays(state: Any) -> dict[str, Any]:
    """Return the same of a tree of JAX arrays, which is of all devices of this process together."""
    import jax

    leaves = [leaf for leaf in jax.tree_util.tree_leaves(state) if hasattr(leaf, "dtype")]
    sizes: dict[str, int] = {}
    for leaf in leaves:
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return {
        "num_params": sum(sizes.values()),
        "dtype": max(sizes, key=lambda name: sizes[name]),
        "device": jax.local_devices()[0].device_kind,
        "peak_bytes": max(each.get("peak_bytes_in_use", 0) for each in stats),
    }


def count_packed(layer: Any) -> int:
    """Return the weights of a linear layer that has no parameter for them; 0 for any other layer."""
    sizes = getattr(layer, "input_size_per_partition", None), getattr(layer, "output_size_per_partition", None)
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    if not all(isinstance(size, int) for size in sizes) or (weight is not None and weight.numel()):
        return 0
    return int(sizes[0] * sizes[1])  # type: ignore[operator]
