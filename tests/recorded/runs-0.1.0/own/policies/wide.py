def generate_config(workload, environment):
    return {"tp": 1, "dp": environment["total_gpus"], "micro_batch_size": 2}
