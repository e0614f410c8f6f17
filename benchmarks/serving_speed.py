"""The processor time in which a large space of serving configurations is predicted, and a load simulated: lines of
`serving.md`.

python benchmarks/serving_speed.py [WORKLOAD]
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from cclsearch.plan.subject import Asked, find_subject
from cclsearch.stats.closed_form import predict_space, predictor_of
from cclsearch.tasks.serving.contract import PlannedRequest
from cclsearch.tasks.serving.replica import read_replica
from cclsearch.tasks.serving.simulated_load import SimulatedLoad, Simulator
from cclsearch.tasks.serving.steps import MULTIPLIERS

KNOBS = {
    "max_num_seqs": [str(2**k + 2 * j) for k in range(5, 10) for j in range(7)],
    "max_num_batched_tokens": [str(1024 * k) for k in range(1, 17)],
    "memory_fraction": [f"{0.5 + 0.05 * k:.2f}" for k in range(9)],
    "chunked_prefill": ["true", "false"],
    "block_size": ["16", "32", "64"],
}
RATE = ("task=serving", "arrival=poisson", "request_rate=4", "num_requests=500")
"""What makes the card one of requests at a rate."""
SIMULATED = ((256, 256, 16), (256, 256, 64), (1000, 256, 64), (256, 1000, 256))
"""Configurations, requests and clients of simulated loads."""


def main() -> None:
    workload = sys.argv[1] if len(sys.argv) > 1 else "wl3-inference"
    predict(workload, ())
    predict(workload, RATE)
    simulate(workload)


def predict(workload: str, sets: tuple[str, ...]) -> None:
    """Print the seconds to enumerate, to predict and order, and to simulate what comes first; and the memory."""
    knobs = tuple(f"{name}={','.join(choices)}" for name, choices in KNOBS.items())
    subject = find_subject(Asked(workload=workload, framework="vllm", knobs=knobs, sets=sets))
    start_s = time.process_time()
    space = subject.build_space()
    built_s = time.process_time()
    prediction = predict_space(subject.card, space)
    assert prediction is not None
    order = prediction.order()
    end_s = time.process_time()
    what = "at a rate" if sets else "a batch or closed loop"
    print(f"{workload}, vLLM, {what}: {len(space):,} legal configurations, processor time:", end=" ")
    print(f"listed in {built_s - start_s:.2f} s,", end=" ")
    print(f"predicted (with memory) and ordered in {end_s - built_s:.2f} s; first: {space.config(int(order[0]))}")
    predictor = predictor_of(subject.card, space)
    assert predictor.refine is not None
    thetas = {metric: form.prior.mean_P for metric, form in predictor.forms.items()}
    refined = predictor.refine(predictor, thetas, order)
    print(f"the first {refined.num_refined} simulated in {time.process_time() - end_s:.2f} s;", end=" ")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"largest memory of the process so far {peak:.2f} GiB")


def simulate(workload: str) -> None:
    """Print how many requests times configurations a second are simulated."""
    subject = find_subject(Asked(workload=workload, framework="vllm"))
    space = subject.build_space()
    at = read_replica(subject.card, space)
    lengths = np.random.default_rng(0).integers(64, 512, (max(n for _, n, _ in SIMULATED), 2)).tolist()
    for configurations, requests, clients in SIMULATED:
        rows = np.arange(configurations) % len(space)
        asked = tuple(PlannedRequest(input_tokens=i, output_tokens=o) for i, o in lengths[:requests])
        start_s = time.process_time()
        Simulator.read(subject.card, at.take(rows)).run(SimulatedLoad(asked, clients, {}), np.zeros(len(MULTIPLIERS)))
        took_s = time.process_time() - start_s
        print(f"simulated: {configurations} configurations, {requests} requests of {clients} clients,", end=" ")
        print(f"in {took_s:.2f} s: {configurations * requests / took_s:,.0f} requests x configurations a second")


if __name__ == "__main__":
    main()
