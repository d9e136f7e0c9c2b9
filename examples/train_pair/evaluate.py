"""Real speculative decoding of a batch, to count what is accepted.

Rows are independent; every round drafts S tokens, verifies them in one target forward and keeps
the accepted ones plus one of the target's own. Greedy: a draft stands while it equals the target's
argmax. T > 0: drafts are drawn from q and stand with probability min(1, p/q), so the text is an
exact sample of the target.

    python examples/train_pair/evaluate.py --checkpoint models/smollm2-135m-instruct-dspark
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from data import write_chats
from fused_markov.pair import Drafter, Target
from fused_markov.pair.gguf_file import GgufFile, find_gguf
from fused_markov.pair.layers import KVCache

HELD_OUT_SEED = 1_000_003  # training seeds count up from a small one


@dataclass
class Acceptance:
    """Counts over all rounds of all rows."""

    rounds: int = 0
    accepted: list[int] = field(default_factory=list)  # by position
    confidence: list[float] = field(default_factory=list)  # sum of estimates, rounds reaching it
    reached: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Accepted draft tokens a round."""
        return sum(self.accepted) / max(self.rounds, 1)

    def summary(self) -> dict:
        """Accepted a round, the share of rounds whose draft stood up to each position, and each
        position's acceptance given that all before it stood, with the mean confidence there."""
        reached = [max(r, 1) for r in self.reached]
        return {
            "rounds": self.rounds,
            "accepted_per_round": round(self.mean, 3),
            "stood_by_position": [round(a / max(self.rounds, 1), 3) for a in self.accepted],
            "conditional_by_position": [
                round(a / r, 3) for a, r in zip(self.accepted, reached, strict=True)
            ],
            "confidence_by_position": [
                round(c / r, 3) for c, r in zip(self.confidence, reached, strict=True)
            ],
        }


def _draft(
    drafter: Drafter, base: Tensor, anchors: Tensor, temperature: float, markov: bool
) -> tuple[Tensor, Tensor]:
    """The sequential loop: drafted tokens ``[R, S]`` and their logits ``[R, S, V]``."""
    head, prev, tokens, rows = drafter.markov_head, anchors, [], []
    for step in range(base.shape[1]):
        row = base[:, step]
        if markov:
            row = row + F.linear(head.markov_w1(prev), head.markov_w2.weight)
        row = row.float()
        if temperature > 0:
            prev = torch.multinomial(torch.softmax(row / temperature, -1), 1)[:, 0]
        else:
            prev = row.argmax(-1)
        tokens.append(prev)
        rows.append(row)
    return torch.stack(tokens, 1), torch.stack(rows, 1)


def _verify(
    draft: Tensor, draft_logits: Tensor, logits: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """How many drafts stand ``[R]``, and the token that follows them ``[R]``."""
    steps = draft.shape[1]
    if temperature == 0:
        best = logits.argmax(-1)
        count = (draft == best[:, :steps]).long().cumprod(1).sum(1)
        return count, best.gather(1, count[:, None])[:, 0]
    p = torch.softmax(logits.float() / temperature, -1)
    q = torch.softmax(draft_logits / temperature, -1)
    chosen = draft[..., None]
    ratio = p[:, :steps].gather(-1, chosen) / q.gather(-1, chosen)
    stands = torch.rand_like(ratio) < ratio
    count = stands[..., 0].long().cumprod(1).sum(1)
    rows = torch.arange(len(count), device=count.device)
    left = p[rows, count]
    refused = count < steps
    surplus = (left - q[rows, count.clamp_max(steps - 1)]).clamp_min(0)
    left = torch.where(refused[:, None], surplus, left)
    return count, torch.multinomial(left.clamp_min(1e-20), 1)[:, 0]


def _select(cache: KVCache, new: KVCache, keep: Tensor) -> KVCache:
    """Copy the rows ``keep`` of ``cache`` into the empty cache ``new``."""
    end = int(cache.lengths.max())
    for layer in range(len(cache.keys)):
        kept = (store[layer, keep, :, :end] for store in (cache.keys, cache.values))
        new.write(layer, *kept)
    new.advance(cache.lengths[keep.cpu()])
    return new


@torch.inference_mode()
def measure(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    *,
    temperature: float,
    markov: bool = True,
    new_tokens: int = 128,
    end: int = 2,
    compact: float = 0.75,
) -> Acceptance:
    """Decode an answer to every prompt (token ids) as one batch and count acceptances.

    Once no more than the share ``compact`` of the batch is unfinished, the rest is dropped.
    """
    device, rows, steps = target.device, len(prompts), drafter.config.block_size
    longest = max(map(len, prompts))
    ids = torch.full((rows, longest), end, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    room = longest + new_tokens + 2 * steps + 2
    cache, context = target.new_cache(rows, room), drafter.new_cache(rows, room)
    out = target(ids.to(device), cache)
    cache.crop(lengths)
    drafter.extend(context, out.hidden, lengths)
    last = out.final[torch.arange(rows, device=device), (lengths - 1).to(device)]
    logits = target.logits(last)
    if temperature > 0:
        anchors = torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1)[:, 0]
    else:
        anchors = logits.argmax(-1)
    alive = (anchors != end).cpu()
    result = Acceptance(0, [0] * steps, [0.0] * steps, [0] * steps)
    made = torch.ones(rows, dtype=torch.int64)
    while bool(alive.any()):
        base, hidden = drafter.base_logits(context, anchors)
        draft, draft_logits = _draft(drafter, base, anchors, temperature, markov)
        prev = torch.cat([anchors[:, None], draft[:, :-1]], 1)
        sure = drafter.confidence(hidden, prev).cpu()
        out = target(torch.cat([anchors[:, None], draft], 1), cache)
        count, following = _verify(draft, draft_logits, target.logits(out.final), temperature)
        # An accepted end of turn ends the answer: nothing after it counts as accepted.
        ended = torch.where(draft == end, torch.arange(steps, device=device), steps).amin(1)
        count, ended = count.cpu(), ended.cpu()
        credit = torch.minimum(count, ended + 1)
        for step in range(steps):
            reached = alive & (credit >= step) & (ended >= step)
            result.reached[step] += int(reached.sum())
            result.confidence[step] += float(sure[:, step][reached].sum())
            result.accepted[step] += int((alive & (credit > step)).sum())
        result.rounds += int(alive.sum())
        finished = (ended < count) | (following.cpu() == end)
        made += torch.where(alive, count + 1, 0)
        # Rows that are finished keep decoding in place, uncounted, until enough of them are.
        stay = alive & ~finished & (made < new_tokens)
        kept = torch.where(alive, count + 1, 0)
        drafter.extend(context, out.hidden, kept)
        cache.crop(cache.lengths - (steps + 1) + kept)
        anchors, alive = following, stay
        left = int(alive.sum())
        if 0 < left <= compact * len(alive):
            keep = alive.nonzero()[:, 0]
            made, alive = made[keep], alive[keep]
            keep = keep.to(device)
            anchors = anchors[keep]
            cache = _select(cache, target.new_cache(left, room), keep)
            context = _select(context, drafter.new_cache(left, room), keep)
    return result


def report(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    new_tokens: int,
    deadline: float = float("inf"),
) -> dict:
    """The four cases of the model card: greedy and T = 0.8, with and without the Markov head.

    After ``deadline`` (``time.monotonic()``) no further case begins.
    """
    figures = {}
    for markov in (True, False):
        for name, t in (("greedy", 0.0), ("T=0.8", 0.8)):
            if time.monotonic() < deadline:
                figures[f"{name}, {'with' if markov else 'without'} head"] = measure(
                    target, drafter, prompts, temperature=t, markov=markov, new_tokens=new_tokens
                ).summary()
    return figures


def held_out_prompts(target: Target, tokenizer, count: int) -> list[list[int]]:
    """Token ids of ``count`` prompts that the target writes at a seed that training never uses."""
    chats = write_chats(target, tokenizer, 2 * count, 110, HELD_OUT_SEED)
    pairs = zip(chats.ids[:count], chats.starts[:count].tolist(), strict=True)
    return [row[:start].tolist() for row, start in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="models/smollm2-135m-instruct-dspark")
    parser.add_argument("--gguf", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    file = GgufFile(find_gguf(args.gguf or None))
    target = Target.load(file=file, device=args.device, dtype=dtype)
    prompts = held_out_prompts(target, file.tokenizer(), args.prompts)
    torch.manual_seed(HELD_OUT_SEED)
    drafter = Drafter.load(args.checkpoint, target)
    print(json.dumps(report(target, drafter, prompts, args.tokens), indent=2))


if __name__ == "__main__":
    main()
