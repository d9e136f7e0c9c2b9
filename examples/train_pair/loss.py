"""The loss over the whole vocabulary, without ever holding all logits.

A block position costs two rows of 49 152 logits. The loss and its gradient are therefore computed
chunk by chunk in the forward pass; what stays for the backward pass is hidden-size wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 512  # blocks whose logits exist at one time


def compare(draft: Tensor, target: Tensor, inverse: Tensor) -> tuple[Tensor, ...]:
    """What two sets of logits ``[N, V]`` have in common, at one over ``inverse`` fp32 ``[N, 1]``.

    Returns:
        fp32 ``[N, 1]`` each: both log-sum-exps, the drafter's mass where it is below the target,
        cross-entropy, acceptance sum(min(p, q)), and whether the argmaxes agree.
    """
    x, z = draft.float() * inverse, target.float() * inverse
    norm_x = torch.logsumexp(x, -1, keepdim=True)
    norm_z = torch.logsumexp(z, -1, keepdim=True)
    q, p = (x - norm_x).exp(), (z - norm_z).exp()
    below = torch.where(q < p, q, 0.0).sum(-1, keepdim=True)
    cross = norm_x - (p * x).sum(-1, keepdim=True)
    accept = torch.minimum(p, q).sum(-1, keepdim=True)
    agree = x.argmax(-1, keepdim=True) == z.argmax(-1, keepdim=True)
    return norm_x, norm_z, below, cross, accept, agree.float()


def gradient(
    draft: Tensor, target: Tensor, inverse: Tensor, norm_x: Tensor, norm_z: Tensor, below: Tensor,
    ce_weight: Tensor, accept_weight: Tensor,
) -> Tensor:  # fmt: skip
    """Of ``ce_weight * cross - accept_weight * accept`` by ``draft``, in its dtype."""
    q = (draft.float() * inverse - norm_x).exp()
    p = (target.float() * inverse - norm_z).exp()
    # d sum(min)/dq is 1 where q < p; through the softmax it is centred under q.
    by_accept = q * (torch.where(q < p, 1.0, 0.0) - below)
    return (inverse * (ce_weight * (q - p) - accept_weight * by_accept)).to(draft.dtype)


class Passes(NamedTuple):
    """The two sweeps over the logits, plain or compiled."""

    compare: Callable[..., tuple[Tensor, ...]] = compare
    gradient: Callable[..., Tensor] = gradient


def expected(accept: Tensor) -> tuple[Tensor, Tensor]:
    """Expected accepted tokens ``[N]`` of blocks ``[N, S]``, and its derivative by ``accept``.

    A block's expectation is sum_i prod_{j <= i} accept_j: position i counts as much as it is
    reached, times one plus what it leads to.
    """
    reached = accept.cumprod(1)
    ahead = torch.ones_like(accept)
    for i in range(accept.shape[1] - 2, -1, -1):
        ahead[:, i] += accept[:, i + 1] * ahead[:, i + 1]
    before = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], 1)
    return reached.sum(1), before * ahead


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, markov: Tensor, w2: Tensor, final: Tensor, embedding: Tensor,
        inverse: Tensor, ce_weight: Tensor, valid: Tensor, value: float, passes: Passes,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        steps = valid.shape[1]
        width = hidden.shape[1]
        both, head = torch.cat([hidden, markov], 1), torch.cat([embedding, w2], 1)
        d_both = torch.empty_like(both)
        d_w2 = torch.zeros(w2.shape, dtype=torch.float32, device=w2.device)
        stats, lengths = [], []
        for at in range(0, len(valid), CHUNK):
            part = slice(at * steps, (at + CHUNK) * steps)
            draft, target = both[part] @ head.T, final[part] @ embedding.T
            norm_x, norm_z, below, *stat = passes.compare(draft, target, inverse[part])
            length, by_accept = expected(stat[1].view(-1, steps) * valid[at : at + CHUNK])
            by_accept = (by_accept * valid[at : at + CHUNK] * value).view(-1, 1)
            grad = passes.gradient(
                draft, target, inverse[part], norm_x, norm_z, below, ce_weight[part], by_accept
            )
            d_both[part] = grad @ head
            d_w2 += grad.T @ markov[part]
            stats.append(torch.cat(stat, 1))
            lengths.append(length)
        stats_all, lengths_all = torch.cat(stats).T, torch.cat(lengths)
        ctx.save_for_backward(d_both[:, :width], d_both[:, width:], d_w2.to(w2.dtype))
        ctx.mark_non_differentiable(stats_all, lengths_all)
        total = (ce_weight[:, 0] * stats_all[0]).sum() - value * lengths_all.sum()
        return total, stats_all, lengths_all

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d_hidden, d_markov, d_w2 = ctx.saved_tensors
        return d_hidden * grad, d_markov * grad, d_w2 * grad, *[None] * 7


def block_loss(
    hidden: Tensor,
    markov: Tensor,
    w2: Tensor,
    final: Tensor,
    embedding: Tensor,
    inverse: Tensor,
    ce_weight: Tensor,
    valid: Tensor,
    value: float,
    passes: Passes,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy less ``value`` times the accepted tokens; differentiable in the first three.

    Args:
        hidden: ``[B * S, width]`` the drafter's head hidden states of B blocks.
        markov: ``[B * S, r]`` Markov embeddings of the (teacher-forced) previous tokens.
        w2: ``[V, r]``; embedding: ``[V, width]`` shared LM head, frozen.
        final: ``[B * S, width]`` the target's normed hidden states at the same positions.
        inverse: fp32 ``[B * S, 1]`` one over the temperature at which the two are compared.
        ce_weight: fp32 ``[B * S, 1]`` weight of every position's cross-entropy.
        valid: fp32 ``[B, S]`` 1 up to the answer's end, then 0.

    Returns:
        The loss; fp32 stats ``[3, B * S]`` (cross-entropy, acceptance, argmax agreement); the
        expected accepted tokens of every block ``[B]``.
    """
    return _BlockLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, markov, w2, final, embedding, inverse, ce_weight, valid, value, passes
    )
