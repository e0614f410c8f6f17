"""The process in which a program runs: started with `python -I`, an order on stdin, an answer on stdout.

It imports nothing of ours and inherits no environment. The interpreter itself (pydantic-monty) runs in a further one.
"""

import contextlib
import json
import os
import re
import resource
import sys
from typing import Any

ADDRESS_SPACE_BYTES = 4 * 2**30


def confine(limits: dict[str, Any]) -> None:
    """Hard limits of the operating system, should the interpreter's own fail."""
    cpu_s = int(2 * limits["time_s"]) + 10
    wanted = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: ADDRESS_SPACE_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for what, most in wanted.items():
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))


def call_of(program: str) -> str:
    """The call that runs the program: with the history where it takes one."""
    head = re.search(r"def\s+generate_config\s*\(([^)]*)", program)
    third = ", history" if head and re.search(r"\bhistory\b", head.group(1)) else ""
    return f"import json as _json\n_json.dumps(generate_config(workload, environment{third}))"


def run(order: dict[str, Any]) -> dict[str, Any]:
    """The answer to an order: a result as JSON text, or an error in words."""
    import pydantic_monty as monty

    limits = order["limits"]
    resources = {
        "max_feed_duration_secs": limits["time_s"],
        "max_memory": limits["memory_bytes"],
        "max_recursion_depth": limits["recursion"],
        "max_suspensions": 50,
        "max_total_sleep_secs": 0.1,
    }
    policy = {"random_start": {"seed": 0}, "sleep": "zero"}
    printed = monty.CollectString(max_bytes=limits["output_bytes"])
    pool = monty.Monty(request_timeout=2 * limits["time_s"] + 5, max_processes=1)
    try:
        with pool, pool.checkout(limits=resources, os_policy=policy, script_name="policy.py") as session:
            session.feed_run(order["program"], inputs=order["inputs"], print_callback=printed)
            text = session.feed_run(call_of(order["program"]), print_callback=printed)
    except monty.MontyCrashedError:
        return {"error": "the program passed the memory or time limit: its interpreter was ended"}
    except monty.MontyError as error:
        return {"error": describe(error)}
    if not isinstance(text, str):
        return {"error": "generate_config must return a dict of knob -> value"}
    if len(text) > limits["output_bytes"]:
        return {"error": f"generate_config returned more than {limits['output_bytes']:,} characters"}
    return {"result": text}


def describe(error: Exception) -> str:
    """The error with its traceback, bounded."""
    show = getattr(error, "display", None)
    text = str(show("traceback")) if show else str(error)
    return text if len(text) <= 4000 else text[:1500] + "\n...\n" + text[-2000:]


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    confine(order["limits"])
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        answer = run(order)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
