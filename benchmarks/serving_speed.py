"""How long a large space of serving configurations takes to enumerate, predict and order: a line of `serving.md`.

python benchmarks/serving_speed.py [WORKLOAD]
"""

from __future__ import annotations

import sys
import time

from cclsearch.plan.subject import Asked, find_subject
from cclsearch.stats.closed_form import predict_space

KNOBS = {
    "max_num_seqs": [str(2**k + 2 * j) for k in range(5, 10) for j in range(7)],
    "max_num_batched_tokens": [str(1024 * k) for k in range(1, 17)],
    "memory_fraction": [f"{0.5 + 0.05 * k:.2f}" for k in range(9)],
    "chunked_prefill": ["true", "false"],
    "block_size": ["16", "32", "64"],
}


def main() -> None:
    workload = sys.argv[1] if len(sys.argv) > 1 else "wl3-inference"
    knobs = tuple(f"{name}={','.join(choices)}" for name, choices in KNOBS.items())
    subject = find_subject(Asked(workload=workload, framework="vllm", knobs=knobs))
    start_s = time.perf_counter()
    space = subject.build_space()
    built_s = time.perf_counter()
    prediction = predict_space(subject.card, space)
    assert prediction is not None
    first = int(prediction.order()[0])
    end_s = time.perf_counter()
    print(f"{workload}, vLLM: {len(space):,} legal configurations in {built_s - start_s:.2f} s,", end=" ")
    print(f"predicted (with memory) and ordered in {end_s - built_s:.2f} s; first: {space.config(first)}")


if __name__ == "__main__":
    main()
