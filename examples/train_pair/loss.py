"""DSpark's loss over the whole vocabulary, without ever holding all logits.

A block position costs two rows of 49 152 logits. The loss and its gradient are therefore computed
chunk by chunk in the forward pass; what stays for the backward pass is hidden-size wide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 4096


def row_losses(
    draft: Tensor, target: Tensor, inverse: Tensor, ce_weight: Tensor, tv_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Losses of each row, and the gradient of their weighted sum.

    Args:
        draft, target: ``[N, V]`` logits.
        inverse: fp32 ``[N, 1]`` one over the temperature at which the two are compared.
        ce_weight, tv_weight: fp32 ``[N, 1]`` weights of cross-entropy and total variation.

    Returns:
        cross-entropy ``[N]``, acceptance sum(min(p, q)) = 1 - TV ``[N]``, whether the argmaxes
        agree ``[N]``, its expected value ``[N]`` (p of draft's argmax), and the gradient
        ``[N, V]`` (bf16 on a GPU, else fp32) with respect to ``draft``.
    """
    x, z = draft.float() * inverse, target.float() * inverse
    log_q = x - torch.logsumexp(x, -1, keepdim=True)
    p, q = torch.softmax(z, -1), log_q.exp()
    cross = -(p * log_q).sum(-1)
    accept = torch.minimum(p, q).sum(-1)
    # d(1 - sum min)/dq is -1 where q < p; through the softmax it is centred under q.
    below = (q < p).float()
    tv_grad = q * ((below * q).sum(-1, keepdim=True) - below)
    grad = inverse * (ce_weight * (q - p) + tv_weight * tv_grad)
    choice = x.argmax(-1, keepdim=True)
    agree = (choice == z.argmax(-1, keepdim=True)).float().squeeze(-1)
    return cross, accept, agree, p.gather(-1, choice).squeeze(-1), grad.to(draft.dtype)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, markov: Tensor, w2: Tensor, final: Tensor, embedding: Tensor,
        inverse: Tensor, ce_weight: Tensor, tv_weight: Tensor, rows: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        d_hidden, d_markov = torch.empty_like(hidden), torch.empty_like(markov)
        d_w2 = torch.zeros(w2.shape, dtype=torch.float32, device=w2.device)
        stats = []
        for at in range(0, len(hidden), CHUNK):
            part = slice(at, at + CHUNK)
            draft = torch.addmm(hidden[part] @ embedding.T, markov[part], w2.T)
            *stat, grad = rows(
                draft, final[part] @ embedding.T, inverse[part], ce_weight[part], tv_weight[part]
            )
            stats.append(torch.stack(stat))
            d_hidden[part] = grad @ embedding
            d_markov[part] = grad @ w2
            d_w2 += grad.T @ markov[part]
        stats_all = torch.cat(stats, 1)
        ctx.save_for_backward(d_hidden, d_markov, d_w2.to(w2.dtype))
        ctx.mark_non_differentiable(stats_all)
        cross, accept = stats_all[0], stats_all[1]
        total = (ce_weight[:, 0] * cross + tv_weight[:, 0] * (1 - accept)).sum()
        return total, stats_all

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d_hidden, d_markov, d_w2 = ctx.saved_tensors
        return d_hidden * grad, d_markov * grad, d_w2 * grad, *[None] * 6


def block_loss(
    hidden: Tensor,
    markov: Tensor,
    w2: Tensor,
    final: Tensor,
    embedding: Tensor,
    inverse: Tensor,
    ce_weight: Tensor,
    tv_weight: Tensor,
    rows: Any = row_losses,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of both losses (differentiable in the first three), and fp32 stats ``[4, N]``.

    Args:
        hidden: ``[N, width]`` the drafter's head hidden states.
        markov: ``[N, r]`` Markov embeddings of the (teacher-forced) previous tokens.
        w2: ``[V, r]``; embedding: ``[V, width]`` shared LM head, frozen.
        final: ``[N, width]`` the target's normed hidden states at the same positions.
        inverse, ce_weight, tv_weight: fp32 ``[N, 1]``, see ``row_losses``.
        rows: ``row_losses`` or a compiled version of it.

    The four stats are cross-entropy, acceptance, argmax agreement, p(draft's argmax).
    """
    return _BlockLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, markov, w2, final, embedding, inverse, ce_weight, tv_weight, rows
    )
