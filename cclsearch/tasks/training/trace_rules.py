"""The admission rules of training on computed work, precision and exchanged data in the traces."""

from __future__ import annotations

from cclsearch.card.arch import count_parts, tokens_per_step
from cclsearch.card.hardware import PRECISION_BITS, canonical_precision
from cclsearch.scoring.admission import Finding, admission_rule
from cclsearch.scoring.evidence import TracedProducts
from cclsearch.tasks.training.contract import TrainingEvidence
from cclsearch.tasks.training.layout import recomputes_layers
from cclsearch.tasks.training.thresholds import DEFAULT


@admission_rule("traced_work")
def check_traced_work(evidence: TrainingEvidence) -> Finding:
    """Whether the traces can contain the card's work, even if every kernel without shapes ran at the device's peak."""
    products = evidence.trace.products if evidence.trace else None
    if products is None or products.flops <= 0:
        return None, "the FLOPs of a step cannot be seen in the traces"
    needed = _NeededWork(evidence)
    ratio = products.flops / needed.model
    detail = f"{products.flops:.3g} matrix FLOPs per traced step, {ratio:.2f}x the model's {needed.model:.3g}"
    if products.hidden_s:
        detail += f"; kernels without shapes take {products.hidden_share:.1%} of the compute time"
    most = (1 + DEFAULT.traced_flops_above) * needed.with_all_experts / needed.model
    if ratio > most:
        return False, f"{detail}: at most {most:.2f}x is allowed"
    hidden = products.hidden_flops or 0.0
    if products.hidden_s and products.hidden_flops is None:
        return None, f"{detail}; their rate is unknown"
    if wrong := needed.find_missing(products, hidden):
        return False, f"{detail}: {wrong}"
    if wrong := needed.find_missing(products, 0.0):
        return None, f"{detail} and may contain the rest: {wrong}"
    return True, detail


class _NeededWork:
    """Least work of one step of a card, by part: products with weights, and attention."""

    def __init__(self, evidence: TrainingEvidence) -> None:
        arch, card, config = evidence.card.arch, evidence.card, evidence.payload.config
        parts, tokens = count_parts(arch), tokens_per_step(card)
        head = arch.vocab_size * arch.hidden_size
        layers = parts.active - parts.embedding - parts.head
        rows = arch.num_layers * arch.num_heads * tokens
        attention = 12.0 * rows * arch.head_dim * card.number("seq_len")
        self.model = 6.0 * (layers + head) * tokens + attention
        # a framework may apply every expert to every token, as jax_cpu_model.py does
        self.with_all_experts = self.model + 6.0 * (parts.total - parts.active) * tokens
        self.recomputes = recomputes_layers(config.get("activation_checkpointing"))
        forward_again = 2.0 * DEFAULT.min_recomputed * layers * tokens if self.recomputes else 0.0
        self.weights = 6.0 * (layers + head) * tokens + forward_again
        is_ring = config.as_int("cp") > 1  # its blocks may skip what the causal mask hides
        self.attention = attention * (0.5 if is_ring else 1.0)
        self.rows = None if is_ring else float(rows)
        self.micro_batch = config.as_int("micro_batch_size") if "micro_batch_size" in config else None
        self.has_experts = arch.moe is not None

    def find_missing(self, products: TracedProducts, hidden: float) -> str:
        """Return the missing part of the products if kernels without shapes computed `hidden` FLOPs; "" if none."""
        least = 1 - (DEFAULT.traced_flops_below if products.by_shapes else DEFAULT.traced_costs_below)
        words = f"at least {least:.2f}x"
        needed = self.weights + self.attention
        if products.flops + hidden < least * needed:
            full = f" with the recomputation that the configuration asks for ({needed / self.model:.2f}x)"
            return f"{words} the work of the step is required{full if self.recomputes else ''}"
        if not products.batched_flops:
            return ""  # costs by kernel, or attention in kernels without shapes: only the sum is known
        weights = products.flops - products.batched_flops
        if not self.has_experts and weights + hidden < least * self.weights:
            return f"products with weights are {weights / self.weights:.2f}x what is required, {words} is needed"
        if products.batched_flops + hidden < least * self.attention:
            return f"attention is {products.batched_flops / self.attention:.2f}x what is required, {words} is needed"
        return self._find_missing_rows(products) or self._find_other_batch(products)

    def _find_other_batch(self, products: TracedProducts) -> str:
        batches = products.attention_batches
        if self.micro_batch is None or not batches or self.micro_batch in batches:
            return ""
        return f"attention runs on {batches[0]} sequences a call, but a micro-batch has {self.micro_batch}"

    def _find_missing_rows(self, products: TracedProducts) -> str:
        """Say how many whole queries of attention are missing, by an exact count: sequences x heads x positions x
        layers.
        """
        if not products.attended_rows or self.rows is None or products.hidden_share > DEFAULT.max_hidden_share:
            return ""
        ratio = products.attended_rows / self.rows
        if ratio >= 1 - DEFAULT.attended_below:
            return ""
        return f"backward attention covers {ratio:.2f}x of the queries of all layers, heads, sequences and tokens"


@admission_rule("precision")
def check_precision(evidence: TrainingEvidence) -> Finding:
    """Whether matrix products ran in the card's precision: as declared, and by types and kernel names in the traces."""
    wanted, declared = canonical_precision(evidence.card.precision), evidence.result.precision
    if declared is not None and canonical_precision(declared) != wanted:
        return False, f"the run script declares {declared}, but the card has {wanted}"
    products = evidence.trace.products if evidence.trace else None
    seconds = products.seconds_by_precision if products else {}
    total, bits = sum(seconds.values()), PRECISION_BITS.get(wanted)
    if not total or bits is None:
        seen = "declared; it" if declared is not None else "not declared, and"
        return None, f"{seen} cannot be seen in the traces"
    shares = {name: s / total for name, s in sorted(seconds.items(), key=lambda item: -item[1])}
    narrower = sum(share for name, share in shares.items() if PRECISION_BITS.get(name, bits) < bits)
    listed = ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.005)
    detail = f"time of matrix products by precision: {listed}"
    if narrower > DEFAULT.max_narrower_share:
        return False, f"{detail}; the card has {wanted}: name the precision in the card, or compute in {wanted}"
    return True, detail
