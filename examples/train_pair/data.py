"""Chats that the target writes itself: its own user turns, then its own answers.

All rows of a batch share the chat template's opening and step together, so every step is one
uniform single-token forward and no row ever waits for a prompt of another length.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_markov.pair.target import ANSWER_TURN, END_OF_TURN, USER_TURN, Target


@dataclass
class Chats:
    """Sequences of equal storage length, on the CPU.

    Attributes:
        ids: int32 ``[N, L]``, padded with the end-of-turn token.
        starts: int64 ``[N]`` position of the answer's first token.
        ends: int64 ``[N]`` one past the answer's last token (its end-of-turn token if it has one).
        greedy: bool ``[N]`` whether the answer was written greedily.
    """

    ids: Tensor
    starts: Tensor
    ends: Tensor
    greedy: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, keep: Tensor) -> Chats:
        return Chats(*(t[keep] for t in vars(self).values()))

    @staticmethod
    def concat(parts: list[Chats]) -> Chats:
        columns = zip(*(vars(p).values() for p in parts), strict=True)
        return Chats(*(torch.cat(column) for column in columns))


def sample(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row of ``logits`` ``[R, V]`` at ``temperature`` ``[R, 1]``; 0 is greedy."""
    scaled = logits.float() / temperature.clamp_min(1e-4)
    # The exponential race: the argmax of p / Exp(1) is a draw from p.
    race = torch.empty_like(scaled).exponential_(generator=generator)
    noised = (scaled - scaled.amax(-1, keepdim=True)).exp_().div_(race)
    return torch.where(temperature[:, 0] > 0, noised.argmax(-1), logits.argmax(-1))


@torch.inference_mode()
def write_chats(
    target: Target,
    tokenizer,
    rows: int,
    length: int,
    seed: int,
    *,
    user_limit: int = 56,
    greedy: float = 0.3,
    temperatures: tuple[float, float] = (0.6, 1.0),
    deadline: float | None = None,
) -> Chats:
    """Let the target write ``rows`` chats of at most ``length`` tokens.

    Args:
        seed: the only source of randomness; disjoint seeds give disjoint sets.
        user_limit: a user turn still open after so many tokens is closed, and its chat dropped.
        greedy: share of greedy answers; the others draw a temperature between ``temperatures``.
        deadline: ``time.monotonic()`` after which the batch is given up where it stands.
    """
    device = target.device
    generator = torch.Generator(device=device).manual_seed(seed)
    opening = tokenizer.encode(USER_TURN).ids
    closing = torch.tensor(tokenizer.encode(ANSWER_TURN).ids, device=device)
    ids = torch.full((rows, length), END_OF_TURN, dtype=torch.int64, device=device)
    ids[:, : len(opening)] = torch.tensor(opening, device=device)
    user_temperature = torch.empty(rows, 1, device=device).uniform_(0.7, 1.0, generator=generator)
    t = torch.empty(rows, 1, device=device).uniform_(*temperatures, generator=generator)
    t.masked_fill_(torch.rand(rows, 1, device=device, generator=generator) < greedy, 0.0)
    # asked: how many tokens of the closing are out (0 while the user turn is open).
    asked = torch.zeros(rows, dtype=torch.int64, device=device)
    starts = torch.full((rows,), length, dtype=torch.int64, device=device)
    ends = torch.full((rows,), length, dtype=torch.int64, device=device)
    good = torch.ones(rows, dtype=torch.bool, device=device)
    cache = target.new_cache(rows, length)
    target(ids[:, : len(opening) - 1], cache)
    for at in range(len(opening), length):
        logits = target.logits(target(ids[:, at - 1 : at], cache).final[:, -1])
        answering = asked == len(closing)
        token = sample(logits, torch.where(answering[:, None], t, user_temperature), generator)
        late = (asked == 0) & (at - len(opening) >= user_limit)
        empty = (asked == 0) & (token == END_OF_TURN) & (at == len(opening))
        good &= ~(late | empty)
        closed = (asked == 0) & ((token == END_OF_TURN) | late)
        forced = closed | ((asked > 0) & ~answering)
        token = torch.where(forced, closing[asked.clamp_max(len(closing) - 1)], token)
        asked += forced
        starts = torch.where(forced & (asked == len(closing)), at + 1, starts)
        done = ends < length
        token = torch.where(done, END_OF_TURN, token)
        ids[:, at] = token
        ends = torch.where(answering & ~done & (token == END_OF_TURN), at + 1, ends)
        if at % 16 == 0:
            if bool((ends < length).all()):
                break
            if deadline is not None and time.monotonic() > deadline:
                ends = ends.clamp_max(at)
                break
    good &= (ends - starts) >= 8
    chats = Chats(ids.int(), starts, ends, t[:, 0] == 0)
    return Chats(*(x.cpu() for x in vars(chats).values())).select(good.cpu())
