"""Divide the time of a mean request by part, and name its limits, from the request log and the engine's counters.

The log shows the time to the first token and the gaps between tokens; only the engine knows how long a request waited
for a place (`queue_mean_s`). A gap that is longer than the median one counts as a stall: a step that computed other
requests' prompts, or a sequence that was preempted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cclsearch.core.values import Config
from cclsearch.scoring.evidence import Diagnosed
from cclsearch.tasks.serving.contract import Arrival, AskedLoad, RequestRecord

NOTABLE = 0.15
"""Share of a request's time from which a sentence names a cause."""
FULL = 0.95
"""Share of the KV cache in use from which a sentence calls it full."""
SPARE = 0.5
"""Share of the KV cache in use up to which a sentence says that its size does not limit a load."""
GROWTH = 3.0
"""Ratio of first-token times, last third of the requests to first, from which a server falls behind an open loop."""
MIN_REQUESTS = 12
"""Number of requests from which thirds of a load are compared."""
SLOTS = ("max_num_seqs", "max_running_requests")
KV_MEMORY = ("kv_cache_mib", "kv_cache_gib", "kv_cache_tokens", "memory_fraction", "kv_cache_dtype")
STEP_TOKENS = ("max_num_batched_tokens", "prefill_chunk")
CHUNKS = ("chunked_prefill", "mixed_chunk")
PREFIX = "prefix_caching"


@dataclass(frozen=True)
class RequestTime:
    """Seconds of a mean request, by part; they add up to its time from arrival to end."""

    queue_s: float | None
    """Waiting for a place; None if the engine does not say, then `first_s` has it too."""
    first_s: float
    """Seconds of prefill: from a place in the batch to the first token."""
    stall_s: float
    """Gaps between tokens beyond the median gap; 0 without times of tokens."""
    decode_s: float
    """The rest: from the first token to the end."""

    @property
    def total_s(self) -> float:
        return (self.queue_s or 0.0) + self.first_s + self.stall_s + self.decode_s

    def name_parts(self) -> dict[str, float]:
        """Part -> seconds; the first part is not split if the engine does not say how long requests waited."""
        first = {"queue or prefill": self.first_s}
        if self.queue_s is not None:
            first = {"queue": self.queue_s, "prefill": self.first_s}
        return {**first, "decode": self.decode_s, "stalls between tokens": self.stall_s}


def split_time(answered: Sequence[RequestRecord], queue_s: float | None) -> RequestTime:
    """Return the parts of a mean request's time; `queue_s` is the mean wait as the engine states it."""
    ttft = float(np.mean([record.token_times_s[0] - record.arrival_s for record in answered]))
    rest = float(np.mean([record.end_s - record.token_times_s[0] for record in answered]))
    gaps = [np.diff(r.token_times_s) for r in answered if len(r.token_times_s) == r.output_tokens > 1]
    stall = 0.0
    if gaps:
        usual = float(np.median(np.concatenate(gaps)))
        stall = min(rest, float(np.sum([np.maximum(each - usual, 0.0).sum() for each in gaps])) / len(answered))
    waited = None if queue_s is None else min(max(queue_s, 0.0), ttft)
    return RequestTime(waited, ttft - (waited or 0.0), stall, rest - stall)


def diagnose_load(
    records: Sequence[RequestRecord], metrics: Mapping[str, float], config: Config, asked: AskedLoad, shared: int
) -> Diagnosed:
    """Return sentences on a load's limits, and the seconds of a mean request by part.

    `metrics` are the load's; `shared` is the number of first tokens that all prompts have in common. Sentences name a
    knob only if the configuration has it.
    """
    answered = [r for r in records if not r.is_warm_up and not r.error and r.output_tokens and r.token_times_s]
    if not answered:
        return Diagnosed()
    time = split_time(answered, metrics.get("queue_mean_s"))
    if time.total_s <= 0:
        return Diagnosed()
    found = _Findings(answered, time, metrics, config, asked, shared)
    return Diagnosed(tuple(found.describe()), time.name_parts())


@dataclass(frozen=True)
class _Findings:
    answered: Sequence[RequestRecord]
    time: RequestTime
    metrics: Mapping[str, float]
    config: Config
    asked: AskedLoad
    shared: int

    def describe(self) -> Iterator[str]:
        parts = ", ".join(f"{s:.3g} s {name}" for name, s in self.time.name_parts().items() if s > 0)
        tokens = np.mean([record.output_tokens for record in self.answered])
        yield f"a request takes {self.time.total_s:.3g} s in the mean for {tokens:.3g} tokens: {parts}"
        yield from self._judge_growth()
        yield from self._judge_memory()
        yield from self._judge_queue()
        yield from self._judge_stalls()
        yield from self._judge_prefixes()

    def _has(self, knobs: Sequence[str]) -> str:
        """The knobs of the configuration among these, with their values."""
        return ", ".join(f"{knob}={self.config[knob]}" for knob in knobs if knob in self.config)

    @property
    def _is_full(self) -> bool:
        return self.metrics.get("preemptions", 0.0) > 0 or self.metrics.get("kv_cache_use_peak", 0.0) >= FULL

    def _judge_growth(self) -> Iterator[str]:
        if self.asked.arrival is Arrival.CLOSED or len(self.answered) < MIN_REQUESTS:
            return
        ordered = sorted(self.answered, key=lambda record: record.arrival_s)
        waits = [record.token_times_s[0] - record.arrival_s for record in ordered]
        third = len(waits) // 3
        early, late = float(np.median(waits[:third])), float(np.median(waits[-third:]))
        if late > GROWTH * early and late - early > NOTABLE * self.time.total_s:
            yield (
                f"the server falls behind the arrivals: the first token takes {early:.3g} s in the first third of the"
                f" requests and {late:.3g} s in the last, so that latencies depend on how long the load lasts"
            )

    def _judge_memory(self) -> Iterator[str]:
        use, lost = self.metrics.get("kv_cache_use_peak"), self.metrics.get("preemptions", 0.0)
        knobs = self._has((*KV_MEMORY, *SLOTS))
        change = f" (more memory for it, or fewer sequences at once: {knobs})" if knobs else ""
        if lost > 0:
            peak = "" if use is None else f", peak use {use:.0%}"
            yield f"the KV cache is too small{peak}: {lost:.0f} preemptions, each computes a sequence again{change}"
        elif use is not None and use >= FULL:
            yield f"the KV cache is full (peak use {use:.0%}): further requests wait{change}"
        elif use is not None and use <= SPARE and (memory := self._has(KV_MEMORY)):
            yield f"at most {use:.0%} of the KV cache is used: its size does not limit this load ({memory})"

    def _judge_queue(self) -> Iterator[str]:
        wait_s = self.time.queue_s
        if wait_s is None or wait_s < NOTABLE * self.time.total_s:
            return
        share = f"{wait_s / self.time.total_s:.0%} of a request's time is in the queue"
        slots = next((self.config.as_int(knob) for knob in SLOTS if knob in self.config), None)
        places = None if slots is None else slots * self.config.as_int("dp", 1)
        clients = self.metrics.get("concurrency")
        if places is not None and clients is not None and clients > places:
            yield f"{share}: {clients:.0f} clients share {places} places ({self._has((*SLOTS, 'dp'))})"
        elif self._is_full:
            yield f"{share}: it waits for KV cache"
        else:
            knobs = self._has(STEP_TOKENS)
            yield f"{share}: prompts wait for steps that are full of other prompts{f' ({knobs})' if knobs else ''}"

    def _judge_stalls(self) -> Iterator[str]:
        answer_s = self.time.stall_s + self.time.decode_s
        if answer_s <= 0 or self.time.stall_s < NOTABLE * self.time.total_s:
            return
        knobs = self._has((*CHUNKS, *STEP_TOKENS))
        cause = "preemptions and steps that compute prompts" if self._is_full else "steps that compute other prompts"
        yield (
            f"{self.time.stall_s / answer_s:.0%} of the time between first and last token is in gaps beyond the median"
            f" one: {cause}{f' ({knobs})' if knobs else ''}"
        )

    def _judge_prefixes(self) -> Iterator[str]:
        rate, is_on = self.metrics.get("prefix_cache_hit_rate"), self.config.get(PREFIX)
        if is_on is False and self.shared > 0:
            yield f"all prompts share their first {self.shared} tokens, which are computed again each time ({PREFIX})"
        elif is_on is True and rate is not None:
            yield f"{rate:.0%} of the prompts' tokens came from the prefix cache"
