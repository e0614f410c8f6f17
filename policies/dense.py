"""Seed policy for dense models: as little model parallelism as memory allows, tensor parallelism inside a node first."""


def generate_config(workload: dict, environment: dict) -> dict:
    choices = {}
    for knob in workload["config_space"]:
        choices[knob["key"]] = knob["choices"]

    def allowed(key, value):
        return key not in choices or value in choices[key]

    def degrees(key):
        return sorted(choices.get(key, [1]))

    gpus = environment["total_gpus"]
    node = environment.get("gpus_per_node") or gpus
    memory = (environment.get("gpu_memory_gb") or 40) * 1e9
    batch = workload["batch_size"]
    seq = workload["seq_len"]
    layers = workload.get("num_layers") or 1
    heads = workload.get("num_heads") or 1
    hidden = workload.get("hidden_size") or heads * 128
    params = workload.get("num_params") or 12 * layers * hidden * hidden
    # bf16 weights and gradients, fp32 master weights and two moments: 18 bytes a parameter; a sharded optimizer leaves 6.
    zero = max(choices.get("zero_stage", [0]))

    best = None
    best_cost = None
    for tp in degrees("tp"):
        if tp > node or heads % tp != 0:
            continue
        for pp in degrees("pp"):
            if pp > layers or gpus % (tp * pp) != 0:
                continue
            dp = gpus // (tp * pp)
            if not allowed("dp", dp):
                continue
            for micro in degrees("micro_batch_size"):
                if batch % (dp * micro) != 0:
                    continue
                accumulation = batch // (dp * micro)
                for checkpoint in sorted(choices.get("activation_checkpointing", [False])):
                    kept = 4 if checkpoint is True else 34
                    in_flight = min(pp, accumulation)
                    activations = micro * seq * hidden * kept * (layers / pp) / tp * in_flight
                    optimizer = 12 / dp if zero >= 1 else 12
                    states = params / (tp * pp) * (6 + optimizer)
                    if states + activations > 0.85 * memory:
                        continue
                    bubble = (pp - 1) / accumulation
                    cost = (1 + bubble) * (1 + 0.06 * (tp - 1)) * (1.3 if checkpoint is True else 1.0)
                    cost *= 1 + 0.1 / micro + 0.05 * (pp > 1)
                    if best_cost is None or cost < best_cost:
                        best_cost = cost
                        best = {"tp": tp, "pp": pp, "dp": dp, "micro_batch_size": micro}
                        if "activation_checkpointing" in choices:
                            best["activation_checkpointing"] = checkpoint
    if best is None:
        return most_split(choices, gpus, node, heads, layers, batch)
    if "zero_stage" in choices:
        best["zero_stage"] = zero
    if "ep" in choices:
        best["ep"] = 1 if 1 in choices["ep"] else min(choices["ep"])
    return {key: value for key, value in best.items() if key in choices}


def most_split(choices, gpus, node, heads, layers, batch):
    """Where nothing seems to fit: the model cut into as many pieces as there may be."""
    best = None
    for tp in sorted(choices.get("tp", [1])):
        for pp in sorted(choices.get("pp", [1])):
            if tp > node or heads % tp != 0 or pp > layers or gpus % (tp * pp) != 0:
                continue
            dp = gpus // (tp * pp)
            micro = min(choices.get("micro_batch_size", [1]))
            if batch % (dp * micro) == 0 and ("dp" not in choices or dp in choices["dp"]):
                if best is None or tp * pp > best["tp"] * best["pp"]:
                    best = {"tp": tp, "pp": pp, "dp": dp, "micro_batch_size": micro}
    best = best or {"tp": 1, "pp": 1, "dp": gpus}
    if True in choices.get("activation_checkpointing", []):
        best["activation_checkpointing"] = True
    if "zero_stage" in choices:
        best["zero_stage"] = max(choices["zero_stage"])
    return {key: value for key, value in best.items() if key in choices}
