"""Variant and confidence heads: the published modules, the engines, laws, checkpoints, errors."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fused_markov as fm
from fused_markov import reference
from fused_markov.checkpoint import load_markov_head
from fused_markov.pair.rejection import verify
from fused_markov.problem_heads import with_heads
from fused_markov.problems import Problem, make_problem
from fused_markov.successors import find_successors

VARIANTS = ("gated", "rnn")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEVER = 1e-6  # a right sampler falls below this once in a million seeds


class Published(nn.Module):
    """A plain restatement of the published modules, one row at a time, greedy."""

    def __init__(self, head: fm.MarkovHead) -> None:
        super().__init__()
        variant, dtype = head.variant, head.dtype
        vocab, rank = head.w1.shape
        self.w1 = nn.Embedding(vocab, rank, dtype=dtype)
        self.w2 = nn.Linear(rank, vocab, bias=False, dtype=dtype)
        self.w1.weight.data, self.w2.weight.data = head.w1, head.w2
        self.kind = "vanilla" if variant is None else variant.kind
        if variant is None:
            return
        columns = [variant.hidden_weight, variant.mix_weight]
        weight = torch.cat(columns if self.kind == "gated" else columns[::-1], dim=1)
        self.layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=dtype)
        self.layer.weight.data, self.layer.bias.data = weight, variant.bias

    @torch.no_grad()
    def forward(self, base: Tensor, anchor: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy tokens ``[S]`` and logits ``[S, V]`` for ``[S, V]``, ``[]`` and ``[S, H]``."""
        prev, state, tokens, logits = anchor, torch.zeros_like(self.w1.weight[0]), [], []
        for step in range(len(base)):
            e, h = self.w1(prev), hidden[step]
            if self.kind == "gated":
                e = torch.sigmoid(self.layer(torch.cat([h, e]))) * e
            elif self.kind == "rnn":
                gate, candidate, out = self.layer(torch.cat([state, e, h])).chunk(3)
                gate = torch.sigmoid(gate)
                state = gate * state + (1.0 - gate) * torch.tanh(candidate)
                e = torch.tanh(out)
            logits.append(base[step] + self.w2(e))
            prev = logits[-1].argmax()
            tokens.append(prev)
        return torch.stack(tokens), torch.stack(logits)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_is_the_published_module(variant: str, dtype: torch.dtype, exact: bool) -> None:
    problem = make_problem(4, 6, 300, 32, dtype=dtype, temperature="greedy", exact_sums=True)
    problem = with_heads(problem, variant=variant, exact=exact)
    batch, module = problem.batch, Published(problem.head)
    assert batch.hidden is not None
    cache = problem.new_cache()
    got = reference.sample(problem.head, batch, cache)
    for row in range(batch.rows):
        chain = (batch.base_logits[row], batch.anchors[row], batch.hidden[row])
        tokens, logits = module(*chain)
        if exact:
            assert torch.equal(got.tokens[row], tokens)
            assert torch.equal(cache[row], logits)
        else:
            # The layer's sum has another order, and the two chains may part where logits all but
            # tie: only what was computed before that is comparable.
            same = int((got.tokens[row] == tokens).long().cumprod(0).sum())
            assert same >= 3
            eps = 4 * torch.finfo(dtype).eps
            same = min(same + 1, batch.steps)
            torch.testing.assert_close(cache[row, :same], logits[:same], rtol=eps, atol=8 * eps)


def test_an_open_gate_is_the_vanilla_head() -> None:
    problem = make_problem(3, 4, 200, 16, temperature="mixed")
    want = reference.sample(problem.head, problem.batch)
    weight, bias = torch.zeros(16, 40, dtype=torch.bfloat16), torch.full((16,), 99.0).bfloat16()
    head = fm.MarkovHead(problem.head.w1, problem.head.w2, variant=fm.GatedVariant(weight, bias))
    batch = replace(problem.batch, hidden=torch.randn(3, 4, 24))
    assert torch.equal(reference.sample(head, batch).tokens, want.tokens)


def test_the_rnn_remembers_more_than_the_last_token() -> None:
    """Two rows with the same token before a step, but another before that."""
    variant = with_heads(make_problem(1, 1, 9, 16), variant="rnn", exact=True).head.variant
    assert variant is not None
    embed = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).round().bfloat16()
    context = variant.context(torch.ones(2, 24))
    state = torch.zeros(2, 16, dtype=torch.bfloat16)
    _, state = variant.embed(embed[:2], context, state)
    second, _ = variant.embed(embed[2:].expand(2, -1), context, state)
    assert not torch.equal(second[0], second[1])


def run(problem: Problem, engine: str) -> tuple[fm.DraftResult, Tensor]:
    cache, batch = problem.new_cache(), problem.batch
    sampler = fm.DraftSampler(problem.head, max_rows=batch.rows, steps=batch.steps, engine=engine)
    return sampler.sample(batch, cache, problem.new_tokens()), cache


def drafted(problem: Problem, result: fm.DraftResult) -> Tensor:
    """bool ``[N, S]``: the places of the cache whose contents are defined."""
    slots = problem.batch.slot_matrix()
    kept = torch.zeros(problem.num_slots, problem.batch.steps, dtype=torch.bool)
    row, step = (slots >= 0).nonzero(as_tuple=True)
    kept[slots[row, step], step] = True if result.lengths is None else step < result.lengths[row]
    return kept


def assert_same(problem: Problem, got: Any, want: Any) -> None:
    (result, cache), (expected, expected_cache) = got, want
    assert torch.equal(result.tokens, expected.tokens)
    assert torch.equal(result.nonfinite, expected.nonfinite)
    for name in ("confidence", "lengths"):
        one, other = getattr(result, name), getattr(expected, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other), name
    head = problem.head
    kept = drafted(problem, expected)
    if head.confidence is None or not head.confidence.with_markov:
        kept[:] = True
    assert torch.equal(cache[kept], expected_cache[kept])


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "strong bias": {"bias_std": 12.0, "temperature": "greedy"},
    "padding steps, mixed": {"slots": "padded-steps", "temperature": "mixed"},
    "padding rows, reduced": {"slots": "padded", "draft_vocab": 300, "bias_std": 6.0},
    "step-major, fp32 cache": {"strides": "step-major", "cache_dtype": torch.float32},
}
CONFIDENCES = (
    {},
    {"confidence": "hidden"},
    {"confidence": "markov"},
    {"confidence": "hidden", "min_confidence": 0.5},
    {"confidence": "markov", "min_confidence": 0.5},
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_cpu_engine_equals_the_reference(
    variant: str | None, dtype: torch.dtype, shape: str
) -> None:
    for heads in CONFIDENCES:
        problem = make_problem(7, 5, 700, 24, dtype=dtype, **SHAPES[shape])
        problem = with_heads(problem, variant=variant, **heads)  # type: ignore[arg-type]
        assert_same(problem, run(problem, "cpu"), run(problem, "reference"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bad_guesses_cost_passes_only(variant: str) -> None:
    problem = make_problem(4, 5, 2000, 16, bias_std=40.0, base_std=0.2)
    problem = with_heads(problem, variant=variant)
    got = run(problem, "cpu")
    assert got[0].passes > 1
    assert_same(problem, got, run(problem, "reference"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_successors_are_only_candidates(variant: str) -> None:
    problem = with_heads(make_problem(4, 5, 900, 16, bias_std=8.0), variant=variant)
    head = problem.head
    known = find_successors(fm.MarkovHead(head.w1, head.w2), 20)
    head = fm.MarkovHead(head.w1, head.w2, variant=head.variant, successors=known)
    assert_same(problem, run(replace(problem, head=head), "cpu"), run(problem, "reference"))


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_alone_and_in_company(engine: str, variant: str) -> None:
    problem = make_problem(21, 4, 500, 40, temperature="mixed", dtype=torch.float32)
    problem = with_heads(problem, variant=variant, confidence="markov", min_confidence=0.4)
    result, cache = run(problem, engine)
    fields = ("base_logits", "anchors", "positions", "temperature", "seeds", "hidden")
    for row in (0, 7, 20):
        parts = {n: getattr(problem.batch, n)[row : row + 1].clone() for n in fields}
        limit = problem.batch.min_confidence
        assert limit is not None
        batch = fm.DraftBatch(**parts, min_confidence=limit[row : row + 1])
        alone = replace(problem, batch=batch, num_slots=1)
        solo, solo_cache = run(alone, engine)
        for name in ("tokens", "confidence", "lengths"):
            assert torch.equal(getattr(solo, name)[0], getattr(result, name)[row])
        kept = drafted(alone, solo)[0]
        assert torch.equal(solo_cache[0][kept], cache[row][kept])


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_confidence_is_vllms(engine: str) -> None:
    """sigmoid of an fp32 linear layer over [hidden; W1[prev]], as ``DSparkConfidenceHead``."""
    problem = with_heads(make_problem(5, 4, 90, 16), variant="gated", confidence="markov")
    head, batch = problem.head, problem.batch
    result, _ = run(problem, engine)
    assert head.confidence is not None
    assert batch.hidden is not None
    proj = nn.Linear(40, 1)
    proj.weight.data, proj.bias.data = head.confidence.weight[None], head.confidence.bias[None]
    prev = torch.cat([batch.anchors[:, None], result.tokens[:, :-1]], 1)
    x = torch.cat([batch.hidden, head.w1[prev]], dim=-1).float()
    torch.testing.assert_close(result.confidence, torch.sigmoid(proj(x)).squeeze(-1))


def test_a_draft_ends_before_its_first_low_step() -> None:
    """By hand: step confidences are chosen, and the slots ask for different ones."""
    logit = torch.tensor([[3.0, 2.0, -1.0, 4.0], [3.0, 2.0, -1.0, 4.0], [-9.0, 9.0, 9.0, 9.0]])
    head = fm.ConfidenceHead(torch.tensor([1.0]), torch.tensor(0.0), False)
    problem = make_problem(3, 4, 50, 8)
    markov = fm.MarkovHead(problem.head.w1, problem.head.w2, confidence=head)
    limits = torch.tensor([0.5, 0.0, 0.01])
    batch = replace(problem.batch, hidden=logit[:, :, None], min_confidence=limits)
    problem = replace(problem, head=markov, batch=batch)
    free = replace(problem, batch=replace(batch, min_confidence=None))
    for engine in ("cpu", "reference"):
        result, cache = run(problem, engine)
        assert result.lengths is not None
        assert result.lengths.tolist() == [2, 4, 0]
        whole, _ = run(free, engine)
        assert whole.lengths is None
        kept = torch.arange(4) < result.lengths[:, None]
        assert torch.equal(result.tokens, torch.where(kept, whole.tokens, 0))
        assert torch.equal(cache[~kept], problem.new_cache()[~kept])  # untouched
        assert result.confidence is not None
        want = torch.where(torch.arange(4) <= result.lengths[:, None], torch.sigmoid(logit), 0.0)
        torch.testing.assert_close(result.confidence, want)


class World:
    """A target of order one, and a drafter with a variant that half knows it."""

    vocab, steps, wanted = 5, 3, 3

    def __init__(self, variant: str, *, limit: float = 0.0) -> None:
        gen = torch.Generator().manual_seed(5)
        self.target = torch.randn(self.vocab, self.vocab, generator=gen) * 1.5
        self.base = torch.randn(self.steps, self.vocab, generator=gen)
        self.hidden = torch.randn(self.steps, 6, generator=gen)
        w1 = torch.eye(self.vocab)
        w2 = (self.target + torch.randn(self.vocab, self.vocab, generator=gen)).T.contiguous()
        r = self.vocab
        if variant == "gated":
            layer = torch.randn(r, 6 + r, generator=gen)
            made: Any = fm.GatedVariant(layer, layer[:, 0])
        else:
            layer = torch.randn(3 * r, 2 * r + 6, generator=gen)
            made = fm.RnnVariant(layer, layer[:, 0])
        confidence = fm.ConfidenceHead(torch.randn(6 + r, generator=gen), torch.tensor(0.0), True)
        self.head = fm.MarkovHead(w1, w2, variant=made, confidence=confidence)
        self.limit, self.lengths = limit, torch.zeros(self.steps + 1, dtype=torch.int64)

    def decode(self, rows: int, engine: str, *, checked: bool = True) -> Tensor:
        sampler = fm.DraftSampler(self.head, max_rows=rows, steps=self.steps, engine=engine)
        cache = torch.empty(rows, self.steps, self.vocab)
        seeds, temps = torch.arange(rows) * 7919 + 3, torch.ones(rows)
        anchors, lengths = torch.ones(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        out = torch.full((rows, self.wanted + self.steps + 1), -1)
        every = torch.arange(rows)
        while int(lengths.min()) < self.wanted:
            positions = 1 + lengths[:, None] + torch.arange(self.steps + 1)
            batch = fm.DraftBatch(
                self.base.expand(rows, -1, -1),
                anchors,
                positions[:, : self.steps],
                temps,
                seeds,
                hidden=self.hidden.expand(rows, -1, -1),
                min_confidence=torch.full((rows,), self.limit),
            )
            result = sampler.sample(batch, cache)
            assert result.lengths is not None
            drafts, drafted = result.tokens, result.lengths
            self.lengths += drafted.bincount(minlength=self.steps + 1)
            logits = self.target[torch.cat([anchors[:, None], drafts], 1)]
            accepted, last = drafted.clone(), torch.zeros_like(anchors)
            for n in drafted.unique().tolist():  # drafts of a length are verified together
                i = (drafted == n).nonzero().squeeze(1)
                verdict = verify(
                    logits[i, : n + 1],
                    drafts[i, :n],
                    cache[i, :n],
                    temps[i],
                    seeds[i],
                    positions[i, : n + 1],
                )
                last[i] = verdict.tokens
                if checked:
                    accepted[i] = verdict.accepted
            for step in range(self.steps + 1):
                token = drafts[:, step] if step < self.steps else last
                token = torch.where(step < accepted, token, last)
                live = (step <= accepted) & (lengths + step < out.shape[1])
                out[every[live], (lengths + step)[live]] = token[live]
            lengths, anchors = lengths + accepted + 1, last
        return out[:, : self.wanted]

    def p_value(self, samples: Tensor) -> float:
        law = torch.softmax(self.target.double(), -1)
        chains = itertools.product(range(self.vocab), repeat=self.wanted)
        want = torch.stack([law[1, a] * law[a, b] * law[b, c] for a, b, c in chains])
        want = want * len(samples)
        code = (samples * torch.tensor([self.vocab**2, self.vocab, 1])).sum(1)
        counts = torch.bincount(code, minlength=self.vocab**self.wanted).double()
        common = want >= 10
        seen = torch.cat([counts[common], counts[~common].sum()[None]])
        want = torch.cat([want[common], want[~common].sum()[None]])
        return float(scipy.stats.chisquare(seen.numpy(), want.numpy()).pvalue)


@pytest.mark.parametrize(("engine", "rows"), [("reference", 20_000), ("cpu", 2500)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_law_is_the_targets(variant: str, engine: str, rows: int) -> None:
    world = World(variant)
    assert world.p_value(world.decode(rows, engine)) > NEVER


@pytest.mark.parametrize("variant", VARIANTS)
def test_law_is_the_targets_where_drafts_are_cut(variant: str) -> None:
    world = World(variant, limit=0.4)
    assert world.p_value(world.decode(20_000, "reference")) > NEVER
    assert int((world.lengths > 1000).sum()) > 1  # of several lengths


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_test_notices_a_wrong_law(variant: str) -> None:
    world = World(variant)
    assert world.p_value(world.decode(20_000, "reference", checked=False)) < NEVER


NAMES = {"gated": "gate_proj", "rnn": "joint_proj"}


def save(path: Path, variant: str | None, config: dict[str, Any], prefix: str = "") -> Problem:
    path.mkdir()
    problem = make_problem(1, 1, 40, 8)
    problem = with_heads(problem, variant=variant, confidence="markov", hidden_size=16)
    head = problem.head
    assert head.confidence is not None
    tensors = {
        "markov_head.markov_w1.weight": head.w1,
        "markov_head.markov_w2.weight": head.w2,
        "confidence_head.proj.weight": head.confidence.weight[None],
        "confidence_head.proj.bias": head.confidence.bias[None],
    }
    if head.variant is not None:
        columns = [head.variant.hidden_weight, head.variant.mix_weight]
        columns = columns if variant == "gated" else columns[::-1]
        layer = f"markov_head.{NAMES[head.variant.kind]}"
        tensors |= {f"{layer}.weight": torch.cat(columns, 1), f"{layer}.bias": head.variant.bias}
    save_file({prefix + n: t.clone() for n, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"hidden_size": 16, **config}))
    return problem


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_checkpoints(tmp_path: Path, variant: str | None, prefix: str) -> None:
    config = {"markov_head_type": variant or "vanilla", "confidence_head_with_markov": True}
    problem = save(tmp_path / "a", variant, config, prefix)
    head = load_markov_head(tmp_path / "a", confidence=True)
    batch = problem.batch
    got, want = (reference.sample(h, batch) for h in (head, problem.head))
    assert torch.equal(got.tokens, want.tokens)
    assert got.confidence is not None
    assert want.confidence is not None
    assert torch.equal(got.confidence, want.confidence)
    assert (head.variant.kind if head.variant else None) == variant
    assert load_markov_head(tmp_path / "a").confidence is None
    assert load_markov_head(tmp_path / "a", dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("variant", "kind", "message"),
    [
        ("gated", "rnn", "rnn Markov head.*joint_proj.*gate_proj"),
        (None, "gated", "gated Markov head.*gate_proj.*none"),
        ("rnn", "vanilla", "vanilla Markov head.*no further layer.*joint_proj"),
        ("gated", "mamba", "expected vanilla, gated or rnn, got 'mamba'"),
    ],
)
def test_a_kind_that_the_tensors_do_not_bear_out(
    tmp_path: Path, variant: str | None, kind: str, message: str
) -> None:
    save(tmp_path / "a", variant, {"markov_head_type": kind})
    with pytest.raises(fm.CheckpointError, match=message):
        load_markov_head(tmp_path / "a")


def test_errors() -> None:
    problem = with_heads(make_problem(2, 3, 40, 8), variant="gated", confidence="hidden")
    head, batch = problem.head, problem.batch
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"hidden": None}, "hidden: expected .*24.* got None"),
        ({"hidden": torch.zeros(2, 3, 23)}, r"hidden: expected shape \[2, 3, 24\]"),
        ({"hidden": torch.zeros(2, 3, 24).long()}, "hidden: expected fp32"),
        ({"min_confidence": torch.zeros(2).long()}, "min_confidence: expected a float"),
        ({"min_confidence": torch.zeros(1)}, "slots: expected given"),
    ]
    for fields, message in wrong:
        with pytest.raises(fm.ArgumentError, match=message):
            reference.sample(head, replace(batch, **fields))
    with pytest.raises(fm.ArgumentError, match="None without a confidence head"):
        reference.sample(
            fm.MarkovHead(head.w1, head.w2), replace(batch, min_confidence=torch.zeros(2))
        )
    layer = torch.zeros(8, 32)
    with pytest.raises(fm.ArgumentError, match=r"variant: .*float32 where w1 is"):
        fm.MarkovHead(head.w1, head.w2, variant=fm.GatedVariant(layer, layer[:, 0]))
    with pytest.raises(fm.ArgumentError, match="as the variant's"):
        fm.MarkovHead(
            head.w1,
            head.w2,
            variant=head.variant,
            confidence=fm.ConfidenceHead(torch.zeros(23), torch.zeros(()), False),
        )
    with pytest.raises(fm.ArgumentError, match="weight: expected shape"):
        fm.RnnVariant(layer, layer[:, 0])
    with pytest.raises(fm.ArgumentError, match="weight: expected fp32"):
        fm.ConfidenceHead(torch.zeros(23).half(), torch.zeros(()), False)
