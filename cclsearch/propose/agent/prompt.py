"""The prompt of one turn: a pure function of what is known, bounded however many trials there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cclsearch.core.text import one_line
from cclsearch.core.values import format_knob_value
from cclsearch.propose.agent.configs import free_knobs
from cclsearch.propose.agent.evidence import TrialEvidence
from cclsearch.propose.agent.history import last_insights
from cclsearch.propose.agent.providers.types import MAX_BODY_BYTES
from cclsearch.propose.agent.quoting import FENCE_RULE, clip_bytes, fence, fence_line
from cclsearch.propose.agent.surrogate_table import SurrogateTable, best_observation, estimate_noise
from cclsearch.propose.agent.tables import (
    calibration_lines,
    candidate_lines,
    describe_memory,
    failure_lines,
    objective_line,
    running_lines,
    trial_lines,
)
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.prior_hints import collect_hints

ENVELOPE_BYTES = 1300
"""What a wire protocol adds to a request of many calls, at most."""
MAX_PROMPT_BYTES = MAX_BODY_BYTES - ENVELOPE_BYTES
"""Of one whole request: system, tools, and all messages of the turn."""
MAX_KNOBS_BYTES = 6500
MAX_LOOKUPS = 8
MAX_CORRECTIONS = 2


@dataclass(frozen=True)
class PromptOptions:
    """How a prompt is written."""

    mode: str = "configs"
    """`configs` or `policy`."""
    anonymous: bool = False
    """Leaves out whatever names the workload's origin: a strong model remembers published results."""
    goal: str = ""
    """How the objective's loss is made, where it is not the step time alone."""


@dataclass(frozen=True)
class Prompt:
    """What is sent first in a turn."""

    system: str
    user: str


@dataclass(frozen=True)
class PromptInput:
    """All that a prompt is made of."""

    view: SearchView
    look: SurrogateTable
    slots: int
    evidence: dict[int, TrialEvidence] = field(default_factory=dict)
    """Of the best, the last, and whatever else is to be shown unasked."""
    program: str | None = None
    """The best policy program so far, in policy mode."""
    program_note: str = ""


def write_prompt(known: PromptInput, options: PromptOptions, limit_bytes: int) -> Prompt:
    """The prompt, at most `limit_bytes` long with its system part; says what it leaves out."""
    system = write_system(known.view, options)
    room = limit_bytes - len(system.encode())
    whole = "\n\n".join(_render(section, None) for section in _sections(known, options, _NO_LIMIT))
    return Prompt(system, whole if len(whole.encode()) <= room else _fit(_sections(known, options, room), room))


_NO_LIMIT = 10**6


def write_system(view: SearchView, options: PromptOptions) -> str:
    """The part that stays the same during a search, so that a provider can cache it."""
    submit = "submit_policy" if options.mode == "policy" else "submit"
    parts = [
        "You tune how a large language model's training is split over accelerators. Each trial is an expensive real "
        "run. Find the best configuration in few trials; avoid runs that fail; never repeat a configuration.",
        f"In a turn you may make at most {MAX_LOOKUPS} look-ups (predict, explain, trial, compare, candidates), then "
        f"you must call {submit} or finish. Answer with tool calls only.",
        "A surrogate model (closed-form cost model, recalibrated on the trials so far) predicts every configuration. "
        "Its record is shown to you: trust it where it has held, overrule it where evidence speaks against it, and say "
        "why. Write down what you learn about this framework and cluster in `insight`: it is shown to you again. Where "
        "a part of the step takes longer or shorter here than the surrogate thinks, say so in `beliefs`: it moves the "
        "surrogate's prior, until trials outweigh it.",
        "finish ends the search early and gives the unused budget back; it is refused while something could plausibly "
        "still win.",
        FENCE_RULE,
        "WORKLOAD\n" + _describe_card(view, options),
        "OBJECTIVE\n" + objective_line(view, options.goal),
        "KNOBS\n" + _describe_knobs(view),
    ]
    return "\n\n".join(parts)


def _describe_card(view: SearchView, options: PromptOptions) -> str:
    card, arch, hardware = view.card, view.card.arch, view.card.hardware
    lines = (
        []
        if options.anonymous
        else [f"model {fence_line(card.family, 60)}, framework {fence_line(card.framework, 40)}"]
    )
    moe = arch.moe
    lines += [
        f"{arch.num_layers} layers, hidden {arch.hidden_size}, {arch.num_heads} heads ({arch.num_kv_heads} KV), "
        f"head dim {arch.head_dim}, FFN {arch.intermediate_size}{' gated' if arch.gated_mlp else ''}, "
        f"vocabulary {arch.vocab_size}, {one_line(card.precision, 20)}",
        *(
            [
                f"mixture of experts: {moe.num_experts} experts, top-{moe.top_k}, expert width "
                f"{moe.expert_intermediate_size}, {moe.num_shared_experts} shared, {moe.num_dense_layers} dense layers"
            ]
            if moe
            else []
        ),
        f"fixed work: global batch {card.global_batch_size} sequences of {card.seq_len} tokens",
        f"{hardware.num_accelerators} x {one_line(hardware.accelerator, 40)}, {hardware.accelerators_per_node} a node, "
        f"{hardware.memory_gib:g} GiB each; Gbit/s per accelerator: {_or_unknown(hardware.scale_up_gbps)} in the node, "
        f"{_or_unknown(hardware.scale_out_gbps)} between nodes",
    ]
    return "\n".join(lines)


def _describe_knobs(view: SearchView) -> str:
    lines = []
    for knob in free_knobs(view.space):
        choices = ", ".join(format_knob_value(choice) for choice in knob.choices)
        about = f"  {fence_line(knob.description, 160)}" if knob.description else ""
        lines.append(one_line(f"{knob.name}: {choices}", 300) + about)
    rules = f"; rules: {one_line(', '.join(view.space.rules), 300)}" if view.space.rules else ""
    size = f"{len(view.space)} legal configurations of {view.space.num_raw} combinations{rules}"
    kept = clip_bytes("\n".join(lines), MAX_KNOBS_BYTES).count("\n") + 1
    if kept == len(lines) and len("\n".join(lines).encode()) <= MAX_KNOBS_BYTES:
        return "\n".join([*lines, size])
    return "\n".join([*lines[: kept - 1], f"({len(lines) - kept + 1} knobs left out: no room)", size])


@dataclass(frozen=True)
class Section:
    """A titled run of lines; the last lines go first when room is short. A higher weight gets more room."""

    title: str
    lines: Sequence[str]
    weight: float


def _sections(known: PromptInput, options: PromptOptions, room_bytes: int) -> list[Section]:
    """All there is to tell; what cannot be cut line by line is cut to its share of the room."""
    view, look = known.view, known.look
    noise = estimate_noise(view)
    sections = [
        Section("STATE", _state_lines(known, noise), 2.0),
        Section("RUNNING NOW, not to be proposed again", running_lines(view), 0.5),
        Section("TRIALS, best first (~ = within noise of the best)", trial_lines(view, noise), 3.0),
        Section("FAILURES by kind", failure_lines(view), 1.5),
        Section("SURROGATE: its best untried candidates", candidate_lines(view, look, look.order, 12), 2.0),
        Section("SURROGATE: record", [*look.record, look.why], 1.0),
        Section("YOUR expectations against what was measured", calibration_lines(view), 1.0),
        Section("DIAGNOSIS", _evidence_lines(known, min(max(room_bytes // 12, 300), 1500)), 2.5),
        Section("YOUR INSIGHTS so far", [fence_line(text, 300) for text in last_insights(view)][::-1], 0.7),
        Section("YOUR BELIEFS, which the surrogate has taken in", _belief_lines(view), 0.3),
        Section("WHAT THE ARBITER SAID", _move_lines(view), 0.5),
    ]
    if options.mode == "policy":
        program = [fence(known.program, min(max(2 * room_bytes // 5, 300), 9000))] if known.program else []
        sections.append(Section("BEST PROGRAM so far" + known.program_note, program, 9.0))
    return [section for section in sections if section.lines]


def _belief_lines(view: SearchView) -> list[str]:
    held = collect_hints(view)
    return [
        f"{part.replace('_', ' ')}: {hint.level.replace('_', ' ')} (counts {hint.weight:.0%} now, fully if renewed)"
        for part, hint in held.items()
    ]


def _state_lines(known: PromptInput, noise: float) -> list[str]:
    view, best = known.view, best_observation(known.view)
    found = f"best: trial {best.trial}, loss {best.loss:.5g}" if best else "best: nothing has run successfully yet"
    several = f"; up to {known.slots} can start now" if known.slots > 1 else ""
    held = len(view.held_back)
    return [
        f"{len(view.observations)} trials seen; budget left {view.budget_left}{several}; {found}",
        f"noise: two runs differ by about {noise:.1%}; a smaller difference is no improvement",
        *([f"{held} configurations are held back: they cannot fit, or could not be started"] if held else []),
    ]


def _evidence_lines(known: PromptInput, limit_bytes: int) -> list[str]:
    lines: list[str] = []
    best = best_observation(known.view)
    reference = known.evidence.get(best.trial) if best else None
    seen = {o.trial: o for o in known.view.observations}
    for trial, evidence in known.evidence.items():
        who = "the best" if best and trial == best.trial else "the last" if trial == _last(known.view) else "asked for"
        text = describe_evidence(evidence, reference if evidence is not reference else None)
        memory = f"; {describe_memory(known.view, seen[trial])}" if trial in seen else ""
        if text:
            lines.append(f"trial {trial} ({who}{memory}):\n{fence(text, limit_bytes)}")
    return lines


def describe_evidence(
    evidence: TrialEvidence, reference: TrialEvidence | None = None, *, against: str = "the best"
) -> str:
    """Where the step goes, with differences against a reference, called `against`, where there is one."""
    lines = list(evidence.diagnosis[:12])
    theirs = reference.seconds_by_cause if reference else {}
    for cause, seconds in sorted(evidence.seconds_by_cause.items(), key=lambda item: -item[1])[:12]:
        if seconds == 0 and not theirs.get(cause):
            continue
        difference = f" ({seconds - theirs[cause]:+.4g} s against {against})" if cause in theirs else ""
        lines.append(f"{cause}: {seconds:.4g} s{difference}")
    lines += evidence.notes[:4]
    return "\n".join(lines)


def _move_lines(view: SearchView) -> list[str]:
    moves = [event.text for event in view.remarks if event.topic == "arbiter"]
    return [fence_line(text, 240) for text in moves[-3:][::-1]]


def _last(view: SearchView) -> int | None:
    return max((observation.trial for observation in view.observations), default=None)


def last_observation(view: SearchView) -> Observation | None:
    """The observation of the highest trial number."""
    return max(view.observations, key=lambda o: o.trial, default=None)


def _fit(sections: Sequence[Section], room_bytes: int) -> str:
    """The sections, each within its share of the room; what a short section leaves goes to the long ones."""
    sizes = [len(_render(section, None).encode()) + 2 for section in sections]
    shares = _share([section.weight for section in sections], sizes, room_bytes)
    return "\n\n".join(_render(section, share) for section, share in zip(sections, shares, strict=True))


def _share(weights: Sequence[float], sizes: Sequence[int], room: int) -> list[int]:
    shares = [0] * len(sizes)
    waiting = list(range(len(sizes)))
    while waiting:
        total = sum(weights[i] for i in waiting)
        content = [i for i in waiting if sizes[i] <= room * weights[i] / total]
        if not content:
            for i in waiting:
                shares[i] = int(room * weights[i] / total)
            break
        for i in content:
            shares[i] = sizes[i]
            room -= sizes[i]
        waiting = [i for i in waiting if i not in content]
    return shares


def _render(section: Section, limit_bytes: int | None) -> str:
    lines = [section.title, *section.lines]
    whole = "\n".join(lines)
    if limit_bytes is None or len(whole.encode()) <= limit_bytes:
        return whole
    kept: list[str] = []
    left = limit_bytes - 60
    for line in lines:
        left -= len(line.encode()) + 1
        if left < 0:
            break
        kept.append(line)
    missing = len(lines) - len(kept)
    return "\n".join([*kept, f"({missing} of {len(lines) - 1} left out: no room)"] if missing else kept)


def _or_unknown(number: float | None) -> str:
    return "unknown" if number is None else f"{number:g}"
