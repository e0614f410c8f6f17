"""The built-in metrics, registered as plugins' metrics are."""

_NAMES = {
    "bandwidth": "bus_bw bw_util comm_volume hockney_fit",
    "device": "mem_copy_bw peak_memory allocation_ratio wave_balance resource_efficiency",
    "efficiency": "mfu mfu_causal gemm_tflops hfu",
    "kernels": "kernel_time compute_time trace_span busy_frac comm_kernel_frac comm_calls comm_mean_time top_kernels"
    " concentration small_kernel_frac launch_rate op_calls op_flops",
    "launches": "launch_delay queue_length idle_cause what_if_link critical_path",
    "quality": "trace_quality",
    "ranks": "comm_wait_frac start_skew last_arriver compute_imbalance pipeline_bubble moe_balance moe_frac",
    "roofline": "memory_bound_frac compute_bound_frac",
    "serving": "ttft tpot output_tokens_per_s requests_per_s",
    "steps": "compute_frac exposed_comm_frac exposed_mem_frac idle_frac comm_time overlap trace_step_time tokens_per_s"
    " tokens_per_s_per_device scaling_efficiency",
}
"""Module of this package -> the metrics that it registers."""
MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
"""Metric -> the module that registers it."""
