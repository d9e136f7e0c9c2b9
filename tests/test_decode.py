"""Speculative decoding of a tiny random pair: the target's own tokens, the target's own law."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from torch import Tensor

import fused_markov as fm
from fused_markov.pair import Drafter, DrafterConfig, Target, TargetConfig
from fused_markov.pair.decode import NO_TOKEN, Decoder

VOCAB, STEPS, PROMPT = 6, 3, [1, 4, 2]


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Drafter, fm.MarkovHead]:
    """A vocabulary so small that even an untrained drafter is right now and then."""
    torch.manual_seed(0)
    target = Target(
        TargetConfig(
            vocab_size=VOCAB,
            width=16,
            layers=3,
            heads=2,
            kv_heads=1,
            intermediate=24,
            max_positions=256,
            taps=(0, 1, 2),
        )
    )
    for p in target.parameters():
        p.data.normal_(std=0.4)
    config = DrafterConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=256,
        block_size=STEPS,
        markov_rank=4,
        mask_token_id=0,
        target_layer_ids=(0, 1, 2),
    )
    drafter = Drafter(config, target.embedding).requires_grad_(False)
    head = fm.MarkovHead(drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight)
    return target, drafter, head


def decode(
    pair: tuple[Target, Drafter, fm.MarkovHead], draft: bool, **options: object
) -> tuple[list[list[int]], list[Tensor]]:
    """All rows' tokens, and how many drafts stood in each round."""
    target, drafter, head = pair
    arguments = {"max_tokens": 40} | options
    decoder = Decoder(
        target, drafter if draft else None, head if draft else None, PROMPT, **arguments
    )
    rounds = [decoder.start()]
    while not bool(decoder.done.all()):
        rounds.append(decoder.round())
    tokens = torch.cat([r.tokens for r in rounds], 1)
    return [[t for t in row if t != NO_TOKEN] for row in tokens.tolist()], [
        r.accepted for r in rounds[1:]
    ]


def test_greedy_is_the_targets_own(pair) -> None:
    (alone,), none = decode(pair, False)
    (drafted,), accepted = decode(pair, True)
    assert drafted == alone
    assert len(alone) == 40
    assert all(int(a) == 0 for a in none)
    assert sum(int(a) for a in accepted) > 0  # otherwise the test has seen nothing
    assert len(accepted) < 39


def test_greedy_is_the_models_forward_without_a_cache(pair) -> None:
    target = pair[0]
    (tokens,), _ = decode(pair, True)
    ids = torch.tensor([PROMPT + tokens])
    logits = target.logits(target(ids).final)[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("engine", "rows"), [("reference", 5000), ("auto", 1000)])
def test_sampled_law_is_the_targets(pair, gated: bool, engine: str, rows: int) -> None:
    """Two samples of the first three tokens, drafted and not: chi-square of homogeneity."""
    counts = []
    for draft, first in ((True, 0), (False, rows)):
        seeds = torch.arange(first, first + rows)
        options = {"temperature": 1.0, "max_tokens": 3, "gated": gated, "engine": engine}
        tokens, _ = decode(pair, draft, seeds=seeds, **options)
        code = torch.tensor(tokens) @ torch.tensor([VOCAB**2, VOCAB, 1])
        counts.append(torch.bincount(code, minlength=VOCAB**3))
    table = torch.stack(counts)
    table = table[:, table.sum(0) >= 10]
    assert table.shape[1] > 10
    assert scipy.stats.chi2_contingency(table.numpy()).pvalue > 1e-6


def test_rows_are_decoded_alike_alone_and_together(pair) -> None:
    seeds = torch.arange(5) + 100
    together, _ = decode(pair, True, temperature=0.8, seeds=seeds, max_tokens=15)
    for row in range(5):
        alone, _ = decode(pair, True, temperature=0.8, seeds=seeds[row : row + 1], max_tokens=15)
        assert alone[0] == together[row]


@pytest.mark.parametrize("draft", [False, True])
def test_stops(pair, draft: bool) -> None:
    (tokens,), _ = decode(pair, draft)
    stop = tokens[7]
    cut = tokens[: tokens.index(stop) + 1]
    assert decode(pair, draft, stop=stop)[0] == [cut]
    for most in (1, 2, 5):
        assert decode(pair, draft, max_tokens=most)[0] == [tokens[:most]]


def test_bad_arguments_are_named(pair) -> None:
    target, drafter, head = pair
    with pytest.raises(fm.ArgumentError, match="prompt"):
        Decoder(target, drafter, head, [], max_tokens=3)
    with pytest.raises(fm.ArgumentError, match="temperature"):
        Decoder(target, drafter, head, PROMPT, max_tokens=3, temperature=-1.0)
    with pytest.raises(fm.ArgumentError, match="head"):
        Decoder(target, drafter, None, PROMPT, max_tokens=3)
