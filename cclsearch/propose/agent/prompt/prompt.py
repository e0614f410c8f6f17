"""The prompt of one turn: a pure function of the view and the surrogate's table, bounded for any number of trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cclsearch.card.model import Hardware, ModelArch
from cclsearch.core.text import one_line
from cclsearch.core.values import format_knob_value
from cclsearch.propose.agent.arbiter.rules import ArbiterSettings
from cclsearch.propose.agent.memory.evidence import TrialEvidence, describe_evidence
from cclsearch.propose.agent.memory.history import last_insights, past_turns
from cclsearch.propose.agent.prompt.earlier_lines import earlier_lines
from cclsearch.propose.agent.prompt.knob_effects import LAYOUT, change_lines, has_degrees
from cclsearch.propose.agent.prompt.messages import WORDS
from cclsearch.propose.agent.prompt.quoting import QUOTING_RULE, clip_bytes, quote_line, quote_untrusted
from cclsearch.propose.agent.prompt.row_facts import read_row_facts
from cclsearch.propose.agent.prompt.sections import Section, fit_sections, render_section
from cclsearch.propose.agent.prompt.surrogate_table import (
    MAX_BET_GAIN,
    MIN_BET_TRIALS,
    NUM_FIRST_CHOICES,
    NUM_PROMISING,
    PLAUSIBLE,
    SurrogateTable,
    best_observation,
    describe_noise,
    improvement_threshold,
    none_ranked,
)
from cclsearch.propose.agent.prompt.tables import (
    FREE_MARK,
    candidate_lines,
    describe_memory,
    failure_lines,
    objective_line,
    pick_candidates,
    running_lines,
    theory_lines,
    trial_lines,
    trials_title,
    unlikely_lines,
)
from cclsearch.propose.agent.prompt.untested_values import untried_lines
from cclsearch.propose.agent.providers.types import MAX_BODY_BYTES, CompletionRequest, Message, Role, ToolSpec
from cclsearch.propose.agent.tools.configs import describe_inert, free_knobs
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.corrections import START, count_doubts_left
from cclsearch.propose.bayes.outlook import MIN_TRIALS
from cclsearch.propose.bayes.snapshot import NEGLIGIBLE
from cclsearch.propose.events import ArbiterMove, LlmMode, find_withdrawn
from cclsearch.space.table import RECORDED_RULES, Space

ENVELOPE_BYTES = 1400
"""Largest addition of a provider's protocol to a request of many calls."""
MAX_PROMPT_BYTES = MAX_BODY_BYTES - ENVELOPE_BYTES
"""Bytes of one whole request: system, tools, and all messages of the turn."""
RESERVED_BYTES = {LlmMode.CONFIGS: 10_000, LlmMode.POLICY: 12_000}
"""Part of `MAX_PROMPT_BYTES` that is kept for the turn's look-ups, by mode."""
MIN_RESERVED_BYTES = 4000
MIN_SEARCH_BYTES = 8000
"""Bytes for trials, candidates and diagnosis if knobs and tools use most of the bytes."""
MAX_FITTINGS = 3
"""Attempts to shorten a prompt whose JSON came out longer than planned."""
MAX_KNOBS_BYTES = 6500
CANDIDATES = "its best untried candidates, the likeliest to win first, ties by prediction (optimistic: 10th percentile)"
UNRANKED = "its best untried candidates, in the order in which it would run them (optimistic: 10th percentile)"
UNTRIED = "VALUES WITHOUT A TRIAL, each with the candidate that is likeliest to win"
THEORIES = "what you expected, what would change your mind, and what was measured"
MAX_LOOKUPS = 8
RULES = ArbiterSettings()
MAX_CORRECTIONS = 2
UNLIMITED = 10**6


@dataclass(frozen=True)
class PromptOptions:
    """Options of a prompt."""

    mode: LlmMode = LlmMode.CONFIGS
    anonymous: bool = False
    """Leaves out everything that names the workload's origin: a strong model remembers published results."""
    goal: str = ""
    """The formula of the objective's loss, unless it is the primary metric itself."""


@dataclass(frozen=True)
class Prompt:
    """System message and first user message of a turn."""

    system: str
    user: str


@dataclass(frozen=True)
class PromptInput:
    """Everything that a prompt is written from."""

    view: SearchView
    table: SurrogateTable
    slots: int
    evidence: dict[int, TrialEvidence] = field(default_factory=dict)
    """Evidence of the best and of the last trial, which the prompt shows without a look-up, by trial."""
    program: str | None = None
    """The best policy program so far, in `policy` mode."""
    program_note: str = ""
    offers: tuple[str, ...] = ()
    """Possible additions to the search space, one line each."""
    overrules_left: int = 1
    """Credit: how many configurations that are not free may still be submitted."""
    standing: str = ""
    """The model's distance from a stall, in words."""
    max_submitted: int = 1
    """Configurations that the turn may submit."""
    can_correct: bool = True
    """Whether the turn may correct the prediction without a trial."""


def write_turn_prompt(prompt_input: PromptInput, tools: Sequence[ToolSpec], options: PromptOptions) -> Prompt:
    """The prompt, short enough that the request has bytes left for its tools and for the turn's look-ups."""
    target = MAX_PROMPT_BYTES - RESERVED_BYTES[options.mode]
    fixed = _request_bytes(Prompt(write_system(prompt_input.view, options), ""), tools)
    if target - fixed < MIN_SEARCH_BYTES:
        # In a space of many knobs, the state of the search matters more than what look-ups would add.
        target = min(fixed + MIN_SEARCH_BYTES, MAX_PROMPT_BYTES - MIN_RESERVED_BYTES)
    # JSON escapes newlines and quotes, so more bytes are sent than the text has.
    limit = int((target - _request_bytes(Prompt("", ""), tools)) * 0.95)
    prompt = write_prompt(prompt_input, options, limit)
    for _ in range(MAX_FITTINGS):
        excess = _request_bytes(prompt, tools) - target
        if excess <= 0:
            break
        limit -= excess
        prompt = write_prompt(prompt_input, options, limit)
    return prompt


def _request_bytes(prompt: Prompt, tools: Sequence[ToolSpec]) -> int:
    message = Message(role=Role.USER, text=prompt.user)
    return CompletionRequest(system=prompt.system, messages=(message,), tools=tuple(tools)).num_bytes


def write_prompt(prompt_input: PromptInput, options: PromptOptions, limit_bytes: int) -> Prompt:
    """The prompt, system part included, in at most `limit_bytes`; it counts what it leaves out."""
    system = write_system(prompt_input.view, options)
    left = limit_bytes - len(system.encode())
    whole = "\n\n".join(render_section(section, None) for section in _sections(prompt_input, options, UNLIMITED))
    is_short = len(whole.encode()) <= left
    return Prompt(system, whole if is_short else fit_sections(_sections(prompt_input, options, left), left))


def write_system(view: SearchView, options: PromptOptions) -> str:
    """The part that stays the same during a search, so that the provider can cache it."""
    has_form = view.primary.name in view.predictor.forms
    model = "closed-form cost model, recalibrated on the trials so far" if has_form else "fitted to the trials so far"
    again = ", and may be submitted once more" if view.can_repeat else ""
    corrections = f" {WORDS['corrections'].format(again=again, start=START)}"
    submit = "submit_policy" if options.mode == LlmMode.POLICY else "submit"
    words = {
        **{"tuned": view.task.tuned, "max_lookups": MAX_LOOKUPS, "submit": submit, "model": model},
        **{"promising": NUM_PROMISING, "first": NUM_FIRST_CHOICES, "plausible": f"{PLAUSIBLE:.0%}"},
        **{"negligible": f"{NEGLIGIBLE:.0%}", "min_trials": MIN_TRIALS, "corrections": corrections},
        **{"bet_trials": MIN_BET_TRIALS, "bet_gain": f"{MAX_BET_GAIN:.0%}", "patience": RULES.patience},
        **{"patience_after_gain": RULES.patience_after_gain, "patience_limited": RULES.patience_limited},
    }
    parts = [
        *(sentence.format(**words) for sentence in WORDS["system"].values()),
        QUOTING_RULE,
        "WORKLOAD\n" + _describe_card(view, options),
        "OBJECTIVE\n" + objective_line(view, options.goal),
        "KNOBS\n" + _describe_knobs(view),
        "NAMES\n" + "\n".join([*_describe_columns(view), *(f"{k}: {v}" for k, v in view.task.agent_names.items())]),
    ]
    return "\n\n".join(parts)


def _describe_columns(view: SearchView) -> list[str]:
    """Describe the columns that the tables of every task have."""
    memory = [] if view.predictor.memory is None else [WORDS["columns"]["memory"]]
    wins = WORDS["columns"]["wins"].format(layout=f", {LAYOUT} as one" if has_degrees(view.space) else "")
    return [WORDS["columns"]["predicted"].format(metric=view.primary.column), *memory, wins]


def _describe_card(view: SearchView, options: PromptOptions) -> str:
    card, hardware = view.card, view.card.hardware
    model = [f"model {quote_line(card.family, 60)}"] if card.model else []
    lines = [] if options.anonymous else [", ".join([*model, f"framework {quote_line(card.framework, 40)}"])]
    lines += [
        *(_describe_model(card.model, card.precision) if card.model else []),
        *view.task.describe_for_agent(card),
        f"{hardware.num_accelerators} x {one_line(hardware.accelerator, 40)}, {hardware.accelerators_per_node} per "
        f"node, {hardware.memory_gib:g} GiB each; Gbit/s per accelerator: {_or_unknown(hardware.scale_up_gbps)} in the "
        f"node, {_or_unknown(hardware.scale_out_gbps)} between nodes",
        *_describe_machine(hardware),
    ]
    return "\n".join(lines)


def _describe_machine(hardware: Hardware) -> list[str]:
    """Describe what is known of the machine beyond the two bandwidths, in one line if anything."""
    known = [f"scale-up domain of {hardware.domain}"] if hardware.scale_up_domain else []
    known += [f"torus {'x'.join(map(str, hardware.torus))}"] if hardware.torus else []
    known += [f"{hardware.host_cores} CPU cores a node, shared by its processes"] if hardware.host_cores else []
    if (links := hardware.links) is not None and len(links.endpoints) > 1:
        names = range(len(links.endpoints))
        pairs = [(a, b) for a in names for b in names if a != b]
        gbps, us = ([of[a][b] for a, b in pairs] for of in (links.gbps, links.latency_us))
        known += [f"links measured: {min(gbps):.3g} to {max(gbps):.3g} Gbit/s, {min(us):.3g} to {max(us):.3g} us"]
    return ["; ".join(known)] if known else []


def _describe_model(arch: ModelArch, precision: str) -> list[str]:
    moe = arch.moe
    experts = moe and (
        f"mixture of experts: {moe.num_experts} experts, top-{moe.top_k}, expert width "
        f"{moe.expert_intermediate_size}, {moe.num_shared_experts} shared, {moe.num_dense_layers} dense layers"
    )
    return [
        f"{arch.num_layers} layers, hidden {arch.hidden_size}, {arch.num_heads} heads ({arch.num_kv_heads} KV), "
        f"head dim {arch.head_dim}, FFN {arch.intermediate_size}{' gated' if arch.gated_mlp else ''}, "
        f"vocabulary {arch.vocab_size}, {one_line(precision, 20)}",
        *([experts] if experts else []),
    ]


def _describe_knobs(view: SearchView) -> str:
    lines = []
    for knob in free_knobs(view.space):
        choices = ", ".join(format_knob_value(choice) for choice in knob.choices)
        about = f"  {quote_line(knob.description, 160)}" if knob.description else ""
        lines.append(one_line(f"{knob.name}: {choices}", 300) + about)
    lines += [one_line(line, 300) for line in describe_inert(view.space)]
    fixed = [f"{knob.name}={format_knob_value(knob.choices[0])}" for knob in view.space.knobs if len(knob.choices) == 1]
    if fixed:
        lines.append(one_line(f"fixed: {', '.join(fixed)}", 600))
    size = _describe_size(view.space)
    kept = clip_bytes("\n".join(lines), MAX_KNOBS_BYTES).count("\n") + 1
    if kept == len(lines) and len("\n".join(lines).encode()) <= MAX_KNOBS_BYTES:
        return "\n".join([*lines, size])
    return "\n".join([*lines[: kept - 1], f"({len(lines) - kept + 1} knobs left out: size limit)", size])


def _describe_size(space: Space) -> str:
    """Return how many configurations exist; for a recording, say that the rest of the grid does not."""
    if space.rules == RECORDED_RULES:
        grid = math.prod(len(knob.choices) for knob in space.knobs)
        if len(space) == grid:
            return f"all {grid} combinations of these values were recorded"
        return (
            f"only {len(space)} of the {grid} combinations of these values were recorded: no other can be tried, and "
            "`candidates` and `explain` know these alone. A knob that has no effect in a row may have any value"
        )
    rules = f"; rules: {one_line(', '.join(space.rules), 300)}" if space.rules else ""
    return f"the search space has {len(space)} configurations, of {space.num_raw} combinations{rules}"


def _sections(prompt_input: PromptInput, options: PromptOptions, limit_bytes: int) -> list[Section]:
    """Return all sections with content; the uncuttable diagnosis and program get shares of the limit."""
    view, table = prompt_input.view, prompt_input.table
    noise, facts = improvement_threshold(view), read_row_facts(view)
    sections = [
        Section("STATE", _state_lines(prompt_input), 2.0),
        Section("RUNNING NOW, not to be proposed again", running_lines(view), 0.5),
        Section(trials_title(view), trial_lines(view, noise, facts), 3.0),
        Section("FAILURES by kind", failure_lines(view, table, facts), 1.5),
        Section(
            f"SURROGATE: {UNRANKED if table.wins_N is None else CANDIDATES}",
            [*candidate_lines(view, table, *pick_candidates(view, table), facts), *unlikely_lines(table)],
            2.0,
        ),
        Section("SURROGATE: record", [*table.record, table.why], 1.0),
        Section("SURROGATE: how far it was off, and what it would do now", table.review, 1.2),
        Section("WHAT ONE CHANGE DID", change_lines(view), 1.2),
        Section(UNTRIED, untried_lines(view, table, facts), 1.5),
        Section(f"YOUR THEORIES: {THEORIES}", theory_lines(view), 1.0),
        Section("DIAGNOSIS", _evidence_lines(prompt_input, min(max(limit_bytes // 12, 300), 1500)), 2.5),
        Section("YOUR INSIGHTS so far, by turn", _insight_lines(view), 0.7),
        Section("EARLIER SEARCHES here, mostly of other models", earlier_lines(view, anonymous=options.anonymous), 0.5),
        Section("YOUR CORRECTIONS, with their weights in the surrogate's mixture", table.corrections, 0.8),
        Section("REFUSED in your last turn", _refused_lines(view), 0.5),
        Section("LATEST MOVES OF THE ARBITER", _move_lines(view), 0.5),
        Section("MAY BE ADDED to the search space with extend_space", prompt_input.offers, 0.8),
    ]
    if options.mode == LlmMode.POLICY:
        share = min(max(2 * limit_bytes // 5, 300), 9000)
        program = [quote_untrusted(prompt_input.program, share)] if prompt_input.program else []
        sections.append(Section("BEST PROGRAM so far" + prompt_input.program_note, program, 9.0))
    return [section for section in sections if section.lines]


def _insight_lines(view: SearchView) -> list[str]:
    """The latest first."""
    withdrawn = {turn: f" (WITHDRAWN in turn {by})" for turn, by in find_withdrawn(view.events).items()}
    latest = reversed(last_insights(view))
    return [f"turn {one.turn}{withdrawn.get(one.turn, '')}: {quote_line(one.insight, 300)}" for one in latest]


def _state_lines(prompt_input: PromptInput) -> list[str]:
    view, table, best = prompt_input.view, prompt_input.table, best_observation(prompt_input.view)
    found = f"best: trial {best.trial}, loss {best.loss:.5g}" if best else f"best: none, {none_ranked(view)}"
    several = f"; up to {prompt_input.slots} can start now" if prompt_input.slots > 1 else ""
    num_held, doubts = len(view.held_back), count_doubts_left(view)
    return [
        f"{len(view.observations)} trials seen; budget left {view.budget_left}{several}; {found}",
        f"this turn may submit at most {prompt_input.max_submitted}"
        + "; no `correct` now" * (not prompt_input.can_correct),
        (
            f"after your stall: one configuration a turn, among those that are free ({FREE_MARK}), until one improves"
            if table.first_only
            else f"your credit: {max(prompt_input.overrules_left, 0)} configurations that are not free"
        ),
        *([prompt_input.standing] if prompt_input.standing else []),
        *(["this is the last trial: the search ends with it"] if view.budget_left == 1 else []),
        f"noise: {describe_noise(view, table.scatter)}",
        *([f"trials that you may still doubt: {doubts}"] if view.observations else []),
        *([f"{num_held} configurations are held back: they do not fit, or could not be started"] if num_held else []),
    ]


def _evidence_lines(prompt_input: PromptInput, limit_bytes: int) -> list[str]:
    lines: list[str] = []
    best = best_observation(prompt_input.view)
    reference = prompt_input.evidence.get(best.trial) if best else None
    seen = {o.trial: o for o in prompt_input.view.observations}
    for trial, evidence in prompt_input.evidence.items():
        is_last = trial == max(seen, default=0)
        role = "the best" if best and trial == best.trial else "the last" if is_last else "looked up"
        text = describe_evidence(evidence, reference if evidence is not reference else None)
        memory = f"; {describe_memory(prompt_input.view, seen[trial])}" if trial in seen else ""
        if text:
            lines.append(f"trial {trial} ({role}{memory}):\n{quote_untrusted(text, limit_bytes)}")
    return lines


def _refused_lines(view: SearchView) -> list[str]:
    turns = past_turns(view.events)
    return [quote_line(why, 300) for why in turns[-1].refused] if turns else []


def _move_lines(view: SearchView) -> list[str]:
    moves = [event.text for event in view.events if isinstance(event, ArbiterMove)]
    return [quote_line(text, 500) for text in moves[-3:][::-1]]


def _or_unknown(number: float | None) -> str:
    return "unknown" if number is None else f"{number:g}"
