"""Seed policy for mixture-of-experts models: spreads the experts first, splits the dense parts as little as possible."""


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
                if tp * pp * dp != total:
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
                            for ep in choices.get("ep", [1]):
                                experts = workload.get("num_experts") or 1
                                # Without sharding every replica holds all experts: not every framework spreads them.
                                if zero == 0 and tp % ep != 0 and max(choices.get("zero_stage", [0])) > 0:
                                    continue
                                if experts % ep == 0 and (dp * tp) % ep == 0:
                                    found.append({**config, "ep": ep})
    return found


def kept_share(checkpoint):
    """Share of a layer's activations that is kept until the backward pass."""
    if checkpoint is True or checkpoint == "full":
        return 0.06
    return 0.7 if checkpoint == "selective" else 1.0


def memory_bytes(config, workload):
    """Weights, gradients, optimizer and activations of the first pipeline stage, in bytes."""
    tp, pp, dp, ep = config["tp"], config["pp"], config["dp"], config["ep"]
    layers = workload.get("num_layers") or 1
    hidden = workload.get("hidden_size") or 128 * (workload.get("num_heads") or 1)
    vocab = workload.get("vocab_size") or 0
    width = workload.get("expert_intermediate_size") or 0
    experts = 3 * layers * (workload.get("num_experts") or 0) * hidden * width
    params = workload.get("num_params") or experts + 8 * layers * hidden * hidden + 2 * vocab * hidden
    dense = max(params - experts, 0)
    zero = config["zero_stage"]
    copies = max(1, dp * tp // ep)
    memory = 1.5e9
    for share, ranks in ((dense / (tp * pp), dp), (experts / (ep * pp), copies)):
        memory += share * 12 / (ranks if zero >= 1 else 1)
        memory += share * 4 / (ranks if zero >= 2 else 1)
        memory += share * 2 / (ranks if zero >= 3 else 1)
    accumulation = workload["batch_size"] // (dp * config["micro_batch_size"])
    tokens = config["micro_batch_size"] * (workload.get("seq_len") or 1024)
    routed = 6 * tokens * (workload.get("top_k") or 1) * (width + hidden)
    layer = (34 * tokens * hidden / tp + routed) * kept_share(config["activation_checkpointing"])
    logits = 8 * tokens * vocab / tp if pp == 1 else 0
    return memory + layer * layers / pp * min(pp, accumulation) + logits


def step_cost(config, workload, environment):
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
    ep = config["ep"]
    node = environment.get("gpus_per_node") or environment["total_gpus"]
    # Tokens are sent to experts on other ranks.
    exchange += (0.1 if ep <= node else 0.3) if ep > 1 else 0.0
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
    """Parameters that one accelerator synchronizes, divided by those that a token uses."""
    hidden = workload.get("hidden_size") or 128 * (workload.get("num_heads") or 1)
    width = workload.get("expert_intermediate_size") or 0
    dense = 8.0 * hidden
    experts = 3.0 * (workload.get("num_experts") or 0) * width
    visited = dense + 3.0 * (workload.get("top_k") or 0) * width
    copies = config["dp"] * config["tp"] // config["ep"]
    held = dense / config["tp"] + (experts / config["ep"] if copies > 1 else 0.0)
    return held / config["pp"] / visited
