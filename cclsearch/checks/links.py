"""Measures the links of a profile's cluster: one job of a probe, with torch.distributed or JAX."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from cclsearch.core.errors import UserError
from cclsearch.core.job_file import JobFileError, read_job_bytes
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Failure, Model, PositiveCount
from cclsearch.launch.base import Job, JobState, Launcher
from cclsearch.launch.collect import collect_end
from cclsearch.launch.contract import EVIDENCE_FILE, TrialInput
from cclsearch.launch.profile import Profile, make_launcher
from cclsearch.network.groups import slowest_ring
from cclsearch.network.matrix import LinkMatrix
from cclsearch.run.trial_folder import prepare_folder
from cclsearch.space.framework import find_framework

PROBES = {"torch": "links-probe", "jax": "links-probe-jax"}
"""Python package that moves the bytes -> framework whose run script measures with it."""
MAX_BYTES = 64 * 2**20


class Reduced(Model):
    """An all-reduce over all ranks."""

    bytes: PositiveCount
    seconds: float = Field(gt=0, allow_inf_nan=False)


class ProbedLinks(Model):
    """One line of a probe's `evidence.jsonl`: its measurements."""

    endpoints: tuple[str, ...]
    nodes: tuple[str, ...]
    places: PositiveCount
    bytes_s: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]
    places_per_port: PositiveCount
    port_bytes_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    all_reduce: tuple[Reduced, ...]
    backend: str


@dataclass(frozen=True)
class Measured:
    """The matrix, and measured all-reduces over all ranks beside the matrix's predictions."""

    links: LinkMatrix
    reduced: tuple[tuple[int, float, float], ...]
    """(bytes, measured seconds, seconds by the matrix)."""


def measure_links(
    profile: Profile,
    *,
    num_ranks: int,
    folder: Path,
    timeout_s: float,
    package: str | None = None,
) -> Measured:
    """Run the probe as a job and return its measurements; UserError names in one line the cause of a failure.

    `package` is one of `PROBES`; by default the base of the profile's framework, or torch.
    """
    own = find_framework(profile.framework) if profile.framework else None
    probe = PROBES[package or (own.package if own is not None and own.package in PROBES else "torch")]
    per_node = min(profile.hardware.accelerators_per_node or num_ranks, num_ranks)
    launcher = make_launcher(profile.model_copy(update={"framework": probe}), run_dir=folder)
    payload = TrialInput(
        run_id=folder.name,
        trial=1,
        config=Config(pair_seconds=0.1),
        precision="fp32",
        num_ranks=num_ranks,
        ranks_per_node=per_node,
    )
    job = Job(
        run_id=folder.name,
        trial=1,
        attempt=1,
        trial_dir=folder / "trials" / "0001",
        payload=payload,
        timeout_s=timeout_s,
    )
    try:
        _run(launcher, job)
    finally:
        launcher.close()
    return read_probe(job.trial_dir / EVIDENCE_FILE)


def _run(launcher: Launcher, job: Job) -> None:
    """Run the job to its end; UserError if it has no result."""
    prepare_folder(job, launcher.render(job))
    handles = launcher.submit([job])
    try:
        while (status := launcher.poll(handles)[0]).state is not JobState.DONE:
            time.sleep(max(launcher.poll_interval_s, 0.05))
    except BaseException:
        launcher.cancel(handles)
        raise
    failure = status.failure
    if failure is None:
        end = collect_end(job.trial_dir)
        failure = end if isinstance(end, Failure) else end.failure
    if failure is not None:
        raise UserError(f"the links were not measured: {one_line(failure.message, 300)} (logs: {job.trial_dir})")


def read_probe(path: Path) -> Measured:
    """Return a probe's results in its folder; UserError if they are unusable."""
    try:
        found = ProbedLinks.model_validate(json.loads(read_job_bytes(path, MAX_BYTES)))
        links = LinkMatrix(
            endpoints=found.endpoints,
            nodes=found.nodes if found.nodes != found.endpoints else (),
            places=found.places,
            gbps=tuple(tuple(float(f"{rate * 8e-9:.4g}") for rate in row) for row in found.bytes_s),
            latency_us=tuple(tuple(float(f"{latency * 1e6:.4g}") for latency in row) for row in found.latency_s),
            places_per_port=found.places_per_port,
            port_gbps=None if found.port_bytes_s is None else float(f"{found.port_bytes_s * 8e-9:.4g}"),
            source=f"measured with {one_line(found.backend, 20)} over {len(found.endpoints)} endpoints",
        )
    except (OSError, JobFileError, ValidationError, ValueError) as error:
        raise UserError(f"{path}: is not a measurement of links: {one_line(str(error), 300)}") from None
    count = links.num_places
    ring = slowest_ring(links, np.arange(count)[None], ring_per_port=found.backend == "nccl")
    steps = 2 * (count - 1)
    by_size = ((each.bytes, each.seconds) for each in found.all_reduce)
    reduced = tuple((size, s, steps / count * size / ring.bytes_s + steps * ring.latency_s) for size, s in by_size)
    return Measured(links, reduced if math.isfinite(ring.bytes_s) else ())
