"""What engines say of a batch, in words that several of them share."""

from __future__ import annotations

from fused_markov.batch import DraftBatch
from fused_markov.head import MarkovHead
from fused_markov.shaping import is_shaped

LIMITED_READS = "reads of W2 only the rows of each position's candidates"


def guess_lines(head: MarkovHead, batch: DraftBatch) -> list[str]:
    """Of engines that guess the chain and check it: how often W2 is read, and why."""
    lines = ["reads W2 once a pass: once a decode step where the guess is right"]
    if head.successors is None:
        lines.append(
            "guesses from the base logits alone: a trained head wants more passes for it; "
            "find its successors (fused_markov.successors) for better guesses"
        )
    else:
        lines.append(f"guesses from the base logits and {head.successors.shape[1]} successors")
    if head.variant is not None:
        lines.append(f"a {head.variant.kind} head: its guess is followed step after step")
    if is_shaped(batch):
        lines.append("top-k, top-p or min-p: a pass also reads each cached row some times over")
    return lines
