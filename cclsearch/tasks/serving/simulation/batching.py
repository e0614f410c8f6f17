"""Continuous batching step by step, of many engines at once: the requests and the time of each step.

The scheduler is Orca's (Yu et al. 2022) with chunks of prompts (Agrawal et al. 2024) over a paged KV cache (Kwon et al.
2023), as vLLM has it: answers continue first, then prompts start in the order of arrival while places, tokens and
blocks last; if blocks run out, the requests that started last are computed again later. A turn advances every engine by
one step or, while only the length of answers changes, by as many as there are until something else does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from cclsearch.stats.columns import take_rows
from cclsearch.tasks.serving.closed_form.replica import Array
from cclsearch.tasks.serving.simulation.step_times import (
    ENDLESS,
    Answered,
    Bools,
    Engines,
    Ints,
    Requests,
    StepMix,
    count_steps,
)

NEVER = np.int64(2**60)
MAX_TURNS = 2_000_000


def answer_all(engines: Engines, requests: Requests) -> Answered:
    """Simulate until every request is answered."""
    batch = _Batch(engines, requests)
    for _ in range(MAX_TURNS):
        if not len(batch.rows):
            return batch.result()
        batch.turn()
    raise AssertionError("the simulation does not end")


@dataclass(eq=False)
class _Step:
    """Requests and tokens of a turn, as it is planned."""

    mix: StepMix
    budget: Array
    free: Array
    """Blocks left."""
    is_closed: Bools
    """Whether this step starts nothing more."""
    done: list[tuple[Ints, Ints]] = field(default_factory=list)
    """Engines and places whose prompts are complete after this step."""


_KEPT = ("arrival", "start", "first", "last", "steps", "tokens", "num_preempted", "peak", "made")


class _Batch:
    """The engines that still have requests, and their state. A closed loop's clients send in the order of answers."""

    def __init__(self, engines: Engines, requests: Requests) -> None:
        size, width = requests.given.shape
        most = int(min(engines.places.max(), width))
        ints, floats = np.zeros(size, dtype=np.int64), np.zeros(size)
        self.engines = engines
        self.rows = np.arange(size)
        self.clock, self.context = floats.copy(), floats.copy()
        self.spoken = floats.copy()
        """End of the last step in which answers continued."""
        self.begun: list[tuple[Array, Array]] = []
        """Answers that began since then, and when: in steps of prompts alone."""
        self.going_on = ints.copy()
        """Answers that had their last token then."""
        self.steps, self.tokens, self.peak = floats.copy(), floats.copy(), floats.copy()
        self.head, self.depth, self.running, self.decoding = (ints.copy() for _ in range(4))
        self.counter, self.left, self.next_order, self.num_preempted = (ints.copy() for _ in range(4))
        self.partial = np.full(size, -1, dtype=np.int64)
        self.num_free = np.minimum(engines.places, most)
        self.given, self.asked, self.count = requests.given, requests.asked, requests.count
        is_closed = engines.clients > 0
        self.known = np.where(is_closed, np.minimum(engines.clients, self.count), self.count)
        is_sent = np.arange(width) < self.known[:, None]
        self.arrival = np.where(is_sent, requests.arrival_s, np.inf)
        self.ready = self.arrival + engines.lag_s[:, None]
        self.paused = np.zeros((size, width))
        """Time of the last token of a request that is computed again."""
        self.start, self.first, self.last = (np.full((size, width), np.nan) for _ in range(3))
        self.made = np.zeros((size, width), dtype=np.int64)
        self.stack = np.zeros((size, most), dtype=np.int64)
        self.request = np.full((size, most), -1, dtype=np.int64)
        self.end = np.full((size, most), NEVER)
        self.base = np.zeros((size, most))
        self.order = np.full((size, most), -1, dtype=np.int64)
        # the first `num_free` of an engine are usable
        self.free_places = np.maximum(self.num_free[:, None] - 1 - np.arange(most), 0)
        self.gaps: list[tuple[Ints, Array, Array]] = []
        self.kept = {name: getattr(self, name).copy() for name in _KEPT}
        self._read_columns()

    def _read_columns(self) -> None:
        at = self.engines.times.costs.at
        self.block, self.gain, self.checked = at.block_size, at.gain, at.checked
        self.cached = at.cached.astype(np.int64)
        self.is_chunked, self.is_alone, self.budget = at.is_chunked > 0, at.is_alone > 0, at.tokens
        self.restarts = at.restarts > 0
        self.is_tight = self.engines.is_tight
        self.any_tight = bool(self.is_tight.any())
        self.is_loop = self.engines.clients > 0
        self.each = np.arange(len(self.rows))
        self.is_going = np.ones(len(self.rows), dtype=bool)

    def result(self) -> Answered:
        """Return the results of all engines."""
        kept = self.kept
        return Answered(
            kept["arrival"], kept["start"], kept["first"], kept["last"], kept["steps"], kept["tokens"],
            kept["num_preempted"], kept["peak"], tuple(self.gaps), kept["made"],
        )  # fmt: skip

    def turn(self) -> None:
        """Advance every engine by a step, or by several that only make answers longer."""
        waits = self._wait()
        step = self._open_step()
        self._continue_prompt(step)
        self._start_prompts(step)
        if self.any_tight:
            self._hold_alone(step)
        goes_on = ~self.is_alone | (step.mix.prompt_tokens == 0)
        mix = replace(step.mix, sequences=self.decoding * goes_on, context=self.context * goes_on)
        first = self.engines.times.seconds(mix)
        number, seconds = self._repeat(mix, first, waits, step.is_closed)
        self._note_peak(step, number)
        is_on = self._advance(mix, number, seconds)
        self._end_answers(mix)
        self._end_prompts(step, is_on)
        self._drop_finished()

    # what waits

    def _has_waiting(self) -> Bools:
        head = np.minimum(self.head, self.given.shape[1] - 1)
        is_ready = (self.head < self.known) & (self.ready[self.each, head] <= self.clock)
        return np.asarray(is_ready | (self.depth > 0))

    def _wait(self) -> Bools:
        """Move the clocks of idle engines to the next request; returns the engines with waiting requests."""
        waits = self._has_waiting()
        idle = self.is_going & (self.running == 0) & ~waits
        if idle.any():
            rows = np.flatnonzero(idle)
            self.clock[rows] = self.ready[rows, self.head[rows]]
            waits[rows] = True
        return waits

    # planning a step

    def _open_step(self) -> _Step:
        zeros = np.zeros(len(self.rows))
        decoded = np.where(self.is_alone, 0.0, self.decoding * self.checked)
        is_closed, free = np.zeros(len(self.rows), dtype=bool), np.full(len(self.rows), ENDLESS)
        if self.any_tight:
            before = self.num_preempted.copy()
            self._preempt(~self.is_alone)
            is_closed = (self.num_preempted > before) & ~self.restarts
            decoded = np.where(self.is_alone, 0.0, self.decoding * self.checked)
            free = np.where(self.is_tight, self.engines.blocks - self._held(np.where(self.is_alone, 1.0, 0.0)), free)
        mix = StepMix(zeros, zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy())
        return _Step(mix, np.maximum(self.budget - decoded, 0.0), free, is_closed)

    def _held(self, ahead: Array) -> Array:
        """(R,) blocks of answers, with room for the next token unless it is `ahead`, and of an unfinished prompt."""
        own = self.base + (self.gain * self.counter)[:, None] - ahead[:, None] - self.cached[:, None]
        is_decoding = self.end < NEVER
        blocks = np.where(is_decoding, np.ceil(own / self.block[:, None]), 0.0).sum(axis=1)
        partial = np.flatnonzero(self.partial >= 0)
        if len(partial):
            request = self.request[partial, self.partial[partial]]
            length = self.given[partial, request] + self.made[partial, request]
            blocks[partial] += self._count_blocks(partial, length - self.left[partial])
        return np.asarray(blocks + self.cached / self.block)

    def _count_blocks(self, rows: Ints, tokens: Ints) -> Array:
        """Return the blocks of so many tokens of a sequence, besides those that all share."""
        return np.asarray(np.ceil((tokens - self.cached[rows]) / self.block[rows]))

    def _preempt(self, asked: Bools) -> None:
        """Put back the requests that started last until the blocks suffice for a token of each other one."""
        while True:
            over = (
                asked
                & self.is_tight
                & (self.decoding > 0)
                & (self._held(np.zeros(len(self.rows))) > self.engines.blocks)
            )
            rows = np.flatnonzero(over & (self.running > 1))
            if not len(rows):
                return
            self._put_back(rows, self.order[rows].argmax(axis=1))

    def _put_back(self, rows: Ints, place: Ints) -> None:
        """Free the blocks of a request of each of these engines, which is computed again from its first token."""
        if len(rows):
            request = self.request[rows, place]
            is_partial = self.partial[rows] == place
            held = self.base[rows, place] + self.gain[rows] * self.counter[rows]
            made = np.rint(held).astype(np.int64) - self.given[rows, request]
            self.made[rows, request] = np.where(is_partial, self.made[rows, request], made)
            self.context[rows] -= np.where(is_partial, 0.0, held)
            self.paused[rows, request] = np.where(is_partial, self.paused[rows, request], self.spoken[rows])
            self.decoding[rows] -= ~is_partial
            self.partial[rows[is_partial]] = -1
            self._free(rows, place)
            self.stack[rows, self.depth[rows]] = request
            self.depth[rows] += 1
            self.num_preempted[rows] += 1

    def _free(self, rows: Ints, place: Ints) -> None:
        """Free places; `rows` ascend, and may repeat."""
        self.end[rows, place], self.order[rows, place], self.request[rows, place] = NEVER, -1, -1
        repeat = np.arange(len(rows)) - np.searchsorted(rows, rows)
        self.free_places[rows, self.num_free[rows] + repeat] = place
        np.add.at(self.num_free, rows, 1)
        np.subtract.at(self.running, rows, 1)

    def _continue_prompt(self, step: _Step) -> None:
        rows = np.flatnonzero((self.partial >= 0) & (step.budget > 0))
        if not len(rows):
            return
        place = self.partial[rows]
        request = self.request[rows, place]
        length = self.given[rows, request] + self.made[rows, request]
        taken = np.minimum(self.left[rows], step.budget[rows]).astype(np.int64)
        if self.any_tight:
            done = length - self.left[rows]
            need = self._count_blocks(rows, done + taken) - self._count_blocks(rows, done)
            lacks = (need > step.free[rows]) & (self.running[rows] > 1)
            step.free[rows] += np.where(lacks, self._count_blocks(rows, done), -need)
            self._put_back(rows[lacks], place[lacks])
            step.is_closed[rows[lacks]] = ~self.restarts[rows[lacks]]
            rows, place, length, taken = rows[~lacks], place[~lacks], length[~lacks], taken[~lacks]
        self._take(step, rows, taken, length - self.left[rows])
        self.left[rows] -= taken
        whole = self.left[rows] == 0
        self.partial[rows[whole]] = -1
        step.done.append((rows[whole], place[whole]))

    def _take(self, step: _Step, rows: Ints, taken: Ints, before: Ints) -> None:
        """Add tokens of a prompt of each of these engines to the step, after those that were computed before."""
        step.mix.prompt_tokens[rows] += taken
        step.mix.pairs[rows] += taken * (before + taken / 2)
        step.mix.prompts[rows] += 1
        step.budget[rows] -= taken

    def _start_prompts(self, step: _Step) -> None:
        """Start requests that wait, one of each engine after the other."""
        can = ~step.is_closed & (self.partial < 0)
        while True:
            can &= (self.num_free > 0) & (step.budget > 0)
            rows = np.flatnonzero(can & self._has_waiting())
            if not len(rows):
                return
            is_again = self.depth[rows] > 0
            request = np.where(is_again, self.stack[rows, self.depth[rows] - 1], self.head[rows])
            length = self.given[rows, request] + self.made[rows, request]
            new = np.maximum(length - self.cached[rows], 1)
            taken = np.where(self.is_chunked[rows], np.minimum(new, step.budget[rows]), new).astype(np.int64)
            need = self._count_blocks(rows, length - new + taken)
            # a prompt longer than a step has one of its own
            fits = self.is_chunked[rows] | (new <= step.budget[rows])
            fits |= (step.mix.prompt_tokens[rows] == 0) & (self.is_alone[rows] | (self.decoding[rows] == 0))
            fits &= (need <= step.free[rows]) | (self.running[rows] == 0)
            can[rows[~fits]] = False
            if not fits.any():
                return
            rows, request, is_again = rows[fits], request[fits], is_again[fits]
            length, new, need, taken = length[fits], new[fits], need[fits], taken[fits]
            self._place(rows, request, is_again)
            self._take(step, rows, taken, length - new)
            step.free[rows] -= need
            place = self.free_places[rows, self.num_free[rows]]
            whole = taken == new
            step.done.append((rows[whole], place[whole]))
            cut = rows[~whole]
            self.partial[cut], self.left[cut] = place[~whole], (new - taken)[~whole]
            can[cut] = False

    def _place(self, rows: Ints, request: Ints, is_again: Bools) -> None:
        self.depth[rows] -= is_again
        self.head[rows] += ~is_again
        self.num_free[rows] -= 1
        self.running[rows] += 1
        place = self.free_places[rows, self.num_free[rows]]
        self.request[rows, place], self.order[rows, place] = request, self.next_order[rows]
        self.next_order[rows] += 1
        fresh = rows[~is_again]
        self.start[fresh, request[~is_again]] = self.clock[fresh]

    def _hold_alone(self, step: _Step) -> None:
        """Make room for answers in engines whose prompts have steps of their own, if no prompt is in this step."""
        before = self.num_preempted.copy()
        self._preempt(self.is_alone & (step.mix.prompt_tokens == 0))
        step.is_closed |= self.num_preempted > before

    def _note_peak(self, step: _Step, number: Ints) -> None:
        """Note the use of the cache in the last of so many steps."""
        is_held = self.is_alone & (step.mix.prompt_tokens > 0)  # answers wait, and have no further token
        grown = np.where(is_held, -1.0, self.gain * (number - 1))
        tokens = self.context + self.decoding * grown + step.mix.prompt_tokens + self.running * (self.block - 1) / 2
        used = (tokens - (self.decoding - 1) * self.cached) / self.block
        if self.any_tight:
            answers = self._held(-grown)
            for rows, place in step.done:
                request = self.request[rows, place]
                length = self.given[rows, request] + self.made[rows, request]
                np.add.at(answers, rows, self._count_blocks(rows, length))
            used = np.where(self.is_tight, answers, used)
        self.peak = np.maximum(self.peak, used / self.engines.blocks)

    # time

    def _repeat(self, mix: StepMix, first: Array, waits: Bools, is_closed: Bools) -> tuple[Ints, Array]:
        """Return how many steps are alike, and their seconds together."""
        number = np.ones(len(self.rows), dtype=np.int64)
        only = np.flatnonzero((mix.prompt_tokens == 0) & (self.decoding > 0) & ~is_closed)
        if not len(only):
            return number, first
        grown = self.gain * self.decoding
        slope = self.engines.times.seconds(replace(mix, context=mix.context + grown)) - first
        most = self.end[only].min(axis=1) - self.counter[only]
        head = np.minimum(self.head[only], self.given.shape[1] - 1)
        is_next = (self.head[only] < self.known[only]) & (self.num_free[only] > 0) & (self.depth[only] == 0)
        until = np.where(is_next & ~waits[only], self.ready[only, head] - self.clock[only], np.inf)
        most = np.minimum(most, count_steps(first[only], slope[only], until))
        if self.any_tight:
            room = self.engines.blocks[only] * self.block[only] - self.context[only]
            room -= self.decoding[only] * (self.block[only] - 1.0)
            safe = np.floor(np.maximum(room, 0.0) / grown[only])
            safe = np.where(self.partial[only] < 0, safe, 1.0)
            most = np.where(self.is_tight[only], np.minimum(most, np.maximum(safe, 1.0)), most)
        number[only] = np.maximum(most, 1).astype(np.int64)
        last = self.engines.times.seconds(replace(mix, context=mix.context + grown * (number - 1)))
        return number, np.asarray(number * (first + last) / 2)

    def _advance(self, mix: StepMix, number: Ints, seconds: Array) -> Bools:
        """Move the clocks; returns the engines whose answers continued."""
        self.clock += seconds
        is_on = mix.sequences > 0
        number = np.where(self.is_going, number, 0)
        steps = np.where(is_on, number, 0)
        self.counter += steps
        self.context += np.where(is_on, self.gain * self.decoding * number, 0.0)
        self.steps += number
        self.tokens += mix.prompt_tokens + steps * self.decoding * self.checked
        each = seconds / np.maximum(number, 1)
        at = np.flatnonzero(is_on)
        if len(at):
            count = self.decoding[at].astype(np.float64)
            first = self.clock[at] - seconds[at] + each[at]
            others = count - np.minimum(self.going_on[at], count)
            self.gaps.append((self.rows[at], first - self.spoken[at], count - others))
            for begun, when in self.begun:
                own = np.minimum(begun[at], others)  # what was put back again began last
                self.gaps.append((self.rows[at], first - when[at], own))
                others -= own
                begun[at] = 0.0
            self.begun = [(begun, when) for begun, when in self.begun if begun.any()]
            self.gaps.append((self.rows[at], each[at], count * (number[at] - 1)))
            if (self.gain[at] > 1).any():  # tokens of one step arrive together
                self.gaps.append((self.rows[at], np.zeros(len(at)), count * number[at] * (self.gain[at] - 1)))
        self.spoken = np.where(is_on, self.clock, self.spoken)
        return is_on

    # what ends

    def _end_answers(self, mix: StepMix) -> None:
        rows, place = np.nonzero((self.end <= self.counter[:, None]) & (mix.sequences > 0)[:, None])
        if not len(rows):
            return
        request = self.request[rows, place]
        self.made[rows, request] = self.asked[rows, request]
        np.subtract.at(self.context, rows, self.base[rows, place] + self.gain[rows] * self.counter[rows])
        np.subtract.at(self.decoding, rows, 1)
        self._finish(rows, place, request)

    def _finish(self, rows: Ints, place: Ints, request: Ints) -> None:
        """End answers; `rows` ascend. Each client of a closed loop sends its next request."""
        self.last[rows, request] = self.clock[rows]
        self._free(rows, place)
        loop = rows[self.is_loop[rows]]
        number = self.known[loop] + np.arange(len(loop)) - np.searchsorted(loop, loop)
        sends = number < self.count[loop]
        loop, number = loop[sends], number[sends]
        self.arrival[loop, number] = self.clock[loop]
        self.ready[loop, number] = self.clock[loop] + self.engines.lag_s[loop]
        np.add.at(self.known, loop, 1)

    def _end_prompts(self, step: _Step, is_on: Bools) -> None:
        """Give the first token to the requests whose prompts are complete."""
        before = self.decoding.copy()
        for rows, place in step.done:
            request = self.request[rows, place]
            is_first = self.made[rows, request] == 0
            self.first[rows[is_first], request[is_first]] = self.clock[rows[is_first]]
            again = rows[~is_first]
            if len(again):
                pause = self.clock[again] - self.paused[again, request[~is_first]]
                self.gaps.append((self.rows[again], pause, np.ones(len(again))))
            self.made[rows, request] += 1
            left = self.asked[rows, request] - self.made[rows, request]
            ends = left <= 0
            on, at = rows[~ends], place[~ends]
            length = self.given[on, request[~ends]] + self.made[on, request[~ends]]
            self.end[on, at] = self.counter[on] + np.ceil(left[~ends] / self.gain[on] - 1e-9).astype(np.int64)
            self.base[on, at] = length - self.gain[on] * self.counter[on]
            self.context[on] += length
            self.decoding[on] += 1
            if ends.any():
                self._finish(rows[ends], place[ends], request[ends])
        began = np.where(is_on, 0.0, self.decoding - before)
        self.going_on = np.where(is_on, self.decoding, self.going_on)
        if began.any():
            self.begun.append((began, self.clock.copy()))

    def _drop_finished(self) -> None:
        """Leave out the engines that have answered everything, once they are half of those left."""
        self.is_going = (self.running > 0) | (self.head < self.count) | (self.depth > 0)
        if 2 * int(self.is_going.sum()) > len(self.rows):
            return
        for name in _KEPT:
            self.kept[name][self.rows] = getattr(self, name)
        rows = np.flatnonzero(self.is_going)
        self.engines = take_rows(self.engines, rows)
        self.begun = [(begun[rows], when[rows]) for begun, when in self.begun]
        for name, value in list(vars(self).items()):
            if isinstance(value, np.ndarray):  # every array has a row for each engine
                setattr(self, name, value[rows])
        self._read_columns()
