"""Faults that people met in samplers of this kind, each as a small input with its right value.

The values are stated or computed here by other means, never taken from the library's reference,
which is tested like the engines. Every engine has them, the kernels' on a GPU; the small ones run
in Triton's interpreter too (interpret/test_small_cases.py). Cases that need a GPU are where the
table says.

====  ==========================================================================================
case  test
====  ==========================================================================================
   1  test_case_01_offsets_past_2_to_the_31; interpret/test_offsets.py (the kernels' arithmetic);
      gpu/test_gpu.py test_offsets_past_2_to_the_31 (all of it)
   3  test_case_03_padding_leaves_other_slots
   4  test_case_04_padding_tokens_are_in_range
   5  test_case_05_padding_anchor_out_of_range
   7  test_case_07_padding_first_then_live; gpu/test_gpu.py test_graph_replay_with_new_contents
   9  test_case_09_padding_by_step
  10  test_case_10_error_names_both_shapes
  12  test_case_12_base_wider_than_vocabulary
  15  test_case_15_all_or_all_but_one_masked
  16  test_case_16_padded_candidates
  17  test_case_17_reduced_vocabulary
  19  test_case_19_offsets_of_a_reduced_vocabulary
  22  test_case_22_one_finite_logit_for_every_seed
  23  test_case_23_nan_weights_row, test_case_23_nan_base_row
  24  test_case_24_all_nan_is_flagged
  26  test_case_26_nan_never_wins
  28  test_case_28_draft_and_target_draws_differ
  32  test_case_32_equal_logits_are_uniform
  33  test_case_33_frequencies_are_the_softmax_of_the_cache
  34  test_case_34_temperature_1_is_not_greedy
  35  test_case_35_chain_of_previous_tokens
  36  test_case_36_mixed_temperatures
  37  test_case_37_global_generators_have_no_say
  38  test_case_38_seeds_decide
  40  test_case_40_masked_id
  43  test_case_43_cache_holds_logits_before_temperature
  44  test_case_44_argmax_of_the_cache_is_the_token
  46  test_case_46_ties_far_apart
  47  test_case_47_steps_do_not_mix
  49  test_case_49_ties_across_vocabulary_shards, test_case_49_replicated_heads_agree
  51  test_case_51_dtypes_of_logits_and_tokens
  52  test_case_52_vocabulary_sizes
  54  test_case_54_packed_weights_are_refused, test_case_54_fp8_weights
  56  test_case_56_many_ties; gpu/test_gpu.py test_equals_the_reference (every configuration's
      warps and stages), interpret/test_kernels.py test_configurations_agree (one stage),
      compile/test_compile.py test_compiles (every configuration, by architecture)
  57  test_case_57_seeds_give_different_tokens
  58  test_vllm_plugin.py: test_loading_twice_wraps_once, test_worker_processes (fork, spawn),
      test_refuses_with_the_reason
====  ==========================================================================================
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from fused_markov import ArgumentError, DraftBatch, DraftResult, DraftSampler, MarkovHead, noise
from fused_markov.engines import engine_types
from fused_markov.problems import CACHE_POISON, TOKEN_POISON
from test_engines import DEVICES, INTERPRETING, as_parameters, assert_same_bits, device_of

every_engine = pytest.mark.parametrize("engine", as_parameters(list(engine_types())))
greedy_and_not = pytest.mark.parametrize("temperature", [None, 1.0], ids=["T=0", "T=1"])

RANK = 16
MANY_ROWS = 2048


# Heads


def zero_head(vocab: int, engine: str, dtype: torch.dtype = torch.float32) -> MarkovHead:
    weights = torch.zeros(vocab, RANK, dtype=dtype, device=device_of(engine))
    return MarkovHead(weights, weights)


def successor_head(vocab: int, engine: str) -> MarkovHead:
    """+50 for the token one above the previous one, the first after the last; at most 16 tokens."""
    w1 = torch.eye(vocab, RANK, device=device_of(engine))
    return MarkovHead(w1, 50 * w1.roll(1, dims=0))


def whole_head(
    vocab: int, engine: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> MarkovHead:
    """Random weights that are small whole numbers: every sum is exact, in any order and dtype."""
    gen = torch.Generator().manual_seed(seed)
    w1, w2 = (torch.randint(-1, 2, (vocab, RANK), generator=gen).to(dtype) for _ in range(2))
    return MarkovHead(w1.to(device_of(engine)), w2.to(device_of(engine)))


def whole_logits(*shape: int, seed: int = 1, high: int = 20) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high, shape, generator=gen).float()


# Drafting


def new_cache(
    slots: int, steps: int, vocab: int, engine: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.full((slots, steps, vocab), CACHE_POISON, dtype=dtype, device=device_of(engine))


def batch_of(
    base: Tensor,
    *,
    anchors: object = None,
    positions: object = None,
    temperature: object = None,
    seeds: object = None,
    slots: object = None,
) -> DraftBatch:
    """A batch on the base's device of whatever `torch.as_tensor` takes.

    Previous tokens are 0 and positions count from 10 where not given; one number as temperature
    is every row's, and seeds then count from 0.
    """
    rows, steps, _ = base.shape
    if anchors is None:
        anchors = [0] * rows
    if positions is None:
        positions = torch.arange(10, 10 + steps).expand(rows, steps)
    if isinstance(temperature, float):
        temperature = [temperature] * rows
    if isinstance(temperature, list) and seeds is None:
        seeds = range(len(temperature))

    def tensor(x: object) -> Tensor | None:
        if x is None:
            return None
        return torch.as_tensor(list(x) if isinstance(x, range) else x, device=base.device)

    fixed = tensor(anchors), tensor(positions)
    assert fixed[0] is not None
    assert fixed[1] is not None
    return DraftBatch(base, *fixed, tensor(temperature), tensor(seeds), tensor(slots))


def draft(
    engine: str,
    head: MarkovHead,
    base: Tensor,
    cache: Tensor | None = None,
    tokens: Tensor | None = None,
    **inputs: object,
) -> DraftResult:
    """Drafts of `batch_of`'s inputs."""
    rows, steps, _ = base.shape
    sampler = DraftSampler(head, max_rows=rows, steps=steps, engine=engine)
    return sampler.sample(batch_of(base.to(head.device), **inputs), cache, tokens)


@functools.cache
def draws(
    engine: str, logits: tuple[float, ...], seeds: int, temperature: float = 1.0, steps: int = 1
) -> Tensor:
    """One token a seed and step, of the same logits and no bias."""
    head = zero_head(len(logits), engine)
    row = torch.tensor(logits, device=head.device)
    sampler = DraftSampler(head, max_rows=MANY_ROWS, steps=steps, engine=engine)
    found = []
    for low in range(0, seeds, MANY_ROWS):
        rows = range(low, min(low + MANY_ROWS, seeds))
        base = row.expand(len(rows), steps, -1)
        batch = batch_of(base, temperature=temperature, seeds=rows)
        found.append(sampler.sample(batch).tokens.cpu())
    return torch.cat(found).flatten()


def assert_distributed(tokens: Tensor, probabilities: Tensor) -> None:
    """By chi-square. The seeds fix what is drawn, so that no run fails by chance: the threshold is
    one in 10**9, which 50,000 draws from a law that is off by a tenth exceed by far.
    """
    counts = tokens.bincount(minlength=probabilities.shape[0]).double()
    assert counts.shape == probabilities.shape
    expected = probabilities.double() * tokens.numel()
    assert float(expected.min()) > 5
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < chi2.isf(1e-9, counts.numel() - 1), counts.tolist()


def some(count: int) -> int:
    """As many rows, or a few where every program is interpreted."""
    return 2 if INTERPRETING else count


def lowest_best(scores: Tensor) -> int:
    return int((scores == scores.max()).nonzero()[0])


def plain_chain(head: MarkovHead, batch: DraftBatch) -> list[list[int]]:
    """The tokens by definition, one after another; row i is slot i, logits are exact in fp32."""
    chains = []
    w1, w2 = head.w1.float(), head.w2.float()
    ids = torch.arange(head.vocab_size, device=head.device)
    for row in range(batch.rows):
        prev, chain = int(batch.anchors[row]), []
        for step in range(batch.steps):
            scores = batch.base_logits[row, step].float() + (w2 * w1[prev]).sum(dim=1)
            if batch.temperature is not None and batch.seeds is not None:
                position = batch.positions[row, step]
                gumbel = noise.gumbel(batch.seeds[row], step, position, ids)
                scores = scores / batch.temperature[row] + gumbel
            prev = lowest_best(scores)
            chain.append(prev)
        chains.append(chain)
    return chains


# Padding, indices, graphs


def on_disk(path: Path, *shape: int) -> Tensor:
    """bf16 zeros that take no memory until they are touched: a file of holes."""
    size = 1
    for n in shape:
        size *= n
    home = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    path.unlink()
    return home.view(shape)


@pytest.mark.parametrize("engine", DEVICES)
def test_case_01_offsets_past_2_to_the_31(engine: str, tmp_path: Path) -> None:
    """The first and the last of 964 rows, and of as many slots; the others are not touched."""
    rows, steps, vocab = 964, 16, 151936
    assert rows * steps * vocab > 2**31
    base, cache = (on_disk(tmp_path / name, rows, steps, vocab) for name in ("base", "cache"))
    base[-1, -1, 151000] = base[-1, 0, 77] = base[0, 0, 5] = 1.0
    some = base[:: rows - 1]
    assert some.stride(0) > 2**31
    result = draft(
        engine, zero_head(vocab, engine, torch.bfloat16), some, cache, slots=[0, rows - 1]
    )
    assert result.tokens.tolist() == [[5] + 15 * [0], [77] + 14 * [0] + [151000]]
    assert torch.equal(cache[:: rows - 1], some)


@every_engine
@greedy_and_not
def test_case_03_padding_leaves_other_slots(engine: str, temperature: float | None) -> None:
    base = whole_logits(8, 3, 50).to(device_of(engine))
    cache = new_cache(4, 3, 50, engine)
    temperatures = None if temperature is None else [temperature] * 4
    slots = [2, 0, -1, -1, -1, -1, -1, -1]
    draft(engine, zero_head(50, engine), base, cache, temperature=temperatures, slots=slots)
    assert bool((cache[[1, 3]] == CACHE_POISON).all())
    assert torch.equal(cache[[2, 0]], base[:2])


@every_engine
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_case_04_padding_tokens_are_in_range(engine: str, dtype: torch.dtype) -> None:
    base = whole_logits(4, 3, 50)
    tokens = torch.full((4, 3), TOKEN_POISON, dtype=dtype, device=device_of(engine))
    draft(engine, zero_head(50, engine), base, None, tokens, slots=[1, -1, 0, -1])
    expected = [[lowest_best(logits) for logits in row] for row in base]
    expected[1] = expected[3] = [0, 0, 0]
    assert tokens.tolist() == expected


@every_engine
@greedy_and_not
@pytest.mark.parametrize("anchor", [-1, 16, TOKEN_POISON])
def test_case_05_padding_anchor_out_of_range(
    engine: str, temperature: float | None, anchor: int
) -> None:
    inputs = {"anchors": [anchor, 5], "slots": [-1, 0], "temperature": temperature}
    result = draft(engine, successor_head(16, engine), torch.zeros(2, 3, 16), **inputs)
    assert result.tokens.tolist() == [[0, 0, 0], [6, 7, 8]]
    assert not bool(result.nonfinite.any())


@every_engine
def test_case_07_padding_first_then_live(engine: str) -> None:
    """One sampler, the same tensors: only their contents change, as between replays of a graph."""
    head = successor_head(16, engine)
    base = torch.full((1, 3, 16), 1.0, device=head.device)
    batch = batch_of(base, anchors=[9], slots=[-1], temperature=[0.0] * 4)
    cache, tokens = new_cache(4, 3, 16, engine), torch.full((1, 3), -7, device=head.device)
    sampler = DraftSampler(head, max_rows=1, steps=3, engine=engine)
    sampler.warmup(batch, cache, tokens)
    assert bool((cache == CACHE_POISON).all())
    assert bool((tokens == -7).all())
    sampler.sample(batch, cache, tokens)
    assert bool((cache == CACHE_POISON).all())
    assert tokens.tolist() == [[0, 0, 0]]
    assert batch.slots is not None
    batch.slots.fill_(3)
    sampler.sample(batch, cache, tokens)
    assert tokens.tolist() == [[10, 11, 12]]
    expected = torch.ones(3, 16)
    expected[[0, 1, 2], [10, 11, 12]] = 51.0
    assert torch.equal(cache[3].cpu(), expected)
    assert bool((cache[:3] == CACHE_POISON).all())


@every_engine
@greedy_and_not
def test_case_09_padding_by_step(engine: str, temperature: float | None) -> None:
    base = torch.zeros(2, 4, 16)
    cache = new_cache(2, 4, 16, engine)
    slots = [[1, 1, -1, -1], [0, 0, 0, 0]]
    inputs = {"anchors": [3, 3], "slots": slots, "temperature": temperature}
    result = draft(engine, successor_head(16, engine), base, cache, **inputs)
    assert result.tokens.tolist() == [[4, 5, 0, 0], [4, 5, 6, 7]]
    assert bool((cache[1, 2:] == CACHE_POISON).all())
    assert torch.equal(cache[1, :2], cache[0, :2])
    assert bool((cache[0] != CACHE_POISON).all())


@every_engine
def test_case_10_error_names_both_shapes(engine: str) -> None:
    with pytest.raises(ArgumentError, match=r"positions.*\[2, 8\].*\[2, 8, 64\].*\[2, 7\]"):
        draft(
            engine,
            zero_head(64, engine),
            torch.zeros(2, 8, 64),
            positions=torch.zeros(2, 7, dtype=torch.int64),
        )


# Vocabulary width


@every_engine
@pytest.mark.parametrize("beyond", [1e4, torch.inf, torch.nan], ids=str)
def test_case_12_base_wider_than_vocabulary(engine: str, beyond: float) -> None:
    weights = torch.zeros(64, RANK, device=device_of(engine))
    head = MarkovHead(weights, weights, vocab_size=60)
    base = whole_logits(some(20), 3, 64)
    base[..., 62] = beyond
    cache = new_cache(some(20), 3, 64, engine)
    result = draft(engine, head, base, cache)
    assert result.tokens.tolist() == [[lowest_best(x[:60]) for x in row] for row in base]
    assert not bool(result.nonfinite.any())
    assert torch.equal(cache[..., :60].cpu(), base[..., :60])
    assert bool((cache[..., 60:] == -torch.inf).all())
    assert int(draft(engine, head, base * 0.01, temperature=1.0).tokens.max()) < 60


@every_engine
@greedy_and_not
@pytest.mark.parametrize("vocab", [8193, 10000, 151936])
def test_case_15_all_or_all_but_one_masked(
    engine: str, vocab: int, temperature: float | None
) -> None:
    head = zero_head(vocab, engine, torch.bfloat16)
    base = torch.full((4, 1, vocab), -torch.inf, dtype=torch.bfloat16)
    base[1, 0, 0] = base[2, 0, 8192] = base[3, 0, vocab - 1] = -3.0
    result = draft(engine, head, base, temperature=temperature)
    assert result.tokens.tolist() == [[0], [0], [8192], [vocab - 1]]
    assert result.nonfinite.tolist() == [[True], [False], [False], [False]]


@every_engine
def test_case_16_padded_candidates(engine: str) -> None:
    """w2 and the base are padded to 64 rows, the target vocabulary is 60."""
    device = device_of(engine)
    head = MarkovHead(torch.zeros(60, RANK, device=device), torch.ones(64, RANK, device=device))
    assert head.draft_vocab == 60
    base = torch.zeros(60, 1, 64)
    base[..., 60:] = 1e4
    base[range(60), 0, range(60)] = 100.0
    for temperature in (None, 1.0):
        tokens = draft(engine, head, base, temperature=temperature).tokens
        assert tokens.flatten().tolist() == list(range(60))
    flat = torch.zeros(64)
    flat[60:] = 1e4
    tokens = draft(engine, head, flat.expand(500, 2, 64), temperature=1.0).tokens
    assert set(tokens.flatten().tolist()) == set(range(60))


IDS = (3, 7, 11, 15)


def reduced_head(engine: str, **options: Tensor) -> MarkovHead:
    device = device_of(engine)
    weights = torch.zeros(16, RANK, device=device), torch.zeros(4, RANK, device=device)
    return MarkovHead(*weights, **options)


@every_engine
def test_case_17_reduced_vocabulary(engine: str) -> None:
    ids = torch.tensor(IDS)
    head = reduced_head(engine, id_map=ids)
    rows = 500
    logits = torch.tensor([2, 1.5, 1, 0.5])
    base = logits.expand(rows, 1, 4)
    cache = new_cache(rows, 1, 16, engine)
    tokens = draft(engine, head, base, cache, temperature=1.0).tokens.cpu()
    assert set(tokens.flatten().tolist()) == set(IDS)
    seeds = torch.arange(rows).unsqueeze(1)
    for keys, same in ((ids, True), (torch.arange(4), False)):  # noise by target id, by candidate
        scores = logits + noise.gumbel(seeds, 0, torch.tensor(10), keys)
        assert torch.equal(ids[scores.argmax(dim=1)], tokens[:, 0]) == same
    assert torch.equal(cache[:, :, ids].cpu(), base)
    others = [i for i in range(16) if i not in IDS]
    assert bool((cache[:, :, others] == -torch.inf).all())


@every_engine
def test_case_19_offsets_of_a_reduced_vocabulary(engine: str) -> None:
    with pytest.raises(ArgumentError, match=r"w2.*16 rows.*4 rows.*id_map.*d2t"):
        reduced_head(engine)
    head = reduced_head(engine, d2t=torch.tensor([3, 6, 9, 12]))
    base = torch.eye(4).unsqueeze(1)
    assert draft(engine, head, base).tokens.flatten().tolist() == list(IDS)


# Non-finite values


@every_engine
def test_case_22_one_finite_logit_for_every_seed(engine: str) -> None:
    """All 100,000 seeds on a GPU; on the CPU some, and every seed's noise of that id."""
    vocab, only = 163840, 8191
    logits = tuple(-3.0 if i == only else -torch.inf for i in range(vocab))
    seeds = {"reference": 64, "cpu": 4096}.get(engine, 100_000)
    assert bool((draws(engine, logits, seeds) == only).all())
    gumbel = noise.gumbel(torch.arange(100_000), 0, torch.tensor(10), torch.tensor(only))
    assert bool(gumbel.isfinite().all())


@every_engine
@greedy_and_not
def test_case_23_nan_weights_row(engine: str, temperature: float | None) -> None:
    """Id 3 is never drafted, whatever comes before it."""
    head = successor_head(16, engine)
    head.w2[3] = torch.nan
    rows = some(200)
    base = torch.zeros(rows, 5, 16)
    base[..., 0] = 25.0  # stands in for the 3 that would follow 2
    inputs = {"anchors": [1] * rows, "temperature": temperature}
    result = draft(engine, head, base, **inputs)
    assert bool((result.tokens.cpu() == torch.tensor([2, 0, 1, 2, 0])).all())
    assert not bool(result.nonfinite.any())


@every_engine
@greedy_and_not
def test_case_23_nan_base_row(engine: str, temperature: float | None) -> None:
    """An in-range token, flagged, and the chain goes on from it."""
    base = torch.zeros(2, 4, 16)
    base[0, 1] = torch.nan
    inputs = {"anchors": [7, 7], "temperature": temperature}
    result = draft(engine, successor_head(16, engine), base, **inputs)
    assert result.tokens.tolist() == [[8, 0, 1, 2], [8, 9, 10, 11]]
    assert result.nonfinite.tolist() == [[False, True, False, False], [False] * 4]


@every_engine
@greedy_and_not
def test_case_24_all_nan_is_flagged(engine: str, temperature: float | None) -> None:
    base = torch.full((2, 2, 20000), torch.nan)
    result = draft(engine, zero_head(20000, engine), base, temperature=temperature)
    assert result.tokens.tolist() == [[0, 0], [0, 0]]
    assert bool(result.nonfinite.all())


@every_engine
@greedy_and_not
def test_case_26_nan_never_wins(engine: str, temperature: float | None) -> None:
    base = torch.full((1000, 2, 16), -20.0)
    base[..., 3] = torch.nan
    result = draft(engine, zero_head(16, engine), base, temperature=temperature)
    found = set(result.tokens.flatten().tolist())
    assert found == ({0} if temperature is None else set(range(16)) - {3})
    assert not bool(result.nonfinite.any())


# Randomness and distribution


@every_engine
@pytest.mark.parametrize("start", [77, 2**30 - 1])
def test_case_28_draft_and_target_draws_differ(engine: str, start: int) -> None:
    """By chance one in 64 agrees, at each of three positions: 2**30 - 1 and 2**30 among them."""
    seeds, vocab = torch.arange(4096), 64
    positions = torch.arange(start, start + 3).expand(4096, 3)
    base = torch.zeros(1, 1, vocab).expand(4096, 3, vocab)
    inputs = {"temperature": 1.0, "seeds": seeds}
    head = zero_head(vocab, engine)
    tokens = draft(engine, head, base, positions=positions, **inputs).tokens.cpu()
    # The target hashes the position before the token's without the drafts' salt, at step 0.
    unsalted = (positions - noise.DRAFT_SALT).unsqueeze(2)
    gumbel = noise.gumbel(seeds.view(-1, 1, 1), 0, unsalted, torch.arange(vocab))
    for step in range(3):
        assert_distributed(tokens[:, step], torch.full((vocab,), 1 / vocab))
        for other in (gumbel.argmax(dim=2)[:, step], tokens[:, step - 1]):
            assert abs(int((tokens[:, step] == other).sum()) - 64) < 6 * 8
    small = draft(engine, head, base, positions=positions.to(torch.int32), **inputs).tokens
    assert torch.equal(small.cpu(), tokens)


@every_engine
def test_case_32_equal_logits_are_uniform(engine: str) -> None:
    tokens = draws(engine, (-7.0,) * 64, 16_000, steps=4)
    assert_distributed(tokens, torch.full((64,), 1 / 64))


LOGITS = (2.0, 1.5, 1.0, 0.5)


@every_engine
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_case_33_frequencies_are_the_softmax_of_the_cache(engine: str, temperature: float) -> None:
    cache = new_cache(1, 1, 4, engine)
    base = torch.tensor(LOGITS).view(1, 1, 4)
    draft(engine, zero_head(4, engine), base, cache, temperature=temperature)
    tokens = draws(engine, LOGITS, 50_000, temperature)
    assert_distributed(tokens, (cache[0, 0].cpu().double() / temperature).softmax(dim=0))


@every_engine
def test_case_34_temperature_1_is_not_greedy(engine: str) -> None:
    share = float((draws(engine, LOGITS, 50_000, 1.0) == 0).double().mean())
    assert share == pytest.approx(0.455, abs=6 * (0.455 * 0.545 / 50_000) ** 0.5)


@every_engine
@greedy_and_not
def test_case_35_chain_of_previous_tokens(engine: str, temperature: float | None) -> None:
    head = successor_head(4, engine)
    result = draft(engine, head, torch.zeros(50, 9, 4), temperature=temperature)
    assert bool((result.tokens.cpu() == torch.tensor([1, 2, 3, 0, 1, 2, 3, 0, 1])).all())


@every_engine
def test_case_36_mixed_temperatures(engine: str) -> None:
    head = whole_head(1000, engine)
    base = whole_logits(1, 1, 1000, high=3).expand(2, 4, 1000).to(head.device)
    greedy = plain_chain(head, batch_of(base[:1], anchors=[8]))
    drafts = set()
    for seed in range(30):
        both = {"temperature": [0.0, 1.0], "seeds": [seed, seed + 100]}
        cache, own = new_cache(2, 4, 1000, engine), new_cache(2, 4, 1000, engine)
        together = draft(engine, head, base, cache, anchors=[8, 8], **both).tokens
        solo = draft(engine, head, base[1:], own, anchors=[8], slots=[1], **both).tokens
        assert together[:1].tolist() == greedy
        assert torch.equal(together[1:], solo)
        assert_same_bits(cache[1], own[1], "cache")
        drafts.add(tuple(solo[0].tolist()))
    assert len(drafts) > 25


def global_state() -> tuple[Tensor, object, bytes]:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tobytes()


@every_engine
def test_case_37_global_generators_have_no_say(engine: str) -> None:
    head = whole_head(1000, engine)
    base = whole_logits(3, 4, 1000, high=3)

    def sample() -> list[list[int]]:
        tokens: list[list[int]] = draft(engine, head, base, temperature=1.0).tokens.tolist()
        return tokens

    before = global_state()
    first = sample()
    after = global_state()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(99)  # CUDA's generators too
    random.seed(99)
    numpy.random.seed(99)
    assert sample() == first
    torch.rand(1000, device=head.device)
    random.random()
    numpy.random.rand()
    assert sample() == first


@every_engine
@pytest.mark.parametrize("shift", [0, 32])
def test_case_38_seeds_decide(engine: str, shift: int) -> None:
    """Rows by pairs of one seed; between seeds, in either word, one token in 1000 agrees."""
    seeds = (torch.arange(200) << shift).repeat_interleave(2)
    base = torch.zeros(400, 1, 1000)
    result = draft(engine, zero_head(1000, engine), base, temperature=1.0, seeds=seeds)
    pairs = result.tokens.view(200, 2)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    assert int((pairs[1:, 0] == pairs[:-1, 0]).sum()) < 10


@every_engine
@greedy_and_not
def test_case_40_masked_id(engine: str, temperature: float | None) -> None:
    """Where the bias asks for it, too: every row's chain comes to 2."""
    rows = some(500)
    base = torch.zeros(rows, 4, 16)
    base[..., 2] = -torch.inf
    cache = new_cache(rows, 4, 16, engine)
    inputs = {"anchors": [0] * rows, "temperature": temperature}
    tokens = draft(engine, successor_head(16, engine), base, cache, **inputs).tokens
    assert bool((tokens[:, 0] == 1).all())
    assert not bool((tokens == 2).any())
    assert bool((cache[..., 2] == -torch.inf).all())
    assert bool(cache[..., [0, 1, *range(3, 16)]].isfinite().all())


# Numerics, layout, weights


@every_engine
def test_case_43_cache_holds_logits_before_temperature(engine: str) -> None:
    gen = torch.Generator().manual_seed(0)
    base = (torch.randn(5, 3, 3000, generator=gen) * 5).bfloat16().to(device_of(engine))
    cache = new_cache(5, 3, 3000, engine, torch.bfloat16)
    draft(engine, zero_head(3000, engine, torch.bfloat16), base, cache, temperature=0.7)
    assert_same_bits(cache, base, "cache")


@every_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_44_argmax_of_the_cache_is_the_token(engine: str, dtype: torch.dtype) -> None:
    """A base and a bias that say equally much."""
    gen = torch.Generator().manual_seed(0)
    w1 = torch.randn(3000, 256, generator=gen)
    w2 = torch.randn(3000, 256, generator=gen) / 16
    head = MarkovHead(w1.to(device_of(engine), dtype), w2.to(device_of(engine), dtype))
    base = torch.randn(40, 5, 3000, generator=gen).to(dtype)
    cache = new_cache(40, 5, 3000, engine, dtype)
    tokens = draft(engine, head, base, cache, anchors=range(40)).tokens
    best = (cache == cache.amax(dim=2, keepdim=True)).cpu()
    assert torch.equal(best.int().argmax(dim=2), tokens.cpu())  # the first of equals


@every_engine
def test_case_46_ties_far_apart(engine: str) -> None:
    head = zero_head(151936, engine, torch.bfloat16)
    base = torch.zeros(2, 2, 151936, dtype=torch.bfloat16)
    base[0, :, [7, 150000]] = 1.0
    assert draft(engine, head, base).tokens.tolist() == [[7, 7], [0, 0]]


@every_engine
def test_case_47_steps_do_not_mix(engine: str) -> None:
    base = torch.zeros(1, 3, 16)
    base[0, [0, 1, 2], [1, 2, 3]] = 10.0
    assert draft(engine, zero_head(16, engine), base).tokens.tolist() == [[1, 2, 3]]
    w1, w2 = (torch.zeros(16, RANK, device=device_of(engine)) for _ in range(2))
    w1[9, 0], w2[5, 0] = 1.0, 100.0  # after 9 comes 5
    head = MarkovHead(w1, w2)
    assert draft(engine, head, base, anchors=[9]).tokens.tolist() == [[5, 2, 3]]
    assert draft(engine, head, base, anchors=[8]).tokens.tolist() == [[1, 2, 3]]


@every_engine
def test_case_49_ties_across_vocabulary_shards(engine: str) -> None:
    """Best of four quarters of the vocabulary, by score and then by the lowest id."""
    head = whole_head(64, engine)
    base = whole_logits(6, 4, 64).to(head.device)
    base[:, 0, [20, 50]] = 90.0  # above any bias
    head.w2[50] = head.w2[20]
    shards = [torch.arange(low, low + 16, device=head.device) for low in range(0, 64, 16)]
    quarters = [MarkovHead(head.w1, head.w2[ids], id_map=ids) for ids in shards]
    prev, chains, tied = torch.arange(6, device=head.device), [], 0
    for step in range(4):
        found: list[list[tuple[float, int]]] = [[] for _ in range(6)]
        for ids, quarter in zip(shards, quarters, strict=True):
            cache = new_cache(6, 1, 16, engine)
            part = base[:, step : step + 1, ids]
            tokens = draft(engine, quarter, part, cache, anchors=prev).tokens[:, 0]
            scores = cache[range(6), 0, tokens - ids[0]]
            for row, (score, token) in enumerate(
                zip(scores.tolist(), tokens.tolist(), strict=True)
            ):
                found[row].append((-score, token))
        merged = [min(best) for best in found]
        tied += sum(
            [score for score, _ in best].count(least) > 1
            for best, (least, _) in zip(found, merged, strict=True)
        )
        prev = torch.tensor([token for _, token in merged], device=head.device)
        chains.append(prev)
    assert chains[0].tolist() == [20] * 6
    assert tied >= 6
    whole = draft(engine, head, base, anchors=range(6))
    assert torch.equal(torch.stack(chains, dim=1), whole.tokens)
    assert whole.tokens.tolist() == plain_chain(head, batch_of(base, anchors=range(6)))


@every_engine
def test_case_49_replicated_heads_agree(engine: str) -> None:
    """Four ranks with weights and samplers of their own."""
    base = whole_logits(6, 4, 64, high=3)
    inputs = {"temperature": [0.0, 1.0, 0.7, 0.0, 1.0, 2.0], "anchors": range(6)}
    ranks = [draft(engine, whole_head(64, engine), base, **inputs).tokens for _ in range(4)]
    assert all(torch.equal(tokens, ranks[0]) for tokens in ranks)


@every_engine
@pytest.mark.parametrize("weights", ["as the base", "bf16"])
def test_case_51_dtypes_of_logits_and_tokens(engine: str, weights: str) -> None:
    logits = whole_logits(5, 4, 300)
    expected = plain_chain(
        whole_head(300, engine), batch_of(logits.to(device_of(engine)), anchors=range(5))
    )
    assert len({token for chain in expected for token in chain}) > 10
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        head = whole_head(300, engine, torch.bfloat16 if weights == "bf16" else dtype)
        for index in (torch.int32, torch.int64):
            tokens = torch.full((5, 4), -7, dtype=index, device=head.device)
            anchors = torch.arange(5, dtype=index)
            draft(engine, head, logits.to(dtype), None, tokens, anchors=anchors)
            assert tokens.tolist() == expected


@every_engine
@greedy_and_not
@pytest.mark.parametrize("vocab", [1, 2047, 2048, 2049, 151936, 248320])
def test_case_52_vocabulary_sizes(engine: str, vocab: int, temperature: float | None) -> None:
    head = whole_head(vocab, engine, torch.bfloat16)
    base = whole_logits(2, 3, vocab, high=6).bfloat16().to(head.device)
    # Both ends of the vocabulary have their turn.
    base[0, 0, 0] = base[0, 1, vocab - 1] = base[1, 2, max(0, vocab - 2)] = 100.0
    inputs = {"anchors": [0, vocab - 1], "temperature": temperature}
    expected = plain_chain(head, batch_of(base, **inputs))
    assert expected[0][:2] == [0, vocab - 1]
    assert expected[1][2] == max(0, vocab - 2)
    assert draft(engine, head, base, **inputs).tokens.tolist() == expected


def test_case_54_packed_weights_are_refused() -> None:
    """Without their scales."""
    w1, packed = torch.zeros(64, RANK), torch.zeros(64, RANK // 2, dtype=torch.uint8)
    supported = r"w2.*fp32, bf16 or fp16.*fp8 e4m3.*int8.*NVFP4.*uint8 without w2_scale"
    with pytest.raises(ArgumentError, match=supported):
        MarkovHead(w1, packed)
    scales = torch.ones(64, RANK // 16).to(torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match=r"w2.*NVFP4.*uint8 without w2_global_scale"):
        MarkovHead(w1, packed, w2_scale=scales)
    with pytest.raises(ArgumentError, match=r"w1.*fp32, bf16 or fp16.*uint8.*dequantize"):
        MarkovHead(packed, packed)


@every_engine
@greedy_and_not
def test_case_54_fp8_weights(engine: str, temperature: float | None) -> None:
    head = whole_head(300, engine, torch.bfloat16)
    scales = (2.0 ** (torch.arange(300) % 4 - 2)).to(head.device)  # a row's products stay exact
    fp8 = MarkovHead(head.w1, head.w2.to(torch.float8_e4m3fn), w2_scale=scales)
    dequantized = MarkovHead(head.w1, (head.w2 * scales.unsqueeze(1)).bfloat16())
    base = whole_logits(5, 4, 300, high=6).bfloat16().to(head.device)
    inputs = {"anchors": range(5), "temperature": temperature}
    caches = [new_cache(5, 4, 300, engine, torch.bfloat16) for _ in range(2)]
    tokens = draft(engine, fp8, base, caches[0], **inputs).tokens
    assert tokens.tolist() == plain_chain(dequantized, batch_of(base, **inputs))
    draft(engine, dequantized, base, caches[1], **inputs)
    assert_same_bits(caches[0], caches[1], "cache")
    assert tokens.tolist() != plain_chain(head, batch_of(base, **inputs))


# Platform and loading


@every_engine
def test_case_56_many_ties(engine: str) -> None:
    logits = torch.randint(8, (1028, 1028), generator=torch.Generator().manual_seed(0)).float()
    tokens = draft(engine, zero_head(1028, engine), logits.unsqueeze(1)).tokens
    assert tokens.flatten().tolist() == [lowest_best(row) for row in logits]


@every_engine
def test_case_57_seeds_give_different_tokens(engine: str) -> None:
    """Or an error, where there are no seeds."""
    assert len(set(draws(engine, (1.0, *[0.0] * 63), 1000).tolist())) > 60
    base = torch.zeros(1, 1, 64, device=device_of(engine))
    index = torch.zeros(1, 1, dtype=torch.int64, device=base.device)
    batch = DraftBatch(base, index[0], index, torch.ones(1, device=base.device))
    with pytest.raises(ArgumentError, match="seeds"):
        DraftSampler(zero_head(64, engine), max_rows=1, steps=1, engine=engine).sample(batch)
