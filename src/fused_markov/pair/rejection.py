"""Speculative rejection sampling (Leviathan et al. 2023, Chen et al. 2023), plainly.

A draft token x, drawn from q, stands with probability min(1, p(x) / q(x)), where p is the target's
law; the first that falls is replaced by a draw from max(p - q, 0), normalised; where all stand, one
more token comes from p. What is emitted then has exactly the law p, whatever q is, as long as x was
really drawn from the q that is compared: hence the drafter's cached logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_markov import noise
from fused_markov.errors import ArgumentError

# Hash domains of the two uniforms, apart from each other and from the drafts' noise.
ACCEPT_DOMAIN, RESAMPLE_DOMAIN = 0x5BD1E995, 0x1B56C4E9


@dataclass(frozen=True)
class Verified:
    """What one round emits.

    Attributes:
        accepted: int64 ``[R]``: how many drafts of each row stand, 0 to S.
        tokens: int64 ``[R]``: the target's own token after them.
    """

    accepted: Tensor
    tokens: Tensor


def verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    limits: Tensor | None = None,
) -> Verified:
    """Keep the longest good prefix of each row's drafts, and draw one token after it.

    Args:
        target_logits: ``[R, S+1, V]`` the target's logits for every draft and the token after.
        draft_tokens: int64 ``[R, S]``; S = 0 is plain sampling from the target.
        draft_logits: ``[R, S, V]`` the logits that the drafts were drawn from, before temperature,
            by target id (-inf where the drafter has no candidate); only greedy rows need none.
        temperature: fp32 ``[R]``; 0 is greedy: a draft stands if it is the target's argmax.
        seeds: int64 ``[R]``. positions: int64 ``[R, S+1]`` position of each token. Together they
            give the randomness, so a row's result does not depend on the other rows.
        limits: int64 ``[R]`` how many of its drafts a row offers; ``None``: all S. Whether a draft
            is offered may depend on the drafts before it, never on itself.

    Raises:
        ArgumentError: drafts of a sampled row without their logits.
    """
    steps = draft_tokens.shape[1]
    best = _lowest_argmax(target_logits)
    stands = draft_tokens == best[:, :steps]
    if limits is None:
        limits = torch.full_like(seeds, steps)
    offered = torch.arange(steps, device=limits.device) < limits[:, None]
    sampled = temperature > 0
    if not bool(sampled.any()):
        accepted = _prefix(stands & offered)
        return Verified(accepted, _at(best, accepted))
    t = torch.where(sampled, temperature, 1.0)[:, None, None]
    p = torch.softmax(target_logits.float() / t, dim=-1)
    q = torch.zeros_like(p)
    if draft_logits is None and steps:
        raise ArgumentError("draft_logits", "given where a row's temperature is above 0", "None")
    if draft_logits is not None:
        torch.softmax(draft_logits.float() / t, dim=-1, out=q[:, :steps])
    x = draft_tokens.unsqueeze(-1)
    p_x, q_x = (law[:, :steps].gather(-1, x).squeeze(-1) for law in (p, q))
    u = _uniform(seeds[:, None], positions[:, :steps], ACCEPT_DOMAIN)
    accepted = _prefix(torch.where(sampled[:, None], u * q_x < p_x, stands) & offered)
    u = _uniform(seeds, _at(positions, accepted), RESAMPLE_DOMAIN)
    # Past the last draft offered there is nothing to take off: the next token is the target's.
    fell = (accepted < limits)[:, None]
    drawn = _draw_residual(_at(p, accepted), torch.where(fell, _at(q, accepted), 0.0), u)
    return Verified(accepted, torch.where(sampled, drawn, _at(best, accepted)))


def _draw_residual(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """A draw from max(p - q, 0), ``[R, V]``, for each uniform ``[R]``, by inverting its sums."""
    residual = (p.double() - q.double()).clamp_min(0.0)
    # Equal laws leave nothing but rounding, and then reject with no probability worth naming.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p.double())
    sums = residual.cumsum(-1)
    where = torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)
    return where.squeeze(-1).clamp_max(p.shape[-1] - 1)


def _uniform(seeds: Tensor, positions: Tensor, domain: int) -> Tensor:
    """fp64 uniforms in (0, 1) of (seed, position), never 0 or 1."""
    state = noise.prefix(seeds, 0, positions, domain)
    return (noise.hash32(state, torch.zeros_like(state)).double() + 0.5) * 2.0**-32


def _prefix(stands: Tensor) -> Tensor:
    """How many leading entries of each row are true."""
    return stands.long().cumprod(dim=1).sum(dim=1)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """``values[r, index[r]]`` for every row r."""
    return values[torch.arange(values.shape[0], device=values.device), index]


def _lowest_argmax(logits: Tensor) -> Tensor:
    """Argmax over the last axis; the lowest id among ties."""
    best, ids = logits.amax(-1, keepdim=True), torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1] - 1).amin(-1)
