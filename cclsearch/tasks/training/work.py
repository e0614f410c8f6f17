"""Admission rules about the work: declared by the script, visible in the traces, and physically possible."""

from __future__ import annotations

from cclsearch.card.arch import tokens_per_step
from cclsearch.card.model import Card, Phase
from cclsearch.score.evidence import EvidenceOf
from cclsearch.score.outcome import Verdict
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult
from cclsearch.tasks.training.thresholds import DEFAULT

TrainingEvidence = EvidenceOf[TrainingInput, TrainingResult]


def check_declared_work(evidence: TrainingEvidence) -> Verdict:
    """Whether the run declared the card's global batch, sequence length, layers and parameters."""
    result, card, payload = evidence.result, evidence.card, evidence.payload
    wrong, undeclared = [], []
    for what, got, want in (
        ("global batch (requested)", payload.global_batch_size, card.number("global_batch_size")),
        ("sequence length (requested)", payload.seq_len, card.number("seq_len")),
        ("global batch", result.global_batch_size, card.number("global_batch_size")),
        ("sequence length", result.seq_len, card.number("seq_len")),
        ("layers", result.num_layers, card.arch.num_layers),
    ):
        if got is None:
            undeclared.append(what)
        elif got != want:
            wrong.append(f"{what} is {got}, but {want} in the card")
    wrong += _check_accumulation(evidence) + _check_parameters(evidence)
    needed = [what for what in undeclared if what in ("global batch", "sequence length")]
    if evidence.is_measured and needed:
        wrong.append(f"the run script did not declare its {' and '.join(needed)}")
    if wrong:
        return Verdict(rule="work", ok=False, detail="; ".join(wrong))
    if needed:
        return Verdict(rule="work", ok=None, detail=f"{evidence.provenance.value}: not declared: {', '.join(needed)}")
    detail = f"{card.number('global_batch_size')} sequences of {card.number('seq_len')} tokens per step"
    rest = f"; not declared: {', '.join(undeclared)}" if undeclared else ""
    return Verdict(rule="work", ok=True, detail=detail + rest)


def check_traced_work(evidence: TrainingEvidence) -> Verdict:
    """Whether the FLOPs of a step in the traces, if known, match the card's work."""
    rule, trace, card, bound = "traced_work", evidence.trace, evidence.card, DEFAULT
    expected = find_step_flops(card)
    if trace is None or trace.flops_per_step is None or expected is None:
        return Verdict(rule=rule, ok=None, detail="the FLOPs of a step are not in the traces")
    ratio = trace.flops_per_step / expected
    detail = f"{trace.flops_per_step:.3g} matrix FLOPs per traced step, {ratio:.2f}x the model's {expected:.3g}"
    low, high = 1 - bound.traced_flops_below, 1 + bound.traced_flops_above
    if ratio < low and (trace.flops_coverage or 0.0) < bound.min_flops_coverage:
        return Verdict(rule=rule, ok=None, detail=f"{detail}; too few kernels have shapes for a verdict")
    if low <= ratio <= high:
        return Verdict(rule=rule, ok=True, detail=detail)
    return Verdict(rule=rule, ok=False, detail=f"{detail}: must be between {low:.2f} and {high:.2f}")


def check_possible(evidence: TrainingEvidence) -> Verdict:
    """Whether the accelerators could reach the step time at all."""
    mfu = evidence.metrics.get("mfu")
    if mfu is None or evidence.is_on_cpu:
        return Verdict(rule="possible", ok=None, detail="the peak of the accelerators or the model's FLOPs are unknown")
    if mfu > DEFAULT.max_mfu:
        detail = f"the step time means {mfu:.0%} of the accelerators' peak: the work cannot have been done"
        return Verdict(rule="possible", ok=False, detail=detail)
    return Verdict(rule="possible", ok=True, detail=f"{mfu:.1%} of the accelerators' peak")


def _check_accumulation(evidence: TrainingEvidence) -> list[str]:
    payload = evidence.payload
    if "micro_batch_size" not in payload.config:
        return []
    dp, micro = payload.config.as_int("dp"), payload.config.as_int("micro_batch_size")
    made = dp * micro * payload.gradient_accumulation
    if made == evidence.card.number("global_batch_size"):
        return []
    parts = f"dp {dp} x micro-batch {micro} x accumulation {payload.gradient_accumulation}"
    return [f"{parts} is a global batch of {made}, but {evidence.card.number('global_batch_size')} in the card"]


def _check_parameters(evidence: TrainingEvidence) -> list[str]:
    got, want = evidence.result.num_params, count_card_parameters(evidence.card)
    if got is None:
        return []
    low, high = (1 - DEFAULT.params_below) * want, (1 + DEFAULT.params_above) * want
    return [] if low <= got <= high else [f"{got:,} parameters, but {want:,} in the card's model"]


def count_card_parameters(card: Card) -> int:
    """Number of parameters of the card's model, computed from its widths."""
    from cclsearch.card.arch import count_parameters

    return count_parameters(card.arch)


def find_step_flops(card: Card) -> float | None:
    """Model FLOPs of an optimizer step without recomputation (PaLM, appendix B); None if not a training card."""
    from cclsearch.card.arch import flops_per_token

    if card.phase is not Phase.TRAINING:
        return None
    return flops_per_token(card.arch, card.number("seq_len")) * tokens_per_step(card)


def find_mfu(card: Card, tokens_per_s_per_accelerator: float) -> float | None:
    """Model FLOPs utilization (MFU), 0 to 1; None if the accelerator's peak at the card's precision is unknown."""
    from cclsearch.card.hardware import match_accelerator

    accelerator = match_accelerator(card.hardware.accelerator, card.hardware.memory_gib)
    step_flops = find_step_flops(card)
    if accelerator is None or accelerator.nominal or step_flops is None:
        return None
    peak = accelerator.peak_flops_of(card.precision)
    return None if not peak else tokens_per_s_per_accelerator * step_flops / tokens_per_step(card) / peak
