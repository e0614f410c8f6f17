def generate_config(workload, environment):
    n = environment['total_gpus']
    return {'tensor_parallel': 2, 'pp_size': 1, 'DP': n // 2, 'mbs': '1'}
