"""Seed policy for objectives that also count accelerators: trades fewer accelerators against step time."""


def generate_config(workload, environment):
    choices = {knob["key"]: knob["choices"] for knob in workload["config_space"]}
    best = None
    best_cost = None
    for config in layouts(choices, workload, environment):
        memory = memory_bytes(config, workload)
        limit = 0.85 * 1e9 * (environment.get("gpu_memory_gb") or 40)
        # Configurations that do not fit come after all that do, those with the least memory first.
        cost = (0, step_cost(config, workload, environment)) if memory <= limit else (1, memory)
        if best_cost is None or cost < best_cost:
            best, best_cost = config, cost
    return {key: value for key, value in (best or {}).items() if key in choices}


def layouts(choices, workload, environment):
    """All layouts that the card allows, as dictionaries."""
    found = []
    total = environment["total_gpus"]
    node = environment.get("gpus_per_node") or total
    heads = workload.get("num_kv_heads") or workload.get("num_heads") or 1
    layers = workload.get("num_layers") or 1
    batch = workload["batch_size"]
    for tp in choices.get("tp", [1]):
        for pp in choices.get("pp", [1]):
            for dp in choices.get("dp", [max(1, total // (tp * pp))]):
                if tp * pp * dp > total or tp * pp * dp < environment.get("min_gpus", 1):
                    continue
                if tp > node or heads % tp != 0 or layers % pp != 0:
                    continue
                for micro in choices.get("micro_batch_size", [1]):
                    if batch % (dp * micro) != 0:
                        continue
                    for checkpoint in choices.get("activation_checkpointing", [False]):
                        for zero in choices.get("zero_stage", [0]):
                            config = {"tp": tp, "pp": pp, "dp": dp, "micro_batch_size": micro}
                            config["activation_checkpointing"] = checkpoint
                            config["zero_stage"] = zero
                            if "sequence_parallel" in choices:
                                config["sequence_parallel"] = tp > 1 and True in choices["sequence_parallel"]
                            found.append(config)
    return found


def kept_share(checkpoint):
    """Share of a layer's activations that is kept until the backward pass."""
    if checkpoint is True or checkpoint == "full":
        return 0.06
    return 0.7 if checkpoint == "selective" else 1.0


def memory_bytes(config, workload):
    """Weights, gradients, optimizer and activations of the first pipeline stage, in bytes."""
    tp, pp, dp = config["tp"], config["pp"], config["dp"]
    layers = workload.get("num_layers") or 1
    hidden = workload.get("hidden_size") or 128 * (workload.get("num_heads") or 1)
    vocab = workload.get("vocab_size") or 0
    params = workload.get("num_params") or 12 * layers * hidden * hidden + 2 * vocab * hidden
    share = params / (tp * pp)
    zero = config["zero_stage"]
    states = share * 12 / (dp if zero >= 1 else 1)
    states += share * 4 / (dp if zero >= 2 else 1)
    states += share * 2 / (dp if zero >= 3 else 1)
    accumulation = workload["batch_size"] // (dp * config["micro_batch_size"])
    tokens = config["micro_batch_size"] * (workload.get("seq_len") or 1024)
    layer = 34 * tokens * hidden / tp * kept_share(config["activation_checkpointing"])
    logits = 8 * tokens * vocab / tp if pp == 1 else 0
    return states + layer * layers / pp * min(pp, accumulation) + logits + 1.5e9


def relative_time(config, workload, environment):
    """A relative step time: compute, recomputation, bubble and exposed communication."""
    tp, pp, dp = config["tp"], config["pp"], config["dp"]
    accumulation = workload["batch_size"] // (dp * config["micro_batch_size"])
    compute = 1.0 + 0.33 * (1.0 - kept_share(config["activation_checkpointing"])) ** 4
    compute *= 1.0 + 0.15 / config["micro_batch_size"]
    compute *= 1.0 + 0.08 * (tp - 1)
    bubble = (pp - 1) / accumulation
    exchange = sync_share(config, workload, environment) + (0.02 * (pp - 1) if pp > 1 else 0.0)
    if config["zero_stage"] >= 3:
        exchange += 0.03 * accumulation
    return compute * (1.0 + bubble) + exchange


def sync_share(config, workload, environment):
    """Exposed gradient synchronization divided by the compute of a step: 4 bytes per parameter, 6 flop per token."""
    if config["dp"] == 1:
        return 0.0
    used = config["tp"] * config["dp"] * config["pp"]
    inside = used <= (environment.get("gpus_per_node") or 1)
    gbps = environment.get("intra_node_bandwidth_gbps" if inside else "inter_node_bandwidth_gbps") or 200
    tokens = workload["batch_size"] * (workload.get("seq_len") or 1024)
    flops = 1e11 if environment.get("gpu_model") == "cpu" else 1.5e14
    volume = sync_volume(config, workload)
    return 0.5 * (32 * volume / (gbps * 1e9)) / (6 * tokens / (used * flops))


def sync_volume(config, workload):
    """Share of the parameters that one accelerator synchronizes."""
    return 1 / (config["tp"] * config["pp"])


def step_cost(config, workload, environment):
    """Negative score of two equal parts: speed as if on all accelerators, and total over used accelerators."""
    used = config["tp"] * config["pp"] * config["dp"]
    total = environment["total_gpus"]
    time = relative_time(config, workload, environment) * total / used
    return -(0.5 / time + 0.5 * total / used)
